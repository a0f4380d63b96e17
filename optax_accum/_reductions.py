"""The reductions of a function's outputs over microbatches and devices, by name."""

import dataclasses
import functools
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _reduce, _validate

REDUCTIONS = ("mean", "sum", "max", "min", "last", "stack", "concat")
# These keep every microbatch's value; the scan returns them as its stacked outputs.
COLLECTED = ("stack", "concat")


@dataclasses.dataclass(frozen=True)
class Spread:
  """How the sum over devices of one output is taken and kept."""

  scatter: int | None = None  # the dimension that is scattered over the axis; None: replicated
  every_microbatch: bool = False  # rather than once, after the last one


class Reductions:
  """A prefix tree of reduction names, matched to the leaves of a function's outputs.

  Partial results are dicts from a leaf's index to an array: ``held`` for the leaves that
  a scan carries, ``collected`` for those it stacks.
  """

  def __init__(
    self,
    names: Any,
    like: Any,
    root: str,
    rows: int,
    axis_name: Any = None,
    spread: Any = None,
  ):
    """Checks `names` against outputs like `like`, for microbatches of `rows` rows.

    `names` may be a function of `like`.
    `axis_name` is the mesh axis that the microbatches are spread over, or None; `spread` a
    prefix tree of `Spread` over the outputs.
    """
    if callable(names):
      names = names(like)
    self.kinds = jax.tree.leaves(match("reduction", names, like))
    paths, self.treedef = jax.tree_util.tree_flatten_with_path(like)
    self.names = [_validate.leaf_name(root, path) for path, _ in paths]
    self.like = [leaf for _, leaf in paths]
    self.axis_name = axis_name
    self.spread = jax.tree.leaves(jax.tree.broadcast(spread or Spread(), like))
    for kind, name, leaf in zip(self.kinds, self.names, self.like, strict=True):
      _check_leaf(kind, name, leaf, rows)

  def check_accumulators(self, dtype: chex.ArrayDType | None) -> None:
    """Checks that sums in `dtype` can hold the outputs."""
    for kind, name, leaf in zip(self.kinds, self.names, self.like, strict=True):
      if kind in ("mean", "sum"):
        _validate.holds_dtype(name, leaf.dtype, dtype)

  def start(self, dtype: chex.ArrayDType | None) -> dict[int, jax.Array]:
    """What is held before the first microbatch."""
    self.check_accumulators(dtype)
    held = {}
    for i, (kind, leaf) in enumerate(zip(self.kinds, self.like, strict=True)):
      if kind not in COLLECTED:
        held[i] = _start(kind, leaf, dtype)
        if self.spread[i].every_microbatch:
          like = jax.eval_shape(functools.partial(self._over_devices, i), held[i])
          held[i] = _reduce.full_like(like, 0)
    return held

  def step(
    self, held: dict[int, jax.Array], outputs: Any, weight: _reduce.Weight
  ) -> tuple[Any, Any]:
    """Takes one microbatch in: ``(held, collected)``. Zero weight changes nothing held."""
    leaves = jax.tree.leaves(outputs)
    new = {i: self._step(i, h, leaves[i], weight) for i, h in held.items()}
    return new, {i: x for i, x in enumerate(leaves) if self.kinds[i] in COLLECTED}

  def _step(self, i: int, held: jax.Array, value: jax.Array, weight: _reduce.Weight) -> jax.Array:
    kind = self.kinds[i]
    if kind not in ("mean", "sum"):
      return _step(kind, held, value, weight)
    if kind == "sum":
      value = _reduce.select(_reduce.counts(weight), value, jnp.zeros_like(value)).astype(
        held.dtype
      )
    else:
      value = _reduce.weigh(value, weight, held.dtype)
    if self.spread[i].every_microbatch:
      # A barrier, because XLA for TPU would add up whole values and reduce after the loop.
      value = lax.optimization_barrier(self._over_devices(i, value))
    return held + value

  def _over_devices(self, i: int, held: jax.Array, counted: bool | jax.Array = True) -> jax.Array:
    scatter = self.spread[i].scatter
    if scatter is None:
      return _reduce.across_devices(self.kinds[i], held, self.axis_name, counted)
    if jax.sharding.AxisType.Explicit in jax.typeof(held).sharding.mesh.axis_types:
      # Where other axes of the mesh are explicit, JAX (to 0.12) cannot lower psum_scatter.
      total = lax.psum(held, self.axis_name)
      size = total.shape[scatter] // lax.axis_size(self.axis_name)
      start = lax.axis_index(self.axis_name) * size
      return lax.dynamic_slice_in_dim(total, start, size, scatter)
    return lax.psum_scatter(held, self.axis_name, scatter_dimension=scatter, tiled=True)

  def finish(
    self, held: Any, collected: Any, tail: Any, weight: _reduce.Weight, counted: bool | jax.Array
  ) -> Any:
    """The reduced outputs; every leaf in the dtype that one microbatch gives it.

    Args:
      held: What `step` held last.
      collected: What `step` collected, stacked over the microbatches of equal size.
      tail: What it collected of the smaller last one, or None.
      weight: The total weight, over all devices.
      counted: Whether any microbatch on this device counts.
    """
    leaves = []
    for i, (kind, leaf) in enumerate(zip(self.kinds, self.like, strict=True)):
      if kind in COLLECTED:
        leaves.append(_join(kind, collected[i], tail and tail[i]))
        continue
      value = held[i]
      if self.axis_name is not None and not self.spread[i].every_microbatch:
        value = self._over_devices(i, value, counted)
      leaves.append(_finish(kind, value, weight, leaf.dtype))
    return jax.tree.unflatten(self.treedef, leaves)

  def only(self, outputs: Any) -> Any:
    """The reduced outputs where there is one microbatch, which counts."""
    leaves = []
    for kind, x in zip(self.kinds, jax.tree.leaves(outputs), strict=True):
      if kind == "stack":
        x = x[None]
      elif kind == "sum" and not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(_reduce.accumulator_dtype(x.dtype))
      leaves.append(x)
    return jax.tree.unflatten(self.treedef, leaves)

  def check_tail(self, like: Any) -> None:
    """Checks that a smaller last microbatch gives leaves that can be reduced with the rest."""
    tails = jax.tree.leaves(like)
    for kind, name, leaf, tail in zip(self.kinds, self.names, self.like, tails, strict=True):
      if kind != "concat" and leaf.shape != tail.shape:
        raise ValueError(
          f"{name} has shape {leaf.shape} for a full microbatch and {tail.shape} for the smaller"
          f' last one, so {kind!r} cannot reduce it: use "concat" for values per row, or a'
          " microbatch size that divides the batch."
        )


def match(option: str, names: Any, like: Any) -> Any:
  """A reduction for every leaf of the outputs `like`, from a prefix tree of them."""
  try:
    return jax.tree.broadcast(names, like)
  except ValueError as e:
    raise ValueError(
      f"{option}={names!r} is not a prefix tree of the outputs, whose structure is"
      f" {jax.tree.structure(like)}: give one name, or a tree that stops at or above the"
      f" outputs' leaves. ({e})"
    ) from None


def check_names(name: str, tree: Any) -> None:
  """Checks that every leaf of a reduction tree is the name of a reduction."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    _validate.one_of(_validate.leaf_name(name, path), leaf, REDUCTIONS)


def _check_leaf(kind: str, name: str, leaf: jax.ShapeDtypeStruct, rows: int) -> None:
  if kind == "mean" and not jnp.issubdtype(leaf.dtype, jnp.inexact):
    raise TypeError(
      f'{name} has dtype {leaf.dtype}, which "mean" cannot keep: cast it to a float in the'
      ' function, or reduce it with "sum", "max", "min", "last" or "stack".'
    )
  if kind in ("max", "min") and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    raise TypeError(f'{name} has dtype {leaf.dtype}, which has no {kind!r}: use "mean" or "sum".')
  if kind == "concat" and leaf.shape[:1] != (rows,):
    raise ValueError(
      f'{name} has shape {leaf.shape}; "concat" needs the {rows} rows of a microbatch as its'
      ' leading axis: use "stack" for one value per microbatch.'
    )


def _join(kind: str, rows: jax.Array, tail: jax.Array | None) -> jax.Array:
  """The collected values of all microbatches, whose index is the leading axis of `rows`."""
  if kind == "stack":
    return rows if tail is None else jnp.concatenate([rows, tail[None]])
  # Microbatch i has rows i, i + N, ... of the batch, so the index is the fast axis.
  rows = jnp.moveaxis(rows, 0, 1)
  rows = rows.reshape(-1, *rows.shape[2:])
  return rows if tail is None else jnp.concatenate([rows, tail])


def _start(kind: str, leaf: jax.ShapeDtypeStruct, dtype: chex.ArrayDType | None) -> jax.Array:
  match kind:
    case "mean" | "sum":
      return _reduce.full_like(leaf, 0, _reduce.accumulator_dtype(leaf.dtype, dtype))
    case "max" | "min":
      return _reduce.full_like(leaf, _identity(kind, leaf.dtype))
    case _:
      return _reduce.full_like(leaf, 0)


def _step(kind: str, held: jax.Array, value: jax.Array, weight: _reduce.Weight) -> jax.Array:
  counted = _reduce.counts(weight)
  match kind:
    case "max":
      return _reduce.select(counted, jnp.maximum(held, value), held)
    case "min":
      return _reduce.select(counted, jnp.minimum(held, value), held)
    case _:
      return _reduce.select(counted, value, held)


def _finish(
  kind: str, held: jax.Array, weight: _reduce.Weight, dtype: chex.ArrayDType
) -> jax.Array:
  if kind == "mean":
    return _reduce.mean(held, weight, dtype)
  if kind == "sum" and jnp.issubdtype(dtype, jnp.inexact):
    return held.astype(dtype)
  return held


def _identity(kind: str, dtype: chex.ArrayDType) -> float | int | bool:
  if dtype == jnp.bool_:
    return kind == "min"
  if jnp.issubdtype(dtype, jnp.integer):
    info = jnp.iinfo(dtype)
    return int(info.min if kind == "max" else info.max)
  if _reduce.is_float8(dtype):  # some have no infinity
    return float(jnp.finfo(dtype).min if kind == "max" else jnp.finfo(dtype).max)
  return -jnp.inf if kind == "max" else jnp.inf
