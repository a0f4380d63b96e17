"""Why microbatches of a loss do not give what the whole batch does: hypotheses, in their order.

Most are other ways to make one of what the microbatches gave. Two parts of different size, whose
rows follow each other, tell the rest: whether some weight fits, whether rows belong in groups.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic.trees import Args, Leaves, Tree
from optax_accum._check_split import words
from optax_accum._check_split.facts import fingerprint
from optax_accum._check_split.probes import Call
from optax_accum._check_split.report import Verdict
from optax_accum._check_split.runs import How, Outcome, ROWS, Runs
from optax_accum._check_split.weights import weights_of

_SMALL = 0.01  # more than an epsilon that keeps a loss from dividing by zero
_POINTS = (0, 1, 2, 3)  # parameters at which one weight must explain the loss
_OF_AUX = ("sum", "mean", "max", "min", "concat")
_EXTREMES = ("max", "min")
_KEY = "_overwrite_with_gradient"  # flax names such a collection so


class Finding(NamedTuple):
  """What is wrong, why that is known, and what to do about it."""

  verdict: Verdict
  reason: str
  fix: str
  how: How | None = None  # with which loss and gradients agree


def explain(runs: Runs) -> Finding:
  """The first hypothesis that fits, and what is wrong with aux once it is fixed."""
  hypotheses: list[Callable[[Runs], Finding | None]] = [
    _not_a_function, _unsplit, _aux_alone, _gradients, _groups, _rounding, _groups_of_neighbours,
    _places, _sum, _weighted,
  ]  # fmt: skip
  found = (finding for hypothesis in hypotheses if (finding := hypothesis(runs)))
  first = next(found, None) or _coupled(runs)
  then = _aux(runs, first.how) if first.how else None
  if not then:
    return first
  return Finding(first.verdict, f"{first.reason}\n{then.reason}", f"{first.fix}\n{then.fix}")


def of_error(runs: Runs) -> Finding | None:
  """Why a loss that runs on the whole batch raises in microbatches."""
  sizes = {*runs.sizes, *(runs.rows % size for size in runs.sizes)} - {0}
  return _unsplit(runs) or _groups(runs, sizes)


def _not_a_function(runs: Runs) -> Finding | None:
  first, again = (fingerprint(runs.traced()) for _ in range(2))
  if first == again and runs.given.fits(runs.whole(runs.call).leaves):
    return None
  return Finding("random", words.NOT_A_FUNCTION, words.PASS_A_KEY)


def _unsplit(runs: Runs) -> Finding | None:
  """Whether the loss can be split once an argument is split that is not."""
  axis, args = runs.options["batch_axis"][0], runs.call.args
  has_rows = lambda s: -len(s) <= axis < len(s) and s[axis] == runs.rows  # noqa: E731
  shared = dict.fromkeys(x.argnum for x in runs.call.arrays if x.role == "shared")
  more = [i for i in shared if all(has_rows(np.shape(x)) for x in jax.tree.leaves(args[i]))]
  if not more:
    return None
  try:
    split = Runs(runs.fun, runs.call.with_split(more, axis), runs.options, runs.sizes)
    if not split.agree(split.how(weight=ROWS)):
      return None
  except (TypeError, ValueError):  # it cannot be split so either
    return None
  which = " and ".join(f"argument {i}" for i in more)
  reason = words.UNSPLIT.format(which=which, rows=runs.rows)
  return Finding("unsplit", reason, f"batch_argnums={(*runs.options['batch_argnums'], *more)}")


def _aux_alone(runs: Runs) -> Finding | None:
  return _aux(runs, runs.how()) if runs.agree(runs.how()) else None


def _aux(runs: Runs, how: How) -> Finding | None:
  """Which words reduce the aux that differs."""
  count, tree = len(runs.given.main), jax.tree.structure(runs.given.aux)
  wrong = {i for i in runs.wrong(how) if i >= count}
  if not wrong:
    return None
  found = _words_for(runs, how, _OF_AUX, wrong)
  new = [found.get(i, word) for i, word in enumerate(how.words)][count:]
  fix = words.option("aux_reduction", jax.tree.unflatten(tree, new))
  verdict: Verdict = "sum" if all(found.get(i) == "sum" for i in wrong) else "unknown"
  return Finding(verdict, words.AUX, fix if len(found) == len(wrong) else words.RATIO)


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

  A layer in 8 bits records the largest cotangent of a batch as the "gradient" of a leaf.
  """
  how, names = runs.how(), runs.names
  wrong, default = runs.wrong(how), how.words[0]
  if 0 in wrong:
    return None
  named = {i for i, name in names.items() if _KEY in name}
  moving = {i for i in names if any(np.any(x.whole.main[i]) for x in runs.outcomes)} | named
  unknown = moving & wrong if runs.options["grad_reduction"] else (moving & wrong) | named
  extremes = {i: how.words[i] for i in moving - unknown if how.words[i] in _EXTREMES}
  extremes |= _words_for(runs, how, _EXTREMES, unknown) | dict.fromkeys(unknown & named, "max")
  new = _tree(runs, dict.fromkeys(names, default) | extremes) if extremes else None
  fixed, fix = runs.how(grad_reduction=new), words.option("grad_reduction", new)
  reason = words.OVERWRITTEN.format(names=", ".join(names[i] for i in sorted(extremes)))
  if not runs.agree(fixed):
    if not extremes or default != "mean" or how.weight is not ROWS:
      return None
    # Cotangents of a mean are larger over fewer rows, and rounded otherwise; not those of a sum.
    new, x = _tree(runs, dict.fromkeys(names, "sum") | extremes), runs.call.batch[0]
    option, rows = words.option("grad_reduction", new), f"{x.name}.shape[{x.axis}]"
    fix = words.SUM_OVER_ALL_ROWS.format(option=option, rows=rows, all_rows=runs.rows)

    def part_of_mean(*args: Args) -> Tree:
      out = runs.fun(*args)
      share = jax.tree.leaves(args[x.argnum])[0].shape[x.axis] / runs.rows
      return (out[0] * share, out[1]) if runs.options["has_aux"] else out * share

    tried = Runs(part_of_mean, runs.call, runs.options, runs.sizes)
    agrees = tried.agree(tried.how(reduction="sum", grad_reduction=new))
    return Finding("overwritten", reason, fix) if agrees else None
  if extremes:
    return Finding("overwritten", reason, fix, fixed)
  return Finding("unknown", words.GRADIENTS, fix, fixed)


def _tree(runs: Runs, reductions: dict[int, str]) -> Tree:
  return jax.tree.unflatten(jax.tree.structure(runs.params), list(reductions.values()))


def _groups(runs: Runs, microbatches: Collection[int] = ()) -> Finding | None:
  """Whether a loss cannot be run on any number of rows; not if in no `microbatches` at all."""
  failed, counts = {}, sorted({*map(len, runs.two), *microbatches})
  for count in counts:
    try:
      runs.parts(runs.call, [np.arange(count)])
    except Exception as error:
      what = str(error).strip().partition("\n")[0]
      failed[str(count)] = f"{type(error).__name__}: {what}"
  if not failed or (microbatches and len(failed) == len(counts)):
    return None
  which, first = " or ".join(failed), next(iter(failed.values()))
  reason = words.UNEVEN.format(rows=runs.rows, failed=which, error=first)
  return Finding("coupled", reason, words.GROUPS)


def _rounding(runs: Runs) -> Finding | None:
  """Whether the differences of a loss in half precision are small: about a tenth of it."""
  if runs.facts.is_half and runs.agree(runs.how(), 10 * _hundredth()):
    return Finding("unknown", words.HALF, words.USE_FLOAT32)
  return None


def _hundredth() -> float:
  """About a hundredth of the loss, in times of the rounding."""
  return 1e7 if jnp.result_type(float) == np.float64 else 100.0


def _groups_of_neighbours(runs: Runs) -> Finding | None:
  """Whether parts whose rows follow each other give the whole batch, and microbatches do not."""
  how = runs.how()
  if all(x.whole.fits(how.join(x.splits[0])) for x in runs.in_two):
    return Finding("coupled", words.GROUPS_OF_NEIGHBOURS, words.GROUPS)
  return None


def _places(runs: Runs) -> Finding | None:
  """Whether the place of a row in the batch matters: its noise is that of a place."""
  backwards = np.arange(runs.rows)[::-1]
  if all(x.whole.fits(runs.whole(x.call.take(backwards)).leaves) for x in runs.outcomes):
    return None
  shared = [x for x in runs.call.arrays if x.role == "shared"]
  if keys := [x.argnum for x in shared if x.may_be_key]:
    named = [*runs.options["rng_argnums"], *dict.fromkeys(keys)]
    return Finding("random", words.SHARED_KEY, f"rng_argnums={words.one_or_more(named)}")
  if runs.facts.draws_from_others:
    return Finding("random", words.SHARED_KEY, words.PASS_A_KEY)
  return Finding("coupled", words.PLACES, words.NEIGHBOURS)


def _sum(runs: Runs) -> Finding | None:
  """Whether the parts add up, or would without what each of them has once more."""
  how = runs.how(reduction="sum", weight=ROWS)
  if runs.agree(how):
    return Finding("sum", words.SUM, 'reduction="sum"', how)
  # What is counted in both parts is the same for all batches at the same parameters.
  for source in (0, 1):
    each = [(x.whole, how.join(x.splits[0])) for x in runs.in_two if x.call.source == source]
    if len(each) < 3 or each[0][0].fits(each[0][1]):  # nothing is counted twice
      return None
    twice = _less(each[0][1], each[0][0].main)
    if not all(whole.fits(_less(added, twice)) for whole, added in each):
      return None
  return Finding("sum", words.SUM_AND_MORE, words.MEAN_AND_MORE)


def _less(xs: Leaves, others: Leaves, times: float = 1.0) -> Leaves:
  return [x - times * y for x, y in zip(xs, others, strict=False)]


def _weighted(runs: Runs) -> Finding | None:
  """Whether it is a mean over something that can be counted, or would be but for an epsilon."""
  mean = ', reduction="mean"' if runs.options["reduction"] != "mean" else ""
  names = ", ".join(dict.fromkeys(x.argument for x in runs.call.batch))
  near: list[tuple[str, str, How]] = []
  for code, weight in [("", ROWS), *weights_of(runs.call, runs.facts)]:
    how = runs.how(weight=weight, reduction="mean")
    if runs.agree(how, _hundredth()):
      weight_fn = f"lambda {names}: {code}" if code else "None"
      near.append((code or "the number of rows", f"weight_fn={weight_fn}{mean}", how))
  for what, fix, how in near:
    if runs.agree(how):
      return Finding("weighted", words.WEIGHTED.format(what=what), fix, how)
  for what, fix, how in near:
    if epsilon := _epsilon(runs, how):
      reason = words.EPSILON.format(what=what, epsilon=epsilon)
      return Finding("weighted", reason, f"{fix}\n{words.GUARD}")
  # Where some weight is near, a small part of the loss is something else.
  if near or not all(_some_weight_explains(runs, x.call) for x in runs.outcomes):
    return None
  return Finding("weighted", words.SOME_WEIGHT, words.DENOMINATOR.format(batch=names))


def _epsilon(runs: Runs, how: How) -> float | None:
  """What is added to the weight in what the loss divides by, if that explains the loss."""
  added, each = runs.how(reduction="sum", weight=ROWS, grad_reduction=None), []
  for x in runs.in_two:
    parts = x.splits[0]
    weight = sum(how.weight(part.call) for part in parts)
    # whole (weight + epsilon) = mean weight + epsilon sum
    steps = [y / weight for y in _less(added.join(parts), x.whole.main)]
    each.append((x.whole, how.join(parts), steps))
  epsilon = _nearest(each)
  before, after = (
    max(whole.misfit(_less(mean, steps, -n)) for whole, mean, steps in each) for n in (0.0, epsilon)
  )
  return epsilon if 0 < epsilon < _SMALL and after <= min(1, 0.1 * before) else None


def _some_weight_explains(runs: Runs, call: Call) -> bool:
  """Whether one weight fits at several parameters, on which no weight depends."""
  how = runs.how(reduction="mean", weight=ROWS, grad_reduction=None)
  points = [
    (whole, runs.parts(x, runs.two))
    for x in map(call.moved, _POINTS)
    if (whole := runs.rounded(x, runs.whole(x))).is_finite
  ]
  # A part that has no share counts nothing: 0/0. Where it is finite, a maximum was chosen.
  first, rest = (all(parts[i].outcome.is_finite for _, parts in points) for i in (0, 1))
  share = float(first)
  if first and rest:
    mains = [(whole, one.outcome.main, two.outcome.main) for whole, (one, two) in points]
    share = _nearest([(whole, two, _less(one, two)) for whole, one, two in mains])
    if not 1e-3 < share < 1 - 1e-3:
      return False
  return all(whole.fits(how.join(parts, [share, 1 - share])) for whole, parts in points)


def _nearest(each: Sequence[tuple[Outcome, Leaves, Leaves]]) -> float:
  """How many steps from the first leaves come nearest to the whole, by least squares."""
  above = below = 0.0
  for whole, leaves, steps in each:
    for x, y, step, allowed in zip(whole.leaves, leaves, steps, whole.allowed, strict=False):
      scale = max(allowed, 1e-100)
      above += float(np.sum(np.real((x - y) / scale * np.conj(step / scale))))
      below += float(np.sum(np.abs(step / scale) ** 2))
  return above / below if below else 0.5


def _coupled(runs: Runs) -> Finding:
  """What is left: several denominators, or rows that meet."""
  alike = runs.call.alike()
  whole, how = runs.rounded(alike, runs.whole(alike)), runs.how(reduction="mean", weight=ROWS)
  if whole.is_finite and whole.fits(how.join(runs.parts(alike, runs.two))):
    return Finding("coupled", words.SEVERAL_COUNTS, words.TOTALS)
  if runs.rows < 3:
    return Finding("unknown", words.TWO_ROWS, words.MORE_ROWS)
  return Finding("coupled", words.COUPLED, words.NEIGHBOURS)
