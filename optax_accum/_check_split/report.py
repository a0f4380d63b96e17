"""What `check_split` returns: the verdict, leaf by leaf, with the reason and the mend."""

import dataclasses
import textwrap
from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal[
  "ok", "sum", "weighted", "coupled", "random", "overwritten", "unsplit", "unknown"
]

_MANY = 6  # leaves that agree, of which the table says no more than how many they are


class LeafComparison(NamedTuple):
  """One number or array of the whole batch beside that of the microbatches.

  Attributes:
    name: What it is: ``"loss"``, ``"grads['w']"``, ``"aux['accuracy']"``.
    size: The largest absolute value.
    difference: The largest absolute difference.
    tolerance: How much of it may be rounding.
  """

  name: str
  size: float
  difference: float
  tolerance: float

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
    mend: What to write; empty where nothing is wrong. Options are Python that can be pasted, on
      lines of their own.
    where: The batch and the split that `leaves` are of: the first that disagrees. Empty where
      nothing was compared.
    leaves: The loss, the gradients and the aux, compared.
    batches: The batches that were run: the given one, and those with something changed.
    left_out: Those that tell nothing: the loss or a gradient is not finite, or all are zero.
    not_checked: What of this loss was not looked at, in sentences: ``()`` where all was.
  """

  verdict: Verdict
  reason: str = ""
  mend: str = ""
  where: str = ""
  leaves: tuple[LeafComparison, ...] = ()
  batches: tuple[str, ...] = ()
  left_out: tuple[str, ...] = ()
  not_checked: tuple[str, ...] = ()

  @property
  def ok(self) -> bool:
    """Whether the microbatches give what the whole batch does, in all that was compared."""
    return self.verdict == "ok"

  def __str__(self) -> str:
    lines = [f"check_split: {self.verdict}"]
    if self.leaves:
      differ = [leaf for leaf in self.leaves[1:] if not leaf.agrees]
      same = [leaf for leaf in self.leaves[1:] if leaf.agrees]
      shown = [self.leaves[0], *differ, *(same if len(same) <= _MANY else [])]
      width = max(len("leaf"), *(len(leaf.name) for leaf in shown))
      lines.append(self.where)
      lines.append(f"{'leaf':<{width}}{'largest':>12}{'difference':>12}{'allowed':>10}")
      lines += [
        f"{leaf.name:<{width}}{leaf.size:>12.4g}{leaf.difference:>12.2g}{leaf.tolerance:>10.1g}"
        + ("" if leaf.agrees else "  differs")
        for leaf in shown
      ]
      if len(same) > _MANY:
        lines.append(f"and {len(same)} leaves that agree")
    if self.ok:
      lines += _wrapped("the same for: ", "; ".join(self.batches))
    if self.left_out:
      lines.append(
        f"left out, as the loss is not finite or all is zero: {len(self.left_out)} batches"
      )
    for sentence in self.not_checked:
      lines += _wrapped("not checked: ", sentence)
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
