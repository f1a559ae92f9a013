//! The real `execute-plan`: runs and their logs, and every mistake with its exit code and message.

#[path = "support/programs.rs"]
mod programs;
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ir::graph::count_parameters;
use ir::model::{Attention, DType, Deviation, FeedForward, ModelSpec, Vocabulary, read_model};
use ir::plan::Plan;
use ir::strategy::ZeroStage;
use ir::units::SequenceLength;
use planner::request::FixedChoices;
use programs::{PROGRAM, close, command, degrees, plan, planned_bytes, run, steps, succeed, timeless, write};
use runtime::data::{DatasetWriter, TokenType};
use serde_json::Value;
use support::small::{Family, SEQUENCE, Shape, small_model};
use tempfile::TempDir;

/// Sequences of a step.
const BATCH: u64 = 8;
/// Relative difference of losses between layouts.
const TOLERANCE: f64 = 1e-6;

/// What `--communicator mpi` says to a process that MPI did not start.
const MESSAGE_OF_MPI: &str =
    if cfg!(feature = "mpi") { "this is rank 0 of 2, but for MPI" } else { "built without its feature `mpi`" };

const GPT2: Shape = Shape { family: Family::Gpt2, tied: true, heads: 4, key_value_heads: 4, layers: 2, vocabulary: 19 };

fn model() -> ModelSpec {
    small_model(GPT2)
}

fn small_plan(fixed: FixedChoices) -> Plan {
    plan(&model(), SEQUENCE as u64, BATCH, fixed)
}

fn scratch() -> TempDir {
    TempDir::new().expect("a scratch folder")
}

/// Each of `pieces` is in the message of a run that ends with `code`.
fn check(name: &str, command: &mut Command, code: i32, pieces: &[&str]) {
    let output = command.output().expect("the program starts");
    let text = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert_eq!(output.status.code(), Some(code), "{name}: {text}");
    assert!(output.stdout.is_empty() && !text.contains("panicked"), "{name}: {text}");
    for piece in ["error: ", "  --> ", "  help: "].iter().chain(pieces) {
        assert!(text.contains(piece), "{name}: `{piece}` is not in\n{text}");
    }
}

/// A corpus of one document with the ids 0 to `largest`.
fn write_corpus(prefix: &Path, largest: u32) {
    let mut writer = DatasetWriter::create(prefix, TokenType::U16).expect("the scratch folder is writable");
    writer.add_document(&(0..=largest).collect::<Vec<u32>>()).expect("a short document");
    writer.finish().expect("the scratch folder is writable");
}

/// A folder with sound plans for one and two ranks, plans that cannot be run, training files and corpora.
fn folder_of_mistakes() -> TempDir {
    let folder = scratch();
    let path = folder.path();
    let single = small_plan(degrees(1, 1, 1));
    write(path, "plan.ron", &single);
    write(path, "two.ron", &small_plan(degrees(1, 1, 2)));
    let text = fs::read_to_string(path.join("plan.ron")).expect("written above");
    let mut unsound = single.clone();
    unsound.program.as_mut().expect("the plan is executable").bodies[0].forward.pop();
    write(path, "unsound.ron", &unsound);
    let deviating = ModelSpec { deviations: vec![Deviation::SlidingWindow], ..model() };
    write(path, "deviating.ron", &plan(&deviating, SEQUENCE as u64, BATCH, degrees(1, 1, 1)));
    let half = ModelSpec { dtype: DType::FP16, ..model() };
    write(path, "half.ron", &plan(&half, SEQUENCE as u64, BATCH, degrees(1, 1, 1)));
    let texts = [
        ("cut.ron", text[..text.len() / 2].to_owned()),
        ("foreign.ron", "(name: \"small\")".to_owned()),
        ("wrong.train", "(log_interval: 0, optimizer: (eps: -1.0, clip: -1.0))".to_owned()),
        ("unknown.train", "(optimizer: (lr: 1.0))".to_owned()),
        ("dropout.train", "(dropout: (hidden: 1.0))".to_owned()),
        ("ramp.train", "(batch_ramp_up: (start: 3, increment: 2, samples: 9))".to_owned()),
        ("occupied/notes", "mine".to_owned()),
    ];
    fs::create_dir(path.join("occupied")).expect("writable");
    texts.iter().for_each(|(name, text)| fs::write(path.join(name), text).expect("writable"));
    write_corpus(&path.join("sound"), 18);
    write_corpus(&path.join("beyond"), 19);
    write_corpus(&path.join("cut"), 18);
    fs::write(path.join("cut.bin"), [0; 4]).expect("writable");
    folder
}

#[test]
fn mistakes_end_with_their_code_and_a_message() {
    let folder = folder_of_mistakes();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/llama");
    let weights = format!("plan.ron --synthetic --weights {fixture}");
    let rows: Vec<(&str, i32, &[&str])> = vec![
        ("", 2, &["required", "<PLAN>", "--> the command line", "execute-plan --help"]),
        ("plan.ron --synthetic --stesp 5", 2, &["'--stesp'", "--> the command line"]),
        ("plan.ron --synthetic --steps 0", 2, &["'0' for '--steps <N>'"]),
        ("plan.ron --synthetic --timeout 0", 2, &["'0' for '--timeout <SECONDS>'"]),
        ("plan.ron --synthetic --data sound", 2, &["cannot be used with"]),
        ("plan.ron --synthetic --device cuda", 2, &["--> --device cuda", "leave --device out"]),
        ("plan.ron --synthetic --communicator nccl", 2, &["NCCL", "--> --communicator"]),
        ("two.ron --synthetic --communicator mpi", 2, &[MESSAGE_OF_MPI, "--> --communicator"]),
        ("nothing.ron --synthetic", 2, &["No such file", "--> nothing.ron"]),
        ("cut.ron --synthetic", 2, &["--> cut.ron, line"]),
        ("foreign.ron --synthetic", 2, &["--> foreign.ron, line"]),
        ("unsound.ron --synthetic", 3, &["--> unsound.ron"]),
        (
            "deviating.ron --synthetic",
            2,
            &["the plan is not executable: ", "sliding attention windows", "plan --executable"],
        ),
        ("half.ron --synthetic", 2, &["fp16", "--> half.ron", "use bf16 or fp32"]),
        ("plan.ron", 2, &["nothing to train on", "--data PREFIX", "--synthetic"]),
        ("plan.ron --data nothing", 2, &["nothing.idx", "execute-plan prepare"]),
        ("plan.ron --data cut", 2, &["has 4 bytes", "--> cut.bin"]),
        ("plan.ron --data beyond", 2, &["19", "beyond.bin"]),
        ("two.ron --data beyond", 2, &["[rank 1] error: ", "19", "beyond.bin"]),
        ("plan.ron --synthetic --train nothing.train", 2, &["No such file", "--> nothing.train"]),
        (
            "plan.ron --synthetic --train wrong.train",
            2,
            &["field optimizer.eps", "field optimizer.clip", "field log_interval"],
        ),
        ("plan.ron --synthetic --train unknown.train", 2, &["`lr`", "--> unknown.train, line 1"]),
        ("plan.ron --synthetic --train dropout.train", 2, &["--> dropout.train, field dropout.hidden"]),
        (
            "two.ron --synthetic --train ramp.train",
            2,
            &["start 3 is not whole micro-batches", "field batch_ramp_up.start", "a multiple of 2", "do not reach"],
        ),
        ("plan.ron --synthetic --weights nothing", 2, &["nothing"]),
        (&weights, 2, &["fixtures/llama"]),
        ("plan.ron --synthetic --export occupied", 2, &["--> occupied", "does not exist or is empty"]),
        ("plan.ron --synthetic --log nothing/log", 2, &["cannot write the log", "--> nothing/log"]),
        ("two.ron --synthetic --log nothing/log", 2, &["[rank 0] error: cannot write the log", "--> nothing/log"]),
    ];
    for (arguments, code, pieces) in rows {
        check(arguments, &mut command(folder.path(), arguments), code, pieces);
    }
    assert_eq!(fs::read_to_string(folder.path().join("occupied/notes")).expect("still there"), "mine");
}

#[test]
fn ranks_of_a_launcher_that_do_not_fit_the_plan() {
    /// Variables, and pieces of the message.
    type Row = (&'static [(&'static str, &'static str)], &'static [&'static str]);
    let folder = folder_of_mistakes();
    let rows: [Row; 3] = [
        (&[("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")], &["started 3 ranks, the plan is for 2"]),
        (&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")], &["started 1 ranks, the plan is for 2"]),
        (&[("RANK", "1")], &["RANK is set but WORLD_SIZE is not", "torchrun"]),
    ];
    for (variables, pieces) in rows {
        let mut command = command(folder.path(), "two.ron --synthetic");
        check(&format!("{variables:?}"), command.envs(variables.iter().copied()), 2, pieces);
    }
}

/// What two ranks say that were started in folders with options; both must end with 2.
fn said_by_both(plan: &Path, ranks: [(&Path, &str); 2]) -> String {
    let port = runtime::launch::local::reserve_port().expect("a port is free");
    let ranks = ranks.into_iter().zip(0..).map(|((folder, options), rank)| {
        let mut command = command(folder, &format!("{} {options}", plan.display()));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "2");
        command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.port.to_string()).stderr(Stdio::piped()).spawn().expect("the program starts")
    });
    let ranks: Vec<_> = ranks.collect();
    let end = |rank: Child| {
        let output = rank.wait_with_output().expect("a process of this test");
        let text = String::from_utf8(output.stderr).expect("messages are UTF-8");
        assert_eq!(output.status.code(), Some(2), "{text}");
        text
    };
    let texts: Vec<String> = ranks.into_iter().map(end).collect();
    assert_eq!(texts[0], texts[1]);
    texts[0].clone()
}

#[test]
fn ranks_that_were_started_with_different_requests() {
    let folder = folder_of_mistakes();
    let path = folder.path();
    let other = path.join("other");
    fs::create_dir(&other).expect("writable");
    write_corpus(&other.join("sound"), 17);
    write_corpus(&path.join("alike"), 18);
    fs::write(path.join("slow.train"), "(optimizer: (learning_rate: 1e-5))").expect("writable");
    let weights = |name: &str| {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gpt2");
        std::os::unix::fs::symlink(fixture, path.join(name)).expect("writable");
        format!("--synthetic --weights {name}")
    };
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gpt2.ron"));
    let gpt2 = read_model(&text.expect("the fixture exists"), "gpt2").expect("the fixture is sound");
    write(path, "gpt2.ron", &plan(&gpt2, 16, 8, degrees(1, 1, 2)));
    let (one, two) = (weights("one"), weights("two"));
    // Plan, options of ranks 0 and 1, and what both say.
    let rows = [
        ("two.ron", "--synthetic --seed 1", "--synthetic --seed 2", "seed 1, rank 1 has 2"),
        ("two.ron", "--synthetic --steps 3", "--synthetic --steps 4", "steps 3, rank 1 has 4"),
        ("two.ron", "--synthetic", "--synthetic --evaluate", "--evaluate off, rank 1 has on"),
        ("two.ron", "--synthetic --export x", "--synthetic", "--export x, rank 1 has none"),
        ("two.ron", "--synthetic --profile x", "--synthetic", "--profile x, rank 1 has none"),
        ("two.ron", "--data sound", "--synthetic", "data sound with index "),
        ("two.ron", "--data sound", "--data alike", ", rank 1 has alike with index "),
        ("two.ron", "--synthetic", "--synthetic --train slow.train", "training settings "),
        ("gpt2.ron", &one, &two, "--weights one, rank 1 has two"),
    ];
    for (plan, first, second, expected) in rows {
        let text = said_by_both(&path.join(plan), [(path, first), (path, second)]);
        assert!(text.contains("error: rank 0 has ") && text.contains(expected), "{first}, {second}: {text}");
        assert_eq!(text.matches("error: ").count(), 1, "{first}, {second}: {text}");
    }
    let text = said_by_both(&path.join("two.ron"), [(path, "--data sound"), (&other, "--data sound")]);
    assert_eq!(text.matches("sound with index ").count(), 2, "corpora of one name: {text}");
}

#[test]
fn every_layout_logs_the_single_ranks_losses() {
    let folder = scratch();
    let path = folder.path();
    fs::write(path.join("train"), "(optimizer: (learning_rate: 1e-3))").expect("writable");
    let zero = |stage| FixedChoices { zero_stage: Some(stage), ..degrees(1, 1, 2) };
    let sequence = FixedChoices { sequence_parallel: Some(true), ..degrees(2, 1, 1) };
    let rows = [
        ("single", degrees(1, 1, 1)),
        ("stages", degrees(1, 2, 1)),
        ("sequence", sequence),
        ("zero1", zero(ZeroStage::OptimizerState)),
        ("zero3", zero(ZeroStage::Parameters)),
        ("all", degrees(2, 2, 2)),
    ];
    let mut single = Vec::new();
    for (name, fixed) in rows {
        let plan = small_plan(fixed);
        write(path, name, &plan);
        let log = format!("{name}.log");
        succeed(path, &format!("{name} --synthetic --train train --steps 4 --log {log}"));
        let records = steps(path, &log);
        let losses: Vec<f64> = records.iter().map(|record| record.loss).collect();
        if single.is_empty() {
            single.clone_from(&records);
        }
        assert_eq!(records.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 2, 3, 4], "{name}");
        let bytes = planned_bytes(&plan, plan.strategy.num_micro_batches());
        for (record, expected) in records.iter().zip(&single) {
            assert!(close(record.loss, expected.loss, TOLERANCE), "{name}: {losses:?}");
            assert!(close(record.grad_norm, expected.grad_norm, 1e-5), "{name}: {record:?}");
            assert_eq!((record.tokens, record.bytes_sent), (BATCH * SEQUENCE as u64, bytes), "{name}: {record:?}");
            assert_eq!(record.learning_rate, expected.learning_rate, "{name}");
            assert!(record.seconds > 0.0 && record.peak_tensor_bytes > 0, "{name}: {record:?}");
        }
    }
}

#[test]
fn dropout_of_the_training_file_is_the_same_in_every_layout() {
    let folder = scratch();
    let path = folder.path();
    let dropout = "dropout: (hidden: 0.1, attention: 0.1)";
    fs::write(path.join("train"), format!("({dropout})")).expect("writable");
    fs::write(path.join("without"), "()").expect("writable");
    let runs = [
        ("single", degrees(1, 1, 1), "train"),
        ("all", degrees(2, 2, 2), "train"),
        ("without", degrees(1, 1, 1), "without"),
    ];
    let runs = runs.map(|(name, fixed, train)| {
        write(path, "plan", &small_plan(fixed));
        succeed(path, &format!("plan --synthetic --train {train} --steps 3 --log {name}.log"));
        steps(path, &format!("{name}.log"))
    });
    for ((single, all), without) in runs[0].iter().zip(&runs[1]).zip(&runs[2]) {
        assert!(close(all.loss, single.loss, TOLERANCE), "{all:?}, expected {single:?}");
        assert!(close(all.grad_norm, single.grad_norm, 1e-5), "{all:?}, expected {single:?}");
        assert!(!close(single.loss, without.loss, 1e-4), "{single:?} drops something, {without:?} nothing");
    }
}

#[test]
fn a_log_has_the_promised_fields_and_repeats() {
    let folder = scratch();
    let path = folder.path();
    write(path, "plan", &small_plan(degrees(2, 2, 2)));
    for (log, seed) in [("a", 5), ("b", 5), ("c", 6)] {
        succeed(path, &format!("plan --synthetic --steps 2 --seed {seed} --log {log}"));
    }
    assert_eq!(timeless(path, "a"), timeless(path, "b"), "two runs of one seed");
    let losses = |log| steps(path, log).into_iter().map(|record| record.loss.to_bits()).collect::<Vec<_>>();
    assert_ne!(losses("a"), losses("c"), "another seed");
    let promised =
        ["step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "bytes_sent", "peak_tensor_bytes"];
    let text = fs::read_to_string(path.join("a")).expect("written above");
    for line in text.lines() {
        let value: Value = serde_json::from_str(line).expect("a line of JSON");
        let fields = value.as_object().expect("an object");
        assert!(promised.iter().all(|field| fields.get(*field).is_some_and(Value::is_number)), "{line}");
    }
}

#[test]
fn logs_of_two_runs_are_not_mixed() {
    let folder = folder_of_mistakes();
    let path = folder.path();
    for name in ["plan.ron", "two.ron"] {
        let arguments = format!("{name} --synthetic --steps 2 --log {name}.log");
        succeed(path, &arguments);
        let before = fs::read(path.join(format!("{name}.log"))).expect("written above");
        let pieces = ["of an earlier run", &format!("--> {name}.log"), "name another file", "--force"];
        check(&arguments, &mut command(path, &arguments), 2, &pieces);
        assert_eq!(fs::read(path.join(format!("{name}.log"))).expect("still there"), before, "{name}");
        succeed(path, &format!("{name} --synthetic --steps 3 --log {name}.log --force"));
        let numbers: Vec<u64> = steps(path, &format!("{name}.log")).iter().map(|record| record.step).collect();
        assert_eq!(numbers, [1, 2, 3], "{name}");
    }
}

#[test]
fn the_batch_of_a_ramp_up_grows() {
    let folder = scratch();
    let path = folder.path();
    fs::write(path.join("train"), "(batch_ramp_up: (start: 2, increment: 2, samples: 12))").expect("writable");
    // Three parts of 4 samples: batches of 2, 4 and 6.
    let sequences = [2, 2, 4, 6, 8, 8];
    let plans = [("single", small_plan(degrees(1, 1, 1))), ("all", small_plan(degrees(2, 2, 2)))];
    let mut losses = Vec::new();
    for (name, plan) in &plans {
        write(path, name, plan);
        succeed(path, &format!("{name} --synthetic --train train --steps 6 --log {name}.log"));
        let records = steps(path, &format!("{name}.log"));
        for (record, sequences) in records.iter().zip(sequences) {
            assert_eq!(record.tokens, sequences * SEQUENCE as u64, "{name}: {record:?}");
            let micro_batches = sequences / plan.strategy.data_parallel;
            assert_eq!(record.bytes_sent, planned_bytes(plan, micro_batches), "{name}: {record:?}");
            assert_eq!(record.predicted_seconds.is_some(), sequences == BATCH, "{name}: {record:?}");
        }
        losses.push(records.iter().map(|record| record.loss).collect::<Vec<_>>());
    }
    assert!(losses[0].len() == sequences.len() && losses[1].len() == sequences.len(), "{losses:?}");
    let equal = |(single, all): (&f64, &f64)| close(*all, *single, TOLERANCE);
    assert!(losses[0].iter().zip(&losses[1]).all(equal), "{losses:?}");
}

/// The loss that an evaluation reports: on stdout, where it is all that is said.
fn evaluate(folder: &Path, arguments: &str) -> f64 {
    let output = run(folder, &format!("{arguments} --synthetic --evaluate --steps 2"));
    let [report, progress] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    assert_eq!((output.status.code(), progress.as_str()), (Some(0), ""), "{arguments}: {report}");
    let line = report.strip_prefix("[rank 0] ").unwrap_or(&report);
    let number = line.strip_prefix("loss ").and_then(|rest| rest.strip_suffix(" over 2 batches\n"));
    number.unwrap_or_else(|| panic!("{arguments}: {report}")).parse().expect("a number")
}

#[test]
fn weights_go_in_and_out() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let folder = scratch();
    let path = folder.path();
    for (name, layouts) in
        [("gpt2", [degrees(1, 1, 1), degrees(2, 2, 2)]), ("llama", [degrees(1, 1, 1), degrees(2, 1, 1)])]
    {
        let text = fs::read_to_string(fixtures.join(format!("{name}.ron"))).expect("the fixture exists");
        let model = read_model(&text, name).expect("the fixture is sound");
        let fixture = fixtures.join(name).display().to_string();
        let mut losses = Vec::new();
        for (number, fixed) in layouts.into_iter().enumerate() {
            let file = format!("{name}{number}");
            write(path, &file, &plan(&model, 16, 8, fixed));
            losses.push(evaluate(path, &format!("{file} --weights {fixture}")));
        }
        assert!(close(losses[1], losses[0], TOLERANCE), "{name}: {losses:?}");

        // Trained by many ranks, read again by one and by many.
        let trained = format!("{name}1 --synthetic --weights {fixture} --steps 2 --export {name}-out --log {name}.log");
        succeed(path, &trained);
        let again = [0, 1].map(|number| evaluate(path, &format!("{name}{number} --weights {name}-out")));
        assert!(close(again[1], again[0], TOLERANCE), "{name}: {again:?}");
        assert!(!close(again[0], losses[0], 1e-4), "{name}: two steps of training change the loss, {again:?}");
        let occupied = run(path, &trained);
        assert_eq!(occupied.status.code(), Some(2), "{name}: the folder is not empty any more");
    }
}

#[test]
fn numbers_that_are_none_end_all_ranks_before_the_update() {
    let folder = scratch();
    let path = folder.path();
    fs::write(path.join("train"), "(optimizer: (learning_rate: 1e38, clip: None))").expect("writable");
    for (name, fixed, ranks) in [("single", degrees(1, 1, 1), 1), ("all", degrees(2, 2, 2), 8)] {
        write(path, name, &small_plan(fixed));
        let output = run(path, &format!("{name} --synthetic --train train --steps 9 --export out --log {name}.log"));
        let text = String::from_utf8(output.stderr).expect("messages are UTF-8");
        assert_eq!(output.status.code(), Some(5), "{name}: {text}");
        let last = steps(path, &format!("{name}.log")).last().expect("the first step is sound").step;
        let named: BTreeSet<&str> = text.lines().filter(|line| line.contains("error: the ")).collect();
        assert_eq!(named.len(), ranks, "{name}: {text}");
        assert_eq!(text.matches(&format!("--> step {}\n", last + 1)).count(), ranks, "{name}: {text}");
        assert!(!path.join("out").exists(), "{name}: nothing is exported");
    }
}

/// A model whose state is far larger than what else a rank needs.
fn large_model() -> ModelSpec {
    ModelSpec {
        num_layers: 10,
        hidden_size: 512,
        attention: Attention::MultiHead { num_attention_heads: 8, num_key_value_heads: None, head_dim: None },
        feed_forward: FeedForward::Gelu { intermediate_size: 2048 },
        vocabulary: Vocabulary { size: 4096, padded: None },
        max_sequence_length: SequenceLength::Tokens(SEQUENCE as u64),
        ..model()
    }
}

#[test]
fn four_ranks_need_less_memory_than_the_whole_state() {
    let folder = scratch();
    let path = folder.path();
    let model = large_model();
    // Weights, gradients and two moments in fp32.
    let state = count_parameters(&model) * 16;
    let limit = state * 3 / 5;
    let zero3 = FixedChoices { zero_stage: Some(ZeroStage::Parameters), ..degrees(1, 1, 4) };
    let rows = [("single", degrees(1, 1, 1), false), ("zero3", zero3, true), ("tensor", degrees(4, 1, 1), true)];
    for (name, fixed, fits) in rows {
        write(path, name, &plan(&model, SEQUENCE as u64, 4, fixed));
        // The limit is of each process's own writable memory; shared memory between ranks is apart.
        let script = format!("ulimit -d {} && exec {PROGRAM} {name} --synthetic --steps 2", limit / 1024);
        let output = Command::new("sh").current_dir(path).args(["-c", &script]).output().expect("sh starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), fits, "{name} under {limit} of {state} bytes: {text}");
    }
}
