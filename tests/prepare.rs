//! `execute-plan prepare` writes what Megatron's preprocessing writes, and says what is wrong with its input.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use runtime::data::{Corpus, TokenType};
use runtime::prepare::{Report, Request, prepare};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/prepare").join(name)
}

fn request(folder: &TempDir, texts: &[PathBuf]) -> Request {
    let out = folder.path().join("corpus");
    Request { texts: texts.to_vec(), tokenizer: fixture("tokenizer.json"), out, force: false }
}

fn scratch() -> TempDir {
    TempDir::new().expect("a scratch folder")
}

/// Runs `execute-plan` in a folder.
fn execute_plan(folder: &TempDir, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_execute-plan"))
        .current_dir(folder.path())
        .args(arguments)
        .output()
        .expect("the program starts")
}

#[test]
fn files_are_those_of_megatron() {
    for (text, expected, documents) in [("documents.jsonl", "documents", 6), ("document.txt", "document", 1)] {
        let folder = scratch();
        let mut done = 0;
        let report = prepare(&request(&folder, &[fixture(text)]), |bytes| done += bytes).expect("prepared");
        for ending in ["bin", "idx"] {
            let found = fs::read(folder.path().join(format!("corpus.{ending}"))).expect("written");
            assert_eq!(
                found,
                fs::read(fixture(&format!("{expected}.{ending}"))).expect("readable"),
                "{text}: {ending}"
            );
        }
        let tokens = Corpus::open(&fixture(expected), 300).expect("sound").tokens();
        let separator = Some(("<|endoftext|>".to_owned(), 0));
        assert_eq!(report, Report { documents, tokens, vocabulary: 300, token_type: TokenType::U16, separator });
        assert_eq!(done, fs::metadata(fixture(text)).expect("exists").len(), "progress reaches the end");
    }
}

#[test]
fn texts_follow_one_another_and_batches_leave_no_trace() {
    let folder = scratch();
    let line = fs::read_to_string(fixture("documents.jsonl")).expect("readable");
    // More than two batches of 1 MiB, with blank lines and no newline at the end.
    let long = folder.path().join("long.jsonl");
    let copies = 5 * (1 << 19) / line.len();
    fs::write(&long, vec![line.trim_end(); copies].join("\n\n")).expect("writable");
    let texts = [fixture("document.txt"), long];
    let report = prepare(&request(&folder, &texts), |_| {}).expect("prepared");
    let single = |name: &str| Corpus::open(&fixture(name), 300).expect("sound").tokens();
    assert_eq!(report.documents, 1 + 6 * copies as u64);
    assert_eq!(report.tokens, single("document") + single("documents") * copies as u64);
    let corpus = Corpus::open(&folder.path().join("corpus"), 300).expect("sound");
    let mut tokens = vec![0; single("documents") as usize];
    let mut expected = tokens.clone();
    Corpus::open(&fixture("documents"), 300).and_then(|corpus| corpus.read(0, &mut expected)).expect("known ids");
    for copy in [0, copies / 2, copies - 1] {
        let start = single("document") + tokens.len() as u64 * copy as u64;
        corpus.read(start, &mut tokens).expect("known ids");
        assert_eq!(tokens, expected, "copy {copy}");
    }
}

#[test]
fn wrong_input_is_named_and_nothing_is_left() {
    let write = |folder: &TempDir, name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("writable");
        path
    };
    let rows: [(&str, &[u8], &str); 7] = [
        ("a.jsonl", b"{\"text\": \"a\"}\n{\"body\": \"b\"}\n", "a.jsonl, line 2"),
        ("b.jsonl", b"\n\nplain text\n", "b.jsonl, line 3"),
        ("c.jsonl", b"{\"text\": 5}\n", "c.jsonl, line 1"),
        ("d.jsonl", b"{\"text\": \"\xff\"}\n", "d.jsonl, line 1"),
        ("e.txt", b"\xff\xfe", "e.txt, byte 0"),
        ("f.json", b"{}", "f.json"),
        ("g.txt", b"x", "corpus"),
    ];
    for (name, bytes, location) in rows {
        let folder = scratch();
        let mut request = request(&folder, &[write(&folder, name, bytes)]);
        match name {
            "f.json" => request.tokenizer = request.texts[0].clone(),
            "g.txt" => request.out = folder.path().join("absent/corpus"),
            _ => {}
        }
        let problem = prepare(&request, |_| {}).expect_err(name);
        assert!(problem.location.ends_with(location) && !problem.help.is_empty(), "{name}: {problem}");
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1, "{name}: only the text is there");
    }
}

#[test]
fn the_command_prints_what_it_wrote() {
    let folder = scratch();
    let [text, tokenizer] = ["documents.jsonl", "tokenizer.json"].map(|name| fixture(name).display().to_string());
    let arguments = ["prepare", &text, "--tokenizer", &tokenizer, "--out", "corpus"];
    let first = execute_plan(&folder, &arguments);
    let expected = "corpus.bin, corpus.idx: 6 documents, 154 tokens of 2 bytes; ids 0 to 299; \
                    each document ends with <|endoftext|>, id 0\n";
    assert_eq!(String::from_utf8_lossy(&first.stdout), expected);
    assert_eq!((first.status.code(), first.stderr.len()), (Some(0), 0), "no bar where stderr is no terminal");
    let second = execute_plan(&folder, &arguments);
    assert_eq!(second.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&second.stderr).contains("--force"));
    let forced = execute_plan(&folder, &[&arguments[..], &["--force"]].concat());
    assert_eq!(forced.status.code(), Some(0));
}

#[test]
fn command_lines_that_cannot_be_followed_end_with_2() {
    let tokenizer = fixture("tokenizer.json").display().to_string();
    let rows: [(&[&str], &str); 5] = [
        (&["absent.plan.ron"], "absent.plan.ron"),
        (&[], "<PLAN>"),
        (&["prepare"], "--tokenizer"),
        (&["prepare", "absent.txt", "gone.txt", "--tokenizer", &tokenizer, "--out", "c"], "gone.txt"),
        (&["prepare", ".", "--tokenizer", &tokenizer, "--out", "c"], "this is no file"),
    ];
    for (arguments, expected) in rows {
        let output = execute_plan(&scratch(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains(expected), "{arguments:?}: {message}");
    }
}
