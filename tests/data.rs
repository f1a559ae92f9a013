//! Corpora as Megatron-Core writes them: read, written again byte for byte, refused when damaged, dealt to ranks.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use runtime::data::{
    BatchShape, Corpus, DatasetWriter, Source, TokenType, open_corpus, read_micro_batch, read_sample, sample_index,
    synthetic,
};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/megatron").join(name)
}

fn scratch() -> TempDir {
    TempDir::new().expect("a scratch folder")
}

/// A pair of files with documents, in a scratch folder.
fn written(token_type: TokenType, documents: &[&[u32]]) -> (TempDir, PathBuf) {
    let folder = scratch();
    let prefix = folder.path().join("corpus");
    let mut writer = DatasetWriter::create(&prefix, token_type).expect("created");
    documents.iter().for_each(|document| writer.add_document(document).expect("written"));
    writer.finish().expect("finished");
    (folder, prefix)
}

fn bytes(prefix: &Path, ending: &str) -> Vec<u8> {
    fs::read(format!("{}.{ending}", prefix.display())).expect("readable")
}

type Documents = &'static [&'static [u32]];

/// Fixtures of one sequence a document: name, type, documents.
const PAIRS: [(&str, TokenType, Documents); 4] = [
    ("small-u16", TokenType::U16, &[&[1, 2, 3], &[4], &[], &[5, 6, 7, 8, 9]]),
    ("wide-i32", TokenType::I32, &[&[65535, 65536, 70000], &[0, 99999]]),
    ("bytes-u8", TokenType::U8, &[&[0, 127, 255]]),
    ("long-i64", TokenType::I64, &[&[3, 2], &[1]]),
];

#[test]
fn files_of_megatron_core_are_read() {
    let sentences: Documents = &[&[10, 11, 12, 13, 14, 15], &[16]];
    for (name, _, documents) in PAIRS.into_iter().chain([("sentences-u16", TokenType::U16, sentences)]) {
        let corpus = Corpus::open(&fixture(name), 100_000).expect("the fixture is sound");
        let expected = documents.concat();
        assert_eq!(corpus.tokens(), expected.len() as u64, "{name}");
        assert_eq!(corpus.documents(), documents.len() as u64, "{name}");
        let mut tokens = vec![0; expected.len()];
        corpus.read(0, &mut tokens).expect("all ids are known");
        assert_eq!(tokens, expected, "{name}");
        let mut last = [0];
        corpus.read(expected.len() as u64 - 1, &mut last).expect("known");
        assert_eq!(last[0], expected[expected.len() - 1], "{name}");
    }
}

#[test]
fn written_files_are_those_of_megatron_core() {
    for (name, token_type, documents) in PAIRS {
        let (_folder, prefix) = written(token_type, documents);
        for ending in ["bin", "idx"] {
            assert_eq!(bytes(&prefix, ending), bytes(&fixture(name), ending), "{name}.{ending}");
        }
    }
}

#[test]
fn token_types_follow_the_size_of_the_vocabulary() {
    let rows = [(2, TokenType::U16), (65_499, TokenType::U16), (65_500, TokenType::I32), (250_880, TokenType::I32)];
    for (vocabulary, expected) in rows {
        assert_eq!(TokenType::for_vocabulary(vocabulary), expected, "{vocabulary}");
    }
}

#[test]
fn nothing_half_written_is_left_and_an_old_pair_is_replaced() {
    let (folder, prefix) = written(TokenType::U16, &[&[1, 2], &[3]]);
    let names = || -> BTreeSet<String> {
        let entries = fs::read_dir(folder.path()).expect("readable");
        entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect()
    };
    let pair = BTreeSet::from(["corpus.bin".to_owned(), "corpus.idx".to_owned()]);
    let mut abandoned = DatasetWriter::create(&prefix, TokenType::U16).expect("created");
    abandoned.add_document(&[7]).expect("written");
    drop(abandoned);
    assert_eq!(names(), pair);
    assert_eq!(Corpus::open(&prefix, 10).expect("the old pair is whole").tokens(), 3);
    let mut renewed = DatasetWriter::create(&prefix, TokenType::I32).expect("created");
    renewed.add_document(&[9; 5]).expect("written");
    renewed.finish().expect("finished");
    assert_eq!(names(), pair);
    assert_eq!(Corpus::open(&prefix, 10).expect("the new pair is whole").tokens(), 5);
}

#[test]
fn ids_that_do_not_fit_are_not_written() {
    for (token_type, token, fits) in [
        (TokenType::U16, 65_535, true),
        (TokenType::U16, 65_536, false),
        (TokenType::I16, 32_768, false),
        (TokenType::U8, 256, false),
        (TokenType::I8, 128, false),
        (TokenType::I32, 1 << 31, false),
    ] {
        let folder = scratch();
        let mut writer = DatasetWriter::create(&folder.path().join("c"), token_type).expect("created");
        assert_eq!(writer.add_document(&[token]).is_ok(), fits, "{token_type:?} {token}");
    }
}

/// A damaged copy of the fixture `small-u16`, and the message it gives.
fn message(damage: impl Fn(&mut Vec<u8>, &mut Vec<u8>)) -> String {
    let folder = scratch();
    let [mut bin, mut index] = ["bin", "idx"].map(|ending| bytes(&fixture("small-u16"), ending));
    damage(&mut bin, &mut index);
    fs::write(folder.path().join("c.bin"), bin).expect("writable");
    fs::write(folder.path().join("c.idx"), index).expect("writable");
    let problem = Corpus::open(&folder.path().join("c"), 10).map(|_| ()).expect_err("damage is noticed");
    assert!(!problem.help.is_empty() && problem.location.contains("c."), "{problem}");
    problem.what
}

#[test]
fn damaged_files_are_refused() {
    type Damage = fn(&mut Vec<u8>, &mut Vec<u8>);
    let rows: [(&str, Damage, &str); 17] = [
        ("short bin", |bin, _| bin.truncate(17), "17 bytes, but its index lists 9 tokens of 2 bytes: 18"),
        ("long bin", |bin, _| bin.push(0), "19 bytes, but its index lists 9 tokens of 2 bytes: 18"),
        ("empty index", |_, index| index.clear(), "does not start with MMIDIDX"),
        ("header cut", |_, index| index.truncate(33), "does not start with MMIDIDX"),
        ("foreign", |_, index| index[..4].copy_from_slice(b"PK\x03\x04"), "does not start with MMIDIDX"),
        ("former", |_, index| index[..8].copy_from_slice(b"TNTIDX\0\0"), "former layout"),
        ("version", |_, index| index[9] = 2, "version 2"),
        ("type 7", |_, index| index[17] = 7, "fractions (type code 7)"),
        ("type 6", |_, index| index[17] = 6, "fractions (type code 6)"),
        ("type 9", |_, index| index[17] = 9, "unknown type code 9"),
        ("wider type", |_, index| index[17] = 4, "starts at byte 6"),
        ("index cut", |_, index| index.truncate(109), "109 bytes, but 3 sequences and 5 document borders take 110"),
        ("huge count", |_, index| index[25] = 0xff, "more than 2^64"),
        (
            "no borders",
            |_, index| {
                index.truncate(70);
                index[26] = 0;
            },
            "cut short or damaged",
        ),
        ("modes", |_, index| index.extend([0; 3]), "multimodal"),
        ("negative length", |_, index| index[37] = 0x80, "sequence 0 has"),
        ("borders", |_, index| index[102] = 4, "documents run from sequence 0 to 4, of 3 sequences"),
    ];
    for (name, damage, expected) in rows {
        let found = message(damage);
        assert!(found.contains(expected), "{name}: {found}");
    }
    let fractions = Corpus::open(&fixture("floats-f32"), 10).expect_err("fractions are no ids");
    assert!(fractions.what.contains("fractions"), "{fractions}");
}

#[test]
fn messages_about_names_say_how_to_mend_them() {
    let (folder, prefix) = written(TokenType::U16, &[&[1]]);
    let megatron = folder.path().join("web");
    for ending in ["bin", "idx"] {
        let name = |stem: &str| folder.path().join(format!("{stem}.{ending}"));
        fs::copy(name("corpus"), name("web_text_document")).expect("copied");
    }
    let rows = [
        (with(&prefix, ".bin"), format!("--data {}", prefix.display())),
        (with(&prefix, ".idx"), format!("--data {}", prefix.display())),
        (megatron.clone(), format!("--data {}_text_document", megatron.display())),
        (folder.path().join("absent"), "execute-plan prepare".to_owned()),
    ];
    for (given, expected) in rows {
        let problem = Corpus::open(&given, 10).map(|_| ()).expect_err("no such pair");
        assert!(problem.help.contains(&expected), "{}: {problem}", given.display());
    }
    assert!(Corpus::open(&fixture("small-u16"), 10).is_ok());
}

fn with(prefix: &Path, ending: &str) -> PathBuf {
    PathBuf::from(format!("{}{ending}", prefix.display()))
}

#[test]
fn foreign_ids_are_named_with_file_and_position() {
    let rows = [
        ("small-u16", 9, "token 8 is id 9, but the model's vocabulary has ids 0 to 8"),
        ("negative-i16", 9, "token 1 is id -2"),
    ];
    for (name, vocabulary, expected) in rows {
        let corpus = Corpus::open(&fixture(name), vocabulary).expect("the files are sound");
        let mut tokens = vec![0; corpus.tokens() as usize];
        let problem = corpus.read(0, &mut tokens).expect_err("the id is foreign");
        assert!(problem.what.contains(expected) && problem.location.contains(name), "{problem}");
    }
}

#[test]
fn samples_overlap_by_one_token_and_wrap_around() {
    let sources = open_corpus(&fixture("small-u16"), 10, 0.0).expect("sound");
    // The corpus is 1 to 9, so that sample k of length 4 starts at token 4k mod 9.
    let rows: [(u64, [u32; 5]); 6] = [
        (0, [1, 2, 3, 4, 5]),
        (1, [5, 6, 7, 8, 9]),
        (2, [9, 1, 2, 3, 4]),
        (3, [4, 5, 6, 7, 8]),
        (4, [8, 9, 1, 2, 3]),
        (9, [1, 2, 3, 4, 5]),
    ];
    for (sample, expected) in rows {
        let mut tokens = [0; 5];
        read_sample(&sources.training, sample, &mut tokens).expect("known ids");
        assert_eq!(tokens, expected, "sample {sample}");
    }
    // A sample longer than the corpus goes around several times.
    let mut long = [0; 21];
    read_sample(&sources.training, 1, &mut long).expect("known ids");
    assert_eq!(long.to_vec(), (20..41).map(|at| at % 9 + 1).collect::<Vec<u32>>());
    let (inputs, targets) = read_micro_batch(&sources.training, 1, 2, 4).expect("known ids");
    assert_eq!(inputs, [5, 6, 7, 8, 9, 1, 2, 3]);
    assert_eq!(targets, [6, 7, 8, 9, 1, 2, 3, 4]);
}

#[test]
fn held_out_documents_are_whole_and_not_trained_on() {
    let (_folder, prefix) = written(TokenType::U16, &[&[1; 4], &[2; 3], &[3; 2], &[4; 1]]);
    let parts = |held_out| {
        let sources = open_corpus(&prefix, 10, held_out).map_err(|problem| problem.what)?;
        match (sources.training, sources.evaluation) {
            (Source::Corpus { part: training, .. }, Source::Corpus { part: evaluation, .. }) => {
                Ok((training, evaluation))
            }
            other => Err(format!("{other:?}")),
        }
    };
    let rows =
        [(0.0, (0..10, 0..10)), (0.1, (0..9, 9..10)), (0.2, (0..9, 9..10)), (0.3, (0..7, 7..10)), (0.6, (0..4, 4..10))];
    for (held_out, expected) in rows {
        assert_eq!(parts(held_out), Ok(expected), "{held_out}");
    }
    let single = open_corpus(&fixture("bytes-u8"), 256, 0.5).expect_err("one document cannot be split");
    assert!(single.what.contains("no documents can be held out"), "{single}");
}

#[test]
fn every_layout_reads_the_same_global_batch() {
    // Layouts of a global batch of 24: replicas, sequences of a micro-batch.
    for (data_parallel, micro_batch) in [(1, 1), (1, 24), (2, 3), (3, 2), (4, 6), (8, 3), (24, 1)] {
        let shape = BatchShape { data_parallel, micro_batch };
        let mut samples = Vec::new();
        for micro in 0..24 / (data_parallel * micro_batch) {
            for replica in 0..data_parallel {
                samples.extend((0..micro_batch).map(|sequence| sample_index(100, shape, micro, replica, sequence)));
            }
        }
        assert_eq!(samples, (100..124).collect::<Vec<u64>>(), "{shape:?}");
    }
    // Megatron's order: rank r takes [r · b, r · b + b) of each run of b · d samples.
    let shape = BatchShape { data_parallel: 4, micro_batch: 2 };
    assert_eq!(sample_index(16, shape, 3, 1, 1), 16 + 3 * 8 + 2 + 1);
}

#[test]
fn synthetic_tokens_depend_on_seed_and_place_alone() {
    let read = |source: &Source, sample, length: usize| {
        let mut tokens = vec![0; length + 1];
        read_sample(source, sample, &mut tokens).expect("all ids are known");
        tokens
    };
    let sources = synthetic(3, 50);
    let whole = read(&sources.training, 0, 64);
    assert_eq!(read(&sources.training, 3, 16), whole[48..]);
    assert!(whole.iter().all(|token| *token < 50));
    assert!(whole.iter().collect::<BTreeSet<_>>().len() > 25, "ids vary");
    assert_ne!(read(&sources.evaluation, 0, 64), whole);
    assert_ne!(read(&synthetic(4, 50).training, 0, 64), whole);
}
