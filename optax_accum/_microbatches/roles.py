"""What each argument of a call is: split, a random key, carried, or shared by all microbatches.

Two mistakes are made with an argument that is shared: its rows were to be split too, or it is a key
and all microbatches have the same noise. Neither changes a shape, so the defaults refuse both.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
import inspect
from typing import Any, NamedTuple

import jax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes

# Where an argument of a call is: its position, or its name where it is passed by name.
Slot = int | str


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
    keys = [name for name, leaf in leaves if dtypes.is_key(leaf)]
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
  return [slot for slot, x in roles.shared.items() if any(map(dtypes.is_key, jax.tree.leaves(x)))]


def note_on_error(error: Exception, fun: Callable[..., Any], roles: Roles, by_default: bool) -> str:
  """What to say of an error of `fun`: what is no setting, or what was not split `by_default`."""
  shapes = {
    slot: [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
    for slot, tree in roles.shared.items()
  }
  if "trace" in str(error).lower():  # as JAX says wherever Python asks for a value
    fixed = ", ".join(f"{_name_of(fun, slot)}=..." for slot, each in shapes.items() if () in each)
    return fixed and (
      "A step traces all that it is passed, so Python cannot branch on it, nor look it up in a dict"
      f" or have it static. Fix a setting in the loss, functools.partial(loss_fn, {fixed}), and"
      " make a step for each value."
    )
  arrays = [_describe(slot) for slot, each in shapes.items() if any(each)]
  if not by_default or not arrays:
    return ""
  return (
    f"In each microbatch, {' and '.join(map(_describe, roles.batch))} alone has the rows of"
    f" that microbatch (batch_argnums=None), and {' and '.join(arrays)} is whole. If shapes"
    " disagree because it has rows too, name it in batch_argnums (or batch_argnames)."
  )


def _describe(slot: Slot) -> str:
  return f"argument {slot!r}"


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
  names = _positional_names(fun)
  slots: list[Slot] = []
  for argument in wanted:
    slot: Slot = argument
    if isinstance(argument, int):
      if -len(args) <= argument < len(args):
        slot = argument % len(args)
      elif 0 <= argument < len(names):
        slot = names[argument]
    elif argument not in kwargs and argument in names:
      slot = names.index(argument)
    if not (slot in kwargs if isinstance(slot, str) else 0 <= slot < len(args)):
      got = f"{len(args)} positional" + (f" and the keywords {sorted(kwargs)}" if kwargs else "")
      name = option if isinstance(argument, int) else option.replace("nums", "names")
      raise ValueError(
        f"{name} names argument {argument!r}, which this call does not have: it has {got}"
        f" arguments. Pass that argument{' by position' * (option == 'argnums')}, or change {name}."
      )
    slots.append(slot)
  return tuple(slots)


def only_argument(option: str, slots: Sequence[Slot]) -> tuple[Slot, ...]:
  """The one argument that `option=None` can mean."""
  if len(slots) != 1:
    raise ValueError(
      f"{option}=None is the only argument, and this call has {len(slots)}: {list(slots)}. Name"
      f" those that are split, e.g. {option}=1 where argument 0 is the parameters, or {option}=0."
    )
  return tuple(slots)


def _name_of(fun: Callable[..., Any], slot: Slot) -> str:
  """What `fun` calls an argument: "..." where it has no name."""
  names = _positional_names(fun)
  return slot if isinstance(slot, str) else (names[slot:] or [""])[0] or "..."


def _positional_names(fun: Callable[..., Any]) -> list[str]:
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


def check_disjoint(roles: dict[str, Sequence[Slot]]) -> None:
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
