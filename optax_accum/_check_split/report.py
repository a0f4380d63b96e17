"""What `check_split` returns: the verdict, leaf by leaf, with the reason and the mend."""

import dataclasses
import textwrap
from typing import Any, Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal[
  "ok", "sum", "weighted", "coupled", "random", "overwritten", "unsplit", "unknown"
]


class Finding(NamedTuple):
  """What is wrong, why that is known, and what to do about it."""

  verdict: Verdict
  reason: str
  mend: str
  mended: Any = None  # the `Case` with the mend, whose loss and gradients agree


class LeafComparison(NamedTuple):
  """One number or array of the whole batch beside that of the microbatches."""

  name: str  # "loss", "grads['w']", "aux['accuracy']"
  size: float  # the largest absolute value
  difference: float  # the largest absolute difference
  tolerance: float  # how much of it may be rounding

  @property
  def agrees(self) -> bool:
    """Whether the difference may be rounding; one that is NaN may not."""
    return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class SplitReport:
  """What `check_split` found; it prints as a table.

  Attributes:
    verdict: ``"ok"``, or what is wrong.
    reason: The evidence, in words; empty where nothing is wrong.
    mend: What to write; empty where nothing is wrong. Options are Python that can be pasted.
    where: The batch and the split that `leaves` are of: the first that disagrees. Empty where
      nothing was run.
    leaves: The loss, the gradients and the aux, compared.
    batches: The batches that were run: the given one, and those with something changed.
  """

  verdict: Verdict
  reason: str = ""
  mend: str = ""
  where: str = ""
  leaves: tuple[LeafComparison, ...] = ()
  batches: tuple[str, ...] = ()

  @property
  def ok(self) -> bool:
    """Whether the microbatches give what the whole batch does, in all that was compared."""
    return self.verdict == "ok"

  def __str__(self) -> str:
    lines = [f"check_split: {self.verdict}"]
    if self.leaves:
      width = max(len("leaf"), *(len(leaf.name) for leaf in self.leaves))
      lines.append(self.where)
      lines.append(f"{'leaf':<{width}}{'largest':>12}{'difference':>12}{'allowed':>10}")
      lines += [
        f"{leaf.name:<{width}}{leaf.size:>12.4g}{leaf.difference:>12.2g}{leaf.tolerance:>10.1g}"
        + ("" if leaf.agrees else "  differs")
        for leaf in self.leaves
      ]
    if self.ok:
      lines += _wrapped("the same for: ", ", ".join(self.batches))
    lines += _wrapped("why:  ", self.reason) + _wrapped("mend: ", self.mend)
    return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
  """A text of several lines below its label. Code stands on lines of its own, and is not cut."""
  if not text:
    return []
  lines: list[str] = []
  for line in text.splitlines():
    is_code = line.startswith("  ")
    lines += [line] if is_code else textwrap.wrap(line, 92, break_long_words=False)
  return [(label if i == 0 else " " * len(label)) + line for i, line in enumerate(lines)]
