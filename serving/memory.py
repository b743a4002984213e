"""The memory that an engine will keep on its device, before there is one."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax

from serving.config import LlamaConfig
from serving.model import empty_pages
from serving.pages import PageAllocator
from serving.scheduler import Scheduler
from serving.weights import prepared


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device, besides what a step needs while it runs; and what the cache holds."""

    weights: int
    cache: int
    pages_per_sequence: int  # A sequence of `max_seq_len` tokens never holds more.
    num_sequences: int  # So many sequences of that length have pages at the same time.

    @property
    def total(self) -> int:
        return self.weights + self.cache


def memory(
    config: LlamaConfig, params: Mapping | None = None, *, num_pages: int, max_seq_len: int, page_size: int = 16,
    max_seqs: int = 64, max_tokens_per_step: int = 512, weights: str | None = None, kv_cache_dtype: str | None = None,
) -> Memory:  # fmt: skip
    """The memory of an `Engine` with these arguments, of which nothing is allocated.

    Parameters that are joined in the engine are in memory twice as long as the caller keeps those of `load`.

    Args:
      params: those of `load`, whose packed ones are counted as they are; or shapes of parameters, such as
        `jax.eval_shape(functools.partial(init, config, packing="mxfp4"))`. None for floats of the config's dtype.

    Raises:
      ValueError: a size is out of range.
    """
    scheduler = Scheduler(
        PageAllocator(num_pages, page_size), max_seqs=max_seqs, max_tokens_per_step=max_tokens_per_step,
        window=config.window,
    )  # fmt: skip
    if params is None:
        params = {name: jax.ShapeDtypeStruct(shape, config.dtype) for name, shape in config.shapes.items()}
    nbytes = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    shapes_of = lambda fn, *args: nbytes(jax.eval_shape(fn, *args))
    each = scheduler.pages_of(max_seq_len)
    return Memory(
        weights=shapes_of(functools.partial(prepared, config, kind=weights), params),
        cache=shapes_of(functools.partial(empty_pages, config, num_pages, page_size, kv_cache_dtype)),
        pages_per_sequence=each,
        num_sequences=min(max_seqs, num_pages // each),
    )
