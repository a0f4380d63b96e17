"""What `check_split` returns: the verdict, why, what to write, and the leaves compared."""

from collections.abc import Sequence
import dataclasses
import textwrap
from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal[
  "ok",
  "sum",
  "weighted",
  "coupled",
  "random",
  "unsplit",
  "unknown",
]


_SHOWN = 5  # leaves that differ, of which `str` shows no more


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

  def excess(self) -> float:
    """The difference in times of what may be rounding."""
    return self.difference / max(self.tolerance, 1e-100)


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
    batches: The batches that were run: the given one, and changed ones.
    left_out: The batches that show nothing: loss or gradients are not finite, or all are zero, or
      no row counts, or only a number out of the given range (a length of -1) makes them differ, and
      no fix helps.
    not_checked: Sentences that say what was not tested.
  """

  verdict: Verdict
  reason: str = ""
  fix: str = ""
  where: str = ""
  leaves: tuple[LeafComparison, ...] = ()
  batches: tuple[str, ...] = ()
  left_out: tuple[str, ...] = ()
  not_checked: tuple[str, ...] = ()

  @property
  def ok(self) -> bool:
    """Whether all comparisons of the microbatches with the whole batch agree."""
    return self.verdict == "ok"

  def __str__(self) -> str:
    differ = [leaf for leaf in self.leaves if not leaf.agrees]
    worst = sorted(differ, key=LeafComparison.excess)[-_SHOWN:]
    text = self._text([leaf for leaf in differ if leaf in worst])
    if len(differ) > _SHOWN:
      text += f"\n... and {len(differ) - _SHOWN} more: report.details()"
    return text

  def details(self) -> str:
    """The report with all leaves, and the batches that were run."""
    batches = _wrapped("batches:  ", "; ".join(self.batches))
    left_out = _wrapped("left out: ", "; ".join(self.left_out))
    return "\n".join([self._text(self.leaves), *batches, *left_out])

  def _text(self, leaves: Sequence[LeafComparison]) -> str:
    lines = [f"check_split: {self.verdict}"]
    lines += _wrapped("why: ", self.reason) + _wrapped("fix: ", self.fix)
    for sentence in self.not_checked:
      lines += _wrapped("not checked: ", sentence)
    if leaves:
      lines += ["", self.where, *_table(leaves)]
    elif self.ok:
      lines += _wrapped("", self._agreement())
    return "\n".join(lines)

  def _agreement(self) -> str:
    names = [leaf.name for leaf in self.leaves]
    grads = sum(name.startswith("grads") for name in names)
    aux = len(names) - 1 - grads
    what = f"The loss and {grads} gradients"
    if aux:
      what = f"The loss, {grads} gradients and {aux} aux"
    if grads == 1:
      what = what.replace("gradients", "gradient")
    return f"{what} agree on the given batch and {len(self.batches) - 1} altered copies of it."


def _table(leaves: Sequence[LeafComparison]) -> list[str]:
  names = [x.name if len(x.name) < 43 else f"...{x.name[-39:]}" for x in leaves]
  width = max(map(len, ("leaf", *names)))
  lines = [f"{'leaf':<{width}}{'largest':>12}{'difference':>12}{'allowed':>10}"]
  for name, leaf in zip(names, leaves, strict=True):
    numbers = (
      f"{leaf.size:>12.4g}{leaf.difference:>12.2g}{leaf.tolerance:>10.1g}"
    )
    end = "" if leaf.agrees else "  differs"
    lines.append(f"{name:<{width}}{numbers}{end}")
  return lines


def _wrapped(label: str, text: str) -> list[str]:
  """A text of several lines below its label. Code stands on lines of its own, and is not cut."""
  lines = list[str]()
  for line in text.splitlines():
    if line.startswith("  "):
      lines.append(line)
    else:
      width = 85 - len(label)
      lines += textwrap.wrap(line, width, break_long_words=False)
  indent = " " * len(label)
  return [label + line for line in lines[:1]] + [
    indent + line for line in lines[1:]
  ]
