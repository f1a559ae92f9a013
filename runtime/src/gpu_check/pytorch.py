"""Times of PyTorch's operators on the sizes that are read as JSON, eager and compiled, as JSON lines."""

import json
import sys
import time

import torch
import torch.nn.functional as F

request = json.load(sys.stdin)
device = torch.device(request["device"])
if device.type == "cuda" and not torch.cuda.is_available():
    sys.exit("this PyTorch finds no CUDA device")
# Of fp32 products, those of fp32: the kernels beside them use no TF32.
torch.backends.cuda.matmul.allow_tf32 = False
deadline = time.monotonic() + request["seconds"]


def wait():
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(call):
    """Median over rounds of calls that take long enough together."""

    def turn(calls):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - start) / calls

    turn(1)
    calls = max(1, min(1000, int(0.02 / max(turn(1), 1e-9))))
    return sorted(turn(calls) for _ in range(5))[2]


def numbers(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


def operators(kernel, sizes, dtype):
    """The forward function of a kernel and its operands."""
    if kernel == "product":
        rows, depth, columns = sizes
        return torch.matmul, [numbers(rows, depth, dtype=dtype), numbers(depth, columns, dtype=dtype)]
    if kernel == "attention":
        sequences, positions, heads, width = sizes
        operands = [numbers(sequences, heads, positions, width, dtype=dtype, grad=True) for _ in range(3)]
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), operands
    rows, columns = sizes
    row = numbers(columns, dtype=dtype, grad=True)
    x, other = (numbers(rows, columns, dtype=dtype, grad=True) for _ in range(2))
    if kernel == "copy":
        return lambda x: x.clone(), [x.detach()]
    if kernel == "bias_gelu":
        return lambda x, b: F.gelu(x + b, approximate="tanh"), [x, row]
    if kernel == "swiglu":
        return lambda x, y: F.silu(x) * y, [x, other]
    if kernel == "layer_norm":
        bias = numbers(columns, dtype=dtype, grad=True)
        return lambda x, r, w, b: F.layer_norm(x + r, (columns,), w, b), [x, other, row, bias]
    if kernel == "rms_norm":
        return lambda x, r, w: F.rms_norm(x + r, (columns,), w), [x, other, row]
    if kernel == "loss":
        targets = torch.randint(columns, (rows,), device=device)
        return lambda x: F.cross_entropy(x.float(), targets, reduction="sum"), [x]
    raise ValueError(kernel)


for kernel, sizes, format in request["operators"]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[format]
    for mode in ["eager", "compiled"]:
        if time.monotonic() > deadline:
            sys.exit("the time for PyTorch is over")
        row = {"kernel": kernel, "sizes": sizes, "format": format, "mode": mode}
        try:
            forward, operands = operators(kernel, sizes, dtype)
            if mode == "compiled":
                forward = torch.compile(forward)
            with torch.no_grad():
                row["forward"] = seconds(lambda: forward(*operands))
            if any(operand.requires_grad for operand in operands):
                result = forward(*operands)
                gradient = torch.ones_like(result)
                leaves = [operand for operand in operands if operand.requires_grad]
                row["backward"] = seconds(
                    lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)
                )
        except Exception as error:  # what one operator lacks must not hide the others
            row["failed"] = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(json.dumps(row), flush=True)
