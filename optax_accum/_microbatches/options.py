"""How a function's arguments are split and its outputs weighed: the options, and each one's role.

That a shared argument should be split too, or is a key, changes no shape: the defaults refuse both.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf, Tree

# Where an argument of a call is: its position, or its name where it is passed by name.
Slot: TypeAlias = int | str

# What other libraries call the number of microbatches.
COUNTS = (
  *(
    "every_k_schedule",
    "gradient_accumulation_steps",
    "accum_steps",
    "accumulation_steps",
  ),
  *("accumulate_grad_batches", "num_micro_batches", "num_minibatches"),
)
# What other libraries, and `accumulate`, call an option, or have one for.
OTHER_NAMES = {
  **{name: f"{name}= is num_microbatches= here." for name in COUNTS},
  "every_k": "every_k= is num_microbatches= here, because a call gets the whole batch.",
  "argnums": "argnums= is for microbatch_value_and_grad: a step differentiates by its parameters.",
  "rngs": "rngs= is rng_argnums= here, the positions of keys in the arguments of the function.",
  "mutable": "mutable= is carry_argnum= here, the position of what each microbatch updates.",
  "unroll": "unroll= is gone: microbatches run in one loop, as it is.",
  "concat_axis": 'concat_axis= is gone: "concat" joins the first axis of an output. Move the rows'
  " there in the function by jnp.moveaxis.",
  "donate_argnums": "donate_argnums= is donate= of make_train_step, a bool.",
  "flush": "There is nothing to flush: every call runs its whole batch. flush= is an argument of"
  " update and apply of optax_accum.accumulate.",
  "weight": "weight= of optax_accum.accumulate is weight_fn= here, a function of the batch.",
}

# Of a microbatch's part of the batch arguments: how much it counts, a real scalar of 0 or more.
WeightFn: TypeAlias = Callable[..., ArrayLike]


class Roles(NamedTuple):
  """Where the arguments of each role are in a call."""

  batch: dict[Slot, int]  # what is split, and the axis of its rows
  rng: tuple[Slot, ...]
  carry: tuple[Slot, ...]  # one at most
  shared: dict[
    Slot, Tree
  ]  # what every microbatch gets in full, and no gradient is taken of


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
  carry_reduction: Tree = None
  batch_axis: Any = 0  # as built, one for each position and then for each name
  batch_argnames: Any = ()
  rng_argnames: Any = ()
  default_argnum: int | None = (
    None  # what `batch_argnums=None` is; None: the only argument
  )
  names: Mapping[Slot, str] = dataclasses.field(
    default_factory=dict
  )  # of arguments, in messages
  rows: int | None = (
    None  # of the batch on all devices of a mesh, if a call has a part of it
  )

  def __post_init__(self) -> None:
    _validate.booleans(
      skip_nonfinite=self.skip_nonfinite,
      skip_empty=self.skip_empty,
      in_place=self.in_place,
    )
    if (self.num_microbatches is None) == (self.microbatch_size is None):
      raise ValueError(
        f"num_microbatches={self.num_microbatches!r} and microbatch_size={self.microbatch_size!r}:"
        " give exactly one of the two, by name (num_microbatches=1 is the whole batch at once)."
      )
    for name in ("num_microbatches", "microbatch_size"):
      if (given := getattr(self, name)) is not None:
        setattr(self, name, _validate.positive_int(name, given))
    for name in (
      "batch_argnums",
      "batch_argnames",
      "rng_argnums",
      "rng_argnames",
    ):
      kind = int if name.endswith("nums") else str
      if (given := getattr(self, name)) is not None:
        setattr(self, name, names_or_positions(name, given, kind))
    if self.batch_argnums == () and not self.batch_argnames:
      raise ValueError(
        "batch_argnums and batch_argnames are both empty: name what is split."
      )
    if self.weight_fn is not None and not callable(self.weight_fn):
      raise TypeError(
        f"weight_fn={self.weight_fn!r} must be a function of the batch, or None."
      )
    if self.skip_empty and self.weight_fn is None:
      raise ValueError(
        "skip_empty=True needs weights, and weight_fn=None: give weight_fn."
      )
    if self.carry_argnum is not None and type(self.carry_argnum) is not int:
      raise TypeError(
        f"carry_argnum={self.carry_argnum!r} must be an int: one position, or None."
      )
    if self.carry_reduction is not None and self.carry_argnum is None:
      raise ValueError(
        f"carry_reduction={self.carry_reduction!r} asks for a carry: give carry_argnum, or leave"
        " it out."
      )
    for name, word in _validate.named_leaves(
      "carry_reduction", self.carry_reduction
    ):
      _validate.one_of(name, word, ("mean", "max", "min", "sum"))
    default = () if self.default_argnum is None else (self.default_argnum,)
    positions = default if self.batch_argnums is None else self.batch_argnums
    self._batch: tuple[Slot, ...] = (*positions, *self.batch_argnames)
    axes, count = self.batch_axis, len(self._batch) or 1
    self.batch_axis = axes if isinstance(axes, tuple) else (axes,) * count
    if any(type(axis) is not int for axis in self.batch_axis):
      raise TypeError(
        f"batch_axis={axes!r} must be an int, or one for each batch argument."
      )
    if len(self.batch_axis) != count:
      raise ValueError(
        f"batch_axis={axes!r} has {len(axes)} axes for {count} batch arguments {self._batch}: give"
        " one for each, or one int. All arrays of an argument have their rows on one axis: move"
        " those of others there, by jnp.moveaxis, and back in the loss."
      )
    self.accumulator_dtype = dtypes.check_accumulator_dtype(
      self.accumulator_dtype
    )

  @classmethod
  def of(
    cls, arguments: dict[str, Any], default_argnum: int | None = None
  ) -> "Split":
    """The split that a public function was asked for, from all its arguments by name."""
    names = arguments.keys() & {field.name for field in dataclasses.fields(cls)}
    return cls(
      **{name: arguments[name] for name in names}, default_argnum=default_argnum
    )

  @property
  def weighs(self) -> bool:
    """Whether a microbatch's weight is known only when it has run."""
    return self.weight_fn is not None or self.skip_nonfinite

  def name(self, *slots: Slot) -> str:
    """How messages name arguments of a call."""
    return " and ".join(
      self.names.get(slot, f"argument {slot!r}") for slot in slots
    )

  def roles(
    self,
    fun: Callable[..., Tree],
    args: Args,
    kwargs: Kwargs,
    differentiated: Sequence[Slot] = (),
  ) -> Roles:
    """What each argument is in this call of `fun`."""
    arguments: dict[Slot, Tree] = dict([*enumerate(args), *kwargs.items()])
    find = functools.partial(find_slots, fun=fun, args=args, kwargs=kwargs)
    batch = find("batch_argnums", self._batch)
    rng = find("rng_argnums", (*(self.rng_argnums or ()), *self.rng_argnames))
    carry = find(
      "carry_argnum", () if self.carry_argnum is None else (self.carry_argnum,)
    )
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
        raise ValueError(
          f"Argument {slot!r} is named twice, with batch_axis {axes[slot]}, {axis}."
        )
    rng = tuple(
      dict.fromkeys(rng)
    )  # as the batch, named by position and by name
    taken: dict[Slot, str] = {}
    named = {
      "differentiated": differentiated,
      "split": axes,
      "a random key": rng,
      "carried": carry,
    }
    shared = {
      k: x
      for k, x in arguments.items()
      if not any(k in slots for slots in named.values())
    }
    for slot, role in (
      (slot, role) for role, slots in named.items() for slot in slots
    ):
      if slot in taken:
        fix = "name it once"
        if self.batch_argnums is None and "split" in (role, taken[slot]):
          fix = _other_batch(shared)
        raise ValueError(
          f"Argument {slot!r} is both {taken[slot]} and {role}: {fix}."
        )
      taken[slot] = role
    return Roles(axes, rng, carry, shared)

  def refuse_key(self, roles: Roles, arguments: Mapping[Slot, Tree]) -> None:
    """Refuses a random key in the place of the batch, which a raw one could be."""
    if self.batch_argnums is not None or self.default_argnum is None:
      return
    slot = next(iter(roles.batch))
    named = _validate.named_leaves(self.name(slot), arguments[slot])
    # Numbers that could be those of a raw key are one if something else can be the batch.
    may_be_raw = bool(_arrays_in(roles.shared))
    if named and all(
      _is_one_key(x) and (may_be_raw or dtypes.is_key(x)) for _, x in named
    ):
      name, key = named[0]
      raise ValueError(
        f"{name} is a random key, {_validate.type_of(key)}:"
        f" {_other_batch(roles.shared)}, and the key, {_rng_option(slot)}. If it is the batch, say"
        f" so, {_option([slot])}."
      )


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
    for name, leaf in _validate.named_leaves(
      f"argument {slot!r}", tree, dtypes.is_sparse
    )
    if (has := _has_rows(roles.batch.values(), leaf, rows))
  ]


def refuse_aux_rows(roles: Roles, name: str, leaf: Leaf, rows: int) -> None:
  """Refuses an aux with a value for each of the microbatch's `rows`, if it has several."""
  axes = (
    *roles.batch.values(),
    0,
  )  # rows of outputs are mostly on the first, whatever the batch's
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
  same = [
    axis for axis in axes if shape and shape[axis] in rows and shape[axis] > 1
  ]
  return f"has {shape[same[0]]} rows on axis {same[0]}" if same else ""


def refuse_keys(roles: Roles) -> None:
  """Refuses shared arguments with a typed key."""
  for slot in with_keys(roles):
    leaves = _validate.named_leaves(f"argument {slot!r}", roles.shared[slot])
    keys = [name for name, leaf in leaves if dtypes.is_key(leaf)]
    fix = f"name it, {_rng_option(slot)}, to fold each microbatch's index in"
    if len(keys) < len(leaves):
      fix = "pass it as an argument of its own, named in rng_argnums, or carry all (carry_argnum)"
    raise ValueError(
      f"{keys[0]} is a random key, from which every microbatch would get the same noise: {fix}; or"
      " share it, rng_argnums=()."
    )


def with_keys(roles: Roles) -> list[Slot]:
  """The shared arguments with a typed key."""
  return [
    slot
    for slot, x in roles.shared.items()
    if any(map(dtypes.is_key, jax.tree.leaves(x)))
  ]


def _is_one_key(x: Leaf) -> bool:
  """Whether `x` is a random key, typed or raw."""
  is_raw = getattr(x, "dtype", None) == jnp.uint32 and x.shape in ((2,), (4,))
  return is_raw or (dtypes.is_key(x) and not x.shape)


def _other_batch(shared: Mapping[Slot, Tree]) -> str:
  """What to write where the argument that is split by default is not the batch."""
  slots = _arrays_in(shared)
  option = _option(slots) if slots else "batch_argnums=..."
  which = ", or those of these that have its rows" if len(slots) > 1 else ""
  return f"batch_argnums=None splits it, so name the batch, {option}{which}"


def _arrays_in(shared: Mapping[Slot, Tree]) -> Collection[Slot]:
  """The arguments with an array that may be a batch, and is no key."""
  leaves = [
    (slot, x) for slot, tree in shared.items() for x in jax.tree.leaves(tree)
  ]
  return dict.fromkeys(
    k for k, x in leaves if getattr(x, "shape", ()) and not _is_one_key(x)
  )


def _rng_option(slot: Slot) -> str:
  """The option that says that an argument is a random key."""
  return (
    f"{'rng_argnums' if isinstance(slot, int) else 'rng_argnames'}={slot!r}"
  )


def _option(slots: Collection[Slot]) -> str:
  """The options that split these arguments."""
  argnums = tuple(slot for slot in slots if isinstance(slot, int))
  argnames = tuple(slot for slot in slots if isinstance(slot, str))
  option = f"batch_argnums={argnums[0] if len(argnums) == 1 else argnums!r}"
  return option + (f" with batch_argnames={argnames!r}" if argnames else "")


def note_on_settings(
  error: Exception, fun: Callable[..., Tree], roles: Roles
) -> str:
  """What to add to an error, if Python asked for the value of an argument that is traced."""
  scalars = [
    name_of(fun, slot)
    for slot, tree in roles.shared.items()
    if any(getattr(leaf, "shape", ()) == () for leaf in jax.tree.leaves(tree))
  ]
  if (
    not scalars or "trace" not in str(error).lower()
  ):  # which JAX says wherever that is
    return ""
  fixed = ", ".join(f"{name}=..." for name in scalars)
  return (
    "A step traces all its arguments, so Python cannot branch on them, nor can they be static. Fix"
    f" a setting in the loss, functools.partial(loss_fn, {fixed}), and make a step for each value."
  )


def names_or_positions(
  option: str, value: object, kind: type
) -> tuple[Slot, ...]:
  """One or several positions (or names) as a tuple."""
  values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  if not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
    word = "positions (ints)" if kind is int else "names (strings)"
    raise TypeError(f"{option}={value!r} must hold {word} of arguments.")
  return values


def find_slots(
  option: str,
  wanted: Collection[Slot],
  fun: Callable[..., Tree],
  args: Args,
  kwargs: Kwargs,
) -> tuple[Slot, ...]:
  """Where the wanted arguments are in this call; wanted by position, they may be passed by name."""
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
      got = f"{count} positional" + (
        f" and the keywords {sorted(kwargs)}" if kwargs else ""
      )
      name = (
        option if isinstance(argument, int) else option.replace("nums", "names")
      )
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
  named, positional = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
  )
  return [
    p.name if p.kind is named else ""
    for p in parameters
    if p.kind in (named, positional)
  ]
