"""What the defaults refuse, because it changes no shape and is almost always wrong.

An argument with the rows of the batch that is not split, a key that all microbatches would share,
and a value for each row that would be averaged over different rows.
"""

from collections.abc import Collection, Iterable, Sequence

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import Arguments, Roles


def refuse_double_roles(
  split: Split, roles: Roles, arguments: Arguments
) -> None:
  """Refuses an argument of two roles."""
  named = {
    "differentiated": roles.differentiated,
    "split": roles.batch,
    "a random key": roles.rng,
    "carried": roles.carry,
  }
  taken: dict[Slot, str] = {}
  for role, slots in named.items():
    for slot in slots:
      if slot not in taken:
        taken[slot] = role
        continue
      fix = "name it once"
      if split.batch_argnums is None and "split" in (role, taken[slot]):
        fix = _other_batch(roles, arguments)
      raise ValueError(
        f"Argument {slot!r} is both {taken[slot]} and {role}: {fix}."
      )


def refuse_uneven_lanes(split: Split, roles: Roles, rows: int) -> None:
  """Refuses microbatches of unequal size on virtual devices."""
  count = split.virtual_devices
  if count is None:
    return
  each = split.microbatch_size
  asked = f"microbatch_size={each}"
  if each is None:
    each = count * (split.num_microbatches or 1)
    asked = f"num_microbatches={split.num_microbatches}"
  if rows % each:
    fix = f"use a multiple of {each} rows"
    if split.num_microbatches and rows % count == 0:
      fix = f"use a number that divides {rows // count}, or a multiple of {each} rows"
    raise ValueError(
      f"{split.name(*roles.batch)} has {rows} rows, which virtual_devices={count} and {asked} do"
      f" not cut into microbatches of one size: {fix}, or fill up with rows that do not count, by"
      " weight_fn or has_weight."
    )


def refuse_rows(
  split: Split, roles: Roles, arguments: Arguments, rows: Collection[int]
) -> None:
  """Refuses shared arguments with as many rows as the batch."""
  found = with_rows(split, roles, arguments, rows)
  if not found:
    return
  both = dict.fromkeys((*roles.batch, *found))
  first = next(iter(found.values()))
  fix = split.fixes.get(
    "unsplit",
    f"If the rows of both belong together, name both, {naming('batch', both)}; if every microbatch"
    f" needs all of it, name the batch alone, {naming('batch', roles.batch)}.",
  )
  raise ValueError(
    f"{first}, as many as the batch, and batch_argnums=None does not split it. {fix}"
  )


def with_rows(
  split: Split, roles: Roles, arguments: Arguments, rows: Collection[int]
) -> dict[Slot, str]:
  """The shared arguments with as many rows as the batch, and which of their leaves has them."""
  found: dict[Slot, str] = {}
  for slot in roles.shared:
    root = split.name(slot)
    named = _validate.named_leaves(root, arguments[slot], dtypes.is_sparse)
    for name, leaf in named:
      has = _has_rows(roles.batch.values(), leaf, rows)
      if has:
        found.setdefault(slot, f"{name} {has}")
  return found


def refuse_aux_rows(axes: Collection[int], name: str, leaf, rows: int) -> None:
  """Refuses an aux with a value for each of the microbatch's `rows`, if it has several."""
  # Rows of outputs are mostly on the first axis, whatever the batch's are on.
  has = _has_rows((*axes, 0), leaf, (rows,))
  if has:
    raise ValueError(
      f"{name} {has}, as many as a microbatch, and aux_reduction=None would average different"
      ' rows: give "concat" for values per row, or "mean" (or "sum") for what has this size by'
      ' chance; one word, or a tree: aux_reduction={"logits": "concat", "accuracy": "mean"}.'
    )


def _has_rows(axes: Iterable[int], leaf, rows: Collection[int]) -> str:
  """On which axis `leaf` has as many rows as `rows` says. One row cannot be split."""
  shape = getattr(leaf, "shape", ())
  if not shape:
    return ""
  within = [axis for axis in axes if -len(shape) <= axis < len(shape)]
  for axis in within or [0]:
    if shape[axis] in rows and shape[axis] > 1:
      return f"has {shape[axis]} rows on axis {axis}"
  return ""


def refuse_keys(split: Split, roles: Roles, arguments: Arguments) -> None:
  """Refuses shared arguments with a typed key: first those that have anything else."""
  slots = with_keys(roles, arguments)
  if not slots:
    return
  named = {
    slot: _validate.named_leaves(split.name(slot), arguments[slot])
    for slot in slots
  }

  def is_mixed(slot):
    return not all(dtypes.is_key(leaf) for _, leaf in named[slot])

  slot = next(filter(is_mixed, slots), slots[0])
  name = next(name for name, leaf in named[slot] if dtypes.is_key(leaf))
  option = naming("rng", [*roles.rng, *slots])
  fix = f"name it, {option}, to fold each microbatch's index in"
  if is_mixed(slot):
    fix = (
      "pass it as an argument of its own, and name all keys in rng_argnums, or carry all"
      " (carry_argnum)"
    )
  fix = split.fixes.get("random", f"{fix}; or share it, rng_argnums=().")
  raise ValueError(
    f"{name} is a random key, from which every microbatch would get the same noise: {fix}"
  )


def with_keys(roles: Roles, arguments: Arguments) -> list[Slot]:
  """The shared arguments with a typed key."""

  def has_key(slot):
    return any(map(dtypes.is_key, jax.tree.leaves(arguments[slot])))

  return list(filter(has_key, roles.shared))


def refuse_key(split: Split, roles: Roles, arguments: Arguments) -> None:
  """Refuses a random key in the place of the batch, which a raw one could be."""
  if split.batch_argnums is not None or split.default_argnum is None:
    return
  slot = next(iter(roles.batch))
  named = _validate.named_leaves(split.name(slot), arguments[slot])
  # Numbers that could be those of a raw key are one if something else can be the batch.
  may_be_raw = bool(_arrays_in(roles, arguments))

  def seems_key(x):
    return _is_one_key(x) and (may_be_raw or dtypes.is_key(x))

  if not named or not all(seems_key(x) for _, x in named):
    return
  name, key = named[0]
  keys = [*roles.rng, slot, *with_keys(roles, arguments)]
  raise ValueError(
    f"{name} is a random key, {_validate.type_of(key)}:"
    f" {_other_batch(roles, arguments)}, and the key, {naming('rng', keys)}. If it is the batch,"
    f" say so, {naming('batch', [slot])}."
  )


def _is_one_key(x) -> bool:
  """Whether `x` is a random key, typed or raw."""
  if dtypes.is_key(x):
    return not x.shape
  return getattr(x, "dtype", None) == jnp.uint32 and x.shape in ((2,), (4,))


def _other_batch(roles: Roles, arguments: Arguments) -> str:
  """What to write where the argument that is split by default is not the batch."""
  slots = _arrays_in(roles, arguments)
  option = naming("batch", slots) if slots else "batch_argnums=..."
  which = ", or those of these that have its rows" if len(slots) > 1 else ""
  return f"batch_argnums=None splits it, so name the batch, {option}{which}"


def _arrays_in(roles: Roles, arguments: Arguments) -> Sequence[Slot]:
  """The shared arguments with an array that may be a batch, and is no key."""

  def may_be_batch(slot):
    leaves = jax.tree.leaves(arguments[slot])
    return any(getattr(x, "shape", ()) and not _is_one_key(x) for x in leaves)

  return list(filter(may_be_batch, roles.shared))


def naming(role: str, slots: Collection[Slot]) -> str:
  """The options that name arguments of a role, by position and by name."""
  positions = [slot for slot in slots if isinstance(slot, int)]
  names = [slot for slot in slots if isinstance(slot, str)]
  shown = []
  # The batch has a position if none is named.
  if positions or role == "batch":
    shown.append(_option(f"{role}_argnums", positions))
  if names:
    shown.append(_option(f"{role}_argnames", names))
  return ", ".join(shown)


def _option(name: str, slots: Sequence[Slot]) -> str:
  value = slots[0] if len(slots) == 1 else tuple(slots)
  return f"{name}={value!r}".replace("'", '"')
