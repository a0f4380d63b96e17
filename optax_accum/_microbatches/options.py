"""How a function's arguments are split and its outputs weighed: the options, checked."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

from jax.typing import ArrayLike, DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._microbatches.roles import find_slots, names_or_positions, Roles, Slot

# What other libraries, and `accumulate`, call an option, or have one for.
OTHER_NAMES = {
  "every_k": "every_k= is num_microbatches= here, because a call gets the whole batch.",
  "every_k_schedule": "every_k_schedule= of optax.MultiSteps is num_microbatches= here.",
  "gradient_accumulation_steps": "gradient_accumulation_steps= is num_microbatches= here.",
  "flush": "There is nothing to flush: every call runs its whole batch. flush= is an argument of"
  " update and apply of optax_accum.accumulate.",
  "weight": "weight= of optax_accum.accumulate is weight_fn= here, a function of the batch.",
}

# Of a microbatch's part of the batch arguments: how much it counts, a real scalar of 0 or more.
WeightFn: TypeAlias = Callable[..., ArrayLike]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Split:
  """How a function's arguments are split and its outputs weighed; checked when built."""

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  weight_fn: WeightFn | None = None
  batch_argnums: Any = None  # once built a tuple or None, as all `*_argnums`
  rng_argnums: Any = None
  carry_argnum: int | None = None
  skip_nonfinite: bool = False
  skip_empty: bool = False
  axis_name: AxisName | None = None
  in_place: bool = False
  accumulator_dtype: DTypeLike | None = None
  unroll: int | bool = 1
  carry_reduction: Tree = None
  batch_axis: Any = 0  # as built, one for each position and then for each name
  batch_argnames: Any = ()
  rng_argnames: Any = ()
  default_argnum: int | None = None  # what `batch_argnums=None` is; None: the only argument
  rows: int | None = None  # of the batch on all devices of a mesh, of which a call has a part

  def __post_init__(self) -> None:
    _validate.booleans(
      skip_nonfinite=self.skip_nonfinite, skip_empty=self.skip_empty, in_place=self.in_place
    )
    if (self.num_microbatches is None) == (self.microbatch_size is None):
      raise ValueError(
        f"num_microbatches={self.num_microbatches!r} and microbatch_size={self.microbatch_size!r}:"
        " give exactly one of the two, by name (num_microbatches=1 is the whole batch at once)."
      )
    for name in ("num_microbatches", "microbatch_size"):
      if (given := getattr(self, name)) is not None:
        setattr(self, name, _validate.positive_int(name, given))
    for name in ("batch_argnums", "batch_argnames", "rng_argnums", "rng_argnames"):
      kind = int if name.endswith("nums") else str
      if (given := getattr(self, name)) is not None:
        setattr(self, name, names_or_positions(name, given, kind))
    if self.batch_argnums == () and not self.batch_argnames:
      raise ValueError("batch_argnums and batch_argnames are both empty: name what is split.")
    if self.weight_fn is not None and not callable(self.weight_fn):
      raise TypeError(f"weight_fn={self.weight_fn!r} must be a function of the batch, or None.")
    if self.skip_empty and self.weight_fn is None:
      raise ValueError("skip_empty=True needs weights, and weight_fn=None: give weight_fn.")
    if self.carry_argnum is not None and type(self.carry_argnum) is not int:
      raise TypeError(f"carry_argnum={self.carry_argnum!r} must be an int: one position, or None.")
    if self.carry_reduction is not None and self.carry_argnum is None:
      raise ValueError(
        f"carry_reduction={self.carry_reduction!r} asks for a carry: give carry_argnum, or leave"
        " it out."
      )
    for name, word in _validate.named_leaves("carry_reduction", self.carry_reduction):
      _validate.one_of(name, word, ("mean", "max", "min", "sum"))
    given = self.batch_argnums
    if given is None and self.default_argnum is not None:
      given = (self.default_argnum,)
    self._batch: tuple[Slot, ...] = (*(given or ()), *self.batch_argnames)
    axes, count = self.batch_axis, len(self._batch) or 1
    self.batch_axis = axes if isinstance(axes, tuple) else (axes,) * count
    if any(type(axis) is not int for axis in self.batch_axis):
      raise TypeError(f"batch_axis={axes!r} must be an int, or one for each batch argument.")
    if len(self.batch_axis) != count:
      raise ValueError(
        f"batch_axis={axes!r} has {len(axes)} axes for {count} batch arguments {self._batch}: give"
        " one for each, or one int."
      )
    self.accumulator_dtype = dtypes.check_accumulator_dtype(self.accumulator_dtype)

  @classmethod
  def of(cls, arguments: dict[str, Any], default_argnum: int | None = None) -> "Split":
    """The split that a public function was asked for, from all its arguments by name."""
    names = arguments.keys() & {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: arguments[name] for name in names}, default_argnum=default_argnum)

  @property
  def weighs(self) -> bool:
    """Whether a microbatch's weight is known only when it has run."""
    return self.weight_fn is not None or self.skip_nonfinite

  def roles(
    self, fun: Callable[..., Tree], args: Args, kwargs: Kwargs, differentiated: Sequence[Slot] = ()
  ) -> Roles:
    """What each argument is in this call of `fun`."""
    arguments: dict[Slot, Tree] = dict(enumerate(args))
    arguments.update(kwargs)
    find = functools.partial(find_slots, fun=fun, args=args, kwargs=kwargs)
    batch = find("batch_argnums", self._batch)
    rng = find("rng_argnums", (*(self.rng_argnums or ()), *self.rng_argnames))
    carry = find("carry_argnum", () if self.carry_argnum is None else (self.carry_argnum,))
    if not batch:
      batch = tuple(slot for slot in arguments if slot not in rng)
      if len(batch) != 1:
        raise ValueError(
          f"batch_argnums=None splits the only argument, and this call has {list(batch)}, of which"
          " any may be the batch: say which, e.g. batch_argnums=1 if argument 0 is the parameters."
        )
    axes: dict[Slot, int] = {}
    for slot, axis in zip(batch, self.batch_axis, strict=True):
      if axes.setdefault(slot, axis) != axis:
        raise ValueError(f"Argument {slot!r} is named twice, with batch_axis {axes[slot]}, {axis}.")
    rng = tuple(dict.fromkeys(rng))  # as the batch, named by position and by name
    taken: dict[Slot, str] = {}
    named = {"differentiated": differentiated, "split": axes, "a random key": rng, "carried": carry}
    for slot, role in ((slot, role) for role, slots in named.items() for slot in slots):
      if slot in taken:
        raise ValueError(f"Argument {slot!r} is both {taken[slot]} and {role}: name it once.")
      taken[slot] = role
    shared = {slot: x for slot, x in arguments.items() if slot not in taken}
    return Roles(axes, rng, carry, shared)
