"""Reductions over the devices of an axis, and the types of values that differ between devices."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _versions
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.trees import Tree

# An axis of `pmap`, `shard_map` or `vmap`, or several of them.
AxisName: TypeAlias = Hashable | Sequence[Hashable]


def is_bound(axis_name: AxisName) -> bool:
  """Whether a collective over `axis_name` can run here."""
  try:
    lax.axis_size(axis_name)
  except NameError:
    return False
  return True


def names_of(names) -> tuple[Any, ...]:
  """One or several axes as a tuple, such as what a `PartitionSpec` has for one dimension."""
  if names is None:
    return ()
  if isinstance(names, (tuple, list)):
    return tuple(names)
  return (names,)


def varying_axes(x) -> frozenset[Any]:
  """The axes over which an array, or a type of one, differs between devices (`shard_map`)."""
  kind = x
  if isinstance(x, jax.Array):
    kind = jax.typeof(x)
  axes = getattr(kind, "manual_axis_type", None)  # jax 0.10 and later
  if axes is not None:
    return axes.varying
  # Before, a type has them as `vma`; one that does not say differs over none.
  return getattr(kind, "vma", None) or frozenset()


def vary_like(x: jax.Array, like) -> jax.Array:
  """`x`, typed as differing between devices over the axes over which `like` does."""
  return _vary(x, varying_axes(like))


def varying(tree, axis_name: AxisName):
  """`tree`, typed as differing between devices, so that JAX does not sum its gradient over them."""
  # The type of an index names the axes; with check_vma=False it names none, and nothing is cast.
  index = jax.eval_shape(lambda: lax.axis_index(axis_name))
  axes = varying_axes(index)
  return jax.tree.map(lambda x: _vary(jnp.asarray(x), axes), tree)


def _vary(x: jax.Array, axes: Iterable[Hashable]) -> jax.Array:
  """`x`, typed as differing over these axes too."""
  missing = tuple(set(axes) - varying_axes(x))
  if not missing:
    return x
  return lax.pcast(x, missing, to="varying")


def types(traced: tuple[Any, Tree]):
  """The types of the results, which `jax.make_jaxpr` (``return_shape=True``) has in two parts."""
  closed, shapes = traced  # `shapes` lack some explicit shardings
  return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


def full_like(
  like: jax.ShapeDtypeStruct, value: ArrayLike, dtype: DTypeLike | None = None
) -> jax.Array:
  """An array of one value with the type of `like`, or another dtype, for the carry of a scan."""
  # An explicit sharding is part of the type, and the carry of a scan keeps its type.
  sharding = None
  if is_explicit(like.sharding):
    sharding = like.sharding
  full = lax.full(like.shape, value, dtype or like.dtype, sharding=sharding)
  return vary_like(full, like)


def zeros_like(tree):
  """Zeros of the types in a tree."""
  return jax.tree.map(lambda x: full_like(x, 0), tree)


def is_explicit(sharding) -> bool:
  """Whether a sharding of a type has explicit axes of a mesh."""
  explicit = jax.sharding.AxisType.Explicit
  return sharding is not None and explicit in sharding.mesh.axis_types


def sharded_like(x: jax.Array, like) -> jax.Array:
  """`x` with the explicit sharding of `like`, where it has one."""
  sharding = jax.typeof(like).sharding
  if not is_explicit(sharding) or jax.typeof(x).sharding == sharding:
    return x
  return jax.reshard(x, sharding)


def axes_sent_over(jaxpr) -> set[Any]:
  """The axes over which a traced function sends anything from one device to another."""
  axes: set[Any] = set()
  for eqn in jaxpr.eqns:
    # These three name an axis, and send nothing.
    if eqn.primitive.name not in ("axis_index", "pcast", "pvary"):
      # A collective has its axes in one of these two parameters.
      for name in ("axes", "axis_name"):
        axes.update(names_of(eqn.params.get(name)))
    for inner in _versions.inner_jaxprs(eqn):
      axes |= axes_sent_over(inner)
  # Operations on arrays, such as reduce_sum, have numbers of dimensions as their `axes`.
  return {name for name in axes if isinstance(name, str)}


def shares_mesh() -> bool:
  """Whether the mesh has axes that are not mapped here: over these the compiler may communicate."""
  mesh = jax.sharding.get_abstract_mesh()
  sizes = mesh.shape.items()
  return any(n > 1 for name, n in sizes if name not in mesh.manual_axes)


def of_one(x: jax.Array, axis_name: AxisName, chosen: jax.Array) -> jax.Array:
  """On all devices, the `x` of the one whose `chosen` is true; zeros if there is none.

  Where `chosen` has axes, it chooses for each place by itself, broadcast with `x`.
  """
  if dtypes.is_key(x):
    # Keys cannot be summed, but the integers in them can.
    data = jax.random.key_data(x)
    # The integers of a key are on a last axis, which a `chosen` with axes must broadcast with.
    if chosen.ndim:
      chosen = chosen[..., None]
    data = of_one(data, axis_name, chosen)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  # In at least 32 bits, so that also a bool can be summed.
  wide = x.astype(dtypes.accumulator_dtype(x.dtype))
  # All devices but the chosen one add zeros, so the sum is its value.
  term = weighted_mean.select(chosen, wide, jnp.zeros_like(wide))
  total = lax.psum(term, axis_name)
  return total.astype(x.dtype)
