"""Times kernels of PyTorch's libraries on the named problems, and records them as peers: torch, flash-linear-attention
(fla), and of attention FlashAttention-3 (fa3) and FlashInfer (`torch_attention.py`).

`python -m bench OP` starts this in a process of its own, because torch and JAX bring CUDA libraries of their own. Times
are those between two CUDA events, which is a few microseconds more than the kernels take. A library that is missing, or
whose result is wrong, is left out, and the record says why: `pip install flash-linear-attention`.
"""

import contextlib
import functools
import multiprocessing
import statistics
import sys

import numpy as np

import lab
from bench import torch_attention
from bench.peers import ERROR_MAX, note_left_out, reason, torch_milliseconds
from bench.problems import BF16, CASES, Case, relative_error

IMPLS = ("torch", "fla", "fa3", "flashinfer")
CHECKED_ROWS = 128  # Rows checked of an operator with a state, whose recurrence is computed token by token.


def cases(op: str | None = None) -> list[Case]:
    """Problems of rows by matrices that lie as (G, K, N), few rows by weights of 4 bits, SSD with b and c for each
    head, the gated delta rule, the convolution before them, the norm of a sum of 16 bits, packed sequences and pages
    of 16 bits."""
    takes = {
        "ragged_dot": lambda case: case.derive is None,
        "matmul_int4_weights": lambda case: case.shapes[0][0] <= 256,  # It is made for few rows.
        "ssd": lambda case: case.shapes[3][2] == case.shapes[0][2],
        "gated_delta_rule": lambda case: True,
        "causal_conv1d": lambda case: True,
        "rms_norm": lambda case: case.size.endswith("_residual_bf16"),
    } | dict.fromkeys(torch_attention.OPS, lambda case: case.dtype == BF16)
    return [case for case in CASES if op in (None, case.op) and case.op in takes and takes[case.op](case)]


def main(op: str | None = None, iterations: int = 30) -> int:
    try:
        import torch
    except Exception as error:  # It is missing, or something that it needs is.
        sys.exit(f"bench.torch_peers: torch cannot be imported ({error}): install it, or leave this peer out")
    if not torch.cuda.is_available():
        sys.exit("bench.torch_peers: torch sees no GPU: this needs one")
    # Triton keeps on disk what it compiles. Here its first calls only time configurations, which nobody may disturb.
    compiling = multiprocessing.get_context("spawn").Process(target=_call_each, args=(op,))
    compiling.start()
    compiling.join()
    for case in cases(op):
        left_out = {}
        for impl, peer in _peers(case.op).items():
            try:
                with lab.alone():
                    version, call, error = peer(torch, case)
                    times = torch_milliseconds(torch, call, iterations) if error < ERROR_MAX else None
            except Exception as refusal:  # Its import failed; or fla refuses a Triton that gets gradients wrong.
                left_out[impl] = reason(refusal)
                continue
            if times is None:
                left_out[impl] = f"wrong by {error:.2g}, and so not timed"
            else:
                _record(case, impl, times, version)
        note_left_out(f"{case.problem}/left_out/torch", left_out)
        for impl, why in left_out.items():
            print(f"{case.problem}, {impl}: left out: {why}")
    return 0


def _record(case: Case, impl: str, times: list[float], version: dict) -> None:
    lower, _, upper = statistics.quantiles(times)
    row = dict(ms=statistics.median(times), min_ms=min(times), flops=case.flops, nbytes=case.nbytes)
    row["spread"] = (upper - lower) / row["ms"]
    lab.results.write(case.problem, impl, **row, **version, timed_by="CUDA events")
    rate = (
        f"{case.flops / row['ms'] / 1e9:.0f} TFLOP/s"
        if case.counts_flops
        else f"{case.nbytes / row['ms'] / 1e9:.2f} TB/s"
    )
    print(f"{case.problem}, {impl}: {row['ms']:.4f} ms, {rate}")


def _call_each(op: str | None) -> None:
    import torch

    for case in cases(op):
        for impl, peer in _peers(case.op).items():
            if impl != "fa3":  # It is compiled already.
                with contextlib.suppress(Exception):
                    _, call, _ = peer(torch, case)
                    call()


def _peers(op: str) -> dict:
    """By name, functions that make of (torch, problem) the (versions, call, its error) of a peer."""
    if op in torch_attention.OPS:
        return dict(fa3=torch_attention.fa3, flashinfer=torch_attention.flashinfer)
    return dict(
        ragged_dot=dict(torch=_grouped_product), matmul_int4_weights=dict(torch=_int4pack), ssd=dict(fla=_simple_gla),
        gated_delta_rule=dict(fla=_gated_delta_rule), causal_conv1d=dict(torch=_conv1d),
        rms_norm=dict(torch=_norm_of_sum),
    )[op]  # fmt: skip


def _grouped_product(torch, case):
    """(versions, call, its error) of torch's product of groups."""
    lhs, rhs = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in case.shapes)
    (sizes,) = case.integers
    offsets = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)
    product = lambda: torch.nn.functional.grouped_mm(lhs, rhs, offs=offsets)
    out, largest = product(), int(np.argmax(sizes))
    rows = slice(int(offsets[largest]) - int(sizes[largest]), int(offsets[largest]))
    exact = (lhs[rows].float() @ rhs[largest].float()).cpu().numpy()
    error = relative_error(out[rows].float().cpu().numpy(), exact)
    return dict(torch=torch.__version__), product, error


def _int4pack(torch, case):
    """(versions, call, its error) of torch's product with weights of 4 bits, w = (q - 8) scale + zero, zeros of 0."""
    (m, k), (n, _), (groups, _) = case.shapes
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    q = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.int32)
    scales = torch.rand(groups, n, device="cuda", dtype=torch.bfloat16) * k**-0.5
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs, 8)
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], -1)
    call = lambda: torch._weight_int4pack_mm(x, packed, k // groups, scales_and_zeros)
    wide = (q - 8).double() * scales.double().T.repeat_interleave(k // groups, 1)
    error = relative_error(call().double().cpu().numpy(), (x.double() @ wide.T).cpu().numpy())
    return dict(torch=torch.__version__), call, error


def _conv1d(torch, case):
    """(versions, call, its error) of torch's convolution, with time last, as it has it."""
    (batch, length, columns), (_, taps), *_ = case.shapes
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    operands = normal(batch, columns, length), normal(columns, 1, taps), normal(columns)

    def conv(x, weight, bias):
        rows = torch.nn.functional.conv1d(x, weight, bias, padding=taps - 1, groups=columns)
        return torch.nn.functional.silu(rows[..., :length])

    x, *weights = (m.double() for m in operands)
    exact = conv(x[:1], *weights).cpu().numpy()
    error = relative_error(conv(*operands)[:1].double().cpu().numpy(), exact)
    call, dy = (lambda: conv(*operands)), normal(batch, columns, length)
    if case.size.endswith("_grad"):
        operands = [m.requires_grad_() for m in operands]
        y = conv(*operands)
        call = lambda: torch.autograd.grad(y, operands, dy, retain_graph=True)
    return dict(torch=torch.__version__), call, error


def _norm_of_sum(torch, case):
    """(versions, call, its error) of the norm of x + residual, as `torch.compile` fuses it, and of the sum."""
    x, residual, scale = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in case.shapes)

    def norm(x, residual, scale):
        total = x.float() + residual.float()
        y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * scale.float()
        return y.bfloat16(), total.bfloat16()

    compiled, exact = torch.compile(norm), norm(x.double(), residual.double(), scale.double())
    call = lambda: compiled(x, residual, scale)
    to_numpy = lambda tensors: [tensor.float().cpu().numpy() for tensor in tensors]
    return dict(torch=torch.__version__), call, relative_error(to_numpy(call()), to_numpy(exact))


def _simple_gla(torch, case):
    """(versions, call, its error) of fla's linear attention with a decay for each head: q, k, v are c, b, dt x.

    dt x and the logarithms of decays are made before, and not timed.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    x, dt, a, b, c = (torch.randn(shape, device="cuda") for shape in case.shapes)
    dt, a = torch.nn.functional.softplus(dt - 4.0), -torch.exp(a)
    operands = [*(m.bfloat16() for m in (c, b, dt[..., None] * x)), dt * a]

    def token(state, q, k, v, g):
        return torch.exp(g)[:, None, None] * state + v[..., None] * k[:, None]

    return _with_state(torch, case, lambda *args: chunk_simple_gla(*args, scale=1.0)[0], operands, token)


def _gated_delta_rule(torch, case):
    """(versions, call, its error) of fla's gated delta rule, on keys of norm 1."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (torch.randn(shape, device="cuda") for shape in case.shapes)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    operands = [*(x.bfloat16() for x in (q, k, v)), -torch.nn.functional.softplus(g - 4.0), torch.sigmoid(beta)]

    def token(state, q, k, v, g, beta):
        state = torch.exp(g)[:, None, None] * state
        change = beta[:, None] * (v - (state * k[:, None]).sum(-1))
        return state + change[..., None] * k[:, None]

    return _with_state(torch, case, lambda *args: chunk_gated_delta_rule(*args, scale=1.0)[0], operands, token)


def _with_state(torch, case, forward, operands, token):
    """(versions, call, its error) of one of fla's, whose state `token(state, q, k, v, ...)` changes."""
    import fla
    import triton

    q, k, v, *rest = (m[0, :CHECKED_ROWS].double() for m in operands)
    q, k = (m.repeat_interleave(v.shape[1] // m.shape[1], 1) for m in (q, k))
    state, wanted = torch.zeros(*v.shape[1:], q.shape[-1], device="cuda", dtype=torch.float64), []
    for t in range(CHECKED_ROWS):
        state = token(state, q[t], k[t], v[t], *(m[t] for m in rest))
        wanted.append((state * q[t][:, None]).sum(-1))
    found = forward(*operands)[0, :CHECKED_ROWS].double().cpu().numpy()
    error = relative_error(found, torch.stack(wanted).cpu().numpy())
    call, d_out = lambda: forward(*operands), torch.randn_like(operands[2])
    if case.size.endswith("_grad"):
        operands = [m.requires_grad_() for m in operands]
        call = lambda: torch.autograd.grad(forward(*operands), operands, d_out)
    return dict(torch=torch.__version__, fla=fla.__version__, triton=triton.__version__), call, error


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
