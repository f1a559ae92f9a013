//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Runs a plan.
#[derive(Debug, Parser)]
#[command(name = "execute-plan", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    /// The subcommand; none runs a plan.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of a run.
    #[command(flatten)]
    pub run: RunOptions,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Tokenise text into the .bin and .idx files that --data reads
    Prepare(PrepareOptions),
}

/// Options of a run.
#[derive(Debug, Args)]
pub struct RunOptions {
    /// Plan file
    #[arg(required = true)]
    pub plan: Option<PathBuf>,
}

/// Options of `execute-plan prepare`.
#[derive(Debug, Args)]
pub struct PrepareOptions {
    /// Text: a .jsonl file with a document in the field `text` of each line; any other file is one document
    #[arg(required = true)]
    pub text: Vec<PathBuf>,
    /// Tokenizer file (tokenizer.json)
    #[arg(long, value_name = "FILE")]
    pub tokenizer: PathBuf,
    /// What the files are called, without .bin and .idx
    #[arg(long, value_name = "PREFIX")]
    pub out: PathBuf,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
}
