"""Why microbatches of a loss do not give what the whole batch does: hypotheses, in their order.

Most are other ways to make one of what the microbatches gave.
"""

from collections.abc import Collection, Sequence
import itertools
from typing import NamedTuple

import jax
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._check_split import words
from optax_accum._check_split.call import Call
from optax_accum._check_split.devices import Devices
from optax_accum._check_split.evidence import Evidence, How, Tried, WORDS
from optax_accum._check_split.programs import Programs
from optax_accum._check_split.report import SplitReport, Verdict
from optax_accum._check_split.weights import ROWS, weights_of
from optax_accum._microbatches.refusals import (
  naming,
  refuse_keys,
  with_keys,
  with_rows,
)
from optax_accum._microbatches.roles import Roles


class Finding(NamedTuple):
  """What is wrong, why that is known, and what to do about it."""

  verdict: Verdict
  reason: str
  fix: str
  how: How | None = None  # with which all agrees

  def report(self, **fields) -> SplitReport:
    return SplitReport(self.verdict, self.reason, self.fix, **fields)


def refused(programs: Programs) -> Finding | None:
  """What the defaults refuse: a second batch argument, or a key, that all microbatches share."""
  split = programs.local.split
  call = programs.batch
  if split.batch_argnums is None:
    finding = unsplit(programs, call.roles)
    if finding:
      return finding
  if split.rng_argnums == () and not split.of_step:
    return None
  try:
    refuse_keys(split, call.roles, call.arguments)
  except ValueError as error:
    slots = with_keys(call.roles, call.arguments)
    fix = words.PASS_A_KEY
    if all(map(is_key, jax.tree.leaves([call.arguments[x] for x in slots]))):
      fix = naming("rng", [*call.roles.rng, *slots])
    return Finding("random", str(error), fix)
  return None


def of_step(devices: Devices) -> Finding:
  """A step that differs, although its microbatches agree."""
  if devices.loss:
    return Finding("unknown", words.OVER_MESH, words.OWN_MEAN)
  return Finding("unknown", words.AS_CALLED, words.PLAIN)


def explain(evidence: Evidence) -> tuple[Finding, Evidence]:
  """What is wrong, and on which batches. Odd ones count if a fix explains them: no length is -1."""
  finding = _of_all(evidence)
  for most in (1, 0):
    likely = [x for x in evidence.tried if x.whole.call.oddity <= most]
    if finding.how or len(likely) in (0, len(evidence.tried)):
      continue
    without = evidence._replace(tried=likely)
    found = _of_all(without)
    if most == 0 and found.verdict == "ok":
      break  # what no row has may come
    finding = found
    evidence = without
  return finding, evidence


def _of_all(evidence: Evidence) -> Finding:
  """What is wrong: of what agrees on all batches, what these cannot show."""
  finding = _of_batches(evidence)
  if finding.verdict not in ("ok", "sum", "weighted"):
    return finding
  if evidence.programs.facts.mixes:
    return Finding("coupled", words.MIXED, words.MENDS["mixed"])
  names = " and ".join(_read_carry(evidence.programs))
  if names:
    reason = words.CARRIED.format(names=names)
    return Finding("coupled", reason, words.READ_THE_OLD)
  return finding


def _of_batches(evidence: Evidence) -> Finding:
  """The first hypothesis that fits, and what is wrong with aux once it is fixed."""
  how = How.of(evidence.programs)
  if evidence.agree(how):
    return _aux(evidence, how) or Finding("ok", "", "", how)
  first = next(filter(None, (fits(evidence) for fits in _HYPOTHESES)))
  if evidence.programs.local.split.has_weight:
    fix = words.TOTAL
    if first.fix:
      fix += f" {words.QUOTIENT}\n{first.fix}"
    first = first._replace(fix=fix)
  then = None
  if first.how:
    then = _aux(evidence, first.how)
  if then is None:
    return first
  reason = f"{first.reason}\n{then.reason}"
  fix = f"{first.fix}\n{then.fix}"
  return Finding(first.verdict, reason, fix, then.how)


def _not_a_function(evidence: Evidence) -> Finding | None:
  programs = evidence.programs
  again = programs.whole(programs.call)
  is_same = programs.fingerprint() == programs.fingerprint()
  if is_same and programs.given.fits(again.arrays):
    return None
  return Finding("random", words.NOT_A_FUNCTION, words.PASS_A_KEY)


def _shared_noise(evidence: Evidence) -> Finding | None:
  """Whether a loss that draws changes with the places of the rows: its noise is that of a place."""
  programs = evidence.programs
  backwards = np.arange(programs.rows)[::-1]
  if all(
    x.whole.fits(programs.whole(x.whole.call.take(backwards)).arrays)
    for x in evidence.tried
  ):
    return None
  shared = [x for x in programs.call.arrays if x.role in ("shared", "held")]
  keys = dict.fromkeys(x.slot for x in shared if x.may_be_key)
  if keys:
    fix = naming("rng", [*programs.batch.roles.rng, *keys])
    return Finding("random", words.SHARED_KEY, fix)
  if programs.facts.draws_from_others:
    return Finding("random", words.SHARED_KEY, words.PASS_A_KEY)
  return None


def _sum(evidence: Evidence) -> Finding | None:
  how = How.of(evidence.programs, "sum")._replace(weight=ROWS)
  if not evidence.agree(how):
    return None
  fix = 'reduction="sum"'
  aux = evidence.programs.given.arrays.get("aux")
  if aux is not None and not aux.shape:
    fix = words.AUX_MAY_COUNT + fix
  return Finding("sum", words.SUM, fix, how)


def _mean_for_total(evidence: Evidence) -> Finding | None:
  """Whether a loss that returns ``(total, weight)`` has a mean over rows in the first place."""
  programs = evidence.programs
  if not programs.local.split.has_weight:
    return None

  # What it has there: the check divides it by the weight.
  def first_of(outcome):
    return outcome.times(programs.weight(outcome.call))

  tried = []
  for x in evidence.tried:
    for size, parts in x.splits:
      if all(programs.weight(part.call) for part in parts):
        split = size, list(map(first_of, parts))
        tried.append(Tried(first_of(x.whole), [split]))
  if not tried:
    return None
  first = evidence._replace(tried=tried)
  how = How.of(programs)
  if first.agree(how) or first.agree(how._replace(weight=ROWS)):
    return Finding("weighted", words.MEAN_FOR_TOTAL, "")
  return None


def _weighted(evidence: Evidence) -> Finding | None:
  """Whether it is a mean over rows, or over something that can be counted."""
  programs = evidence.programs
  # A change may make a weight negative that is none in all rows of the batch.
  of_rows = {call.name for call in programs.samples}
  given = [
    part.call
    for x in evidence.tried
    if x.whole.call.name in of_rows
    for _, parts in x.splits
    for part in parts
  ]
  mean = How.of(programs, "mean")
  for what, weight_fn, weight in weights_of(programs.call, programs.facts):
    how = mean._replace(weight=weight)
    if evidence.agree(how) and all(weight(call) >= 0 for call in given):
      fix = f"weight_fn={weight_fn}"
      if programs.local.reduction.name != "mean":
        fix += ', reduction="mean"'
      if weight is not ROWS:
        fix += f"\n{words.OR_BOTH}"
      return Finding("weighted", words.WEIGHTED.format(what=what), fix, how)
  return None


def _weighted_by_something(evidence: Evidence) -> Finding | None:
  """Whether it is a mean over something unknown, as far as splits in two tell."""
  programs = evidence.programs
  in_two = [rows for _, rows in programs.cuts if len(rows) == 2]
  if programs.devices.sends or not in_two:
    return None
  for x, rows in itertools.product(evidence.tried, in_two):
    if not _has_share(programs, x.whole.call, rows):
      return None
  names = ", ".join(dict.fromkeys(x.argument for x in programs.call.batch))
  fix = words.DENOMINATOR.format(batch=names)
  return Finding("weighted", words.SOME_WEIGHT, fix)


def _has_share(
  programs: Programs, call: Call, rows: Sequence[np.ndarray]
) -> bool:
  """Whether all is share * a + (1 - share) * b of two parts, with one share for all parameters."""
  points = []
  for point in (call, *(call.moved(n, size=0.5) for n in (1, 2, 3))):
    whole = programs.whole(point)
    if whole.is_finite:
      outcomes = (whole, *programs.parts(point, rows))
      points.append([x.in_times_of(whole.allowed) for x in outcomes])
  all_rows, a, b = map(np.concatenate, zip(*points, strict=True))
  most = np.argmax(np.abs(a - b))
  share = (all_rows - b)[most] / (a - b)[most]
  if not 1e-3 < share < 1 - 1e-3:
    return False
  # A tenth of what is allowed elsewhere: a share that is free hides most of a small term.
  differences = all_rows - share * a - (1 - share) * b
  return bool(np.max(np.abs(differences)) <= 0.1)


def maybe_unsplit(programs: Programs) -> Finding | None:
  """As `unsplit`, also of what the step itself gives the loss."""
  roles = programs.batch.roles
  shared = roles.shared + roles.of_step
  return unsplit(programs, roles._replace(shared=shared))


def unsplit(programs: Programs, roles: Roles) -> Finding | None:
  """Whether an argument that is not split has the batch's rows, which nobody tried to split."""
  call = programs.batch
  split = programs.local.split
  slots = with_rows(roles, call.arguments, call.rows)
  if not slots:
    return None
  more = {slot: f"{split.name(slot)} has {call.rows} rows" for slot in slots}
  reason, fix = words.unsplit(roles.batch, more)
  return Finding("unsplit", reason, fix)


def _unsplit_or_coupled(evidence: Evidence) -> Finding:
  """What remains, with the mends of what was seen in the loss, or with all."""
  finding = maybe_unsplit(evidence.programs)
  facts = evidence.programs.facts
  if finding:
    return finding
  if facts.is_half:
    return Finding("unknown", words.HALF, words.USE_FLOAT32)
  kinds = facts.couplings or words.MENDS.keys() - {"mixed"}
  mends = [text for kind, text in words.MENDS.items() if kind in kinds]
  if facts.couplings:
    mends.append(words.OTHERS)
  return Finding("coupled", words.COUPLED, "\n".join(mends))


_HYPOTHESES = (
  _not_a_function,
  _shared_noise,
  _sum,
  _mean_for_total,
  _weighted,
  _weighted_by_something,
  _unsplit_or_coupled,
)


def _aux(evidence: Evidence, how: How) -> Finding | None:
  """Which words reduce the aux that differs."""
  wrong = {name for name in evidence.wrong(how) if name[:3] == "aux"}
  if not wrong:
    return None
  found = _words_for(evidence, how, WORDS, wrong)
  if len(found) < len(wrong):
    return Finding("unknown", words.AUX, words.RATIO)
  _, tree = evidence.programs.given.names
  fixed = how.reworded(found)
  fix = words.tree_option("aux_reduction", jax.tree.map(fixed.words.get, tree))
  verdict: Verdict = "sum" if {*found.values()} == {"sum"} else "unknown"
  return Finding(verdict, words.AUX, fix, fixed)


def _words_for(
  evidence: Evidence, how: How, choices: Sequence[str], names: Collection[str]
) -> dict[str, str]:
  """The first word that makes each array that of the whole batch, where any does."""
  found = dict[str, str]()
  for word in choices:
    wrong = evidence.wrong(how.reworded(dict.fromkeys(names, word)))
    found = {**dict.fromkeys(set(names) - wrong, word), **found}
  return found


def groups(programs: Programs) -> Finding | None:
  """Whether a loss runs on some numbers of rows, and not on others."""
  most = -(-2 * programs.rows // 3)
  sizes = {most, programs.rows - most} - {0}
  sizes |= {len(x) for _, rows in programs.cuts for x in rows}
  failed = {}
  for size in sorted(sizes):
    try:
      programs.parts(programs.call, [np.arange(size)])
    except Exception as error:
      text = f"{type(error).__name__}: {str(error).strip()}"
      failed[str(size)] = text.partition("\n")[0]
  if len(failed) == len(sizes):
    return None
  reason = words.UNEVEN.format(
    rows=programs.rows,
    failed=" or ".join(failed),
    error=next(iter(failed.values())),
  )
  return Finding("coupled", reason, words.GROUPS)


def _read_carry(programs: Programs) -> list[str]:
  """What in the carry the loss changes, and is another by. Not keys, nor integers: counters."""
  call = programs.call
  old = [x for x in call.arrays if x.role == "carry" and x.kind in "fcb"]
  if not old:
    return []
  new = programs.new_carry(call.moved(1))
  names = []
  for x in old:
    if np.array_equal(x.value, new[x.name]):
      continue
    # A loss may read only what is far from here, or only what is near.
    others = [call.put("", x, x.moved(1, size)) for size in (0.1, 3.0)]
    outcomes = map(programs.whole, others)
    if not all(programs.given.fits(other.arrays) for other in outcomes):
      names.append(x.name)
  return names
