//! Trains a byte-level BPE tokenizer on text files: `train_tokenizer VOCABULARY OUT.json TEXT…`.
//!
//! The first id is `<|endoftext|>`, which `execute-plan prepare` puts behind each document.

use std::error::Error;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: train_tokenizer VOCABULARY OUT.json TEXT…";
    let (vocabulary, out) = (arguments.next().ok_or(usage)?, arguments.next().ok_or(usage)?);
    let texts: Vec<String> = arguments.collect();
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocabulary.parse()?)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
        .build();
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(byte_level))
        .with_post_processor(Some(byte_level))
        .with_decoder(Some(byte_level))
        .build()?;
    tokenizer.train_from_files(&mut trainer, texts)?.save(&out, false)?;
    Ok(())
}
