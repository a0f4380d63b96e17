"""The argument that each microbatch updates for the next; each device has its own.

What the loss hands back as it came is not carried: None stands in its place in the loop and in a
cycle, and no device or cycle combines it.
"""

from typing import Any, NamedTuple

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
from optax_accum._arithmetic.reductions import (
  Fold,
  Mean,
  Reduction,
  REDUCTIONS,
  Sum,
)
from optax_accum._arithmetic.trees import (
  Carry,
  map_none,
  masked_like,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.options import Split


def changed(name: str, old, new):
  """The carry that a loss returned, with None for each array that is the one it got. Checked."""
  returned = "the new_carry that the function returned"
  _validate.check_alike(returned, name, new, old)

  def change(x, before):
    # The same object, since a traced program does not always show what passes through it.
    if x is before:
      return None
    return x

  return jax.tree.map(change, new, old)


class Carries(NamedTuple):
  """How devices, or cycles, that begin with one carry `start` have one in the end.

  A term is what one of them gives of a leaf. Terms are combined by the reduction of the leaf.
  """

  kinds: Tree
  start: tuple[Carry, ...]  # one, or none; None in it is not carried

  @classmethod
  def of(
    cls, split: Split, start: tuple[Carry, ...], like: tuple[Carry, ...]
  ) -> "Carries":
    """As the `carry_reduction` of `split` asks of the leaves that are not None in `like`."""
    # None, alone or in a tree, asks for the default of the leaves, as "" asks `_reduction`.
    words = map_none(lambda word: word or "", split.carry_reduction)
    name = split.name(*split.carry)

    def kind(path, word, x):
      return _reduction(_validate.leaf_name(name, path), word, x)

    def kinds_of(carry, like):
      each = reduction_words.match("carry_reduction", words, carry)
      # Only for what the loss changes a word may be missing.
      each = masked_like(like, each)
      carry = masked_like(like, carry)
      return jax.tree_util.tree_map_with_path(kind, each, carry)

    # `start` has one carry or none, and so has the tuple of kinds.
    kinds = tuple(map(kinds_of, start, like))
    return cls(kinds, masked_like(like, start))

  def terms(self, carry, weight: Weight):
    """What one gives, whose microbatches weigh so much."""

    def term(kind, x, start):
      # A fold takes a value and whether it counts.
      if isinstance(kind, Fold):
        return x, jnp.asarray(weighted_mean.counts(weight))
      # A key stays as it is. Sums and means go on, since a `Mean` is a `Sum` too.
      if not isinstance(kind, Sum):
        return x
      wide = dtypes.accumulator_dtype(x.dtype)
      if isinstance(kind, Mean):
        return weighted_mean.weigh(x, weight, wide)
      # A sum gives what was added to `start`, which all have and which counts once.
      return x.astype(wide) - start.astype(wide)

    return jax.tree.map(term, self.kinds, carry, self.start)

  def merge(self, first, second, total: Weight):
    """The carry, of the terms of two that weigh `total` together."""

    def merge(kind, *terms):
      return kind.merge(*terms)

    merged = jax.tree.map(merge, self.kinds, first, second)
    return self._values(merged, total)

  def over_devices(self, terms, devices: Devices, total: Weight):
    """The carry, of the terms of all devices, which weigh `total` together."""
    reduced = jax.tree.map(devices.reduced, self.kinds, terms)
    return self._values(reduced, total)

  def _values(self, terms, total: Weight):
    """The carry, of one combined term for each leaf."""

    def value(kind, term, start):
      # Asked by name, since a `Mean` is a `Sum` too. The term of a sum is what `start` grew by.
      if kind.name == "sum":
        grown = start.astype(term.dtype) + term
        return grown.astype(start.dtype)
      new = kind.finish(term, total, start)
      # The key of the first, whether its rows counted or not.
      if isinstance(kind, _First):
        return new
      # Where nothing counted, the carry is as it began.
      return weighted_mean.select(weighted_mean.counts(total), new, start)

    return jax.tree.map(value, self.kinds, terms, self.start)


class _First(Reduction):
  """What the first device, or the first cycle, has."""

  def over_devices(self, state, devices):
    is_first = lax.axis_index(devices.axis_name) == 0
    return across_devices.of_one(state, devices.axis_name, is_first)


def _reduction(name: str, word: str, x: Any) -> Reduction:
  """How a leaf is reduced, by default if its `word` is ""."""
  # Keys cannot be combined: that of the first device or cycle is kept, whatever the word.
  if dtypes.is_key(x):
    return _First()
  if not word and not dtypes.is_inexact(x):
    raise TypeError(
      f"{name} has dtype {x.dtype} and the loss changes it, so devices (or merged cycles) end with"
      " different values. Give carry_reduction a tree with a word for it, such as"
      ' {"right": "sum", "norm": None}: "sum" for a count (the start plus all increments), "max" or'
      ' "min" for an index or a flag; None keeps the default, the mean of floats. One bare word is'
      " for every leaf, floats too. If it is a raw random key, carry a typed one,"
      " jax.random.wrap_key_data(raw)."
    )
  word = word or "mean"
  kind = REDUCTIONS[word]
  # The checks of the words that a carry may have need no rows. No dtype, since `accumulator_dtype`
  # is not for carries.
  kind.check(name, x, 0, None)
  if x.dtype == jnp.bool_ and word == "sum":
    raise TypeError(
      f'{name} has dtype bool, which has no sum: reduce it with "max" or "min".'
    )
  return kind
