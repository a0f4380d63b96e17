"""What `virtual_devices` ask of a mesh, and of the arrays of a call."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._microbatches.options import Split


def check_order(split: Split, reduce_in_loop: bool) -> None:
  """Checks that the microbatches of a virtual device are added up before those of others."""
  count = split.virtual_devices
  if count is not None and reduce_in_loop:
    raise ValueError(
      f"virtual_devices={count} adds up the microbatches of each virtual device first, and"
      ' reduce_gradients="per_microbatch" those of all devices: use "per_cycle".'
    )


def check_mesh(split: Split, parallel: DataParallel) -> None:
  """Checks that each device can stand for as many virtual ones, and that nothing else sums."""
  count = split.virtual_devices
  if count is None:
    return
  if count % parallel.devices:
    raise ValueError(
      f"virtual_devices={count} is no multiple of {parallel}, each of which stands for as many: use"
      " 1, 2, 4 or another power of two of devices, and as many virtual ones or more."
    )
  more = {name: parallel.mesh.shape[name] for name in sorted(parallel.others)}
  if math.prod(more.values()) > 1:
    raise ValueError(
      f"virtual_devices={count} spreads rows alone over devices, and the mesh has further axes,"
      f" {more}, over which the compiler sums in an order of its own: use a mesh of the data axes."
    )


def automatic(mesh: Mesh) -> Mesh:
  """The same devices on automatic axes: explicit ones are in the way of the optimizer's program."""
  kinds = (AxisType.Auto,) * len(mesh.axis_names)
  return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def on_automatic(split: Split, mesh: Mesh, tree):
  """`tree`, with what is on explicit axes of the devices of an `automatic` mesh on that."""
  if split.virtual_devices is None:
    return tree

  def put(x):
    sharding = getattr(x, "sharding", None)
    own = getattr(sharding, "mesh", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(own, Mesh):
      return x
    if own == mesh or automatic(own) != mesh:
      return x
    target = NamedSharding(
      mesh, sharding.spec, memory_kind=sharding.memory_kind
    )
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(sharding=target)
    return jax.device_put(x, target)

  return jax.tree.map(put, tree)


def check_arrays(split: Split, tree, on_mesh: bool) -> None:
  """Checks that a call is not traced, and that its arrays are on one device if there is no mesh."""
  count = split.virtual_devices
  if count is None:
    return
  for x in jax.tree.leaves(tree):
    if isinstance(x, jax.core.Tracer):
      raise ValueError(
        f"A step with virtual_devices={count} is called inside jax.jit, jax.eval_shape or another"
        " transformation, and needs options of the compiler, which only an outer call can set: call"
        " it outside. For shapes and memory it has eval_shape and lower."
      )
    sharding = getattr(x, "sharding", None)
    if sharding is not None and not on_mesh and len(sharding.device_set) > 1:
      raise ValueError(
        f"virtual_devices={count} got an array on {len(sharding.device_set)} devices, and the step"
        " has no mesh, so that the compiler would sum in an order of its own: pass mesh=, or what"
        " jax.device_get makes of it."
      )
