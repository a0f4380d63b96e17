"""A loss that splitting changes, and what the hypotheses about it ask."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from optax_accum._check_split import probes
from optax_accum._check_split.loss_facts import Facts
from optax_accum._check_split.probes import Arguments, Probe
from optax_accum._check_split.runs import Outcome, Runs
from optax_accum._roles import Roles


class Parts(NamedTuple):
  """A loss on the whole batch, and on two parts of its rows, of different size."""

  probe: Probe
  whole: Outcome
  first: Outcome
  rest: Outcome


@dataclasses.dataclass(frozen=True)
class Case:
  """A loss that splitting changes, and all that the hypotheses ask of it."""

  runs: Runs
  args: Arguments
  roles: Roles
  argnums: Sequence[int]
  rows: int
  names: Mapping[int, str]  # of the batch arguments
  probes: Sequence[Probe]
  facts: Facts

  @property
  def cut(self) -> int:
    """The rows of the first part."""
    return min(-(-2 * self.rows // 3), self.rows - 1)

  @property
  def batch(self) -> dict[int, int]:
    return {int(slot): axis for slot, axis in self.roles.batch.items()}

  def part(self, args: Arguments, rows: Any) -> Outcome:
    """The loss of some rows."""
    return self.runs.whole(probes.take_rows(args, self.batch, rows))

  def in_parts(self, probe: Probe, whole: Outcome | None = None) -> Parts:
    first, rest = np.split(np.arange(self.rows), [self.cut])
    whole = whole or self.runs.with_rounding(self.runs.whole(probe.args), probe.args)
    return Parts(probe, whole, self.part(probe.args, first), self.part(probe.args, rest))

  @functools.cached_property
  def parts(self) -> list[Parts]:
    """Of all probes that tell something."""
    wholes = {name: whole for name, whole, _ in self.outcomes}
    return [self.in_parts(p, wholes[p.name]) for p in self.probes if p.name in wholes]

  @functools.cached_property
  def outcomes(self) -> list[tuple[str, Outcome, list[Outcome]]]:
    """The same of the splits."""
    return list(self.runs.outcomes(self.probes))

  def mended(self, **changes: Any) -> bool:
    """Whether other options make the microbatches give what the whole batch does."""
    if changes.get("weight_fn", 0) is None and "skip_empty" in self.runs.options:
      changes["skip_empty"] = False
    return not self.runs.with_options(**changes).disagreement(self.probes)
