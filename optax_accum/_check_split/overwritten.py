"""Gradients that are none: what a leaf is to be overwritten with, and other wrong reductions.

A layer in 8 bits records the largest cotangent of a batch as the "gradient" of a leaf. Microbatches
have cotangents of other sizes where the loss is a mean over their own rows, and round them
otherwise. So a mend is believed once it was run.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import numpy as np

from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._check_split import mends, probes
from optax_accum._check_split.case import Case, Parts
from optax_accum._check_split.report import Finding

_KEY = "_overwrite_with_gradient"  # flax names such a collection so
_EXTREMES = ("max", "min")


def finding(case: Case) -> Finding | None:
  """Whether gradients alone differ, and do not once they are reduced otherwise."""
  grads = case.outcomes[0][1].grads
  loss, *leaves = _columns(case)
  wrong = {i for i, leaf in enumerate(leaves) if not all(x.agrees for x in leaf)}
  if not wrong or not all(x.agrees for x in loss):
    return None
  names = [leaf[0].name for leaf in leaves]
  default, given = case.runs.options["reduction"], _words_in_force(case, grads)
  by_values = [_extreme(case, i, name) for i, name in enumerate(names)]
  words = [by_values[i] or default if i in wrong else word for i, word in enumerate(given)]
  for i in set(range(len(given))) - wrong:
    if _KEY in names[i] and case.runs.options["grad_reduction"] is None:
      words[i] = by_values[i]
    elif not by_values[i] and given[i] not in _EXTREMES:
      words[i] = default
  treedef: Any = jax.tree.structure(grads)
  tree = treedef.unflatten
  overwritten = _named(names, words) if any(by_values) else []
  proposed = tree(words) if overwritten else None
  if words != given and (mended := case.mended(grad_reduction=proposed)):
    mend = mends.grad_reduction(proposed)
    if not overwritten:
      return Finding("unknown", mends.GRADIENTS, mend, mended)
    return Finding("overwritten", mends.overwritten(overwritten), mend, mended)
  of_sum = [g if g in _EXTREMES else v for g, v in zip(given, by_values, strict=True)]
  overwritten = _named(names, of_sum)
  if not overwritten or default != "mean" or case.runs.options["weight_fn"] is not None:
    return None
  return _of_a_sum(case, overwritten, tree([word or "sum" for word in of_sum]))


def _columns(case: Case) -> list[list[Any]]:
  """The comparisons of the loss and of each gradient, on all batches."""
  outcomes = case.outcomes
  compared = [case.runs.compare(w, split) for _, w, splits in outcomes for split in splits]
  return [list(each) for each in zip(*compared, strict=True)][: len(outcomes[0][1].leaves)]


def _words_in_force(case: Case, grads: Any) -> list[str]:
  options = case.runs.options
  default = REDUCTIONS[options["reduction"]]
  reductions = reduction_words.named_of_gradients(options["grad_reduction"], default)
  return [kind.name for kind in jax.tree.leaves(reduction_words.match("", reductions, grads))]


def _of_a_sum(case: Case, names: Sequence[str], words: Any) -> Finding | None:
  """The same, where cotangents are the whole batch's only if the loss is a sum."""
  loss = functools.partial(_part_of_mean, case)
  mended = case.with_loss(loss, reduction="sum", grad_reduction=words).if_it_agrees()
  if mended is None:
    return None
  leaf = probes.batch_leaves(case.args, case.batch)[0]
  rows = f"{case.names[leaf.argnum]}{leaf.path}.shape[{leaf.axis}]"
  mend = mends.sum_over_all_rows(mends.grad_reduction(words), rows, case.rows)
  return Finding("overwritten", mends.overwritten(names), mend, mended)


def _part_of_mean(case: Case, *args: Any) -> Any:
  """The sum over rows, divided by all rows of the batch, of a loss that is a mean over its rows."""
  out = case.runs.fun(*args)
  leaf = probes.batch_leaves(args, case.batch)[0]
  share = leaf.value.shape[leaf.axis] / case.rows
  return (out[0] * share, out[1]) if case.runs.options["has_aux"] else out * share


def _named(names: Sequence[str], words: Sequence[str]) -> list[str]:
  return [name for name, word in zip(names, words, strict=True) if word in _EXTREMES]


def _extreme(case: Case, i: int, name: str) -> str:
  """Which extreme of the rows' a gradient is, by its name or its values; empty where none."""
  if _KEY in name:
    return "max"
  if not any(np.any(p.whole.leaves[i + 1]) for p in case.parts):
    return ""
  return next((word for word in _EXTREMES if _leaf_is(case, i + 1, word)), "")


def _leaf_is(case: Case, i: int, word: str) -> bool:
  """Whether a leaf of the whole batch's gradient is the largest, or least, of its parts'."""
  choose: Callable[..., Any] = {"max": np.maximum, "min": np.minimum}[word]
  share = case.cut / case.rows

  def is_chosen(p: Parts) -> bool:
    whole, first, rest = (outcome.leaves[i] for outcome in (p.whole, p.first, p.rest))
    # Cotangents of a mean are as much larger in a part as it has fewer rows.
    of_cotangents = choose(share * first, (1 - share) * rest)
    nearest = np.minimum(np.abs(whole - choose(first, rest)), np.abs(whole - of_cotangents))
    return bool(np.max(nearest, initial=0.0) <= p.whole.allowed()[i])

  return all(map(is_chosen, case.parts))
