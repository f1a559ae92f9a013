"""Time of a training step of GPT-2 in PyTorch, eager and compiled, as JSON lines; sizes are read as JSON."""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

request = json.load(sys.stdin)
device = torch.device(request["device"])
if device.type == "cuda" and not torch.cuda.is_available():
    sys.exit("this PyTorch finds no CUDA device")
deadline = time.monotonic() + request["seconds"]
layers, heads, width, vocabulary, length, micro_batch, micro_batches = (
    request[name]
    for name in ["layers", "heads", "width", "vocabulary", "length", "micro_batch", "micro_batches"]
)


def wait():
    if device.type == "cuda":
        torch.cuda.synchronize()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.attend(self.first(x)).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(context.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(layers)]), nn.LayerNorm(width)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, vocabulary).float(), targets.view(-1))


def step_time(mode):
    """Mean time of up to ten steps of micro-batches, AdamW and clipping, in bf16 over fp32 weights, after two others."""
    torch.manual_seed(1)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    forward = torch.compile(model) if mode == "compiled" else model
    tokens = torch.randint(vocabulary, (2, micro_batch, length), device=device)

    def step():
        for _ in range(micro_batches):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = forward(tokens[0], tokens[1])
            (loss / micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def seconds(steps):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        return (time.perf_counter() - start) / steps

    seconds(1)
    once = seconds(1)
    return seconds(max(1, min(10, int((deadline - time.monotonic()) / 2 / once))))


for mode in ["eager", "compiled"]:
    if time.monotonic() > deadline:
        sys.exit("the time for PyTorch is over")
    row = {"mode": mode}
    try:
        row["seconds"] = step_time(mode)
    except Exception as error:  # what one mode lacks must not hide the other
        row["failed"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    print(json.dumps(row), flush=True)
