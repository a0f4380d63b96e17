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

  batch: tuple[Slot, ...]
  rng: tuple[Slot, ...]
  carry: tuple[Slot, ...]  # one at most
  differentiated: tuple[int, ...]
  # What every microbatch gets in full, and no gradient is taken of.
  shared: tuple[Slot, ...]
  # The same, of what a step adds to the user's arguments: see `Split`.
  of_step: tuple[Slot, ...]


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
    self._names: list[str] = []
    try:
      parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # builtins and some callables have none
      return
    # Others, such as *args and what goes by keyword only, have no position of their own.
    for p in parameters:
      if p.kind is p.POSITIONAL_OR_KEYWORD:
        self._names.append(p.name)
      # It has a place, and no name that a call could use.
      if p.kind is p.POSITIONAL_ONLY:
        self._names.append("")

  def name(self, slot: Slot) -> str:
    """What the function calls an argument: "..." where it has no name."""
    if isinstance(slot, str):
      return slot
    # There may be more arguments than names, as of *args, and "" is no name.
    return dict(enumerate(self._names)).get(slot) or "..."

  def slots(self, count: int, names: Sequence[str]) -> dict[Slot, Slot]:
    """Where a call of `count` arguments by position and these by name has each of them.

    The keys are positions and names, by which an option may name an argument.
    """
    # A negative position counts from the end of the positional arguments. A name is a slot itself.
    slots: dict[Slot, Slot] = {i: i % count for i in range(-count, count)}
    slots.update(zip(names, names, strict=True))
    # An option may give the position of what this call passes by keyword. `inspect` does not bind
    # the call: a decorated function has the signature of what it wraps, and may take more.
    for i, name in enumerate(self._names[count:], count):
      if name in names:
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
    """The roles in calls of `count` arguments by position, and these by name. Checked."""
    split = self._split
    slots = self.signature.slots(count, names)
    every: Sequence[Slot] = (*range(count), *names)

    def find(option, wanted, slots=slots):
      found = []
      for argument in wanted:
        if argument not in slots:
          raise ValueError(_missing(option, argument, count, names))
        found.append(slots[argument])
      # Two spellings of one argument, such as 1 and -1 of two, count once.
      return tuple(dict.fromkeys(found))

    # `jax.value_and_grad` differentiates only what is passed by position.
    positions = {i: i % count for i in range(-count, count)}
    differentiated = find("argnums", self._argnums, positions)
    batch = find("batch_argnums", split.batch)
    rng = find("rng_argnums", split.rng_argnums or ())
    carry = find("carry_argnum", split.carry)
    # No option names the batch: it is the only argument, apart from keys.
    if not batch:
      batch = _only([slot for slot in every if slot not in rng])
    taken = [*differentiated, *batch, *rng, *carry]
    for slot in taken:
      if taken.count(slot) > 1:
        raise ValueError(
          f"Argument {slot!r} has two roles: differentiated are {differentiated}, split {batch},"
          f" random keys {rng}, carried {carry} (batch_argnums=None is {split.batch})."
        )
    # What a step adds has a field of its own; it is not shared.
    taken += split.of_step
    shared = tuple(slot for slot in every if slot not in taken)
    return Roles(batch, rng, carry, differentiated, shared, split.of_step)


def _missing(
  option: str, argument: Slot, count: int, names: Sequence[str]
) -> str:
  """What to say of an option that names an argument that a call does not have."""
  got = f"{count} positional"
  if names:
    got += f" and the keywords {sorted(names)}"
  fix = "Pass it, or change the option"
  if isinstance(argument, str):
    fix = f"A name is a keyword of the call: pass {argument}=..., or give its position"
  return (
    f"{option} names argument {argument!r} of the function, to which this call gives {got}"
    f" arguments (opt_state of a step is none of them). {fix}."
  )


def _only(slots: Sequence[Slot]) -> tuple[Slot, ...]:
  """The only argument that can be the batch."""
  if len(slots) != 1:
    raise ValueError(
      f"batch_argnums=None splits the only argument, and this call has {list(slots)}, of which"
      " any may be the batch: say which, e.g. batch_argnums=1 if argument 0 is the parameters."
    )
  return tuple(slots)
