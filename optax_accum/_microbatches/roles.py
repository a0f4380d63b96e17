"""What each argument of a call is: split, a random key, carried, or shared by all microbatches.

Two mistakes are made with an argument that is shared: its rows were to be split too, or it is a key
and all microbatches have the same noise. Neither changes a shape, so the defaults refuse both.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._microbatches.arguments import Slot


class Roles(NamedTuple):
  """Where the arguments of each role are in a call."""

  batch: dict[Slot, int]  # what is split, and the axis of its rows
  rng: tuple[Slot, ...]
  carry: tuple[Slot, ...]  # one at most
  shared: dict[Slot, Any]  # what all microbatches get whole, and no gradient is taken of


def refuse_rows(roles: Roles, positions: tuple[int, ...], rows: Collection[int]) -> None:
  """Refuses shared arguments with as many rows as the batch, of which all are `rows`.

  `positions` are the batch's. One row cannot be split, so there is nothing to be missed.
  """
  found = with_rows(roles, rows)
  if not found:
    return
  raise ValueError(
    f"{found[0][1]}, as many as the batch, and is not split: batch_argnums=None splits"
    f" {' and '.join(map(_describe, roles.batch))} alone. If the rows of both belong together, name"
    f" both, {_naming(roles, found, positions)}. If every microbatch is to have it whole, say so,"
    f" batch_argnums={positions[0] if len(positions) == 1 else positions!r}."
  )


def with_rows(roles: Roles, rows: Collection[int]) -> list[tuple[Slot, str]]:
  """The shared arguments with as many rows as the batch, and which of their leaves has them."""
  found = []
  for slot, tree in roles.shared.items():
    for name, leaf in _validate.named_leaves(_describe(slot), tree):
      if has := _has_rows(roles.batch.values(), leaf, rows):
        found.append((slot, f"{name} {has}"))
  return found


def refuse_aux_rows(roles: Roles, name: str, leaf: Any, rows: int) -> None:
  """Refuses an aux with a value for each of the microbatch's `rows`, if it has several."""
  axes = (*roles.batch.values(), 0)  # rows of outputs are mostly on the first, whatever the batch's
  if has := _has_rows(axes, leaf, (rows,)):
    raise ValueError(
      f"{name} {has}, as many as a microbatch, and aux_reduction=None would average rows of"
      ' different microbatches. If it has a value for each row, say "concat"; if it merely has'
      ' that size, as counts of classes may, say "mean" (or "sum"). Where aux has others, name all:'
      ' aux_reduction={"logits": "concat", "accuracy": "mean"}.'
    )


def _has_rows(axes: Iterable[int], leaf: Any, rows: Collection[int]) -> str:
  """How many rows `leaf` has, and on which axis, if they are as many as `rows` says."""
  shape = getattr(leaf, "shape", ())
  axes = [axis for axis in axes if -len(shape) <= axis < len(shape)] or [0]
  same = [axis for axis in axes if shape and shape[axis] in rows and shape[axis] > 1]
  return f"has {shape[same[0]]} rows on axis {same[0]}" if same else ""


def _naming(roles: Roles, found: list[tuple[Slot, str]], positions: tuple[int, ...]) -> str:
  """The options that would split what was found too."""
  slots = list(dict.fromkeys(slot for slot, _ in found))
  argnums = (*positions, *(slot for slot in slots if isinstance(slot, int)))
  argnames = tuple(slot for slot in (*roles.batch, *slots) if isinstance(slot, str))
  option = f"batch_argnums={argnums[0] if len(argnums) == 1 else argnums!r}"
  return option + (f" with batch_argnames={argnames!r}" if argnames else "")


def refuse_keys(roles: Roles) -> None:
  """Refuses shared arguments with a typed key."""
  for slot, tree in roles.shared.items():
    leaves = _validate.named_leaves(_describe(slot), tree)
    keys = [name for name, leaf in leaves if _is_key(leaf)]
    if not keys:
      continue
    option = f"{'rng_argnums' if isinstance(slot, int) else 'rng_argnames'}={slot!r}"
    fix = f"name it, {option}, and each folds its index in"
    if len(keys) < len(leaves):
      fix = "pass it as an argument of its own, named in rng_argnums, or carry all (carry_argnum)"
    raise ValueError(
      f"{keys[0]} is a random key that every microbatch would share, and so have the same noise:"
      f" {fix}; or share it, rng_argnums=()."
    )


def with_keys(roles: Roles) -> list[Slot]:
  """The shared arguments with a typed key."""
  return [slot for slot, x in roles.shared.items() if any(map(_is_key, jax.tree.leaves(x)))]


def _is_key(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def note_on_batch(roles: Roles) -> str | None:
  """What to say of an error of a loss: what was not split."""
  arrays = [
    _describe(slot)
    for slot, tree in roles.shared.items()
    if any(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree))
  ]
  if not arrays:
    return None
  return (
    f"In each microbatch, {' and '.join(map(_describe, roles.batch))} alone has the rows of"
    f" that microbatch (batch_argnums=None), and {' and '.join(arrays)} is whole. If shapes"
    " disagree because it has rows too, name it in batch_argnums (or batch_argnames)."
  )


def _describe(slot: Slot) -> str:
  return f"argument {slot!r}"
