//! `execute-plan gpu-check`: check and measure the kernels on this host's GPU.

use std::process::ExitCode;

use runtime::Error;

use crate::arguments::GpuCheckOptions;

/// Checks a device and prints what was seen. What is wrong with its kernels goes to stderr and ends with 3.
#[cfg(feature = "kernels")]
pub fn run(options: &GpuCheckOptions) -> Result<ExitCode, Error> {
    use runtime::gpu_check::device::Driver;
    use runtime::gpu_check::{Request, check, tables};

    let driver = match options.driver {
        crate::arguments::Driver::Cuda => Driver::Cuda,
        crate::arguments::Driver::Wgpu => Driver::Wgpu,
    };
    let request = Request { driver, full: options.full, out: options.out.as_deref() };
    let report = check(request, &|step| eprintln!("{step}…")).inspect_err(|error| report_error(options, error))?;
    match options.json {
        true => println!("{}", serde_json::to_string_pretty(&report).expect("a report is plain data")),
        false => print!("{}", tables(&report)),
    }
    match report.problems() {
        problems if problems.is_empty() => Ok(ExitCode::SUCCESS),
        problems => Err(Error::Verification(problems)),
    }
}

/// Says that there is nothing to check with.
#[cfg(not(feature = "kernels"))]
pub fn run(options: &GpuCheckOptions) -> Result<ExitCode, Error> {
    let what = format!("this program was built without kernels for GPUs, so {:?} runs none", options.driver);
    let help = "build it with `--features cuda`, or with `--features wgpu` for a Vulkan driver";
    let error = ir::error::Problem::new(what, "execute-plan gpu-check", help).into();
    report_error(options, &error);
    Err(error)
}

/// An error as JSON where that was asked for.
fn report_error(options: &GpuCheckOptions, error: &Error) {
    if let (true, Error::BadInput(problems) | Error::Verification(problems)) = (options.json, error)
        && let Some(first) = problems.first()
    {
        let error = serde_json::json!({ "what": first.what, "where": first.location, "help": first.help });
        println!("{}", serde_json::json!({ "error": error }));
    }
}
