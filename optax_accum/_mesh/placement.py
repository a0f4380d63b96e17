"""How arrays are put on a mesh: parameters, an optimizer state, and whatever else a step takes."""

from collections.abc import Callable, Iterable, Sequence
import operator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum._arithmetic.trees import Leaves
from optax_accum._mesh.state_of_parameters import followed

SpecsOf: TypeAlias = Callable[[Leaves], Sequence[PartitionSpec]]


def place(
  mesh: Mesh, tree, specs_of: SpecsOf | None = None, copies: bool = True
):
  """`tree` on a mesh: leaves that are there stay, others get their `PartitionSpec`, or are whole.

  `specs_of` is given all leaves. Shapes are placed as arrays, and Python numbers as weakly typed
  arrays. Tracers stay. JAX puts an array on a mesh without a copy for the device that has it, so
  that to donate the new one deletes the old: hence the copies.
  """
  leaves, treedef = jax.tree.flatten(tree)
  # This shortcut looks at no leaf by itself.
  if _are_on(mesh, leaves):
    return tree
  specs: Sequence[PartitionSpec] = [PartitionSpec()] * len(leaves)
  if specs_of is not None:
    specs = specs_of(leaves)

  def put(x, spec):
    current: Any = getattr(x, "sharding", None)
    current_mesh = getattr(current, "mesh", None)
    if isinstance(x, jax.core.Tracer) or current_mesh == mesh:
      return x
    # A shape from `jax.eval_shape` may say how it is sharded, over the abstract mesh.
    if current_mesh == mesh.abstract_mesh:
      spec = current.spec
    # What is in the host's memory stays there.
    memory = getattr(current, "memory_kind", None)
    target = NamedSharding(mesh, spec, memory_kind=memory)
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(sharding=target)
    if isinstance(x, jax.Array) and copies:
      x = jnp.copy(x)
    return jax.device_put(x, target)

  return jax.tree.unflatten(treedef, map(put, leaves, specs))


def place_state(mesh: Mesh, params, opt_state):
  """An optimizer state on a mesh. What is not there yet goes where its parameter is.

  So the moments of a sharded parameter are sharded too, also if they were made on one device.
  """

  def specs_of(leaves):
    parameters = jax.tree.leaves(params)

    def spec(number, x):
      # It follows no parameter, or has another shape: it is whole on each device.
      if number is None or jnp.shape(x) != jnp.shape(parameters[number]):
        return PartitionSpec()
      sharding = sharding_of(parameters[number])
      if sharding is None:
        return PartitionSpec()
      return sharding.spec

    return list(map(spec, followed(params, opt_state), leaves))

  return place(mesh, opt_state, specs_of)


def sharding_of(x) -> NamedSharding | None:
  """How an array, a shape or a tracer is sharded over a mesh, if it is known.

  The type of a tracer, and of what `jax.eval_shape` returns, has explicit axes only.
  """
  if isinstance(x, jax.core.Tracer):
    x = jax.typeof(x)
  sharding = getattr(x, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return None
  mesh = sharding.mesh
  # The mesh in a type is abstract, and no `Mesh`.
  if isinstance(mesh, Mesh) or AxisType.Explicit in mesh.axis_types:
    return sharding
  return None


def out_shardings(
  shardings: Iterable[NamedSharding | None],
) -> tuple[NamedSharding | None, ...]:
  """The shardings of a program's results, which are those of its arguments where they are known."""

  # A tracer's, over an abstract mesh, does not tell about automatic axes.
  def known(sharding):
    if sharding is not None and isinstance(sharding.mesh, Mesh):
      return sharding
    return None

  return tuple(map(known, shardings))


def _are_on(mesh: Mesh, leaves) -> bool:
  """Whether all are arrays on a mesh, known from the few types and shardings that they share."""
  # Numbers, shapes and tracers are none: `place` decides on each leaf then.
  for kind in set(map(type, leaves)):
    if not issubclass(kind, jax.Array) or issubclass(kind, jax.core.Tracer):
      return False
  # By identity: to compare or hash one takes longer.
  each = map(operator.attrgetter("sharding"), leaves)
  shared = {id(s): s for s in each}.values()
  return all(isinstance(s, NamedSharding) and s.mesh == mesh for s in shared)
