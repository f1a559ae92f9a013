//! What programs communicate, counted from their text, against counts by hand.

mod support;

use std::collections::BTreeMap;

use ir::distribution::SplitAxis;
use ir::graph::{DimName, Extent, build_graph};
use ir::model::ModelSpec;
use ir::program::{AttentionKernel, Body, Conversion, Instruction, Program, UpdateInstruction, Value};
use ir::schedule::{Pass, unroll};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use planner::compile::compile;
use support::layout;
use support::small::{Family, SEQUENCE, Shape, small_model};

const MICRO_BATCHES: u64 = 5;

fn model() -> ModelSpec {
    small_model(Shape { family: Family::Gpt2, tied: false, heads: 4, key_value_heads: 4, layers: 3, vocabulary: 20 })
}

fn strategy(tensor: u64, data: u64, zero_stage: ZeroStage, recompute: Recompute, sequence_parallel: bool) -> Strategy {
    Strategy {
        zero_stage,
        micro_batch: 2,
        recompute,
        sequence_parallel,
        layers_per_stage: vec![3],
        ..layout(tensor, 1, data, 2 * data * MICRO_BATCHES)
    }
}

/// Conversions over tensor ranks of one pass of a layer, with the elements of each message.
fn tensor_messages(body: &Body, pass: &[Instruction]) -> Vec<(Conversion, u64)> {
    let message = |instruction: &Instruction| match instruction {
        Instruction::Convert(conversion, axes, from, _) if axes.contains(&SplitAxis::Tensor) => {
            Some((*conversion, elements(&body.values[from.0 as usize])))
        }
        _ => None,
    };
    pass.iter().filter_map(message).collect()
}

/// Elements of a value for a micro-batch of 2 on one replica, over all tensor ranks.
fn elements(value: &Value) -> u64 {
    let extent = |extent| match extent {
        Extent::MicroBatch => 2,
        Extent::Sequence => SEQUENCE as u64,
        Extent::Fixed(size) => size,
    };
    value.shape.iter().map(|dim| extent(dim.extent)).product()
}

#[test]
fn a_layer_reduces_twice_forward_and_twice_backward() {
    // Megatron-LM, arXiv 1909.08053, section 3: f and g of attention and of the feed-forward part, each of
    // b·s·h elements (2·b·s·h bytes in bf16).
    let model = model();
    let stream = 2 * SEQUENCE as u64 * model.hidden_size;
    for (recompute, expected) in [(Recompute::None, 2), (Recompute::Selective, 2), (Recompute::Full, 3)] {
        let program = compile(
            &model,
            &build_graph(&model),
            &strategy(2, 1, ZeroStage::None, recompute, false),
            AttentionKernel::Primitive,
        );
        let layer = &program.bodies[1];
        assert_eq!(tensor_messages(layer, &layer.forward), [(Conversion::AllReduceSum, stream); 2], "{recompute:?}");
        // Full recomputation repeats forward's first; the second ends the layer and nobody reads it again.
        let backward = tensor_messages(layer, &layer.backward);
        assert_eq!(backward, vec![(Conversion::AllReduceSum, stream); expected], "{recompute:?}");
    }
}

#[test]
fn sequence_parallelism_gathers_and_scatters_instead() {
    // Korthikanti et al., arXiv 2205.05198, section 4.2.2: two pairs forward, two pairs backward, and the
    // two inputs of split weights gathered once more for the weights' gradients.
    let model = model();
    let stream = 2 * SEQUENCE as u64 * model.hidden_size;
    let program = compile(
        &model,
        &build_graph(&model),
        &strategy(2, 1, ZeroStage::None, Recompute::None, true),
        AttentionKernel::Primitive,
    );
    let layer = &program.bodies[1];
    let count = |pass: &[Instruction], conversion: Conversion| {
        let messages = tensor_messages(layer, pass);
        messages.into_iter().filter(|message| *message == (conversion, stream)).count()
    };
    let (gather, scatter) = (Conversion::AllGather(DimName::Sequence), Conversion::ReduceScatter(DimName::Sequence));
    assert_eq!((count(&layer.forward, gather), count(&layer.forward, scatter)), (2, 2));
    assert_eq!((count(&layer.backward, gather), count(&layer.backward, scatter)), (4, 2));
}

/// Parameter elements that cross the data axis in a step, by conversion, counted by message size.
fn data_elements(program: &Program) -> BTreeMap<&'static str, u64> {
    let mut counted = BTreeMap::new();
    let mut add = |conversion: &Conversion, elements: u64| {
        let name = match conversion {
            Conversion::AllReduceSum => "all_reduce",
            Conversion::AllGatherFlat => "all_gather",
            Conversion::ReduceScatterFlat => "reduce_scatter",
            other => panic!("{other:?} over replicas"),
        };
        *counted.entry(name).or_default() += elements;
    };
    for stage in &program.stages {
        for pass in unroll(&stage.schedule, MICRO_BATCHES, 10_000).expect("the schedule is sound") {
            let (body, instructions) = match pass {
                Pass::Forward(body, ..) => (body, &program.bodies[body as usize].forward),
                Pass::Backward(body, ..) => (body, &program.bodies[body as usize].backward),
                Pass::StartReduction(body, _, (first, end), conversion) => {
                    for parameter in &program.bodies[body as usize].parameters[first as usize..end as usize] {
                        add(&conversion, parameter.shape.iter().map(|(_, extent)| extent).product());
                    }
                    continue;
                }
                Pass::Receive(..) | Pass::Send(..) => continue,
            };
            for instruction in instructions {
                if let Instruction::Start(conversion, axes, from, _) = instruction
                    && axes == &[SplitAxis::Data]
                {
                    add(conversion, elements(&program.bodies[body as usize].values[from.0 as usize]));
                }
            }
        }
        for instruction in &stage.update {
            let UpdateInstruction::GatherOverData(range) = instruction else { continue };
            for parameter in range.each() {
                let shape = &program.bodies[range.body as usize].parameters[parameter.parameter as usize].shape;
                add(&Conversion::AllGatherFlat, shape.iter().map(|(_, extent)| extent).product());
            }
        }
    }
    counted
}

#[test]
fn the_data_axis_moves_what_zero_says() {
    // ZeRO, arXiv 1910.02054, section 7, in parameter elements P of a step of m micro-batches: ZeRO-1 2 P,
    // ZeRO-2 (m + 1) P, ZeRO-3 3 m P. Gradients travel in the accumulation format (fp32), parameters in
    // their own (bf16 in bf16 models).
    let model = model();
    let parameters = ir::graph::count_parameters(&model);
    let m = MICRO_BATCHES;
    // Backward reads weights of products and norms again; it needs no bias and no table that was looked up.
    let again: u64 = build_graph(&model)
        .blocks
        .iter()
        .flat_map(|block| block.parameters().map(|parameter| (block.count, parameter)))
        .filter(|(_, parameter)| !parameter.name.ends_with("bias") && !parameter.name.starts_with("embedding"))
        .map(|(count, parameter)| count * ir::graph::parameter_elements(&parameter.output))
        .sum();
    let table = [
        (ZeroStage::None, vec![("all_reduce", parameters)]),
        (ZeroStage::OptimizerState, vec![("all_gather", parameters), ("reduce_scatter", parameters)]),
        (ZeroStage::Gradients, vec![("all_gather", parameters), ("reduce_scatter", m * parameters)]),
        (ZeroStage::Parameters, vec![("all_gather", m * (parameters + again)), ("reduce_scatter", m * parameters)]),
    ];
    for (zero_stage, expected) in table {
        let layout = strategy(1, 2, zero_stage, Recompute::None, false);
        let program = compile(&model, &build_graph(&model), &layout, AttentionKernel::Primitive);
        assert_eq!(data_elements(&program), expected.into_iter().collect(), "{zero_stage:?}");
    }
    assert!(again as f64 > 0.85 * parameters as f64, "ZeRO-3 moves 3 m P but for biases and tables");
}
