"""The argument that each microbatch updates for the next; each device has its own."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  reduction_words,
  weighted_mean,
)
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reductions import Reduction, REDUCTIONS
from optax_accum._arithmetic.trees import Carry, Path, Tree
from optax_accum._arithmetic.weighted_mean import Weight

_LARGE = 2**30


def on_device(carry: Carry, axis_name: AxisName | None) -> Carry:
  """What a device starts with: its own noise, and otherwise what all of them start with."""
  if axis_name is None:
    return carry
  carry = across_devices.varying(carry, axis_name)
  index = lax.axis_index(axis_name)
  return jax.tree.map(
    lambda x: fold_in(x, index) if dtypes.is_key(x) else x, carry
  )


def fold_in(keys: jax.Array, number: ArrayLike) -> jax.Array:
  """An array of keys, typed or raw, with a number folded into each."""
  if jax.random.key_impl(keys) == "unsafe_rbg":
    # Its folds commute. A caller who folds in the number of a step has smaller numbers.
    number = number + _LARGE
  fold = jax.random.fold_in
  for _ in range(jnp.ndim(keys) - (0 if dtypes.is_key(keys) else 1)):
    fold = jax.vmap(fold, (0, None))
  return fold(keys, number)


def over_devices(
  name: str,
  words: Tree,
  carry: Carry,
  start: Carry,
  weight: Weight,
  total: Weight,
  axis_name: AxisName,
) -> Carry:
  """One carry of all devices, each from `start`; this one counted `weight`, and all `total`."""

  def together(
    path: Path, x: jax.Array, word: str, first: jax.Array
  ) -> jax.Array:
    if dtypes.is_key(x):
      return across_devices.of_one(x, axis_name, lax.axis_index(axis_name) == 0)
    kind = _reduction(_validate.leaf_name(name, path), word, x)
    if kind.name in ("max", "min"):
      return kind.over_devices(x, axis_name, True)
    wide = dtypes.accumulator_dtype(x.dtype)
    if kind.name == "sum":
      grown = x.astype(wide) - first.astype(wide)
      return (first.astype(wide) + lax.psum(grown, axis_name)).astype(x.dtype)
    held = lax.psum(weighted_mean.weigh(x, weight, wide), axis_name)
    mean = weighted_mean.mean(held, total, x.dtype)
    return weighted_mean.select(weighted_mean.counts(total), mean, first)

  each = reduction_words.match(
    "carry_reduction", "" if words is None else words, carry
  )
  return jax.tree_util.tree_map_with_path(together, carry, each, start)


def _reduction(name: str, word: str, x: jax.Array) -> Reduction:
  """How a leaf is reduced, by default if its `word` is ""."""
  if not word and x.dtype == jnp.uint32 and x.shape[-1:] in ((2,), (4,)):
    raise TypeError(
      f"{name} has dtype uint32 and shape {x.shape}, as a raw random key, with which all devices"
      " would draw the same noise: carry a typed key, as jax.random.wrap_key_data(raw). If these"
      ' are numbers, say how to combine them: carry_reduction="max".'
    )
  kind = REDUCTIONS[
    word or ("mean" if jnp.issubdtype(x.dtype, jnp.inexact) else "max")
  ]
  kind.check(name, jax.ShapeDtypeStruct(x.shape, x.dtype), 0, None)
  if x.dtype == jnp.bool_ and kind.name == "sum":
    raise TypeError(
      f'{name} has dtype bool, which has no sum: reduce it with "max" or "min".'
    )
  return kind


def check(name: str, old: tuple[Carry, ...], new: tuple[Carry, ...]) -> None:
  """Checks that a microbatch returned a carry like the one that it got."""
  for before, after in zip(old, new, strict=True):
    _validate.check_alike(
      "the new_carry that the function returned", name, after, before
    )
