"""The rows of a batch: how many there are, and how they are cut into microbatches."""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.trees import Batch
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import Arguments

_ONE_A_CALL = (
  "pass one batch a call, or microbatches one by one to begin, add and finish"
)


def strided(batch: Batch, index: ArrayLike, size: int, full: int) -> Batch:
  """The rows of one of the `full` microbatches of equal size.

  Microbatch i has the rows i, i + full, i + 2 full, ... So a device that holds a contiguous part of
  the batch holds a part of every microbatch. The batch is not copied.
  """

  # This slices in the loop's body: before the loop, it would copy the rows of a batch that does not
  # divide, for all trips at once.
  def rows(x):
    # Without the rows of a smaller last microbatch.
    x = lax.slice_in_dim(jnp.asarray(x), 0, full * size)
    # Row j * full + i gets to place (j, i), so that microbatch i is column i.
    x = x.reshape(size, full, *x.shape[1:])
    return lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

  return jax.tree.map(rows, batch)


def left_over(batch: Batch, start: int) -> Batch:
  """The rows from `start` on, which the microbatches of equal size do not have."""

  def rows(x):
    return lax.slice_in_dim(jnp.asarray(x), start, None)

  return jax.tree.map(rows, batch)


def batch_rows(
  split: Split, slots: Sequence[Slot], arguments: Arguments
) -> int:
  """The rows that every leaf of the batch has, along its first axis."""
  rows: dict[str, int] = {}
  for slot in slots:
    root = split.name(slot)
    tree = arguments[slot]
    if isinstance(tree, list) and all(isinstance(x, dict) for x in tree):
      raise TypeError(
        f"{root} is a list of {len(tree)} batches: {_ONE_A_CALL}."
      )
    check_arrays(root, tree)
    # A sparse array is a leaf here, and not its parts, so that `_rows_of` can refuse it.
    for name, leaf in _validate.named_leaves(root, tree, dtypes.is_sparse):
      rows[name] = _rows_of(name, leaf)
  if not rows:
    raise ValueError(
      f"The batch ({split.name(*slots)}) has no arrays: give one to split."
    )
  # Different numbers only: more than one means that leaves disagree.
  count, *others = set(rows.values())
  if others:
    listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
    raise ValueError(
      "Batch leaves disagree: all must have the same number of rows, along the first axis:"
      f" {listed}. Move rows that are on another axis, by jnp.moveaxis, and back in the loss."
      " Repeat what has no rows, by np.broadcast_to(x, (rows, *np.shape(x))), or pass it as another"
      " argument."
    )
  if count == 0:
    raise ValueError(
      f"The batch ({split.name(*slots)}) is empty; it needs at least 1 row."
    )
  return count


def check_arrays(root: str, tree) -> None:
  """Checks that all leaves of an argument are what JAX takes for arrays or numbers."""
  # Asked of types, of which there are few.
  kinds = set(map(type, jax.tree.leaves(tree)))
  if all(issubclass(kind, jax.Array) for kind in kinds):
    return
  for name, x in _validate.named_leaves(root, tree):
    try:
      jax.typeof(x)
    except TypeError as error:
      if isinstance(x, np.ndarray):
        raise TypeError(
          f"{name} has no numbers ({error}): leave it out of the batch."
        ) from None
      raise TypeError(f"{name} is {_no_array(x)}.") from None


def _no_array(x) -> str:
  """What it is, and what to write instead."""
  what = f"of type {type(x).__name__}"
  fix = (
    "leave it out of the batch, or fix it in the loss, functools.partial(loss_fn, mode=...), and"
    " make a step for each value"
  )
  if isinstance(x, str):
    what = f"the string {x!r}"
  elif hasattr(x, "__array__"):
    fix = "pass np.asarray(x)"
  elif hasattr(x, "keys") or dataclasses.is_dataclass(x):
    fix = "pass dict(batch), or register the class as a pytree"
  elif hasattr(x, "__iter__"):
    fix = _ONE_A_CALL
  return f"{what} and no array: {fix}"


def _rows_of(name: str, leaf) -> int:
  """The rows of one leaf of the batch."""
  if dtypes.is_sparse(leaf):
    raise TypeError(
      f"{name} is a sparse {type(leaf).__name__}, whose arrays have no rows to split: pass"
      " rows.todense(), or the data and indices of rows, and make the BCOO in the loss."
    )
  # A single key has no rows; an array of keys has one key for each row.
  if dtypes.is_key(leaf) and not leaf.shape:
    raise ValueError(
      f"{name} is a random key: make it an argument of its own, which rng_argnums names (in"
      " Flax a stream or rngs), or give each row its own, jax.random.split(key, rows). If another"
      " argument is the batch, name it in batch_argnums."
    )
  shape = jnp.shape(leaf)
  if not shape:
    raise ValueError(
      f"{name} has shape (), without rows to split. If another argument is the batch, name it in"
      " batch_argnums. Make an array of a list. Repeat what has no rows, by np.broadcast_to(x,"
      " (rows,)), or pass it as another argument."
    )
  return shape[0]


def microbatch_rows(
  rows: int,
  num_microbatches: int | None,
  size: int | None,
  of: str = "the batch",
) -> int:
  """Rows of a (full) microbatch."""
  if num_microbatches is None:
    # Without a size the microbatch is the whole batch, and it is never larger than that.
    return min(size or rows, rows)
  if rows % num_microbatches:
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    raise ValueError(
      f"num_microbatches={num_microbatches} does not divide the {rows} rows of {of}: use one of"
      f" {divisors}, or microbatch_size={-(-rows // num_microbatches)} (with mesh=, times the"
      " number of devices), which makes the last microbatch smaller and is exact too."
    )
  return rows // num_microbatches
