"""Which arguments of a call are meant, and what they must be to be split."""

from collections.abc import Callable, Iterable, Sequence
import inspect
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from optax_accum import _validate

# An argument of a call: its position, or its name where it is passed by name.
Slot = int | str


def names_or_positions(option: str, value: Any, kind: type) -> tuple[Any, ...]:
  """One or several positions (or names) as a tuple."""
  values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  for v in values:
    if not isinstance(v, kind) or isinstance(v, bool):
      word = "positions (ints)" if kind is int else "names (strings)"
      raise TypeError(f"{option}={value!r} must hold {word} of arguments; got {v!r}.")
  return values


def find_slots(
  option: str, wanted: Iterable[Slot], fun: Callable[..., Any], args: Sequence[Any], kwargs: dict
) -> tuple[Slot, ...]:
  """Where the wanted arguments are in this call.

  A position whose argument was passed by name is found by `fun`'s signature, and so is
  a name whose argument was passed by position, as `jax.jit` does for static arguments.
  """
  parameters = _parameter_names(fun)
  slots: list[Slot] = []
  for argument in wanted:
    slot: Slot = argument
    if isinstance(argument, int):
      if -len(args) <= argument < len(args):
        slot = argument % len(args)
      elif 0 <= argument < len(parameters):
        slot = parameters[argument]
    elif argument not in kwargs and argument in parameters:
      slot = parameters.index(argument)
    if not (slot in kwargs if isinstance(slot, str) else 0 <= slot < len(args)):
      got = f"{len(args)} positional" + (f" and the keywords {sorted(kwargs)}" if kwargs else "")
      name = option if isinstance(argument, int) else option.replace("nums", "names")
      raise ValueError(
        f"{name} names argument {argument!r}, which this call does not have: it has {got}"
        f" arguments. Pass that argument, or change {name}."
      )
    if slot not in slots:
      slots.append(slot)
  return tuple(slots)


def positions(option: str, wanted: Iterable[int], args: Sequence[Any]) -> tuple[int, ...]:
  """The wanted positions, counted from the front."""
  for position in wanted:
    if not -len(args) <= position < len(args):
      raise ValueError(
        f"{option} names argument {position}, which this call does not have: it has"
        f" {len(args)} positional arguments. Pass that argument by position, or change {option}."
      )
  return tuple(position % len(args) for position in wanted)


def _parameter_names(fun: Callable[..., Any]) -> list[str]:
  try:
    parameters = inspect.signature(fun).parameters.values()
  except (TypeError, ValueError):  # builtins and some callables have none
    return []
  # One that is positional only has a place, and no name that a call could use.
  return [
    p.name if p.kind is p.POSITIONAL_OR_KEYWORD else ""
    for p in parameters
    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]


def disjoint(roles: dict[str, Sequence[Slot]]) -> None:
  """Checks that no argument has two roles (differentiated and split, say)."""
  seen: dict[Slot, str] = {}
  for role, slots in roles.items():
    for slot in slots:
      if slot in seen:
        raise ValueError(
          f"Argument {slot!r} is both {seen[slot]} and {role}; an argument can be only one of"
          " them: change the argnums."
        )
      seen[slot] = role


def batch_rows(slots: Sequence[Slot], batch: Sequence[chex.ArrayTree], axis: int) -> int:
  """The number of rows that every leaf of the batch has along `axis`."""
  rows: dict[str, int] = {}
  for slot, tree in zip(slots, batch, strict=True):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      name = _validate.leaf_name(f"batch argument {slot!r}", path)
      shape = jnp.shape(leaf)
      if not -len(shape) <= axis < len(shape):
        raise ValueError(
          f"{name} has shape {shape}, without an axis {axis} to split (batch_axis={axis}): give"
          " it that axis, or pass it as an argument that is not split."
        )
      rows[name] = shape[axis]
  if not rows:
    raise ValueError(
      f"The batch (arguments {list(slots)}) has no arrays: there is nothing to split."
    )
  if len(set(rows.values())) > 1:
    listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
    raise ValueError(
      f"Batch leaves disagree on the number of rows along axis {axis} ({listed}); all must have"
      " the same."
    )
  (count,) = set(rows.values())
  if count == 0:
    raise ValueError("The batch is empty (0 rows); it needs at least 1 row.")
  return count


def microbatch_rows(rows: int, num_microbatches: int | None, size: int | None) -> int:
  """Rows of a (full) microbatch."""
  if num_microbatches is None:
    return min(size or rows, rows)
  if num_microbatches > rows:
    raise ValueError(
      f"num_microbatches={num_microbatches} is more than the batch's {rows} rows: use at most"
      f" {rows}."
    )
  if rows % num_microbatches:
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    raise ValueError(
      f"num_microbatches={num_microbatches} does not divide the batch's {rows} rows: use one of"
      f" {divisors}, or microbatch_size={-(-rows // num_microbatches)}, which makes the last"
      " microbatch smaller and is exact too."
    )
  return rows // num_microbatches


def shards_divide(x: Any, axis: int, size: int, rows: int) -> None:
  """Checks that microbatches of a batch of explicit sharding can stay where their rows are."""
  sharding = jax.typeof(x).sharding
  names = sharding.spec[axis] if axis < len(sharding.spec) else None
  if names is None:
    return
  names = names if isinstance(names, tuple) else (names,)
  devices = math.prod(sharding.mesh.shape[name] for name in names)
  if size % devices or rows % size:
    raise ValueError(
      f"The batch's {rows} rows are sharded over {devices} devices, which its microbatches of"
      f" {size} rows cannot be: use microbatches of a multiple of {devices} rows that divide the"
      " batch, or make_train_step(mesh=...), which needs each device's rows alone to be split."
    )
