"""The work of compiled programs, beside what the shapes say."""

import math

import jax
import jax.numpy as jnp
import pytest
from support import devices

from optax_accum._compiled.matrix_flops import matrix_flops


def flops(fun, *shapes, sharding=None):
  args = [
    jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes
  ]
  return matrix_flops(jax.jit(fun).lower(*args).compile().as_text())


def convolution(x, kernel, **options):
  numbers = ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(
    x, kernel, dimension_numbers=numbers, **options
  )


def multiplications(x, kernel, **options):
  """How many a convolution is of, with padding: for each of its numbers a kernel's."""
  out = jax.eval_shape(
    lambda: convolution(jnp.ones(x), jnp.ones(kernel), **options)
  )
  return (
    out.size
    * math.prod(kernel[:-1])
    // math.prod(options.get("lhs_dilation", ()))
  )


@pytest.fixture(params=["cpu", "tpu"])
def sharding(request):
  if request.param == "cpu":
    return None
  return jax.sharding.SingleDeviceSharding(devices.tpu_topology().devices[0])


def test_products_are_counted_as_often_as_their_loop_runs(sharding):
  assert (
    flops(jnp.dot, (128, 256), (256, 384), sharding=sharding)
    == 2 * 128 * 256 * 384
  )
  batched = lambda a, b: jnp.einsum("bij,bjk->bik", a, b)  # noqa: E731
  got = flops(batched, (4, 128, 256), (4, 256, 384), sharding=sharding)
  assert got == 2 * 4 * 128 * 256 * 384

  def loop(x, w):
    return jax.lax.scan(
      lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5
    )[0]

  assert (
    flops(loop, (128, 256), (256, 256), sharding=sharding)
    == 5 * 2 * 128 * 256 * 256
  )


CONVOLUTIONS = {
  "same": {"window_strides": (1, 1), "padding": "SAME"},
  "strided": {"window_strides": (2, 2), "padding": "VALID"},
  "grouped": {
    "window_strides": (1, 1),
    "padding": "SAME",
    "feature_group_count": 4,
  },
  "transposed": {
    "window_strides": (1, 1),
    "padding": [(1, 2), (2, 1)],
    "lhs_dilation": (2, 2),
  },
  "dilated": {
    "window_strides": (1, 1),
    "padding": "SAME",
    "rhs_dilation": (2, 2),
  },
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_counted_by_what_their_window_covers(name):
  options = CONVOLUTIONS[name]
  x, kernel = (
    (2, 9, 9, 8),
    (3, 3, 8 // options.get("feature_group_count", 1), 16),
  )
  got = flops(lambda x, kernel: convolution(x, kernel, **options), x, kernel)
  assert got == 2 * multiplications(x, kernel, **options)


def test_derivatives_of_convolutions_are_as_much_work_each(sharding):
  options = {"window_strides": (2, 2), "padding": "SAME"}
  x, kernel = (8, 16, 16, 32), (3, 3, 32, 64)
  loss = lambda x, kernel: jnp.sum(convolution(x, kernel, **options) ** 2)  # noqa: E731
  once = multiplications(x, kernel, **options)
  assert (
    flops(jax.grad(loss, (0, 1)), x, kernel, sharding=sharding) == 3 * 2 * once
  )


# As XLA for GPU writes them.
GEMM = """
ENTRY %main {
  %a = f32[128,256]{1,0} parameter(0)
  %b = f32[256,384]{1,0} parameter(1)
  ROOT %c = (f32[128,384]{1,0}, s8[4194304]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{\
"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}
}
"""
CUDNN = """
ENTRY %main {{
  %a = f32[{a}]{{3,2,1,0}} parameter(0)
  %b = f32[{b}]{{3,2,1,0}} parameter(1)
  ROOT %c = (f32[{c}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), \
window={{size=3x3 pad=1_1x1_1}}, dim_labels=bf01_oi01->bf01, \
custom_call_target="__cudnn${kind}"
}}
"""


def test_kernels_of_gpus_are_counted():
  assert matrix_flops(GEMM) == 2 * 128 * 256 * 384
  x, kernel, out = "2,8,9,9", "16,8,3,3", "2,16,9,9"
  forward = matrix_flops(CUDNN.format(a=x, b=kernel, c=out, kind="convForward"))
  assert forward == 2 * multiplications(
    (2, 9, 9, 8), (3, 3, 8, 16), **CONVOLUTIONS["same"]
  )
  assert forward == matrix_flops(
    CUDNN.format(a=out, b=kernel, c=x, kind="convBackwardInput")
  )
  assert forward == matrix_flops(
    CUDNN.format(a=x, b=out, c=kernel, kind="convBackwardFilter")
  )
  assert forward == matrix_flops(
    CUDNN.format(a=x, b=kernel, c=out, kind="convBiasActivationForward")
  )


# As XLA may write the derivative by a kernel in groups: each output feature has 2 of the 8 inputs.
BATCH_GROUPS = """
ENTRY %main {
  %a = f32[8,9,9,5]{3,2,1,0} parameter(0)
  %b = f32[3,3,5,16]{3,2,1,0} parameter(1)
  ROOT %c = f32[2,9,9,16]{3,2,1,0} convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f, batch_group_count=4
}
"""


def test_groups_of_the_batch_are_counted_apart():
  options = {**CONVOLUTIONS["same"], "batch_group_count": 4}
  once = multiplications((8, 9, 9, 5), (3, 3, 5, 16), **options)
  assert matrix_flops(BATCH_GROUPS) == 2 * once


def test_a_program_without_products_does_no_work():
  assert flops(jnp.sin, (8, 8)) == 0
  # XLA writes a product of one row as a sum
  assert flops(jnp.outer, (8,), (8,)) == 0
