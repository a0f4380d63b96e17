"""What the defaults refuse, because it changes no shape and is almost always wrong.

An argument with the rows of the batch that is not split, a key that all microbatches would share,
and a value for each row that would be averaged over different rows.
"""

from collections.abc import Collection

import jax
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import Arguments, Roles

_ARRAYS = jax.Array, np.ndarray, jax.ShapeDtypeStruct


def refuse_rows(
  split: Split, roles: Roles, arguments: Arguments, rows: int
) -> None:
  """Refuses a shared argument all of whose leaves have the rows of the batch."""
  for slot in with_rows(roles, arguments, rows):
    # The first such argument raises.
    both = (*roles.batch, slot)
    raise ValueError(
      f"{split.name(slot)} has {rows} rows, as many as the batch, and batch_argnums=None does not"
      f" split it. If the rows of both belong together, name both, {naming('batch', both)}; if"
      f" every microbatch needs all of it, name the batch alone, {naming('batch', roles.batch)}."
    )


def with_rows(roles: Roles, arguments: Arguments, rows: int) -> list[Slot]:
  """The shared arguments all of whose leaves have the rows of the batch.

  A batch of one row is not split, so then there are none.
  """

  def has_rows(slot):
    # A sparse array counts as one leaf, by its own shape and not those of its parts.
    leaves = jax.tree.leaves(arguments[slot], is_leaf=dtypes.is_sparse)
    # `all` of no leaves is True, so an argument without leaves is left out.
    return bool(leaves) and all(map(leaf_has_rows, leaves))

  def leaf_has_rows(x):
    is_array = isinstance(x, _ARRAYS) or dtypes.is_sparse(x)
    return is_array and x.shape[:1] == (rows,)

  if rows == 1:
    return []
  return list(filter(has_rows, roles.shared))


def refuse_aux_rows(name: str, like, rows: int) -> None:
  """Refuses an aux with a value for each of the microbatch's `rows`, if it has several."""
  if rows > 1 and like.shape[:1] == (rows,):
    raise ValueError(
      f"{name} has {rows} rows, as many as a microbatch, and aux_reduction=None would average"
      ' different rows: give "concat" for values per row, or "mean" (or "sum") for what has this'
      ' size by chance; one word, or a tree: aux_reduction={"logits": "concat", "loss": "mean"}.'
    )


def refuse_keys(split: Split, roles: Roles, arguments: Arguments) -> None:
  """Refuses shared arguments with a typed key, also where `rng_argnums` names other keys."""
  for slot in with_keys(roles, arguments):
    named = _validate.named_leaves(split.name(slot), arguments[slot])
    # The message names the first key in the argument.
    name = next(name for name, leaf in named if dtypes.is_key(leaf))
    option = naming("rng", [*roles.rng, slot])
    # A step that calls its loss in its own way brings its own advice.
    fix = split.fixes.get(
      "random",
      "pass keys as arguments of their own, and name all of them to fold each microbatch's index"
      f" in, {option}; or share them, rng_argnums=().",
    )
    raise ValueError(
      f"{name} is a random key, from which every microbatch would get the same noise: {fix}"
    )


def with_keys(roles: Roles, arguments: Arguments) -> list[Slot]:
  """The shared arguments with a typed key."""

  def has_key(slot):
    return any(map(dtypes.is_key, jax.tree.leaves(arguments[slot])))

  return list(filter(has_key, roles.shared))


def naming(role: str, slots: Collection[Slot]) -> str:
  """The option that names arguments of a role, as one writes it: one argument is no tuple."""
  each = tuple(dict.fromkeys(slots))
  shown = repr(each)
  if len(each) == 1:
    shown = repr(each[0])
  shown = shown.replace("'", '"')
  return f"{role}_argnums={shown}"
