"""The one arithmetic: weighted means, sums and the other reductions.

Streaming, scan, ragged, weighted and multi-device accumulation are all

    sum_i w_i g_i / sum_i w_i

and all of them add with `weigh` and divide with `mean`. The loop holds nothing but
the sum: dividing once, after it, keeps the rounding of the whole batch, and lets a
compiler (or `psum`) reduce over devices once per cycle and not once per microbatch.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _validate

# A Python number is a weight known when tracing: it costs nothing when it is 1.
Weight = float | jax.Array

REDUCTIONS = ("mean", "sum", "max", "min", "last", "stack", "concat")
# These keep every microbatch's value; the scan returns them as its stacked outputs.
COLLECTED = ("stack", "concat")


def promote(*dtypes: chex.ArrayDType) -> jnp.dtype:
  """The dtype that all `dtypes` promote to, also where a user forbids implicit promotion."""
  with jax.numpy_dtype_promotion("standard"):
    return jnp.result_type(*map(jnp.dtype, dtypes))


def accumulator_dtype(
  dtype: chex.ArrayDType, requested: chex.ArrayDType | None = None
) -> jnp.dtype:
  """The dtype that values of `dtype` are added up in.

  Inexact values: `requested`, or else `dtype` promoted with float32 (bfloat16 ->
  float32, float64 and complex64 as they are); of a complex `requested`, real values get the real
  part. Integers and bools: at least int32, as `jnp.sum` does.
  """
  if not jnp.issubdtype(dtype, jnp.inexact):
    return promote(dtype, jnp.int32)
  if requested is None:
    return promote(dtype, jnp.float32)
  if jnp.issubdtype(requested, jnp.complexfloating) and not jnp.issubdtype(
    dtype, jnp.complexfloating
  ):
    return jnp.finfo(requested).dtype
  return jnp.dtype(requested)


def as_weight(weight: chex.Numeric) -> jax.Array:
  """A weight as a float scalar; float64 stays float64, counts become the default float."""
  weight = jnp.asarray(weight)
  if jnp.issubdtype(weight.dtype, jnp.floating):
    return weight.astype(promote(weight.dtype, jnp.float32))
  return weight.astype(jnp.result_type(float))


def counts(weight: Weight) -> bool | jax.Array:
  """Whether a microbatch of this weight counts at all; a NaN weight does, and shows."""
  return weight != 0


def select(counted: bool | jax.Array, value: jax.Array, other: jax.Array) -> jax.Array:
  """`value` where the microbatch counted, else `other`; no operation if that is static."""
  if isinstance(counted, bool):
    return value if counted else other
  return jnp.where(counted, value, other)


def weigh(value: jax.Array, weight: Weight, dtype: chex.ArrayDType) -> jax.Array:
  """``weight * value`` in `dtype`, and zero where the weight is zero, even for NaN.

  The value is selected before it is multiplied, because ``0 * nan`` is ``nan``: an
  all-padding microbatch has a loss of 0/0. The product is taken in float32 or better,
  because bfloat16 cannot hold every count of tokens above 256.
  """
  if isinstance(weight, (int, float)) and weight == 1:
    return value.astype(dtype)
  wide = promote(value.dtype, promote(dtype, jnp.float32))
  value = value.astype(wide)
  value = select(counts(weight), value, jnp.zeros_like(value))
  return (value * (weight.astype(wide) if isinstance(weight, jax.Array) else weight)).astype(dtype)


def mean(total: jax.Array, weight: Weight, dtype: chex.ArrayDType) -> jax.Array:
  """``total / weight`` in `dtype`, and zero where the weight is zero.

  Multiplies by the scalar reciprocal: XLA keeps the quotient by a traced scalar as a
  buffer of its own, where the product fuses into whatever reads it.
  """
  if isinstance(weight, (int, float)) and weight == 1:
    return total.astype(dtype)
  wide = promote(total.dtype, jnp.float32)
  total = total.astype(wide)
  if not isinstance(weight, jax.Array):
    return (total * (1 / weight if weight else 0.0)).astype(dtype)
  one = jnp.ones((), wide)
  inverse = one / jnp.where(weight == 0, one, weight.astype(wide))
  return (total * jnp.where(weight == 0, jnp.zeros((), wide), inverse)).astype(dtype)


def all_finite(tree: chex.ArrayTree) -> jax.Array:
  """Whether every inexact leaf of `tree` is finite: a bool scalar."""
  finite = [
    jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  return jnp.all(jnp.stack(finite)) if finite else jnp.asarray(True)


def _identity(kind: str, dtype: chex.ArrayDType) -> float | int | bool:
  if dtype == jnp.bool_:
    return kind == "min"
  if jnp.issubdtype(dtype, jnp.integer):
    info = jnp.iinfo(dtype)
    return int(info.min if kind == "max" else info.max)
  return -jnp.inf if kind == "max" else jnp.inf


def _start(kind: str, leaf: jax.ShapeDtypeStruct, dtype: chex.ArrayDType | None) -> jax.Array:
  match kind:
    case "mean" | "sum":
      return full_like(leaf, 0, accumulator_dtype(leaf.dtype, dtype))
    case "max" | "min":
      return full_like(leaf, _identity(kind, leaf.dtype))
    case _:
      return full_like(leaf, 0)


def _step(kind: str, held: jax.Array, value: jax.Array, weight: Weight) -> jax.Array:
  counted = counts(weight)
  match kind:
    case "max":
      return select(counted, jnp.maximum(held, value), held)
    case "min":
      return select(counted, jnp.minimum(held, value), held)
    case _:
      return select(counted, value, held)


def _finish(kind: str, held: jax.Array, weight: Weight, dtype: chex.ArrayDType) -> jax.Array:
  if kind == "mean":
    return mean(held, weight, dtype)
  if kind == "sum" and jnp.issubdtype(dtype, jnp.inexact):
    return held.astype(dtype)
  return held


def varying_axes(x: Any) -> frozenset[Any]:
  """The axes over which an array, or a type of one, differs between devices (`shard_map`)."""
  type_ = jax.typeof(x) if isinstance(x, jax.Array) else x
  axes = getattr(type_, "manual_axis_type", None)  # jax 0.10 and later; before that, `vma`
  return getattr(type_, "vma", None) or frozenset() if axes is None else axes.varying


def vary_like(x: jax.Array, like: Any) -> jax.Array:
  """`x`, typed as differing between devices over the axes over which `like` does."""
  missing = tuple(varying_axes(like) - varying_axes(x))
  return lax.pcast(x, missing, to="varying") if missing else x


def full_like(
  like: jax.ShapeDtypeStruct, value: float | int | bool, dtype: chex.ArrayDType | None = None
) -> jax.Array:
  """An array of one value with the type of `like`, whose dtype may be another.

  The type includes an explicit sharding and, in `shard_map`, the axes that it varies over:
  the carry of a scan must keep all of it.
  """
  sharding = like.sharding
  explicit = sharding is not None and any(
    kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types
  )
  full = lax.full(like.shape, value, dtype or like.dtype, sharding=sharding if explicit else None)
  return vary_like(full, like)


def varying(tree: Any, axis_name: Any) -> Any:
  """`tree`, typed as differing between the devices of an axis (in `shard_map`).

  The gradient of a value that is the same on all devices is summed over them by JAX,
  once for every microbatch; the gradient of a varying one stays on its device.
  """

  def cast(x: chex.Numeric) -> jax.Array:
    x = jnp.asarray(x)
    axes = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  if axis_name is None:
    return tree
  _validate.bound_axis(axis_name)
  return jax.tree.map(cast, tree)


def across_devices(kind: str, held: jax.Array, axis_name: Any) -> jax.Array:
  """Joins what each device holds, before the division: sums add up, and so do weights."""
  match kind:
    case "mean" | "sum":
      return lax.psum(held, axis_name)
    case "max":
      return lax.pmax(held, axis_name)
    case "min":
      return lax.pmin(held, axis_name)
    case _:  # the last device's
      last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
      number = held.astype(accumulator_dtype(held.dtype))
      return lax.psum(select(last, number, jnp.zeros_like(number)), axis_name).astype(held.dtype)


def _join(kind: str, rows: jax.Array, tail: jax.Array | None) -> jax.Array:
  """The collected values of all microbatches, whose index is the leading axis of `rows`."""
  if kind == "stack":
    return rows if tail is None else jnp.concatenate([rows, tail[None]])
  # Microbatch i has rows i, i + N, ... of the batch, so the index is the fast axis.
  rows = jnp.moveaxis(rows, 0, 1)
  rows = rows.reshape(-1, *rows.shape[2:])
  return rows if tail is None else jnp.concatenate([rows, tail])


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

    `axis_name` is the mesh axis that the microbatches are spread over, or None; `spread` a
    prefix tree of `Spread` over the outputs.
    """
    try:
      kinds = jax.tree.broadcast(names, like)
    except ValueError as e:
      raise ValueError(
        f"The reductions {names!r} are not a prefix tree of the outputs, whose structure is"
        f" {jax.tree.structure(like)}: give one name, or a tree that stops at or above the"
        f" outputs' leaves. ({e})"
      ) from None
    self.kinds = jax.tree.leaves(kinds)
    paths, self.treedef = jax.tree_util.tree_flatten_with_path(like)
    self.names = [_validate.leaf_name(root, path) for path, _ in paths]
    self.like = [leaf for _, leaf in paths]
    self.axis_name = axis_name
    self.spread = jax.tree.leaves(jax.tree.broadcast(spread or Spread(), like))
    for kind, name, leaf in zip(self.kinds, self.names, self.like, strict=True):
      _check_leaf(kind, name, leaf, rows)

  def start(self, dtype: chex.ArrayDType | None) -> dict[int, jax.Array]:
    """What is held before the first microbatch."""
    held = {}
    for i, (kind, leaf) in enumerate(zip(self.kinds, self.like, strict=True)):
      if kind in ("mean", "sum"):
        _validate.holds_dtype(self.names[i], leaf.dtype, dtype)
      if kind not in COLLECTED:
        held[i] = _start(kind, leaf, dtype)
        if self.spread[i].every_microbatch:
          like = jax.eval_shape(functools.partial(self._over_devices, i), held[i])
          held[i] = full_like(like, 0)
    return held

  def step(self, held: dict[int, jax.Array], outputs: Any, weight: Weight) -> tuple[Any, Any]:
    """Takes one microbatch in: ``(held, collected)``. Zero weight changes nothing held."""
    leaves = jax.tree.leaves(outputs)
    new = {i: self._step(i, h, leaves[i], weight) for i, h in held.items()}
    return new, {i: x for i, x in enumerate(leaves) if self.kinds[i] in COLLECTED}

  def _step(self, i: int, held: jax.Array, value: jax.Array, weight: Weight) -> jax.Array:
    kind = self.kinds[i]
    if kind not in ("mean", "sum"):
      return _step(kind, held, value, weight)
    if kind == "sum":
      value = select(counts(weight), value, jnp.zeros_like(value)).astype(held.dtype)
    else:
      value = weigh(value, weight, held.dtype)
    if self.spread[i].every_microbatch:
      # A barrier, because XLA for TPU would add up whole values and reduce after the loop.
      value = lax.optimization_barrier(self._over_devices(i, value))
    return held + value

  def _over_devices(self, i: int, held: jax.Array) -> jax.Array:
    scatter = self.spread[i].scatter
    if scatter is None:
      return across_devices(self.kinds[i], held, self.axis_name)
    if jax.sharding.AxisType.Explicit in jax.typeof(held).sharding.mesh.axis_types:
      # Where other axes of the mesh are explicit, JAX (to 0.12) cannot lower psum_scatter.
      total = lax.psum(held, self.axis_name)
      size = total.shape[scatter] // lax.axis_size(self.axis_name)
      start = lax.axis_index(self.axis_name) * size
      return lax.dynamic_slice_in_dim(total, start, size, scatter)
    return lax.psum_scatter(held, self.axis_name, scatter_dimension=scatter, tiled=True)

  def finish(self, held: Any, collected: Any, tail: Any, weight: Weight) -> Any:
    """The reduced outputs; every leaf in the dtype that one microbatch gives it.

    Args:
      held: What `step` held last.
      collected: What `step` collected, stacked over the microbatches of equal size.
      tail: What it collected of the smaller last one, or None.
      weight: The total weight, over all devices.
    """
    leaves = []
    for i, (kind, leaf) in enumerate(zip(self.kinds, self.like, strict=True)):
      if kind in COLLECTED:
        leaves.append(_join(kind, collected[i], tail and tail[i]))
        continue
      value = held[i]
      if self.axis_name is not None and not self.spread[i].every_microbatch:
        value = self._over_devices(i, value)
      leaves.append(_finish(kind, value, weight, leaf.dtype))
    return jax.tree.unflatten(self.treedef, leaves)

  def only(self, outputs: Any) -> Any:
    """The reduced outputs where there is one microbatch, which counts."""
    leaves = []
    for kind, x in zip(self.kinds, jax.tree.leaves(outputs), strict=True):
      if kind == "stack":
        x = x[None]
      elif kind == "sum" and not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(accumulator_dtype(x.dtype))
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
