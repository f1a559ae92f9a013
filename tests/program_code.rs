//! Every kernel that steps of bf16 programs send, of each family on one rank and on four, compiled for sm_90 where
//! there is no GPU: a device that lists kernels checks the formats and lengths of their tensors as one that runs them.
//!
//! `PLANWRIGHT_CUDA` and NVRTC as for the test `kernel_code`.

#[path = "support/ranks.rs"]
mod ranks;
mod support;

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;

use ir::model::{Attention, DType, FeedForward, ModelSpec, Vocabulary, Workload};
use ir::plan::Plan;
use ir::strategy::Recompute;
use ir::units::SequenceLength;
use kernels::ListedKernel;
use kernels::ptx::{Toolkit, list, write};
use planner::request::FixedChoices;
use ranks::OPTIMIZER;
use runtime::communicator::{Options, World, run_ranks};
use runtime::device::Device;
use runtime::executor::{Executor, MicroBatches, StepOptions};
use runtime::tensor::Memory;
use runtime::train::Dropout;
use support::plans::fixed_plan;
use support::small::{Family, Shape, small_model};

/// The architecture of H100 and H200.
const ARCHITECTURE: u32 = 90;
/// Tokens of a sequence.
const SEQUENCE: u64 = 256;

/// A bf16 model with heads of width 64 or more, of two layers.
fn model(family: Family, heads: u64, key_value_heads: u64, head_dim: u64) -> ModelSpec {
    let tied = family != Family::Llama;
    let small = small_model(Shape { family, tied, heads, key_value_heads, layers: 2, vocabulary: 997 });
    let hidden = heads * head_dim;
    ModelSpec {
        hidden_size: hidden,
        attention: Attention::MultiHead {
            num_attention_heads: heads,
            num_key_value_heads: Some(key_value_heads),
            head_dim: None,
        },
        feed_forward: match small.feed_forward {
            FeedForward::SwiGlu { .. } => FeedForward::SwiGlu { intermediate_size: 3 * hidden },
            _ => FeedForward::Gelu { intermediate_size: 4 * hidden },
        },
        vocabulary: Vocabulary { size: 997, padded: Some(1024) },
        max_sequence_length: SequenceLength::Tokens(SEQUENCE),
        dtype: DType::BF16,
        ..small
    }
}

fn plan(model: ModelSpec, flash: bool, recompute: Recompute, [tensor, pipeline, data]: [u64; 3]) -> Plan {
    let fixed = FixedChoices {
        tensor_parallel: Some(tensor),
        pipeline_parallel: Some(pipeline),
        data_parallel: Some(data),
        micro_batch: Some(2),
        recompute: Some(recompute),
        sequence_parallel: Some(tensor > 1),
        ..FixedChoices::default()
    };
    fixed_plan(model, Workload { sequence_length: SEQUENCE, global_batch: 4 * data }, flash, fixed)
}

/// Runs an evaluation and a step that drops, with weights of zero, and gives the kernels.
fn kernels_of(plan: &Plan, world: &World) -> Vec<ListedKernel> {
    let device = Device::listing(list(ARCHITECTURE));
    let program = plan.program.as_ref().expect("the plan is executable");
    let memory = Memory::on(device.clone());
    let mut executor = Executor::in_memory(memory, plan, program, world, &|_, _| true, &mut |_, _, _, _, _| Ok(()))
        .expect("nothing fills the weights");
    let tokens = vec![vec![1; 2 * SEQUENCE as usize]; 2];
    let positions = (0..SEQUENCE as u32).collect();
    let input = MicroBatches { tokens: tokens.clone(), targets: tokens, positions };
    let options = StepOptions { dropout: Dropout { hidden: 0.1, attention: 0.0 }, ..OPTIMIZER };
    executor.evaluate(&input).expect("a list fails nowhere");
    executor.step(&input, &options).expect("a list fails nowhere");
    device.take_kernels()
}

#[test]
fn kernels_of_bf16_programs_compile() {
    let folder = env::var_os("PLANWRIGHT_CUDA").map(PathBuf::from);
    let toolkit = Toolkit::in_packages(&folder.expect("PLANWRIGHT_CUDA names the folder of the CUDA packages"));
    let models = [
        ("GPT-2", model(Family::Gpt2, 4, 4, 64)),
        ("BLOOM", model(Family::Bloom, 4, 4, 64)),
        ("Llama", model(Family::Llama, 4, 2, 128)),
    ];
    let mut different: BTreeMap<String, (&str, ListedKernel)> = BTreeMap::new();
    for (name, model) in models {
        for (flash, recompute, ranks) in [
            (true, Recompute::Full, [1, 1, 1]),
            (false, Recompute::None, [1, 1, 1]),
            (true, Recompute::None, [2, 1, 2]),
        ] {
            let plan = plan(model.clone(), flash, recompute, ranks);
            let found = run_ranks(ranks.iter().product(), 1, Options::default(), |world| {
                let world = world.expect("ranks find one another");
                let kernels = kernels_of(&plan, &world);
                world.finish().expect("all ranks end");
                kernels
            });
            let found = found.expect("a port is free").into_iter().flat_map(|rank| rank.expect("no rank panics"));
            different.extend(found.map(|kernel| (kernel.identity(), (name, kernel))));
        }
    }
    let failed: Vec<String> = different
        .values()
        .filter_map(|(name, kernel)| Some(format!("{name}: {}", write(kernel, ARCHITECTURE, &toolkit).err()?)))
        .collect();
    eprintln!("{} different kernels", different.len());
    assert!(different.len() > 50, "a step sends more kernels than {}", different.len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
