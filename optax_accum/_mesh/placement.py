"""How arrays are put on a mesh: parameters, an optimizer state, and whatever else a step takes."""

from collections.abc import Callable, Sequence
import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum import _validate
from optax_accum._mesh.state_shards import followed


@dataclasses.dataclass(eq=False, repr=False)
class Placement:
  """A mesh, and what it takes to put arrays there."""

  mesh: Mesh

  def place(
    self, name: str, tree: Any, spec: Callable[[Any], PartitionSpec] = lambda x: PartitionSpec()
  ) -> Any:
    """`tree` on this mesh: as it is where it is there, else with the `PartitionSpec` of `spec`.

    By default that is a copy on every device. Shapes are placed as arrays, Python numbers as the
    weakly typed arrays that `jax.jit` makes of them; tracers stay.
    """
    leaves = jax.tree.leaves(tree)
    return tree if self._has(leaves) else self._put(name, tree, list(map(spec, leaves)))

  def place_state(self, name: str, params: Any, opt_state: Any) -> Any:
    """An optimizer state on this mesh. What is not there yet goes where its parameter is.

    So shards of parameters have shards of moments, also where the state was made on one device, as
    by ``jax.jit(tx.init)``, or read from a file.
    """
    leaves = jax.tree.leaves(opt_state)
    if self._has(leaves):
      return opt_state
    parameters = jax.tree.leaves(params)

    def spec(number: int | None, x: Any) -> PartitionSpec:
      if number is None or jnp.shape(x) != jnp.shape(parameters[number]):
        return PartitionSpec()
      sharding = self.sharding(parameters[number])
      return PartitionSpec() if sharding is None else sharding.spec

    specs = list(map(spec, followed(params, opt_state), leaves))
    return self._put(name, opt_state, specs)

  def _put(self, name: str, tree: Any, specs: Sequence[PartitionSpec]) -> Any:
    """`tree` on this mesh; `specs` are for the leaves that are not there."""

    def put(path: Any, x: Any, spec: PartitionSpec) -> Any:
      sharding = self.sharding(x)
      if sharding is not None and sharding.mesh == self.mesh:
        return x
      if sharding is not None and sharding.mesh != self.mesh.abstract_mesh:
        raise ValueError(
          f"{_validate.leaf_name(name, path)} is on {sharding.mesh}, and mesh= is {self.mesh}:"
          " pass the mesh that the arrays are on, or jax.device_put them."
        )
      if isinstance(x, jax.core.Tracer):
        return x
      target = NamedSharding(self.mesh, spec if sharding is None else sharding.spec)
      if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=target)
      return jax.device_put(x, target)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    placed = [put(*leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), placed)

  def _has(self, leaves: list[Any]) -> bool:
    """Whether all are arrays on this mesh, told from the few shardings that they share."""
    if not all(issubclass(kind, jax.Array) for kind in set(map(type, leaves))):
      return False
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
      return False
    shardings = {id(s): s for s in map(operator.attrgetter("sharding"), leaves)}.values()
    return all(isinstance(s, NamedSharding) and s.mesh == self.mesh for s in shardings)

  def sharding(self, x: Any) -> NamedSharding | None:
    """How an array, a shape or a tracer is sharded over a mesh, where that can be told.

    Tracers, and what `jax.eval_shape` returns, have a sharding over explicit axes in their type,
    and over an abstract mesh. Over automatic axes it is for XLA to decide, later.
    """
    traced = isinstance(x, jax.core.Tracer)
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
      return None
    told = isinstance(sharding.mesh, Mesh) or AxisType.Explicit in sharding.mesh.axis_types
    return sharding if told else None
