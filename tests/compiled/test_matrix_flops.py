"""The work of compiled programs, beside what the shapes say."""

import math

import jax
import jax.numpy as jnp
import pytest
from support import devices
from support.matrix_flops import matrix_flops


def flops(fun, *shapes, sharding=None, trips=()):
  args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes]
  program = jax.jit(fun).lower(*args).compile().as_text()
  return matrix_flops(program, *trips)


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

  def loops(x, w):
    return jax.lax.scan(lambda x, _: (loop(x, w), None), x, None, length=3)[0]

  # XLA for TPU prints no trips.
  for fun, *trips in ((loop, 5), (loops, 3, 5)):
    got = flops(fun, (128, 256), (256, 256), sharding=sharding, trips=trips)
    assert got == math.prod(trips) * 2 * 128 * 256 * 256


def test_a_program_without_products_does_no_work():
  assert flops(jnp.sin, (8, 8)) == 0
  # XLA writes a product of one row as a sum
  assert flops(jnp.outer, (8,), (8,)) == 0
