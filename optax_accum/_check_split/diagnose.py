"""Why microbatches of a loss do not give what the whole batch does: hypotheses, in their order.

Most are other ways to make one of what the microbatches gave.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import numpy as np

from optax_accum._check_split import words
from optax_accum._check_split.facts import fingerprint, weights_of
from optax_accum._check_split.report import Verdict
from optax_accum._check_split.runs import How, ROWS, Runs, Tried

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
  """The first hypothesis that fits, and what is wrong with aux once it is fixed."""
  if not runs.wrong(runs.how()):
    return Finding("ok", "", "", runs.how())
  hypotheses: list[Callable[[Runs], Finding | None]] = [
    _not_a_function, _agrees, _gradients, _shared_noise, _sum, _weighted, unsplit, _rounding,
  ]  # fmt: skip
  found = (finding for hypothesis in hypotheses if (finding := hypothesis(runs)))
  first = next(found, Finding("coupled", words.COUPLED, words.TOGETHER))
  then = _aux(runs, first.how) if first.how else None
  if not then or first.verdict == "ok":
    return then or first
  reason, fix = f"{first.reason}\n{then.reason}", f"{first.fix}\n{then.fix}"
  return Finding(first.verdict, reason, fix, then.how)


def of_error(runs: Runs) -> Finding | None:
  """Why a loss that runs on the whole batch raises in microbatches."""
  return unsplit(runs) or _groups(runs)


def _not_a_function(runs: Runs) -> Finding | None:
  first, again = (fingerprint(runs.traced()) for _ in range(2))
  if first == again and runs.given.fits(runs.whole(runs.call).leaves):
    return None
  return Finding("random", words.NOT_A_FUNCTION, words.PASS_A_KEY)


def unsplit(runs: Runs) -> Finding | None:
  """Whether an argument that is not split has the batch's rows, which nobody tried to split."""
  axis, shared = runs.options["batch_axis"][0], [x for x in runs.call.arrays if x.role == "shared"]
  more = {x.argnum for x in shared if x.value.shape[axis:][:1] == (runs.rows,)}
  if not more:
    return None
  which = " and ".join(f"argument {i}" for i in sorted(more))
  reason = words.UNSPLIT.format(which=which, rows=runs.rows)
  return Finding("unsplit", reason, words.split_too(runs.options["batch_argnums"], more))


def _agrees(runs: Runs) -> Finding | None:
  """Whether loss and gradients agree, and so aux alone does not."""
  return Finding("ok", "", "", runs.how()) if runs.agree(runs.how()) else None


def _aux(runs: Runs, how: How) -> Finding | None:
  """Which words reduce the aux that differs."""
  count, tree = len(runs.given.main), jax.tree.structure(runs.given.aux)
  wrong = {i for i in runs.wrong(how) if i >= count}
  if not wrong:
    return None
  found = _words_for(runs, how, _OF_AUX, wrong)
  if len(found) < len(wrong):
    return Finding("unknown", words.AUX, words.RATIO)
  new = [found.get(i, word) for i, word in enumerate(how.words)]
  fix = words.option("aux_reduction", jax.tree.unflatten(tree, new[count:]))
  verdict: Verdict = "sum" if {*found.values()} == {"sum"} else "unknown"
  return Finding(verdict, words.AUX, fix, how._replace(words=new))


def _words_for(
  runs: Runs, how: How, choices: Sequence[str], leaves: Collection[int]
) -> dict[int, str]:
  """The first word that makes each leaf that of the whole batch, where any does."""
  found: dict[int, str] = {}
  for choice in choices:
    new = [choice if i in leaves else word for i, word in enumerate(how.words)]
    wrong = runs.wrong(how._replace(words=new))
    found = dict.fromkeys(set(leaves) - wrong, choice) | found
  return found


def _gradients(runs: Runs) -> Finding | None:
  """Whether the loss agrees, and gradients would, reduced by another `grad_reduction`.

  A layer in 8 bits records the largest cotangent of a batch as the "gradient" of a leaf, and
  rounds the other gradients otherwise in a microbatch than in the whole batch.
  """
  how, default, leaves = runs.how(), runs.options["reduction"], range(1, len(runs.names))
  if 0 in runs.wrong(how):
    return None
  found = _words_for(runs, how, (default, *_EXTREMES), leaves)
  named = [i for i in leaves if _KEY in runs.names[i] and runs.facts.is_half]
  found |= {i: "max" for i in named if found.get(i) not in _EXTREMES}
  new = [found.get(i, default) for i in leaves]
  explains = len(found) == len(leaves) or named
  if new == how.words[1 : len(runs.names)] or not explains:
    return None
  overwritten = [runs.names[i] for i, word in found.items() if word in _EXTREMES]
  tree = jax.tree.unflatten(jax.tree.structure(runs.params), new) if overwritten else None
  fix, fixed = words.option("grad_reduction", tree), runs.how(grad_reduction=tree)
  if not overwritten:
    return Finding("unknown", words.GRADIENTS, fix, fixed)
  reason = words.OVERWRITTEN.format(names=", ".join(sorted(overwritten)))
  if not runs.agree(fixed):
    return Finding("overwritten", f"{reason}\n{words.HALF}", f"{fix}\n{words.USE_FLOAT32}")
  return Finding("overwritten", reason, fix, fixed)


def _groups(runs: Runs) -> Finding | None:
  """Whether a loss runs on some numbers of rows, and not on others."""
  most = -(-2 * runs.rows // 3)
  sizes = {*runs.sizes, *(runs.rows % size for size in runs.sizes), most, runs.rows - most} - {0}
  failed = {}
  for size in sorted(sizes):
    try:
      runs.parts(runs.call, [np.arange(size)])
    except Exception as error:
      what = str(error).strip().partition("\n")[0]
      failed[str(size)] = f"{type(error).__name__}: {what}"
  if len(failed) == len(sizes):
    return None
  which, first = " or ".join(failed), next(iter(failed.values()))
  reason = words.UNEVEN.format(rows=runs.rows, failed=which, error=first)
  return Finding("coupled", reason, words.GROUPS)


def _shared_noise(runs: Runs) -> Finding | None:
  """Whether a loss that draws changes with the places of the rows: its noise is that of a place."""
  backwards = np.arange(runs.rows)[::-1]
  if all(x.whole.fits(runs.whole(x.call.take(backwards)).leaves) for x in runs.outcomes):
    return None
  shared = [x.argnum for x in runs.call.arrays if x.role == "shared" and x.may_be_key]
  if shared:
    named = [*runs.options["rng_argnums"], *dict.fromkeys(shared)]
    return Finding("random", words.SHARED_KEY, f"rng_argnums={words.one_or_more(named)}")
  if runs.facts.draws_from_others:
    return Finding("random", words.SHARED_KEY, words.PASS_A_KEY)
  return None


def _sum(runs: Runs) -> Finding | None:
  how = runs.how(reduction="sum", weight=ROWS)
  return Finding("sum", words.SUM, 'reduction="sum"', how) if runs.agree(how) else None


def _weighted(runs: Runs) -> Finding | None:
  """Whether it is a mean over something that can be counted, or over something."""
  mean = ', reduction="mean"' if runs.options["reduction"] != "mean" else ""
  names = ", ".join(dict.fromkeys(x.argument for x in runs.call.batch))
  for code, weight in [("", ROWS), *weights_of(runs.call, runs.facts)]:
    how = runs.how(weight=weight, reduction="mean")
    given = runs.outcomes[: 1 + len(runs.others)]
    parts = [part for tried in given for split in tried.splits for part in split]
    if runs.agree(how) and all(weight(part.call) >= 0 for part in parts):
      reason = words.WEIGHTED.format(what=code or "the number of rows")
      weight_fn = f"lambda {names}: {code}" if code else "None"
      return Finding("weighted", reason, f"weight_fn={weight_fn}{mean}", how)
  # Strided, and in parts of neighbors if there are such.
  cuts = runs.cuts[:: len(runs.sizes)]
  if not all(_some_weight_explains(runs, x, cut) for x in runs.outcomes for cut in cuts):
    return None
  return Finding("weighted", words.SOME_WEIGHT, words.DENOMINATOR.format(batch=names))


def _some_weight_explains(runs: Runs, tried: Tried, rows: Sequence[np.ndarray]) -> bool:
  """Whether the whole is a mean of its parts by the same shares at several parameters."""
  points = []
  for point in map(tried.call.moved, range(4)):
    given = runs.whole(point)
    if given.is_finite:
      parts = runs.parts(point, rows)
      points.append([given.in_roundings(x.main) for x in (given, *(x.outcome for x in parts))])
  whole, *each = map(np.concatenate, zip(*points, strict=True))
  columns = [x for x in each if np.all(np.isfinite(x))]  # of what has no share it may be 0/0
  if not columns:
    return False
  shares = np.linalg.lstsq(np.stack(columns, 1), whole)[0]
  # They add up to more than one by what each part adds to its count, to divide by no zero.
  is_mean = abs(sum(shares) - 1) < 0.01 and (len(shares) == 1 or min(shares) > 1e-3)
  # A tenth of what is allowed elsewhere: free shares hide most of a small term.
  return is_mean and bool(np.max(np.abs(whole - shares @ columns)) <= 0.1)


def _rounding(runs: Runs) -> Finding | None:
  return Finding("unknown", words.HALF, words.USE_FLOAT32) if runs.facts.is_half else None
