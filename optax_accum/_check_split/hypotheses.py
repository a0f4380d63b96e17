"""Why microbatches of a loss do not give what the whole batch does."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._check_split import (
  aux_words,
  fixed_noise,
  loss_facts,
  mends,
  overwritten,
  possible_weights,
  probes,
)
from optax_accum._check_split.case import Case, Parts
from optax_accum._check_split.probes import Probe
from optax_accum._check_split.report import Finding

_NOISE = "other noise"
_TRIES = 3  # of weights that explain the loss: each compiles it anew
_SMALL = 0.01  # more than an epsilon that keeps a loss from dividing by zero
_POINTS = (0, 1, 2, 3)  # parameters at which one weight must explain the loss


def explain(case: Case) -> Finding:
  """The first hypothesis that fits, and what is wrong with aux once it is mended."""
  hypotheses: list[Callable[[Case], Finding | None]] = [
    _not_a_function, unsplit, aux_words.finding, overwritten.finding, _groups, _rounding,
    _groups_of_neighbours, _of_places, _sum, _weighted,
  ]  # fmt: skip
  found = (finding for hypothesis in hypotheses if (finding := hypothesis(case)))
  first = next(found, None) or _coupled(case)
  return first if first.mended is None else _and(first, aux_words.finding(first.mended))


def of_error(case: Case, microbatches: Iterable[int]) -> Finding | None:
  """Why a loss that runs on the whole batch raises in `microbatches` of so many rows."""
  if finding := unsplit(case):
    return finding
  if case.runs.options["has_aux"]:
    without_aux = case.with_loss(lambda *args: (case.runs.fun(*args)[0], None), aux_reduction="sum")
    if without_aux.runs_well and (finding := aux_words.of_error(case)):
      return _and(None if without_aux.agrees else explain(without_aux), finding)
  counts = {case.cut, case.rows - case.cut, *microbatches}
  failed = _failed(case, counts)
  return _of_failed(case, failed) if len(failed) < len(counts) else None


def _and(first: Finding | None, then: Finding | None) -> Finding:
  """Both findings, of which the first has the verdict; its mend does not help alone."""
  if first is None or then is None:
    found = first or then
    assert found is not None
    return found
  return Finding(
    first.verdict, f"{first.reason}\n{then.reason}", f"{first.mend}\n{then.mend}", None
  )


def _groups(case: Case) -> Finding | None:
  """Whether a loss cannot be run on any number of rows."""
  return _of_failed(case, _failed(case, {case.cut, case.rows - case.cut}))


def _failed(case: Case, counts: Iterable[int]) -> dict[int, Exception]:
  """The errors of the loss on so many rows."""
  failed = {}
  for count in sorted(counts):
    try:
      case.part(case.args, np.arange(count))
    except Exception as error:
      failed[count] = error
  return failed


def _of_failed(case: Case, failed: dict[int, Exception]) -> Finding | None:
  if not failed:
    return None
  reason = mends.groups(case.rows, list(failed), next(iter(failed.values())))
  return Finding("coupled", reason, mends.GROUPS)


def _groups_of_neighbours(case: Case) -> Finding | None:
  """Whether a loss is a mean over rows in parts that follow each other, and not in others."""
  options = case.runs.options
  if options["reduction"] != "mean" or options["weight_fn"] is not None:
    return None
  if not all(_explains(case, None, p) for p in case.parts):
    return None
  return Finding("coupled", mends.GROUPS_OF_NEIGHBOURS, mends.GROUPS)


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
  if case.facts.draws_from_others:
    return Finding("random", mends.SHARED_KEY, mends.PASS_A_KEY)
  return Finding("coupled", mends.PLACES, mends.NEIGHBOURS)


def _sum(case: Case) -> Finding | None:
  if all(p.whole.fits(_added(p)) for p in case.parts) and (
    mended := case.mended(reduction="sum", weight_fn=None)
  ):
    return Finding("sum", mends.SUM, 'reduction="sum"', mended)
  # What is counted in both parts is the same for all batches at the same parameters.
  for moved in (False, True):
    parts = [p for p in case.parts if _has_moved(p.probe) == moved and p.probe.name != _NOISE]
    twice = [_less(_added(p), p.whole.leaves) for p in parts]
    if len(parts) < 3 or not all(p.whole.fits(_less(_added(p), twice[0])) for p in parts):
      return None
    if parts[0].whole.fits(_added(parts[0])):  # nothing is counted twice
      return None
  return Finding("sum", mends.SUM_AND_MORE, mends.MEAN_AND_MORE)


def _has_moved(probe: Probe) -> bool:
  """Whether the parameters are not the given ones."""
  return probe.name == "parameters moved" or probe.name.endswith(probes.VARIED)


def _added(p: Parts) -> list[np.ndarray]:
  return [first + rest for first, rest in zip(p.first.leaves, p.rest.leaves, strict=True)]


def _less(leaves: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
  return [x - y for x, y in zip(leaves, others, strict=True)]


def _weighted(case: Case) -> Finding | None:
  leaves = probes.batch_leaves(case.args, case.batch)
  near: list[tuple[str, possible_weights.Weight]] = []
  tries = 0
  for weight in possible_weights.weights(leaves, case.names, case.facts):
    if not all(_explains(case, weight.weight_fn, p, _near()) for p in case.parts):
      continue
    code = weight.code
    if case.runs.options["reduction"] != "mean":
      code += ', reduction="mean"'
    near.append((code, weight))
    if tries == _TRIES or not all(_explains(case, weight.weight_fn, p) for p in case.parts):
      continue
    tries += 1
    if mended := case.mended(weight_fn=weight.weight_fn, reduction="mean"):
      return Finding("weighted", mends.weighted(weight.code), code, mended)
  for code, weight in near[:_TRIES]:
    if epsilon := _epsilon(case, weight.weight_fn):
      return Finding("weighted", mends.nearly_weighted(code, epsilon), f"{code}\n{mends.GUARD}")
  if near:  # and a small part of the loss is something else
    return None
  if all(_some_weight_explains(case, p.probe) for p in case.parts):
    return Finding("weighted", mends.SOME_WEIGHT, mends.return_the_denominator(case.names))
  return None


def _near() -> float:
  """How many times the rounding is near: about a hundredth of the loss."""
  return 1e7 if jnp.result_type(float) == np.float64 else 100.0


def _explains(
  case: Case, weight_fn: Callable[..., Any] | None, p: Parts, slack: float = 1.0
) -> bool:
  of_parts = _weights(case, weight_fn, p)
  if min(of_parts) < 0 or not sum(of_parts):
    return False
  return p.whole.fits(_mixed(p, of_parts[0] / sum(of_parts)), slack)


def _weights(case: Case, weight_fn: Callable[..., Any] | None, p: Parts) -> list[float]:
  """What a weight is on the two parts."""
  if weight_fn is None:
    return [float(case.cut), float(case.rows - case.cut)]
  rows = np.split(np.arange(case.rows), [case.cut])
  parts = [probes.take_rows(p.probe.args, case.batch, r) for r in rows]
  return [float(weight_fn(*(part[i] for i in case.batch))) for part in parts]


def _epsilon(case: Case, weight_fn: Callable[..., Any] | None) -> float | None:
  """What is added to the weight in what the loss divides by, if that explains the loss."""
  above = below = 0.0
  terms = []
  for p in case.parts:
    one, two = _weights(case, weight_fn, p)
    both = zip(p.whole.leaves, p.first.leaves, p.rest.leaves, p.whole.allowed(), strict=True)
    for w, a, b, allowed in both:
      # w (one + two + epsilon) = a (one + epsilon) + b (two + epsilon)
      missing, factor = one * a + two * b - (one + two) * w, w - a - b
      terms.append((missing, factor, max(allowed * (one + two), 1e-150)))
      above += float(np.sum(np.real(missing * np.conj(factor)))) / max(allowed, 1e-150) ** 2
      below += float(np.sum(np.abs(factor) ** 2)) / max(allowed, 1e-150) ** 2
  epsilon = above / below if below else 0.0
  off = [max(np.max(np.abs(x - e * y)) / z for x, y, z in terms) for e in (0.0, epsilon)]
  return epsilon if off[1] <= min(1, 0.1 * off[0]) and 0 < epsilon < _SMALL else None


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
  return Finding("coupled", mends.COUPLED, mends.NEIGHBOURS)
