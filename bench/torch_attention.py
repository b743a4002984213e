"""FlashAttention-3 and FlashInfer, in PyTorch, on the problems of packed and of paged sequences.

FlashAttention-3 is what vLLM ships, its own package, or `fa3-fwd`, which has no pages: the first of them that is there.
FlashInfer compiles its kernels with nvcc when they are first called. Both work on the very operands of our kernel,
which PyTorch reads where JAX has put them, and their results are compared with the same reference. A library may have
several ways to compute a problem: the fastest counts, and the record says which.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers import ERROR_MAX, torch_milliseconds
from bench.problems import Case, relative_error

OPS = ("varlen_attention", "ragged_paged_attention", "paged_attention")
NUM_SPLITS = (0, 8, 32)  # Into how many parts FlashAttention-3 cuts keys for decode; with 0 it chooses.
WORKSPACE = 2**28  # Bytes, for FlashInfer's partial results.
FA3 = ("vllm.vllm_flash_attn.flash_attn_interface", "flash_attn_interface", "fa3_fwd_interface")


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a problem, in the order of our kernel, and what of them the host has to know."""

    op: str
    arrays: tuple  # q, k, v; of pages also the block tables and lengths; of several queries also where these begin.
    lens: np.ndarray  # Keys of each sequence. All but decode have as many queries.
    tables: np.ndarray | None  # The block tables.

    @classmethod
    def of(cls, case: Case, convert: Callable):
        """`convert` makes a tensor of a JAX array."""
        tables, lens = case.integers[:2] if len(case.integers) > 1 else (None, np.diff(case.integers[0]))
        return cls(case.op, tuple(map(convert, case.inputs()[: len(case.avals)])), lens, tables)

    @property
    def longest(self) -> int:
        return int(self.lens.max())


def page_lists(tables: np.ndarray, lens: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block tables as FlashInfer has them: (indptr, indices, last_page_len). The pages of sequence i are `indices[
    indptr[i]:indptr[i + 1]]`, and the last of them has `last_page_len[i]` tokens."""
    pages = -(-lens // page_size)
    indices = np.concatenate([table[:n] for table, n in zip(tables, pages, strict=True)])
    arrays = np.cumsum([0, *pages]), indices, lens - (pages - 1) * page_size
    return tuple(x.astype(np.int32) for x in arrays)


def fa3(torch, case: Case):
    """(versions, call, its error) of FlashAttention-3."""
    module = _first_of(FA3)
    given = Operands.of(case, torch.from_dlpack)
    calls = (_of_vllm if module.__name__ == FA3[0] else _of_flash_attn)(
        module, given, functools.partial(_on_gpu, torch)
    )
    return _fastest(torch, case, calls, fa3=module.__name__.split(".")[0])


def flashinfer(torch, case: Case):
    """(versions, call, its error) of FlashInfer."""
    module = importlib.import_module("flashinfer")
    given, workspace = Operands.of(case, torch.from_dlpack), torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    calls = _of_flashinfer(module, given, workspace, torch.bfloat16, functools.partial(_on_gpu, torch))
    return _fastest(torch, case, calls, flashinfer=module.__version__)


def _on_gpu(torch, x: np.ndarray):
    return torch.tensor(x, device="cuda")


def _first_of(names):
    """The first of these modules that can be imported, and that has FlashAttention-3.

    Raises:
      ImportError: none of them can; the message gives each one's reason.
    """
    reasons = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # It, or a library that it needs, is missing or of another version.
            reasons.append(f"{name}: {error}")
            continue
        if getattr(module, "FA3_AVAILABLE", True):
            return module
        reasons.append(f"{name}: {module.FA3_UNAVAILABLE_REASON}")
    raise ImportError("; ".join(reasons))


def _of_vllm(fa, given: Operands, on_gpu: Callable) -> dict[str, Callable]:
    (q, k, v, *rest), most = given.arrays, given.longest
    attend = functools.partial(fa.flash_attn_varlen_func, q, k, v, causal=True, fa_version=3)
    if given.op == "varlen_attention":
        return {"": lambda: attend(most, rest[0], most, cu_seqlens_k=rest[0])}
    tables, lens, *starts = rest
    paged = functools.partial(attend, seqused_k=lens, block_table=tables)
    if given.op == "ragged_paged_attention":
        return {"": lambda: paged(most, starts[0], most)}
    starts = on_gpu(np.arange(len(given.lens) + 1, dtype=np.int32))
    chosen = fa.get_scheduler_metadata(
        len(given.lens), 1, most, q.shape[1], k.shape[2], q.shape[2], lens, q.dtype, cu_seqlens_q=starts,
        page_size=k.shape[1], causal=True, num_splits=0,
    )  # fmt: skip
    how = {n: dict(num_splits=n) | (dict(scheduler_metadata=chosen) if n == 0 else {}) for n in NUM_SPLITS}
    return {f"num_splits={n}": functools.partial(paged, 1, starts, most, **how[n]) for n in NUM_SPLITS}


def _of_flash_attn(fa, given: Operands, on_gpu: Callable) -> dict[str, Callable]:
    (q, k, v, *rest), most = given.arrays, given.longest
    if given.op == "varlen_attention":
        return {"": lambda: fa.flash_attn_varlen_func(q, k, v, rest[0], rest[0], most, most, causal=True)}
    tables, lens, *starts = rest
    paged = functools.partial(fa.flash_attn_with_kvcache, cache_seqlens=lens, page_table=tables, causal=True)
    if given.op == "ragged_paged_attention":
        return {"": lambda: paged(q, k, v, cu_seqlens_q=starts[0], max_seqlen_q=most)}
    one = lambda n: lambda: paged(q[:, None], k, v, num_splits=n)[:, 0]
    return {f"num_splits={n}": one(n) for n in NUM_SPLITS}


def _of_flashinfer(fi, given: Operands, workspace, dtype, on_gpu: Callable) -> dict[str, Callable]:
    q, k, v, *rest = given.arrays
    sizes = q.shape[1], k.shape[-2], q.shape[2]
    dtypes = dict(q_data_type=dtype, kv_data_type=dtype)
    if given.op == "varlen_attention":
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(rest[0], rest[0], *sizes, causal=True, **dtypes)
        return {"": lambda: wrapper.run(q, k, v)}
    pages = [on_gpu(x) for x in page_lists(given.tables, given.lens, k.shape[1])]
    if given.op == "ragged_paged_attention":
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(rest[2], *pages, *sizes, k.shape[1], causal=True, **dtypes)
        return {"": lambda: wrapper.run(q, (k, v))}

    def decode(on_tensor_cores: bool):
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=on_tensor_cores)
        wrapper.plan(*pages, *sizes, k.shape[1], **dtypes)
        return lambda: wrapper.run(q, (k, v))

    return {"use_tensor_cores": decode(True)}  # FlashInfer's own advice where query heads share keys, as here.


def _fastest(torch, case: Case, calls: dict[str, Callable], **versions):
    """(versions, call, its error) of the fastest call whose result is right; if none is, of the first."""
    exact = jax.jit(case.reference)(*case.inputs())
    found = []
    for label, call in calls.items():
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        torch.cuda.synchronize()
        error = relative_error(jnp.from_dlpack(out.contiguous()), exact)
        ms = np.median(torch_milliseconds(torch, call, 5)) if error < ERROR_MAX else np.inf
        found.append((ms, label, call, error))
    ms, label, call, error = min(found, key=lambda one: one[0])
    return versions | dict(torch=torch.__version__) | (dict(choice=label) if label else {}), call, error
