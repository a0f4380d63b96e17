"""The argument that each microbatch updates for the next; each device has its own."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  reduction_words,
  weighted_mean,
)
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reductions import Reduction, REDUCTIONS
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.options import Split


def check(name: str, old, new) -> None:
  """Checks that a microbatch returned a carry like the one that it got."""
  returned = "the new_carry that the function returned"
  _validate.check_alike(returned, name, new, old)


class Share(NamedTuple):
  """What one of the devices counted, which all have one carry in the end."""

  axis_name: AxisName
  weight: Weight  # of the microbatches of this device
  total: Weight  # of those of all devices

  def over_devices(self, split: Split, name: str, carry, start):
    """One carry of all devices, each from `start`."""

    def together(path, x, word, first):
      if dtypes.is_key(x):
        is_first = lax.axis_index(self.axis_name) == 0
        return across_devices.of_one(x, self.axis_name, is_first)
      kind = _reduction(_validate.leaf_name(name, path), word, x)
      if kind.name in ("max", "min"):
        return kind.over_devices(x, self.axis_name, True)
      if kind.name == "sum":
        return self._sum(x, first)
      return self._mean(x, first)

    words = "" if split.carry_reduction is None else split.carry_reduction
    each = reduction_words.match("carry_reduction", words, carry)
    return jax.tree_util.tree_map_with_path(together, carry, each, start)

  def _sum(self, x: jax.Array, first: jax.Array) -> jax.Array:
    """The start and what all devices added to it."""
    wide = dtypes.accumulator_dtype(x.dtype)
    grown = x.astype(wide) - first.astype(wide)
    total = first.astype(wide) + lax.psum(grown, self.axis_name)
    return total.astype(x.dtype)

  def _mean(self, x: jax.Array, first: jax.Array) -> jax.Array:
    """The mean over devices, weighted by what they counted."""
    wide = dtypes.accumulator_dtype(x.dtype)
    term = weighted_mean.weigh(x, self.weight, wide)
    held = lax.psum(term, self.axis_name)
    mean = weighted_mean.mean(held, self.total, x.dtype)
    return weighted_mean.select(weighted_mean.counts(self.total), mean, first)


def _reduction(name: str, word: str, x: jax.Array) -> Reduction:
  """How a leaf is reduced, by default if its `word` is ""."""
  if not word and x.dtype == jnp.uint32 and x.shape[-1:] in ((2,), (4,)):
    raise TypeError(
      f"{name} has dtype uint32 and shape {x.shape}, as a raw random key, with which all devices"
      " would draw the same noise: carry a typed key, as jax.random.wrap_key_data(raw). If these"
      ' are numbers, say how to combine them: carry_reduction="max".'
    )
  if not word:
    word = "mean" if jnp.issubdtype(x.dtype, jnp.inexact) else "max"
  kind = REDUCTIONS[word]
  kind.check(name, jax.ShapeDtypeStruct(x.shape, x.dtype), 0, None)
  if x.dtype == jnp.bool_ and kind.name == "sum":
    raise TypeError(
      f'{name} has dtype bool, which has no sum: reduce it with "max" or "min".'
    )
  return kind
