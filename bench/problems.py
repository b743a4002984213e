"""The named problems that the tests and the benchmark share, and what each kernel must reach on them."""

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

import cookbook
import lab
from bench import cudnn_peers
from bench.peers import imports
from cookbook import _host, blackwell, elementwise
from cookbook.blackwell import cost as blackwell_cost
from cookbook.gemm import cost
from cookbook.gemm.dense.four_bits import E2M1_BIAS
from cookbook.gemm.dense.pack import shape_of
from cookbook.gemm.experts.route import route_reference
from cookbook.gemm.gated import plan as gated
from cookbook.gemm.grouped import cost as group_cost
from cookbook.gemm.rungs.matmul_blocked import matmul_blocked_reference

# The modules of the ops, which also count an op's work.
attention, attention_fp8, paged_attention, varlen_attention = map(
    inspect.getmodule,
    (cookbook.attention, cookbook.attention_fp8, cookbook.paged_attention, cookbook.varlen_attention),
)
glu, matmul, matmul_fp8, matmul_int8_weights, moe, ragged_dot, ragged_dot_fp8, ragged_dot_transposed = map(
    inspect.getmodule,
    (
        cookbook.glu,
        cookbook.matmul,
        cookbook.matmul_fp8,
        cookbook.matmul_int8_weights,
        cookbook.moe,
        cookbook.ragged_dot,
        cookbook.ragged_dot_fp8,
        cookbook.ragged_dot_transposed,
    ),
)
delta_rule, delta_rule_step, ssd, ssd_step = map(
    inspect.getmodule,
    (cookbook.gated_delta_rule, cookbook.gated_delta_rule_step, cookbook.ssd, cookbook.ssd_step),
)
matmul_int4_weights, matmul_mxfp4_weights, ragged_dot_mxfp4_weights = map(
    inspect.getmodule,
    (cookbook.matmul_int4_weights, cookbook.matmul_mxfp4_weights, cookbook.ragged_dot_mxfp4_weights),
)
kda, kda_step = map(inspect.getmodule, (cookbook.kda, cookbook.kda_step))
causal_conv1d, causal_conv1d_step = map(inspect.getmodule, (cookbook.causal_conv1d, cookbook.causal_conv1d_step))
cross_entropy, linear_cross_entropy = map(inspect.getmodule, (cookbook.cross_entropy, cookbook.linear_cross_entropy))
reduce_sum, rms_norm, softmax = map(inspect.getmodule, (cookbook.reduce_sum, cookbook.rms_norm, cookbook.softmax))
sample, top_k = map(inspect.getmodule, (cookbook.sample, cookbook.top_k))
layer_norm, group_norm = map(inspect.getmodule, (cookbook.layer_norm, cookbook.group_norm))

# The peers that are not this project's own, and what each is.
PEERS = {
    "xla": "what XLA makes of plain JAX",
    "cublas": "cuBLAS, as JAX calls it",
    "cudnn": "cuDNN, as JAX calls it (packed sequences and pages by a private call, of pages with padded queries)",
    "jax_f16": "JAX's own Mosaic GPU kernel, in float16",
    "jax_mgpu": "JAX's own Mosaic GPU kernel",
    "jax_mgpu_64": "JAX's own Mosaic GPU kernel, with blocks of 64 rows",
    "tokamax": "Google's kernel library, its Mosaic GPU kernels",
    "torch": "PyTorch",
    "fla": "flash-linear-attention (Triton, PyTorch)",
    "fa3": "FlashAttention-3 (CUDA, PyTorch), as vLLM ships it or from fa3-fwd",
    "flashinfer": "FlashInfer (CUDA, PyTorch)",
}
LIBRARIES = tuple(PEERS)
TO_TUNE = 40  # Configurations that `--tune` times.
BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn
NAMES = {jnp.dtype(BF16): "bf16", jnp.dtype(jnp.float16): "f16", jnp.dtype(jnp.float32): "f32", jnp.dtype(E4M3): "fp8"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Goal of a kernel: a rate, a multiple of a peer's rate, or both."""

    peer: str | None
    ratio: float = 1.0  # Multiple of the peer's rate.
    rate: float | None = None  # In TB/s or TFLOP/s.


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: `kernel(*inputs)` against `peers`, on random arrays of `shapes`: normal ones, and any integers."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: object
    kernel: object
    reference: object
    peers: dict
    flops: int
    nbytes: int
    size: str  # The shape in the problem's name.
    impl: str = "cookbook"
    target: Target | None = None
    headline: bool = False  # Whether the README shows it.
    dtypes: tuple | None = None  # The inputs' dtypes, if they differ from `dtype`, which names the problem.
    derive: object = None  # Makes of these inputs one more, which only peers take.
    integers: tuple = ()  # Inputs after the random ones: arrays of int32 that say where things lie, or given values.
    in_place: int | None = None  # Which input is changed. All but the reference take it last, as a `jax.Ref`.
    tune: object = None  # Times the configurations of the least predicted time for these inputs.
    parts: tuple = ()  # Peers that do a part of the work: their result is another.
    # By peer, a function that makes our result of its own, such as one that drops padding. It is not timed.
    undo: dict = dataclasses.field(default_factory=dict)
    error_max: float | None = None  # Relative error that rounding explains, where it is more than ERROR_MAX.
    reads_weights: bool = False  # A product of few rows, whose rate is that of reading its matrices.

    @property
    def gpu(self) -> str | None:
        """The GPU whose tensor cores its kernel uses; None for a kernel that every newer one runs."""
        if self.op.startswith("blackwell."):
            return "b200"
        on_cuda_cores = self.op.startswith(
            (
                "add",
                "softmax",
                "rms_norm",
                "layer_norm",
                "group_norm",
                "reduce_sum",
                "causal_",
                "cross_",
                "top_k",
                "sample",
            )
        ) or self.op.endswith("_step")
        return None if on_cuda_cores or self.impl == "matmul_blocked" else "h200"

    @property
    def counts_flops(self) -> bool:
        """Whether its rate is one of arithmetic, not of memory."""
        return (
            self.op.startswith(("matmul", "blackwell.", "attention", "varlen", "ragged", "moe", "glu", "linear_"))
            and not self.reads_weights
        )

    @property
    def problem(self) -> str:
        return f"{self.op}/{self.size}/{NAMES[jnp.dtype(self.dtype)]}"

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        dtypes = self.dtypes or (self.dtype,) * len(self.shapes)
        drawn = [jax.ShapeDtypeStruct(*aval) for aval in zip(self.shapes, dtypes, strict=True)]
        return drawn + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.integers]

    @property
    def kernel_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The kernel's arguments, without those of peers alone: the input that it changes comes last."""
        avals = self.avals
        if self.in_place is not None:
            avals.append(avals.pop(self.in_place))
        return avals

    def ours(self) -> dict:
        """The implementations of this package, by name."""
        impls = {self.impl: self.kernel} | self.peers
        return {impl: fn for impl, fn in impls.items() if impl not in LIBRARIES and impl not in self.parts}

    def program(self, impl: str | None = None):
        """(function, its arguments): what lowers to the program of a figure, by default of the kernel's own."""
        fn = self.ours()[impl or self.impl]
        if self.in_place is None:
            return fn, self.avals + ([] if self.derive is None else [jax.eval_shape(self.derive, *self.avals)])
        return (lambda *args: fn(*args[:-1], jax.new_ref(args[-1]))), self.kernel_avals

    def inputs(self, seed: int = 0):
        """Random inputs, each its own, and the integers."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        avals = self.avals[: len(self.shapes)]
        drawn = [_draw(key, aval.shape, aval.dtype) for key, aval in zip(keys, avals, strict=True)]
        drawn += [jnp.asarray(x) for x in self.integers]
        return drawn if self.derive is None else [*drawn, jax.jit(self.derive)(*drawn)]

    def applied(self, fn, inputs):
        """(function, its arguments): `fn` of the inputs, which holds a copy of the one that it changes."""
        if self.in_place is None or fn is None:
            return fn, inputs
        others = list(inputs)
        state = jax.new_ref(others.pop(self.in_place))
        return (lambda *others: fn(*others, state)), others


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key, shape, dtype):
    if jnp.issubdtype(dtype, jnp.unsignedinteger):  # Such as packed words.
        return jax.random.bits(key, shape, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max + 1, dtype)
    if jnp.dtype(dtype).itemsize == 1:
        return jax.random.normal(key, shape, BF16).astype(dtype)
    return jax.random.normal(key, shape, dtype)


def _add(n, dtype=jnp.bfloat16, **kwargs):
    flops, nbytes = elementwise.flops(n), elementwise.bytes_moved(n, jnp.dtype(dtype).itemsize)
    peers, shapes = {"xla": jnp.add}, ((n,), (n,))
    return Case("add", shapes, dtype, cookbook.add, elementwise.add_reference, peers, flops, nbytes, str(n), **kwargs)


def _rows(op, module, rows, cols, num_inputs, dtype=jnp.bfloat16, **kwargs):
    kernel, reference = getattr(cookbook, op), getattr(module, f"{op}_reference")
    peers = {"xla": lambda x, *scale: reference(x, *scale).astype(x.dtype)}
    shapes = ((rows, cols), (cols,), (cols,))[:num_inputs]
    flops, nbytes = module.flops(rows, cols), module.bytes_moved(rows, cols, jnp.dtype(dtype).itemsize)
    return Case(op, shapes, dtype, kernel, reference, peers, flops, nbytes, f"{rows}x{cols}", **kwargs)


def _rms_norm_of_sum(rows, cols, dtype=jnp.float32, **kwargs):
    """As in a decoder: a residual, to which a product is added; the result is of 16 bits."""
    reference = lambda x, residual, scale: rms_norm.rms_norm_reference(x, scale, residual=residual)

    def as_ours(x, residual, scale):
        y, total = reference(x, residual, scale)
        return y.astype(BF16), total.astype(dtype)

    kernel = lambda x, residual, scale: cookbook.rms_norm(x, scale, residual=residual, out_dtype=BF16)
    shapes, size = ((rows, cols), (rows, cols), (cols,)), f"{rows}x{cols}_residual" + "_bf16" * (dtype == BF16)
    # x and the residual are read, the sum and y are written.
    return Case("rms_norm", shapes, BF16, kernel, reference, {"xla": as_ours}, rms_norm.flops(rows, cols),
                rows * cols * (3 * jnp.dtype(dtype).itemsize + 2), size, dtypes=(dtype, dtype, BF16),
                **kwargs)  # fmt: skip


def _rms_norm_8_bits(rows, cols, **kwargs):
    """The sum, and its norm as numbers of float8_e4m3fn with a factor for each row. The exact result is not rounded."""
    plain = lambda x, residual, scale: rms_norm.rms_norm_reference(x, scale, residual=residual)
    kernel = lambda x, residual, scale: cookbook.rms_norm(x, scale, residual=residual, out_dtype=jnp.float8_e4m3fn)

    def xla(x, residual, scale):
        y, total = plain(x, residual, scale)
        return *rms_norm.quantized_reference(y, jnp.float8_e4m3fn), total.astype(BF16)

    def reference(x, residual, scale):
        y, total = plain(x, residual, scale)
        factor = jnp.max(jnp.abs(y), axis=-1) / 448
        return y / factor[:, None], factor, total

    shapes = ((rows, cols), (rows, cols), (cols,))
    return Case("rms_norm", shapes, BF16, kernel, reference, {"xla": xla}, rms_norm.flops(rows, cols),
                rows * cols * 7, f"{rows}x{cols}_residual_e4m3", error_max=0.05, **kwargs)  # fmt: skip


def _group_norm(rows, groups, size, norm_before_gate, shared=True, gradients=False, **kwargs):
    """Heads with a gate; a weight for all, or with `shared=False` one for each column."""
    how = dict(group_size=size, norm_before_gate=norm_before_gate)
    fns = dict(
        kernel=lambda x, gate, w: cookbook.group_norm(x, w, gate=gate, **how),
        reference=lambda x, gate, w: group_norm.group_norm_reference(x, w, gate=gate, **how),
        xla=lambda x, gate, w: group_norm.group_norm_reference(x, w, gate=gate, **how).astype(BF16),
    )
    shapes = ((rows, groups * size), (rows, groups * size), (size if shared else groups * size,))
    nbytes = group_norm.bytes_moved(rows, groups * size, 2)
    name = f"{rows}x{groups}x{size}_{'after' if norm_before_gate else 'before'}" + "_each" * (not shared)
    if gradients:  # x, the gate and dy are read, dx and dgate written.
        fns = {name: lambda *args, fn=fn: jax.vjp(fn, *args[:-1])[1](args[-1]) for name, fn in fns.items()}
        exact = fns["reference"]
        fns["reference"] = lambda *args: exact(*(x.astype(jnp.float32) for x in args))
        shapes, nbytes = (*shapes, shapes[0]), rows * groups * size * 10
    return Case("group_norm_backward" if gradients else "group_norm", shapes, BF16, fns["kernel"], fns["reference"],
                {"xla": fns["xla"]}, group_norm.flops(rows, groups * size), nbytes, name, **kwargs)  # fmt: skip


def _rows_backward(op, module, rows, cols, num_inputs, **kwargs):
    """The gradients alone: of a norm by x and its weights, of softmax by x with the forward pass that it needs."""
    forward = {"cookbook": getattr(cookbook, op), "reference": getattr(module, f"{op}_reference")}
    forward["xla"] = lambda x, *scale: forward["reference"](x, *scale).astype(x.dtype)

    def gradient(impl):
        exact = impl == "reference"
        pull = lambda *args: jax.vjp(forward[impl], *args[:-1])[1](args[-1])
        return (lambda *args: pull(*(x.astype(jnp.float32) for x in args))) if exact else pull

    shapes = ((rows, cols), (cols,), (cols,))[:num_inputs] + ((rows, cols),)
    arrays = 5 if op == "softmax" else 3
    return Case(f"{op}_backward", shapes, BF16, gradient("cookbook"), gradient("reference"), {"xla": gradient("xla")},
                6 * rows * cols, arrays * rows * cols * 2, f"{rows}x{cols}", **kwargs)  # fmt: skip


def _sum(rows, cols, axis, dtype=jnp.bfloat16, **kwargs):
    peers = {"xla": lambda x: jnp.sum(x, axis=axis)}
    nbytes = reduce_sum.bytes_moved(rows, cols, jnp.dtype(dtype).itemsize)
    return Case("reduce_sum", ((rows, cols),), dtype, lambda x: cookbook.reduce_sum(x, axis),
                lambda x: reduce_sum.reduce_sum_reference(x, axis), peers, reduce_sum.flops(rows, cols), nbytes,
                f"{rows}x{cols}_axis{axis}", **kwargs)  # fmt: skip


def _top_k(rows, cols, k, dtype=jnp.float32, **kwargs):
    """Values and indices, in float32 as those of a vocabulary's logits often are."""
    ours, xla = (functools.partial(fn, k=k) for fn in (cookbook.top_k, top_k.top_k_reference))
    return Case("top_k", ((rows, cols),), dtype, ours, xla, {"xla": xla}, top_k.flops(rows, cols),
                top_k.bytes_moved(rows, cols, jnp.dtype(dtype).itemsize, k), f"{rows}x{cols}_k{k}",
                **kwargs)  # fmt: skip


def _sample(rows, cols, name="", dtype=jnp.float32, **kwargs):
    """Peers draw with JAX's generator, other tokens than ours: none has the same noise."""
    options = {key: kwargs.pop(key) for key in ("top_k", "top_p") if key in kwargs}
    places = np.arange(rows, dtype=np.int32), np.full(rows, 7, np.int32)

    def xla(x, seeds, positions):
        x, key = x.astype(jnp.float32), jax.random.key(0)
        if "top_k" in options:
            x, index = jax.lax.top_k(x, options["top_k"])
        if "top_p" in options:
            p = jax.nn.softmax(x, axis=-1)
            ranked = jnp.sort(p, axis=-1, descending=True)
            count = jnp.sum(jnp.cumsum(ranked, axis=-1) - ranked < options["top_p"], axis=-1, keepdims=True)
            x = jnp.where(p >= jnp.take_along_axis(ranked, count - 1, axis=-1), x, -jnp.inf)
        token = jax.random.categorical(key, x, axis=-1)
        return jnp.take_along_axis(index, token[:, None], -1)[:, 0] if "top_k" in options else token

    ours, exact = (functools.partial(fn, **options) for fn in (cookbook.sample, sample.sample_reference))
    return Case("sample", ((rows, cols),), dtype, ours, exact, {"xla": xla}, sample.flops(rows, cols),
                sample.bytes_moved(rows, cols, jnp.dtype(dtype).itemsize), f"{rows}x{cols}{name}",
                integers=places, parts=("xla",), **kwargs)  # fmt: skip


def _labels(rows, vocabulary):
    return (np.random.default_rng(0).integers(0, vocabulary, rows).astype(np.int32),)


def _cross_entropy(rows, vocabulary, gradients=False, **kwargs):
    """The mean over the rows; with `gradients` that of the logits as well."""
    impls = dict(
        kernel=cookbook.cross_entropy,
        reference=cross_entropy.cross_entropy_reference,
        xla=cross_entropy.cross_entropy_reference,
    )
    impls = {name: jax.value_and_grad(fn) if gradients else fn for name, fn in impls.items()}
    # The gradient reads the logits once more, and is written.
    nbytes = cross_entropy.bytes_moved(rows, vocabulary, 2) * (3 if gradients else 1)
    peers = {"xla": impls["xla"]}
    return Case("cross_entropy", ((rows, vocabulary),), BF16, impls["kernel"], impls["reference"], peers,
                cross_entropy.flops(rows, vocabulary), nbytes, f"{rows}x{vocabulary}" + "_grad" * gradients,
                integers=_labels(rows, vocabulary), **kwargs)  # fmt: skip


def _linear_cross_entropy(rows, hidden, vocabulary, gradients=True, memory=None, ms=None, **kwargs):
    """The mean over the rows, of logits of about one each; with `gradients` those of hidden and of the weight as well.

    `ms`: what it may take. XLA has all logits in memory. Three products are counted, however many are computed."""
    op = linear_cross_entropy
    flops = op.flops(rows, hidden, vocabulary) * (3 if gradients else 1)

    def impl(fn, **how):
        scaled = lambda x, w, labels: fn(x * x.dtype.type(hidden**-0.5), w, labels, **how)
        return jax.value_and_grad(scaled, argnums=(0, 1)) if gradients else scaled

    def plain(x, w, labels):
        return cross_entropy.cross_entropy_reference(x @ w.T, labels)

    size = f"{rows}x{hidden}x{vocabulary}" + "_grad" * gradients + ("_low" if memory else "")
    return Case("linear_cross_entropy", ((rows, hidden), (vocabulary, hidden)), BF16,
                impl(cookbook.linear_cross_entropy, memory=memory), impl(op.linear_cross_entropy_reference),
                {"xla": impl(plain)}, flops, op.bytes_moved(rows, hidden, vocabulary), size,
                target=ms and Target("xla", rate=flops / ms / 1e9), integers=_labels(rows, vocabulary),
                **kwargs)  # fmt: skip


def _matmul(m, n, k, transpose_a=False, rungs=(), **kwargs):
    """`rungs`: the package's earlier kernels, to time beside it."""
    flip = lambda fn: (lambda a, b: fn(a.T, b)) if transpose_a else fn
    kernel = functools.partial(cookbook.matmul, transpose_a=True) if transpose_a else cookbook.matmul
    peers = {"cublas": flip(jnp.matmul)} | {name: getattr(cookbook, name) for name in rungs}
    return Case("matmul", ((k, m) if transpose_a else (m, k), (k, n)), BF16, kernel, flip(matmul.matmul_reference),
                peers, matmul.flops(m, n, k), matmul.bytes_moved(m, n, k), f"{m}x{n}x{k}" + "_ta" * transpose_a,
                impl="matmul", target=Target("cublas", 0.95),
                tune=lambda a, b: lab.autotune(
                    cookbook.matmul, a, b, transpose_a=transpose_a,
                    configs=cost.ranked(cost.Problem(m, n, k, (transpose_a, True)), TO_TUNE)),
                **kwargs)  # fmt: skip


def _glu(m, n, k, gradients=False, **kwargs):
    """With `gradients`: forward and backward, six products; the results themselves are the cotangent."""

    def step(fn):
        def both(*args):
            out, pull = jax.vjp(fn, *args)
            return out, pull(out)

        return both if gradients else fn

    def of_tokamax(x, w_gate, w_up):
        import tokamax  # Nothing else here needs it.

        return tokamax.gated_linear_unit(x, (w_gate, w_up), activation=jax.nn.silu)

    peers = {"xla": lambda x, w_gate, w_up: jax.nn.silu(x @ w_gate) * (x @ w_up)}
    peers |= {"tokamax": of_tokamax} if imports("tokamax") else {}
    return Case("glu", ((m, k), (k, n), (k, n)), BF16, step(cookbook.glu), step(glu.glu_reference),
                {name: step(fn) for name, fn in peers.items()}, glu.flops(m, n, k) * (3 if gradients else 1),
                glu.bytes_moved(m, n, k), f"{m}x{k}x{n}" + "_grad" * gradients, reads_weights=m <= 64,
                tune=None if gradients else lambda *args: lab.autotune(
                    cookbook.glu, *args, configs=gated.ranked(gated.Problem(m, n, k, False), TO_TUNE)),
                **kwargs)  # fmt: skip


def _blackwell_matmul(m, n, k, **kwargs):
    op = importlib.import_module("cookbook.blackwell.matmul")
    return Case("blackwell.matmul", ((m, k), (k, n)), BF16, blackwell.matmul, op.matmul_reference,
                {"cublas": jnp.matmul}, op.flops(m, n, k), op.bytes_moved(m, n, k), f"{m}x{n}x{k}",
                tune=lambda a, b: lab.autotune(
                    blackwell.matmul, a, b, gpu="b200",
                    configs=blackwell_cost.to_try(blackwell_cost.Problem(m, n, k, True, 2, 2))),
                **kwargs)  # fmt: skip


def _blackwell_mxfp8(m, n, k, **kwargs):
    """Scales from an eighth to eight, at random."""
    op = importlib.import_module("cookbook.blackwell.matmul_mxfp8")
    rng = np.random.default_rng(0)
    scales = tuple(rng.integers(124, 131, (rows, k // 32), np.uint8).view(jnp.float8_e8m0fnu) for rows in (m, n))
    in_order = lambda fn: lambda a, b, a_scales, b_scales: fn(a, a_scales, b, b_scales)
    cudnn = lambda a, b, *scales: jax.nn.scaled_matmul(
        a[None], b[None], *(x[None] for x in scales), preferred_element_type=BF16
    )[0]
    return Case("blackwell.matmul_mxfp8", ((m, k), (n, k)), E4M3, in_order(blackwell.matmul_mxfp8),
                in_order(op.matmul_mxfp8_reference), {"cudnn": cudnn}, op.flops(m, n, k), op.bytes_moved(m, n, k),
                f"{m}x{n}x{k}", integers=scales,
                tune=lambda a, b, *scales: lab.autotune(
                    blackwell.matmul_mxfp8, a, scales[0], b, scales[1], gpu="b200",
                    configs=blackwell_cost.to_try(blackwell_cost.Problem(m, n, k, False, 1, 2))),
                **kwargs)  # fmt: skip


def _blackwell_ragged(m, n, k, sizes, **kwargs):
    """Matrices as (G, N, K), which are read as they lie. XLA computes all rows by every matrix: the only peer."""
    op, sizes = importlib.import_module("cookbook.blackwell.ragged_dot"), np.asarray(sizes, np.int32)
    g, how = len(sizes), dict(transpose_rhs=True)
    return Case("blackwell.ragged_dot", ((m, k), (g, n, k)), BF16, functools.partial(blackwell.ragged_dot, **how),
                functools.partial(op.ragged_dot_reference, **how),
                {"xla": lambda lhs, rhs, sizes: jax.lax.ragged_dot(lhs, rhs.mT, sizes)} if g <= 8 else {},
                op.flops(int(sizes.sum()), n, k), op.bytes_moved(m, n, k, int(np.count_nonzero(sizes))),
                f"{m}x{n}x{k}_g{g}_tb", integers=(sizes,),
                tune=lambda *args: lab.autotune(
                    blackwell.ragged_dot, *args, **how, gpu="b200",
                    configs=blackwell_cost.to_try(op.problem(m, n, k, g, **how))),
                **kwargs)  # fmt: skip


def _matmul_fp8(m, n, k, **kwargs):
    dims = (((1,), (1,)), ((), ()))
    peers = {"cublas": lambda a, b: jax.lax.dot_general(a, b, dims, preferred_element_type=BF16)}
    return Case("matmul_fp8", ((m, k), (n, k)), E4M3, functools.partial(cookbook.matmul_fp8, transpose_b=True),
                lambda a, b: matmul_fp8.matmul_fp8_reference(a, b.T, 1.0, 1.0), peers, matmul_fp8.flops(m, n, k),
                matmul_fp8.bytes_moved(m, n, k), f"{m}x{n}x{k}", target=Target("cublas", 0.97),
                tune=lambda a, b: lab.autotune(
                    cookbook.matmul_fp8, a, b, transpose_b=True,
                    configs=cost.ranked(cost.Problem(m, n, k, (False, False), (1, 1, 2)), TO_TUNE)),
                **kwargs)  # fmt: skip


def _matmul_int8_weights(m, n, k, target, **kwargs):
    """cuBLAS gets weights that are 16-bit already; XLA converts the 8-bit ones, then multiplies."""
    op = matmul_int8_weights
    peers = {
        "cublas": lambda a, w_q, scales, w: a @ w,
        "xla": lambda a, w_q, scales, w: ((a @ w_q.T.astype(BF16)) * scales).astype(BF16),
    }
    return Case("matmul_int8_weights", ((m, k), (n, k), (n,)), BF16,
                lambda a, w_q, scales, w=None: cookbook.matmul_int8_weights(a, w_q, scales, transpose_w=True),
                lambda a, w_q, scales, w=None: op.matmul_int8_weights_reference(a, w_q.T, scales), peers,
                op.flops(m, n, k), op.bytes_moved(m, n, k), f"{m}x{n}x{k}", target=target,
                dtypes=(BF16, jnp.int8, jnp.float32),
                derive=lambda a, w_q, scales: (w_q.T * scales).astype(BF16),
                tune=lambda *args: lab.autotune(
                    cookbook.matmul_int8_weights, *args[:3], transpose_w=True, configs=op.ranked(m, n, k, TO_TUNE)),
                **kwargs)  # fmt: skip


def _matmul_int4_weights(m, n, k, target, group_size=128, **kwargs):
    """cuBLAS gets weights that are 16-bit already; XLA unpacks the 4-bit ones, then multiplies."""
    op, avals = matmul_int4_weights, ((m, k), shape_of(n, k), (-(-k // group_size), n))
    reference = lambda x, w, scales, wide=None: op.matmul_int4_weights_reference(x, w, scales, group_size=group_size)
    kernel = functools.partial(cookbook.matmul_int4_weights, group_size=group_size)
    return _four_bits(op, (m, n, k), avals, (BF16, jnp.uint32, BF16), kernel, reference,
                      lambda w, scales: op.weights_reference(w, scales, None, group_size, k, BF16),
                      op.bytes_moved(m, n, k, group_size), target, **kwargs)  # fmt: skip


def _matmul_mxfp4_weights(m, n, k, target, **kwargs):
    op, ones = matmul_mxfp4_weights, np.full((-(-k // 64), n), (127 + E2M1_BIAS) * 257, np.uint16)  # Scales of 1.
    reference = lambda x, w, scales, wide=None: op.matmul_mxfp4_weights_reference(x, w, scales)
    return _four_bits(op, (m, n, k), ((m, k), shape_of(n, k)), (BF16, jnp.uint32), cookbook.matmul_mxfp4_weights,
                      reference, lambda w, scales: op.widened(w, scales, BF16)[:k], op.bytes_moved(m, n, k), target,
                      integers=(ones,), **kwargs)  # fmt: skip


def _four_bits(op, sizes, shapes, dtypes, kernel, reference, widened, nbytes, target, **kwargs):
    (m, n, k), name = sizes, op.__name__.rpartition(".")[2]
    peers = {
        "cublas": lambda x, w, scales, wide: x @ wide,
        "xla": lambda x, w, scales, wide: (x @ widened(w, scales)).astype(BF16),
    }
    return Case(name, shapes, BF16, lambda x, w, scales, wide=None: kernel(x, w, scales), reference, peers,
                op.flops(m, n, k), nbytes, f"{m}x{n}x{k}", target=target, dtypes=dtypes, reads_weights=m <= 128,
                derive=lambda x, w, scales: widened(w, scales),
                tune=lambda x, w, scales, *_: lab.autotune(kernel, x, w, scales, configs=op.ranked(m, n, k, TO_TUNE)),
                **kwargs)  # fmt: skip


def _attention(head_dim, seq, is_causal, target, kv_heads=None, gradients=False, **kwargs):
    """16,384 tokens and 2,048 values each. cuDNN is timed up to heads of 128. JAX has a kernel for float16, already
    scaled; its blocks are set, not searched for. It is left out where absl, which it imports, is missing; so is
    tokamax, where it cannot be imported."""
    batch, heads = 16384 // seq, 2048 // head_dim
    q, kv = (batch, seq, heads, head_dim), (batch, seq, kv_heads or heads, head_dim)
    how, window = dict(is_causal=is_causal), kwargs.pop("window", None)
    kernel = functools.partial(cookbook.attention, **how, local_window_size=window and (window, 0))
    cudnn = functools.partial(jax.nn.dot_product_attention, **how, local_window_size=window and (window, 0),
                              implementation="cudnn")  # fmt: skip
    peers = {} if head_dim > 128 else {"cudnn": lambda q, k, v, halves=None: cudnn(q, k, v)}
    plain = head_dim <= 128 and not window and kv_heads is None
    if plain and imports("absl"):
        peers["jax_f16"] = functools.partial(_attention_of_jax, is_causal)
    has_tokamax = plain and imports("tokamax")
    tokamax = functools.partial(_attention_of_tokamax, is_causal)
    if has_tokamax:
        peers["tokamax"] = tokamax
    flops = attention.flops(batch, seq, seq, heads, head_dim, is_causal)
    if window:
        flops = 4 * batch * heads * head_dim * sum(min(i, window) + 1 for i in range(seq))
    size = f"hd{head_dim}_b{batch}_s{seq}_h{heads}" + (f"_kv{kv_heads}" if kv_heads else "")
    size += f"_window{window}" if window else "_causal" if is_causal else "_full"
    reference = functools.partial(_attention_by_head, **how, local_window_size=window and (window, 0))
    first = lambda fn: lambda q, k, v, halves=None: fn(q, k, v)
    if gradients:  # Forward and backward; products of the backward pass are counted as 2.5 times those of the forward.
        flops, size = flops * 7 // 2, size + "_grad"
        peers = {"cudnn": _with_gradients(cudnn)} | ({"tokamax": _with_gradients(tokamax)} if has_tokamax else {})
        kernel, reference = _with_gradients(kernel), _with_gradients(reference)
    else:
        kernel, reference = first(kernel), first(reference)
    nbytes = attention.bytes_moved(batch, seq, seq, heads, kv_heads or heads, head_dim) * (3 if gradients else 1)
    scaled = lambda q, k, v: tuple(x.astype(jnp.float16) for x in (q * head_dim**-0.5, k, v))
    return Case("attention", (q, kv, kv), BF16, kernel, reference, peers, flops, nbytes, size, target=target,
                derive=scaled if "jax_f16" in peers else None, **kwargs)  # fmt: skip


def _attention_of(batch, seq, heads, kv_heads, head_dim, is_causal, gradients):
    """Any sizes, beside cuDNN; forward and backward with `gradients`."""
    kernel = functools.partial(cookbook.attention, is_causal=is_causal)
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn")
    reference = functools.partial(_attention_by_head, is_causal=is_causal)
    flops = attention.flops(batch, seq, seq, heads, head_dim, is_causal)
    nbytes = attention.bytes_moved(batch, seq, seq, heads, kv_heads, head_dim) * (3 if gradients else 1)
    if gradients:
        flops, kernel, cudnn, reference = flops * 7 // 2, *map(_with_gradients, (kernel, cudnn, reference))
    kv = batch, seq, kv_heads, head_dim
    size = f"b{batch}_s{seq}_h{heads}_kv{kv_heads}_hd{head_dim}" + "_causal" * is_causal + "_grad" * gradients
    shapes = (batch, seq, heads, head_dim), kv, kv
    return Case("attention", shapes, BF16, kernel, reference, {"cudnn": cudnn}, flops, nbytes, size)


def _attention_of_jax(is_causal, q, k, v, halves):
    from jax.experimental.pallas.ops.gpu import attention_mgpu  # It imports absl, which nothing else here needs.

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=is_causal)
    return attention_mgpu.attention(*halves, config=config)


def _attention_of_tokamax(is_causal, q, k, v, halves=None):
    import tokamax  # Nothing else here needs it.

    return tokamax.dot_product_attention(q, k, v, is_causal=is_causal, implementation="mosaic")


def _attention_fp8(head_dim, seq, is_causal, target, **kwargs):
    """Descales of 1. cuDNN rounds its result to 8 bits too."""
    batch, heads, how = 16384 // seq, 2048 // head_dim, dict(is_causal=is_causal)
    ones = dict.fromkeys(("q_descale", "k_descale", "v_descale"), 1.0)
    shapes = ((batch, seq, heads, head_dim),) * 3
    sizes = batch, seq, seq, heads
    return Case("attention_fp8", shapes, E4M3, functools.partial(cookbook.attention_fp8, **ones, **how),
                lambda *args: _attention_by_head(*(x.astype(jnp.float32) for x in args), **how),
                {"cudnn": functools.partial(_attention_fp8_of_cudnn, is_causal)},
                attention_fp8.flops(*sizes, head_dim, is_causal), attention_fp8.bytes_moved(*sizes, heads, head_dim),
                f"hd{head_dim}_b{batch}_s{seq}_h{heads}_" + ("causal" if is_causal else "full"), target=target,
                parts=("cudnn",), error_max=0.04, **kwargs)  # fmt: skip


def _attention_fp8_of_cudnn(is_causal, q, k, v):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX has no public name for it.

    scales = dict.fromkeys(cudnn.fp8_params_keys, jnp.ones((1, 1, 1, 1), jnp.float32))
    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    out, *_ = cudnn.dot_product_attention(
        q, k, v, fp8_params=scales, scale=q.shape[3] ** -0.5, mask_type=mask, use_fp8=True
    )
    return out


def _with_gradients(fn):
    """The gradients of the sum of squares of what `fn` returns: its own gradient is not the same everywhere."""
    loss = lambda q, k, v: jnp.sum(jnp.square(fn(q, k, v).astype(jnp.float32)))
    return lambda q, k, v, halves=None: jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def _attention_by_head(q, k, v, **how):
    """The reference, a sequence and head at a time: the weights of all do not fit into memory."""
    group = q.shape[2] // k.shape[2]
    one = lambda x: attention.attention_reference(*(y[None, :, None] for y in x), **how)[0][0, :, 0]
    by_head = lambda x, n=1: jnp.repeat(jnp.moveaxis(x, 2, 1), n, axis=1).reshape(-1, x.shape[1], x.shape[3])
    out = jax.lax.map(jax.checkpoint(one), (by_head(q), by_head(k, group), by_head(v, group)))
    return jnp.moveaxis(out.reshape(q.shape[0], q.shape[2], q.shape[1], -1), 1, 2)


HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Sizes of the model whose cache these kernels read.


def _block_tables(lens, page_size):
    """(block tables, number of pages): pages in random order, and 0 after those that a length needs."""
    pages = [-(-int(length) // page_size) for length in lens]
    order, tables = np.random.default_rng(0).permutation(sum(pages)), np.zeros((len(lens), max(pages)), np.int32)
    for table, mine in zip(tables, np.split(order, np.cumsum(pages)[:-1]), strict=True):
        table[: len(mine)] = mine
    return tables, sum(pages)


def _gathered(q, k_pages, v_pages, block_tables, kv_lens):
    """Paged attention without a kernel: XLA gathers the pages, and masks by the lengths."""
    of = lambda pages: pages[block_tables].reshape(len(q), -1, *pages.shape[2:])
    return jax.nn.dot_product_attention(
        q[:, None], of(k_pages), of(v_pages), key_value_seq_lengths=kv_lens, implementation="xla"
    )[:, 0]


def _decode(size, lens, page_size, target=None, is_fp8=False, **kwargs):
    """Pages of 8 bits stand beside pages of 16 with the same numbers."""
    lens = np.asarray(lens, np.int32)
    tables, num_pages = _block_tables(lens, page_size)
    cache = (num_pages, page_size, KV_HEADS, HEAD_DIM)
    reference = lambda q, k, v, tables, lens: jax.lax.map(
        lambda x: paged_attention.paged_attention_reference(x[0][None], k, v, x[1][None], x[2][None])[0][0],
        (q, tables, lens),
    )
    peers, dtype = {"xla": lambda *args: _gathered(*args[:5])}, BF16
    if not is_fp8:
        peers["cudnn"] = lambda q, k, v, tables, lens, padded=None: cudnn_peers.decode(
            q, *(padded or (k, v)), tables, lens
        )
        if num_pages < tables.size:
            kwargs["derive"] = lambda q, k, v, tables, lens: tuple(cudnn_peers.whole_tables(x, tables) for x in (k, v))
    else:
        peers = {"paged_attention": lambda q, k, v, *rest: cookbook.paged_attention(q, *rest[2], *rest[:2])}
        dtype, kwargs["derive"] = E4M3, lambda q, k, v, *_: (k.astype(BF16), v.astype(BF16))
    return Case("paged_attention", ((len(lens), HEADS, HEAD_DIM), cache, cache), dtype,
                lambda *args: cookbook.paged_attention(*args[:5]), lambda *args: reference(*args[:5]), peers,
                paged_attention.flops(lens, HEADS, HEAD_DIM),
                paged_attention.bytes_moved(lens, KV_HEADS, HEAD_DIM, jnp.dtype(dtype).itemsize),
                f"{size}_page{page_size}", target=target, integers=(tables, lens), dtypes=(BF16, dtype, dtype),
                **kwargs)  # fmt: skip


def _cumulative(lens):
    return np.cumsum([0, *lens]).astype(np.int32)


def _prefill(size, lens, target=None, page_size=None, **kwargs):
    """Causal. At equal lengths it stands beside `attention`, and through pages beside itself without."""
    lens = np.asarray(lens, np.int32)
    total, starts = int(lens.sum()), _cumulative(lens)
    q, kv = (total, HEADS, HEAD_DIM), (total, KV_HEADS, HEAD_DIM)
    flops = varlen_attention.flops(lens, lens, HEADS, HEAD_DIM, is_causal=True)
    nbytes = varlen_attention.bytes_moved(lens, lens, HEADS, KV_HEADS, HEAD_DIM)
    packed = functools.partial(cookbook.varlen_attention, is_causal=True)

    def by_sequence(q, k, v):
        """The reference, a sequence at a time."""
        parts = [slice(start, end) for start, end in itertools.pairwise(starts.tolist())]
        return jnp.concatenate(
            [_attention_by_head(q[None, p], k[None, p], v[None, p], is_causal=True)[0] for p in parts]
        )

    if page_size is None:
        peers = {"cudnn": cudnn_peers.packed}
        if len(set(lens)) == 1:
            batch = lambda x: x.reshape(len(lens), -1, *x.shape[1:])
            peers["attention"] = lambda q, k, v, *_: cookbook.attention(
                batch(q), batch(k), batch(v), is_causal=True
            ).reshape(q.shape)
        return Case("varlen_attention", (q, kv, kv), BF16, lambda q, k, v, cu: packed(q, k, v, cu, cu),
                    lambda q, k, v, _: by_sequence(q, k, v), peers, flops, nbytes, size, target=target,
                    integers=(starts,), **kwargs)  # fmt: skip
    tables, num_pages = _block_tables(lens, page_size)
    slots = np.concatenate([table[np.arange(n) // page_size] * page_size + np.arange(n) % page_size
                            for table, n in zip(tables, lens, strict=True)])  # fmt: skip
    gather = lambda pages: pages.reshape(-1, *pages.shape[2:])[slots]
    cache = (num_pages, page_size, KV_HEADS, HEAD_DIM)
    return Case("ragged_paged_attention", (q, cache, cache), BF16,
                lambda *args: cookbook.ragged_paged_attention(*args[:6]),
                lambda q, k, v, *_: by_sequence(q, gather(k), gather(v)),
                {"varlen_attention": lambda q, k, v, tables, lens, cu, more: packed(q, *more["packed"], cu, cu),
                 "cudnn": lambda q, k, v, tables, lens, cu, more: cudnn_peers.prefill(*more["cudnn"], tables, lens)},
                flops, nbytes, f"{size}_page{page_size}", target=target, integers=(tables, lens, starts),
                derive=lambda q, k, v, tables, *_: dict(
                    packed=(gather(k), gather(v)),
                    cudnn=(q[cudnn_peers.padded_rows(starts)],
                           *(cudnn_peers.whole_tables(x, tables) for x in (k, v)))),
                undo=dict(cudnn=lambda out: out[cudnn_peers.places(starts)]), **kwargs)  # fmt: skip


def _ssd_by_chunks(x, dt, a, b, c, chunk=64):
    """SSD without a kernel: XLA's products, a scan over the chunks, sums in float32."""
    (batch, length, heads, size), f32 = x.shape, jnp.float32
    spread = lambda m: jnp.repeat(m, heads // m.shape[2], axis=2)
    cut = lambda m: jnp.moveaxis(m.reshape(batch, length // chunk, chunk, *m.shape[2:]), 1, 0)
    product = functools.partial(jnp.einsum, preferred_element_type=f32)
    dt, seen = dt.astype(f32), jnp.tril(jnp.ones((chunk, chunk), bool))[:, :, None]

    def step(state, rows):
        x, dt, cum, b, c = rows
        decay = jnp.exp(jnp.where(seen, cum[:, :, None] - cum[:, None], -jnp.inf)) * dt[:, None]
        pairs = (product("bthn,bshn->btsh", c, b) * decay).astype(x.dtype)
        y = product("bthn,bhpn->bthp", c, state.astype(x.dtype)) * jnp.exp(cum)[..., None]
        scaled = (x * (jnp.exp(cum[:, -1:] - cum) * dt)[..., None]).astype(x.dtype)
        state = state * jnp.exp(cum[:, -1])[..., None, None] + product("bshp,bshn->bhpn", scaled, b)
        return state, (y + product("btsh,bshp->bthp", pairs, x)).astype(x.dtype)

    rows = cut(x), cut(dt), jnp.cumsum(cut(dt * a.astype(f32)), axis=2), cut(spread(b)), cut(spread(c))
    _, y = jax.lax.scan(jax.checkpoint(step), jnp.zeros((batch, heads, size, b.shape[-1]), f32), rows)
    return jnp.moveaxis(y, 0, 1).reshape(x.shape)


def delta_rule_by_chunks(q, k, v, g, beta, chunk=64):
    """The gated delta rule without a kernel: XLA's products and triangular solver, a scan over the chunks."""
    (batch, length, heads, size), f32 = v.shape, jnp.float32
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    cut = lambda m: jnp.moveaxis(m.reshape(batch, length // chunk, chunk, heads, *m.shape[3:]), (1, 3), (0, 2))
    product = functools.partial(jnp.einsum, preferred_element_type=f32)
    rows, cols = jnp.arange(chunk)[:, None], jnp.arange(chunk)

    def step(state, operands):
        q, k, v, cum, beta = operands  # (batch, heads, chunk, ...)
        decay = jnp.exp(jnp.where(rows >= cols, cum[..., :, None] - cum[..., None, :], -jnp.inf))
        lower = jnp.where(rows > cols, beta[..., None] * decay * product("bhtn,bhsn->bhts", k, k), 0)
        before = product("bhtn,bhpn->bhtp", k, state.astype(k.dtype)) * jnp.exp(cum)[..., None]
        change = jax.scipy.linalg.solve_triangular(
            lower + jnp.eye(chunk), beta[..., None] * (v - before), lower=True, unit_diagonal=True
        )
        pairs = (product("bhtn,bhsn->bhts", q, k) * decay).astype(v.dtype)
        o = product("bhtn,bhpn->bhtp", q, state.astype(q.dtype)) * jnp.exp(cum)[..., None]
        o = o + product("bhts,bhsp->bhtp", pairs, change.astype(v.dtype))
        left = (change * jnp.exp(cum[..., -1:] - cum)[..., None]).astype(v.dtype)
        state = state * jnp.exp(cum[..., -1])[..., None, None] + product("bhtp,bhtn->bhpn", left, k)
        return state, (o * k.shape[-1] ** -0.5).astype(v.dtype)

    operands = cut(q), cut(k), cut(v), jnp.cumsum(cut(g.astype(f32)), axis=-1), cut(beta.astype(f32))
    _, o = jax.lax.scan(jax.checkpoint(step), jnp.zeros((batch, heads, size, k.shape[-1]), f32), operands)
    return jnp.moveaxis(o, (0, 2), (1, 3)).reshape(v.shape)


def _delta_rule(batch, length, key_heads, heads, target=None, gradients=False, dim=128, **kwargs):
    """Decays near 1, and betas that keys of norm 1 would have from 0 to 1: normal keys have about `dim` ** 0.5."""
    shapes = *[(batch, length, key_heads, dim)] * 2, (batch, length, heads, dim), *[(batch, length, heads)] * 2

    def of(fn):
        def call(q, k, v, g, beta):
            return fn(q, k, v, -jax.nn.softplus(g - 4.0), jax.nn.sigmoid(beta) / (1.5 * dim))

        loss = lambda *args: jnp.sum(jnp.square(call(*args).astype(jnp.float32)))
        return jax.grad(loss, argnums=(0, 1, 2, 3, 4)) if gradients else call

    def exact(q, k, v, g, beta):
        """In float32; token by token, unless gradients would have to keep the state of each."""
        if not gradients:
            return delta_rule.gated_delta_rule_reference(q, k, v, g, beta)
        with jax.default_matmul_precision("highest"):
            return delta_rule_by_chunks(*(x.astype(jnp.float32) for x in (q, k, v)), g, beta)

    flops = delta_rule.flops(batch * length, heads, dim, dim) * (4 if gradients else 1)
    nbytes = delta_rule.bytes_moved(batch * length, key_heads, heads, dim, dim) * (3 if gradients else 1)
    size = f"b{batch}_t{length}_h{key_heads}_{heads}_d{dim}" + ("_grad" if gradients else "")
    return Case("gated_delta_rule", shapes, BF16, of(cookbook.gated_delta_rule), of(exact),
                {"xla": of(delta_rule_by_chunks)}, flops, nbytes, size, target=target,
                dtypes=(BF16, BF16, BF16, jnp.float32, jnp.float32), **kwargs)  # fmt: skip


def _kda_by_chunks(q, k, v, g, beta, chunk=16):
    """Kimi Delta Attention without a kernel: XLA's products and triangular solver, a scan over the chunks, which are
    short, because the decays between two tokens are an array of chunk x chunk x channels."""
    (batch, length, heads, size), f32 = v.shape, jnp.float32
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    cut = lambda m: jnp.moveaxis(m.reshape(batch, length // chunk, chunk, heads, *m.shape[3:]), (1, 3), (0, 2))
    product = functools.partial(jnp.einsum, preferred_element_type=f32)
    rows, cols = jnp.arange(chunk)[:, None], jnp.arange(chunk)

    def step(state, operands):
        q, k, v, cum, beta = operands  # (batch, heads, chunk, ...)
        apart = jnp.where((rows >= cols)[..., None], cum[..., :, None, :] - cum[..., None, :, :], -jnp.inf)
        faded = k[..., None, :, :] * jnp.exp(apart)
        lower = jnp.where(rows > cols, beta[..., None] * product("bhtn,bhtsn->bhts", k.astype(f32), faded), 0)
        read, to_end = jnp.exp(cum), jnp.exp(cum[..., -1:, :] - cum)
        before = product("bhtn,bhpn->bhtp", (k * read).astype(k.dtype), state.astype(k.dtype))
        change = jax.scipy.linalg.solve_triangular(
            lower + jnp.eye(chunk), beta[..., None] * (v - before), lower=True, unit_diagonal=True
        )
        pairs = product("bhtn,bhtsn->bhts", q.astype(f32), faded).astype(v.dtype)
        o = product("bhtn,bhpn->bhtp", (q * read).astype(q.dtype), state.astype(q.dtype))
        o = o + product("bhts,bhsp->bhtp", pairs, change.astype(v.dtype))
        added = product("bhtp,bhtn->bhpn", change.astype(v.dtype), (k * to_end).astype(k.dtype))
        state = state * jnp.exp(cum[..., -1, :])[..., None, :] + added
        return state, (o * k.shape[-1] ** -0.5).astype(v.dtype)

    operands = cut(q), cut(k), cut(v), jnp.cumsum(cut(g.astype(f32)), axis=3), cut(beta.astype(f32))
    _, o = jax.lax.scan(jax.checkpoint(step), jnp.zeros((batch, heads, size, k.shape[-1]), f32), operands)
    return jnp.moveaxis(o, (0, 2), (1, 3)).reshape(v.shape)


def _kda(batch, length, key_heads, heads, target=None, gradients=False, dim=128, **kwargs):
    """Decays near 1, and betas that keys of norm 1 would have from 0 to 1: normal keys have about `dim` ** 0.5."""
    wide = (batch, length, heads, dim)
    shapes = *[(batch, length, key_heads, dim)] * 2, wide, wide, wide[:3]

    def of(fn):
        def call(q, k, v, g, beta):
            return fn(q, k, v, -jax.nn.softplus(g - 4.0), jax.nn.sigmoid(beta) / (1.5 * dim))

        loss = lambda *args: jnp.sum(jnp.square(call(*args).astype(jnp.float32)))
        return jax.grad(loss, argnums=(0, 1, 2, 3, 4)) if gradients else call

    def exact(q, k, v, g, beta):
        """In float32; token by token, unless gradients would have to keep the state of each."""
        if not gradients:
            return kda.kda_reference(q, k, v, g, beta)
        with jax.default_matmul_precision("highest"):
            return _kda_by_chunks(*(x.astype(jnp.float32) for x in (q, k, v)), g, beta)

    flops = kda.flops(batch * length, heads, dim, dim) * (4 if gradients else 1)
    nbytes = kda.bytes_moved(batch * length, key_heads, heads, dim, dim) * (3 if gradients else 1)
    size = f"b{batch}_t{length}_h{key_heads}_{heads}_d{dim}" + ("_grad" if gradients else "")
    return Case("kda", shapes, BF16, of(cookbook.kda), of(exact), {"xla": of(_kda_by_chunks)}, flops, nbytes, size,
                target=target, dtypes=(BF16, BF16, BF16, jnp.float32, jnp.float32), **kwargs)  # fmt: skip


def _ssd(batch, length, heads, groups, head_dim, state_dim, target=None, gradients=False, **kwargs):
    """dt and a are made of normal numbers as Mamba-2's layers make them: dt from 0.001 to 0.1 or so."""
    wide = (batch, length, groups, state_dim)
    shapes = (batch, length, heads, head_dim), (batch, length, heads), (heads,), wide, wide

    def of(fn):
        call = lambda x, dt, a, b, c: fn(x, jax.nn.softplus(dt - 4.0), -jnp.exp(a), b, c)
        loss = lambda *args: jnp.sum(jnp.square(call(*args).astype(jnp.float32)))
        return jax.grad(loss, argnums=(0, 1, 2, 3, 4)) if gradients else call

    def exact(x, dt, a, b, c):
        """In float32; token by token, unless gradients would have to keep the state of each."""
        if not gradients:
            return ssd.ssd_reference(x, dt, a, b, c)[0]
        with jax.default_matmul_precision("highest"):
            return _ssd_by_chunks(x.astype(jnp.float32), dt, a, b.astype(jnp.float32), c.astype(jnp.float32))

    sizes = (batch * length, heads, head_dim)
    flops = ssd.flops(*sizes, state_dim) * (4 if gradients else 1)
    nbytes = ssd.bytes_moved(*sizes, groups, state_dim) * (3 if gradients else 1)
    size = f"b{batch}_t{length}_h{heads}_g{groups}_p{head_dim}_n{state_dim}" + ("_grad" if gradients else "")
    return Case("ssd", shapes, BF16, of(cookbook.ssd), of(exact),
                {"xla": of(_ssd_by_chunks)}, flops, nbytes, size, target=target,
                dtypes=(BF16, jnp.float32, jnp.float32, BF16, BF16), **kwargs)  # fmt: skip


def _ssd_step(seqs, heads, groups, head_dim, state_dim, **kwargs):
    """States of many sequences. dt and a are as Mamba-2's layers make them."""
    rng, wide = np.random.default_rng(0), (seqs, groups, state_dim)
    shapes = (seqs, heads, head_dim), wide, wide, (seqs, heads, head_dim, state_dim)
    dt = rng.uniform(0.001, 0.1, (seqs, heads)).astype(np.float32)
    a = -rng.uniform(1, 16, heads).astype(np.float32)

    def by_xla(x, b, c, dt, a, state):
        y, state[...] = ssd_step.ssd_step_reference(x, dt, a, b, c, state[...])
        return y.astype(x.dtype)

    return Case("ssd_step", shapes, BF16, lambda x, b, c, dt, a, state: cookbook.ssd_step(x, dt, a, b, c, state),
                lambda x, b, c, state, dt, a: ssd_step.ssd_step_reference(x, dt, a, b, c, state)[0], {"xla": by_xla},
                ssd_step.flops(seqs, heads, head_dim, state_dim),
                ssd_step.bytes_moved(seqs, heads, head_dim, groups, state_dim),
                f"b{seqs}_h{heads}_p{head_dim}_n{state_dim}", dtypes=(BF16, BF16, BF16, jnp.float32),
                integers=(dt, a), in_place=3, **kwargs)  # fmt: skip


def conv_by_xla(x, weight, bias):
    """The causal convolution with silu without a kernel: a sum of shifted copies."""
    (length, taps), f32 = (x.shape[1], weight.shape[1]), jnp.float32
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    terms = [padded[:, j : j + length].astype(f32) * weight[:, j].astype(f32) for j in range(taps)]
    return jax.nn.silu(sum(terms) + bias.astype(f32)).astype(x.dtype)


def _conv(batch, length, columns, taps, gradients=False, **kwargs):
    """With a bias and silu, as in Mamba-2. With `gradients` those alone, of x, the weights and the bias."""
    op = causal_conv1d

    def of(fn):
        return (lambda *args: jax.vjp(fn, *args[:-1])[1](args[-1])) if gradients else fn

    def exact(*args):
        fn = lambda *args: op.causal_conv1d_reference(*args, activation="silu")[0]
        return of(fn)(*(x.astype(jnp.float32) for x in args))

    x = batch, length, columns
    shapes = x, (columns, taps), (columns,), *[x] * gradients
    # The gradient reads the cotangent of y, too.
    nbytes = op.bytes_moved(batch * length, columns, 2) * (3 if gradients else 2) // 2
    return Case("causal_conv1d", shapes, BF16, of(functools.partial(cookbook.causal_conv1d, activation="silu")), exact,
                {"xla": of(conv_by_xla)}, op.flops(batch * length, columns, taps) * (4 if gradients else 1), nbytes,
                f"b{batch}_t{length}_d{columns}_w{taps}" + ("_grad" if gradients else ""), **kwargs)  # fmt: skip


def _conv_step(seqs, columns, taps, **kwargs):
    """One token of many sequences."""
    op = causal_conv1d_step

    def exact(x, weight, bias, state):
        return op.causal_conv1d_step_reference(x, state, weight, bias, activation="silu")

    def by_xla(x, weight, bias, state):
        y, state[...] = (new.astype(x.dtype) for new in exact(x, weight, bias, state[...]))
        return y

    shapes = (seqs, columns), (columns, taps), (columns,), (seqs, columns, taps - 1)
    return Case("causal_conv1d_step", shapes, BF16,
                lambda x, weight, bias, state: cookbook.causal_conv1d_step(x, state, weight, bias, activation="silu"),
                lambda *args: exact(*args)[0], {"xla": by_xla}, op.flops(seqs, columns, taps),
                op.bytes_moved(seqs, seqs, columns, taps, 2), f"b{seqs}_d{columns}_w{taps}", in_place=3,
                **kwargs)  # fmt: skip


def _delta_rule_step(seqs, key_heads, heads, dim=128, **kwargs):
    """States of many sequences. Betas are those of keys of norm 1, where normal ones have about `dim` ** 0.5."""
    rng, narrow = np.random.default_rng(0), (seqs, key_heads, dim)
    shapes = narrow, narrow, (seqs, heads, dim), (seqs, heads, dim, dim)
    g = -rng.uniform(0.0, 0.1, (seqs, heads)).astype(np.float32)
    beta = rng.uniform(0.0, 1 / dim, (seqs, heads)).astype(np.float32)

    def by_xla(q, k, v, g, beta, state):
        o, state[...] = delta_rule_step.gated_delta_rule_step_reference(q, k, v, g, beta, state[...])
        return o.astype(v.dtype)

    return Case("gated_delta_rule_step", shapes, BF16, cookbook.gated_delta_rule_step,
                lambda q, k, v, state, g, beta: delta_rule_step.gated_delta_rule_step_reference(
                    q, k, v, g, beta, state)[0],
                {"xla": by_xla}, delta_rule_step.flops(seqs, heads, dim, dim),
                delta_rule_step.bytes_moved(seqs, key_heads, heads, dim, dim), f"b{seqs}_h{key_heads}_{heads}_d{dim}",
                dtypes=(BF16, BF16, BF16, jnp.float32), integers=(g, beta), in_place=3, **kwargs)  # fmt: skip


def _kda_step(seqs, key_heads, heads, dim=128, **kwargs):
    """As `_delta_rule_step`, with a gate for each channel."""
    rng, narrow = np.random.default_rng(0), (seqs, key_heads, dim)
    shapes = narrow, narrow, (seqs, heads, dim), (seqs, heads, dim, dim)
    g = -rng.uniform(0.0, 0.1, (seqs, heads, dim)).astype(np.float32)
    beta = rng.uniform(0.0, 1 / dim, (seqs, heads)).astype(np.float32)

    def by_xla(q, k, v, g, beta, state):
        o, state[...] = kda_step.kda_step_reference(q, k, v, g, beta, state[...])
        return o.astype(v.dtype)

    return Case("kda_step", shapes, BF16, cookbook.kda_step,
                lambda q, k, v, state, g, beta: kda_step.kda_step_reference(q, k, v, g, beta, state)[0],
                {"xla": by_xla}, kda_step.flops(seqs, heads, dim, dim),
                kda_step.bytes_moved(seqs, key_heads, heads, dim, dim), f"b{seqs}_h{key_heads}_{heads}_d{dim}",
                dtypes=(BF16, BF16, BF16, jnp.float32), integers=(g, beta), in_place=3, **kwargs)  # fmt: skip


def _matmul_f32(m, n, k, **kwargs):
    flops, nbytes = matmul.flops(m, n, k), matmul.bytes_moved(m, n, k, 4)
    peers = {"cublas": functools.partial(jnp.matmul, precision="highest")}
    return Case("matmul", ((m, k), (k, n)), jnp.float32, cookbook.matmul_blocked, matmul_blocked_reference, peers,
                flops, nbytes, f"{m}x{n}x{k}", impl="matmul_blocked", **kwargs)  # fmt: skip


def _of_jax(module: str):
    """A module of JAX's own GPU kernels. For its `main` it imports JAX's test helpers; they import absl, which nothing
    here needs."""
    missing = "jax._src.test_util" not in sys.modules and not imports("absl")
    if missing:
        sys.modules["jax._src.test_util"] = types.ModuleType("test_util")
    try:
        return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{module}")
    finally:
        if missing:
            del sys.modules["jax._src.test_util"]


def _ragged_dot_of_jax(block_m: int, n: int, transpose_rhs: bool, lhs, rhs, sizes):
    """Tiles of `block_m` by 128 and four stages, which are the fastest of those that its own search tries."""
    grid_block_n = next(width for width in (8, 4, 2, 1) if n % (128 * width) == 0)
    return _of_jax("ragged_dot_mgpu").ragged_dot(
        lhs, rhs, group_sizes=sizes, block_m=block_m, block_n=128, block_k=64, max_concurrent_steps=4,
        grid_block_n=grid_block_n, transpose_rhs=transpose_rhs,
    )  # fmt: skip


def _ragged_dot_of_tokamax(lhs, rhs, sizes, *_):
    import tokamax  # Nothing else here needs it.

    return tokamax.ragged_dot(lhs, rhs, sizes, implementation="mosaic")


def _ragged(m, n, k, sizes, transpose_rhs=False, target=None, **kwargs):
    """XLA computes all rows by every matrix, and is left out where that takes long."""
    sizes, touched = np.asarray(sizes, np.int32), int(np.count_nonzero(sizes))
    g = len(sizes)
    how = dict(transpose_rhs=transpose_rhs)
    kernel = lambda lhs, rhs, sizes, plain=None: cookbook.ragged_dot(lhs, rhs, sizes, **how)
    of_jax = lambda block_m: lambda lhs, rhs, sizes, *_: _ragged_dot_of_jax(block_m, n, transpose_rhs, lhs, rhs, sizes)
    peers = {"jax_mgpu": of_jax(128), "jax_mgpu_64": of_jax(64)} if n % 128 == k % 64 == 0 else {}
    if g <= 8 and not transpose_rhs:
        peers["xla"] = jax.lax.ragged_dot
    if imports("tokamax") and not transpose_rhs:
        peers["tokamax"] = _ragged_dot_of_tokamax
    if transpose_rhs:
        peers["ragged_dot"] = lambda lhs, rhs, sizes, plain: cookbook.ragged_dot(lhs, plain, sizes)
    reads_weights = kwargs.get("reads_weights", False)
    nbytes = 2 * touched * k * n if reads_weights else ragged_dot.bytes_moved(m, n, k, touched)
    return Case("ragged_dot", ((m, k), (g, n, k) if transpose_rhs else (g, k, n)), BF16, kernel,
                lambda lhs, rhs, sizes, plain=None: ragged_dot.ragged_dot_reference(lhs, rhs, sizes, **how), peers,
                ragged_dot.flops(int(sizes.sum()), n, k), nbytes,
                f"{m}x{n}x{k}_g{g}" + ("_skewed" if sizes.max() * g > 4 * m else "") + "_tb" * transpose_rhs,
                target=target, integers=(sizes,), derive=(lambda lhs, rhs, sizes: rhs.mT) if transpose_rhs else None,
                tune=lambda *args: lab.autotune(
                    cookbook.ragged_dot, *args[:3], **how,
                    configs=group_cost.ranked(ragged_dot.problem(m, n, k, g, **how), TO_TUNE)),
                **kwargs)  # fmt: skip


def _ragged_transposed(m, k, n, sizes, target=None, **kwargs):
    sizes = np.asarray(sizes, np.int32)
    g = len(sizes)
    of_jax = lambda lhs, rhs, sizes: _of_jax("transposed_ragged_dot_mgpu").transposed_ragged_dot(
        lhs, rhs, group_sizes=sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=4
    )
    return Case("ragged_dot_transposed", ((m, k), (m, n)), BF16, cookbook.ragged_dot_transposed,
                ragged_dot_transposed.ragged_dot_transposed_reference,
                {"jax_mgpu": of_jax} if k % 128 == n % 512 == 0 else {},
                ragged_dot_transposed.flops(int(sizes.sum()), n, k), ragged_dot_transposed.bytes_moved(m, n, k, g),
                f"{m}x{k}x{n}_g{g}", target=target, integers=(sizes,),
                tune=lambda *args: lab.autotune(
                    cookbook.ragged_dot_transposed, *args,
                    configs=group_cost.ranked(ragged_dot_transposed.problem(m, k, n, g), TO_TUNE)),
                **kwargs)  # fmt: skip


def _ragged_mxfp4_weights(m, n, k, sizes, **kwargs):
    """Rates of few rows are those of reading the experts that have rows. `ragged_dot` gets weights of 16 bits."""
    op, sizes = ragged_dot_mxfp4_weights, np.asarray(sizes, np.int32)
    g, touched = len(sizes), int(np.count_nonzero(sizes))
    ones = np.full((g, -(-k // 64), n), (127 + E2M1_BIAS) * 257, np.uint16)  # Scales of 1.
    return Case("ragged_dot_mxfp4_weights", ((m, k), (g, *shape_of(n, k))), BF16,
                lambda lhs, w, scales, sizes, wide=None: cookbook.ragged_dot_mxfp4_weights(lhs, w, scales, sizes),
                lambda lhs, w, scales, sizes, wide=None: op.ragged_dot_mxfp4_weights_reference(lhs, w, scales, sizes),
                {"ragged_dot": lambda lhs, w, scales, sizes, wide: cookbook.ragged_dot(lhs, wide, sizes)},
                op.flops(int(sizes.sum()), n, k), op.bytes_moved(m, n, k, touched), f"{m}x{n}x{k}_g{g}",
                dtypes=(BF16, jnp.uint32), integers=(ones, sizes),
                derive=lambda lhs, w, scales, sizes: matmul_mxfp4_weights.widened(w, scales, BF16)[:, :k],
                tune=lambda lhs, w, scales, sizes, *_: lab.autotune(
                    cookbook.ragged_dot_mxfp4_weights, lhs, w, scales, sizes, configs=op.ranked(m, n, k, g, TO_TUNE)),
                **kwargs)  # fmt: skip


def _ragged_fp8(m, n, k, sizes, **kwargs):
    """Scales of blocks of 128."""
    sizes = np.asarray(sizes, np.int32)
    g, how = len(sizes), dict(transpose_rhs=True)
    shapes = (m, k), (g, n, k), (m, k // 128), (g, n // 128, k // 128)
    return Case("ragged_dot_fp8", shapes, E4M3, functools.partial(cookbook.ragged_dot_fp8, **how),
                functools.partial(ragged_dot_fp8.ragged_dot_fp8_reference, **how), {},
                ragged_dot_fp8.flops(int(sizes.sum()), n, k), ragged_dot_fp8.bytes_moved(m, n, k, g),
                f"{m}x{n}x{k}_g{g}", integers=(sizes,), dtypes=(E4M3, E4M3, jnp.float32, jnp.float32),
                tune=lambda *args: lab.autotune(
                    cookbook.ragged_dot_fp8, *args, **how,
                    configs=ragged_dot_fp8.ranked(m, n, k, g, TO_TUNE, by_block=True)),
                **kwargs)  # fmt: skip


def _moe(tokens, experts, top_k, hidden, inner, **kwargs):
    """`products`: both products alone, of rows that lie in order already. The rest is routing, permutation and sum."""
    shapes = (tokens, hidden), (tokens, experts), (experts, hidden, 2 * inner), (experts, inner, hidden)

    def ordered(x, logits, *_):
        routing = route_reference(logits, top_k)
        return x[routing.sources // top_k], routing.group_sizes

    def products(x, logits, gate_up, down, of_rows):
        rows, sizes = of_rows
        return cookbook.ragged_dot(cookbook.ragged_dot(rows, gate_up, sizes, activation="swiglu"), down, sizes)

    first = lambda fn: lambda x, logits, gate_up, down, of_rows=None: fn(x, logits, gate_up, down, top_k=top_k)
    return Case("moe", shapes, BF16, first(cookbook.moe), first(moe.moe_reference), {"products": products},
                moe.flops(tokens, top_k, hidden, inner), moe.bytes_moved(tokens, top_k, hidden, inner, experts),
                f"{tokens}_top{top_k}of{experts}_{hidden}x{inner}", dtypes=(BF16, jnp.float32, BF16, BF16),
                derive=ordered, parts=("products",), **kwargs)  # fmt: skip


def cut_at_random(m: int, num_groups: int, seed: int = 0) -> np.ndarray:
    """Sizes of groups between boundaries drawn at random."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, m, num_groups - 1))
    return np.diff(np.concatenate([[0], cuts, [m]]))


def skewed(m: int, num_groups: int, exponent: float, seed: int = 0) -> np.ndarray:
    """Sizes of groups of which the i-th largest has about a share of 1 / i**exponent, in random order."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, num_groups + 1) ** -float(exponent)
    whole = np.floor(m * share / share.sum()).astype(np.int64)
    whole[rng.choice(num_groups, m - whole.sum(), replace=False)] += 1
    return rng.permutation(whole)


def with_empty(sizes: np.ndarray, every: int) -> np.ndarray:
    """Every `every`-th group's rows given to the one before it."""
    sizes = sizes.copy()
    sizes[every - 2 :: every] += sizes[every - 1 :: every]
    sizes[every - 1 :: every] = 0
    return sizes


def routed(tokens: int, top_k: int, experts: int, seed: int = 0) -> np.ndarray:
    """Sizes of groups where each token has `top_k` experts, drawn at random."""
    rng = np.random.default_rng(seed)
    return np.bincount(np.concatenate([rng.permutation(experts)[:top_k] for _ in range(tokens)]), minlength=experts)


ROW_SHAPES = ((1048576, 128), (131072, 1000), (32768, 4096), (4096, 32768))
ABOVE_XLA = Target("xla")
MATMUL_SIZES = (  # M, N, K: many rows; few tiles; a short K; a long one; few rows; no multiples of a tile.
    (16384, 4096, 4096), (1024, 8192, 4096), (8192, 8192, 512), (512, 512, 32768), (64, 8192, 8192), (128, 4096, 14336),
    (4000, 3000, 5000),
)  # fmt: skip
CASES = [
    _add(2**29, target=ABOVE_XLA, headline=True),
    _rows("softmax", softmax, 16384, 8192, 1, target=Target("xla", 1.2, 4.0), headline=True),
    *(_rows("softmax", softmax, *shape, 1, target=ABOVE_XLA) for shape in ROW_SHAPES),
    _rows("rms_norm", rms_norm, 16384, 8192, 2, target=Target("xla", rate=3.95), headline=True),
    *(_rows("rms_norm", rms_norm, *shape, 2, target=ABOVE_XLA) for shape in ROW_SHAPES),
    _rms_norm_of_sum(16384, 8192, target=ABOVE_XLA),
    _rms_norm_of_sum(64, 2048),
    _rms_norm_of_sum(8192, 4096, BF16, target=Target("xla", rate=4.16)),
    _rms_norm_8_bits(8192, 4096, target=ABOVE_XLA),
    _rows("rms_norm", rms_norm, 32, 4096, 2, target=ABOVE_XLA),
    _rows("layer_norm", layer_norm, 8192, 4096, 3, target=Target("xla", rate=4.16)),
    _rows_backward("layer_norm", layer_norm, 8192, 4096, 3, target=ABOVE_XLA),
    *(_group_norm(8192, 32, size, True, target=ABOVE_XLA) for size in (64, 128, 256)),
    _group_norm(8192, 8, 1024, False, shared=False, target=ABOVE_XLA),
    _group_norm(8192, 32, 128, True, gradients=True, target=ABOVE_XLA),
    _group_norm(8192, 8, 1024, False, shared=False, gradients=True, target=ABOVE_XLA),
    _rows_backward("softmax", softmax, 16384, 8192, 1, target=ABOVE_XLA),
    _rows_backward("rms_norm", rms_norm, 16384, 8192, 2, target=Target("xla", rate=3.6)),
    _sum(16384, 8192, -1),
    _sum(16384, 8192, 0),
    _matmul(4096, 4096, 4096, rungs=("matmul_pipelined", "matmul_wgmma"), headline=True),
    _matmul(8192, 8192, 8192, rungs=("matmul_pipelined",), headline=True),
    _matmul(2048, 2048, 2048, rungs=("matmul_pipelined", "matmul_wgmma")),
    _matmul(4096, 8192, 4096, rungs=("matmul_pipelined",)),
    *(_matmul(*size) for size in MATMUL_SIZES),
    _matmul(4096, 4096, 4096, transpose_a=True),
    _matmul_f32(4096, 4096, 4096),
    _matmul_fp8(4096, 4096, 4096, headline=True),
    _matmul_fp8(8192, 8192, 8192),
    *(_matmul_int8_weights(m, 8192, 8192, Target("cublas", 1.6), headline=m == 16) for m in (16, 64, 128)),
    _matmul_int8_weights(4096, 8192, 4096, ABOVE_XLA, headline=True),
    *(_matmul_int4_weights(m, 8192, 8192, Target("cublas", 2.5)) for m in (1, 16, 64)),
    _matmul_int4_weights(256, 8192, 8192, Target("cublas", 1.0)),
    _matmul_int4_weights(16, 28672, 8192, Target(None, rate=3.4)),
    _matmul_int4_weights(4096, 8192, 4096, Target("cublas", 0.95)),
    *(_matmul_mxfp4_weights(m, 8192, 8192, Target("cublas", 2.5)) for m in (1, 64)),
]


# Rows, hidden values and vocabularies of training steps of 8B, 4B and 1B models; milliseconds, forward and backward.
LOSSES = ((4096, 4096, 128256, 17.8, 22.6), (16384, 2048, 151936, 47, 56), (8192, 2048, 32000, 4.7, 5.5))
CASES += [
    *(_linear_cross_entropy(*size, ms=ms, headline=size[0] == 4096) for *size, ms, _ in LOSSES),
    *(_linear_cross_entropy(*size, memory="low", ms=ms) for *size, _, ms in LOSSES),
    *(_linear_cross_entropy(*size, gradients=False) for *size, _, _ in LOSSES),
    # 0.92 of the rate of a stream.
    _cross_entropy(16384, 151936, target=Target("xla", rate=4.03)),
    _cross_entropy(16384, 151936, gradients=True, target=Target("xla", rate=4.03)),
]


# Rows, columns, k and the TB/s that milliseconds of 0.020, 0.040, 0.010 and 0.060 are: logits of decoding.
SELECTIONS = ((64, 128256, 50, 1.64), (64, 128256, 1024, 0.82), (1, 128256, 50, 0.051), (256, 151936, 20, 2.59))
CASES += [_top_k(*size, target=Target("xla", rate=rate)) for *size, rate in SELECTIONS]
CASES += [_top_k(4096, 64, 8, target=ABOVE_XLA)]  # A router's.
CASES += [  # 0.014 ms and 0.030 ms.
    _sample(64, 128256, target=Target("xla", rate=2.35)),
    _sample(64, 128256, "_p0.9", top_p=0.9, target=Target("xla", rate=1.09)),
    _sample(64, 128256, "_k50_p0.9", top_k=50, top_p=0.9, target=Target("xla", rate=1.09)),
]


# M, N and K of MLPs of 8B and 1B models, and of decoding.
GATED = ((4096, 14336, 4096), (8192, 8192, 2048))
CASES += [
    *(_glu(*size, target=ABOVE_XLA, headline=size[0] == 4096) for size in GATED),
    *(_matmul(m, 2 * n, k) for m, n, k in GATED),  # All arithmetic of the unit, in one product.
    *(_glu(*size, gradients=True, target=ABOVE_XLA) for size in GATED),
    *(_glu(m, 14336, 4096, target=ABOVE_XLA) for m in (16, 128)),
]


# Without targets, because nobody here has a B200: compiled for it, never run, never timed.
BLACKWELL_SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 4096), (128, 4096, 14336), (4000, 3000, 5000))
CASES += [_blackwell_matmul(*size) for size in BLACKWELL_SIZES]
CASES += [_blackwell_mxfp8(*size) for size in BLACKWELL_SIZES if size[2] % 32 == 0]


# Rates of the fastest of FlashAttention-3 and -4, cuDNN, and JAX's and tokamax's kernels on one H200 on 2026-11-20: its
# TFLOP/s over cuDNN's beside it, with heads of 256 its TFLOP/s; sequences of 4096 and 16384, full and causal.
ATTENTION_TARGETS = {
    64: (
        Target("cudnn", 498 / 483),
        Target("cudnn", 451 / 436),
        Target("cudnn", 528 / 494),
        Target("cudnn", 518 / 467),
    ),
    128: (Target("cudnn"), Target("cudnn", 611 / 573), Target("cudnn", 696 / 677), Target("cudnn", 680 / 624)),
    256: tuple(Target(None, rate=rate) for rate in (682, 637, 715, 696)),
}
ATTENTION_SIZES = list(itertools.product((4096, 16384), (False, True)))
CASES += [
    _attention(head_dim, *size, target, headline=head_dim == 128)
    for head_dim, targets in ATTENTION_TARGETS.items()
    for size, target in zip(ATTENTION_SIZES, targets, strict=True)
]
CASES += [
    _attention(128, 16384, True, None, kv_heads=2),
    _attention(128, 16384, True, None, window=1024),
    *(_attention(h, *size, Target("cudnn"), gradients=True) for h in (64, 128) for size in ATTENTION_SIZES),
]


# Rates asked for with heads of 128 and the longer sequence, and cuDNN's.
CASES += [
    *(_attention_fp8(128, 16384, cut, Target("cudnn", rate=rate)) for cut, rate in ((False, 1000), (True, 950))),
    *(_attention_fp8(128, 4096, cut, Target("cudnn")) for cut in (False, True)),
    *(_attention_fp8(head_dim, 16384, cut, None) for head_dim in (64, 256) for cut in (False, True)),
]


# Decode: the TB/s of FlashAttention-3 as vLLM ships it, or a little more; mixed lengths must reach 85 % of the rate of
# equal ones. Prefill: its TFLOP/s, and 95 % of the rate of this package's own kernels without the ragged part.
MIXED = np.minimum(np.random.default_rng(0).zipf(1.2, 128), 2**14)
PREFILL = np.random.default_rng(0).integers(512, 4097, 16)
for _page in (16, 128):
    CASES += [
        _decode("b64_s8192", [8192] * 64, _page, Target(None, rate=4.35), headline=True),
        _decode("b8_s8192", [8192] * 8, _page, Target(None, rate=3.4)),
        _decode("b1_s32768", [32768], _page, Target(None, rate=2.7)),
        _decode("b128_mixed", MIXED, _page, Target(None, rate=0.85 * 4.35)),
        # 0.9 of the bytes a second that pages of 16 bits are read with: half the bytes in 1 / 1.8 of the time.
        _decode("b64_s8192", [8192] * 64, _page, Target("paged_attention", 1.8), is_fp8=True),
        _decode("b8_s8192", [8192] * 8, _page, Target("paged_attention", 1.8), is_fp8=True),
    ]
CASES += [
    _prefill("b16_s512to4096", PREFILL, Target(None, rate=535), headline=True),
    _prefill("b16_s2048", [2048] * 16, Target("attention", 0.95)),
    *(_prefill("b16_s512to4096", PREFILL, Target("varlen_attention", 0.95), page) for page in (16, 128)),
]


# Targets are rates, or 0.95 of the rate of the same product with matrices as they lie.
FEW_LARGE, MANY = cut_at_random(16384, 8), with_empty(skewed(65536, 128, 1.0), 16)
CASES += [
    _ragged(16384, 4096, 4096, FEW_LARGE, target=Target("jax_mgpu", 1.05, rate=720), headline=True),
    _ragged(65536, 1536, 2048, MANY, target=Target("jax_mgpu", 1.05, rate=550), headline=True),
    _ragged(16384, 4096, 4096, FEW_LARGE, transpose_rhs=True, target=Target("ragged_dot", 0.95)),
    _ragged(65536, 2048, 1536, MANY, transpose_rhs=True, target=Target("ragged_dot", 0.95)),
    _ragged(512, 1536, 4096, routed(64, 8, 128), target=Target(None, rate=3.6), reads_weights=True),
    _ragged_transposed(131072, 4096, 1536, skewed(131072, 128, 1.0), Target(None, rate=600), headline=True),
    _ragged_transposed(16384, 4096, 4096, FEW_LARGE, Target(None, rate=600)),
    _ragged_mxfp4_weights(256, 2880, 2880, routed(64, 4, 32), target=Target(None, rate=3.0), reads_weights=True),
    _ragged_mxfp4_weights(16384, 2880, 2880, routed(4096, 4, 32), target=Target("ragged_dot", 0.9)),
    _ragged_fp8(32768, 4096, 7168, [8192] * 4, target=Target(None, rate=1000), headline=True),
    _moe(8192, 128, 8, 2048, 768, target=Target("products", 0.8), headline=True),
]
# Without targets, as Blackwell's other products.
CASES += [_blackwell_ragged(16384, 4096, 4096, FEW_LARGE), _blackwell_ragged(65536, 1536, 2048, MANY)]


# The first in 0.25 ms.
CASES += [
    _ssd(4, 8192, 32, 32, 64, 128, Target(None, rate=3.22), headline=True),
    _ssd(1, 65536, 32, 32, 64, 128, Target("fla", 1 / 0.45)),
    _ssd(4, 8192, 80, 1, 64, 128),
    _ssd(4, 8192, 32, 32, 64, 128, Target("fla", 1 / 0.6), gradients=True),
    # 0.45, 0.90 and 0.35 ms.
    _delta_rule(1, 8192, 16, 64, Target(None, rate=0.755), headline=True),
    _delta_rule(4, 8192, 16, 64, Target(None, rate=1.51)),
    _delta_rule(1, 32768, 2, 8, Target(None, rate=0.485)),
    _delta_rule(1, 8192, 16, 64, Target("fla", 1 / 0.6), gradients=True),
    _kda(8, 2048, 16, 16, Target(None, rate=0.72)),  # 0.56 ms; jax-linear-attention takes 0.619.
    _kda(8, 2048, 16, 16, gradients=True),
    # 0.9 of the rate of a stream.
    _conv(8, 4096, 4096, 4, target=Target("xla", rate=3.94)),
    _conv(8, 4096, 4096, 4, gradients=True, target=Target("xla")),
    _conv(4, 2048, 4352, 4),  # A layer of Mamba-2 of 2048 channels.
    _conv_step(256, 8192, 4, target=Target("xla")),
    # 0.85 of the rate of a stream.
    _ssd_step(256, 32, 1, 64, 128, target=Target(None, rate=3.73)),
    _delta_rule_step(256, 16, 64, target=Target(None, rate=3.73)),
    _kda_step(256, 16, 64, target=Target(None, rate=3.7)),
]


def runnable(case: Case) -> bool:
    """Whether this machine's GPU has the tensor cores of the case's kernel; without a GPU nothing is run."""
    return case.gpu is None or has_tensor_cores(case.gpu)


def has_tensor_cores(gpu: str) -> bool:
    """Whether this machine's GPU has those of `gpu`, or there is none."""
    if not lab.on_gpu():
        return True
    return _host.ARCHITECTURES.get(int(float(jax.devices()[0].compute_capability)), ("",))[-1] == gpu


def mean_ratio(op: str, peer: str = "cublas", gpu: str = "h200") -> float:
    """Geometric mean, over the problems of `op`, of its rate over the peer's, as recorded; NaN if one is not."""
    cases = [case for case in CASES if case.op == case.impl == op]
    rows = [lab.results.rows(op, gpu).get(case.problem, {}) for case in cases]
    logs = [math.log(row[peer]["ms"] / row[op]["ms"]) if {op, peer} <= row.keys() else math.nan for row in rows]
    return math.exp(sum(logs) / len(logs))


def relative_error(out, exact) -> float:
    """Frobenius distance over the norm of `exact`, the largest of those of several results. NaN and infinities that
    agree count as zero, others as infinity."""
    if isinstance(exact, tuple | list):
        return max(relative_error(*pair) for pair in zip(out, exact, strict=True))
    difference, norm = map(float, _norms(jnp.asarray(out), jnp.asarray(exact)))
    error = difference / (norm or 1.0)
    return math.inf if math.isnan(error) else error


@jax.jit
def _norms(out, exact):
    """The norms of the difference and of `exact`: one program, so that no float32 copies of large arrays are made."""
    out, exact = out.astype(jnp.float32), exact.astype(jnp.float32)
    same = (out == exact) | (jnp.isnan(out) & jnp.isnan(exact))
    difference = jnp.where(same, 0.0, out - exact)
    return jnp.linalg.norm(difference.ravel()), jnp.linalg.norm(jnp.where(jnp.isfinite(exact), exact, 0.0).ravel())
