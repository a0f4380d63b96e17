"""The split: which arguments of a call are cut into microbatches, folded or threaded."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, TypedDict

import chex
import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _arguments, _reduce, _validate


class MicrobatchOptions(TypedDict, total=False):
  """The keyword arguments of `microbatch_value_and_grad`, which explains them."""

  num_microbatches: int | None
  microbatch_size: int | None
  batch_argnums: int | Sequence[int]
  batch_argnames: str | Sequence[str]
  batch_axis: int
  reduction: str
  weight_fn: Callable[..., chex.Numeric] | None
  aux_reduction: Any
  rng_argnums: int | Sequence[int]
  rng_argnames: str | Sequence[str]
  carry_argnum: int | None
  accumulator_dtype: chex.ArrayDType | None
  skip_nonfinite: bool
  axis_name: Any
  unroll: int | bool


@dataclasses.dataclass(kw_only=True)
class Split:
  """How a function's arguments are split and its outputs weighed; checked when built."""

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  batch_argnums: Any = ()
  batch_argnames: Any = ()
  batch_axis: int = 0
  weight_fn: Callable[..., chex.Numeric] | None = None
  rng_argnums: Any = ()
  rng_argnames: Any = ()
  carry_argnum: int | None = None
  accumulator_dtype: Any = None
  skip_nonfinite: bool = False
  axis_name: Any = None
  unroll: int | bool = 1

  def __post_init__(self) -> None:
    self.num_microbatches, self.microbatch_size = _validate.exactly_one_size(
      self.num_microbatches, self.microbatch_size
    )
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
    if type(self.batch_axis) is not int:
      raise TypeError(f"batch_axis={self.batch_axis!r} must be an int, the axis of every leaf.")
    self.accumulator_dtype = _validate.accumulator_dtype(self.accumulator_dtype)

  @property
  def weighs(self) -> bool:
    """Whether a microbatch's weight is known only when it has run."""
    return self.weight_fn is not None or self.skip_nonfinite


class Call:
  """One call's arguments by slot, and which of them play a part in the scan."""

  def __init__(self, fun: Callable[..., Any], split: Split, args: Any, kwargs: Any, **taken: Any):
    def find(option: str, *wanted: _arguments.Slot) -> tuple[_arguments.Slot, ...]:
      return _arguments.find_slots(option, wanted, fun, args, kwargs)

    self.fun, self.split, self.num_args = fun, split, len(args)
    self.arguments: dict[_arguments.Slot, Any] = {**dict(enumerate(args)), **kwargs}
    self.batch_slots = find("batch_argnums", *split.batch_argnums, *split.batch_argnames)
    self.rng_slots = find("rng_argnums", *split.rng_argnums, *split.rng_argnames)
    threaded = () if split.carry_argnum is None else (split.carry_argnum,)
    self.carry_slots = find("carry_argnum", *threaded)
    _arguments.disjoint(
      {
        **taken,
        "split": self.batch_slots,
        "a random key": self.rng_slots,
        "carried": self.carry_slots,
      }
    )
    self.batch = tuple(self.arguments[slot] for slot in self.batch_slots)
    self.rows = _arguments.batch_rows(self.batch_slots, self.batch, split.batch_axis)
    self.size = _arguments.microbatch_rows(self.rows, split.num_microbatches, split.microbatch_size)
    carry = tuple(jax.tree.map(jnp.asarray, self.arguments[s]) for s in self.carry_slots)
    self.carry = _reduce.varying(carry, split.axis_name)

  def run(self, index: chex.Numeric, carry: Any, batch: tuple[Any, ...]) -> Any:
    """The function on one microbatch: ``(new_carry, outputs)``."""
    inputs = dict(self.arguments)
    inputs.update(zip(self.batch_slots, batch, strict=True))
    inputs.update((slot, self.fold_keys(slot, index)) for slot in self.rng_slots)
    inputs.update(zip(self.carry_slots, carry, strict=True))
    named = {slot: x for slot, x in inputs.items() if isinstance(slot, str)}
    new_carry, outputs = self.fun(*(inputs[i] for i in range(self.num_args)), **named)
    new_carry = (new_carry,) if self.carry_slots else ()
    new_carry, outputs = jax.tree.map(jnp.asarray, (new_carry, outputs))
    _check_carry(self.carry, new_carry)
    return new_carry, outputs

  def weight(self, batch: tuple[Any, ...], rows: int) -> jax.Array:
    """The weight of one microbatch, where it is not known when tracing."""
    if self.split.weight_fn is None:
      return _reduce.as_weight(float(rows))
    slots = list(zip(self.batch_slots, batch, strict=True))
    positional = [x for slot, x in slots if isinstance(slot, int)]
    named = {slot: x for slot, x in slots if isinstance(slot, str)}
    value = self.split.weight_fn(*positional, **named)
    _validate.weight("weight_fn", value)
    return _reduce.as_weight(value)

  def fold_keys(self, slot: _arguments.Slot, index: chex.Numeric) -> Any:
    """The keys of one argument, folded with the microbatch's index (and the device's)."""

    def fold(path: Any, key: Any) -> jax.Array:
      _validate.key(_validate.leaf_name(f"random argument {slot!r}", path), key)
      typed = jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
      fold_in = jax.random.fold_in
      for _ in range(jnp.ndim(key) - (0 if typed else 1)):
        fold_in = jax.vmap(fold_in, (0, None))
      if self.split.axis_name is not None:
        key = fold_in(key, lax.axis_index(self.split.axis_name))
      return fold_in(key, index)

    return jax.tree_util.tree_map_with_path(fold, self.arguments[slot])

  def microbatches(self, full: int) -> tuple[Callable[[chex.Numeric], Any], Any]:
    """The `full` microbatches of equal size, by index, and the rows left over.

    Strided: microbatch i has the rows i, i + full, i + 2 full, ..., so that a device
    that holds a contiguous part of the batch holds its part of every microbatch. The
    rows are read where they lie, without a copy of the batch.
    """
    axis, size = self.split.batch_axis, self.size
    batch = jax.tree.map(jnp.asarray, self.batch)

    def fold(x: jax.Array) -> jax.Array:
      at = axis % x.ndim
      _arguments.shards_divide(x, at, size, x.shape[at])
      x = lax.slice_in_dim(x, 0, full * size, axis=at)
      return x.reshape(*x.shape[:at], size, full, *x.shape[at + 1 :])

    def take(index: chex.Numeric) -> Any:
      def one(x: jax.Array) -> jax.Array:
        at = axis % (x.ndim - 1) + 1
        return lax.dynamic_index_in_dim(x, index, axis=at, keepdims=False)

      # Folded here, in the loop's body: the rows of a batch that does not divide would
      # otherwise be copied once for all trips.
      return jax.tree.map(lambda x: one(fold(x)), batch)

    tail = jax.tree.map(lambda x: lax.slice_in_dim(x, full * size, None, axis=axis % x.ndim), batch)
    return take, tail


def _check_carry(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
  for before, after in zip(old, new, strict=True):
    structures = [str(jax.tree.structure(x)) for x in (before, after)]
    if structures[0] != structures[1]:
      raise ValueError(
        f"The threaded argument (carry_argnum) has structure {structures[0]} and the function"
        f" returned {structures[1]} as its new_carry: return the same structure."
      )
    leaves = jax.tree_util.tree_leaves_with_path(before)
    for (path, a), b in zip(leaves, jax.tree.leaves(after), strict=True):
      if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
          f"{_validate.leaf_name('carry', path)} has shape {a.shape} and dtype {a.dtype}, and the"
          f" function returned shape {b.shape} and dtype {b.dtype}: return the same shape and"
          " dtype, e.g. with .astype."
        )
