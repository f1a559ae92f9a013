//! `plan validate` on the table of published runs: what was reached, as a ratchet, and what a prediction may look at.

#![allow(clippy::print_stdout, reason = "the figures that were reached are shown")]

use std::collections::BTreeMap;

use hardware_profiles::run_names::run_names;
use ir::error::Problem;
use planner::validate::case::prepare;
use planner::validate::summary::{Errors, Summary, summarize};
use planner::validate::table::{Measured, Row, read_own_runs, read_table};
use planner::validate::{Validated, validate};
use proptest::test_runner::{Config, TestRunner};

/// Mean absolute errors of step times by source that were reached, in per cent; they may only fall.
const TIME: [(&str, f64); 11] = [
    ("MooreThreads/SimuMax (B200 real runs)", 3.05),
    ("NVIDIA-NeMo/Megatron-Bridge", 8.8),
    ("NVIDIA/Megatron-LM README (2020 DGX-2 / DGX-A100)", 3.3),
    ("NVIDIA/Megatron-LM README (A100 2021)", 3.4),
    ("NVIDIA/NeMo docs (24.07)", 4.5),
    ("NVIDIA/dgxc-benchmarking", 2.9),
    ("VIA-Research/vTrain (multi-node)", 6.8),
    ("VIA-Research/vTrain (single-node)", 6.5),
    ("bigscience-workshop/bigscience (V100 gpt2)", 16.7),
    ("bigscience-workshop/bigscience (tr11)", 4.3),
    ("mosaicml/llm-foundry", 2.8),
];
/// The same of runs whose experts are spread over tensor ranks, which no column says; they count apart.
const EXPERTS_OVER_TENSOR: [(&str, f64); 1] = [("NVIDIA-NeMo/Megatron-Bridge", 30.7)];
/// Sources whose layout is fully stated.
const STATED: [&str; 6] = [
    "MooreThreads/SimuMax (B200 real runs)",
    "NVIDIA/Megatron-LM README (2020 DGX-2 / DGX-A100)",
    "VIA-Research/vTrain (multi-node)",
    "VIA-Research/vTrain (single-node)",
    "bigscience-workshop/bigscience (tr11)",
    "mosaicml/llm-foundry",
];
/// Mean absolute error over them, in per cent.
const STATED_TIME: f64 = 4.46;
/// Mean absolute errors of peak memory by source, in per cent.
const MEMORY: [(&str, f64); 2] =
    [("MooreThreads/SimuMax (B200 real runs)", 1.0), ("bigscience-workshop/bigscience (tr11)", 4.6)];
/// By how much runs that ended out of memory exceed what is usable, at least: twice the mean error of BLOOM's rows.
const OUT_OF_MEMORY_MARGIN: f64 = 0.092;
/// Kendall's tau and regret of the pick on BLOOM's tuning of 25 February.
const BLOOM_ORDER: (f64, f64) = (0.739, 0.012);
/// Mean regret of the pick over all sweeps.
const MEAN_REGRET: f64 = 0.0148;
/// Frameworks and accelerators of published runs that this table does not have, each with a year.
const OTHER_NAMES: [(&str, u64); 14] = [
    ("torchtitan (FSDP2)", 2025),
    ("NeMo/Megatron-Core", 2024),
    ("PyTorch FSDP + compile", 2024),
    ("DeepSpeed + HF Transformers", 2023),
    ("NeMo Megatron (BigNLP)", 2022),
    ("Megatron-Core r0.8", 2024),
    ("Megatron-Core (dev)", 2025),
    ("Megatron-LM", 2021),
    ("Alpa/XLA", 2022),
    ("Composer/FSDP (llm-foundry)", 2023),
    ("Megatron-DeepSpeed", 2022),
    ("NeMo AutoModel (PyTorch FSDP2 + TE)", 2025),
    ("Megatron-Core 23e00ed0 + TE 2.11", 2026),
    ("Megatron-Bridge / Megatron-Core + TE", 2026),
];

/// Columns that name a run and say where it was published, or follow from others: no prediction reads them.
const UNREAD: [&str; 7] =
    ["id", "source", "source_locator", "params_b", "interconnect_intra", "tflops_convention", "notes"];
/// Columns of measurements.
const MEASURED_COLUMNS: usize = 5;

fn table() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/published/runs.csv");
    std::fs::read_to_string(path).expect("the table is part of the repository")
}

fn rows() -> Vec<Row> {
    read_table(&table(), "runs.csv").expect("the table is well-formed")
}

fn summary() -> Summary {
    summarize(&validate(rows()))
}

fn spreads_experts_over_tensor(run: &Validated) -> bool {
    let layout = run.prediction.as_ref().map(|prediction| &prediction.strategy);
    layout.is_ok_and(|layout| !(layout.data_parallel * layout.context_parallel).is_multiple_of(layout.expert_parallel))
}

fn assert_reached(reached: &[(&str, f64)], found: &BTreeMap<String, Errors>, what: &str) {
    for (source, most) in reached {
        let errors = found.get(*source).unwrap_or_else(|| panic!("{what}: no rows of {source}"));
        let percent = errors.mean_absolute * 100.0;
        println!("{what}: {source}: {percent:.2} % over {} runs, at most {most} %", errors.count);
        assert!(percent <= *most, "{what} of {source}: {percent:.2} %, {most} % was reached before");
    }
}

#[test]
fn errors_stay_within_what_was_reached() {
    let (apart, validated) = validate(rows()).into_iter().partition(spreads_experts_over_tensor);
    let [apart, summary]: [Summary; 2] = [apart, validated].map(|validated: Vec<Validated>| summarize(&validated));
    assert_reached(&EXPERTS_OVER_TENSOR, &apart.by_source, "step time, experts over tensor ranks");
    assert_reached(&TIME, &summary.by_source, "step time");
    assert_reached(&MEMORY, &summary.memory_by_source, "memory");
    let stated: Vec<&Errors> = STATED.iter().map(|source| &summary.by_source[*source]).collect();
    let count: usize = stated.iter().map(|errors| errors.count).sum();
    let mean = stated.iter().map(|errors| errors.mean_absolute * errors.count as f64).sum::<f64>() / count as f64;
    println!("sources with stated layouts: {:.2} % over {count} runs", mean * 100.0);
    assert!(mean * 100.0 <= STATED_TIME, "{mean}");
}

#[test]
fn nearly_all_rows_are_supported() {
    let summary = summary();
    assert!(summary.rows == 787 && summary.predicted * 100 >= summary.rows * 95, "{}", summary.predicted);
}

#[test]
fn intervals_cover_nine_of_ten() {
    let covered = summary().covered;
    println!("covered: {:.1} %", covered * 100.0);
    assert!((0.85..=0.95).contains(&covered), "{covered}");
}

#[test]
fn blooms_tuning_is_ordered() {
    let summary = summary();
    let bloom = summary
        .sweeps
        .iter()
        .find(|sweep| sweep.name.contains("(tr11), 02-25") && sweep.name.contains("/14336/57344/64/"));
    let bloom = bloom.expect("the table has the sweep");
    println!("{}: tau {:.2}, regret {:.1} %", bloom.name, bloom.tau, bloom.regret * 100.0);
    assert!(bloom.tau >= BLOOM_ORDER.0 && bloom.regret <= BLOOM_ORDER.1, "{bloom:?}");
}

#[test]
fn picks_cost_little_more_than_the_best() {
    let sweeps = summary().sweeps;
    let mean = sweeps.iter().map(|sweep| sweep.regret).sum::<f64>() / sweeps.len() as f64;
    println!("mean regret over {} sweeps: {:.2} %", sweeps.len(), mean * 100.0);
    assert!(sweeps.len() >= 60 && mean <= MEAN_REGRET, "{mean}");
}

#[test]
fn micro_batches_tuned_to_the_largest_that_fits_are_called_possible() {
    let validated = validate(rows());
    let tuned: Vec<&Validated> = validated.iter().filter(|row| row.row.source == "mosaicml/llm-foundry").collect();
    assert_eq!(tuned.len(), 138, "the table has 138 runs of FSDP");
    for row in tuned {
        assert!(row.prediction.as_ref().is_ok_and(|found| found.fits), "{} ran", row.row.id);
    }
}

#[test]
fn blooms_tuning_ran_where_it_is_said_to_fit() {
    let validated = validate(rows());
    let of_bloom = |row: &&Validated| row.row.source.ends_with("(tr11)") && row.prediction.is_ok();
    let ran = |row: &&Validated| of_bloom(row) && !row.row.measured.out_of_memory;
    let ran: Vec<&Validated> = validated.iter().filter(ran).collect();
    assert!(ran.len() > 90, "the table has BLOOM's tuning");
    for row in ran {
        assert!(row.prediction.as_ref().is_ok_and(|found| found.fits), "{} ran", row.row.id);
    }
}

#[test]
fn runs_that_ended_out_of_memory_are_called_so() {
    let validated = validate(rows());
    let ran_out: Vec<&Validated> = validated.iter().filter(|row| row.row.measured.out_of_memory).collect();
    assert_eq!(ran_out.len(), 3, "the table has three rows that ran out of memory");
    for row in ran_out {
        let found = row.prediction.as_ref().expect("supported");
        let usable = prepare(&row.row.run).expect("supported").request.machine.usable_memory();
        let beyond = found.device_memory.0 as f64 / usable.0 as f64 - 1.0;
        println!("{}: {:.1} % more than is usable", row.row.id, beyond * 100.0);
        assert!(!found.fits && beyond > OUT_OF_MEMORY_MARGIN, "{} ran out of memory", row.row.id);
    }
}

/// What the allocator cannot give back, as stack `megatron-deepspeed-2022` has it: the most with which every run of
/// BLOOM's tuning that ran fits.
#[test]
fn the_least_slack_is_the_most_that_all_runs_leave() {
    let mut most = f64::INFINITY;
    let mut stated = None;
    for row in validate(rows()).iter().filter(|row| row.row.source.ends_with("(tr11)")) {
        let Some(found) = row.prediction.as_ref().ok().filter(|_| !row.row.measured.out_of_memory) else { continue };
        let machine = prepare(&row.row.run).expect("supported").request.machine;
        let memory = &machine.stack.memory;
        let fixed = memory.communication_buffers.value + machine.device.context_memory.value;
        let room = (machine.usable_memory() - fixed).0 as f64;
        most = most.min(room / found.allocator_peak.0 as f64 - 1.0);
        stated = memory.least_slack.as_ref().map(|least| least.value);
    }
    let stated = stated.expect("the stack has one");
    println!("least slack {stated}, at most {most:.4}");
    assert!(stated <= most && most < stated + 0.001, "{stated} stated, {most} found");
}

#[test]
fn production_run_of_bloom_is_predicted_within_ten_percent() {
    let validated = validate(rows());
    let row = validated.iter().find(|row| row.row.id == "bs176-136").expect("the table has the production run");
    let (error, found) = (row.error().expect("the row has a time"), row.prediction.as_ref().expect("supported"));
    println!("bs176-136: {:+.1} %, {:.1} GiB of 59", error * 100.0, found.device_memory.gib());
    assert!(error.abs() < 0.1 && (found.device_memory.gib() / 59.0 - 1.0).abs() < 0.1);
}

#[test]
fn what_was_measured_changes_no_prediction() {
    let text = table();
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let headers = reader.headers().expect("a header").clone();
    let records: Vec<csv::StringRecord> = reader.records().map(|record| record.expect("a record")).collect();
    let told = |header: &str| UNREAD.contains(&header) || header.starts_with("measured_");
    assert_eq!(headers.iter().filter(|header| told(header)).count(), UNREAD.len() + MEASURED_COLUMNS);
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(&headers).expect("memory can be written to");
    for (index, record) in records.iter().enumerate() {
        let other = &records[(index * 7 + 3) % records.len()];
        let cells = headers.iter().zip(record.iter().zip(other)).map(|(header, (own, other))| match told(header) {
            true if index % 2 == 0 => "",
            true => other,
            false => own,
        });
        writer.write_record(cells).expect("memory can be written to");
    }
    let after = String::from_utf8(writer.into_inner().expect("all is written")).expect("cells are text");
    let after = read_table(&after, "runs.csv").expect("the table is well-formed");
    assert!(after.iter().any(|row| row.measured == Measured::default()));
    for (a, b) in validate(rows()).iter().zip(validate(after)) {
        assert_eq!(a.prediction, b.prediction, "{}", a.row.id);
    }
}

/// Bytes of any kind end in rows or in problems that name the table: never in a panic.
#[test]
fn damaged_tables_are_refused() {
    let text = table();
    let lines: Vec<&str> = text.lines().collect();
    let pieces = ["", ",", "\"", "\n", "\r", "\0", "é", "id", "layers", "-1", "1e999", "18446744073709551616", ",,,,"];
    let strategy = (1..lines.len(), proptest::collection::vec((0..2000_usize, 0..4_usize, 0..pieces.len()), 1..5));
    let mut runner = TestRunner::new(Config { cases: 1000, ..Config::default() });
    let outcome = runner.run(&strategy, |(line, edits)| {
        let mut letters: Vec<char> = format!("{}\n{}\n", lines[0], lines[line]).chars().collect();
        for (at, removed, piece) in edits {
            let at = at % letters.len();
            let end = (at + removed).min(letters.len());
            letters.splice(at..end, pieces[piece].chars());
        }
        let damaged: String = letters.into_iter().collect();
        for read in [read_table, read_own_runs] {
            match read(&damaged, "my.csv") {
                Ok(rows) => drop(validate(rows)),
                Err(error) => {
                    let named = |problem: &Problem| problem.location.starts_with("my.csv");
                    proptest::prop_assert!(error.exit_code() == 2 && error.problems().iter().all(named), "{damaged}");
                }
            }
        }
        Ok(())
    });
    outcome.expect("no table is unhandled");
}

#[test]
fn every_name_of_published_runs_has_a_profile() {
    let names = run_names();
    for (framework, year) in OTHER_NAMES {
        let stack = names.stack(framework, Some(year)).expect(framework);
        hardware_profiles::find_stack(stack, "test").expect(stack);
    }
    for gpu in names.gpus.iter() {
        for cluster in gpu.all_clusters() {
            hardware_profiles::find_cluster(cluster, "test").expect(cluster);
        }
    }
    for name in ["Gaudi2", "RTX 4090", ""] {
        assert!(names.clusters(name, "").is_err(), "{name}");
    }
    let problem = names.clusters("H100-SXMM", "").expect_err("there is no such name").to_string();
    assert!(problem.contains("nearest: H100-SXM"), "{problem}");
}

/// A row of the table with other cells, and what is predicted of it.
fn row_with(id: &str, changes: &[(&str, &str)]) -> Validated {
    let text = table();
    let header = text.lines().next().expect("a header");
    let columns: Vec<&str> = header.split(',').collect();
    let place = |name: &str| columns.iter().position(|column| *column == name).expect("the table has the column");
    let line = text.lines().find(|line| line.starts_with(&format!("{id},"))).expect("the row is in the table");
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(line.as_bytes());
    let mut record: Vec<String> =
        reader.records().next().expect("a line").expect("a record").iter().map(|cell| format!("\"{cell}\"")).collect();
    changes.iter().for_each(|(column, cell)| record[place(column)] = (*cell).to_owned());
    let rows = read_table(&format!("{header}\n{}\n", record.join(",")), "runs.csv").expect("a table");
    validate(rows).remove(0)
}

/// Experts that do not spread over the ranks of their group have no layout.
#[test]
fn experts_are_whole_on_each_rank() {
    let row = row_with("mbridge-020", &[("num_experts", "7"), ("ep", "16")]);
    let reason = row.prediction.map(|_| ()).expect_err("7 experts on 16 ranks");
    assert_eq!(reason, "ep 16 does not divide 7 experts");
}

/// Fractions of zeros, letters of either case and cells that follow from others change nothing.
#[test]
fn cells_written_otherwise_mean_the_same() {
    let plain = row_with("mosaic-001", &[]).prediction.expect("supported");
    let others: [&[(&str, &str)]; 5] = [
        &[("layers", "80.0"), ("gpus", "512.00"), ("gated_mlp", "False"), ("zero_stage", "3.0"), ("year", "2024.0")],
        &[("precision", "BF16"), ("recompute", "Full"), ("flash_attention", "true")],
        &[("tp", ""), ("pp", ""), ("dp", ""), ("cp", "")],
        &[("dp", "")],
        &[("vpp", "0"), ("cp", "0"), ("ep", "0")],
    ];
    for changes in others {
        assert_eq!(row_with("mosaic-001", changes).prediction.as_ref(), Ok(&plain), "{changes:?}");
    }
    let reason = row_with("mbridge-020", &[("tp", "")]).prediction.map(|_| ()).expect_err("tensor ranks may be many");
    assert_eq!(reason, "tp is blank");
}

/// What a row leaves open of parts and experts is the faster of the narrowest and the widest.
#[test]
fn blank_parts_and_experts_are_chosen() {
    let row = |changes: &[(&str, &str)]| row_with("mbridge-020", changes).prediction.expect("supported");
    let open = row(&[("ep", "")]);
    let [one, widest] = ["1", "64"].map(|degree| row(&[("ep", degree)]));
    assert!(open == one || open == widest);
    assert_eq!(open.step.0, one.step.0.min(widest.step.0));
    let staged = |parts: &str| row_with("nemo2407-003", &[("vpp", parts)]).prediction.expect("supported");
    assert_eq!(staged(""), staged("12"));
    assert_eq!(row_with("mlm21-009", &[]).prediction.expect("supported").strategy.virtual_stages, 1);
}

/// Experts over more ranks than replicas and contexts are whole on tensor ranks, and take part of their tokens.
#[test]
fn experts_are_spread_over_tensor_ranks() {
    let rows = read_table(&table(), "runs.csv").expect("the table is sound");
    let predicted = validate(rows.into_iter().filter(|row| row.id == "mbridge-061").collect());
    let prediction = predicted[0].prediction.as_ref().expect("32 ranks for experts, of 16 replicas of 2 tensor ranks");
    assert!(prediction.step.0 > 0.0);
}

/// Cells of any kind end in a prediction, a reason, or a problem that names line and column: never in a panic.
#[test]
fn any_cells_are_handled() {
    let text = table();
    let lines: Vec<&str> = text.lines().collect();
    let header = lines[0];
    let columns = header.split(',').count();
    let cells = ["", "0", "1", "7", "-3", "1e9", "4294967296", "99999999999999999999", "full", "x", "\"a,b\"", "NaN"];
    let strategy = (1..lines.len(), proptest::collection::vec((0..columns, 0..cells.len()), 1..4));
    let mut runner = TestRunner::new(Config { cases: 400, ..Config::default() });
    let changed = |line: &str, edits: &[(usize, usize)]| -> String {
        let record = csv::ReaderBuilder::new().has_headers(false).from_reader(line.as_bytes()).records().next();
        let record = record.expect("a line").expect("a record");
        let mut fields: Vec<String> = record.iter().map(|cell| format!("\"{}\"", cell.replace('"', "'"))).collect();
        edits.iter().for_each(|(column, cell)| fields[*column] = cells[*cell].to_owned());
        fields.join(",")
    };
    let outcome = runner.run(&strategy, |(line, edits)| {
        let table = format!("{header}\n{}\n", changed(lines[line], &edits));
        if let Ok(rows) = read_table(&table, "runs.csv") {
            for row in validate(rows) {
                if let Ok(found) = row.prediction {
                    proptest::prop_assert!(found.step.0.is_finite() && found.step.0 > 0.0, "{table}");
                }
            }
        }
        Ok(())
    });
    outcome.expect("no cell is unhandled");
}

#[test]
fn malformed_tables_name_line_and_column() {
    let good = "id,layers,hidden,heads,seq_len,gpu,gpus,tp,pp,dp,global_batch,framework\n";
    let row = "a,2,128,2,64,H100-SXM,8,1,1,8,16,torchtitan (FSDP2)\n";
    let cases = [
        ("id,layers\n1,2\n".to_owned(), vec!["no column `hidden`", "no column `framework`"]),
        (format!("{good}{}", row.replace(",128,", ",wide,")), vec!["line 2", "`wide` in column hidden"]),
        (format!("{good}a,b\n"), vec!["line 2", "no table"]),
        (good.to_owned(), vec!["has no rows"]),
        (format!("{good}{}", row.replace("a,2,", "a,0,")), vec!["`0` in column layers"]),
    ];
    for (text, expected) in cases {
        let error = read_table(&text, "my.csv").expect_err("the table is malformed").to_string();
        for part in expected {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }
    let rows = read_table(&format!("{good}{row}"), "my.csv").expect("the table is sound");
    let validated = validate(rows);
    assert!(validated[0].prediction.is_ok(), "{:?}", validated[0].prediction);
}
