"""cuDNN's attention of packed sequences and of pages, as JAX calls it.

`jax.nn.dot_product_attention` takes neither offsets nor block tables, so these come from a module of JAX without a
public name, which may move: what is not there says so, and the benchmark leaves the peer out.
"""

import jax.numpy as jnp
import numpy as np


def _cudnn(*names: str):
    """JAX's module.

    Raises:
      ImportError: this JAX has no such module, or nothing of these names in it.
    """
    import jax

    try:
        from jax._src.cudnn import fused_attention_stablehlo as module
    except ImportError as error:
        raise ImportError(f"JAX {jax.__version__} has no such call of cuDNN: {error}") from error
    if missing := [name for name in names if not hasattr(module, name)]:
        raise ImportError(f"JAX {jax.__version__} calls no {', '.join(missing)} of cuDNN")
    return module


def packed(q, k, v, cu_seqlens):
    """Causal attention of packed sequences, with as many queries as keys: (T, N, H)."""
    cudnn = _cudnn("dot_product_attention", "MaskType")
    lens, starts = jnp.diff(cu_seqlens)[None], cu_seqlens[None]
    return cudnn.dot_product_attention(
        q[None], k[None], v[None], q_seqlen=lens, kv_seqlen=lens, q_offsets=starts, kv_offsets=starts,
        scale=q.shape[2] ** -0.5, mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )[0]  # fmt: skip


def decode(q, k_pages, v_pages, block_tables, kv_lens):
    """The attention of one query of each sequence to its pages, of which there are as many as places in the tables."""
    ones = jnp.ones_like(kv_lens)
    return _paged(q[:, None], k_pages, v_pages, block_tables, ones, kv_lens, "PADDING")[:, 0]


def prefill(q, k_pages, v_pages, block_tables, kv_lens):
    """Causal attention of sequences, (num_seqs, longest, N, H), whose queries are all of their tokens."""
    return _paged(q, k_pages, v_pages, block_tables, kv_lens, kv_lens, "PADDING_CAUSAL")


def _paged(q, k_pages, v_pages, block_tables, q_lens, kv_lens, mask: str):
    cudnn, tables = _cudnn("paged_attention", "MaskType"), block_tables[:, None, :, None]
    return cudnn.paged_attention(
        q, k_pages, v_pages, q_lens, kv_lens, tables, tables, scale=q.shape[3] ** -0.5, mask_type=cudnn.MaskType[mask]
    )


def whole_tables(pages, block_tables):
    """`pages`, and zeros after them: JAX's call of cuDNN wants as many as there are places in the tables."""
    return jnp.pad(pages, ((0, block_tables.size - len(pages)), (0, 0), (0, 0), (0, 0)))


def padded_rows(cu_seqlens: np.ndarray) -> np.ndarray:
    """Which row of a packed array stands at each place of (num_seqs, longest): any row after the end of a sequence."""
    lens = np.diff(cu_seqlens)
    return np.minimum(cu_seqlens[:-1, None] + np.arange(lens.max()), cu_seqlens[-1] - 1)


def places(cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, position) of each row of a packed array."""
    lens = np.diff(cu_seqlens)
    seqs = np.repeat(np.arange(len(lens)), lens)
    return seqs, np.arange(len(seqs)) - cu_seqlens[seqs]
