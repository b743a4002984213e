"""`mlp`: the chain's stages, cuts and rows; values, errors, mutants; its barriers as compiled."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.gemm.chain import kernel
from cookbook.gemm.chain.plan import Cut, Product
from tests.arrays import array

module = importlib.import_module("cookbook.gemm.chain.mlp")
mlp, Config = cookbook.mlp, cookbook.mlp.Config
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
ALL = ("residual", "scale", "w_o", "next_scale", "w_qkv")


def exact(given: dict, eps=1e-6):
    """SwiGLU and its surroundings; shares no code with the package; float64 for float64."""
    p = {name: x.astype(jnp.promote_types(x.dtype, F32)) for name, x in given.items()}
    times = lambda x, w: jnp.einsum("...k,nk->...n", x, w, precision="highest")
    norm = lambda t, scale: t * scale / jnp.sqrt(eps + (t**2).mean(-1, keepdims=True))
    total = (times(p["x"], p["w_o"]) if "w_o" in p else p["x"]) + p.get("residual", 0.0)
    both = times(norm(total, p["scale"]) if "scale" in p else total, p["w_gate_up"])
    gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
    out = times(gate / (1 + jnp.exp(-gate)) * up, p["w_down"])
    if "next_scale" in p:
        total = total + out
        out = norm(total, p["next_scale"])
        out = times(out, p["w_qkv"]) if "w_qkv" in p else out
    return (out, total) if "scale" in p else out


def operands(rows, d, f, more=(), dtype=BF16, a=72, n=128) -> dict:
    """Random normal; means are shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(d * f)
    of = lambda *shape, kind=dtype: array(
        (rng.normal(size=shape) + 0.1) * (shape[-1] ** -0.5 if len(shape) > 1 else 1), kind
    )
    shapes = dict(residual=(*rows, d), scale=(d,), w_o=(d, a), next_scale=(d,), w_qkv=(n, d))
    x = array(rng.normal(size=(*rows, a if "w_o" in more else d)) + 0.1, dtype)
    given = dict(x=x, w_gate_up=of(2 * f, d), w_down=of(d, f))
    return given | {name: of(*shapes[name], kind=dtype if name[0] == "w" else F32) for name in more}


def check(given: dict, **how):
    # Results of several roundings: h and y are rounded to 16 bits, and a norm follows the sums.
    limit = 1e-3 if given["x"].dtype == F16 else 6e-3
    out_dtype = F32 if "w_qkv" in given else None
    fn = lambda given: mlp(**given, out_dtype=out_dtype, **how)
    return lab.check(fn, exact, given, gpu=None, tolerance=limit)


# Tails along K and N, more units than blocks and fewer, narrow tiles in wide slots, one warpgroup and two.
STRUCTURES = {
    "products alone": (((2, 3), 128, 48), (), dict(dtype=F16), {}),
    "a norm": (((70,), 128, 80), ("scale",), {}, dict(config=Config(up=Cut(16), down=Cut(32, 1), num_stages=2))),
    "all": (((5,), 256, 272), ALL, {}, dict(
        config=Config(Cut(16), Cut(48, 3), Cut(64, 1), Cut(24, 2), x_stages=4), activation="silu")),
    "the last layer": (((3,), 128, 64), ALL[:-1], {}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("all", "products alone"))) for x in STRUCTURES]
)
def test_every_structure(name):
    sizes, more, how, options = STRUCTURES[name]
    check(operands(*sizes, more, **how), **options)


MODELS = {  # D, F, A, N.
    "Llama 3.2 1B": (2048, 8192, 2048, 3072), "Llama 3.1 8B": (4096, 14336, 4096, 6144),
    "Qwen2.5 0.5B": (896, 4864, 896, 1152), "Qwen3 4B": (2560, 9728, 4096, 6144), "70B": (8192, 28672, 8192, 10240),
}  # fmt: skip


def plan_of(name: str, rows: int, config=None):
    d, f, a, n = MODELS[name]
    shapes = dict(x=(rows, a), residual=(rows, d), scale=(d,), w_o=(d, a), w_gate_up=(2 * f, d), w_down=(d, f))
    shapes |= dict(next_scale=(d,), w_qkv=(n, d))
    return module.plan_of(shapes, jnp.dtype(BF16), config or Config())


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("name", MODELS)
def test_default_plans(name, rows):
    """Blocks do all of each product, once, and the busiest at most half as much again as the mean: small models have
    too few tiles."""
    plan = plan_of(name, rows)
    assert plan.num_stages >= 4
    for product in plan.products:
        done = np.zeros((product.tiles, product.num_steps), int)
        busiest = 0
        for block in range(plan.num_blocks):
            units = [product.unit(block, i) for i in range(product.num_units(block))]
            for col, _, start, end in units:
                assert start < end
                done[col // product.cut.tile_n, start:end] += 1
            busiest = max(busiest, sum(end - start for *_, start, end in units))
        assert (done == 1).all()
        assert busiest <= 1.5 * done.size / plan.num_blocks + 1


def test_the_default_compiles_without_spills_and_fences_what_blocks_exchange():
    d, f, a, n = MODELS["Llama 3.2 1B"]
    of = jax.ShapeDtypeStruct
    given = dict(
        x=of((128, a), BF16), residual=of((128, d), F32), scale=of((d,), F32), next_scale=of((d,), F32),
        w_o=of((d, a), BF16), w_gate_up=of((2 * f, d), BF16), w_down=of((d, f), BF16), w_qkv=of((n, d), BF16),
    )  # fmt: skip
    compiled = lab.compile_for("h200", lambda given: mlp(**given), given)
    assert compiled.spill_bytes == 0 and len(compiled.kernels) == 1
    barriers, ptx = 6, compiled.ptx
    assert ptx.count("red.release.gpu.global.add") == barriers
    assert ptx.count("ld.relaxed.gpu.global") == ptx.count("fence.acquire.gpu") == barriers
    assert ptx.count("fence.proxy.async;") == 2 * barriers  # Before each arrival, after each wait.
    assert ptx.count("st.relaxed.gpu.global") == barriers and ptx.count("atom.acq_rel.gpu.global.inc") == 1


def test_empty():
    given = operands((0,), 128, 16, ("scale",))
    out, total = mlp(**given)
    assert out.shape == total.shape == (0, 128)


ERRORS = [
    (dict(x=jnp.ones((129, 128), BF16)), {}, "129 rows; must be at most 128"),
    (dict(w_down=jnp.ones((128, 24), BF16)), {}, r"w_down.shape=\(128, 24\); must be \(D, F\), D a multiple of 128"),
    (dict(w_gate_up=jnp.ones((64, 128), BF16)), {}, r"w_gate_up.shape=\(64, 128\); must be \(32, 128\)"),
    (dict(w_gate_up=jnp.ones((32, 128), F16)), {}, "must both be bfloat16 or both float16"),
    (dict(x=jnp.ones((3, 128), F32)), {}, "x.dtype=float32"),
    (dict(residual=jnp.ones((3, 128), F32)), {}, "residual is given without scale: pass both"),
    (dict(scale=jnp.ones(64, F32)), {}, r"scale.shape=\(64,\); must be \(128,\)"),
    ({}, dict(eps=-1.0), "eps=-1.0; must be 0 or more"),
    ({}, dict(config=Config(up=Cut(64))), "up=.* must cut 16 columns evenly"),
]


@pytest.mark.parametrize("changes, how, message", ERRORS, ids=range(len(ERRORS)))
def test_errors_name_the_rule(changes, how, message):
    given = operands((3,), 128, 16) | changes
    with pytest.raises(ValueError, match=message), lab.interpret():
        jax.eval_shape(lambda given: mlp(**given, **how), given)


@pytest.mark.parametrize("how", [dict(tile_n=12), dict(tile_n=136), dict(tile_n=64, parts=17)])
def test_cuts_that_there_are_not(how):
    with pytest.raises(ValueError, match="must be"):
        Cut(**how)


@pytest.mark.parametrize("mutated", ["a part", "the gate twice", "no wait", None])
def test_mutants_are_caught(run_only, monkeypatch, mutant, found_if, mutated):
    if mutated == "a part":
        mutant(kernel, "functools", reduce=lambda fn, parts: parts[0])
    elif mutated == "the gate twice":
        right = Product.places
        twice = lambda p, col, step: [right(p, col, step)[0]] * 2 if p.is_gated else right(p, col, step)
        monkeypatch.setattr(Product, "places", twice)
    elif mutated:
        monkeypatch.setattr(kernel.GridBarriers, "wait", lambda *_: None)
    jax.clear_caches()
    with found_if(mutated is not None):
        check(operands((3,), 128, 256), config=Config(down=Cut(64, 2)))
    jax.clear_caches()


def test_right_in_every_run_on_the_gpu(gpu):
    """Counters are left at zero, so that calls follow each other."""
    given, counters = operands((33,), 2048, 8192, ALL, a=2048, n=3072), module.new_counters()
    run, wanted, first = jax.jit(lambda given, counters: mlp(**given, counters=counters)), jax.jit(exact)(given), None
    for _ in range(30):
        *outs, counters = run(given, counters)
        first = first or outs
        assert not counters.any() and all((a == b).all() for a, b in zip(outs, first, strict=True))
    for out, right in zip(first, wanted, strict=True):
        assert float(jnp.linalg.norm(out.astype(F32) - right) / jnp.linalg.norm(right)) < 8e-3
