//! Bad input through the real program: each mistake has its exit code and a message that says what is wrong,
//! where, and how to mend it, as text and as JSON, and leaves the folder as it was.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const BLOOM: &str = include_str!("../examples/bloom.ron");
const GPT2: &str = include_str!("../examples/gpt2-124m.ron");
const CLUSTER: &str = include_str!("../hardware-profiles/clusters/dgx-a100-80gb.ron");
const STACK: &str = include_str!("../hardware-profiles/stacks/planwright.ron");

/// The command line of a sound search for `BLOOM`, the ground on which most rows make one mistake.
const SEARCH: &str = "--model model.ron --gpus 384 --node-gpus 8";
/// A quick sound search for `GPT2`.
const SMALL: &str = "--model model.ron --gpus 8 --node-gpus 8 --tensor-parallel 2 --pipeline-parallel 2";
/// Files up to this size are compared byte by byte.
const COMPARED: u64 = 1 << 20;

const NO_PLAN_FITS: i32 = 1;
const BAD_INPUT: i32 = 2;
const VERIFICATION_FAILED: i32 = 3;

/// What lies in the folder before the program runs.
enum Entry {
    Text(String),
    Bytes(Vec<u8>),
    /// A file of so many zeros that takes no space.
    Sparse(u64),
    Folder,
}

fn folder(entries: &[(&str, Entry)]) -> TempDir {
    let folder = TempDir::new().expect("a scratch folder");
    for (name, entry) in entries {
        let path = folder.path().join(name);
        match entry {
            Entry::Text(text) => fs::write(path, text),
            Entry::Bytes(bytes) => fs::write(path, bytes),
            Entry::Sparse(size) => File::create(path).and_then(|file| file.set_len(*size)),
            Entry::Folder => fs::create_dir(path),
        }
        .expect("the scratch folder is writable");
    }
    folder
}

fn text(name: &str, content: &str) -> (&'static str, Entry) {
    // Names are few and live as long as the test.
    (name.to_owned().leak(), Entry::Text(content.to_owned()))
}

/// The text with one place changed.
fn edited(base: &str, from: &str, to: &str) -> String {
    assert!(base.contains(from), "the base no longer holds `{from}`");
    base.replacen(from, to, 1)
}

/// The text with the first number after `mark` changed.
fn renumbered(base: &str, mark: &str, number: &str) -> String {
    let after = base.find(mark).expect("the plan has the field") + mark.len();
    let start = after + base[after..].find(|c: char| c.is_ascii_digit()).expect("a number follows");
    let end = start + base[start..].find(|c: char| !c.is_ascii_digit() && c != '.').expect("the number ends");
    format!("{}{number}{}", &base[..start], &base[end..])
}

fn run(folder: &Path, arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plan"))
        .current_dir(folder)
        .args(arguments.split_whitespace())
        .output()
        .expect("the program starts")
}

/// Names in a folder with their sizes, and the bytes of small files.
fn listing(folder: &Path) -> BTreeMap<String, (u64, Vec<u8>)> {
    let entries = fs::read_dir(folder).expect("readable").map(|entry| entry.expect("readable"));
    let described = entries.map(|entry| {
        let size = entry.metadata().expect("readable").len();
        let small = entry.path().is_file() && size <= COMPARED;
        let bytes = if small { fs::read(entry.path()).expect("readable") } else { Vec::new() };
        (entry.file_name().to_string_lossy().into_owned(), (size, bytes))
    });
    described.collect()
}

/// Runs the arguments twice, the second time with `--json`: both end with `code`, say the same in all three
/// parts, and leave the folder as it was. Each of `pieces` stands in the text.
fn check(name: &str, folder: &Path, arguments: &str, code: i32, pieces: &[&str]) {
    let before = listing(folder);
    let output = run(folder, arguments);
    let stderr = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert_eq!(output.status.code(), Some(code), "{name}: exit code; stderr:\n{stderr}");
    assert!(output.stdout.is_empty(), "{name}: stdout is not empty");
    assert!(!stderr.contains("panicked"), "{name}: {stderr}");
    for piece in ["error: ", "\n  --> ", "\n  help: "].iter().chain(pieces) {
        assert!(stderr.contains(piece), "{name}: `{piece}` is not in\n{stderr}");
    }

    let output = run(folder, &format!("{arguments} --json"));
    let stdout = String::from_utf8(output.stdout).expect("JSON is UTF-8");
    assert!(output.stderr.is_empty(), "{name} --json: stderr is not empty");
    assert_eq!(output.status.code(), Some(code), "{name} --json: exit code; stdout:\n{stdout}");
    let value: Value = serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{name} --json: {error}: {stdout}"));
    let part = |key: &str| value["error"][key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let [what, place, help] =
        ["what", "where", "help"].map(|key| part(key).unwrap_or_else(|| panic!("{name} --json: {key} in {stdout}")));
    let same = format!("error: {what}\n  --> {place}\n  help: {help}\n");
    assert!(stderr.starts_with(&same), "{name}: JSON says\n{same}text says\n{stderr}");
    assert_eq!(listing(folder), before, "{name}: the folder changed");
}

fn accept(name: &str, folder: &Path, arguments: &str) {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Rows of one changed place in a base text: name, from, to, pieces of the message.
type Edit<'a> = (&'a str, &'a str, &'a str, &'a [&'a str]);

#[test]
fn mistakes_in_a_model_file() {
    let rows: &[Edit] = &[
        (
            "unknown field",
            "num_layers:",
            "num_layer:",
            &["field named `num_layer`", "`num_layers`", "--> model.ron, line 4, column 3", "mend its spelling"],
        ),
        (
            "batch without unit",
            "Sequences(2048)",
            "2048",
            &["a unit, found `2048`", "line 17", "Tokens(2048) or Sequences(2048)"],
        ),
        (
            "length without unit",
            "  sequence_length: Tokens(2048)",
            "  sequence_length: 2048",
            &["a unit, found `2048`", "line 16", "Tokens(2048)"],
        ),
        (
            "wrong unit",
            "Sequences(2048)",
            "Samples(2048)",
            &["`Samples`", "`Sequences` or `Tokens`", "use one of the names listed"],
        ),
        (
            "negative size",
            "hidden_size: 14336",
            "hidden_size: -14336",
            &["`-14336` is out of bounds", "model.ron, line 5", "whole numbers from 1"],
        ),
        (
            "zero size",
            "hidden_size: 14336",
            "hidden_size: 0",
            &["hidden_size is 0", "model.ron, field hidden_size", "from 1 to"],
        ),
        ("no layers", "num_layers: 70", "num_layers: 0", &["num_layers is 0", "field num_layers", "from 1 to"]),
        (
            "fractional size",
            "hidden_size: 14336",
            "hidden_size: 14336.5",
            &["`14336.5` is no whole number", "model.ron, line 5", "without a fraction"],
        ),
        (
            "heads that do not divide the width",
            "num_attention_heads: 112",
            "num_attention_heads: 110",
            &["110 does not divide hidden_size 14336", "field num_attention_heads", "head_dim"],
        ),
        (
            "2^40 layers",
            "num_layers: 70",
            "num_layers: 1099511627776",
            &["num_layers is 1099511627776", "field num_layers", "from 1 to 4096"],
        ),
        (
            "2^64 layers",
            "num_layers: 70",
            "num_layers: 18446744073709551616",
            &["`18446744073709551616` is out of bounds", "line 4", "2^63"],
        ),
        (
            "more parameters than numbers hold",
            "intermediate_size: 57344",
            "intermediate_size: 268435456",
            &["more than 281474976710656 parameters", "field hidden_size", "lower num_layers"],
        ),
        (
            "parameters that the source contradicts",
            "176247271424",
            "176247271425",
            &["describes 176247271424 parameters but says 176247271425", "field published_parameters", "leave"],
        ),
        ("no epsilon", "1e-5", "0.0", &["norm_epsilon is 0", "field norm_epsilon", "finite number above 0"]),
        ("epsilon that is no number", "1e-5", "NaN", &["norm_epsilon is NaN", "field norm_epsilon", "finite"]),
        (
            "rotary base without rotary positions",
            "position: Alibi,",
            "position: Alibi,\n  rotary_base: 500000,",
            &["rotary_base is 500000 but position is Alibi", "field rotary_base", "leave the field out"],
        ),
        (
            "rotary scaling without rotary positions",
            "position: Alibi,",
            "position: Alibi,\n  rotary_scaling: Linear(factor: 4),",
            &["rotary_scaling is given but position is Alibi", "field rotary_scaling", "leave the field out"],
        ),
        (
            "rotary scaling that scales nothing in part",
            "position: Alibi,",
            "position: Rotary,\n  rotary_scaling: Llama3(factor: 8, low_frequency_factor: 4, \
             high_frequency_factor: 4, original_length: 0),",
            &["low_frequency_factor 4 is not below high_frequency_factor 4", "original_length is 0", "raise the other"],
        ),
        (
            "unknown deviation",
            "embedding_norm: true,",
            "embedding_norm: true,\n  deviations: [Window],",
            &["`Window`", "`SlidingWindow`", "names listed"],
        ),
        (
            "duplicate field",
            "num_layers: 70,",
            "num_layers: 70,\n  num_layers: 70,",
            &["`num_layers` is given twice", "line 5", "keep one of the two"],
        ),
        (
            "missing field",
            "  hidden_size: 14336,\n",
            "",
            &["the field `hidden_size` is missing", "model.ron, line", "add the field"],
        ),
        ("number for a text", "\"bloom-176b\"", "5", &["string, found `5`", "line 2", "double quotes"]),
        ("text for a number", "num_layers: 70", "num_layers: \"70\"", &["integer, found `\"`", "line 4", "quotes"]),
        ("number for a choice", "embedding_norm: true", "embedding_norm: 1", &["boolean, found `1`", "true or false"]),
        ("unknown choice", "bias: All", "bias: Some", &["`Some`", "`QueryKeyValue`", "line 10", "names listed"]),
        ("missing comma", "num_layers: 70,", "num_layers: 70", &["comma", "line 5", "end each field with a comma"]),
        ("name with a slash", "bloom-176b", "../bloom", &["../bloom", "field name", "letters, digits"]),
        ("text after the end", "176247271424,\n)", "176247271424,\n) x", &["text after the end", "line 20", "remove"]),
        ("cut short", "176247271424,\n)", "", &["ends too early", "line 19", "cut short"]),
    ];
    for (name, from, to, pieces) in rows {
        let folder = folder(&[text("model.ron", &edited(BLOOM, from, to))]);
        check(name, folder.path(), SEARCH, BAD_INPUT, pieces);
    }
}

#[test]
fn every_problem_of_a_model_file_is_reported() {
    let model = edited(&edited(BLOOM, "num_layers: 70", "num_layers: 0"), "size: 250680", "size: 0");
    let folder = folder(&[text("model.ron", &model)]);
    check("two zeros", folder.path(), SEARCH, BAD_INPUT, &["num_layers is 0", "vocabulary.size is 0"]);
}

#[test]
fn unusual_model_files_are_accepted() {
    let odd_heads = edited(BLOOM, "num_attention_heads: 112", "num_attention_heads: 110, head_dim: 128");
    let rows = [
        ("heads with their own width", edited(&odd_heads, "  published_parameters: 176247271424,\n", "")),
        ("byte order mark", format!("\u{feff}{BLOOM}")),
    ];
    for (name, model) in rows {
        let folder = folder(&[text("model.ron", &model)]);
        accept(name, folder.path(), &format!("{SEARCH} --dry-run"));
        assert_eq!(listing(folder.path()).len(), 1, "{name}: a dry run wrote something");
    }
}

#[test]
fn files_that_are_no_model() {
    let rows: Vec<(&str, Entry, &[&str])> = vec![
        ("empty", Entry::Text(String::new()), &["the file is empty", "--> model.ron\n", "examples/"]),
        ("white space", Entry::Text(" \n\t ".to_owned()), &["the file is empty", "--> model.ron\n", "examples/"]),
        ("a directory", Entry::Folder, &["this is a directory", "--> model.ron\n", "name a file in it"]),
        ("1 GB", Entry::Sparse(1_000_000_000), &["larger than 1024 KiB", "--> model.ron\n", "not weights"]),
        ("not UTF-8", Entry::Bytes(b"(\n  name: \"\xff\"".to_vec()), &["not UTF-8", "model.ron, byte 11", "save it"]),
        ("another format", Entry::Text("name: bloom\nlayers: 70\n".to_owned()), &["`name`", "line 1", "examples/"]),
        ("deep (", Entry::Text("(".repeat(100_000)), &["found `(`", "model.ron, line 1"]),
        ("deep [", Entry::Text("[".repeat(100_000)), &["opening `(`", "model.ron, line 1", "examples/"]),
        ("deep {", Entry::Text("{".repeat(100_000)), &["model.ron, line 1"]),
        ("deep comment", Entry::Text("/*".repeat(100_000)), &["comment", "model.ron, line 1"]),
        ("deep field", Entry::Text(edited(BLOOM, "\"bloom-176b\"", &"(".repeat(100_000))), &["found `(`", "line 2"]),
        ("deep option", Entry::Text(edited(BLOOM, "176247271424", &"Some(".repeat(100_000))), &["line 19"]),
    ];
    for (name, entry, pieces) in rows {
        let folder = folder(&[("model.ron", entry)]);
        check(name, folder.path(), SEARCH, BAD_INPUT, pieces);
    }
    check(
        "missing file",
        folder(&[]).path(),
        SEARCH,
        BAD_INPUT,
        &["No such file", "--> model.ron\n", "check the path"],
    );
}

#[test]
fn mistakes_in_a_cluster_file() {
    let rows: &[Edit] = &[
        (
            "bandwidth without unit",
            "GBPerSecond(300)",
            "300",
            &["found `300`", "cluster.ron, line 8", "carries its unit"],
        ),
        ("latency without unit", "Micros(39)", "39", &["found `39`", "cluster.ron, line 10", "Micros(10)"]),
        ("unit of another quantity", "GBPerSecond(300)", "GiB(300)", &["`GiB`", "`GBPerSecond`", "line 8"]),
        (
            "NaN bandwidth",
            "GBPerSecond(300)",
            "GBPerSecond(NaN)",
            &["NaN is out of bounds", "cluster.ron, line 8", "finite"],
        ),
        (
            "inf bandwidth",
            "GBPerSecond(300)",
            "GBPerSecond(inf)",
            &["inf is out of bounds", "cluster.ron, line 8", "finite"],
        ),
        ("negative bandwidth", "GBPerSecond(300)", "GBPerSecond(-300)", &["-300.0 is out of bounds", "line 8"]),
        (
            "no bandwidth",
            "GBPerSecond(300)",
            "GBPerSecond(0)",
            &["is 0\n", "cluster.ron, field intra.bandwidth_per_gpu_per_direction", "positive"],
        ),
        ("NaN latency", "Micros(39)", "Micros(NaN)", &["NaN is out of bounds", "cluster.ron, line 10"]),
        ("NaN efficiency", "0.7645", "NaN", &["intra.efficiency is NaN", "cluster.ron, field intra.efficiency"]),
        ("no GPUs in a node", "node_gpus: 8", "node_gpus: 0", &["node_gpus is 0", "cluster.ron, field node_gpus"]),
        (
            "number without source",
            ", \"NVIDIA DGX A100 data sheet: ConnectX-6, 200 Gb/s\")",
            ")",
            &["2 elements", "source"],
        ),
        (
            "unknown device",
            "a100-sxm-80gb",
            "a100-smx-80gb",
            &["`a100-smx-80gb`", "cluster.ron, field device", "a100-sxm-80gb"],
        ),
    ];
    for (name, from, to, pieces) in rows {
        let folder = folder(&[text("model.ron", BLOOM), text("cluster.ron", &edited(CLUSTER, from, to))]);
        check(name, folder.path(), &format!("{SEARCH} --cluster cluster.ron"), BAD_INPUT, pieces);
    }
}

#[test]
fn mistakes_in_a_stack_file() {
    let fields = [
        ("matmul_speed: Assumed(1.0", "kernels.matmul_speed"),
        ("gradient_reduction: Assumed(0.8", "overlap.gradient_reduction"),
        ("parameter_gather: Assumed(0.8", "overlap.parameter_gather"),
        ("allocator_slack: Assumed(0.05", "memory.allocator_slack"),
        ("safety_margin: Assumed(0.06", "memory.safety_margin"),
        ("relative_error_90: Assumed(0.15", "relative_error_90"),
    ];
    for (from, field) in fields {
        let start = &from[..from.rfind('(').expect("a bracket") + 1];
        for number in ["NaN", "inf", "-1"] {
            let stack = edited(STACK, from, &format!("{start}{number}"));
            let folder = folder(&[text("model.ron", BLOOM), text("stack.ron", &stack)]);
            let pieces = [&format!("{field} is {number}"), &format!("stack.ron, field {field}"), "give a"];
            check(field, folder.path(), &format!("{SEARCH} --stack stack.ron"), BAD_INPUT, &pieces);
        }
    }
    let rows: &[Edit] = &[
        ("NaN time", "Millis(100)", "Millis(NaN)", &["NaN is out of bounds", "stack.ron, line"]),
        ("no ZeRO stages", "zero_stages: [0, 1, 2, 3]", "zero_stages: []", &["is empty", "field offers.zero_stages"]),
        ("ZeRO stage 4", "zero_stages: [0, 1, 2, 3]", "zero_stages: [0, 4]", &["ZeRO stage 4 is not 0, 1, 2 or 3"]),
        (
            "2^64 - 1 bytes of state",
            "bf16: Datasheet(12",
            "bf16: Datasheet(18446744073709551615",
            &["field memory.optimizer_bytes.bf16", "from 0 to 64"],
        ),
    ];
    for (name, from, to, pieces) in rows {
        let folder = folder(&[text("model.ron", BLOOM), text("stack.ron", &edited(STACK, from, to))]);
        check(name, folder.path(), &format!("{SEARCH} --stack stack.ron"), BAD_INPUT, pieces);
    }
}

/// Rows of a whole command line: name, arguments, pieces of the message.
type Line<'a> = (&'a str, &'a str, &'a [&'a str]);

#[test]
fn mistakes_in_the_world() {
    let rows: &[Line] = &[
        (
            "part of a node",
            "--gpus 384 --node-gpus 7",
            &["7 does not divide gpus 384", "--> --node-gpus", "378 or 385"],
        ),
        ("half a node", "--gpus 4 --node-gpus 8", &["8 does not divide gpus 4", "--> --node-gpus", "give 8 GPUs"]),
        ("no GPUs", "--gpus 0 --node-gpus 8", &["gpus is 0", "--> --gpus", "give 1 to"]),
        ("empty nodes", "--gpus 384 --node-gpus 0", &["node-gpus is 0", "--> --node-gpus", "at least 1"]),
        ("negative GPUs", "--gpus -8 --node-gpus 8", &["'-8' for '--gpus <N|A..B>'", "--> --gpus", "a whole number"]),
        ("GPUs in words", "--gpus abc --node-gpus 8", &["'abc' for '--gpus <N|A..B>'", "--> --gpus", "a whole number"]),
        ("2^64 GPUs", "--gpus 18446744073709551616 --node-gpus 8", &["--> --gpus", "18446744073709551615"]),
        ("GPUs left out", "--node-gpus 8", &["required", "--> --gpus <N|A..B>", "plan --help"]),
        (
            "misspelt cluster",
            "--gpus 384 --node-gpus 8 --cluster dgx-a100-80bg",
            &["no cluster `dgx-a100-80bg`", "--> --cluster", "nearest names: dgx-a100-80gb, dgx-a100-40gb"],
        ),
        (
            "misspelt stack",
            "--gpus 384 --node-gpus 8 --stack megatron-dpeedspeed-2022",
            &["no stack `megatron-dpeedspeed-2022`", "--> --stack", "nearest names: megatron-deepspeed-2022"],
        ),
        ("missing cluster file", "--gpus 384 --node-gpus 8 --cluster c.ron", &["No such file", "--> c.ron", "check"]),
        (
            "nodes that the cluster lacks",
            "--gpus 384 --node-gpus 4 --cluster jean-zay-a100-80gb",
            &["nodes of 8 GPUs that share 4 network cards, not 4", "--> --node-gpus", "give --node-gpus 8"],
        ),
        (
            "bf16 on V100",
            "--gpus 384 --node-gpus 4 --cluster jean-zay-v100",
            &["has no BF16", "model.ron, field dtype", "FP16 on V100"],
        ),
    ];
    let folder = folder(&[text("model.ron", BLOOM)]);
    for (name, arguments, pieces) in rows {
        check(name, folder.path(), &format!("--model model.ron {arguments}"), BAD_INPUT, pieces);
    }
}

#[test]
fn mistakes_in_sweeps_objectives_and_trainings() {
    let rows: &[Line] = &[
        ("reversed range", "--gpus 64..8", &["64..8 is reversed", "--> --gpus 64..8", "give 8..64"]),
        ("range between two nodes", "--gpus 9..15", &["no multiple of node-gpus 8", "--> --gpus 9..15", "give 8..16"]),
        ("range below a node", "--gpus 1..7", &["no multiple of node-gpus 8", "--> --gpus 1..7", "give 8..8"]),
        ("range from 0", "--gpus 0..16", &["0..16 is not within", "--> --gpus 0..16", "give 1 to 1048576"]),
        ("endless range", "--gpus 8..2000000", &["8..2000000 is not within", "--> --gpus", "give 1 to 1048576"]),
        ("range without end", "--gpus 8..", &["'8..' for '--gpus <N|A..B>'", "--> --gpus", "a whole number"]),
        ("range in words", "--gpus 8..many", &["'8..many'", "--> --gpus", "a whole number"]),
        ("range of three", "--gpus 8..16..32", &["'8..16..32'", "--> --gpus", "a whole number"]),
        (
            "plan file of a sweep",
            "--gpus 8..16 --out a.plan.ron",
            &["writes no plan", "--> --out a.plan.ron", "leave out"],
        ),
        (
            "a degree that no number of the range can have",
            "--gpus 8..32 --tensor-parallel 5",
            &["cannot make up 8 GPUs", "--> --tensor-parallel 5"],
        ),
        ("unknown objective", "--gpus 8 --objective fast", &["'fast'", "tokens-per-gpu-hour", "--> --objective"]),
        (
            "cost without a price",
            "--gpus 8 --objective cost --cluster jean-zay-a100-80gb",
            &["jean-zay-a100-80gb has no price_per_gpu_hour", "--> --objective cost", "price_per_gpu_hour: Assumed("],
        ),
        (
            "energy without a power",
            "--gpus 8..16 --objective energy --cluster cpu-host",
            &["cpu-core has no board_power", "--> --objective energy", "board_power: Assumed("],
        ),
        ("no tokens", "--gpus 8 --tokens 0", &["at least 1 token", "--> --tokens", "plan --help"]),
        ("negative tokens", "--gpus 8 --tokens -3", &["'-3'", "300B", "--> --tokens"]),
        ("unknown suffix", "--gpus 8 --tokens 3G", &["'3G'", "suffixes K, M, B, T", "--> --tokens"]),
        ("part of a token", "--gpus 8 --tokens 1.5", &["1.5 is no whole number of tokens", "--> --tokens"]),
        ("too many tokens", "--gpus 8 --tokens 99999999T", &["more than 18446744073709551615", "--> --tokens"]),
    ];
    let folder = folder(&[text("model.ron", GPT2)]);
    for (name, arguments, pieces) in rows {
        check(name, folder.path(), &format!("--model model.ron --node-gpus 8 {arguments}"), BAD_INPUT, pieces);
    }
}

#[test]
fn mistakes_in_prices_powers_and_failures() {
    let rows: &[Edit] = &[
        ("free GPUs", "UsDollars(1.3)", "UsDollars(0)", &["price_per_gpu_hour is 0", "field price_per_gpu_hour"]),
        ("price without unit", "UsDollars(1.3)", "1.3", &["a unit, found `1.3`", "--> cluster.ron, line"]),
        ("GPUs that never run", "Hours(44800)", "Hours(0)", &["field reliability.mean_time_between_failures_per_gpu"]),
        ("no storage", "GBPerSecond(1.2)", "GBPerSecond(0)", &["field reliability.checkpoint_write_per_node"]),
        ("restart before the failure", "Minutes(11)", "Minutes(-11)", &["-11", "out of bounds"]),
    ];
    for (name, from, to, pieces) in rows {
        let folder = folder(&[text("model.ron", GPT2), text("cluster.ron", &edited(CLUSTER, from, to))]);
        check(name, folder.path(), &format!("{SMALL} --cluster cluster.ron"), BAD_INPUT, pieces);
    }
}

#[test]
fn mistakes_in_fixed_choices() {
    let rows: &[Line] = &[
        (
            "degrees whose product does not divide",
            "--tensor-parallel 8 --pipeline-parallel 9",
            &["cannot make up 384 GPUs", "--> --tensor-parallel 8 --pipeline-parallel 9", "divisors of 384: 1, 2, 3"],
        ),
        (
            "degrees whose product is too small",
            "--tensor-parallel 8 --pipeline-parallel 6 --data-parallel 4",
            &["cannot make up 384 GPUs", "--> --tensor-parallel 8 --pipeline-parallel 6 --data-parallel 4"],
        ),
        (
            "degrees whose product overflows",
            "--tensor-parallel 18446744073709551615 --pipeline-parallel 2",
            &["cannot make up 384 GPUs", "--> --tensor-parallel 18446744073709551615 --pipeline-parallel 2"],
        ),
        ("degree 0", "--pipeline-parallel 0", &["--pipeline-parallel is 0", "1 or more"]),
        ("negative degree", "--tensor-parallel -1", &["'-1'", "--> --tensor-parallel", "a whole number"]),
        (
            "degree that does not divide the heads",
            "--tensor-parallel 6",
            &["6 does not divide num_attention_heads 112", "model.ron, field num_attention_heads", ": 1, 2, 4, 7, 8"],
        ),
        ("more stages than layers", "--pipeline-parallel 96", &["96 stages for 70 layers", "at most 70"]),
        (
            "batch of broken micro-batches",
            "--micro-batch 3 --data-parallel 8",
            &["2048 is not divisible by micro-batch 3 x data-parallel 8", "--> --micro-batch --data-parallel", "2064"],
        ),
        (
            "micro-batch that overflows",
            "--micro-batch 18446744073709551615 --data-parallel 8",
            &["2048 is not divisible", "--> --micro-batch --data-parallel", "divisors of 2048"],
        ),
        ("micro-batch 0", "--micro-batch 0", &["micro-batch is 0", "--> --micro-batch", "1 or more"]),
        ("batch 0", "--global-batch 0", &["global batch 0", "--> --global-batch", "from 1 to"]),
        ("2^32 sequences", "--global-batch 4294967296", &["4294967296", "--> --global-batch", "from 1 to"]),
        ("length 0", "--sequence-length 0", &["sequence length 0", "--> --sequence-length", "from 1 to"]),
        ("2^32 tokens", "--sequence-length 4294967296", &["4294967296", "--> --sequence-length", "from 1 to"]),
        (
            "tensor parallelism with FSDP",
            "--stack fsdp-2023 --tensor-parallel 2",
            &["fsdp-2023 does not offer tensor parallelism", "--> --tensor-parallel", "leave the flag out"],
        ),
        (
            "sequence parallelism before its time",
            "--stack megatron-deepspeed-2022 --sequence-parallel on",
            &["does not offer sequence parallelism", "--> --sequence-parallel", "leave the flag out"],
        ),
        (
            "another order of ranks",
            "--stack megatron-2021 --mesh-order data-outermost",
            &["does not offer this order of ranks", "--> --mesh-order", "leave the flag out"],
        ),
        ("ZeRO stage 4", "--zero-stage 4", &["'4'", "not in 0..=3", "--> --zero-stage", "plan --help"]),
        (
            "half recomputation",
            "--recompute half",
            &["'half'", "none, selective, full", "--> --recompute", "plan --help"],
        ),
        (
            "misspelt flag",
            "--tensor-paralel 4",
            &["'--tensor-paralel'", "--> --tensor-paralel\n", "did you mean --tensor-parallel?"],
        ),
        (
            "flag given twice",
            "--gpus 8",
            &["'--gpus <N|A..B>' cannot be used multiple times", "--> --gpus", "plan --help"],
        ),
    ];
    let folder = folder(&[text("model.ron", BLOOM)]);
    for (name, arguments, pieces) in rows {
        check(name, folder.path(), &format!("{SEARCH} {arguments}"), BAD_INPUT, pieces);
    }
}

#[test]
fn sequences_beyond_the_learned_positions() {
    let folder = folder(&[text("model.ron", GPT2)]);
    let arguments = format!("{SMALL} --sequence-length 2048");
    let pieces = ["2048 exceeds the 1024 learned positions", "model.ron, field max_sequence_length", "at most 1024"];
    check("long sequence", folder.path(), &arguments, BAD_INPUT, &pieces);
}

#[test]
fn command_lines_without_sense() {
    let rows: &[Line] = &[
        ("no arguments", "", &["required", "--> --model <FILE>, --gpus <N|A..B>, --node-gpus <M>", "plan --help"]),
        ("misspelt subcommand", "inspct x.plan.ron", &["'inspct'", "--> inspct", "did you mean inspect?"]),
        ("subcommand without file", "check", &["required", "--> <PLAN>", "plan --help"]),
        ("inspect of nothing", "inspect x.plan.ron", &["No such file", "--> x.plan.ron", "check the path"]),
        ("check of nothing", "check x.plan.ron", &["No such file", "--> x.plan.ron", "check the path"]),
    ];
    let folder = folder(&[]);
    for (name, arguments, pieces) in rows {
        check(name, folder.path(), arguments, BAD_INPUT, pieces);
    }
}

#[test]
fn places_where_no_plan_can_be_written() {
    let rows: &[Line] = &[
        ("missing folder", "--out absent/x.plan.ron", &["No such file", "--> absent/x.plan.ron", "create the folder"]),
        ("a folder", "--out folder", &["a directory", "--> folder", "--out"]),
        ("below a file", "--out model.ron/x.plan.ron", &["Not a directory", "--> model.ron/x.plan.ron", "--out"]),
        ("other bytes", "--out model.ron", &["exists and holds something else", "--> model.ron", "--force"]),
    ];
    let folder = folder(&[text("model.ron", GPT2), ("folder", Entry::Folder)]);
    for (name, arguments, pieces) in rows {
        check(name, folder.path(), &format!("{SMALL} {arguments}"), BAD_INPUT, pieces);
    }
}

#[test]
fn a_plan_file_is_replaced_only_by_force() {
    let folder = folder(&[text("model.ron", GPT2), text("x.plan.ron", "mine")]);
    let arguments = format!("{SMALL} --out x.plan.ron");
    check("other bytes", folder.path(), &arguments, BAD_INPUT, &["--> x.plan.ron", "--force"]);
    accept("force", folder.path(), &format!("{arguments} --force"));
    let written = listing(folder.path());
    assert!(written["x.plan.ron"].1.starts_with(b"("), "the plan replaces the text");
    accept("equal bytes", folder.path(), &arguments);
    assert_eq!(listing(folder.path()), written);
}

/// A folder with `x.plan.ron`, a sound plan of 2 stages and 8 ranks, and its text.
fn planned() -> (TempDir, String) {
    let folder = folder(&[text("model.ron", GPT2)]);
    accept("sound request", folder.path(), &format!("{SMALL} --out x.plan.ron"));
    let plan = fs::read_to_string(folder.path().join("x.plan.ron")).expect("the plan is written");
    (folder, plan)
}

#[test]
fn texts_that_are_no_plan() {
    let (folder, plan) = planned();
    let rows = [
        ("a model", GPT2.to_owned(), "line 2"),
        ("a truncated plan", plan[..plan.len() / 2].to_owned(), "line"),
        ("a plan without its end", plan.trim_end().trim_end_matches(')').to_owned(), "line"),
        ("a plan with a negative number", renumbered(&plan, "\n    micro_batch: ", "-1"), "line"),
        ("a plan with NaN", renumbered(&plan, "step: Seconds(", "NaN"), "line"),
        ("words", "no plan".to_owned(), "line 1"),
        ("nothing", String::new(), "x.plan.ron"),
    ];
    for (name, text, place) in rows {
        fs::write(folder.path().join("x.plan.ron"), text).expect("writable");
        for command in ["check", "inspect"] {
            let pieces = ["--> x.plan.ron", place, "write it again with `plan`"];
            check(name, folder.path(), &format!("{command} x.plan.ron"), BAD_INPUT, &pieces);
        }
    }
}

#[test]
fn plans_that_were_edited() {
    let (folder, plan) = planned();
    let rows = [
        ("format_version: ", "2", "format_version"),
        ("num_layers: ", "13", "field published_parameters"),
        ("\n  parameters: ", "124439809", "parameters"),
        ("\n    data_parallel: ", "0", "strategy.data_parallel"),
        ("\n    tensor_parallel: ", "5", "strategy.tensor_parallel"),
        ("\n    tensor_parallel: ", "18446744073709551615", "strategy.tensor_parallel"),
        ("\n    micro_batch: ", "3", "strategy.micro_batch"),
        ("layers_per_stage: ", "1", "strategy.layers_per_stage"),
        ("(Pipeline, ", "18446744073709551615", "mesh"),
        ("size: 2,\n      stride: ", "18446744073709551615", "groups[0]"),
        ("axis: Pipeline,\n      size: ", "4294967296", "groups[0]"),
        ("parameters_per_rank: ", "1", "stages[0]"),
        ("Weights: B(", "18446744073709551615", "stages[0].memory"),
        ("step: Seconds(", "1.5", "estimate.terms"),
        ("tokens_per_second_per_gpu: ", "1.5", "estimate.tokens_per_second_per_gpu"),
        ("device_memory: B(", "1", "estimate.device_memory"),
        ("fullest_stage: (", "7", "estimate.fullest_stage"),
        ("enumerated: ", "1", "search.enumerated"),
    ];
    for (mark, number, place) in rows {
        fs::write(folder.path().join("x.plan.ron"), renumbered(&plan, mark, number)).expect("writable");
        for command in ["check", "inspect"] {
            let pieces = [format!("--> x.plan.ron, {place}")];
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            check(mark.trim(), folder.path(), &format!("{command} x.plan.ron"), VERIFICATION_FAILED, &pieces);
        }
    }
}

#[test]
fn parts_that_a_plan_lacks() {
    let (folder, _) = planned();
    let rows: &[Line] = &[
        ("stage", "inspect x.plan.ron --stage 99", &["no stage 99", "--> --stage", "stages 0 to 1"]),
        ("rank", "inspect x.plan.ron --rank 9999", &["no rank 9999", "--> --rank", "ranks 0 to 7"]),
        ("negative rank", "inspect x.plan.ron --rank=-1", &["'-1'", "--> --rank", "a whole number"]),
        ("both", "inspect x.plan.ron --stage 0 --rank 0", &["cannot be used with", "--> --stage", "plan --help"]),
    ];
    for (name, arguments, pieces) in rows {
        check(name, folder.path(), arguments, BAD_INPUT, pieces);
    }
}

#[test]
fn a_model_that_fits_nowhere() {
    let folder = folder(&[text("model.ron", BLOOM)]);
    let world = |gpus: u64| format!("--model model.ron --gpus {gpus} --node-gpus 8");
    let pieces = [
        "no plan fits: the nearest candidate is tensor 8 x pipeline 1 x data 1",
        "its worst stage, 0, needs ",
        " GiB a GPU and ",
        " GiB are available",
        "--> model.ron on 8 x a100-sxm-80gb",
        " GPUs a layout fits",
    ];
    check("bloom on a node", folder.path(), &world(8), NO_PLAN_FITS, &pieces);

    let stderr = String::from_utf8(run(folder.path(), &world(8)).stderr).expect("messages are UTF-8");
    let advice = stderr.split("help: with ").nth(1).and_then(|rest| rest.split(' ').next());
    let gpus: u64 = advice.and_then(|number| number.parse().ok()).expect("the help names a number of GPUs");
    accept("the advice", folder.path(), &format!("{} --dry-run", world(gpus)));
    check("a node less than the advice", folder.path(), &world(gpus - 8), NO_PLAN_FITS, &["no plan fits"]);
}

#[test]
fn a_choice_that_fits_nowhere() {
    let folder = folder(&[text("model.ron", BLOOM)]);
    let arguments =
        "--model model.ron --gpus 128 --node-gpus 8 --tensor-parallel 8 --pipeline-parallel 1 --zero-stage 0";
    check(
        "one stage",
        folder.path(),
        arguments,
        NO_PLAN_FITS,
        &["no plan fits", "help: leave out --", "a layout fits"],
    );

    let stderr = String::from_utf8(run(folder.path(), arguments).stderr).expect("messages are UTF-8");
    let flag = stderr.split("help: leave out ").nth(1).and_then(|rest| rest.split(':').next());
    let flag = flag.expect("the help names a flag");
    assert!(arguments.contains(flag), "`{flag}` was given");
    accept("the advice", folder.path(), &format!("{} --dry-run", arguments.replace(flag, "")));
}

/// A table of two sound runs of a user's own.
const LOG: &str = "\
layers,hidden,heads,seq_len,gpu,gpus,tp,pp,micro_batch,global_batch,measured_step_s
12,768,12,1024,,8,1,1,4,64,0.25
12,768,12,1024,my own,8,2,1,4,64,0.31
";

#[test]
fn mistakes_in_logged_runs() {
    let rows: &[Edit] = &[
        ("misspelt column", "hidden", "hiden", &["no column `hidden`", "--> log.csv"]),
        ("unknown column", "micro_batch", "micro_bach", &["column `micro_bach`", "line 1", "nearest: micro_batch"]),
        ("nothing measured", "measured_step_s", "measured_mfu", &["`measured_step_s` or `measured_peak_mem_gib`"]),
        ("word for a number", "0.25", "fast", &["`fast` in column measured_step_s", "log.csv, line 2"]),
        ("negative time", "0.31", "-0.31", &["`-0.31` in column measured_step_s", "log.csv, line 3"]),
        ("endless time", "0.31", "inf", &["`inf` in column measured_step_s", "log.csv, line 3"]),
        ("no layers", "12,768,12", "0,768,12", &["`0` in column layers", "line 2"]),
        ("another device", "my own", "H100-SXM", &["run 2", "ran on H100-SXM", "has a100-sxm-80gb", "leave its gpu"]),
        ("a cell too many", "0.31", "0.31,", &["log.csv, line 3", "no table"]),
    ];
    let line = "calibrate log.csv --cluster dgx-a100-80gb --out mine.ron";
    for (name, from, to, pieces) in rows {
        let folder = folder(&[text("log.csv", &edited(LOG, from, to))]);
        check(name, folder.path(), line, BAD_INPUT, pieces);
    }
    let header = LOG.lines().next().unwrap_or_default();
    let whole: &[(&str, &str, &[&str])] = &[
        ("no rows", header, &["has no rows", "--> log.csv"]),
        ("nothing", "", &["no column `layers`", "--> log.csv"]),
        (
            "no run that can be predicted",
            &LOG.replace(",8,", ",9,"),
            &["run 1", "run 2", "tp 2 x pp 1 x dp 4 x cp 1 is not 9 GPUs"],
        ),
        ("no run that was measured", &LOG.replace("0.25", "").replace("0.31", ""), &["run 1", "measured_step_s"]),
    ];
    for (name, log, pieces) in whole {
        let folder = folder(&[text("log.csv", log)]);
        check(name, folder.path(), line, BAD_INPUT, pieces);
    }
    let lines: &[Line] = &[
        ("no table", "calibrate absent.csv --cluster dgx-a100-80gb --out mine.ron", &["No such file", "absent.csv"]),
        ("no cluster", "calibrate log.csv --out mine.ron", &["required", "--cluster"]),
        ("no file", "calibrate log.csv --cluster dgx-a100-80gb", &["required", "--out"]),
        ("misspelt cluster", "calibrate log.csv --cluster dgx --out mine.ron", &["no cluster `dgx`", "nearest"]),
        ("missing folder", "calibrate log.csv --cluster dgx-a100-80gb --out a/b.ron", &["No such file", "a/b.ron"]),
        ("other bytes", "calibrate log.csv --cluster dgx-a100-80gb --out log.csv", &["something else", "--force"]),
    ];
    let folder = folder(&[text("log.csv", LOG)]);
    for (name, line, pieces) in lines {
        check(name, folder.path(), line, BAD_INPUT, pieces);
    }
}
