"""How many rows a batch has, how many of them a microbatch, and whether they can stay in place."""

from collections.abc import Mapping
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._microbatches import settings
from optax_accum._microbatches.arguments import Slot


def batch_rows(axes: Mapping[Slot, int], arguments: Mapping[Slot, Any]) -> int:
  """The rows that every leaf of the batch has, along the axis of its argument."""
  rows: dict[str, int] = {}
  for slot, axis in axes.items():
    for name, leaf in _validate.named_leaves(f"batch argument {slot!r}", arguments[slot]):
      if not settings.is_data(leaf):
        raise TypeError(
          f"{settings.described(name, leaf)}, and a batch has arrays of numbers: leave it out, or"
          " pass it as an argument that is not split."
        )
      shape = jnp.shape(leaf)
      if not -len(shape) <= axis < len(shape):
        raise ValueError(
          f"{name} has shape {shape}, without an axis {axis} to split (batch_axis={axis}): give"
          " it that axis, or pass it as an argument that is not split."
        )
      rows[name] = shape[axis]
  if not rows:
    raise ValueError(
      f"The batch (arguments {list(axes)}) has no arrays: there is nothing to split."
    )
  count, *others = set(rows.values())
  if others:
    listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
    along = " and ".join(str(axis) for axis in sorted(set(axes.values())))
    raise ValueError(
      f"Batch leaves disagree on the number of rows along axis {along} ({listed}); all must have"
      " the same."
    )
  if count == 0:
    raise ValueError("The batch is empty (0 rows); it needs at least 1 row.")
  return count


def microbatch_rows(rows: int, num_microbatches: int | None, size: int | None) -> int:
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


def check_sharding(x: jax.Array, axis: int, size: int) -> None:
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
      f" {rows}. Or split each device's rows alone, by axis_name= inside jax.shard_map, or by"
      " make_train_step(mesh=...)."
    )
