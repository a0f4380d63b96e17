"""Why microbatches of a loss do not give what the whole batch does: hypotheses, in their order.

Most are other ways to make one of what the microbatches gave.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._check_split import words
from optax_accum._check_split.report import Verdict
from optax_accum._check_split.runs import How, Outcome, ROWS, Runs
from optax_accum._check_split.weights import weights_of
from optax_accum._microbatches.refusals import (
  refuse_keys,
  with_keys,
  with_rows,
)

_OF_AUX = ("sum", "mean", "max", "min", "concat")
_EXTREMES = ("max", "min")
_KEY = "_overwrite_with_gradient"  # flax names such a collection so


class Finding(NamedTuple):
  """What is wrong, why that is known, and what to do about it."""

  verdict: Verdict
  reason: str
  fix: str
  how: How | None = None  # with which all agrees


def explain(runs: Runs) -> Finding:
  """What is wrong: of what agrees on all batches, what these cannot show."""
  finding = _of_outcomes(runs)
  if finding.verdict not in ("ok", "sum", "weighted"):
    return finding
  if runs.facts.mixes:
    return Finding("coupled", words.MIXED, words.MENDS["mixed"])
  if names := runs.read_carry():
    reason = words.CARRIED.format(names=" and ".join(names))
    return Finding("coupled", reason, words.READ_THE_OLD)
  return finding


def _of_outcomes(runs: Runs) -> Finding:
  """The first hypothesis that fits, and what is wrong with aux once it is fixed."""
  how = runs.how()
  ok = Finding("ok", "", "", how)
  if not runs.wrong(how):
    return ok
  seen = [words.MENDS[x] for x in runs.facts.couplings]
  unseen = [text for kind, text in words.MENDS.items() if kind != "mixed"]
  last = Finding(
    "coupled",
    words.COUPLED,
    "\n".join([*seen, words.OTHERS] if seen else unseen),
  )
  if runs.facts.is_half:
    last = Finding("unknown", words.HALF, words.USE_FLOAT32)
  agrees = lambda runs: ok if runs.agree(how) else None  # noqa: E731
  hypotheses = (
    _not_a_function,
    agrees,
    _gradients,
    _shared_noise,
    _weighted,
    unsplit,
  )
  first = next(
    (x for hypothesis in hypotheses if (x := hypothesis(runs))), last
  )
  then = _aux(runs, first.how) if first.how else None
  if not then or first.verdict == "ok":
    return then or first
  reason, fix = f"{first.reason}\n{then.reason}", f"{first.fix}\n{then.fix}"
  return Finding(first.verdict, reason, fix, then.how)


def refused(runs: Runs) -> Finding | None:
  """What the defaults refuse: a second batch argument, or a key, that all microbatches share."""
  roles, options = runs.batch.roles, runs.options
  if options["batch_argnums"] is None and (finding := unsplit(runs)):
    return finding
  try:
    if options["rng_argnums"] is None:
      refuse_keys(roles, runs.batch.arguments)
  except ValueError as error:
    slots = with_keys(roles, runs.batch.arguments)
    alone = all(
      is_key(x)
      for slot in slots
      for x in jax.tree.leaves(runs.batch.arguments[slot])
    )
    return Finding(
      "random",
      str(error),
      words.naming("rng", slots) if alone else words.PASS_A_KEY,
    )
  return None


def _not_a_function(runs: Runs) -> Finding | None:
  if runs.fingerprint() == runs.fingerprint() and runs.given.fits(
    runs.whole(runs.call).leaves
  ):
    return None
  return Finding("random", words.NOT_A_FUNCTION, words.PASS_A_KEY)


def unsplit(runs: Runs) -> Finding | None:
  """Whether an argument that is not split has the batch's rows, which nobody tried to split."""
  roles, rows = runs.batch.roles, runs.batch.rows
  more = list(with_rows(roles, runs.batch.arguments, (rows,)))
  return (
    Finding("unsplit", *words.unsplit(roles.batch, more, rows))
    if more
    else None
  )


def _aux(runs: Runs, how: How) -> Finding | None:
  """Which words reduce the aux that differs."""
  wrong = {name for name in runs.wrong(how) if name.startswith("aux")}
  if not wrong:
    return None
  found = _words_for(runs, how, _OF_AUX, wrong)
  if len(found) < len(wrong):
    return Finding("unknown", words.AUX, words.RATIO)
  fixed = how.reworded(runs.names, found)
  new = fixed.words[len(runs.given.main) :]
  tree = jax.tree.unflatten(jax.tree.structure(runs.given.trees[1]), new)
  fix = words.option("aux_reduction", tree)
  return Finding(
    "sum" if {*found.values()} == {"sum"} else "unknown", words.AUX, fix, fixed
  )


def _words_for(
  runs: Runs, how: How, choices: Sequence[str], leaves: Collection[str]
) -> dict[str, str]:
  """The first word that makes each leaf that of the whole batch, where any does."""
  found: dict[str, str] = {}
  for choice in choices:
    wrong = runs.wrong(how.reworded(runs.names, dict.fromkeys(leaves, choice)))
    found = dict.fromkeys(set(leaves) - wrong, choice) | found
  return found


def _gradients(runs: Runs) -> Finding | None:
  """Whether the loss agrees, and gradients would, reduced by another `grad_reduction`.

  A layer in 8 bits records its largest cotangent as a "gradient", by which it rounds the others.
  """
  how, default = runs.how(), runs.options["reduction"]
  leaves = runs.names[1 : len(runs.given.main)]
  if "loss" in runs.wrong(how):
    return None
  found = _words_for(runs, how, (default, *_EXTREMES), leaves)
  named = [name for name in leaves if _KEY in name and runs.facts.is_half]
  found |= {name: "max" for name in named if found.get(name) not in _EXTREMES}
  new = [found.get(name, default) for name in leaves]
  explains = len(found) == len(leaves) or named
  if new == how.words[1 : len(runs.given.main)] or not explains:
    return None
  overwritten = [name for name, word in found.items() if word in _EXTREMES]
  tree = (
    jax.tree.unflatten(jax.tree.structure(runs.given.trees[0]), new)
    if overwritten
    else None
  )
  fix, fixed = (
    words.option("grad_reduction", tree),
    runs.how(grad_reduction=tree),
  )
  if not overwritten:
    return Finding("unknown", words.GRADIENTS, fix, fixed)
  reason = words.OVERWRITTEN.format(names=", ".join(sorted(overwritten)))
  if not runs.agree(fixed):
    return Finding(
      "overwritten", f"{reason}\n{words.HALF}", f"{fix}\n{words.USE_FLOAT32}"
    )
  return Finding("overwritten", reason, fix, fixed)


def groups(runs: Runs) -> Finding | None:
  """Whether a loss runs on some numbers of rows, and not on others."""
  most = -(-2 * runs.rows // 3)
  sizes = {
    most,
    runs.rows - most,
    *(len(x) for rows in runs.cuts for x in rows),
  } - {0}
  failed = {}
  for size in sorted(sizes):
    try:
      runs.parts(runs.call, [np.arange(size)])
    except Exception as error:
      failed[str(size)] = (
        f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
      )
  if len(failed) == len(sizes):
    return None
  which, first = " or ".join(failed), next(iter(failed.values()))
  reason = words.UNEVEN.format(rows=runs.rows, failed=which, error=first)
  return Finding("coupled", reason, words.GROUPS)


def _shared_noise(runs: Runs) -> Finding | None:
  """Whether a loss that draws changes with the places of the rows: its noise is that of a place."""
  backwards = np.arange(runs.rows)[::-1]
  if all(
    x.fits(runs.whole(x.call.take(backwards)).leaves) for x in runs.outcomes
  ):
    return None
  shared = [
    x.slot for x in runs.call.arrays if x.role == "shared" and x.may_be_key
  ]
  if shared:
    named = [*runs.batch.roles.rng, *dict.fromkeys(shared)]
    return Finding("random", words.SHARED_KEY, words.naming("rng", named))
  if runs.facts.draws_from_others:
    return Finding("random", words.SHARED_KEY, words.PASS_A_KEY)
  return None


def _weighted(runs: Runs) -> Finding | None:
  """Whether it is a sum, a mean over something that can be counted, or over something unknown."""
  how = runs.how(reduction="sum", weight=ROWS)
  if runs.agree(how):
    return Finding("sum", words.SUM, 'reduction="sum"', how)
  mean = ', reduction="mean"' if runs.options["reduction"] != "mean" else ""
  names = ", ".join(dict.fromkeys(x.argument for x in runs.call.batch))
  given = runs.outcomes[: 1 + len(runs.others)]
  parts = [part for tried in given for split in tried.splits for part in split]
  for code, weight in [("", ROWS), *weights_of(runs.call, runs.facts)]:
    how = runs.how(weight=weight, reduction="mean")
    if runs.agree(how) and all(weight(part.call) >= 0 for part in parts):
      reason = words.WEIGHTED.format(what=code or "the number of rows")
      weight_fn = f"lambda {names}: {code}" if code else "None"
      return Finding("weighted", reason, f"weight_fn={weight_fn}{mean}", how)
  if not all(
    _some_weight_explains(runs, x, cut)
    for x in runs.outcomes
    for cut in runs.cuts
  ):
    return None
  return Finding(
    "weighted", words.SOME_WEIGHT, words.DENOMINATOR.format(batch=names)
  )


def _some_weight_explains(
  runs: Runs, whole: Outcome, rows: Sequence[np.ndarray]
) -> bool:
  """Whether the whole is a mean of its parts by the same shares at several parameters."""
  points = []
  for point in [
    whole.call,
    *(whole.call.moved(n, size=0.5) for n in (1, 2, 3)),
  ]:
    given = runs.whole(point)
    if given.is_finite:
      parts = runs.parts(point, rows)
      points.append([given.in_roundings(x.main) for x in (given, *parts)])
  all_rows, *each = map(np.concatenate, zip(*points, strict=True))
  # What has no share may be 0/0, or zero.
  columns = [x for x in each if np.all(np.isfinite(x)) and np.any(x)]
  if not columns:
    return False
  shares = np.linalg.lstsq(np.stack(columns, 1), all_rows)[0]
  # They add up to more than one by what each part adds to its count, to divide by no zero.
  is_mean = abs(sum(shares) - 1) < 1e-4 and (
    len(shares) == 1 or min(shares) > 1e-3
  )
  # A tenth of what is allowed elsewhere: free shares hide most of a small term.
  return is_mean and bool(np.max(np.abs(all_rows - shares @ columns)) <= 0.1)
