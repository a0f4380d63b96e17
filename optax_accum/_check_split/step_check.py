"""What a check does with a step, or with a loss as `microbatch_value_and_grad` would call it."""

from collections.abc import Iterator
import contextlib
import dataclasses

import jax
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._check_split import diagnose
from optax_accum._check_split.call import Call
from optax_accum._check_split.diagnose import Trial
from optax_accum._check_split.programs import on, Programs, with_split
from optax_accum._check_split.report import SplitReport
from optax_accum._mesh.loss import Loss
from optax_accum._microbatches import cut
from optax_accum._microbatches.refusals import naming, with_keys, with_rows
from optax_accum._microbatches.roles import by_slot

_ROWS = 16  # of a microbatch: more take longer, and seldom tell more


def check_step(loss: Loss, args, kwargs) -> SplitReport:
  """`step.check`: the report on such a call of the loss of a step."""
  split = loss.local.split
  roles = loss.local.roles_of(args, kwargs)
  arguments = by_slot(args, kwargs)
  keys = with_keys(roles, arguments)
  if keys and split.rng_argnums != ():
    fix = naming("rng", [*roles.rng, *keys])
    given = jax.tree.leaves([arguments[slot] for slot in keys])
    if not all(map(is_key, given)):
      # An argument that is named holds keys alone.
      fix = diagnose.PASS_A_KEY
    report = SplitReport("random", diagnose.SHARED_KEY, fix)
  else:
    report = _report_or_unsplit(loss, args, kwargs)
  # In steps that call their loss in their own way.
  fix = split.fixes.get(report.verdict, report.fix)
  return dataclasses.replace(report, fix=fix)


def _report_or_unsplit(loss: Loss, args, kwargs) -> SplitReport:
  """The report, or that all agree if something is split that has the batch's rows."""
  try:
    report = _report(loss, args, kwargs)
  except Exception:
    unsplit = _unsplit(loss, args, kwargs)
    if unsplit is None:
      raise
    return unsplit
  if report.verdict in ("coupled", "unknown"):
    return _unsplit(loss, args, kwargs) or report
  return report


def _unsplit(loss: Loss, args, kwargs) -> SplitReport | None:
  local = loss.local
  split = local.split
  arguments = by_slot(args, kwargs)
  roles = local.roles_of(args, kwargs)
  rows = cut.batch_rows(split, roles.batch, arguments)
  slots = with_rows(roles, arguments, rows)
  if not slots:
    return None
  both = *roles.batch, *slots
  other = dataclasses.replace(split, batch_argnums=both)
  with contextlib.suppress(Exception):
    new = with_split(loss, other, local.asked, local.fun)
    if _report(new, args, kwargs).ok:
      reason = f"{split.name(*slots)} has {rows} rows, as many as the batch, and is not split."
      return SplitReport("unsplit", reason, naming("batch", both))
  return None


def _report(loss: Loss, args, kwargs) -> SplitReport:
  """The report on the first rows."""
  split = loss.local.split
  roles = loss.local.roles_of(args, kwargs)
  rows = cut.batch_rows(split, roles.batch, by_slot(args, kwargs))
  if rows == 1:
    raise ValueError(
      "The batch has 1 row, which cannot be split: give 2 or more."
    )
  call = Call.of(loss.local.roles_of.signature, args, kwargs, roles)
  programs = Programs(loss, call)
  devices = programs.devices
  rows //= devices
  if loss.parallel is not None:
    split = loss.parallel.on_device(split)
  size = cut.microbatch_rows(
    rows, split.num_microbatches, split.microbatch_size
  )
  is_one = size == rows
  if is_one:  # then two calls of `add` may have a half each
    size = -(-rows // 2)
  with (
    on(programs.one),
    jax.default_matmul_precision("highest"),
    jax.debug_nans(False),
    np.errstate(all="ignore"),
  ):
    with on(programs.mesh):
      # Raises what the step does.
      jax.eval_shape(loss.value_and_grad, *args, **kwargs)
    facts = programs.facts
    most = min(size, _ROWS // devices)
    # Two microbatches, or parts of 2 rows and 1.
    few = min(rows, max(2 * most, 3))
    # What devices exchange, or the loss splits by itself, stays in one microbatch.
    if is_one and (facts.exchanges or programs.splits_itself()):
      trials = [*_trials(programs, few, few)]
    else:
      # The larger of two parts, which is odd: most losses of rows in groups do not run on it.
      odd = max(1, min(2 * few // 3 | 1, few - 1))
      trials = [*_trials(programs, few, odd)]
      if not trials:
        # In groups: two whole microbatches, and parts of which each may be whole groups.
        trials += _trials(programs, min(rows, 2 * size), size)
        trials += _trials(programs, few, min(odd + 1, few - 1))
    report = SplitReport("unknown", NOTHING, OTHER_BATCH)
    if trials:
      report = diagnose.explain(programs, trials)
      # The first that differs, or else the first.
      shown = min(trials, key=lambda x: all(leaf.agrees for leaf in x.leaves))
      size = len(shown.rows[0]) * devices
      report = dataclasses.replace(
        report,
        where=f"{shown.call.name}; microbatches of up to {size} rows",
        leaves=tuple(shown.leaves),
      )
  notes = []
  if facts.keys:
    notes.append(DRAWS)
  if call.of_role("carry"):
    notes.append(CARRY)
  reason = report.reason
  if facts.bytes < 4:
    reason = f"{reason}\n{IN_HALF}".strip()
  return dataclasses.replace(report, reason=reason, not_checked=tuple(notes))


def _trials(programs: Programs, own: int, size: int) -> Iterator[Trial]:
  """The given batch and altered ones that run and tell something.

  A device has its `own` rows, and its microbatches `size` of them.
  """
  total = own * programs.devices
  call = programs.call.take(np.arange(total))
  cut_rows = _cut(own, size)
  # Devices cut their rows as the first does.
  rows = [i + x for i in range(0, total, own) for x in cut_rows]
  base = call.varied("all floats varied")
  if not programs.whole(base).is_finite:
    base = call
  for new in (call, base, *base.altered(programs.facts, cut_rows[-1])):
    with contextlib.suppress(Exception):
      whole = programs.whole(new)
      found = programs.step(new, size * programs.devices)
      # For nothing that counts a step is not taken.
      is_nonzero = any(map(np.any, whole.main.values()))
      tells = whole.is_finite and is_nonzero and found.weight > 0
      # A device where nothing counts may spoil what it sends.
      if tells and (found.is_finite or not programs.facts.exchanges):
        yield Trial(new, whole, whole.compare(found.arrays), rows)


def _cut(rows: int, size: int) -> list[np.ndarray]:
  """The rows of each microbatch, as `microbatch_value_and_grad` cuts them."""
  number = rows // size
  full = number * size
  parts = [np.arange(i, full, number) for i in range(number)]
  if full < rows:
    parts.append(np.arange(full, rows))
  return parts


DRAWS = """\
the random numbers that the loss draws: whether the noise of a row depends
on other rows, or all rows share one number, which would be another in each
microbatch"""
CARRY = "the new carry: whether it is what the whole batch would make of it"
IN_HALF = """\
This is a verdict in 16 bits: the loss computes in them, so differences up
to 1/64 of the loss and 1/8 of the largest gradient pass for rounding. It
cannot tell weights that differ by less: take exactly what the loss divides
by. With a weight, logits and mask must be in float32."""
NOTHING = """\
Nothing can be compared: the loss or its gradients are not finite, or they
are zero on all batches, or nothing counts, or the loss does not run on
fewer rows."""
OTHER_BATCH = """\
Give parameters and a batch for which they are finite, and the loss is not
zero."""
