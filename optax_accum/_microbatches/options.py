"""How a function's arguments are split and its outputs weighed: the options, checked."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, TypeAlias

from jax.typing import ArrayLike, DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.devices import Devices, devices_of
from optax_accum._arithmetic.trees import Tree

# Where an argument of a call is: its position, or its name where it is passed by name.
Slot: TypeAlias = int | str
# What an option takes to name arguments: one or several slots.
Slots: TypeAlias = Slot | Sequence[Slot] | None

# Of a microbatch's part of the batch arguments: how much it counts, a real scalar of 0 or more.
WeightFn: TypeAlias = Callable[..., ArrayLike]


@dataclasses.dataclass(kw_only=True, frozen=True, eq=False, repr=False)
class Split:
  """How a function's arguments are split and its outputs weighed."""

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  weight_fn: WeightFn | None = None
  has_weight: bool = False  # whether a loss returns a total and its weight
  batch_argnums: tuple[Slot, ...] | None = None
  rng_argnums: tuple[Slot, ...] | None = None
  carry_argnum: int | None = None
  carry_reduction: Tree = None
  skip_nonfinite: bool = False
  axis_name: AxisName | None = None
  in_place: bool = False
  accumulator_dtype: DTypeLike | None = None
  # What `batch_argnums=None` is; None: the only argument.
  default_argnum: int | None = None
  # Of arguments, in messages.
  names: Mapping[Slot, str] = dataclasses.field(default_factory=dict)
  # What to write instead, by the verdict of `check`, where a step calls its loss in its own way.
  fixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # What such a step gives its loss in addition to what the user passes. Neither rows nor keys in
  # it are refused, because no option of the user could name it.
  of_step: tuple[Slot, ...] = ()
  # Whether a call has a part of the cycle's microbatches, of any number of rows.
  in_parts: bool = False

  @classmethod
  def of(
    cls, asked: Mapping[str, Any], default_argnum: int | None = None
  ) -> "Split":
    """The split that a public function was asked for, from all its arguments by name. Checked."""
    known = {field.name for field in dataclasses.fields(cls)}
    # A public function has other arguments too, which are not of the split.
    given = {name: x for name, x in asked.items() if name in known}
    given["default_argnum"] = default_argnum
    for name in ("num_microbatches", "microbatch_size"):
      if given.get(name) is not None:
        given[name] = _validate.positive_int(name, given[name])
    for name in ("batch_argnums", "rng_argnums"):
      if given.get(name) is not None:
        given[name] = slots_of(given[name])
    dtype = given.get("accumulator_dtype")
    given["accumulator_dtype"] = dtypes.requested_dtype(dtype)
    split = cls(**given)
    _check(split)
    return split

  @property
  def batch(self) -> tuple[Slot, ...]:
    """What is split, as options name it; empty if that is the only argument."""
    if self.batch_argnums is not None:
      return self.batch_argnums
    if self.default_argnum is None:
      return ()
    return (self.default_argnum,)

  @property
  def carry(self) -> tuple[Slot, ...]:
    """What is carried, as an option names it."""
    if self.carry_argnum is None:
      return ()
    return (self.carry_argnum,)

  @property
  def devices(self) -> Devices:
    """The devices that the rows are spread over."""
    return devices_of(self.axis_name)

  @property
  def weighs(self) -> bool:
    """Whether weights are known only when a program runs."""
    return self.weight_fn is not None or self.has_weight

  @property
  def counts(self) -> bool:
    """Whether the sum of the weights is known only when a program runs."""
    return self.weighs or self.skip_nonfinite or self.in_parts

  def name(self, *slots: Slot) -> str:
    """How messages name arguments of a call."""
    named = [self.names.get(slot, f"argument {slot!r}") for slot in slots]
    return " and ".join(named)


def slots_of(value) -> tuple[Any, ...]:
  """One or several positions or names as a tuple."""
  if isinstance(value, (tuple, list)):
    return tuple(value)
  return (value,)


def _check(split: Split) -> None:
  """Checks the options, after `Split.of` has checked each of the counts."""
  if (split.num_microbatches is None) == (split.microbatch_size is None):
    raise ValueError(
      f"num_microbatches={split.num_microbatches!r} and microbatch_size={split.microbatch_size!r}:"
      " give exactly one of the two, by name (num_microbatches=1 is the whole batch at once)."
    )
  if split.has_weight and split.weight_fn is not None:
    raise ValueError(
      "has_weight=True has the loss return its weight, and weight_fn counts it a second time: leave"
      " one of them out."
    )
  if split.carry_reduction is not None and split.carry_argnum is None:
    raise ValueError(
      f"carry_reduction={split.carry_reduction!r} asks for a carry: give carry_argnum, or leave"
      " it out."
    )
  # One word, or a tree of words for the leaves of the carry. A None has no leaves.
  words = _validate.named_leaves("carry_reduction", split.carry_reduction)
  for name, word in words:
    # Steps of Flax have "" for what has the default, beside words of their own.
    if word != "":
      _validate.one_of(name, word, ("mean", "max", "min", "sum"))
