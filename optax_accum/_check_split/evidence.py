"""The whole batch beside what its microbatches add up to, on all batches that tell something."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_accum._arithmetic import reduction_words
from optax_accum._check_split.call import Call
from optax_accum._check_split.outcome import Arrays, Outcome
from optax_accum._check_split.programs import Programs
from optax_accum._check_split.report import LeafComparison
from optax_accum._check_split.weights import Weight

# Those after which an aux is that of all rows. Others keep that of each microbatch, or of one.
WORDS = ("sum", "mean", "max", "min", "concat")


class How(NamedTuple):
  """How microbatches become one."""

  words: dict[str, Any]  # that reduce each array
  weight: Weight
  skips: bool  # what is not finite

  @classmethod
  def of(cls, programs: Programs, reduction: str = "") -> "How":
    """How they do with the options of these programs, or with another reduction."""
    asked = programs.local.asked
    names = programs.given.names
    reduction = reduction or asked["reduction"]
    match = reduction_words.match
    grads = match("reduction", reduction, names[0])
    aux = match("aux_reduction", asked["aux_reduction"], names[1])
    each = zip(
      jax.tree.leaves(names), jax.tree.leaves((grads, aux)), strict=True
    )
    words = {"loss": reduction, **dict(each)}
    return cls(words, programs.weight, programs.local.split.skip_nonfinite)

  def reworded(self, words: Mapping[str, str]) -> "How":
    """The same with other words for some arrays."""
    return self._replace(words={**self.words, **words})

  def join(self, parts: Sequence[Outcome]) -> Arrays:
    """All microbatches as one."""
    weights = np.array([self.weight(part.call) for part in parts])
    if self.skips:
      weights[[not part.is_finite for part in parts]] = 0
    counts = weights != 0  # what does not is left out, also where it is NaN
    rows = [part.call.taken for part in parts]

    def joined(word, arrays):
      if word == "concat":
        if [x.shape[:1] for x in arrays] != [x.shape for x in rows]:
          return None
        return np.concatenate(arrays)[np.argsort(np.concatenate(rows))]
      is_integer = arrays[0].dtype.kind == "i"
      is_uneven = len({x.shape for x in arrays}) > 1
      if is_uneven or (is_integer and word == "mean"):
        return None
      if not any(counts):
        return np.zeros_like(arrays[0])
      stack = np.stack(arrays)[counts]
      if word == "mean":
        return np.tensordot(weights[counts], stack, 1) / np.sum(weights)
      if word in WORDS:
        return getattr(stack, word)(0)
      return stack[-1]

    return {
      name: joined(word, [part.arrays[name] for part in parts])
      for name, word in self.words.items()
    }

  def compare(self, whole: Outcome, arrays: Arrays) -> list[LeafComparison]:
    """The whole batch beside microbatches; not what an aux has of each of them, or of the last."""
    return [
      leaf
      for leaf in whole.compare(arrays)
      if leaf.name[:3] != "aux" or self.words[leaf.name] in WORDS
    ]


class Tried(NamedTuple):
  """A batch that was run: all of its rows, and the microbatches of each split, by their size."""

  whole: Outcome
  splits: list[tuple[int, list[Outcome]]]


class Comparison(NamedTuple):
  """The leaves of a batch beside those of a split of it."""

  where: str
  leaves: list[LeafComparison]

  @property
  def agrees(self) -> bool:
    return all(leaf.agrees for leaf in self.leaves)


class Evidence(NamedTuple):
  """All batches that tell something, as they ran."""

  programs: Programs
  tried: list[Tried]

  @classmethod
  def of(cls, programs: Programs) -> "Evidence":
    """Runs all batches. Raises what the loss does."""
    import tqdm  # training does without

    bar = tqdm.tqdm(
      programs.calls,
      "checking",
      delay=3,
      unit="batch",
      leave=False,
      disable=None,
    )
    tried = [_tried(programs, call) for call in bar]
    return cls(programs, [x for x in tried if x])

  def agree(self, how: How) -> bool:
    """Whether loss and gradients do, in all batches and splits."""
    return all(
      x.whole.fits(how.join(parts)) for x in self.tried for _, parts in x.splits
    )

  def compared(self, how: How) -> Iterator[Comparison]:
    """All batches and splits."""
    for whole, splits in self.tried:
      for size, parts in splits:
        leaves = how.compare(whole, how.join(parts))
        where = f"{whole.call.name}; microbatches of {size} rows, of {whole.call.rows}"
        yield Comparison(where, leaves)

  def as_called(self) -> Iterator[Comparison]:
    """What the step itself gives, beside the whole batch: one over a mesh for all batches."""
    programs = self.programs
    devices = self.programs.devices
    how = How.of(programs)
    wholes = [programs.given]
    over = ""
    if devices.loss:
      wholes += [x.whole for x in self.tried]
      over = ", over the mesh"
    for whole in wholes:
      given = programs.as_called(whole.call)
      # Few rows of a device may all count for nothing, which spoils what it sends.
      if given.is_finite and whole.call.oddity < 2:
        leaves = how.compare(whole, given.arrays)
        where = f"{whole.call.name}; microbatches of {programs.size} rows, of {programs.rows}"
        yield Comparison(where + over, leaves)

  def wrong(self, how: How) -> set[str]:
    """The names of what differs in some batch."""
    return {
      leaf.name
      for comparison in self.compared(how)
      for leaf in comparison.leaves
      if not leaf.agrees
    }


def _tried(programs: Programs, call: Call) -> Tried | None:
  """A batch and its microbatches, if it tells something."""
  whole = programs.whole(call)
  if not whole.is_finite:
    return None
  splits = [(size, programs.parts(call, rows)) for size, rows in programs.cuts]
  parts = [part for _, split in splits for part in split]
  if programs.devices.sends and not all(part.is_finite for part in parts):
    return None  # because of a device where nothing counts
  weights = [programs.weight(part.call) for part in parts]
  losses = [part.arrays["loss"] for part in parts]
  if any(np.isinf(x) and not w for x, w in zip(losses, weights, strict=True)):
    return None  # what is divided by a count of 0 is more than that counts
  with contextlib.suppress(Exception):  # a weight of groups of rows
    weights += [programs.weight(call.take([i])) for i in (0, -1)]
  if not np.all(np.array(weights) >= 0) or not any(weights):
    return None  # there is no such length; and for nothing a step is not taken
  arrays = [x for part in (whole, *parts) for x in part.main.values()]
  if not any(map(np.any, arrays)):
    return None
  return Tried(whole, splits)
