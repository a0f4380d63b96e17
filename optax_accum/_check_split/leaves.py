"""Leaves of the aux or of the gradients that agree once another word reduces them.

A layer in 8 bits records the largest cotangent of a batch as the "gradient" of a leaf. Microbatches
have cotangents of other sizes where the loss is a mean over their own rows, and round them
otherwise. So a mend of gradients is believed once it was run.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._check_split import probes, words
from optax_accum._check_split.report import Finding, Verdict
from optax_accum._check_split.runs import Parts, Runs

_OF_AUX = ("sum", "mean", "max", "min", "concat")
_EXTREMES = ("max", "min")
_KEY = "_overwrite_with_gradient"  # flax names such a collection so


def of_aux(runs: Runs) -> Finding | None:
  """Whether aux alone differs."""
  if not runs.agrees:
    return None
  compared = [runs.compared_aux(x.whole, split) for x in runs.outcomes for split in x.splits]
  wrong = {i for aux in compared for i, leaf in aux.items() if not leaf.agrees}
  return _otherwise(runs, wrong) if wrong else None


def of_aux_that_raises(runs: Runs) -> Finding | None:
  """The same where aux cannot be reduced as the options say."""
  try:
    given = runs.aux_words(runs.whole(runs.args).aux)
  except ValueError:  # a tree of words that is not that of the aux
    return None
  wrong = {i for i, word in enumerate(given) if word in _OF_AUX and not _aux_is(runs, i, word)}
  return _otherwise(runs, wrong)


def _otherwise(runs: Runs, wrong: Collection[int]) -> Finding:
  """The words that reduce the leaves that are `wrong`, where any does."""
  aux = runs.whole(runs.args).aux
  treedef: Any = jax.tree.structure(aux)
  found = {i: next((word for word in _OF_AUX if _aux_is(runs, i, word)), "") for i in wrong}
  tree = treedef.unflatten([found.get(i, word) for i, word in enumerate(runs.aux_words(aux))])
  mend = words.RATIO if "" in found.values() else words.option("aux_reduction", tree)
  verdict: Verdict = "sum" if set(found.values()) == {"sum"} else "unknown"
  return Finding(verdict, words.AUX, mend)


def _aux_is(runs: Runs, i: int, word: str) -> bool:
  """Whether a leaf of the aux of the whole batch is this reduction of those of its parts."""

  def is_reduced(p: Parts) -> bool:
    whole, first, rest = (np.asarray(jax.tree.leaves(x.aux)[i]) for x in p[1:])
    if (word == "concat" and not whole.ndim) or (word == "mean" and whole.dtype.kind not in "fc"):
      return False
    try:
      reduced = _reduced(runs, word, first, rest)
    except ValueError:  # of shapes
      return False
    return reduced.shape == whole.shape and np.allclose(reduced, whole, rtol=1e-4, atol=0)

  return all(map(is_reduced, runs.parts))


def _reduced(runs: Runs, word: str, first: np.ndarray, rest: np.ndarray) -> np.ndarray:
  """A leaf of two parts of the rows as one."""
  if word == "concat":
    return np.concatenate([first, rest], runs.options["concat_axis"] or 0)
  if word == "mean":
    share = runs.cut / runs.rows
    return share * first + (1 - share) * rest
  return {"sum": np.add, "max": np.maximum, "min": np.minimum}[word](first, rest)


def of_gradients(runs: Runs) -> Finding | None:
  """Whether gradients alone differ, and do not once they are reduced otherwise."""
  each = [runs.compare(x.whole, split) for x in runs.outcomes for split in x.splits]
  agree = [all(leaf.agrees for leaf in column) for column in zip(*each, strict=True)]
  names = [leaf.name for leaf in each[0][1 : len(runs.outcomes[0].whole.leaves)]]
  agree = agree[: len(names) + 1]
  if not agree[0] or all(agree):
    return None
  option, default = runs.options["grad_reduction"], runs.options["reduction"]
  reductions = reduction_words.named_of_gradients(option, REDUCTIONS[default])
  in_force = reduction_words.match("grad_reduction", reductions, runs.params)
  given = [kind.name for kind in jax.tree.leaves(in_force)]
  found = [_extreme(runs, i, name) for i, name in enumerate(names, 1)]
  tree: Any = jax.tree.structure(runs.params)

  def overwritten(new: Sequence[str], mend: str, mended: Runs) -> Finding:
    which = [name for name, word in zip(names, new, strict=True) if word in _EXTREMES]
    return Finding("overwritten", words.OVERWRITTEN.format(names=", ".join(which)), mend, mended)

  new = []
  for name, agrees, word, extreme in zip(names, agree[1:], given, found, strict=True):
    if not agrees or (_KEY in name and option is None):
      new.append(extreme or default)
    else:
      new.append(word if extreme or word in _EXTREMES else default)
  overwrites = any(found) and not set(_EXTREMES).isdisjoint(new)
  words_of = tree.unflatten(new) if overwrites else None
  if new != given and (mended := runs.mended(grad_reduction=words_of)):
    mend = words.option("grad_reduction", words_of)
    finding = Finding("unknown", words.GRADIENTS, mend, mended)
    return overwritten(new, mend, mended) if overwrites else finding
  # Or cotangents are the whole batch's only if the loss is a sum.
  new = [word if word in _EXTREMES else extreme for word, extreme in zip(given, found, strict=True)]
  if not any(new) or default != "mean" or runs.options["weight_fn"] is not None:
    return None
  words_of, leaf = tree.unflatten([word or "sum" for word in new]), runs.leaves[0]

  def part_of_mean(*args: Any) -> Any:
    out = runs.fun(*args)
    share = probes.batch_leaves(args, runs.batch, runs.names)[0].value.shape[leaf.axis] / runs.rows
    return (out[0] * share, out[1]) if runs.options["has_aux"] else out * share

  mended = runs.mended(fun=part_of_mean, reduction="sum", grad_reduction=words_of)
  if mended is None:
    return None
  rows, option = f"{leaf.name}.shape[{leaf.axis}]", words.option("grad_reduction", words_of)
  mend = words.SUM_OVER_ALL_ROWS.format(option=option, rows=rows, all_rows=runs.rows)
  return overwritten(new, mend, mended)


def _extreme(runs: Runs, i: int, name: str) -> str:
  """Which extreme of the parts' a gradient is, by its name or its values; empty where none."""
  if _KEY in name:
    return "max"
  share = runs.cut / runs.rows

  def is_chosen(word: str, p: Parts) -> bool:
    whole, first, rest = (outcome.leaves[i] for outcome in (p.whole, p.first, p.rest))
    # Cotangents of a mean are as much larger in a part as it has fewer rows.
    chosen = _reduced(runs, word, first, rest)
    of_cotangents = _reduced(runs, word, share * first, (1 - share) * rest)
    nearest = np.minimum(np.abs(whole - chosen), np.abs(whole - of_cotangents))
    return bool(np.max(nearest, initial=0.0) <= p.whole.allowed[i])

  if not any(np.any(p.whole.leaves[i]) for p in runs.parts):
    return ""
  return next((w for w in _EXTREMES if all(is_chosen(w, p) for p in runs.parts)), "")
