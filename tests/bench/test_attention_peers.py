"""The peers of packed and paged attention, as far as no GPU is needed: what JAX lowers for cuDNN, what FlashAttention-3
and FlashInfer are called with, and what becomes of a peer that fails or is wrong.

In the place of the two PyTorch libraries stand functions that take their arguments and compute with the reference.
"""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bench.__main__ as bench
import cookbook
import lab
from bench import cudnn_peers, peers, problems, torch_attention, torch_peers
from tests.lowering import lowered

CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
WITH_CUDNN = [case for case in problems.CASES if case.op in torch_attention.OPS and "cudnn" in case.peers]
SMALL = {
    "varlen_attention": problems._prefill("small", [5, 19, 1]),
    "ragged_paged_attention": problems._prefill("small", [5, 19, 1], page_size=16),
    "paged_attention": problems._decode("small", [20, 7, 33], 16),
}
each_op = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)


# cuDNN ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks the GPU and its cuDNN what they can do, before it lowers."""
    module = sys.modules.get(CUDNN) or cudnn_peers._cudnn()
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(module, "check_compute_capability", lambda _: True)


def test_the_attention_problems_of_16_bits_have_cudnn_as_a_peer():
    assert {case.op for case in WITH_CUDNN} == {*torch_attention.OPS}
    of_16_bits = [case for case in problems.CASES if case.op in torch_attention.OPS and case.dtype == jnp.bfloat16]
    assert WITH_CUDNN == of_16_bits == [case for case in torch_peers.cases() if case.op in torch_attention.OPS]


@pytest.mark.parametrize("case", WITH_CUDNN, ids=lambda case: case.problem)
def test_it_lowers_to_one_call_of_cudnn_with_the_result_of_the_reference(case, cudnn):
    inputs = jax.eval_shape(case.inputs)
    text = lowered(case.peers["cudnn"], *inputs).as_text()
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == 1
    assert ("is_paged_attention\\22: true" in text) == ("paged" in case.op)
    out = jax.eval_shape(lambda *args: case.undo.get("cudnn", lambda x: x)(case.peers["cudnn"](*args)), *inputs)
    assert out.shape == case.shapes[0] and out.dtype == jnp.bfloat16


@pytest.mark.parametrize("moved", ["the module", "a function"])
def test_a_jax_that_has_moved_it_says_so(moved, cudnn, monkeypatch):
    case = SMALL["paged_attention"]
    if moved == "the module":
        monkeypatch.setitem(sys.modules, CUDNN, None)
        monkeypatch.delattr("jax._src.cudnn.fused_attention_stablehlo")
    else:
        monkeypatch.delattr(f"{CUDNN}.paged_attention")
    why = bench._why_not(case, "cudnn", case.peers["cudnn"], case.inputs(), None)
    assert why.startswith(f"ImportError: JAX {jax.__version__}") and "of cuDNN" in why


def test_rows_are_padded_and_taken_back():
    starts = np.array([0, 3, 3, 8])
    rows = cudnn_peers.padded_rows(starts)
    assert rows.shape == (3, 5) and rows.max() < 8
    np.testing.assert_array_equal(rows[cudnn_peers.places(starts)], np.arange(8))


def test_pages_are_as_many_as_places_in_the_tables():
    case = SMALL["paged_attention"]
    *_, padded = case.inputs()
    assert all(len(x) == case.integers[0].size and not x[case.shapes[1][0] :].any() for x in padded)


# The runner, and peers that fail -------------------------------------------------------------------------------------


def test_a_peer_that_is_wrong_is_left_out_and_a_kernel_that_fails_is_not_hidden():
    case = SMALL["varlen_attention"]
    inputs = case.inputs()
    exact = case.reference(*inputs)
    assert bench._why_not(case, "fa3", lambda *_: exact.astype(jnp.bfloat16), inputs, exact) is None
    assert bench._why_not(case, "fa3", lambda *_: 1.1 * exact, inputs, exact) == "wrong by 0.1, and so not timed"
    with pytest.raises(ZeroDivisionError):
        bench._why_not(case, "cookbook", lambda *_: 1 / 0, inputs, exact)
    assert bench._why_not(case, "cudnn", lambda *_: 1 / 0, inputs, exact).startswith("ZeroDivisionError")


def test_what_is_left_out_is_recorded_until_it_is_there_again(results_folder, monkeypatch):
    monkeypatch.setattr(lab.results, "measuring", lambda *_: True)
    monkeypatch.setattr(lab.results, "recording", lambda: True)
    monkeypatch.setattr(lab.results, "this_gpu", lambda: "h200")
    name = "paged_attention/small/bf16/left_out/jax"
    assert peers.note_left_out(name, {}) == {} and not lab.results.path("paged_attention", "h200").exists()
    assert peers.note_left_out(name, {"cudnn": "wrong"}) == lab.results.stored(name) == {"cudnn": "wrong"}
    assert peers.note_left_out(name, {}) == lab.results.stored(name) == {}


def test_torch_peers_go_on_after_one_that_is_missing_or_wrong(monkeypatch, capsys):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    process = types.SimpleNamespace(start=lambda: None, join=lambda: None)
    context = types.SimpleNamespace(Process=lambda **_: process)
    monkeypatch.setattr(torch_peers.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(torch_attention, "fa3", lambda torch, case: ({}, None, 0.3))
    noted = {}
    monkeypatch.setattr(torch_peers, "note_left_out", noted.__setitem__)
    assert torch_peers.main("varlen_attention") == 0
    assert noted.keys() == {f"{case.problem}/left_out/torch" for case in torch_peers.cases("varlen_attention")}
    for found in noted.values():
        assert found["fa3"] == "wrong by 0.3, and so not timed"
        assert found["flashinfer"].startswith("ModuleNotFoundError: No module named 'flashinfer'")
    assert "fa3: left out: wrong by 0.3" in capsys.readouterr().out


# PyTorch's libraries --------------------------------------------------------------------------------------------------


def packed(q, k, v, cu_q, cu_kv, causal):
    assert causal
    return cookbook_reference("varlen_attention")(q, k, v, cu_q, cu_kv, is_causal=True)[0].astype(q.dtype)


def paged(q, k, v, tables, lens):
    return cookbook_reference("paged_attention")(q, k, v, tables, lens)[0].astype(q.dtype)


def ragged(q, k, v, tables, lens, starts):
    """Sequences whose queries are all of their tokens."""
    rows = [k[table].reshape(-1, *k.shape[2:])[:n] for table, n in zip(tables, lens, strict=True)]
    values = [v[table].reshape(-1, *v.shape[2:])[:n] for table, n in zip(tables, lens, strict=True)]
    return packed(q, jnp.concatenate(rows), jnp.concatenate(values), starts, starts, causal=True)


def cookbook_reference(op: str):
    return getattr(sys.modules[getattr(cookbook, op).__module__], f"{op}_reference")


def longest(cu) -> int:
    return int(np.diff(cu).max())


class Vllm:
    """As vLLM's interface: a length, then where sequences begin."""

    @staticmethod
    def get_scheduler_metadata(*sizes, cu_seqlens_q, page_size, causal, num_splits):
        batch, queries, _, heads, kv_heads, head_dim, lens, _ = sizes
        assert (batch, queries, heads, kv_heads, head_dim, page_size) == (len(lens), 1, 32, 8, 128, 16) and causal
        return "metadata"

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, max_q, cu_q, max_kv, cu_seqlens_k=None, seqused_k=None, block_table=None, causal=False, fa_version=2,
        num_splits=0, scheduler_metadata=None,
    ):  # fmt: skip
        assert fa_version == 3 and max_q == longest(cu_q)
        if block_table is None:
            assert max_kv == longest(cu_seqlens_k)
            return packed(q, k, v, cu_q, cu_seqlens_k, causal)
        assert max_kv == int(seqused_k.max()) and causal
        if max_q > 1:
            return ragged(q, k, v, block_table, seqused_k, cu_q)
        assert (scheduler_metadata == "metadata") == (num_splits == 0)
        return paged(q, k, v, block_table, seqused_k)


class FlashAttn:
    """As FlashAttention-3's own interface."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_kv, max_q, max_kv, causal=False):
        assert max_q == longest(cu_q) and max_kv == longest(cu_kv)
        return packed(q, k, v, cu_q, cu_kv, causal), "lse"

    @staticmethod
    def flash_attn_with_kvcache(
        q, k, v, cache_seqlens, page_table, causal, cu_seqlens_q=None, max_seqlen_q=None, num_splits=0
    ):
        if cu_seqlens_q is not None:
            assert max_seqlen_q == longest(cu_seqlens_q)
            return ragged(q, k, v, page_table, cache_seqlens, cu_seqlens_q)
        return paged(q[:, 0], k, v, page_table, cache_seqlens)[:, None]


class FlashInfer:
    """As FlashInfer: a plan, then a run."""

    def __init__(self, workspace, layout, use_tensor_cores=False):
        assert layout == "NHD"

    class BatchPrefillWithRaggedKVCacheWrapper:
        def plan(self, cu_q, cu_kv, *sizes, causal, q_data_type, kv_data_type):
            assert sizes == (32, 8, 128) and q_data_type == kv_data_type == "bf16"
            self.run = lambda q, k, v: packed(q, k, v, cu_q, cu_kv, causal)

    class BatchPrefillWithPagedKVCacheWrapper:
        def plan(self, cu_q, indptr, indices, last, *sizes, causal, q_data_type, kv_data_type):
            assert sizes == (32, 8, 128, 16) and causal
            self.run = lambda q, pages: ragged(q, *pages, *tables_of(indptr, indices, last, 16), cu_q)

    class BatchDecodeWithPagedKVCacheWrapper:
        def plan(self, indptr, indices, last, *sizes, q_data_type, kv_data_type):
            assert sizes == (32, 8, 128, 16)
            self.run = lambda q, pages: paged(q, *pages, *tables_of(indptr, indices, last, 16))


for wrapper in vars(FlashInfer).values():
    if isinstance(wrapper, type):
        wrapper.__init__ = FlashInfer.__init__


def tables_of(indptr, indices, last, page_size: int):
    """(block tables, lengths)."""
    counts = np.diff(indptr)
    tables = np.zeros((len(counts), counts.max()), np.int32)
    for table, start, n in zip(tables, indptr, counts, strict=False):
        table[:n] = indices[start : start + n]
    return jnp.asarray(tables), jnp.asarray((counts - 1) * page_size + last, jnp.int32)


MAKERS = {
    "vllm": functools.partial(torch_attention._of_vllm, Vllm),
    "flash_attn": functools.partial(torch_attention._of_flash_attn, FlashAttn),
    "flashinfer": lambda given, on_gpu: torch_attention._of_flashinfer(FlashInfer, given, None, "bf16", on_gpu),
}


@each_op
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_they_are_called_with_the_problem(case, make):
    calls = make(torch_attention.Operands.of(case, lambda x: x), np.asarray)
    exact = case.reference(*case.inputs())
    assert len(calls) == (3 if "num_splits=0" in calls else 1)
    for call in calls.values():
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        assert problems.relative_error(out, exact) < 1e-2


def test_the_fastest_way_that_is_right_counts(monkeypatch):
    """One way is wrong, one slow."""
    case = SMALL["paged_attention"]
    right = paged(*case.inputs()[:5])
    tensor = lambda x: types.SimpleNamespace(contiguous=lambda: x)
    calls = {"wrong": lambda: tensor(2 * right), "slow": lambda: tensor(right), "fast": lambda: (tensor(right), "lse")}
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=lambda: None), __version__="2.11")
    ms = {calls["slow"]: 3.0, calls["fast"]: 2.0}
    monkeypatch.setattr(torch_attention, "torch_milliseconds", lambda torch, call, _: [ms[call]])
    versions, call, error = torch_attention._fastest(torch, case, calls, fa3="vllm")
    assert call is calls["fast"] and error < 1e-2
    assert versions == dict(fa3="vllm", torch="2.11", choice="fast")
    *_, error = torch_attention._fastest(torch, case, dict(wrong=calls["wrong"]))
    assert error > 0.9


def test_which_flash_attention_3_is_there(monkeypatch):
    with pytest.raises(ImportError, match="vllm.*; flash_attn_interface: .*; fa3_fwd_interface: "):
        torch_attention._first_of(torch_attention.FA3)
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", types.SimpleNamespace(FA3_AVAILABLE=False, FA3_UNAVAILABLE_REASON="old")
    )
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", FlashAttn)
    assert torch_attention._first_of(torch_attention.FA3) is FlashAttn


def test_operands_that_peers_alone_take_change_no_program_of_ours():
    case = next(case for case in WITH_CUDNN if case.op == "ragged_paged_attention")
    fn, args = case.program("varlen_attention")
    q, starts, (k, v) = args[0], args[5], args[6]["packed"]
    plain = lambda q, starts, k, v: cookbook.varlen_attention(q, k, v, starts, starts, is_causal=True)
    assert lab.program.digest(fn, *args) == lab.program.digest(plain, q, starts, k, v)
