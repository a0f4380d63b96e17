"""Reductions over the devices of an axis, and the types of values that differ between devices."""

from collections.abc import Callable, Hashable, Iterable, Sequence
import functools
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.trees import Leaf, Tree

# An axis of `pmap`, `shard_map` or `vmap`, or several of them.
AxisName: TypeAlias = Hashable | Sequence[Hashable]


def is_bound(axis_name: AxisName) -> bool:
  """Whether a collective over `axis_name` can run here."""
  try:
    lax.axis_size(axis_name)
  except NameError:
    return False
  return True


def check_bound(axis_name: AxisName) -> int:
  """The number of devices of an axis, over which a collective must be able to run here."""
  if not is_bound(axis_name):
    raise ValueError(
      f"axis_name={axis_name!r} is not bound here: call this inside jax.pmap, jax.shard_map or"
      " jax.vmap with that axis name, or leave axis_name out (under plain jax.jit a sharded batch"
      " needs none)."
    )
  return int(lax.axis_size(axis_name))


def varying_axes(x: Leaf) -> frozenset[Any]:
  """The axes over which an array, or a type of one, differs between devices (`shard_map`)."""
  type_ = jax.typeof(x) if isinstance(x, jax.Array) else x
  axes = getattr(
    type_, "manual_axis_type", None
  )  # jax 0.10 and later; before that, `vma`
  return (
    getattr(type_, "vma", None) or frozenset() if axes is None else axes.varying
  )


def vary_like(x: jax.Array, like: Leaf) -> jax.Array:
  """`x`, typed as differing between devices over the axes over which `like` does."""
  return _vary(x, varying_axes(like))


def _vary(x: jax.Array, axes: Iterable[Hashable]) -> jax.Array:
  missing = tuple(set(axes) - varying_axes(x))
  return lax.pcast(x, missing, to="varying") if missing else x


def types(traced: tuple[Any, Tree]) -> Tree:
  """The types of the results, which `jax.make_jaxpr` (``return_shape=True``) has in two parts."""
  closed, shapes = traced  # these lack some explicit shardings
  return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


def full_like(
  like: jax.ShapeDtypeStruct, value: ArrayLike, dtype: DTypeLike | None = None
) -> jax.Array:
  """An array of one value with the type of `like`, or another dtype, for the carry of a scan."""
  sharding = like.sharding if _is_explicit(like.sharding) else None
  return vary_like(
    lax.full(like.shape, value, dtype or like.dtype, sharding=sharding), like
  )


def _is_explicit(sharding: Any) -> bool:
  return (
    sharding is not None
    and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  )


def sharded_like(x: jax.Array, like: Leaf) -> jax.Array:
  """`x` with the explicit sharding of `like`, where it has one."""
  sharding = jax.typeof(like).sharding
  if not _is_explicit(sharding) or jax.typeof(x).sharding == sharding:
    return x
  return jax.reshard(x, sharding)


def varying(tree: Tree, axis_name: AxisName | None) -> Tree:
  """`tree`, typed as differing between devices, so that JAX does not sum its gradient over them."""
  if axis_name is None:
    return tree
  axes = typed_axes(axis_name)
  return jax.tree.map(lambda x: _vary(jnp.asarray(x), axes), tree)


def typed_axes(axis_name: AxisName) -> frozenset[Any]:
  """The axes of `axis_name` over which types tell what differs: none with ``check_vma=False``."""
  check_bound(axis_name)
  return varying_axes(jax.eval_shape(lambda: lax.axis_index(axis_name)))


def shares_mesh() -> bool:
  """Whether the mesh has axes that are not mapped here: over these the compiler may communicate."""
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    n > 1 for name, n in mesh.shape.items() if name not in mesh.manual_axes
  )


def _extreme(
  reduce: Callable[..., jax.Array],
  held: jax.Array,
  axis_name: AxisName,
  counted: object = True,
) -> jax.Array:
  """The largest or smallest over devices, as `lax.pmax` or `lax.pmin`; NaN where one has that."""
  if not jnp.issubdtype(held.dtype, jnp.floating):
    return reduce(held, axis_name)

  @jax.custom_jvp
  def of_all(held: jax.Array) -> jax.Array:
    # XLA for CPU drops what is NaN, so whether it is goes along.
    is_nan = jnp.isnan(held)
    flag = is_nan.astype(held.dtype) * (1 if reduce is lax.pmax else -1)
    number = jnp.where(is_nan, jnp.zeros_like(held), held)
    number, flag = reduce(jnp.stack([number, flag]), axis_name)
    return jnp.where(flag != 0, jnp.full_like(number, jnp.nan), number)

  @of_all.defjvp
  def derivative(primals: Any, tangents: Any) -> Any:  # which JAX has none of
    """Devices that hold the extreme share its derivative."""
    (held,), (tangent,), most = primals, tangents, of_all(*primals)
    holds = (held == most) | (jnp.isnan(held) & jnp.isnan(most))
    shared = jnp.where(holds, tangent, jnp.zeros_like(tangent))
    total, holders = lax.psum((shared, holds.astype(tangent.dtype)), axis_name)
    return most, total / holders

  wide = jnp.float32 if dtypes.is_float8(held.dtype) else held.dtype
  return of_all(held.astype(wide)).astype(held.dtype)


largest = functools.partial(_extreme, lax.pmax)
smallest = functools.partial(_extreme, lax.pmin)


def of_any(flag: bool | jax.Array, axis_name: AxisName) -> jax.Array:
  """Whether it is true on some device."""
  return lax.pmax(jnp.int32(flag), axis_name) > 0


def of_all(flag: jax.Array, axis_name: AxisName) -> jax.Array:
  """Whether it is true on all devices."""
  return lax.pmin(jnp.int32(flag), axis_name) > 0


def of_last(
  held: jax.Array, axis_name: AxisName, counted: bool | jax.Array
) -> jax.Array:
  """What the last device holds that has `counted` true; zeros where none has."""
  index = lax.axis_index(axis_name)
  rank = weighted_mean.select(counted, index, jnp.full_like(index, -1))
  last = (rank == lax.pmax(rank, axis_name)) & (rank >= 0)
  return of_one(held, axis_name, last)


def of_one(x: jax.Array, axis_name: AxisName, chosen: jax.Array) -> jax.Array:
  """What the device holds where `chosen` is true; zeros where none is. `chosen` may have axes."""
  if dtypes.is_key(x):
    data = of_one(
      jax.random.key_data(x),
      axis_name,
      chosen[..., None] if chosen.ndim else chosen,
    )
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  number = x.astype(dtypes.accumulator_dtype(x.dtype))
  number = weighted_mean.select(chosen, number, jnp.zeros_like(number))
  return lax.psum(number, axis_name).astype(x.dtype)


def sum_scattered(
  held: jax.Array,
  axis_name: Sequence[str],
  counted: object,
  spec: PartitionSpec,
  automatic: PartitionSpec,
) -> jax.Array:
  """The sum over devices. Each keeps its part by `spec`; `automatic` has the automatic axes."""
  if _is_explicit(jax.typeof(held).sharding):
    # Where other axes of the mesh are explicit, JAX (to 0.12) cannot lower psum_scatter.
    return own_part(lax.psum(held, axis_name), spec)
  held = _on_shards(
    lax.psum_scatter, "scatter_dimension", held, spec, automatic
  )
  scattered = {
    name for _, names in _sharded_dims(spec) for name in names_of(names)
  }
  rest = tuple(name for name in axis_name if name not in scattered)
  return lax.psum(held, rest) if rest else held


def gathered(
  x: jax.Array, spec: PartitionSpec, automatic: PartitionSpec
) -> jax.Array:
  """The full array, of the parts that devices have as `spec` says; `automatic` as above."""
  return _on_shards(lax.all_gather, "axis", x, spec, automatic)


def _on_shards(
  send: Callable[..., jax.Array],
  dimension: str,
  x: jax.Array,
  spec: PartitionSpec,
  automatic: PartitionSpec,
) -> jax.Array:
  """`send` of the shards of `x` over `automatic`: XLA would gather `x` over these axes first."""
  sent = _sharded_dims(spec)
  dims = [
    None if dim in dict(sent) else names for dim, names in enumerate(automatic)
  ]
  axes = {name for names in dims for name in names_of(names)}

  def send_all(x: jax.Array) -> jax.Array:
    for dim, names in sent:
      x = send(x, names, tiled=True, **{dimension: dim})
    return x

  if not axes or not sent:
    return send_all(x)
  shards = PartitionSpec(*dims)
  on_shards = jax.shard_map(
    send_all,
    in_specs=shards,
    out_specs=shards,
    axis_names=axes,
    check_vma=False,
  )
  return on_shards(x)


def own_part(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """The part of a replicated array that a device keeps, as `spec` says."""
  for dim, names in _sharded_dims(spec):
    size = x.shape[dim] // lax.axis_size(names)
    x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, dim)
  return x


def names_of(names: Any) -> tuple[Any, ...]:
  """One or several axes as a tuple, such as what a `PartitionSpec` has for one dimension."""
  return (
    tuple(names or ())
    if isinstance(names, (tuple, list, type(None)))
    else (names,)
  )


def _sharded_dims(spec: PartitionSpec) -> list[tuple[int, Any]]:
  """The dimensions that are sharded, each with its axes."""
  return [(dim, names) for dim, names in enumerate(spec) if names is not None]
