"""What a plan asks of a step: its devices, its rows, and the sizes that a microbatch can have."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_accum._microbatches import cut
from optax_accum._train_step.program import Step


def devices(step: Step) -> list[jax.Device]:
  """Those of its mesh, if any."""
  parallel = step.loss.parallel
  if parallel is None:
    return []
  return list(parallel.mesh.devices.flat)


def rows(step: Step, args: Sequence[Any]) -> int | None:
  """The rows of the batch that a call is given, on all devices."""
  if len(args) <= step.batch_position:
    return None
  local = step.loss.local
  given = step.of_loss(args)
  batch = local.roles_of(given, {}).batch
  return cut.batch_rows(local.split, batch, dict(enumerate(given)))


def sizes(step: Step, rows: int, uneven: bool) -> list[int]:
  """The sizes of a microbatch of so many rows, on all devices together: see `sizes_of`."""
  parallel = step.loss.parallel
  count = fewest = 1
  if parallel is not None:
    parallel.check_rows(rows)
    count = parallel.devices
  if step.loss.local.noise_scale and count == 1:
    fewest = 2
  return [count * n for n in sizes_of(rows // count, uneven, fewest)]


def sizes_of(rows: int, uneven: bool, fewest: int = 1) -> list[int]:
  """Sizes for `fewest` microbatches or more, ascending. If not `uneven`, they divide the rows."""
  counts = [n for n in range(fewest, rows + 1) if uneven or rows % n == 0]
  # Of the sizes that make as many microbatches, the smallest.
  return sorted({-(-rows // n) for n in counts})
