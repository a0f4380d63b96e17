"""Data parallelism: a cycle of microbatches spread over one axis of a mesh."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum import _arguments, _reductions, _validate
from optax_accum._shards import Shards
from optax_accum._split import Split


@dataclasses.dataclass(frozen=True)
class DataParallel:
  """A mesh, the axis of it that rows are spread over, and when gradients are reduced."""

  mesh: Mesh
  axis: str
  every_microbatch: bool

  def __post_init__(self) -> None:
    if not isinstance(self.mesh, Mesh):
      raise TypeError(f"mesh={self.mesh!r} must be a jax.sharding.Mesh, as of jax.make_mesh.")
    if self.axis not in self.mesh.axis_names:
      raise ValueError(
        f"data_axis={self.axis!r} is no axis of the mesh, which has {self.mesh.axis_names}: name"
        " the one that the batch is sharded over."
      )
    types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
    manual = [name for name, kind in types.items() if kind == AxisType.Manual]
    if manual:
      raise ValueError(
        f"The mesh axes {manual} are manual, i.e. this is inside shard_map or pmap: pass axis_name="
        " there, or the mesh outside."
      )

  @property
  def size(self) -> int:
    """The number of devices along the axis."""
    return self.mesh.shape[self.axis]

  def sharding(self, *spec: Any) -> NamedSharding:
    """A sharding over this mesh."""
    return NamedSharding(self.mesh, PartitionSpec(*spec))

  def local(self, split: Split, rows: int) -> Split:
    """The split of one device's part of a global batch of `rows` rows."""
    count, size, devices = split.num_microbatches, split.microbatch_size, self.size
    self.check_rows(rows)
    if count is not None and (rows // devices) % count:
      fit = [n for n in range(1, rows // devices + 1) if (rows // devices) % n == 0]
      raise ValueError(
        f"num_microbatches={count} does not divide the {rows // devices} rows that each of the"
        f" {devices} devices of axis {self.axis!r} has: use one of {fit}, or microbatch_size=, a"
        f" multiple of {devices}."
      )
    if size is not None and size % devices:
      raise ValueError(
        f"microbatch_size={size} counts the rows on all devices together, and the {devices}"
        f" devices of axis {self.axis!r} do not divide it: use"
        f" {max(size - size % devices, devices)} or {size + devices - size % devices}."
      )
    return dataclasses.replace(
      split, axis_name=self.axis, microbatch_size=None if size is None else size // devices
    )

  def check_rows(self, rows: int) -> None:
    """Checks that the devices divide the rows of the global batch."""
    if rest := rows % self.size:
      raise ValueError(
        f"The batch has {rows} rows, which the {self.size} devices of axis {self.axis!r} do not"
        f" divide: use {rows - rest or self.size} or {rows + self.size - rest} rows. (They would"
        " have to be replicated, and every device to compute all of them.)"
      )

  def spread(self, params: Any) -> Any:
    """How the devices share every parameter, from the shardings that the parameters have.

    A dimension that is sharded over the data axis and no other is scattered. Any other
    way to use the data axis falls back to a parameter that every device has in whole while
    the step runs.
    """

    def one(x: Any) -> _reductions.Spread:
      dims = [d for d, names in enumerate(_spec(x)) if names in (self.axis, (self.axis,))]
      return _reductions.Spread(dims[0] if dims else None, self.every_microbatch)

    return jax.tree.map(one, params)

  def specs(self, spread: Any) -> Any:
    """The `PartitionSpec` of every parameter over the data axis alone."""
    return jax.tree.map(
      lambda s: PartitionSpec() if s.scatter is None else _spec_at(s.scatter, self.axis), spread
    )

  def run(
    self,
    fun: Callable[..., Any],
    spread: Any,
    out_specs: Any,
    split: Split,
    slots: tuple[_arguments.Slot, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
  ) -> Any:
    """``fun(local_split, shards, *args, **kwargs)`` on every device, with its part of the batch.

    The first argument is sharded as `spread` says and the batch, which is in `slots`, by its
    rows; all else is the same on all devices. Axes of the mesh other than the data axis are
    left to the compiler.
    """
    batch = [kwargs[slot] if isinstance(slot, str) else args[slot] for slot in slots]
    local = self.local(split, _arguments.batch_rows(slots, batch, split.batch_axis))
    shards = Shards(spread, self.axis, self.every_microbatch)

    def spec(slot: _arguments.Slot, tree: Any) -> Any:
      return jax.tree.map(
        lambda x: self.batch_spec(x, split) if slot in slots else PartitionSpec(), tree
      )

    in_specs = (
      (self.specs(spread), *(spec(i, x) for i, x in enumerate(args[1:], 1))),
      {name: spec(name, x) for name, x in kwargs.items()},
    )
    return jax.shard_map(
      lambda args, kwargs: fun(local, shards, *args, **kwargs),
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names={self.axis},
    )(*jax.tree.map(self._reshard, (args, kwargs), in_specs))

  def batch_spec(self, x: Any, split: Split) -> PartitionSpec:
    """The `PartitionSpec` of a batch leaf over the data axis alone."""
    return _spec_at(split.batch_axis % max(jnp.ndim(x), 1), self.axis)

  @property
  def _explicit(self) -> bool:
    types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
    return types[self.axis] == AxisType.Explicit

  def like(self, grads: Any, shardings: Any) -> Any:
    """Gradients with the shardings of their parameters, which an explicit mesh insists on."""
    if not self._explicit:
      return grads
    return jax.tree.map(lambda g, s: g if s is None else jax.reshard(g, s), grads, shardings)

  def _reshard(self, x: Any, spec: PartitionSpec) -> Any:
    """Moves an array of explicit sharding to `spec` over the data axis; others are moved by XLA."""
    if not self._explicit:
      return x
    kept = [
      tuple(a for a in ((names,) if isinstance(names, str) else names or ()) if a != self.axis)
      for names in [*_spec(jax.typeof(x)), *[None] * jnp.ndim(x)][: jnp.ndim(x)]
    ]
    for dim, names in enumerate(spec):
      kept[dim] = (*kept[dim], names) if names else kept[dim]
    return jax.reshard(x, self.sharding(*(names or None for names in kept)))

  def place(self, name: str, tree: Any, spec: Callable[[Any], PartitionSpec]) -> Any:
    """`tree` on this mesh: as it is where it is there, else with the `PartitionSpec` of `spec`.

    Shapes (`jax.ShapeDtypeStruct`) are placed as arrays are; traced values are left alone.
    """

    def put(path: Any, x: Any) -> Any:
      if isinstance(x, jax.core.Tracer):
        return x
      sharding = getattr(x, "sharding", None)
      if isinstance(sharding, NamedSharding):
        if sharding.mesh != self.mesh:
          raise ValueError(
            f"{_validate.leaf_name(name, path)} is on {sharding.mesh}, and mesh= is {self.mesh}:"
            " pass the mesh that the arrays are on, or jax.device_put them."
          )
        return x
      target = NamedSharding(self.mesh, spec(x))
      for size, axes in zip(x.shape, target.spec, strict=False):
        if axes is not None:
          self.check_rows(size)
      if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
      return jax.device_put(x, target)

    return jax.tree_util.tree_map_with_path(put, tree)

  def place_batch(self, name: str, tree: Any, split: Split) -> Any:
    """A batch on this mesh, sharded by its rows."""
    tree = self.place(name, tree, lambda x: self.batch_spec(x, split))
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
      spec = _spec(x)
      names = spec[split.batch_axis % x.ndim] if split.batch_axis % x.ndim < len(spec) else None
      if names not in (None, self.axis, (self.axis,)):
        raise ValueError(
          f"{_validate.leaf_name(name, path)} has its rows sharded over {names!r}: shard them over"
          f" data_axis={self.axis!r} or not at all."
        )
    return tree


def _spec(x: Any) -> tuple[Any, ...]:
  return tuple(getattr(getattr(x, "sharding", None), "spec", None) or ())


def _spec_at(dim: int, axis: str) -> PartitionSpec:
  return PartitionSpec(*[None] * dim, axis)
