"""What a step knows from its last call: what it returned, and what else it was passed."""

from collections.abc import Mapping, Sequence, Set
import itertools
import operator
from typing import Any, NamedTuple, TypeAlias
import weakref

from optax_accum._train_step.donation import arrays
from optax_accum._train_step.flattened import Flattened

Leaves: TypeAlias = list[Any]


class Passed(NamedTuple):
  """What a call was passed, apart from what it updates."""

  others: Mapping[Any, Leaves]  # the leaves of each argument
  there: Set[Any]  # the arguments that were passed as the step takes them, on a mesh if it has one
  loss: Any  # the loss that it ran, placed


class LastCall:
  """The last call of a step. Arrays are known by weak references: an id may be used again."""

  def __init__(self, returned: Sequence[Flattened], passed: Passed) -> None:
    self._treedefs = [x.treedef for x in returned]
    leaves = joined(x.leaves for x in returned)
    self._returned = _references(leaves)
    self.on_one_device = all(len(x.sharding.device_set) == 1 for x in arrays(leaves)[:1])
    self._others = {slot: _references(leaves) for slot, leaves in passed.others.items()}
    self.there, self.loss = passed.there, passed.loss

  def returned(self, leaves: Leaves) -> bool:
    """Whether these are the arrays that it returned, each in its place."""
    return bool(leaves) and _are(leaves, self._returned)

  def not_returned(self, leaves: Leaves, placed: Leaves) -> Leaves:
    """Those that are other arrays than it returned there, as they were placed."""
    if len(leaves) != len(self._returned):
      return placed
    each = zip(leaves, placed, self._returned, strict=True)
    return [y for x, y, reference in each if x is not reference()]

  def had_trees(self, updated: list[Flattened]) -> bool:
    """Whether it returned such trees."""
    return [x.treedef for x in updated] == self._treedefs

  def new(self, others: Mapping[Any, Leaves]) -> dict[Any, Leaves]:
    """The arguments with a leaf that it was not passed there."""
    known = self._others
    return {
      slot: leaves
      for slot, leaves in others.items()
      if slot not in known or not _are(leaves, known[slot])
    }


def joined(parts: Any) -> Leaves:
  """The leaves of several trees."""
  return list(itertools.chain.from_iterable(parts))


def _references(leaves: Leaves) -> list[Any]:
  if len(arrays(leaves)) == len(leaves):
    return list(map(weakref.ref, leaves))
  held = set(map(id, arrays(leaves)))
  return [weakref.ref(x) if id(x) in held else lambda: None for x in leaves]


def _are(leaves: Leaves, references: list[Any]) -> bool:
  same = map(operator.is_, leaves, map(operator.call, references))
  return len(leaves) == len(references) and all(same)
