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
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.reductions import Reduction, REDUCTIONS
from optax_accum._arithmetic.trees import Carry, Tree
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.options import Split


def check(name: str, old, new) -> None:
  """Checks that a microbatch returned a carry like the one that it got."""
  returned = "the new_carry that the function returned"
  _validate.check_alike(returned, name, new, old)


class Together(NamedTuple):
  """How devices that begin with one carry have one in the end. Has a tuple of one carry, or none.

  A `term` is what a device gives of a leaf. Terms are combined by the reduction of the leaf.
  """

  kinds: Tree
  start: tuple[Carry, ...]

  @classmethod
  def of(cls, split: Split, start: tuple[Carry, ...]) -> "Together":
    """How `split` asks for it."""
    if split.axis_name is None and split.devices.size == 1:
      return cls(jax.tree.map(lambda _: _AS_IT_IS, start), start)
    name = split.name(*split.carry)
    words = "" if split.carry_reduction is None else split.carry_reduction

    def kind(path, word, x):
      return _reduction(_validate.leaf_name(name, path), word, x)

    def kinds_of(carry):
      each = reduction_words.match("carry_reduction", words, carry)
      return jax.tree_util.tree_map_with_path(kind, each, carry)

    return cls(tuple(map(kinds_of, start)), start)

  def terms(self, carry, weight: Weight):
    """What a device gives, whose microbatches weigh so much."""

    def term(kind, x, first):
      if kind is _FIRST:
        return jax.random.key_data(x)
      if not kind.summed:
        return x
      wide = dtypes.accumulator_dtype(x.dtype)
      if kind.name == "mean":
        return weighted_mean.weigh(x, weight, wide)
      return x.astype(wide) - first.astype(wide)

    return jax.tree.map(term, self.kinds, carry, self.start)

  def both(self, first, second):
    """The terms of two."""

    def both(kind, a, b):
      return kind.both(a, b, True)

    return jax.tree.map(both, self.kinds, first, second)

  def over_devices(self, terms, devices: Devices, total: Weight):
    """The carry of all devices, whose microbatches weigh `total`."""

    def over_devices(kind, term, first):
      term = devices.reduced(kind, term, True)
      if kind is _FIRST:
        return jax.random.wrap_key_data(term, impl=jax.random.key_impl(first))
      if not kind.summed:
        return term
      if kind.name == "mean":
        mean = weighted_mean.mean(term, total, first.dtype)
        counted = weighted_mean.counts(total)
        return weighted_mean.select(counted, mean, first)
      return (first.astype(term.dtype) + term).astype(first.dtype)

    return jax.tree.map(over_devices, self.kinds, terms, self.start)


def _of_first(held: jax.Array, devices: Devices, counted: object) -> jax.Array:
  """What the first device holds."""
  is_first = lax.axis_index(devices.axis_name) == 0
  return across_devices.of_one(held, devices.axis_name, is_first)


_FIRST = Reduction(over_devices=_of_first)
_AS_IT_IS = Reduction()


def _reduction(name: str, word: str, x: jax.Array) -> Reduction:
  """How a leaf is reduced, by default if its `word` is ""."""
  if dtypes.is_key(x):
    return _FIRST
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
