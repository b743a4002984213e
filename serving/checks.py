"""Sizes that an engine refuses before it takes a request, because its kernels would refuse them at every step."""

import contextlib
import functools

import jax
import numpy as np

from cookbook import _host
from serving.backends import TABLE_WIDTHS_MIN
from serving.config import LlamaConfig
from serving.model import empty_pages
from serving.step import bucket, joined, model_step, padding
from serving.weights import prepared


def require_supported(
    config: LlamaConfig, params, *, backend: str, weights: str | None, kv_cache_dtype: str | None, num_pages: int,
    page_size: int, max_seqs: int, max_tokens_per_step: int, max_pages: int,
) -> None:  # fmt: skip
    """Traces the steps of an engine with these arguments, a narrow one that decodes and the largest one. So the ops
    themselves say what they refuse: nothing is computed.

    Args:
      max_pages: of the longest sequence.

    Raises:
      ValueError: an op refuses the sizes or dtypes of a step, or slots of the cache have numbers beyond int32.
    """
    if (slots := config.page_layers * num_pages * page_size) >= 2**31:
        raise ValueError(
            f"serving.Engine: {num_pages=}; with {page_size=} and {config.page_layers} layers the cache "
            f"has {slots} slots and must have fewer than 2**31: take fewer pages"
        )
    if backend == "xla":  # It takes all sizes.
        return
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), dict(params))
    shapes = jax.eval_shape(functools.partial(prepared, config, kind=weights), shapes)
    pages = jax.eval_shape(functools.partial(empty_pages, config, num_pages, page_size, kv_cache_dtype))
    previous = jax.ShapeDtypeStruct((max_seqs,), np.int32)
    narrowest = TABLE_WIDTHS_MIN[backend]
    for num_tokens, width, decode in (
        (max_seqs, narrowest, True), (bucket(max_tokens_per_step, max_seqs), bucket(max_pages, narrowest), False),
    ):  # fmt: skip
        packed, form = joined(padding(num_tokens, width, max_seqs, windows=bool(config.window_layers)))
        step = functools.partial(model_step, config, **form, backend=backend, decode=decode, draws=None)
        try:
            with _some_gpu():
                jax.eval_shape(step, shapes, pages, packed, previous)
        except ValueError as error:
            raise ValueError(
                f"serving.Engine: {config=}, {page_size=}, {weights=}, {kv_cache_dtype=}; a step is refused "
                f'({error}): change what does not fit, or take backend="xla"'
            ) from error


def _some_gpu():
    """Where kernels cannot run, as outside of `lab.interpret()` on a CPU, they are traced for an H200."""
    try:
        _host.require_target("serving.Engine")
    except RuntimeError:
        if jax.default_backend() != "gpu":
            return _host.building_for(_host.Target("an H200", 132))
    return contextlib.nullcontext()
