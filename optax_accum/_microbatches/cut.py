"""The microbatches of a call: the rows, the keys and the weight of each, cut where they lie."""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.across_devices import check_bound, names_of
from optax_accum._arithmetic.trees import Args, Batch, Kwargs, Leaf, Tree
from optax_accum._microbatches import keys_and_carry
from optax_accum._microbatches.options import (
  refuse_keys,
  refuse_rows,
  Slot,
  Split,
)

# Cuts one microbatch out of the batch arguments.
Take: TypeAlias = Callable[[], tuple[Batch, ...]]

_ROWS = (
  "Move rows that are on another axis, by jnp.moveaxis, and back in the loss. Repeat what has no"
  " rows, by np.broadcast_to(x, (rows, *np.shape(x))), or pass it as another argument, if the loss"
  " takes more."
)


class Microbatches:
  """The microbatches of one call of `fun`; `weights` are theirs, where a call before found them."""

  def __init__(
    self,
    fun: Callable[..., Tree],
    split: Split,
    args: Args,
    kwargs: Kwargs,
    differentiated: Sequence[Slot] = (),
    weights: jax.Array | None = None,
  ):
    self._num_args, self.split, self.weights = len(args), split, weights
    self._arguments: dict[Slot, Tree] = dict(
      [*enumerate(args), *kwargs.items()]
    )
    self.roles = roles = split.roles(fun, args, kwargs, differentiated)
    self.batch = tuple(self._arguments[slot] for slot in roles.batch)
    if (
      split.rows is None
    ):  # of a device's part of a batch, all has been looked at
      split.refuse_key(roles, self._arguments)
    self.rows = batch_rows(split, roles.batch, self._arguments)
    of = split.name(*roles.batch)
    self.size = microbatch_rows(
      self.rows, split.num_microbatches, split.microbatch_size, of
    )
    self.full, self.tail_rows = divmod(self.rows, self.size)
    devices = 1 if split.axis_name is None else check_bound(split.axis_name)
    self.count = -(-self.rows // self.size) * devices  # of all devices together
    self.carry = tuple(
      jax.tree.map(jnp.asarray, self._arguments[s]) for s in roles.carry
    )
    if (
      split.batch_argnums is None
    ):  # all rows of the batch, or those on one device
      rows = (
        {self.rows, self.rows * devices} if split.rows is None else {split.rows}
      )
      refuse_rows(roles, rows)
    if split.rng_argnums is None:
      refuse_keys(roles)
    for slot in roles.rng:
      for name, x in _validate.named_leaves(
        split.name(slot), self._arguments[slot]
      ):
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if not dtypes.is_key(x) and (dtype != jnp.uint32 or not shape):
          raise TypeError(
            f"{name} is {dtype}{list(shape)}: give a key, such as jax.random.key(0)."
          )

  @property
  def is_whole(self) -> bool:
    """Whether the function runs once, as it is: nothing is to split, to weigh or to reduce."""
    split = self.split
    return (
      self.rows == self.size and not split.weighs and split.axis_name is None
    )

  def map_shared(self, fun: Callable[[Leaf], Leaf]) -> None:
    """Puts ``fun(x)`` in the place of each leaf that all microbatches share."""
    for slot, tree in self.roles.shared.items():
      self._arguments[slot] = jax.tree.map(fun, tree)

  def inputs(
    self, index: ArrayLike, batch: tuple[Batch, ...], carry: Args
  ) -> Args:
    """What one microbatch is given and others are not: its rows, keys and carry."""
    axis_name = self.split.axis_name
    if (
      axis_name is not None
    ):  # the number among the microbatches of all devices
      index = index + lax.axis_index(axis_name) * (
        self.count // lax.axis_size(axis_name)
      )

    def fold(keys: jax.Array) -> jax.Array:
      return keys_and_carry.fold_in(keys, index)

    return (
      *batch,
      *(jax.tree.map(fold, self._arguments[slot]) for slot in self.roles.rng),
      *carry,
    )

  def arguments(self, inputs: Args) -> tuple[Args, Kwargs]:
    """The arguments of the function, by position and by name, on a microbatch of such `inputs`."""
    slots = (*self.roles.batch, *self.roles.rng, *self.roles.carry)
    arguments = self._arguments | dict(zip(slots, inputs, strict=True))
    named = {slot: x for slot, x in arguments.items() if isinstance(slot, str)}
    return tuple(arguments[i] for i in range(self._num_args)), named

  def weight(
    self, index: ArrayLike, batch: tuple[Batch, ...], rows: int
  ) -> jax.Array:
    """How much a microbatch counts, before it has run."""
    if self.weights is not None:
      return self.weights[index]
    if self.split.weight_fn is None:
      return weighted_mean.as_weight(float(rows))
    named: dict[Any, Tree] = dict(zip(self.roles.batch, batch, strict=True))
    positional = [
      named.pop(slot) for slot in self.roles.batch if isinstance(slot, int)
    ]
    if why := _validate.why_not(self.split.weight_fn, *positional, **named):
      raise TypeError(
        f"weight_fn gets only the arguments that are split, as in weight_fn(batch): {why}."
      )
    value = self.split.weight_fn(*positional, **named)
    weighted_mean.check_weight("weight_fn", value)
    return weighted_mean.as_weight(value)

  @functools.cached_property
  def cut(
    self,
  ) -> tuple[Callable[[ArrayLike], tuple[Batch, ...]], tuple[Batch, ...]]:
    """The `full` microbatches of equal size, by index, and the rows left over.

    Strided: microbatch i has the rows i, i + full, i + 2 full, ... So a device that holds a
    contiguous part of the batch holds a part of every microbatch. The batch is not copied.
    """
    size, full = self.size, self.full
    batch = jax.tree.map(jnp.asarray, self.batch)

    axes = jax.tree.broadcast(tuple(self.roles.batch.values()), batch)
    axes = jax.tree.map(lambda x, axis: axis % x.ndim, batch, axes)

    def take(index: ArrayLike) -> tuple[Batch, ...]:
      # Folded here, in the loop's body: the rows of a batch that does not divide would
      # otherwise be copied once for all trips.
      def rows(x: jax.Array, axis: int) -> jax.Array:
        check_sharding(x, axis, size)
        x = lax.slice_in_dim(x, 0, full * size, axis=axis)
        x = x.reshape(*x.shape[:axis], size, full, *x.shape[axis + 1 :])
        return lax.dynamic_index_in_dim(x, index, axis=axis + 1, keepdims=False)

      return jax.tree.map(rows, batch, axes)

    rest = functools.partial(
      lax.slice_in_dim, start_index=full * size, limit_index=None
    )
    return take, jax.tree.map(lambda x, axis: rest(x, axis=axis), batch, axes)


def batch_rows(
  split: Split, axes: Mapping[Slot, int], arguments: Mapping[Slot, Tree]
) -> int:
  """The rows that every leaf of the batch has, along the axis of its argument."""
  rows: dict[str, int] = {}
  for slot, axis in axes.items():
    for name, leaf in _validate.named_leaves(
      split.name(slot), arguments[slot], dtypes.is_sparse
    ):
      if dtypes.is_sparse(leaf):
        raise TypeError(
          f"{name} is a sparse {type(leaf).__name__}, whose arrays have no rows to split: pass x"
          " = rows.todense(). Or pass the data and indices of BCOO.fromdense(x, n_batch=1), which"
          " have rows, and let the loss make BCOO((data, indices), shape=(len(data), columns))."
        )
      if dtypes.is_key(leaf) and not leaf.shape:
        raise ValueError(
          f"{name} is a random key: make it an argument of its own, which rng_argnums names (in"
          " Flax a stream or rngs), or give each row its own, jax.random.split(key, rows)."
        )
      try:
        shape = jax.typeof(leaf).shape
      except TypeError as error:
        raise TypeError(
          f"{name} has no numbers ({error}): leave it out of the batch."
        ) from None
      if not -len(shape) <= axis < len(shape):
        raise ValueError(
          f"{name} has shape {shape}, without an axis {axis} to split (batch_axis={axis}). Make an"
          f" array of a list. {_ROWS}"
        )
      rows[name] = shape[axis]
  if not rows:
    raise ValueError(
      f"The batch ({split.name(*axes)}) has no arrays: give one to split."
    )
  count, *others = set(rows.values())
  if others:
    listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
    raise ValueError(
      "Batch leaves disagree: all must have the same number of rows, along batch_axis: "
      f"{listed}. {_ROWS}"
    )
  if count == 0:
    raise ValueError(
      f"The batch ({split.name(*axes)}) is empty; it needs at least 1 row."
    )
  return count


def microbatch_rows(
  rows: int,
  num_microbatches: int | None,
  size: int | None,
  of: str = "the batch",
) -> int:
  """Rows of a (full) microbatch."""
  if num_microbatches is None:
    return min(size or rows, rows)
  if rows % num_microbatches:
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    raise ValueError(
      f"num_microbatches={num_microbatches} does not divide the {rows} rows of {of}: use one of"
      f" {divisors}, or microbatch_size={-(-rows // num_microbatches)}, which makes the last"
      " microbatch smaller and is exact too."
    )
  return rows // num_microbatches


def sizes(rows: int, uneven: bool, fewest: int = 1) -> list[int]:
  """Sizes for `fewest` microbatches or more, ascending. If not `uneven`, they divide the rows."""
  # Of the sizes that make as many microbatches, the smallest.
  counts = (n for n in range(fewest, rows + 1) if uneven or rows % n == 0)
  return sorted({-(-rows // n) for n in counts})


def check_sharding(x: jax.Array, axis: int, size: int) -> None:
  """Checks that microbatches of a batch of explicit sharding can stay where their rows are."""
  sharding, rows = jax.typeof(x).sharding, x.shape[axis]
  names = names_of(sharding.spec[axis]) if axis < len(sharding.spec) else ()
  devices = math.prod(sharding.mesh.shape[name] for name in names)
  if size % devices or (names and rows % size):
    raise ValueError(
      f"The batch's {rows} rows are sharded over {devices} devices, which its microbatches of"
      f" {size} rows cannot be: use microbatches of a multiple of {devices} rows that divide the"
      f" {rows}, or split each device's rows alone, by axis_name= or make_train_step(mesh=...)."
    )
