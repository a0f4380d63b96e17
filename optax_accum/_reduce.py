"""The one arithmetic: weighted means, sums and the other reductions.

Streaming, scan, ragged, weighted and multi-device accumulation are all

    sum_i w_i g_i / sum_i w_i

and all of them add with `weigh` and divide with `mean`. The loop holds nothing but
the sum: dividing once, after it, keeps the rounding of the whole batch, and lets a
compiler (or `psum`) reduce over devices once per cycle and not once per microbatch.
"""

from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _validate

# A Python number is a weight known when tracing: it costs nothing when it is 1.
Weight = float | jax.Array


def promote(*dtypes: chex.ArrayDType) -> jnp.dtype:
  """The dtype that all `dtypes` promote to, also where a user forbids implicit promotion."""
  # JAX promotes 8-bit floats to nothing by itself; float32 holds them all.
  wide = [jnp.float32 if is_float8(d) else jnp.dtype(d) for d in dtypes]
  with jax.numpy_dtype_promotion("standard"):
    return jnp.result_type(*wide)


def is_float8(dtype: chex.ArrayDType) -> bool:
  """Whether `dtype` is a float of 8 bits or fewer."""
  return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1


def accumulator_dtype(
  dtype: chex.ArrayDType, requested: chex.ArrayDType | None = None
) -> jnp.dtype:
  """The dtype that values of `dtype` are added up in.

  Inexact values: `requested`, or else `dtype` promoted with float32 (bfloat16 ->
  float32, float64 and complex64 as they are); of a complex `requested`, real values get the real
  part. Integers and bools: themselves, but at least 32 bits.
  """
  if not jnp.issubdtype(dtype, jnp.inexact):
    if jnp.dtype(dtype).itemsize >= 4:
      return jnp.dtype(dtype)
    return jnp.dtype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
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
    # An axis of `vmap` has no such types.
    mapped = set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes)
    missing = tuple(mapped - varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  if axis_name is None:
    return tree
  _validate.bound_axis(axis_name)
  axes = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  return jax.tree.map(cast, tree)


def across_devices(
  kind: str, held: jax.Array, axis_name: Any, counted: bool | jax.Array = True
) -> jax.Array:
  """Joins what each device holds, before the division: sums add up, and so do weights.

  `counted` is whether this device had a microbatch that counts.
  """
  match kind:
    case "mean" | "sum":
      return lax.psum(held, axis_name)
    case "max":
      return lax.pmax(held, axis_name)
    case "min":
      return lax.pmin(held, axis_name)
    case _:  # that of the last device that has one
      index = lax.axis_index(axis_name)
      rank = select(counted, index, jnp.full_like(index, -1))
      last = (rank == lax.pmax(rank, axis_name)) & (rank >= 0)
      number = held.astype(accumulator_dtype(held.dtype))
      return lax.psum(select(last, number, jnp.zeros_like(number)), axis_name).astype(held.dtype)
