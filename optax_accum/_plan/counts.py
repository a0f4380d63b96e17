"""The numbers of microbatches that a step can have."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_accum._microbatches import cut
from optax_accum._train_step.program import StepProgram
from optax_accum._train_step.train_step import TrainStep


def possible(step: Any, args: Sequence[Any], rows: int) -> list[int]:
  """The divisors of the rows that are split, the largest first; `rows` are those of all devices."""
  program = program_of(step)
  if (found := _batch_rows(step, program, args)) not in (None, rows):
    raise ValueError(f"batch_size={rows}, and the batch in args has {found} rows: give {found}.")
  dims = {n for x in jax.tree.leaves(args) for n in getattr(x, "shape", ())}
  if not any(n % rows == 0 for n in dims if n):
    raise ValueError(
      f"batch_size={rows}, and no array in args has so many rows: give the rows of the batch."
    )
  split, least = rows, 1
  if program is not None:
    if program.parallel is not None:
      program.parallel.check_rows(rows)
      split = rows // program.parallel.devices
    least = 2 if program.local.noise_scale and split == rows else 1
  counts = [n for n in range(split, least - 1, -1) if split % n == 0]
  if not counts:
    raise ValueError(f"batch_size={rows}, and a step with noise_scale=True needs 2 rows or more.")
  return counts


def _batch_rows(step: Any, program: StepProgram | None, args: Sequence[Any]) -> int | None:
  """The rows of the batch in `args`, where the step tells which argument it is."""
  if isinstance(step, TrainStep):
    return cut.batch_rows(*step._program.batch(args))
  position = getattr(step, "_batch_position", None)  # of a step of flax
  if program is None or position is None or len(args) <= position:
    return None
  [axis] = program.local.split.batch_axis
  return cut.batch_rows({1: axis}, {1: args[position]})


def program_of(step: Any) -> StepProgram | None:
  """The program of a step of ours."""
  return step._program if isinstance(step, TrainStep) else getattr(step, "_plain", None)
