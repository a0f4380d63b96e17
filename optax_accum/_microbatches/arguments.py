"""Which arguments of a call are meant by a position or a name."""

from collections.abc import Callable, Iterable, Sequence
import inspect
from typing import Any

# Where an argument of a call is: its position, or its name where it is passed by name.
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


def name_of(fun: Callable[..., Any], slot: Slot) -> str:
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
