#!/usr/bin/env bash
# A GPT step beside PyTorch's, in turns: median seconds of 7 steps with 1 and 2 threads, and of two replicas with one
# thread each and twice the batch.
#
#   examples/speed.sh PYTHON      a Python that has torch
set -euo pipefail
python=${1:?usage: speed.sh PYTHON}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$root"
cargo build --quiet --release --locked -p planner -p runtime --bins
programs=${CARGO_TARGET_DIR:-$root/target}/release

# plan NAME GPUS BATCH
plan() {
  cat >"$folder/$1.ron" <<MODEL
(
  name: "$1", source: "shapes of a benchmark", num_layers: 4, hidden_size: 512,
  attention: MultiHead(num_attention_heads: 8), feed_forward: Gelu(intermediate_size: 2048), norm: LayerNorm,
  norm_epsilon: 1e-5, bias: All, position: Learned, vocabulary: (size: 8192), embedding_norm: false,
  tied_embedding: false, max_sequence_length: Tokens(256), sequence_length: Tokens(256),
  global_batch: Sequences($3), dtype: FP32,
)
MODEL
  "$programs/plan" --model "$folder/$1.ron" --gpus "$2" --node-gpus "$2" --cluster cpu-host --tensor-parallel 1 \
    --pipeline-parallel 1 --micro-batch 4 --recompute none --out "$folder/$1.plan.ron" >/dev/null
}

# run NAME: the median of its steps
run() {
  rm -f "$folder/log"
  "$programs/execute-plan" "$folder/$1.plan.ron" --synthetic --steps 7 --log "$folder/log" >/dev/null 2>&1
  sed 's/.*"seconds":\([0-9.e-]*\).*/\1/' "$folder/log" | sort -g | sed -n 4p
}

plan one 1 4
plan two 2 8
for threads in 1 2 1 2; do
  echo "execute-plan, $threads threads: $(RAYON_NUM_THREADS=$threads run one) s"
  OMP_NUM_THREADS=$threads "$python" examples/speed.py "$threads"
done
echo "execute-plan, two replicas of one thread, twice the batch: $(run two) s"
