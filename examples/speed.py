"""A GPT step in PyTorch: 4 layers, hidden 512, 8 heads, sequence 256, batch 4, vocabulary 8192, fp32.

Prints the median seconds of forward, backward and fused AdamW. Usage: speed.py THREADS (needs torch).
"""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 4, 512, 8, 256, 4, 8192


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query_key_value, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, HIDDEN // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(context.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.down(functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.tokens(ids) + self.positions(torch.arange(SEQUENCE)))))


def main():
    torch.set_num_threads(int(sys.argv[1]))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids, targets = (torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)) for _ in range(2))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        functional.cross_entropy(model(ids).view(-1, VOCABULARY), targets.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - start)
    print(f"PyTorch, {sys.argv[1]} threads: {statistics.median(times[1:]):.3f} s")


main()
