"""A batch on a mesh: it is put there by its rows, or its rows are sharded as the step can use."""

import math

from optax_accum import _validate
from optax_accum._arithmetic.across_devices import names_of
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.placement import place, sharding_of
from optax_accum._mesh.specs import shown, spec_of
from optax_accum._microbatches import cut
from optax_accum._microbatches.options import Split


def place_batch(
  parallel: DataParallel, name: str, tree, batch_axis: int, split: Split
):
  """A batch on the mesh, sharded by its rows."""

  def specs_of(leaves):
    return [parallel.batch_spec(x, batch_axis) for x in leaves]

  tree = place(parallel.mesh, name, tree, specs_of)
  explicit = parallel.explicit  # in a type, even over one device
  sizes = parallel.mesh.shape
  for leaf, x in _validate.named_leaves(name, tree):
    axis = batch_axis % x.ndim
    spec = spec_of(sharding_of(x))
    named = names_of(spec[axis]) if axis < len(spec) else ()
    names = tuple(n for n in named if sizes[n] > 1 or n in explicit)
    if not set(names) <= set(parallel.axes):
      what = f"{leaf} has its rows sharded over {shown(names)}"
      _check_further(parallel, what, names)
      _check_divides(parallel, names, x.shape[axis], split)
  return tree


def _check_further(
  parallel: DataParallel, what: str, names: tuple[str, ...]
) -> None:
  """Checks axes of rows of which some are no data axes: these are left to the compiler."""
  sizes = parallel.mesh.shape
  axes = shown(parallel.axes)
  first = [n for n in parallel.axes if sizes[n] > 1]
  over_rows = [n for n in names if sizes[n] > 1]
  if set(over_rows[: len(first)]) != set(first):
    raise ValueError(
      f"{what}: shard them over data_axis={axes} first, and then over further axes,"
      " or not at all."
    )
  explicit = parallel.others.intersection(names, parallel.explicit)
  if explicit:
    raise ValueError(
      f"{what}, and further axes than data_axis={axes} must be automatic: make the"
      f" mesh with jax.sharding.AxisType.Auto for {shown(tuple(explicit))}, or name it in"
      " data_axis. Or shard rows over data_axis alone, and let the loss jax.reshard its rows, and"
      " parameters where used."
    )


def _check_divides(
  parallel: DataParallel, names: tuple[str, ...], rows: int, split: Split
) -> None:
  """Checks that the devices of these axes divide the rows of each microbatch."""
  local = parallel.local_split(split, rows)
  each = rows // parallel.devices
  size = cut.microbatch_rows(
    each, local.num_microbatches, local.microbatch_size
  )
  every = {*names, *parallel.axes}
  devices = math.prod(parallel.mesh.shape[name] for name in every)
  full = size * parallel.devices
  tail = each % size * parallel.devices
  if (
    full % devices
  ):  # which divide all rows, and so the last ones if the others
    fit = [
      n for n in range(1, rows // devices + 1) if rows % (n * devices) == 0
    ]
    last = f" (the last {tail})" if tail else ""
    raise ValueError(
      f"Microbatches of {full} rows{last} are not divided by the {devices} devices of"
      f" {shown(names)}, over which rows are sharded, so the compiler would move rows in each of"
      f" them: use num_microbatches= one of {fit}, or microbatch_size=, a multiple of {devices}."
    )
