"""Packed weights of a checkpoint, as floats.

`widened` is the one place where a checkpoint's packed weights become arrays of floats. They are exact: an e2m1 times a
power of two is a bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # Of the codes 0 to 7; 8 to 15 are the same, negative.
IGNORED = {"modules_to_not_convert", "dequantize"}


@dataclasses.dataclass(frozen=True)
class Packing:
    """The `quantization_config` of a `config.json`."""

    method: str

    @classmethod
    def of(cls, raw: dict) -> "Packing | None":
        """That of the contents of a `config.json`; None if its weights are floats.

        Raises:
          ValueError: it is not supported.
        """
        given = raw.get("quantization_config")
        if given is None:
            return None
        method, model_type = given.get("quant_method"), raw.get("model_type")
        if method != "mxfp4" or model_type != "gpt_oss":
            raise ValueError(
                f"config.json: quantization_config has quant_method = {method!r}, not supported for {model_type}; must "
                "be 'mxfp4' for gpt_oss"
            )
        if unknown := sorted(given.keys() - IGNORED - {"quant_method"}):
            raise ValueError(
                f"config.json: quantization_config has {unknown[0]} = {given[unknown[0]]!r}, a key that is not known "
                f"for {method}"
            )
        return cls(method)


def widened(packing: Packing, tensors: dict, dtype) -> dict:
    """The tensors with packed weights replaced by floats of `dtype`, under the names that these have elsewhere. Takes
    what it replaces out of `tensors`, so that not all are in memory twice.

    Raises:
      ValueError: a tensor of a packed weight is missing, or of another shape or dtype.
    """
    found = {}
    for name in sorted(tensors):
        if name.endswith("_blocks"):
            blocks, scales = tensors.pop(name), tensors.pop(name.removesuffix("_blocks") + "_scales", None)
            if scales is None or blocks.ndim != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
                raise ValueError(
                    f"load: {name} is {blocks.shape} and its scales {getattr(scales, 'shape', 'are missing')}; must be "
                    "(experts, outputs, inputs / 32, 16) and (experts, outputs, inputs / 32)"
                )
            if not blocks.dtype == scales.dtype == jnp.uint8:
                raise ValueError(f"load: {name} is {blocks.dtype} and its scales {scales.dtype}; must both be uint8")
            found[name.removesuffix("_blocks")] = of_mxfp4(blocks, scales, dtype)
    return found | {name: value.astype(dtype) for name, value in tensors.items()}


@functools.partial(jax.jit, static_argnames=("dtype",))
def of_mxfp4(blocks, scales, dtype):
    """(E, K, N) weights of (E, N, K / 32, 16) bytes, the first of two values in the lower bits, and (E, N, K / 32)
    exponents, of which 127 stands for 1."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
    table = jnp.asarray(np.concatenate([E2M1, -E2M1]))
    values = jnp.ldexp(table[codes], scales.astype(jnp.int32)[..., None] - 127)
    return values.reshape(*blocks.shape[:2], -1).astype(dtype).mT
