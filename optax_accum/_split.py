"""How a batch is cut into microbatches, and the key, the carry and the weight of each."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _across_devices, _arguments, _carry, _skip, _validate, _weighted_mean
from optax_accum._arguments import Slot

# Of a microbatch's part of the batch arguments: how much it counts, a real scalar of 0 or more.
WeightFn: TypeAlias = Callable[..., ArrayLike]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Split:
  """How a function's arguments are split and its outputs weighed; checked when built."""

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  batch_argnums: Any = ()
  batch_argnames: Any = ()
  batch_axis: int = 0
  weight_fn: WeightFn | None = None
  rng_argnums: Any = ()
  rng_argnames: Any = ()
  carry_argnum: int | None = None
  carry_reduction: Any = None
  accumulator_dtype: Any = None
  skip_nonfinite: bool = False
  axis_name: Any = None
  unroll: int | bool = 1

  def __post_init__(self) -> None:
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
        setattr(self, name, _arguments.names_or_positions(name, getattr(self, name), type_))
    if not self.batch_argnums and not self.batch_argnames:
      raise ValueError("batch_argnums and batch_argnames are both empty: name what is split.")
    if self.weight_fn is not None and not callable(self.weight_fn):
      raise TypeError(f"weight_fn={self.weight_fn!r} must be a function of the batch, or None.")
    if self.carry_argnum is not None and type(self.carry_argnum) is not int:
      raise TypeError(f"carry_argnum={self.carry_argnum!r} must be an int: one position, or None.")
    self.carry_reduction = _carry.named(self.carry_reduction, self.carry_argnum)
    if type(self.batch_axis) is not int:
      raise TypeError(f"batch_axis={self.batch_axis!r} must be an int, the axis of every leaf.")
    self.accumulator_dtype = _validate.accumulator_dtype(self.accumulator_dtype)

  @classmethod
  def of(cls, arguments: dict[str, Any]) -> "Split":
    """The split that a public function was asked for, from all its arguments by name."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: arguments[name] for name in names if name in arguments})

  @property
  def weighs(self) -> bool:
    """Whether a microbatch's weight is known only when it has run."""
    return self.weight_fn is not None or self.skip_nonfinite

  def batch_slots(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Slot, ...]:
    """Where the batch is in this call of `fun`."""
    wanted = (*self.batch_argnums, *self.batch_argnames)
    slots = _arguments.find_slots("batch_argnums", wanted, fun, args, kwargs)
    return tuple(dict.fromkeys(slots))  # one argument may be named by position and by name


class Microbatch(NamedTuple):
  """What one microbatch gave."""

  carry: tuple[Any, ...]  # the threaded argument; empty where there is none
  outputs: Any
  weight: Any  # None where it is known when tracing
  skipped: Any  # 1 if it was left out, None where none can be


class Call:
  """One call of a function that is run in microbatches, and what each of them is given.

  `fun` is the user's function, whose signature says what the arguments are called. `run_fun` is
  what runs: it takes the same arguments, and returns ``(new_carry, outputs)``. `weights` are those
  of the microbatches, where they are known from a call before.
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
    def find(option: str, *wanted: Slot) -> tuple[Slot, ...]:
      return tuple(dict.fromkeys(_arguments.find_slots(option, wanted, fun, args, kwargs)))

    self._run_fun, self._num_args, self.split, self.weights = run_fun, len(args), split, weights
    self._arguments: dict[Slot, Any] = dict(enumerate(args))
    self._arguments.update(kwargs)
    self._batch_slots = split.batch_slots(fun, args, kwargs)
    self._rng_slots = find("rng_argnums", *split.rng_argnums, *split.rng_argnames)
    threaded = () if split.carry_argnum is None else (split.carry_argnum,)
    self._carry_slots = find("carry_argnum", *threaded)
    roles = {"differentiated": differentiated, "split": self._batch_slots}
    roles |= {"a random key": self._rng_slots, "carried": self._carry_slots}
    _arguments.disjoint(roles)
    self.batch = tuple(self._arguments[slot] for slot in self._batch_slots)
    self.rows = batch_rows(self._batch_slots, self.batch, split.batch_axis)
    self.size = _microbatch_rows(self.rows, split.num_microbatches, split.microbatch_size)
    self.carry = tuple(jax.tree.map(jnp.asarray, self._arguments[s]) for s in self._carry_slots)

  def run(self, index: ArrayLike, carry: Any, batch: tuple[Any, ...], rows: int) -> Microbatch:
    """The function on one microbatch of `rows` rows."""
    inputs = dict(self._arguments)
    inputs.update(zip(self._batch_slots, batch, strict=True))
    inputs.update((slot, self._fold_keys(slot, index)) for slot in self._rng_slots)
    inputs.update(zip(self._carry_slots, carry, strict=True))
    named = {slot: x for slot, x in inputs.items() if isinstance(slot, str)}
    new_carry, outputs = self._run_fun(*(inputs[i] for i in range(self._num_args)), **named)
    new_carry = (new_carry,) if self._carry_slots else ()
    new_carry, outputs = jax.tree.map(jnp.asarray, (new_carry, outputs))
    # What depends on no argument that varies is the same on all devices, also in its type.
    new_carry, outputs = _across_devices.varying((new_carry, outputs), self.split.axis_name)
    _carry.check(carry, new_carry)
    if not self.split.weighs:
      return Microbatch(new_carry, outputs, None, None)
    if self.weights is not None:
      return Microbatch(new_carry, outputs, self.weights[index], None)
    weight = self._weight(batch, rows)
    if not self.split.skip_nonfinite:
      return Microbatch(new_carry, outputs, weight, None)
    counted = _skip.leave_out(weight, (outputs.loss, outputs.grads))
    return Microbatch(new_carry, outputs, *counted)

  def _weight(self, batch: tuple[Any, ...], rows: int) -> jax.Array:
    if self.split.weight_fn is None:
      return _weighted_mean.as_weight(float(rows))
    slots = list(zip(self._batch_slots, batch, strict=True))
    positional = [x for slot, x in slots if isinstance(slot, int)]
    named = {slot: x for slot, x in slots if isinstance(slot, str)}
    value = self.split.weight_fn(*positional, **named)
    _validate.weight("weight_fn", value)
    return _weighted_mean.as_weight(value)

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
        key = _carry.fold_in(key, lax.axis_index(self.split.axis_name))
      return _carry.fold_in(key, index)

    return jax.tree_util.tree_map_with_path(fold, self._arguments[slot])

  def cut(self, full: int) -> tuple[Callable[[ArrayLike], Any], Any]:
    """The `full` microbatches of equal size, by index, and the rows left over.

    Strided: microbatch i has the rows i, i + full, i + 2 full, ..., so that a device
    that holds a contiguous part of the batch holds its part of every microbatch. The
    rows are read where they lie, without a copy of the batch.
    """
    axis, size = self.split.batch_axis, self.size
    batch = jax.tree.map(jnp.asarray, self.batch)

    def fold(x: jax.Array) -> jax.Array:
      at = axis % x.ndim
      _check_sharding(x, at, size)
      x = lax.slice_in_dim(x, 0, full * size, axis=at)
      return x.reshape(*x.shape[:at], size, full, *x.shape[at + 1 :])

    def take(index: ArrayLike) -> Any:
      def take_rows(x: jax.Array) -> jax.Array:
        at = axis % (x.ndim - 1) + 1
        return lax.dynamic_index_in_dim(x, index, axis=at, keepdims=False)

      # Folded here, in the loop's body: the rows of a batch that does not divide would
      # otherwise be copied once for all trips.
      return jax.tree.map(lambda x: take_rows(fold(x)), batch)

    tail = jax.tree.map(lambda x: lax.slice_in_dim(x, full * size, None, axis=axis % x.ndim), batch)
    return take, tail


def batch_rows(slots: Sequence[Slot], batch: Sequence[Any], axis: int) -> int:
  """The number of rows that every leaf of the batch has along `axis`."""
  rows: dict[str, int] = {}
  for slot, tree in zip(slots, batch, strict=True):
    for name, leaf in _validate.named_leaves(f"batch argument {slot!r}", tree):
      shape = jnp.shape(leaf)
      if not -len(shape) <= axis < len(shape):
        raise ValueError(
          f"{name} has shape {shape}, without an axis {axis} to split (batch_axis={axis}): give"
          " it that axis, or pass it as an argument that is not split."
        )
      rows[name] = shape[axis]
  if not rows:
    raise ValueError(
      f"The batch (arguments {list(slots)}) has no arrays: there is nothing to split."
    )
  count, *others = set(rows.values())
  if others:
    listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
    raise ValueError(
      f"Batch leaves disagree on the number of rows along axis {axis} ({listed}); all must have"
      " the same."
    )
  if count == 0:
    raise ValueError("The batch is empty (0 rows); it needs at least 1 row.")
  return count


def _microbatch_rows(rows: int, num_microbatches: int | None, size: int | None) -> int:
  """Rows of a (full) microbatch."""
  if num_microbatches is None:
    return min(size or rows, rows)
  if num_microbatches > rows:
    raise ValueError(
      f"num_microbatches={num_microbatches} is more than the batch's {rows} rows: use at most"
      f" {rows}."
    )
  if rows % num_microbatches:
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    raise ValueError(
      f"num_microbatches={num_microbatches} does not divide the batch's {rows} rows: use one of"
      f" {divisors}, or microbatch_size={-(-rows // num_microbatches)}, which makes the last"
      " microbatch smaller and is exact too."
    )
  return rows // num_microbatches


def _check_sharding(x: jax.Array, axis: int, size: int) -> None:
  """Checks that microbatches of a batch of explicit sharding can stay where their rows are."""
  sharding, rows = jax.typeof(x).sharding, x.shape[axis]
  names = sharding.spec[axis] if axis < len(sharding.spec) else None
  if names is None:
    return
  names = names if isinstance(names, tuple) else (names,)
  devices = math.prod(sharding.mesh.shape[name] for name in names)
  if size % devices or rows % size:
    raise ValueError(
      f"The batch's {rows} rows are sharded over {devices} devices, which its microbatches of"
      f" {size} rows cannot be: use microbatches of a multiple of {devices} rows that divide the"
      " batch, or make_train_step(mesh=...), which needs each device's rows alone to be split."
    )
