"""The rows of a batch: how many there are, and how they are cut into microbatches."""

from collections.abc import Callable, Mapping
import math
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import names_of
from optax_accum._arithmetic.trees import Batch
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import Arguments

# Cuts one microbatch out of the batch arguments, by its index.
Cut: TypeAlias = Callable[[ArrayLike], tuple[Batch, ...]]

_ROWS = (
  "Move rows that are on another axis, by jnp.moveaxis, and back in the loss. Repeat what has no"
  " rows, by np.broadcast_to(x, (rows, *np.shape(x))), or pass it as another argument, if the loss"
  " takes more."
)


def cut_rows(
  batch: tuple[Batch, ...],
  axes: tuple[int, ...],
  size: int,
  full: int,
  lanes: int = 1,
) -> tuple[Cut, tuple[Batch, ...]]:
  """The `full` microbatches of equal size, by index, and the rows left over.

  Strided: microbatch i has the rows i, i + full, i + 2 full, ... So a device that holds a
  contiguous part of the batch holds a part of every microbatch. The batch is not copied. Each of
  several `lanes` has a contiguous part, of `full` microbatches, and no rows are left over.
  """
  batch = jax.tree.map(jnp.asarray, batch)
  each = jax.tree.broadcast(axes, batch)
  each = jax.tree.map(lambda x, axis: axis % x.ndim, batch, each)

  def take(index):
    # Folded here, in the loop's body: the rows of a batch that does not divide would
    # otherwise be copied once for all trips.
    def rows(x, axis):
      _check_sharding(x, axis, size)
      own = index
      if lanes > 1:
        lane, own = jnp.divmod(index, full)
        x = lax.dynamic_slice_in_dim(x, lane * full * size, full * size, axis)
      x = lax.slice_in_dim(x, 0, full * size, axis=axis)
      x = x.reshape(*x.shape[:axis], size, full, *x.shape[axis + 1 :])
      return lax.dynamic_index_in_dim(x, own, axis=axis + 1, keepdims=False)

    return jax.tree.map(rows, batch, each)

  def rest(x, axis):
    return lax.slice_in_dim(x, lanes * full * size, None, axis=axis)

  return take, jax.tree.map(rest, batch, each)


def batch_rows(
  split: Split, axes: Mapping[Slot, int], arguments: Arguments
) -> int:
  """The rows that every leaf of the batch has, along the axis of its argument."""
  rows: dict[str, int] = {}
  for slot, axis in axes.items():
    root = split.name(slot)
    tree = arguments[slot]
    for name, leaf in _validate.named_leaves(root, tree, dtypes.is_sparse):
      rows[name] = _rows_of(name, leaf, axis, split.batch_argnums is None)
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


def _rows_of(name: str, leaf, axis: int, by_default: bool) -> int:
  """The rows of one leaf of the batch, which is the batch `by_default` or was named."""
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
    shape: tuple[Any, ...] = jax.typeof(leaf).shape
  except TypeError as error:
    raise TypeError(
      f"{name} has no numbers ({error}): leave it out of the batch."
    ) from None
  if not -len(shape) <= axis < len(shape):
    elsewhere = ""
    if by_default:
      elsewhere = "If another argument is the batch, name it in batch_argnums. "
    raise ValueError(
      f"{name} has shape {shape}, without an axis {axis} to split (batch_axis={axis})."
      f" {elsewhere}Make an array of a list. {_ROWS}"
    )
  return shape[axis]


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
  counts = [n for n in range(fewest, rows + 1) if uneven or rows % n == 0]
  # Of the sizes that make as many microbatches, the smallest.
  return sorted({-(-rows // n) for n in counts})


def _check_sharding(x: jax.Array, axis: int, size: int) -> None:
  """Checks that microbatches of a batch of explicit sharding can stay where their rows are."""
  sharding = jax.typeof(x).sharding
  rows = x.shape[axis]
  spec = [*sharding.spec, *[None] * x.ndim]
  names = names_of(spec[axis])
  devices = math.prod(sharding.mesh.shape[name] for name in names)
  if size % devices or (names and rows % size):
    raise ValueError(
      f"The batch's {rows} rows are sharded over {devices} devices, which its microbatches of"
      f" {size} rows cannot be: use microbatches of a multiple of {devices} rows that divide the"
      f" {rows}, or split each device's rows alone, by axis_name= or make_train_step(mesh=...)."
    )
