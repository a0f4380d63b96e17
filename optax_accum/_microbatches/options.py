"""How a batch is cut into microbatches, and the key, the carry and the weight of each."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.skip import leave_out
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import cut, keys_and_carry
from optax_accum._microbatches.arguments import (
  check_disjoint,
  find_slots,
  names_or_positions,
  only_argument,
  Slot,
)
from optax_accum._microbatches.roles import refuse_aux_rows, refuse_keys, refuse_rows, Roles

# Of a microbatch's part of the batch arguments: how much it counts, a real scalar of 0 or more.
WeightFn: TypeAlias = Callable[..., ArrayLike]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Split:
  """How a function's arguments are split and its outputs weighed; checked when built."""

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  batch_argnums: Any = None
  batch_argnames: Any = ()
  batch_axis: Any = 0  # as built, one for each of `batch_positions` and then of the names
  weight_fn: WeightFn | None = None
  rng_argnums: Any = None
  rng_argnames: Any = ()
  carry_argnum: int | None = None
  carry_reduction: Any = None
  accumulator_dtype: Any = None
  skip_nonfinite: bool = False
  skip_empty: bool = False
  in_place: bool = False
  axis_name: Any = None
  unroll: int | bool = 1
  default_argnum: int | None = None  # what `batch_argnums=None` is; None: the only argument
  rows: int | None = None  # of the batch on all devices of a mesh, of which a call has a part

  def __post_init__(self) -> None:
    _validate.booleans(
      skip_nonfinite=self.skip_nonfinite, skip_empty=self.skip_empty, in_place=self.in_place
    )
    if (self.num_microbatches is None) == (self.microbatch_size is None):
      raise ValueError(
        f"Got num_microbatches={self.num_microbatches!r} and"
        f" microbatch_size={self.microbatch_size!r}: give exactly one of the two"
        " (num_microbatches=1 is the whole batch at once)."
      )
    for name in ("num_microbatches", "microbatch_size"):
      if getattr(self, name) is not None:
        setattr(self, name, _validate.positive_int(name, getattr(self, name)))
    for role in ("batch", "rng"):
      for kind, type_ in (("argnums", int), ("argnames", str)):
        name = f"{role}_{kind}"
        if getattr(self, name) is not None:
          setattr(self, name, names_or_positions(name, getattr(self, name), type_))
    if self.batch_argnums == () and not self.batch_argnames:
      raise ValueError("batch_argnums and batch_argnames are both empty: name what is split.")
    if self.weight_fn is not None and not callable(self.weight_fn):
      raise TypeError(f"weight_fn={self.weight_fn!r} must be a function of the batch, or None.")
    if self.skip_empty and self.weight_fn is None:
      raise ValueError(
        "skip_empty=True does not run microbatches of weight zero, and weight_fn=None counts rows,"
        " of which each has some: give weight_fn."
      )
    if self.carry_argnum is not None and type(self.carry_argnum) is not int:
      raise TypeError(f"carry_argnum={self.carry_argnum!r} must be an int: one position, or None.")
    keys_and_carry.check_words(self.carry_reduction, self.carry_argnum)
    self.batch_axis = self._axes()
    self.accumulator_dtype = dtypes.check_accumulator_dtype(self.accumulator_dtype)

  @classmethod
  def of(cls, arguments: dict[str, Any], default_argnum: int | None = None) -> "Split":
    """The split that a public function was asked for, from all its arguments by name."""
    names = [field.name for field in dataclasses.fields(cls)]
    given = {name: arguments[name] for name in names if name in arguments}
    return cls(**given, default_argnum=default_argnum)

  @property
  def weighs(self) -> bool:
    """Whether a microbatch's weight is known only when it has run."""
    return self.weight_fn is not None or self.skip_nonfinite

  @property
  def leaves_out(self) -> bool:
    """Whether a microbatch of weight zero is not run."""
    return self.skip_empty or (self.in_place and self.weighs)

  @property
  def batch_positions(self) -> tuple[int, ...]:
    """The positions that are split, given or by default."""
    if self.batch_argnums is not None:
      return self.batch_argnums
    return () if self.default_argnum is None else (self.default_argnum,)

  def _axes(self) -> tuple[int, ...]:
    """The axis that is split, of each argument that is named."""
    axes, count = self.batch_axis, len(self.batch_positions) + len(self.batch_argnames) or 1
    if any(type(axis) is not int for axis in (axes if isinstance(axes, tuple) else (axes,))):
      raise TypeError(
        f"batch_axis={axes!r} must be an int, the axis of every leaf, or a tuple with one for each"
        " batch argument."
      )
    if isinstance(axes, int):
      return (axes,) * count
    if len(axes) != count:
      raise ValueError(
        f"batch_axis={axes!r} has {len(axes)} axes for {count} batch arguments (positions"
        f" {self.batch_positions}, then names {self.batch_argnames}): give one for each, or one int"
        " for all."
      )
    return axes

  def roles(
    self, fun: Callable[..., Any], args: Any, kwargs: Any, differentiated: Sequence[Slot] = ()
  ) -> Roles:
    """What each argument is in this call of `fun`."""

    def find(option: str, *wanted: Slot) -> tuple[Slot, ...]:
      return find_slots(option, wanted, fun, args, kwargs)

    arguments: dict[Slot, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    rng = find("rng_argnums", *(self.rng_argnums or ()), *self.rng_argnames)
    carry = find("carry_argnum", *(() if self.carry_argnum is None else (self.carry_argnum,)))
    batch = find("batch_argnums", *self.batch_positions, *self.batch_argnames)
    batch = batch or only_argument("batch_argnums", [s for s in arguments if s not in rng])
    axes: dict[Slot, int] = {}
    for slot, axis in zip(batch, self.batch_axis, strict=True):
      if axes.setdefault(slot, axis) != axis:
        raise ValueError(f"Argument {slot!r} is named twice, with batch_axis {axes[slot]}, {axis}.")
    rng = tuple(dict.fromkeys(rng))  # as the batch, named by position and by name
    roles = {"differentiated": differentiated, "split": tuple(axes)}
    roles |= {"a random key": rng, "carried": carry}
    check_disjoint(roles)
    taken = {slot for slots in roles.values() for slot in slots}
    shared = {slot: x for slot, x in arguments.items() if slot not in taken}
    return Roles(axes, rng, carry, shared)


# Cuts one microbatch out of the batch arguments.
Take: TypeAlias = Callable[[], tuple[Any, ...]]


class Microbatch(NamedTuple):
  """What one microbatch gave."""

  carry: tuple[Any, ...]  # the threaded argument; empty where there is none
  outputs: Any
  weight: Any  # None where it is known when tracing
  skipped: Any  # 1 if it was left out, None where none can be


class Call:
  """One call of a function that is run in microbatches, and what each of them is given.

  `fun` is the user's function, whose signature says what the arguments are called. `run_fun` is
  what runs: it takes a factor for the gradients, None where they are weighed later, and the same
  arguments, and returns ``(new_carry, outputs)``. `weights` are those of the microbatches, where
  they are known from a call before.
  """

  def __init__(
    self,
    fun: Callable[..., Any],
    run_fun: Callable[..., tuple[Any, Any]],
    split: Split,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    differentiated: Sequence[int] = (),
    weights: jax.Array | None = None,
  ):
    self._run_fun, self._num_args, self.split, self.weights = run_fun, len(args), split, weights
    self._functions: dict[float | None, Any] = {}
    self._arguments: dict[Slot, Any] = dict(enumerate(args))
    self._arguments.update(kwargs)
    self._roles = roles = split.roles(fun, args, kwargs, differentiated)
    self.batch = tuple(self._arguments[slot] for slot in roles.batch)
    self.rows = cut.batch_rows(roles.batch, self._arguments)
    self.size = cut.microbatch_rows(self.rows, split.num_microbatches, split.microbatch_size)
    self.carry = tuple(jax.tree.map(jnp.asarray, self._arguments[s]) for s in roles.carry)
    if split.batch_argnums is None:
      refuse_rows(roles, split.batch_positions, self._rows_of_the_batch())
    if split.rng_argnums is None:
      refuse_keys(roles)

  def _rows_of_the_batch(self) -> set[int]:
    """How many rows a leaf has that was to be split too, as the batch is or on each device."""
    if self.split.rows is not None:
      return {self.split.rows}
    axis_name = self.split.axis_name
    return {self.rows, self.rows * (1 if axis_name is None else lax.axis_size(axis_name))}

  def refuse_aux_rows(self, name: str, leaf: Any) -> None:
    """Refuses an aux with the rows of a microbatch, which nobody said how to reduce."""
    refuse_aux_rows(self._roles, name, leaf, self.size)

  @property
  def microbatches(self) -> int:
    """How many there are, on all devices together."""
    axis_name = self.split.axis_name
    return -(-self.rows // self.size) * (1 if axis_name is None else lax.axis_size(axis_name))

  @property
  def is_whole(self) -> bool:
    """Whether the function runs once, as it is: nothing is to split, to weigh or to reduce."""
    split = self.split
    return self.rows == self.size and not split.weighs and split.axis_name is None

  def run(
    self, index: ArrayLike, carry: Any, take: Take, rows: int, factor: Weight | None = None
  ) -> Microbatch:
    """The function on one microbatch, which `take` cuts out of the batch, of `rows` rows."""
    batch = take()
    weight: Any = self.weight(index, batch, rows) if self.split.weighs else None
    keys = [self._fold_keys(slot, index) for slot in self._roles.rng]
    run_fun = self._call if self.is_whole else self._traced
    new_carry, outputs = run_fun(factor, *batch, *keys, *carry)
    new_carry = (new_carry,) if self._roles.carry else ()
    new_carry, outputs = jax.tree.map(jnp.asarray, (new_carry, outputs))
    # What depends on no argument that varies is the same on all devices, also in its type.
    new_carry, outputs = across_devices.varying((new_carry, outputs), self.split.axis_name)
    keys_and_carry.check(carry, new_carry)
    if not self.split.skip_nonfinite or self.weights is not None:
      return Microbatch(new_carry, outputs, weight, None)
    counted = leave_out(weight, (outputs.loss, outputs.grads))
    return Microbatch(new_carry, outputs, *counted)

  def _call(self, factor: Weight | None, *inputs: Any) -> tuple[Any, Any]:
    """What runs, given the arguments that differ between microbatches."""
    slots = (*self._roles.batch, *self._roles.rng, *self._roles.carry)
    arguments = self._arguments | dict(zip(slots, inputs, strict=True))
    named = {slot: x for slot, x in arguments.items() if isinstance(slot, str)}
    return self._run_fun(factor, *(arguments[i] for i in range(self._num_args)), **named)

  def _traced(self, factor: Weight | None, *inputs: Any) -> tuple[Any, Any]:
    """`_call`, which is traced once for each size of a microbatch, however often it is called."""
    if isinstance(factor, jax.Array):
      return self._jitted(None)(factor, *inputs)
    return self._jitted(factor)(None, *inputs)

  def _jitted(self, known: float | None) -> Callable[..., tuple[Any, Any]]:
    def call(factor: jax.Array | None, *inputs: Any) -> tuple[Any, Any]:
      return self._call(known if factor is None else factor, *inputs)

    return self._functions.setdefault(known, jax.jit(call, inline=True))

  def weight(self, index: ArrayLike, batch: tuple[Any, ...], rows: int) -> jax.Array:
    """How much a microbatch counts, before it has run."""
    if self.weights is not None:
      return self.weights[index]
    if self.split.weight_fn is None:
      return weighted_mean.as_weight(float(rows))
    slots = list(zip(self._roles.batch, batch, strict=True))
    positional = [x for slot, x in slots if isinstance(slot, int)]
    named = {slot: x for slot, x in slots if isinstance(slot, str)}
    value = self.split.weight_fn(*positional, **named)
    weighted_mean.check_weight("weight_fn", value)
    return weighted_mean.as_weight(value)

  def _fold_keys(self, slot: Slot, index: ArrayLike) -> Any:
    """The keys of one argument, folded with the microbatch's index (and the device's)."""

    def fold(path: Any, key: Any) -> jax.Array:
      shape, dtype = jnp.shape(key), jnp.result_type(key)
      typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
      if not typed and not (dtype == jnp.uint32 and shape):
        raise TypeError(
          f"{_validate.leaf_name(f'random argument {slot!r}', path)} has shape {shape} and dtype"
          f" {dtype}; it must be a key, of jax.random.key(seed) or jax.random.PRNGKey(seed)."
        )
      if self.split.axis_name is not None:
        key = keys_and_carry.fold_in(key, lax.axis_index(self.split.axis_name))
      return keys_and_carry.fold_in(key, index)

    return jax.tree_util.tree_map_with_path(fold, self._arguments[slot])

  def cut(self, full: int) -> tuple[Callable[[ArrayLike], Any], Any]:
    """The `full` microbatches of equal size, by index, and the rows left over.

    Strided: microbatch i has the rows i, i + full, i + 2 full, ..., so that a device
    that holds a contiguous part of the batch holds its part of every microbatch. The
    rows are read where they lie, without a copy of the batch.
    """
    size = self.size
    batch = jax.tree.map(jnp.asarray, self.batch)

    def take_rows(axis: int, x: jax.Array, index: ArrayLike) -> jax.Array:
      at = axis % x.ndim
      cut.check_sharding(x, at, size)
      x = lax.slice_in_dim(x, 0, full * size, axis=at)
      x = x.reshape(*x.shape[:at], size, full, *x.shape[at + 1 :])
      return lax.dynamic_index_in_dim(x, index, axis=at + 1, keepdims=False)

    def take(index: ArrayLike) -> Any:
      # Folded here, in the loop's body: the rows of a batch that does not divide would
      # otherwise be copied once for all trips.
      return self._map_batch(lambda axis, x: take_rows(axis, x, index), batch)

    return take, self._map_batch(
      lambda axis, x: lax.slice_in_dim(x, full * size, None, axis=axis % x.ndim), batch
    )

  def _map_batch(self, fun: Callable[[int, Any], Any], batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """`fun` of each leaf of the batch arguments, and of the axis of its rows."""
    both = zip(self._roles.batch.values(), batch, strict=True)
    return tuple(jax.tree.map(functools.partial(fun, axis), tree) for axis, tree in both)
