"""How a function's arguments are split and its outputs weighed: the options, checked."""

from collections.abc import Callable, Mapping
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

# Of a microbatch's part of the batch arguments: how much it counts, a real scalar of 0 or more.
WeightFn: TypeAlias = Callable[..., ArrayLike]


@dataclasses.dataclass(kw_only=True, frozen=True, eq=False, repr=False)
class Split:
  """How a function's arguments are split and its outputs weighed."""

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  weight_fn: WeightFn | None = None
  has_weight: bool = False  # whether a loss returns a total and its weight
  batch_argnums: tuple[int, ...] | None = None
  rng_argnums: tuple[int, ...] | None = None
  carry_argnum: int | None = None
  skip_nonfinite: bool = False
  skip_empty: bool = False
  virtual_devices: int | None = None
  axis_name: AxisName | None = None
  in_place: bool = False
  accumulator_dtype: DTypeLike | None = None
  carry_reduction: Tree = None
  # One for each position and then for each name.
  batch_axis: tuple[int, ...] = (0,)
  batch_argnames: tuple[str, ...] = ()
  rng_argnames: tuple[str, ...] = ()
  # What `batch_argnums=None` is; None: the only argument.
  default_argnum: int | None = None
  # Of arguments, in messages.
  names: Mapping[Slot, str] = dataclasses.field(default_factory=dict)
  # What to write instead, by the verdict of `check`, where a step calls its loss in its own way.
  fixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # What such a step gives its loss beside the user's arguments, and nothing refuses.
  held: tuple[Slot, ...] = ()
  # Of the batch on all devices of a mesh, if a call has a part of it.
  rows: int | None = None
  # Whether a call has a part of the cycle's microbatches, of any number of rows.
  in_parts: bool = False

  @classmethod
  def of(
    cls, asked: Mapping[str, Any], default_argnum: int | None = None
  ) -> "Split":
    """The split that a public function was asked for, from all its arguments by name. Checked."""
    known = {field.name for field in dataclasses.fields(cls)}
    given = {name: x for name, x in asked.items() if name in known}
    given["default_argnum"] = default_argnum
    for name in ("num_microbatches", "microbatch_size", "virtual_devices"):
      if given.get(name) is not None:
        given[name] = _validate.positive_int(name, given[name])
    for name, kind in _ARGUMENTS.items():
      if given.get(name) is not None:
        given[name] = names_or_positions(name, given[name], kind)
    dtype = given.get("accumulator_dtype")
    given["accumulator_dtype"] = dtypes.check_accumulator_dtype(dtype)
    axes = given.pop("batch_axis", 0)
    split = cls(**given)
    _check(split)
    return dataclasses.replace(split, batch_axis=_axes_of(axes, split.batch))

  @property
  def batch(self) -> tuple[Slot, ...]:
    """What is split, as options name it; empty if that is the only argument."""
    positions = self.batch_argnums
    if positions is None:
      positions = () if self.default_argnum is None else (self.default_argnum,)
    return *positions, *self.batch_argnames

  @property
  def rng(self) -> tuple[Slot, ...]:
    """The random keys, as options name them."""
    return *(self.rng_argnums or ()), *self.rng_argnames

  @property
  def carry(self) -> tuple[Slot, ...]:
    """What is carried, as an option names it."""
    return () if self.carry_argnum is None else (self.carry_argnum,)

  @property
  def devices(self) -> Devices:
    """The devices that the rows are spread over."""
    return devices_of(self.axis_name, self.virtual_devices)

  @property
  def weighs(self) -> bool:
    """Whether a microbatch's weight is known only when it has run."""
    if self.weight_fn is not None or self.has_weight:
      return True
    return self.skip_nonfinite or self.in_parts

  def name(self, *slots: Slot) -> str:
    """How messages name arguments of a call."""
    named = [self.names.get(slot, f"argument {slot!r}") for slot in slots]
    return " and ".join(named)


_ARGUMENTS = {
  "batch_argnums": int,
  "batch_argnames": str,
  "rng_argnums": int,
  "rng_argnames": str,
}


def names_or_positions(
  option: str, value: object, kind: type
) -> tuple[Any, ...]:
  """One or several positions (or names) as a tuple."""
  values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  if not all(isinstance(x, kind) and type(x) is not bool for x in values):
    word = "positions (ints)" if kind is int else "names (strings)"
    raise TypeError(f"{option}={value!r} must hold {word} of arguments.")
  return values


def _check(split: Split) -> None:
  """Checks the options, of which the counts and the names of arguments have been."""
  _validate.booleans(
    has_weight=split.has_weight,
    skip_nonfinite=split.skip_nonfinite,
    skip_empty=split.skip_empty,
    in_place=split.in_place,
  )
  if (split.num_microbatches is None) == (split.microbatch_size is None):
    raise ValueError(
      f"num_microbatches={split.num_microbatches!r} and microbatch_size={split.microbatch_size!r}:"
      " give exactly one of the two, by name (num_microbatches=1 is the whole batch at once)."
    )
  if split.batch_argnums == () and not split.batch_argnames:
    raise ValueError(
      "batch_argnums and batch_argnames are both empty: name what is split."
    )
  if split.weight_fn is not None and not callable(split.weight_fn):
    raise TypeError(
      f"weight_fn={split.weight_fn!r} must be a function of the batch, or None."
    )
  if split.skip_empty and split.weight_fn is None:
    raise ValueError(
      "skip_empty=True needs weights before microbatches run, and weight_fn=None: give weight_fn"
      " (and not has_weight, which tells them afterwards)."
    )
  if split.has_weight and split.weight_fn is not None:
    raise ValueError(
      "has_weight=True has the loss return its weight, and weight_fn counts it a second time: leave"
      " one of them out."
    )
  if split.carry_argnum is not None and type(split.carry_argnum) is not int:
    raise TypeError(
      f"carry_argnum={split.carry_argnum!r} must be an int: one position, or None."
    )
  if split.carry_reduction is not None and split.carry_argnum is None:
    raise ValueError(
      f"carry_reduction={split.carry_reduction!r} asks for a carry: give carry_argnum, or leave"
      " it out."
    )
  words = _validate.named_leaves("carry_reduction", split.carry_reduction)
  for name, word in words:
    _validate.one_of(name, word, ("mean", "max", "min", "sum"))

  check_virtual(split)


def check_virtual(split: Split) -> None:
  """Checks the number of virtual devices, and what they are given with."""
  count = split.virtual_devices
  if count is None:
    return
  if count & (count - 1):
    raise ValueError(
      f"virtual_devices={count} is no power of two, and sums are taken in a tree of pairs: use 2,"
      " 4, 8 or another power of two, which the devices that you train on divide."
    )
  if split.in_place:
    raise ValueError(
      f"virtual_devices={count} keeps a sum for each virtual device, and in_place=True has one that"
      " all microbatches of a device are added to: leave one of them out."
    )
  size = split.microbatch_size
  if size is not None and size % count:
    raise ValueError(
      f"microbatch_size={size} counts the rows on all virtual_devices={count} together, which do"
      f" not divide it: use a multiple of {count}."
    )
  if split.axis_name is not None:
    raise ValueError(
      f"virtual_devices={count} is for a step that is called outside pmap and shard_map, and"
      f" axis_name={split.axis_name!r} for one inside: make the step with mesh=, or without."
    )


def _axes_of(asked, batch: tuple[Slot, ...]) -> tuple[int, ...]:
  """The axis of the rows of each batch argument."""
  count = len(batch) or 1
  axes = asked if isinstance(asked, tuple) else (asked,) * count
  if any(type(axis) is not int for axis in axes):
    raise TypeError(
      f"batch_axis={asked!r} must be an int, or one for each batch argument."
    )
  if len(axes) != count:
    raise ValueError(
      f"batch_axis={asked!r} has {len(asked)} axes for {count} batch arguments {batch}: give"
      " one for each, or one int. All arrays of an argument have their rows on one axis: move"
      " those of others there, by jnp.moveaxis, and back in the loss."
    )
  return axes
