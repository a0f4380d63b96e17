"""Parameters that every device holds a part of: gathered for use, their gradients scattered."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.across_devices import names_of
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.reductions import Sum
from optax_accum._arithmetic.trees import Tree
from optax_accum._mesh.specs import sharded_dims


class Shards(NamedTuple):
  """How each parameter and its gradient are sharded over the data axes, and over others."""

  parameters: Tree  # a PartitionSpec for each parameter, over the data axes
  gradients: Tree  # the same for each gradient
  automatic: Tree  # the same over further axes, that are left to the compiler

  def gather(self, params):
    """The full parameters, on each device."""
    gathered = functools.partial(_on_shards, lax.all_gather, "axis")
    return jax.tree.map(gathered, params, self.parameters, self.automatic)

  def scattered(self, kind: Sum):
    """The reduction of each gradient: a device keeps its part of the sum."""

    def scatter(spec, automatic):
      # Every device gets the whole sum, so `kind` sums as it always does.
      if not spec:
        return kind
      fun = functools.partial(_scattered, spec, automatic)
      return dataclasses.replace(kind, sum_over=fun)

    return jax.tree.map(scatter, self.gradients, self.automatic)


def _scattered(
  spec: PartitionSpec, automatic: PartitionSpec, total, devices: Devices
):
  """The sum over devices, of which each keeps its part by `spec`."""
  # Where other axes of the mesh are explicit, JAX (to 0.12) cannot lower psum_scatter.
  if across_devices.is_explicit(jax.typeof(total).sharding):
    return _own_part(devices.sum(total), spec)
  total = _on_shards(
    lax.psum_scatter, "scatter_dimension", total, spec, automatic
  )
  # The sum over data axes that do not shard this gradient is still to be taken.
  rest = list(names_of(devices.axis_name))
  for names in sharded_dims(spec).values():
    for name in names_of(names):
      rest.remove(name)
  if not rest:
    return total
  return lax.psum(total, tuple(rest))


def _own_part(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """The part of a replicated array that a device keeps, as `spec` says."""
  for dim, names in sharded_dims(spec).items():
    size = x.shape[dim] // lax.axis_size(names)
    start = lax.axis_index(names) * size
    x = lax.dynamic_slice_in_dim(x, start, size, dim)
  return x


def _on_shards(
  send: Callable[..., jax.Array],
  dimension: str,
  x: jax.Array,
  spec: PartitionSpec,
  automatic: PartitionSpec,
) -> jax.Array:
  """`send`, mapped over the `automatic` axes too, as XLA would else gather `x` over these first.

  `dimension` is the keyword by which `send` takes the dimension that it changes.
  """
  sent = sharded_dims(spec)
  dims: list[Any] = []
  axes: set[str] = set()
  for dim, names in enumerate(automatic):
    # The map leaves out the dimensions that `send` changes.
    if dim in sent:
      names = None
    dims.append(names)
    axes.update(names_of(names))

  def send_all(x):
    for dim, names in sent.items():
      # `tiled` joins or cuts along `dim` itself, and adds or takes no axis.
      x = send(x, names, tiled=True, **{dimension: dim})
    return x

  # There is nothing to map over, or nothing to send.
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
