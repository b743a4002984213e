"""The launches of a program, read from the text in which XLA has scheduled it."""

import jax
import jax.numpy as jnp
import pytest

import lab
from lab import launching
from lab.launching import Launch, _of

TEXT = """HloModule jit_f, is_scheduled=true

%fused_computation (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  ROOT %neg.1 = f32[8]{0} negate(%p0), metadata={op_name="jit(f)/neg"}
}

%dynamic-slice-fusion (p0.1: f32[16]) -> f32[8] {
  %p0.1 = f32[16]{0} parameter(0)
  %slice.1 = f32[8]{0} slice(%p0.1), slice={[8:16]}
  ROOT %call.1 = f32[8]{0} custom-call(%slice.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jit(_call)/rms_norm_row/mpmd_map"}
}

ENTRY %main.3 (x.1: f32[16]) -> (f32[8], f32[8]) {
  %x.1 = f32[16]{0} parameter(0)
  %constant.1 = s32[1]{0} constant({8})
  %dynamic_slice_fusion.7 = f32[8]{0} fusion(%x.1), kind=kCustom, calls=%dynamic-slice-fusion
  %call.2 = (f32[8]{0}, f32[8]{0}) custom-call(%dynamic_slice_fusion.7), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/roles_kernel/mpmd_map"}
  %get-tuple-element.1 = f32[8]{0} get-tuple-element(%call.2), index=0
  %loop_negate_fusion.2 = f32[8]{0} fusion(%get-tuple-element.1), kind=kLoop, calls=%fused_computation
  %copy.4 = f32[8]{0} copy(%loop_negate_fusion.2)
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%copy.4, %loop_negate_fusion.2)
}
"""  # noqa: E501


def test_kernels_are_told_from_xlas_and_names_launch_nothing():
    assert _of(TEXT) == [
        Launch("rms_norm_row", True), Launch("roles_kernel", True), Launch("loop_negate_fusion", False),
        Launch("copy", False),
    ]  # fmt: skip


def test_another_gpu_than_the_process_compiles_for_is_refused():
    other = "h200" if lab.on_gpu("b200") else "b200"
    with pytest.raises(ValueError, match=f"gpu = '{other}' has compute capability .* lab.compile_for"):
        lab.launches(other, jnp.add, jnp.ones(8), jnp.ones(8))


def test_a_jitted_function_is_compiled_for_its_next_call_too(monkeypatch):
    monkeypatch.setattr(launching.interpreter, "on_gpu", lambda gpu: True)
    traced = []
    negated = jax.jit(lambda x: traced.append(x) or -x)
    assert lab.launches("h200", negated, jax.ShapeDtypeStruct((8,), jnp.float32))
    negated(jnp.ones(8))
    assert len(traced) == 1
