"""The numbers of microbatches that a step can have."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_accum._train_step.step import Step


def possible(step: Any, args: Sequence[Any], rows: int) -> list[int]:
  """The divisors of the rows that are split, the largest first; `rows` are those of all devices."""
  ours = isinstance(step, Step)
  if ours and (found := step.rows(args)) not in (None, rows):
    raise ValueError(f"batch_size={rows}, and the batch in args has {found} rows: give {found}.")
  dims = {n for x in jax.tree.leaves(args) for n in getattr(x, "shape", ())}
  if not any(n % rows == 0 for n in dims if n):
    raise ValueError(
      f"batch_size={rows}, and no array in args has so many rows: give the rows of the batch."
    )
  counts = step.counts(rows) if ours else [n for n in range(rows, 0, -1) if rows % n == 0]
  if not counts:
    raise ValueError(f"batch_size={rows}, and a step with noise_scale=True needs 2 rows or more.")
  return counts
