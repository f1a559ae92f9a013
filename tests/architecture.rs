//! What STYLE and ARCHITECTURE promise about the tree, checked by reading it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const CRATES: [&str; 5] = ["ir", "hardware-profiles", "cost-models", "planner", "runtime"];

/// Folders of the crates, and of what lies inside one of them because only it will use it.
const FOLDERS: [&str; 6] = ["ir", "hardware-profiles", "cost-models", "planner", "runtime", "runtime/kernels"];

/// The allowed arrows between crates: ir <- hardware-profiles <- cost-models <- planner; runtime beside.
const ARROWS: [(&str, &[&str]); 5] = [
    ("ir", &[]),
    ("hardware-profiles", &["ir"]),
    ("cost-models", &["ir", "hardware-profiles"]),
    ("planner", &["ir", "hardware-profiles", "cost-models"]),
    ("runtime", &["ir", "hardware-profiles"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn manifest(name: &str) -> String {
    fs::read_to_string(root().join(name).join("Cargo.toml")).expect("every crate has a manifest")
}

/// Names in the `[dependencies]` section of a manifest.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let section = manifest.split("\n[").find(|section| section.starts_with("dependencies]")).unwrap_or_default();
    let names = section.lines().skip(1).filter_map(|line| line.split(['.', '=', ' ']).next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[test]
fn crates_depend_only_along_the_arrows() {
    for (name, allowed) in ARROWS {
        let found: BTreeSet<String> =
            dependencies(&manifest(name)).into_iter().filter(|other| CRATES.contains(&other.as_str())).collect();
        let allowed: BTreeSet<String> = allowed.iter().map(|name| (*name).to_owned()).collect();
        assert!(found.is_subset(&allowed), "{name} depends on {found:?}, allowed {allowed:?}");
    }
}

#[test]
fn packages_enter_only_the_crates_that_need_them() {
    let homes: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("petgraph", &["ir", "cost-models"][..]),
        ("good_lp", &["planner"][..]),
        ("clap", &["planner", "runtime"][..]),
        ("burn", &["runtime"][..]),
    ]);
    for name in CRATES {
        for (package, homes) in &homes {
            let used = dependencies(&manifest(name)).contains(*package);
            assert!(!used || homes.contains(&name), "{package} in {name}");
        }
    }
}

/// Kernels are compiled only for those who ask for them.
#[test]
fn the_default_build_has_no_kernels() {
    let manifest = manifest("runtime/kernels");
    let packages = dependencies(&manifest);
    let section = manifest.split("\n[").find(|section| section.starts_with("dependencies]")).unwrap_or_default();
    let optional = section.lines().filter(|line| line.contains("optional = true")).count();
    assert_eq!(packages.len(), optional, "{packages:?} are optional");
    assert!(!manifest.contains("default ="), "no feature is on by itself");
}

/// A part of burn may be named only where burn itself need not have it: optional, and of burn's version.
#[test]
fn burn_is_named_whole_or_with_parts_of_its_version() {
    assert!(dependencies(&manifest("runtime")).contains("burn"), "runtime's tensors are burn's");
    let workspace = manifest("");
    let version = |package: &str| {
        let line = workspace.lines().find(|line| line.starts_with(&format!("{package} = "))).expect("shared versions");
        line.split('"').nth(1).expect("a version").to_owned()
    };
    assert!(version("burn").starts_with('='), "burn is pinned");
    for name in CRATES {
        let manifest = manifest(name);
        for part in dependencies(&manifest).into_iter().filter(|other| other.starts_with("burn-")) {
            assert_eq!(version(&part), version("burn"), "{part} in {name}");
            let optional = format!("{part} = {{ workspace = true, optional = true }}");
            assert!(manifest.contains(&optional), "{part} in {name} is for a feature only");
        }
    }
}

#[test]
fn every_test_file_is_attached() {
    let manifests: String = FOLDERS.iter().map(|name| manifest(name)).collect();
    for entry in fs::read_dir(root().join("tests")).expect("the folder exists") {
        let path = entry.expect("readable").path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.file_name().and_then(|name| name.to_str()).expect("a plain name");
            assert!(manifests.contains(&format!("../tests/{name}\"")), "tests/{name} is attached to nothing");
        }
    }
}

fn source_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            source_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

#[test]
fn files_open_with_their_subject_and_stay_small() {
    let mut files = Vec::new();
    FOLDERS.iter().for_each(|name| source_files(&root().join(name).join("src"), &mut files));
    for path in files {
        let text = fs::read_to_string(&path).expect("UTF-8");
        assert!(text.starts_with("//! "), "{} has no module doc", path.display());
        assert!(text.lines().count() <= 600, "{} has {} lines", path.display(), text.lines().count());
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        assert!(!["util", "utils", "helper", "helpers", "common", "misc"].contains(&name), "{}", path.display());
    }
}

#[test]
fn profiles_are_called_as_their_files() {
    let named = hardware_profiles::builtin_clusters().expect("the clusters are sound").into_iter().map(|c| c.name);
    let clusters: Vec<String> = named.collect();
    let expected = [
        "aws-p3-v100",
        "cpu-host",
        "dgx-a100-40gb",
        "dgx-a100-80gb",
        "dgx-b200",
        "dgx-b300",
        "dgx-h100",
        "dgx-h200",
        "dgx2-v100",
        "gb200-nvl72",
        "gb300-nvl72",
        "h100-hbm2e",
        "jean-zay-a100-80gb",
        "jean-zay-v100",
        "mi300x",
        "mi350x",
        "mi355x",
    ];
    assert_eq!(clusters, expected);
    let stacks: Vec<String> =
        hardware_profiles::builtin_stacks().expect("the stacks are sound").into_iter().map(|s| s.name).collect();
    let expected = [
        "alpa",
        "deepspeed-hf-2023",
        "deepspeed-zero",
        "fsdp-2023",
        "fsdp-2024",
        "fsdp-compile-2024",
        "fsdp-te-2025",
        "maxtext-2024",
        "megatron-2021",
        "megatron-2022",
        "megatron-core-2024",
        "megatron-core-2025",
        "megatron-core-2026",
        "megatron-core-plain",
        "megatron-deepspeed-2022",
        "planwright",
    ];
    assert_eq!(stacks, expected);
    for device in hardware_profiles::builtin_devices().expect("the devices are sound") {
        assert_eq!(hardware_profiles::find_device(&device.name, "test").map(|d| d.name), Ok(device.name));
    }
    for cluster in clusters {
        let profile = hardware_profiles::find_cluster(&cluster, "test").expect("the file is called as its name");
        assert!(hardware_profiles::find_device(&profile.device, "test").is_ok(), "{cluster}");
    }
    for stack in stacks {
        let folder = root().join("hardware-profiles/stacks").join(format!("{stack}.ron"));
        let text = fs::read_to_string(folder).expect("the file is called as its name");
        hardware_profiles::read_stack(&text, &stack).expect("the numbers make sense");
    }
}
