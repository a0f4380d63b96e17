"""How each aux of a loss must be reduced, found from those of parts of the batch."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from optax_accum._check_split import mends
from optax_accum._check_split.case import Case, Parts
from optax_accum._check_split.report import Finding, Verdict

_WORDS = ("sum", "mean", "max", "min", "concat")


def finding(case: Case) -> Finding | None:
  """Whether aux alone differs."""
  outcomes = case.outcomes
  if not case.agrees:
    return None
  wrong = {
    i
    for _, whole, splits in outcomes
    for split in splits
    for i, leaf in case.runs.compared_aux(whole, split).items()
    if not leaf.agrees
  }
  return _otherwise(case, case.runs.aux_words(outcomes[0][1].aux), wrong) if wrong else None


def of_error(case: Case) -> Finding | None:
  """The same where aux cannot be reduced as the options say."""
  try:
    words = case.runs.aux_words(case.runs.whole(case.args).aux)
  except ValueError:  # a tree of words that is not that of the aux
    return None
  wrong = {i for i, word in enumerate(words) if word in _WORDS and not _aux_is(case, i, word)}
  return _otherwise(case, words, wrong)


def _otherwise(case: Case, words: list[str], wrong: Collection[int]) -> Finding:
  words = list(words)
  for i in wrong:
    words[i] = next((word for word in _WORDS if _aux_is(case, i, word)), "")
  treedef: Any = jax.tree.structure(case.parts[0].whole.aux)
  verdict: Verdict = "sum" if {words[i] for i in wrong} == {"sum"} else "unknown"
  return Finding(verdict, mends.AUX, mends.aux(treedef.unflatten(words)))


def _aux_is(case: Case, i: int, word: str) -> bool:
  """Whether a leaf of the aux of the whole batch is this reduction of those of its parts."""

  def is_reduced(p: Parts) -> bool:
    whole, first, rest = (np.asarray(jax.tree.leaves(x.aux)[i]) for x in p[1:])
    axis = case.runs.options["concat_axis"] or 0
    try:
      reduced = _reduced(word, first, rest, case.cut / case.rows, axis)
    except (TypeError, ValueError):
      return False
    return reduced.shape == whole.shape and np.allclose(reduced, whole, rtol=1e-4, atol=0)

  return all(map(is_reduced, case.parts))


def _reduced(word: str, a: np.ndarray, b: np.ndarray, share: float, axis: int) -> np.ndarray:
  """The aux of two parts of the rows as one; `share` is how many rows the first part has."""
  if word == "concat":
    if not a.ndim:
      raise ValueError
    return np.concatenate([a, b], axis)
  if word == "mean":
    if not np.issubdtype(a.dtype, np.inexact):
      raise TypeError
    return share * a + (1 - share) * b
  return {"sum": np.add, "max": np.maximum, "min": np.minimum}[word](a, b)
