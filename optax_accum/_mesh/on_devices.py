"""A call over a mesh: its arguments are put there, and each device runs its part of the batch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._mesh.batch import place_batch
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.placement import place
from optax_accum._mesh.refused import explained, TRACED
from optax_accum._microbatches.call import checked_rows
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import by_slot, map_by_slot, Roles


def place_arguments(
  parallel: DataParallel, split: Split, roles: Roles, args, kwargs
) -> tuple[Args, Kwargs]:
  """The arguments on the mesh: the batch by its rows, the rest as it came or copied."""
  axes = jax.sharding.get_abstract_mesh().manual_axes
  if axes:
    raise ValueError(
      f"This is called inside pmap or shard_map over {axes} with mesh=, and would spread the"
      " batch over devices a second time: pass axis_name= instead of mesh=, or call it outside."
    )
  rows = checked_rows(split, roles, by_slot(args, kwargs))
  of = split.name(*roles.batch)
  parallel.check_rows(rows, split.num_microbatches, of)

  def placed(slot, x):
    name = split.name(slot)
    if slot in roles.batch:
      return place_batch(parallel, name, x, roles.batch[slot], split)
    return place(parallel.mesh, name, x)

  return map_by_slot(placed, args, kwargs)


class OnEachDevice(NamedTuple):
  """``run(own, args, kwargs)`` on each device, given that device's part of each.

  `own` has an axis of devices in front.
  """

  parallel: DataParallel
  axes: Mapping[Slot, int]  # of the rows of each batch argument
  # The specs of further arguments of which each device gets its part. It gets others in full.
  sharded: Mapping[Slot, Tree]
  run: Callable[..., Any]

  def __call__(self, out_specs, own, args, kwargs):
    """The results, which are sharded as `out_specs` say."""
    parallel = self.parallel
    in_specs = map_by_slot(self._spec, args, kwargs)
    mapped = jax.shard_map(
      self.run,
      mesh=parallel.mesh,
      in_specs=(PartitionSpec(parallel.axes), *in_specs),
      out_specs=out_specs,
      # Other axes of the mesh are left to the compiler.
      axis_names=set(parallel.axes),
      # Types of what varies refuse every loop, branch or derivative rule of a function that starts
      # from a constant, and all Pallas kernels. `collectives` looks at what they would protect.
      check_vma=False,
    )
    placed = jax.tree.map(parallel.move_over_data, (args, kwargs), in_specs)
    with explained(TRACED, parallel):
      return mapped(own, *placed)

  def _spec(self, slot, tree):
    """The specs of an argument."""
    if slot in self.sharded:
      return self.sharded[slot]
    if slot not in self.axes:
      return jax.tree.map(lambda _: PartitionSpec(), tree)
    axis = self.axes[slot]
    return jax.tree.map(lambda x: self.parallel.batch_spec(x, axis), tree)
