"""A call over a mesh: its arguments are put there, and each device runs its part of the batch."""

from collections.abc import Callable, Mapping, Sequence
import functools
import types
from typing import Any

import jax
from jax.sharding import PartitionSpec

from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.placement import place
from optax_accum._microbatches import cut
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import by_slot, map_by_slot, Roles


def place_arguments(
  parallel: DataParallel, split: Split, roles: Roles, args, kwargs
) -> tuple[Args, Kwargs]:
  """The arguments on the mesh: the batch by its rows, the rest as it came or copied."""
  rows = cut.batch_rows(split, roles.batch, by_slot(args, kwargs))
  parallel.check_rows(rows, split.num_microbatches, split.name(*roles.batch))

  def of_rows(leaves):
    return [PartitionSpec(parallel.axes)] * len(leaves)

  def placed(slot, x):
    if slot in roles.batch:
      # A batch is not donated, so the caller's array may share memory with it.
      return place(parallel.mesh, x, of_rows, copies=False)
    cut.check_arrays(split.name(slot), x)
    return place(parallel.mesh, x)

  return map_by_slot(placed, args, kwargs)


def on_each_device(
  parallel: DataParallel,
  run: Callable[..., Any],
  own,
  args,
  kwargs,
  out_specs,
  batch: Sequence[Slot] = (),
  sharded: Mapping[Slot, Tree] = types.MappingProxyType({}),
) -> Callable[[], Any]:
  """A function that calls ``run(own, args, kwargs)`` on each device, with its part of each.

  `own` has an axis of devices in front. Of the `batch` arguments each device gets its rows, of
  those that are `sharded` its part by these specs, and all of others. Results are sharded as
  `out_specs` say.
  """

  def spec(slot, tree):
    if slot in sharded:
      return sharded[slot]
    each = PartitionSpec()
    if slot in batch:
      each = PartitionSpec(parallel.axes)
    return jax.tree.map(lambda _: each, tree)

  in_specs = map_by_slot(spec, args, kwargs)
  mapped = jax.shard_map(
    run,
    mesh=parallel.mesh,
    # The first is for `own`; the others are for args and kwargs.
    in_specs=(PartitionSpec(parallel.axes), *in_specs),
    out_specs=out_specs,
    # Other axes of the mesh are left to the compiler.
    axis_names=set(parallel.axes),
    # If it checked, JAX would refuse all Pallas kernels, and each loop, branch or derivative rule
    # that mixes a constant, whose type says that it does not vary, with what does.
    check_vma=False,
  )
  # Explicit axes are in an array's type, which is made to agree with its spec.
  placed = jax.tree.map(parallel.move_over_data, (args, kwargs), in_specs)
  # Not called here: the caller does that, so that a traceback has few frames.
  return functools.partial(mapped, own, *placed)
