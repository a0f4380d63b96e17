"""A loss that splitting changes, and what the hypotheses about it ask."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from optax_accum._check_split import probes
from optax_accum._check_split.loss_facts import Facts
from optax_accum._check_split.probes import Arguments, Probe
from optax_accum._check_split.runs import Outcome, Runs
from optax_accum._microbatches.roles import Roles


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
    if "outcomes" in self.__dict__:  # else some split cannot be run
      wholes = {name: whole for name, whole, _ in self.outcomes}
    else:
      each = ((probe.name, self.runs.whole_of(probe)) for probe in self.probes)
      wholes = {name: whole for name, whole in each if whole.is_finite}
    return [self.in_parts(p, wholes[p.name]) for p in self.probes if p.name in wholes]

  @functools.cached_property
  def outcomes(self) -> list[tuple[str, Outcome, list[Outcome]]]:
    """The same of the splits."""
    return list(self.runs.outcomes(self.probes))

  def with_options(self, **changes: Any) -> "Case":
    """The same loss, split otherwise."""
    return dataclasses.replace(self, runs=self.runs.with_options(**changes))

  def with_sizes(self, sizes: Sequence[Mapping[str, int]]) -> "Case":
    """The same loss, in fewer of the splits."""
    runs = Runs(self.runs.fun, self.args, self.runs.options, sizes, self.runs)
    return dataclasses.replace(self, runs=runs)

  @property
  def runs_well(self) -> bool:
    """Whether the loss can be run in microbatches."""
    try:
      self.outcomes  # noqa: B018
    except Exception:
      return False
    return True

  @property
  def agrees(self) -> bool:
    """Whether loss and gradients do, and not aux perhaps."""
    return all(whole.fits(x.leaves) for _, whole, splits in self.outcomes for x in splits)

  def mended(self, **changes: Any) -> "Case | None":
    """The case with other options, where these make the microbatches give what the batch does."""
    if changes.get("weight_fn", 0) is None and "skip_empty" in self.runs.options:
      changes["skip_empty"] = False
    return self.with_options(**changes).if_it_agrees()

  def with_loss(self, fun: Callable[..., Any], **changes: Any) -> "Case":
    """The same with another loss, split otherwise."""
    runs = Runs(fun, self.args, {**self.runs.options, **changes}, self.runs.sizes)
    return dataclasses.replace(self, runs=runs)

  def if_it_agrees(self) -> "Case | None":
    """The case, where the microbatches give what the batch does."""
    tried: list[tuple[str, Outcome, list[Outcome]]] = []
    for outcome in self.runs.outcomes(self.probes):
      tried.append(outcome)
      if not all(outcome[1].fits(split.leaves) for split in outcome[2]):
        return None
    self.__dict__["outcomes"] = tried  # which need not be run again
    return self
