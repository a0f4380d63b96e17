"""Why microbatches of a loss do not give what the whole batch does."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_accum._check_split import fixed_noise, loss_facts, mends, possible_weights, probes
from optax_accum._check_split.case import Case, Parts
from optax_accum._check_split.probes import Probe
from optax_accum._check_split.report import Verdict

_FLOAT8 = 0.25  # relative rounding of 8 bits (e5m2) of cotangents, whose size depends on the rows
_POINTS = (0, 1, 2, 3)  # parameters at which one weight must explain the loss


class Finding(NamedTuple):
  """What is wrong, why that is known, and what to do about it."""

  verdict: Verdict
  reason: str
  mend: str


def explain(case: Case) -> Finding:
  """The first hypothesis that fits."""
  hypotheses: list[Callable[[Case], Finding | None]] = [
    _not_a_function, unsplit, _aux_alone, _overwritten, _rounding, _of_places, _sum, _weighted,
  ]  # fmt: skip
  found = (finding for hypothesis in hypotheses if (finding := hypothesis(case)))
  return next(found, None) or _coupled(case)


def _not_a_function(case: Case) -> Finding | None:
  jaxprs = case.runs.traced(case.args), case.runs.traced(case.args)
  once, again = (case.runs.whole(case.args) for _ in range(2))
  if loss_facts.are_the_same(*jaxprs) and once.fits(again.leaves):
    return None
  return Finding("random", mends.NOT_A_FUNCTION, mends.PASS_A_KEY)


def unsplit(case: Case) -> Finding | None:
  """Whether the loss can be split once an argument is split that is not."""
  slots = tuple(_arrays_of_rows(case))
  if not slots:
    return None
  batch = (*case.batch, *slots)
  axes = (*case.batch.values(), *(next(iter(case.batch.values())) for _ in slots))
  try:
    if not case.mended(batch_argnums=batch, batch_axis=axes, weight_fn=None):
      return None
  except (TypeError, ValueError):
    return None
  return Finding("unsplit", mends.unsplit(slots, case.rows), f"batch_argnums={batch}")


def _arrays_of_rows(case: Case) -> list[int]:
  """The arguments that are not split and have as many rows as the batch."""
  axis = next(iter(case.batch.values()))
  return [
    int(slot)
    for slot, tree in case.roles.shared.items()
    for shape in [[np.shape(x) for x in jax.tree.leaves(tree)]]
    if shape and all(-len(s) <= axis < len(s) and s[axis] == case.rows for s in shape)
  ]


def _aux_alone(case: Case) -> Finding | None:
  outcomes = case.outcomes
  if not all(whole.fits(split.leaves) for _, whole, splits in outcomes for split in splits):
    return None
  words = case.runs.aux_words(outcomes[0][1].aux)
  wrong = {
    i
    for _, whole, splits in outcomes
    for split in splits
    for i, leaf in case.runs.compared_aux(whole, split).items()
    if not leaf.agrees
  }
  for i in wrong:
    words[i] = next((word for word in mends.AUX_WORDS if _aux_is(case, i, word)), "")
  treedef: Any = jax.tree.structure(outcomes[0][1].aux)
  tree = treedef.unflatten(words)
  verdict: Verdict = "sum" if {words[i] for i in wrong} == {"sum"} else "unknown"
  return Finding(verdict, mends.AUX, mends.aux(tree))


def _aux_is(case: Case, i: int, word: str) -> bool:
  """Whether a leaf of the aux of the whole batch is this reduction of those of its parts."""

  def is_reduced(p: Parts) -> bool:
    whole, first, rest = (jax.tree.leaves(x.aux)[i] for x in p[1:])
    axis = case.runs.options["concat_axis"] or 0
    try:
      reduced = mends.reduced(word, first, rest, case.cut / case.rows, axis)
    except ValueError:
      return False
    return reduced.shape == whole.shape and np.allclose(reduced, whole, rtol=1e-4, atol=0)

  return all(map(is_reduced, case.parts))


def _overwritten(case: Case) -> Finding | None:
  outcomes = case.outcomes
  compared = [case.runs.compare(w, split) for _, w, splits in outcomes for split in splits]
  columns = [list(each) for each in zip(*compared, strict=True)][: len(outcomes[0][1].leaves)]
  words = ["mean"] * len(columns)
  for i, leaves in enumerate(columns):
    if all(leaf.agrees for leaf in leaves):
      continue
    word = next((word for word in ("max", "min") if i and _leaf_is(case, i, word)), None)
    if word is not None:
      words[i] = word
    elif not case.facts.is_half or any(x.difference > _FLOAT8 * x.size for x in leaves):
      return None
  names = [leaves[0].name for leaves, word in zip(columns, words, strict=True) if word != "mean"]
  if not names:
    return None
  treedef: Any = jax.tree.structure(outcomes[0][1].grads)
  tree = treedef.unflatten(words[1:])
  return Finding("overwritten", mends.overwritten(names), mends.grad_reduction(tree))


def _leaf_is(case: Case, i: int, word: str) -> bool:
  """Whether a leaf of the whole batch's gradient is the largest, or least, of its parts'."""
  choose = {"max": np.maximum, "min": np.minimum}[word]
  share = case.cut / case.rows

  def is_chosen(p: Parts) -> bool:
    whole, first, rest = (outcome.leaves[i] for outcome in (p.whole, p.first, p.rest))
    # Cotangents of a mean are as much larger in a part as it has fewer rows.
    of_cotangents = choose(share * first, (1 - share) * rest)
    nearest = np.minimum(np.abs(whole - choose(first, rest)), np.abs(whole - of_cotangents))
    return bool(np.max(nearest, initial=0.0) <= p.whole.allowed()[i])

  return all(map(is_chosen, case.parts))


def _rounding(case: Case) -> Finding | None:
  if not case.facts.is_half:
    return None
  for _, whole, splits in case.outcomes:
    for split in splits:
      leaves = case.runs.compare(whole, split)
      if any(leaf.difference > 0.1 * max(leaf.size, leaves[0].tolerance) for leaf in leaves):
        return None
  return Finding("unknown", mends.HALF, mends.USE_FLOAT32)


def _of_places(case: Case) -> Finding | None:
  """Where the place of a row in the batch matters: its noise is that of a place."""
  backwards = np.arange(case.rows)[::-1]
  if all(p.whole.fits(case.part(p.probe.args, backwards).leaves) for p in case.parts):
    return None
  keys = [
    int(slot)
    for slot, tree in case.roles.shared.items()
    if any(fixed_noise.is_key(x) or fixed_noise.may_be_raw_key(x) for x in jax.tree.leaves(tree))
  ]
  if keys:
    named = [*map(int, case.roles.rng), *keys]
    return Finding("random", mends.SHARED_KEY, f"rng_argnums={mends.one_or_more(named)}")
  if case.facts.draws:
    return Finding("random", mends.SHARED_KEY, mends.PASS_A_KEY)
  return Finding("coupled", mends.PLACES, mends.ENCODE)


def _sum(case: Case) -> Finding | None:
  if all(p.whole.fits(_added(p)) for p in case.parts) and case.mended(
    reduction="sum", weight_fn=None
  ):
    return Finding("sum", mends.SUM, 'reduction="sum"')
  # What is counted in both parts is the same for all batches at the same parameters.
  for varied in (False, True):
    parts = [p for p in case.parts if p.probe.name.endswith(probes.VARIED) == varied]
    parts = [p for p in parts if p.probe.name not in ("parameters moved", "other noise")]
    twice = [_less(_added(p), p.whole.leaves) for p in parts]
    if len(parts) < 3 or not all(p.whole.fits(_less(_added(p), twice[0])) for p in parts):
      return None
  return Finding("sum", mends.SUM_AND_MORE, mends.MEAN_AND_MORE)


def _added(p: Parts) -> list[np.ndarray]:
  return [first + rest for first, rest in zip(p.first.leaves, p.rest.leaves, strict=True)]


def _less(leaves: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
  return [x - y for x, y in zip(leaves, others, strict=True)]


def _weighted(case: Case) -> Finding | None:
  leaves = probes.batch_leaves(case.args, case.batch)
  for weight in possible_weights.weights(leaves, case.names, case.facts):
    if all(_explains(case, weight.weight_fn, p) for p in case.parts) and case.mended(
      weight_fn=weight.weight_fn, reduction="mean"
    ):
      code = weight.code
      if case.runs.options["reduction"] != "mean":
        code += ', reduction="mean"'
      return Finding("weighted", mends.weighted(weight.code), code)
  if all(_some_weight_explains(case, p.probe) for p in case.parts):
    return Finding("weighted", mends.SOME_WEIGHT, mends.RETURN_THE_DENOMINATOR)
  return None


def _explains(case: Case, weight_fn: Callable[..., Any] | None, p: Parts) -> bool:
  of_parts = [float(case.cut), float(case.rows - case.cut)]
  if weight_fn is not None:
    rows = np.split(np.arange(case.rows), [case.cut])
    parts = [probes.take_rows(p.probe.args, case.batch, r) for r in rows]
    of_parts = [float(weight_fn(*(part[i] for i in case.batch))) for part in parts]
  if min(of_parts) < 0 or not sum(of_parts):
    return False
  return p.whole.fits(_mixed(p, of_parts[0] / sum(of_parts)))


def _some_weight_explains(case: Case, probe: Probe) -> bool:
  """Whether one weight fits at several parameters, on which no weight depends."""
  moved = [probes.move(probe.args, case.argnums, n) if n else probe.args for n in _POINTS]
  points = [case.in_parts(probe._replace(args=args)) for args in moved]
  points = [p for p in points if p.whole.is_finite]
  # A part that has no share counts nothing: 0/0. Where it is finite, a maximum was chosen.
  finite = [
    all(x.is_finite for x in part) for part in ([p.first for p in points], [p.rest for p in points])
  ]
  share = _share(points) if all(finite) else float(finite[0])
  if not any(finite) or (all(finite) and not 1e-3 < share < 1 - 1e-3):
    return False
  return all(p.whole.fits(_mixed(p, share)) for p in points)


def _share(points: Sequence[Parts]) -> float:
  """How much of the whole is the first part, by least squares."""
  above = below = 0.0
  for p in points:
    both = zip(p.whole.leaves, p.first.leaves, p.rest.leaves, p.whole.allowed(), strict=True)
    for w, a, b, allowed in both:
      scale = max(allowed, 1e-100)
      step = (a - b) / scale
      above += float(np.sum(np.real((w - b) / scale * np.conj(step))))
      below += float(np.sum(np.abs(step) ** 2))
  return above / below if below else 0.5


def _mixed(p: Parts, share: float) -> list[np.ndarray]:
  """Loss and gradients of the parts, averaged; a part without a share may be NaN."""
  if share in (0, 1):
    return p.first.leaves if share else p.rest.leaves
  both = zip(p.first.leaves, p.rest.leaves, strict=True)
  return [share * first + (1 - share) * rest for first, rest in both]


def _coupled(case: Case) -> Finding:
  alike = Probe("alike", probes.all_rows_alike(case.args, case.batch))
  parts = case.in_parts(alike)
  if parts.whole.is_finite and _explains(case, None, parts):
    return Finding("coupled", mends.SEVERAL_COUNTS, mends.TOTALS)
  if case.rows < 3:
    return Finding("unknown", mends.TWO_ROWS, mends.MORE_ROWS)
  return Finding("coupled", mends.COUPLED, mends.ENCODE)
