"""What each argument of a call is: split, a random key, carried, or shared by all microbatches.

Two mistakes are made with shared arguments: one should have been split too, or one is a key, and
all microbatches get the same noise. Neither changes a shape, so the defaults refuse both.
"""

from collections.abc import Callable, Collection, Iterable
import inspect
from typing import NamedTuple

import jax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf, Tree

# Where an argument of a call is: its position, or its name where it is passed by name.
Slot = int | str


class Roles(NamedTuple):
  """Where the arguments of each role are in a call."""

  batch: dict[Slot, int]  # what is split, and the axis of its rows
  rng: tuple[Slot, ...]
  carry: tuple[Slot, ...]  # one at most
  shared: dict[Slot, Tree]  # what all microbatches get whole, and no gradient is taken of


def refuse_rows(roles: Roles, rows: Collection[int]) -> None:
  """Refuses shared arguments with as many rows as the batch."""
  if not (found := with_rows(roles, rows)):
    return
  both = dict.fromkeys((*roles.batch, *(slot for slot, _ in found)))
  raise ValueError(
    f"{found[0][1]}, as many as the batch, and batch_argnums=None does not split it. If the rows"
    f" of both belong together, name both, {_option(both)}; if every microbatch needs all of it,"
    f" name the batch alone, {_option(roles.batch)}."
  )


def with_rows(roles: Roles, rows: Collection[int]) -> list[tuple[Slot, str]]:
  """The shared arguments with as many rows as the batch, and which of their leaves has them."""
  return [
    (slot, f"{name} {has}")
    for slot, tree in roles.shared.items()
    for name, leaf in _validate.named_leaves(f"argument {slot!r}", tree)
    if (has := _has_rows(roles.batch.values(), leaf, rows))
  ]


def refuse_aux_rows(roles: Roles, name: str, leaf: Leaf, rows: int) -> None:
  """Refuses an aux with a value for each of the microbatch's `rows`, if it has several."""
  axes = (*roles.batch.values(), 0)  # rows of outputs are mostly on the first, whatever the batch's
  if has := _has_rows(axes, leaf, (rows,)):
    raise ValueError(
      f"{name} {has}, as many as a microbatch, and aux_reduction=None would average different"
      ' rows: give "concat" for values per row, or "mean" (or "sum") for what has this size by'
      ' chance; one word, or a tree: aux_reduction={"logits": "concat", "accuracy": "mean"}.'
    )


def _has_rows(axes: Iterable[int], leaf: Leaf, rows: Collection[int]) -> str:
  """On which axis `leaf` has as many rows as `rows` says. One row cannot be split."""
  shape = getattr(leaf, "shape", ())
  axes = [axis for axis in axes if -len(shape) <= axis < len(shape)] or [0]
  same = [axis for axis in axes if shape and shape[axis] in rows and shape[axis] > 1]
  return f"has {shape[same[0]]} rows on axis {same[0]}" if same else ""


def refuse_keys(roles: Roles) -> None:
  """Refuses shared arguments with a typed key."""
  for slot in with_keys(roles):
    leaves = _validate.named_leaves(f"argument {slot!r}", roles.shared[slot])
    keys = [name for name, leaf in leaves if dtypes.is_key(leaf)]
    option = f"{'rng_argnums' if isinstance(slot, int) else 'rng_argnames'}={slot!r}"
    fix = f"name it, {option}, to fold each microbatch's index in"
    if len(keys) < len(leaves):
      fix = "pass it as an argument of its own, named in rng_argnums, or carry all (carry_argnum)"
    raise ValueError(
      f"{keys[0]} is a random key, from which every microbatch would get the same noise: {fix}; or"
      " share it, rng_argnums=()."
    )


def with_keys(roles: Roles) -> list[Slot]:
  """The shared arguments with a typed key."""
  return [slot for slot, x in roles.shared.items() if any(map(dtypes.is_key, jax.tree.leaves(x)))]


def _option(slots: Collection[Slot]) -> str:
  """The options that split these arguments."""
  argnums = tuple(slot for slot in slots if isinstance(slot, int))
  argnames = tuple(slot for slot in slots if isinstance(slot, str))
  option = f"batch_argnums={argnums[0] if len(argnums) == 1 else argnums!r}"
  return option + (f" with batch_argnames={argnames!r}" if argnames else "")


def note_on_settings(error: Exception, fun: Callable[..., Tree], roles: Roles) -> str:
  """What to add to an error, if Python asked for the value of an argument that is traced."""
  scalars = [
    name_of(fun, slot)
    for slot, tree in roles.shared.items()
    if any(getattr(leaf, "shape", ()) == () for leaf in jax.tree.leaves(tree))
  ]
  if not scalars or "trace" not in str(error).lower():  # which JAX says wherever that is
    return ""
  fixed = ", ".join(f"{name}=..." for name in scalars)
  return (
    "A step traces all its arguments, so Python cannot branch on them, nor can they be static. Fix"
    f" a setting in the loss, functools.partial(loss_fn, {fixed}), and make a step for each value."
  )


def names_or_positions(option: str, value: object, kind: type) -> tuple[Slot, ...]:
  """One or several positions (or names) as a tuple."""
  values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  if not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
    word = "positions (ints)" if kind is int else "names (strings)"
    raise TypeError(f"{option}={value!r} must hold {word} of arguments.")
  return values


def find_slots(
  option: str, wanted: Collection[Slot], fun: Callable[..., Tree], args: Args, kwargs: Kwargs
) -> tuple[Slot, ...]:
  """Where the wanted arguments are in this call, by position or by name.

  The signature of `fun` finds those that are wanted by one and passed by the other.
  """
  count = len(args)
  slots: dict[Slot, Slot] = {i: i % count for i in range(-count, count)}
  slots.update(zip(kwargs, kwargs, strict=True))
  for i, name in enumerate(_positional_names(fun)):
    if i < count:
      slots.setdefault(name, i)
    elif name in kwargs:
      slots[i] = name
  for argument in wanted:
    if argument not in slots:
      got = f"{count} positional" + (f" and the keywords {sorted(kwargs)}" if kwargs else "")
      name = option if isinstance(argument, int) else option.replace("nums", "names")
      raise ValueError(
        f"{name} names argument {argument!r}, which this call does not have: it has {got}"
        f" arguments. Pass that argument{' by position' * (option == 'argnums')}, or change {name}."
      )
  return tuple(slots[argument] for argument in wanted)


def name_of(fun: Callable[..., Tree], slot: Slot) -> str:
  """What `fun` calls an argument: "..." where it has no name."""
  names = _positional_names(fun)
  return slot if isinstance(slot, str) else (names[slot:] or [""])[0] or "..."


def _positional_names(fun: Callable[..., Tree]) -> list[str]:
  try:
    parameters = inspect.signature(fun).parameters.values()
  except (TypeError, ValueError):  # builtins and some callables have none
    return []
  # One that is positional only has a place, and no name that a call could use.
  named, positional = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
  return [p.name if p.kind is named else "" for p in parameters if p.kind in (named, positional)]
