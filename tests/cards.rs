//! What is said on hosts without a GPU, or whose driver does not serve: over fakes of the driver's library.

#[path = "support/c_library.rs"]
mod c_library;

use std::path::Path;
use std::process::Command;

use c_library::make_library;

/// A driver that starts with `started`, is of CUDA `version`, and has `count` cards.
fn driver(started: u32, version: u32, count: u32) -> String {
    format!(
        "int cuInit(unsigned flags) {{ return {started}; }}
        int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
        int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
        int cuDeviceGet(int *card, int index) {{ *card = index; return 0; }}
        int cuDeviceGetAttribute(int *number, int which, int card) {{ *number = 9; return 0; }}
        int cuGetErrorName(int error, const char **text) {{ *text = \"CUDA_ERROR_NO_DEVICE\"; return 0; }}
        int cuGetErrorString(int error, const char **text) {{ *text = \"no CUDA-capable device\"; return 0; }}"
    )
}

/// Runs gpu-check where only the libraries of a folder are found, and gives its exit code and message.
fn gpu_check(libraries: &Path, cuda: Option<&Path>) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_execute-plan"));
    command.arg("gpu-check").env("LD_LIBRARY_PATH", libraries).env_remove("CUDA_PATH");
    command.env("CUDA_VISIBLE_DEVICES", "3");
    if let Some(cuda) = cuda {
        command.env("CUDA_PATH", cuda);
    }
    let output = command.output().expect("the program starts");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn hosts_whose_driver_does_not_serve_are_told_why() {
    let drivers: [(Option<String>, &[&str]); 5] = [
        (None, &["no driver library libcuda.so or libcuda.so.1", "--gpus all"]),
        (
            Some(driver(100, 12_080, 0)),
            &["cuInit says CUDA_ERROR_NO_DEVICE: no CUDA-capable device", "CUDA_VISIBLE_DEVICES=3"],
        ),
        (Some(driver(0, 11_080, 1)), &["the NVIDIA driver is of CUDA 11.8", "CUDA 12 or newer"]),
        (Some(driver(0, 12_080, 0)), &["cuDeviceGetCount says CUDA_ERROR_NO_DEVICE"]),
        // A card, but nothing to compile its kernels with.
        (Some(driver(0, 12_000, 1)), &["there is no libnvrtc.so.12", "nvidia-cuda-nvrtc-cu12"]),
    ];
    for (source, expected) in drivers {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        if let Some(source) = source {
            make_library(folder.path(), "libcuda.so.1", &source);
        }
        let (code, message) = gpu_check(folder.path(), None);
        assert_eq!(code, Some(2), "{message}");
        for part in expected.iter().chain(&["--> execute-plan gpu-check"]) {
            assert!(message.contains(part), "{part} in: {message}");
        }
    }
}

#[test]
fn headers_that_are_missing_are_named_with_their_package() {
    let folder = tempfile::tempdir().expect("there is room for a folder");
    make_library(folder.path(), "libcuda.so.1", &driver(0, 12_080, 1));
    make_library(folder.path(), "libnvrtc.so.12", "int nvrtcVersion(int *a, int *b) { return 0; }");
    let include = folder.path().join("include");
    std::fs::create_dir_all(&include).expect("the folder can be written to");
    let (code, message) = gpu_check(folder.path(), Some(folder.path()));
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("cuda_bf16.h is not in") && message.contains("nvidia-cuda-runtime-cu12"), "{message}");
    std::fs::write(include.join("cuda_bf16.h"), "").expect("the folder can be written to");
    let (code, message) = gpu_check(folder.path(), Some(folder.path()));
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("nv/target") && message.contains("nvidia-cuda-cccl-cu12"), "{message}");
}
