"""The argument that is threaded through the microbatches, where each device threads its own."""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes, reduction_words, weighted_mean
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._arithmetic.weighted_mean import Weight

_WORDS = ("mean", "max", "min", "sum")


def check_words(tree: Any, carry_argnum: int | None) -> None:
  """Checks a `carry_reduction`."""
  if tree is None:
    return
  if carry_argnum is None:
    raise ValueError(
      f"carry_reduction={tree!r} says what becomes of a carry, and carry_argnum=None names none:"
      " give carry_argnum, or leave carry_reduction out."
    )
  for name, word in _validate.named_leaves("carry_reduction", tree):
    _validate.one_of(name, word, _WORDS)


def on_device(carry: Any, axis_name: AxisName | None) -> Any:
  """What a device starts with: its own noise, and otherwise what all of them start with."""
  carry = jax.tree.map(jnp.asarray, carry)
  if axis_name is None:
    return carry
  carry = across_devices.varying(carry, axis_name)
  index = lax.axis_index(axis_name)
  return jax.tree.map(lambda x: fold_in(x, index) if dtypes.is_key(x) else x, carry)


def fold_in(keys: jax.Array, number: Any) -> jax.Array:
  """An array of keys, typed or raw, with a number folded into each."""
  fold = jax.random.fold_in
  for _ in range(jnp.ndim(keys) - (0 if dtypes.is_key(keys) else 1)):
    fold = jax.vmap(fold, (0, None))
  return fold(keys, number)


def over_devices(
  words: Any,
  carry: tuple[Any, ...],
  start: tuple[Any, ...],
  weight: Weight,
  total: Weight,
  axis_name: AxisName,
) -> tuple[Any, ...]:
  """What the devices' carries become together.

  `start` is what all devices started with, `weight` what this device counted and `total` what all
  of them did.
  """
  together = functools.partial(_together, weight=weight, total=total, axis_name=axis_name)

  def one(carry: Any, start: Any) -> Any:
    named = _validate.named_leaves("carry", carry)
    each: list[Any] = [None] * len(named)
    if words is not None:
      each = jax.tree.leaves(reduction_words.match("carry_reduction", words, carry))
    both = zip(named, each, jax.tree.leaves(start), strict=True)
    leaves = [together(name, word, x, first) for (name, x), word, first in both]
    return jax.tree.unflatten(jax.tree.structure(carry), leaves)

  return tuple(one(*both) for both in zip(carry, start, strict=True))


def _together(
  name: str, word: Any, x: jax.Array, start: Any, weight: Weight, total: Weight, axis_name: AxisName
) -> jax.Array:
  """One leaf of the carries of all devices."""
  if dtypes.is_key(x):
    return across_devices.of_first(x, axis_name)
  if word is None and x.dtype == jnp.uint32 and x.shape[-1:] in ((2,), (4,)):
    raise TypeError(
      f"{name} has dtype uint32 and shape {x.shape}, as a raw random key, with which all devices"
      " would draw the same noise: carry a typed key, jax.random.key(seed) or"
      " jax.random.wrap_key_data(raw). If these are numbers, say how they become one:"
      ' carry_reduction="max".'
    )
  inexact = jnp.issubdtype(x.dtype, jnp.inexact)
  kind = REDUCTIONS[word or ("mean" if inexact else "max")]
  kind.check(name, jax.ShapeDtypeStruct(x.shape, x.dtype), 0, None)
  if kind.name in ("max", "min"):
    return kind.across_devices(x, axis_name, True)
  if x.dtype == jnp.bool_:
    raise TypeError(f'{name} has dtype bool, which has no sum: reduce it with "max" or "min".')
  start = across_devices.same(jnp.asarray(start), axis_name)
  wide = dtypes.accumulator_dtype(x.dtype)
  if kind.name == "sum":
    grown = x.astype(wide) - start.astype(wide)
    return (start.astype(wide) + across_devices.summed(grown, axis_name)).astype(x.dtype)
  held = across_devices.summed(weighted_mean.weigh(x, weight, wide), axis_name)
  mean = weighted_mean.mean(held, total, x.dtype)
  return weighted_mean.select(weighted_mean.counts(total), mean, start)


def check(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
  """Checks that a microbatch returned a carry like the one that it got."""
  for before, after in zip(old, new, strict=True):
    had, got = (str(jax.tree.structure(x)) for x in (before, after))
    if had != got:
      raise ValueError(
        f"The threaded argument (carry_argnum) has structure {had} and the function returned {got}"
        " as its new_carry: return the same structure."
      )
    leaves = _validate.named_leaves("carry", before)
    for (name, a), b in zip(leaves, jax.tree.leaves(after), strict=True):
      if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
          f"{name} has shape {a.shape} and dtype {a.dtype}, and the"
          f" function returned shape {b.shape} and dtype {b.dtype}: return the same shape and"
          " dtype, e.g. with .astype."
        )
