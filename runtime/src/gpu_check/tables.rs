//! A report as tables that people read, in Markdown.

use std::fmt::Write;

use super::bandwidth::Time;
use super::products::Computed;
use super::steps::FORMULA;
use super::{Outcome, Report, WANTED_SHARE};

/// The whole report.
pub fn tables(report: &Report) -> String {
    let mut text = String::new();
    head(report, &mut text)
        .and_then(|()| numbers(report, &mut text))
        .and_then(|()| bandwidth(report, &mut text))
        .and_then(|()| computed("Matrix products", &report.products, &mut text))
        .and_then(|()| computed("Attention, the causal half counted", &report.attention, &mut text))
        .and_then(|()| steps(report, &mut text))
        .and_then(|()| pytorch(report, &mut text))
        .expect("text can be written to");
    text
}

fn head(report: &Report, text: &mut String) -> std::fmt::Result {
    let memory = report.memory_bytes.map(|bytes| format!(", {:.1} GiB", bytes as f64 / f64::from(1 << 30)));
    writeln!(text, "# {}\n\n{}{}.", report.device, report.about, memory.unwrap_or_default())?;
    let wrong = report.problems().len();
    let right = report.numbers.iter().filter(|comparison| comparison.wrong.is_none()).count();
    writeln!(text, "{right} of {} results of kernels are right, {wrong} problems.", report.numbers.len())?;
    let (Outcome::Done(nccl) | Outcome::NotDone(nccl)) = &report.nccl;
    let (Outcome::Done(ranks) | Outcome::NotDone(ranks)) = &report.ranks;
    writeln!(text, "Ranks: {ranks}.\nNCCL: {nccl}.\n")
}

/// One line for each kernel, of its worst result.
fn numbers(report: &Report, text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "## Numbers against fp64\n\n| Kernel | Format | Results | Largest error | Allowed |\n|---|---|---|---|---|"
    )?;
    let mut rest = &report.numbers[..];
    while let Some(first) = rest.first() {
        let kernel = |name: &str| name.split([' ', ',']).next().unwrap_or_default().to_owned();
        let same = |other: &&super::Comparison| kernel(&other.kernel) == kernel(&first.kernel);
        let (of_kernel, others) = rest.split_at(rest.iter().take_while(same).count());
        for format in ["fp32", "bf16"] {
            let own: Vec<_> = of_kernel.iter().filter(|comparison| comparison.format == format).collect();
            if let Some(worst) = own.iter().max_by(|a, b| a.largest_error.total_cmp(&b.largest_error)) {
                let (error, allowed) = (worst.largest_error, worst.tolerance);
                writeln!(
                    text,
                    "| {} | {format} | {} | {error:.1e} | {allowed:.1e} |",
                    kernel(&first.kernel),
                    own.len()
                )?;
            }
        }
        rest = others;
    }
    for comparison in &report.numbers {
        if let Some(wrong) = &comparison.wrong {
            writeln!(text, "\nwrong: {}, {}: {wrong}", comparison.kernel, comparison.format)?;
        }
    }
    writeln!(text)
}

fn bandwidth(report: &Report, text: &mut String) -> std::fmt::Result {
    let wanted = WANTED_SHARE * 100.0;
    writeln!(text, "## Memory-bound kernels (wanted: {wanted:.0} % of a copy)\n")?;
    writeln!(text, "| Kernel | Sizes | Format | MB | us | GB/s | of a copy |\n|---|---|---|---|---|---|---|")?;
    for timed in &report.bandwidth {
        let (kernel, sizes, format, bytes) = (timed.kernel, &timed.sizes, timed.format, timed.bytes as f64 / 1e6);
        write!(text, "| {kernel} | {sizes} | {format} | {bytes:.1} |")?;
        match (&timed.time, timed.bytes_per_second, timed.share_of_copy) {
            (Time::Seconds(seconds), Some(bandwidth), Some(share)) => {
                let below = if share < WANTED_SHARE { ", below" } else { "" };
                writeln!(text, " {:.1} | {:.1} | {:.0} %{below} |", seconds * 1e6, bandwidth / 1e9, share * 100.0)?;
            }
            (Time::Failed(reason), ..) => writeln!(text, " failed: {} | | |", one_line(reason))?,
            _ => writeln!(text, " | | |")?,
        }
    }
    writeln!(text)
}

fn computed(title: &str, all: &[Computed], text: &mut String) -> std::fmt::Result {
    writeln!(text, "## {title}\n\n| Kernel | Sizes | Format | us | TFLOP/s |\n|---|---|---|---|---|")?;
    for it in all {
        write!(text, "| {} | {} | {} |", it.kernel, it.sizes, it.format)?;
        match (&it.time, it.flops_per_second) {
            (Time::Seconds(seconds), Some(rate)) => {
                writeln!(text, " {:.1} | {:.3} |", seconds * 1e6, rate / 1e12)?;
            }
            (Time::Failed(reason), _) => writeln!(text, " failed: {} | |", one_line(reason))?,
            _ => writeln!(text, " | |")?,
        }
    }
    writeln!(text)
}

fn steps(report: &Report, text: &mut String) -> std::fmt::Result {
    writeln!(text, "## Training steps\n\nMFU: {FORMULA}.\n")?;
    writeln!(text, "| Model | Format | Parameters | Tokens | ms | tokens/s | MFU | plan's ms | loss | tensors GiB |")?;
    writeln!(text, "|---|---|---|---|---|---|---|---|---|---|")?;
    for it in &report.steps {
        let (predicted, device) = (it.predicted_seconds * 1e3, &it.predicted_for);
        write!(text, "| {} | {} | {} | {} |", it.model, it.format, it.parameters, it.tokens)?;
        match (&it.time, it.tokens_per_second, it.losses) {
            (Time::Seconds(seconds), Some(rate), Some([first, last])) => {
                let mfu = it.mfu.map_or_else(String::new, |mfu| format!("{:.1} %", mfu * 100.0));
                let memory = it.memory_bytes as f64 / f64::from(1 << 30);
                write!(text, " {:.1} | {rate:.0} | {mfu} | {predicted:.1} on {device} |", seconds * 1e3)?;
                writeln!(text, " {first:.3} to {last:.3} | {memory:.2} |")?;
            }
            (Time::Failed(reason), ..) => writeln!(text, " failed: {} | | | | | |", one_line(reason))?,
            _ => writeln!(text, " | | | | | |")?,
        }
    }
    match &report.pytorch_steps {
        Outcome::NotDone(reason) => writeln!(text, "\nPyTorch: {reason}\n"),
        Outcome::Done(rows) => {
            writeln!(text, "\n| PyTorch | Mode | ms |\n|---|---|---|")?;
            for row in rows {
                match (row.seconds, &row.failed) {
                    (Some(seconds), _) => writeln!(text, "| {} | {} | {:.1} |", row.model, row.mode, seconds * 1e3)?,
                    (None, failed) => {
                        let reason = one_line(failed.as_deref().unwrap_or_default());
                        writeln!(text, "| {} | {} | failed: {reason} |", row.model, row.mode)?;
                    }
                }
            }
            writeln!(text)
        }
    }
}

fn pytorch(report: &Report, text: &mut String) -> std::fmt::Result {
    writeln!(text, "## PyTorch in the same run\n")?;
    match &report.pytorch {
        Outcome::NotDone(reason) => writeln!(text, "{reason}"),
        Outcome::Done(rows) => {
            writeln!(
                text,
                "| Operator | Sizes | Format | Mode | forward us | backward us |\n|---|---|---|---|---|---|"
            )?;
            for row in rows {
                let sizes: Vec<String> = row.sizes.iter().map(usize::to_string).collect();
                write!(text, "| {} | {} | {} | {} |", row.kernel, sizes.join(" x "), row.format, row.mode)?;
                let time = |seconds: Option<f64>| seconds.map_or_else(String::new, |it| format!("{:.1}", it * 1e6));
                match &row.failed {
                    None => writeln!(text, " {} | {} |", time(row.forward), time(row.backward))?,
                    Some(reason) => writeln!(text, " failed: {} | |", one_line(reason))?,
                }
            }
            Ok(())
        }
    }
}

/// The first line of a message, without what would end a table's cell.
fn one_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().replace('|', "/")
}
