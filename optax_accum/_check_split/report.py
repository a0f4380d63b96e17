"""What `check_split` returns: the verdict, why, what to write, and the leaves compared."""

import dataclasses
from typing import NamedTuple

_HEAD = (
  "leaf                                         largest  difference     allowed"
)
_ROW = "{:<40}{:>12.3g}{:>12.3g}{:>12.3g}"


class LeafComparison(NamedTuple):
  """One array of the whole batch, compared with that of the microbatches.

  Attributes:
    name: What it is: ``"loss"``, ``"grads['w']"``, ``"aux['accuracy']"``.
    size: The largest absolute value.
    difference: The largest absolute difference.
    tolerance: The difference that may be rounding.
  """

  name: str
  size: float
  difference: float
  tolerance: float

  @property
  def agrees(self) -> bool:
    """Whether the difference may be rounding. NaN is not."""
    return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class SplitReport:
  """What `check_split` found. It prints the verdict, the fix and the leaves that differ.

  Attributes:
    verdict: ``"ok"``, or what is wrong: `check_split` has the list.
    reason: The evidence, in words; ``""`` if nothing is wrong.
    fix: What to write; ``""`` if nothing is wrong. Options are Python, on lines of their own.
    where: The batch and the split of `leaves`: the first that disagrees.
    leaves: Of each leaf of loss, gradients and aux its ``name``, ``size``, ``difference``,
      ``tolerance``, and whether it ``agrees``; ``()`` if nothing ran.
    not_checked: Sentences that say what was not tested.
  """

  verdict: str
  reason: str = ""
  fix: str = ""
  where: str = ""
  leaves: tuple[LeafComparison, ...] = ()
  not_checked: tuple[str, ...] = ()

  @property
  def ok(self) -> bool:
    """Whether all comparisons of the microbatches with the whole batch agree."""
    return self.verdict == "ok"

  def __str__(self) -> str:
    texts = [f"check_split: {self.verdict}"]
    if self.ok:
      texts.append(
        "Microbatches agree with the whole batch: as given, and in altered copies."
      )
    texts += _labeled("why", self.reason), _labeled("fix", self.fix)
    for text in self.not_checked:
      texts.append(_labeled("not checked", text))
    differ = [x for x in self.leaves if not x.agrees]
    if differ:
      texts += f"\n{self.where}; the first leaves that differ:", _HEAD
    for name, *numbers in differ[:5]:
      texts.append(_ROW.format(name[-40:], *numbers))
    return "\n".join(filter(None, texts))


def _labeled(label: str, text: str) -> str:
  """A text of several lines behind its label; nothing, if it is empty."""
  indented = text.replace("\n", "\n     ")
  return text and f"{label}: {indented}"
