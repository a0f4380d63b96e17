"""The work of compiled programs, beside what the shapes say."""

import math

import jax
import jax.numpy as jnp
import pytest
from support import devices
from support.matrix_flops import matrix_flops


def flops(fun, *shapes, sharding=None, unknown_trips=1):
  args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes]
  program = jax.jit(fun).lower(*args).compile().as_text()
  return matrix_flops(program, unknown_trips)


def convolution(x, kernel, **options):
  numbers = ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)


def multiplications(x, kernel, **options):
  """How many a convolution is of, with padding: for each of its numbers a kernel's."""
  out = jax.eval_shape(lambda: convolution(jnp.ones(x), jnp.ones(kernel), **options))
  return out.size * math.prod(kernel[:-1]) // math.prod(options.get("lhs_dilation", ()))


@pytest.fixture(params=["cpu", "tpu"])
def sharding(request):
  if request.param == "cpu":
    return None
  return jax.sharding.SingleDeviceSharding(devices.tpu_topology().devices[0])


def test_products_are_counted_as_often_as_their_loop_runs(sharding):
  assert flops(jnp.dot, (128, 256), (256, 384), sharding=sharding) == 2 * 128 * 256 * 384
  batched = lambda a, b: jnp.einsum("bij,bjk->bik", a, b)  # noqa: E731
  got = flops(batched, (4, 128, 256), (4, 256, 384), sharding=sharding)
  assert got == 2 * 4 * 128 * 256 * 384

  def loop(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]

  # XLA for TPU prints no trips.
  got = flops(loop, (128, 256), (256, 256), sharding=sharding, unknown_trips=5)
  assert got == 5 * 2 * 128 * 256 * 256


CONVOLUTIONS = {
  "same": {"window_strides": (1, 1), "padding": "SAME"},
  "strided": {"window_strides": (2, 2), "padding": "VALID"},
  "grouped": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4},
  "transposed": {"window_strides": (1, 1), "padding": [(1, 2), (2, 1)], "lhs_dilation": (2, 2)},
  "dilated": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_counted_by_what_their_window_covers(name):
  options = CONVOLUTIONS[name]
  x, kernel = (2, 9, 9, 8), (3, 3, 8 // options.get("feature_group_count", 1), 16)
  got = flops(lambda x, kernel: convolution(x, kernel, **options), x, kernel)
  assert got == 2 * multiplications(x, kernel, **options)


def test_derivatives_of_convolutions_are_as_much_work_each(sharding):
  options = {"window_strides": (2, 2), "padding": "SAME"}
  x, kernel = (8, 16, 16, 32), (3, 3, 32, 64)
  loss = lambda x, kernel: jnp.sum(convolution(x, kernel, **options) ** 2)  # noqa: E731
  once = multiplications(x, kernel, **options)
  assert flops(jax.grad(loss, (0, 1)), x, kernel, sharding=sharding) == 3 * 2 * once


def test_a_program_without_products_does_no_work():
  assert flops(jnp.sin, (8, 8)) == 0
  # XLA writes a product of one row as a sum
  assert flops(jnp.outer, (8,), (8,)) == 0
