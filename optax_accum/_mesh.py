"""Data parallelism: how arrays are placed on a mesh, and the batch spread over its data axis."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum import _validate
from optax_accum._reductions import Reduction
from optax_accum._split import Split


@dataclasses.dataclass(eq=False, repr=False)
class DataParallel:
  """A mesh, the axis of it that rows are spread over, and when gradients are reduced."""

  mesh: Mesh
  axis: str
  reduce_in_loop: bool

  def __post_init__(self) -> None:
    if not isinstance(self.mesh, Mesh):
      raise TypeError(f"mesh={self.mesh!r} must be a jax.sharding.Mesh, as of jax.make_mesh.")
    if self.axis not in self.mesh.axis_names:
      raise ValueError(
        f"data_axis={self.axis!r} is no axis of the mesh, which has {self.mesh.axis_names}: name"
        " the one that the batch is sharded over."
      )
    types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
    if manual := [name for name, kind in types if kind == AxisType.Manual]:
      raise ValueError(
        f"The mesh axes {manual} are manual, i.e. this is inside shard_map or pmap: pass axis_name="
        " there, or the mesh outside."
      )

  @property
  def _explicit(self) -> bool:
    types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
    return types[self.axis] == AxisType.Explicit

  def local_split(self, split: Split, rows: int) -> Split:
    """The split of one device's part of a global batch of `rows` rows."""
    count, size = split.num_microbatches, split.microbatch_size
    devices = self.mesh.shape[self.axis]
    self._check_rows(rows)
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
        f" {f'{size - size % devices} or ' * (size > devices)}{size + devices - size % devices}."
      )
    return dataclasses.replace(
      split,
      axis_name=self.axis,
      microbatch_size=None if size is None else size // devices,
      rows=rows,
    )

  def _check_rows(self, rows: int) -> None:
    """Checks that the devices divide the rows of the global batch."""
    devices = self.mesh.shape[self.axis]
    if rest := rows % devices:
      raise ValueError(
        f"The batch has {rows} rows, which the {devices} devices of axis {self.axis!r} do not"
        f" divide: use {rows - rest or devices} or {rows + devices - rest} rows. (They would have"
        " to be replicated, and every device to compute all of them.)"
      )

  def shard_spec(self, sharding: Any) -> PartitionSpec:
    """How a parameter of this sharding is spread over the data axis alone.

    A dimension that is sharded over the data axis and no other is sharded. Any other
    way to use the data axis falls back to a parameter that every device has in whole while
    the step runs.
    """
    spec = getattr(sharding, "spec", None) or ()
    dims = [d for d, names in enumerate(spec) if names in (self.axis, (self.axis,))]
    return self._spec_at(dims[0]) if dims else PartitionSpec()

  def batch_spec(self, x: Any, batch_axis: int) -> PartitionSpec:
    """The `PartitionSpec` of a batch leaf over the data axis alone."""
    return self._spec_at(batch_axis % max(jnp.ndim(x), 1))

  def output_spec(self, reduction: Reduction) -> PartitionSpec:
    """The `PartitionSpec` of a reduced output; one that collects has the devices' parts in turn."""
    return self._spec_at(0) if reduction.collected else PartitionSpec()

  def _spec_at(self, dimension: int) -> PartitionSpec:
    return PartitionSpec(*[None] * dimension, self.axis)

  def like(self, grads: Any, shardings: Any) -> Any:
    """Gradients with the shardings of their parameters, which an explicit mesh insists on."""
    if not self._explicit:
      return grads
    return jax.tree.map(lambda g, s: g if s is None else jax.reshard(g, s), grads, shardings)

  def reshard(self, x: Any, spec: PartitionSpec) -> Any:
    """Moves an array of explicit sharding to `spec` over the data axis; others are moved by XLA."""
    if not self._explicit:
      return x
    kept = [
      tuple(a for a in ((names,) if isinstance(names, str) else names or ()) if a != self.axis)
      for names in [*_spec(jax.typeof(x)), *[None] * jnp.ndim(x)][: jnp.ndim(x)]
    ]
    for dim, names in enumerate(spec):
      kept[dim] = (*kept[dim], names) if names else kept[dim]
    spec = PartitionSpec(*(names or None for names in kept))
    return jax.reshard(x, NamedSharding(self.mesh, spec))

  def place(
    self, name: str, tree: Any, spec: Callable[[Any], PartitionSpec] = lambda x: PartitionSpec()
  ) -> Any:
    """`tree` on this mesh: as it is where it is there, else with the `PartitionSpec` of `spec`.

    By default that is a copy on every device. Shapes are placed as arrays; tracers stay.
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
          self._check_rows(size)
      if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
      return jax.device_put(x, target)

    return jax.tree_util.tree_map_with_path(put, tree)

  def place_batch(self, name: str, tree: Any, batch_axis: int) -> Any:
    """A batch on this mesh, sharded by its rows."""
    tree = self.place(name, tree, lambda x: self.batch_spec(x, batch_axis))
    for leaf, x in _validate.named_leaves(name, tree):
      spec, rows = _spec(x), batch_axis % x.ndim
      names = spec[rows] if rows < len(spec) else None
      if names not in (None, self.axis, (self.axis,)):
        raise ValueError(
          f"{leaf} has its rows sharded over {names!r}: shard them over"
          f" data_axis={self.axis!r} or not at all."
        )
    return tree


def _spec(x: Any) -> tuple[Any, ...]:
  return tuple(getattr(getattr(x, "sharding", None), "spec", None) or ())
