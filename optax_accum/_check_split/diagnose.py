"""Why microbatches of a loss do not give what the whole batch does: hypotheses, in their order.

The loss of two parts of the rows, two thirds and the rest, tells most: whether they add up, whether
some weight makes a mean of them, whether they run at all. What would be mended by options is run.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._check_split import facts, leaves, probes, weights, words
from optax_accum._check_split.probes import Probe
from optax_accum._check_split.report import Finding
from optax_accum._check_split.runs import Parts, Runs

_TRIES = 3  # of weights that explain the loss: each compiles it anew
_SMALL = 0.01  # more than an epsilon that keeps a loss from dividing by zero
_POINTS = (0, 1, 2, 3)  # parameters at which one weight must explain the loss


def explain(runs: Runs) -> Finding:
  """The first hypothesis that fits, and what is wrong with aux once it is mended."""
  hypotheses: list[Callable[[Runs], Finding | None]] = [
    _not_a_function, _unsplit, leaves.of_aux, leaves.of_gradients, _groups, _rounding,
    _groups_of_neighbours, _places, _sum, _weighted,
  ]  # fmt: skip
  found = (finding for hypothesis in hypotheses if (finding := hypothesis(runs)))
  first = next(found, None) or _coupled(runs)
  return first if first.mended is None else _and(first, leaves.of_aux(first.mended))


def of_error(runs: Runs) -> Finding | None:
  """Why a loss that runs on the whole batch raises in microbatches."""
  if finding := _unsplit(runs):
    return finding
  if runs.options["has_aux"]:
    without_aux = runs.otherwise(lambda *args: (runs.fun(*args)[0], None), aux_reduction="sum")
    finding = None if _raises(without_aux) else leaves.of_aux_that_raises(runs.otherwise(sizes=[]))
    if finding is not None:
      return finding if without_aux.agrees else _and(explain(without_aux), finding)
  return _groups(runs, {*runs.sizes, *(runs.rows % size for size in runs.sizes)} - {0})


def _raises(runs: Runs) -> bool:
  try:
    runs.outcomes  # noqa: B018
  except Exception:
    return True
  return False


def _and(first: Finding, then: Finding | None) -> Finding:
  """Both findings, of which the first has the verdict; its mend does not help alone."""
  if then is None:
    return first
  reason, mend = f"{first.reason}\n{then.reason}", f"{first.mend}\n{then.mend}"
  return Finding(first.verdict, reason, mend)


def _not_a_function(runs: Runs) -> Finding | None:
  again = runs.whole(runs.args)
  if facts.are_the_same(runs.traced(), runs.traced()) and runs.whole(runs.args).fits(again.leaves):
    return None
  return Finding("random", words.NOT_A_FUNCTION, words.PASS_A_KEY)


def _unsplit(runs: Runs) -> Finding | None:
  """Whether the loss can be split once an argument is split that is not."""
  axis = next(iter(runs.batch.values()))
  shapes = {
    int(slot): [np.shape(x) for x in jax.tree.leaves(tree)]
    for slot, tree in runs.roles.shared.items()
  }
  has_rows = lambda s: -len(s) <= axis < len(s) and s[axis] == runs.rows  # noqa: E731
  slots = tuple(slot for slot, each in shapes.items() if each and all(map(has_rows, each)))
  batch, axes = (*runs.batch, *slots), (*runs.batch.values(), *(axis for _ in slots))
  try:
    if not slots or not runs.mended(batch_argnums=batch, batch_axis=axes, weight_fn=None):
      return None
  except (TypeError, ValueError):  # it cannot be split so either
    return None
  which = " and ".join(f"argument {slot}" for slot in slots)
  reason = words.UNSPLIT.format(which=which, rows=runs.rows)
  return Finding("unsplit", reason, f"batch_argnums={batch}")


def _groups(runs: Runs, microbatches: Collection[int] = ()) -> Finding | None:
  """Whether a loss cannot be run on any number of rows; not if in no `microbatches` at all."""
  failed, counts = {}, sorted({runs.cut, runs.rows - runs.cut, *microbatches})
  for count in counts:
    try:
      runs.part(runs.args, np.arange(count))
    except Exception as error:
      what = str(error).strip().partition("\n")[0]
      failed[str(count)] = f"{type(error).__name__}: {what}"
  if not failed or (microbatches and len(failed) == len(counts)):
    return None
  which, first = " or ".join(failed), next(iter(failed.values()))
  reason = words.UNEVEN.format(rows=runs.rows, failed=which, error=first)
  return Finding("coupled", reason, words.GROUPS)


def _rounding(runs: Runs) -> Finding | None:
  """Whether the differences of a loss in half precision are small."""
  each = (runs.compare(x.whole, split) for x in runs.outcomes for split in x.splits)
  is_small = lambda x, loss: x.difference <= 0.1 * max(x.size, loss.tolerance)  # noqa: E731
  if not runs.facts.is_half or not all(is_small(x, leaves[0]) for leaves in each for x in leaves):
    return None
  return Finding("unknown", words.HALF, words.USE_FLOAT32)


def _groups_of_neighbours(runs: Runs) -> Finding | None:
  """Whether a loss is a mean over rows in parts that follow each other, and not in others."""
  if runs.options["reduction"] != "mean" or runs.options["weight_fn"] is not None:
    return None
  if not all(_explains(runs, None, p) for p in runs.parts):
    return None
  return Finding("coupled", words.GROUPS_OF_NEIGHBOURS, words.GROUPS)


def _places(runs: Runs) -> Finding | None:
  """Whether the place of a row in the batch matters: its noise is that of a place."""
  backwards = np.arange(runs.rows)[::-1]
  if all(p.whole.fits(runs.part(p.probe.args, backwards).leaves) for p in runs.parts):
    return None
  may_be_key = lambda x: probes.is_key(x) or probes.may_be_raw_key(x)  # noqa: E731
  keys = [
    int(slot)
    for slot, tree in runs.roles.shared.items()
    if any(map(may_be_key, jax.tree.leaves(tree)))
  ]
  if keys:
    named = [*map(int, runs.roles.rng), *keys]
    return Finding("random", words.SHARED_KEY, f"rng_argnums={words.one_or_more(named)}")
  if runs.facts.draws_from_others:
    return Finding("random", words.SHARED_KEY, words.PASS_A_KEY)
  return Finding("coupled", words.PLACES, words.NEIGHBOURS)


def _sum(runs: Runs) -> Finding | None:
  """Whether the parts add up, or would without what each of them has once more."""
  if all(p.whole.fits(_added(p)) for p in runs.parts) and (
    mended := runs.mended(reduction="sum", weight_fn=None)
  ):
    return Finding("sum", words.SUM, 'reduction="sum"', mended)
  # What is counted in both parts is the same for all batches at the same parameters.
  for source in (0, 1):
    parts = [p for p in runs.parts if p.probe.source == source]
    twice = [_less(_added(p), p.whole.leaves) for p in parts]
    if len(parts) < 3 or not all(p.whole.fits(_less(_added(p), twice[0])) for p in parts):
      return None
    if parts[0].whole.fits(_added(parts[0])):  # nothing is counted twice
      return None
  return Finding("sum", words.SUM_AND_MORE, words.MEAN_AND_MORE)


def _added(p: Parts) -> list[np.ndarray]:
  return [first + rest for first, rest in zip(p.first.leaves, p.rest.leaves, strict=True)]


def _less(xs: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
  return [x - y for x, y in zip(xs, others, strict=True)]


def _weighted(runs: Runs) -> Finding | None:
  """Whether it is a mean over something that can be counted, or would be but for an epsilon."""
  # About a hundredth of the loss, in times of the rounding.
  slack = 1e7 if jnp.result_type(float) == np.float64 else 100.0
  near: list[tuple[str, weights.Weight]] = []
  tries = 0
  for weight in weights.possible(runs.leaves, runs.names, runs.facts):
    if not all(_explains(runs, weight.weight_fn, p, slack) for p in runs.parts):
      continue
    code = weight.code + (', reduction="mean"' if runs.options["reduction"] != "mean" else "")
    near.append((code, weight))
    if tries == _TRIES or not all(_explains(runs, weight.weight_fn, p) for p in runs.parts):
      continue
    tries += 1
    if mended := runs.mended(weight_fn=weight.weight_fn, reduction="mean"):
      return Finding("weighted", words.weighted(weight.code), code, mended)
  for code, weight in near[:_TRIES]:
    if epsilon := _epsilon(runs, weight.weight_fn):
      return Finding("weighted", words.weighted(weight.code, epsilon), f"{code}\n{words.GUARD}")
  if near:  # and a small part of the loss is something else
    return None
  if all(_some_weight_explains(runs, p.probe) for p in runs.parts):
    mend = words.DENOMINATOR.format(batch=", ".join(runs.names.values()))
    return Finding("weighted", words.SOME_WEIGHT, mend)
  return None


def _explains(runs: Runs, weight_fn: weights.Count | None, p: Parts, slack: float = 1.0) -> bool:
  """Whether the whole is the mean of the parts with this weight."""
  one, two = _of_parts(runs, weight_fn, p)
  if min(one, two) < 0 or not one + two:
    return False
  return p.whole.fits(_mixed(p, one / (one + two)), slack)


def _of_parts(runs: Runs, weight_fn: weights.Count | None, p: Parts) -> list[float]:
  """What a weight is on the two parts."""
  if weight_fn is None:
    return [float(runs.cut), float(runs.rows - runs.cut)]
  rows = np.split(np.arange(runs.rows), [runs.cut])
  parts = [probes.take_rows(p.probe.args, runs.batch, r) for r in rows]
  return [float(weight_fn(*(part[i] for i in runs.batch))) for part in parts]


def _mixed(p: Parts, share: float) -> list[np.ndarray]:
  """Loss and gradients of the parts, averaged; a part without a share may be NaN."""
  if share in (0, 1):
    return p.first.leaves if share else p.rest.leaves
  both = zip(p.first.leaves, p.rest.leaves, strict=True)
  return [share * first + (1 - share) * rest for first, rest in both]


def _epsilon(runs: Runs, weight_fn: weights.Count | None) -> float | None:
  """What is added to the weight in what the loss divides by, if that explains the loss."""
  terms = []
  for p in runs.parts:
    one, two = _of_parts(runs, weight_fn, p)
    for whole, a, b, allowed in _leaves_of(p):
      # whole (one + two + epsilon) = a (one + epsilon) + b (two + epsilon)
      missing = one * a + two * b - (one + two) * whole
      terms.append((missing / allowed, (whole - a - b) / allowed, one + two))
  epsilon = _least_squares(terms)
  off = [max(np.max(np.abs(x - e * y)) / total for x, y, total in terms) for e in (0.0, epsilon)]
  return epsilon if off[1] <= min(1, 0.1 * off[0]) and 0 < epsilon < _SMALL else None


def _some_weight_explains(runs: Runs, probe: Probe) -> bool:
  """Whether one weight fits at several parameters, on which no weight depends."""
  moved = [probes.move(probe.args, runs.argnums, n) if n else probe.args for n in _POINTS]
  points = [runs.in_parts(probe._replace(args=args)) for args in moved]
  points = [p for p in points if p.whole.is_finite]
  # A part that has no share counts nothing: 0/0. Where it is finite, a maximum was chosen.
  first = all(p.first.is_finite for p in points)
  rest = all(p.rest.is_finite for p in points)
  if not first or not rest:
    return first != rest and all(p.whole.fits(_mixed(p, float(first))) for p in points)
  each = [leaf for p in points for leaf in _leaves_of(p)]
  share = _least_squares([((w - b) / allowed, (a - b) / allowed, 0) for w, a, b, allowed in each])
  return 1e-3 < share < 1 - 1e-3 and all(p.whole.fits(_mixed(p, share)) for p in points)


def _leaves_of(p: Parts) -> list[tuple[Any, Any, Any, float]]:
  """Loss and gradients of the whole and of both parts, and what rounding is allowed."""
  allowed = [max(x, 1e-100) for x in p.whole.allowed]
  return list(zip(p.whole.leaves, p.first.leaves, p.rest.leaves, allowed, strict=True))


def _least_squares(terms: Sequence[tuple[Any, Any, float]]) -> float:
  """The number of times that the second of each pair comes nearest to the first."""
  above = sum(float(np.sum(np.real(x * np.conj(y)))) for x, y, _ in terms)
  below = sum(float(np.sum(np.abs(y) ** 2)) for _, y, _ in terms)
  return above / below if below else 0.5


def _coupled(runs: Runs) -> Finding:
  """What is left: several denominators, or rows that meet."""
  parts = runs.in_parts(Probe("alike", probes.all_rows_alike(runs.args, runs.batch)))
  if parts.whole.is_finite and _explains(runs, None, parts):
    return Finding("coupled", words.SEVERAL_COUNTS, words.TOTALS)
  if runs.rows < 3:
    return Finding("unknown", words.TWO_ROWS, words.MORE_ROWS)
  return Finding("coupled", words.COUPLED, words.NEIGHBOURS)
