"""What each argument of a call is: split, a random key, carried, differentiated, or shared."""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any, NamedTuple, TypeAlias

from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._microbatches.options import Slot, Split

Arguments: TypeAlias = dict[Any, Tree]  # by position or name


class Roles(NamedTuple):
  """Where the arguments of each role are in a call."""

  batch: dict[Slot, int]  # what is split, and the axis of its rows
  rng: tuple[Slot, ...]
  carry: tuple[Slot, ...]  # one at most
  differentiated: tuple[int, ...]
  # What every microbatch gets in full, and no gradient is taken of.
  shared: tuple[Slot, ...]
  # The same, of the step's own.
  held: tuple[Slot, ...]


def by_slot(args, kwargs) -> Arguments:
  """The arguments of a call, by position or name."""
  return dict([*enumerate(args), *kwargs.items()])


def map_by_slot(
  fun: Callable[[Slot, Tree], Tree], args, kwargs
) -> tuple[Args, Kwargs]:
  """``fun(slot, argument)`` in the place of each argument."""
  positional = tuple(fun(i, x) for i, x in enumerate(args))
  return positional, {name: fun(name, x) for name, x in kwargs.items()}


class Signature:
  """The parameters of a function, by which the arguments of a call are found."""

  def __init__(self, fun: Callable[..., Tree]) -> None:
    self._parameters: list[inspect.Parameter] = []
    try:
      parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # builtins and some callables have none
      return
    kinds = (
      inspect.Parameter.POSITIONAL_ONLY,
      inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    self._parameters = [p for p in parameters if p.kind in kinds]

  def name(self, slot: Slot) -> str:
    """What the function calls an argument: "..." where it has no name."""
    if isinstance(slot, str):
      return slot
    if slot >= len(self._parameters):
      return "..."
    return self._name_of(self._parameters[slot]) or "..."

  def _name_of(self, parameter: inspect.Parameter) -> str:
    # One that is positional only has a place, and no name that a call could use.
    is_named = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    return parameter.name if is_named else ""

  def slots(self, count: int, names: Sequence[str]) -> dict[Slot, Slot]:
    """Where a call of `count` arguments by position and these by name has each of them.

    The keys are positions and names, by either of which an option may name an argument.
    """
    slots: dict[Slot, Slot] = {i: i % count for i in range(-count, count)}
    slots.update(zip(names, names, strict=True))
    # Not bound to the signature: a decorated function has that of what it wraps, and may take more.
    for i, name in enumerate(map(self._name_of, self._parameters)):
      if i < count:
        slots.setdefault(name, i)
      elif name in names:
        slots[i] = name
    return slots


class RolesOf:
  """Finds the roles in the calls of a function, once for each number and names of arguments."""

  def __init__(
    self, fun: Callable[..., Tree], split: Split, argnums: tuple[int, ...] = ()
  ) -> None:
    self._split = split
    self._argnums = argnums
    self.signature = Signature(fun)
    self._roles = functools.cache(self._of_shape)

  def __call__(self, args, kwargs) -> Roles:
    """The roles in this call."""
    return self._roles(len(args), tuple(kwargs))

  def _of_shape(self, count: int, names: tuple[str, ...]) -> Roles:
    split = self._split
    slots = self.signature.slots(count, names)
    every: Sequence[Slot] = (*range(count), *names)

    def find(option, wanted):
      for argument in wanted:
        if argument not in slots:
          raise ValueError(_missing(option, argument, count, names))
      return tuple(slots[argument] for argument in wanted)

    differentiated = self._differentiated(count)
    batch = find("batch_argnums", split.batch)
    rng = find("rng_argnums", split.rng)
    carry = find("carry_argnum", split.carry)
    if not batch:
      batch = _only([slot for slot in every if slot not in rng])
    axes: dict[Slot, int] = {}
    for slot, axis in zip(batch, split.batch_axis, strict=True):
      if axes.setdefault(slot, axis) != axis:
        raise ValueError(
          f"Argument {slot!r} is named twice, with batch_axis {axes[slot]}, {axis}."
        )
    # As the batch, one key may be named by position and by name.
    rng = tuple(dict.fromkeys(rng))
    held = split.held
    taken = {*axes, *rng, *carry, *differentiated, *held}
    shared = tuple(slot for slot in every if slot not in taken)
    return Roles(axes, rng, carry, differentiated, shared, held)

  def _differentiated(self, count: int) -> tuple[int, ...]:
    """The positions of what is differentiated, which is passed by position."""
    for i in self._argnums:
      if not -count <= i < count:
        raise ValueError(_missing("argnums", i, count, ()))
    return tuple(i % count for i in self._argnums)


def _missing(
  option: str, argument: Slot, count: int, names: Sequence[str]
) -> str:
  """What to say of an option that names an argument that a call does not have."""
  got = f"{count} positional"
  if names:
    got += f" and the keywords {sorted(names)}"
  name = option
  if isinstance(argument, str):
    name = option.replace("nums", "names")
  how = " by position" if option == "argnums" else ""
  return (
    f"{name} names argument {argument!r} of the function, to which this call gives {got}"
    f" arguments (opt_state of a step is none of them). Pass it{how}, or change {name}."
  )


def _only(slots: Sequence[Slot]) -> tuple[Slot, ...]:
  """The only argument that can be the batch."""
  if len(slots) != 1:
    raise ValueError(
      f"batch_argnums=None splits the only argument, and this call has {list(slots)}, of which"
      " any may be the batch: say which, e.g. batch_argnums=1 if argument 0 is the parameters."
    )
  return tuple(slots)
