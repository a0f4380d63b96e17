"""`MicrobatchPlan`: what was compiled, and which of it fits."""

import dataclasses

from optax_accum._plan import sizes
from optax_accum._plan.programs import Choice, PlanCandidate

_BYTES = ("peak_bytes", "argument_bytes", "output_bytes", "temp_bytes")


@dataclasses.dataclass(frozen=True)
class MicrobatchPlan:
  """The result of `plan_microbatches`. ``print(plan)`` shows a table.

  Attributes:
    batch_size: The rows of the batch.
    limit_bytes: The memory that a program may use on one device.
    candidates: Each program that was compiled: those that fit first, and of them the largest
      microbatch.
  """

  batch_size: int
  limit_bytes: int
  candidates: tuple[PlanCandidate, ...]

  @property
  def num_microbatches(self) -> int:
    """The number of microbatches to use."""
    return self.candidates[0].num_microbatches

  @property
  def microbatch_size(self) -> int:
    """The rows of one microbatch, on all devices together."""
    return self.candidates[0].microbatch_size

  @property
  def choice(self) -> Choice:
    """The further options of `build_step` to use."""
    return self.candidates[0].choice

  @property
  def peak_bytes(self) -> int:
    """The memory that the planned step needs on one device."""
    return self.candidates[0].peak_bytes

  def __str__(self) -> str:
    limit = sizes.shown(self.limit_bytes)
    table = [["fits", "microbatches", "rows", *self.choice, *_BYTES]]
    for c in self.candidates:
      numbers = [sizes.shown(getattr(c, name)) for name in _BYTES]
      if not c.peak_bytes:
        numbers = ["too large to compile", "", "", ""]
      row = [
        c.fits,
        c.num_microbatches,
        c.microbatch_size,
        *_named(c),
        *numbers,
      ]
      table.append([str(x)[:20] for x in row])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
      f"a batch of {self.batch_size} rows, within {limit} on each device"
    ]
    lines += ["  ".join(map(str.rjust, row, widths)) for row in table]
    best = self.candidates[0]
    if best.fits:
      split = f"num_microbatches={best.num_microbatches} (of {best.microbatch_size} rows)"
      chosen = map("=".join, zip(best.choice, _named(best), strict=True))
      lines.append(f"best: {', '.join([split, *chosen])}")
    return "\n".join(lines)


def _named(candidate: PlanCandidate) -> list[str]:
  """The values of a choice, as a table shows them."""
  return [getattr(x, "__name__", repr(x)) for x in candidate.choice.values()]
