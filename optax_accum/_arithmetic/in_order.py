"""Sums and other combinations in one order, whatever number of devices runs them: a binary tree.

Virtual devices are combined in pairs, the results in pairs, and so on. A device that stands for
several combines its own by `fold`, and `sum_over` and `fold_over` go on where it ends.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum._arithmetic import across_devices, dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.conditional import update_if

Both = Callable[[Any, Any], Any]


def true_of(tree) -> jax.Array:
  """True, computed from an array that is not empty, so that no compiler knows it."""
  array = max(jax.tree.leaves(tree), key=jnp.size)
  if dtypes.is_key(array):
    array = jax.random.key_data(array)
  some = jnp.ravel(array)[:1].real.astype(jnp.float32)
  known = lax.bitcast_convert_type(some, jnp.int32) | 1 != 0
  return known.all()


def apart(fun: Callable[..., Any], *args):
  """``fun(*args)``, compiled by itself: XLA fuses neither what it reads nor what reads it.

  Fused, a product and a sum are rounded once, in some programs and not in others.
  """
  like = across_devices.types(jax.make_jaxpr(fun, return_shape=True)(*args))
  start = across_devices.zeros_like(like)
  if not jax.tree.leaves(start):
    return start

  def run(held):
    # Tied to what the loop carries, or XLA would move all of it out of the loop.
    tied, _ = lax.optimization_barrier((args, held))
    results, _ = lax.optimization_barrier((fun(*tied), held))
    return results

  return update_if(true_of(args), run, start, "apart")


def fold(of_one: Callable[..., tuple[Any, Any]], count: int, both: Both):
  """Combines the first results of ``of_one(i)``, of `count` of these, and stacks the second.

  `count` is a power of two. A loop within a loop for each level of the tree: `of_one` is compiled
  once, and of what is combined each level holds one.
  """
  like, _ = across_devices.types(
    jax.make_jaxpr(of_one, return_shape=True)(jnp.int32(0))
  )

  def of(first, count):
    if count == 1:
      held, collected = of_one(first)
      return held, jax.tree.map(lambda x: x[None], collected)
    half = count // 2

    def add(before, i):
      held, collected = of(first + i * half, half)
      joined = both(before, held)

      def chosen(x, of_both):
        return jnp.where(i == 0, x, of_both)

      return jax.tree.map(chosen, held, joined), collected

    start = across_devices.zeros_like(like)
    held, collected = lax.scan(add, start, jnp.arange(2, dtype=jnp.int32))
    return held, jax.tree.map(lambda x: lax.collapse(x, 0, 2), collected)

  return of(jnp.int32(0), count)


def fold_over(axis_name: AxisName, held, both: Both):
  """Combines what the devices of an axis hold; every device gets the result."""
  each = lax.all_gather(held, axis_name)

  def of_one(i):
    return jax.tree.map(lambda x: x[i], each), ()

  return fold(of_one, lax.axis_size(axis_name), both)[0]


def sum_over(axis_name: AxisName, x: jax.Array) -> jax.Array:
  """The sum over the devices of an axis; it sends as much as an all-reduce."""
  devices = lax.axis_size(axis_name)
  if not x.size:
    return x
  fit = [dim for dim, size in enumerate(x.shape) if size % devices == 0]
  if fit:
    part = _scattered_sum(axis_name, x, fit[0])
    return lax.all_gather(part, axis_name, axis=fit[0], tiled=True)
  flat = x.reshape(-1)
  filled = jnp.pad(flat, (0, -x.size % devices))
  return sum_over(axis_name, filled)[: x.size].reshape(x.shape)


def _scattered_sum(axis_name: AxisName, x: jax.Array, dim: int) -> jax.Array:
  """The same, of which each device gets a part along a dimension, which the devices divide."""
  devices = lax.axis_size(axis_name)
  shape = x.shape[:dim], x.shape[dim] // devices, x.shape[dim + 1 :]
  before, size, after = shape
  parts = x.reshape(*before, devices, size, *after)
  each = lax.all_to_all(parts, axis_name, dim, 0)
  while len(each) > 1:
    each = each[0::2] + each[1::2]
  return each[0]
