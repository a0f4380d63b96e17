"""Why the step does not give what the whole batch does: the likeliest mistakes, in their order.

Each microbatch is run by itself. Most mistakes are other ways to make one of what these gave.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
import contextlib
import itertools
import operator
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from optax_accum._check_split.call import Call, FIXED
from optax_accum._check_split.programs import Outcome, Programs
from optax_accum._check_split.report import LeafComparison, SplitReport
from optax_accum._validate import leaf_name


class Trial(NamedTuple):
  """A batch: all of its rows at once, how the step differs, and each microbatch by itself."""

  call: Call
  whole: Outcome
  leaves: list[LeafComparison]
  rows: Sequence[np.ndarray]  # of the batch, in each microbatch of a device
  each: Sequence[Outcome] = ()


# How much each microbatch of a trial counts.
Weights: TypeAlias = Callable[[Trial], Sequence[float]]


def explain(programs: Programs, trials: Sequence[Trial]) -> SplitReport:
  """What is wrong: the likeliest mistake that explains all trials."""
  leaves = [leaf for trial in trials for leaf in trial.leaves]
  differ = dict.fromkeys(leaf.name for leaf in leaves if not leaf.agrees)
  if not differ:
    return SplitReport("ok")
  trials = [*_with_parts(programs, trials)]
  if all(name.startswith("aux") for name in differ):
    return _aux(programs, trials, differ)
  return next(_findings(programs, trials))


def _with_parts(programs: Programs, trials: Sequence[Trial]) -> Iterator[Trial]:
  """The trials with each microbatch by itself, if there are several."""
  for trial in trials:
    # A loss that takes rows in groups may not run on a part of them.
    with contextlib.suppress(Exception):
      each = [programs.part(trial.call.take(rows)) for rows in trial.rows]
      if len(each) > 1:
        yield trial._replace(each=each)


def _findings(
  programs: Programs, trials: Sequence[Trial]
) -> Iterator[SplitReport]:
  """Which mistakes explain these trials, the likeliest first."""
  facts = programs.facts
  # Of what devices exchange, no microbatch of one device tells.
  if trials and not facts.exchanges:
    names = trials[0].whole.main
    reduction = programs.asked["reduction"]
    given = None if reduction == "sum" else _given
    if _misfit(trials, names, given) < np.inf:
      yield SplitReport("unknown", STEP_ALONE, OWN_MEAN)
    use_sum = USE_SUM
    if programs.local.split.has_weight:  # it excludes a sum
      use_sum = RETURN_BOTH
    if _misfit(trials, names, None) < np.inf:
      yield SplitReport("sum", SUM, use_sum)
    misfits = {
      x: _misfit(trials, names, weigh) for x, weigh in _weights(programs)
    }
    fix = min(misfits, key=misfits.__getitem__, default="")
    fits = fix and misfits[fix] < np.inf
    # In 16 bits weights that differ by little look alike, so none is named.
    if fits and facts.bytes > 2:
      if reduction == "sum":
        fix += ', reduction="mean"'
      fix += f"\nOr: {RETURN_BOTH}"
      yield SplitReport("weighted", WEIGHTED, fix)
    if fits or _have_weights(programs, trials):
      yield SplitReport("weighted", SOME_WEIGHT, RETURN_BOTH)
  if programs.fingerprint() != programs.fingerprint():
    yield SplitReport("random", NOT_A_FUNCTION, PASS_A_KEY)
  if not facts.keys <= {FIXED}:
    yield SplitReport("random", SHARED_KEY, PASS_A_KEY)
  yield SplitReport("coupled", COUPLED, MENDS)


def _misfit(
  trials: Sequence[Trial], names: Iterable[str], weigh: Weights | None
) -> float:
  """How far the first of these arrays of all rows is from weighted means, or None: sums.

  Infinite, if one of them is not a mean or sum of the microbatches.
  """
  misfit = 0.0
  for trial in trials:
    numbers = np.ones(len(trial.rows))
    if weigh is not None:
      numbers = np.array(weigh(trial), float)
      numbers /= np.sum(numbers) or 1.0
    counts = numbers != 0  # what does not is left out, also where it is NaN
    total = {}
    for name in names:
      arrays = [x.arrays[name] for x in trial.each]
      if {x.shape for x in arrays} != {trial.whole.arrays[name].shape}:
        return np.inf
      total[name] = np.tensordot(numbers[counts], np.stack(arrays)[counts], 1)
    leaves = trial.whole.compare(total)
    if not all(leaf.agrees for leaf in leaves):
      return np.inf
    # The first is the loss, which rounding changes least.
    misfit += leaves[0].difference
  return misfit


def _given(trial: Trial) -> Sequence[float]:
  """By the options of the step."""
  return [x.weight for x in trial.each]


# Which entries of an array x count, or how much: what a report says, the kinds of arrays that it is
# said of, and the same in NumPy.
_FORMULAS = {
  "{x}": ("bfiu", lambda x, n: x),
  "~{x}": ("b", lambda x, n: ~x),
  "~jnp.isnan({x})": ("f", lambda x, n: ~np.isnan(x)),
  "{x} != {n}": ("fiu", operator.ne),
  "{x} == {n}": ("fiu", operator.eq),
  "{x} > {n}": ("fiu", operator.gt),
  "{x} >= {n}": ("fiu", operator.ge),
}
# Where each token predicts the next.
_ENTRIES = {
  "": slice(None),
  "[..., 1:]": slice(1, None),
  "[..., :-1]": slice(None, -1),
}


def _weights(programs: Programs) -> Iterator[tuple[str, Weights]]:
  """What may count in a mean: the option that says so, and how much microbatches have of it."""
  if programs.local.split.has_weight:  # it excludes a weight_fn
    return
  yield "weight_fn=None", lambda trial: [*map(len, trial.rows)]
  batch = programs.call.of_role("batch")
  names = ", ".join(dict.fromkeys(x.argument for x in batch))
  tried = itertools.product(
    enumerate(batch), _ENTRIES, programs.facts.numbers or [0], _FORMULAS
  )
  for (place, x), entries, n, code in tried:
    kinds, formula = _FORMULAS[code]
    if x.kind in kinds and (x.value.ndim > 1 or not entries):
      text = code.format(x=x.name + entries, n=n)

      def weigh(trial, place=place, entries=entries, formula=formula, n=n):
        value = trial.call.of_role("batch")[place].value
        counted = formula(value[..., _ENTRIES[entries]], n)
        return [np.sum(counted[rows]) for rows in trial.rows]

      yield f"weight_fn=lambda {names}: jnp.sum({text})", weigh


def _have_weights(programs: Programs, trials: Sequence[Trial]) -> bool:
  """Whether some weights, 0 or more, make the whole of two parts in all trials."""
  least = []
  for trial in trials:
    share = _share(programs, trial)
    if not -1e-3 < share < 1.001:
      return False
    least.append(min(share, 1 - share))
  # Parts of which one never counts are selected.
  return max(least) > 1e-3


def _share(programs: Programs, trial: Trial) -> float:
  """How much the first of two parts counts in the whole, whatever the parameters.

  Least squares find it. It is NaN if a weighted mean of the parts is not the whole.
  """
  half = len(trial.rows) // 2
  parts = np.concatenate(trial.rows[:half]), np.concatenate(trial.rows[half:])
  columns = []
  for size in (0.0, 1.0, -1.0):
    call = trial.call.moved(size)
    each = [programs.part(call.take(rows)) for rows in parts]
    each.append(programs.part(call))
    for name in trial.whole.main:
      arrays = np.stack([np.ravel(x.arrays[name]) for x in each])
      # In times of what may be rounding.
      columns.append(arrays / (trial.whole.allowed[name] or 1.0))
  # Of a part of which nothing counts the loss may be 0 / 0.
  first, second, whole = np.nan_to_num(np.concatenate(columns, axis=1))
  apart = first - second
  share = np.dot(apart, whole - second) / (np.dot(apart, apart) or 1.0)
  # Weights that are free hide most of a small term, unless it is sought a tenth of what is allowed.
  most = 0.1 if programs.facts.bytes > 2 else 1.0
  if np.abs(second + share * apart - whole).max() > most:
    return np.nan
  return share


def _aux(
  programs: Programs, trials: Sequence[Trial], differ: Collection[str]
) -> SplitReport:
  """Whether the aux that differs is that of all rows where it is added up."""
  if not trials or _misfit(trials, differ, None) == np.inf:
    return SplitReport("unknown", AUX, RATIO)

  def new(path, word):
    return "sum" if leaf_name("aux", path) in differ else word

  words = jax.tree_util.tree_map_with_path(new, programs.words)
  fix = f"aux_reduction={words!r}".replace("'", '"')
  return SplitReport("sum", AUX, fix)


# What a report says of each mistake: why it is known, and what to write.

STEP_ALONE = """\
By itself each microbatch agrees on one device, but the step does not: the
loss depends on the number of devices, or an option changes a value."""
OWN_MEAN = """\
Return the mean of the device's own rows, l.sum() / count, without lax.psum
or lax.pmean, and let weight_fn return count: lax.psum of a Python number,
lax.axis_size and lax.axis_index differ with the devices. Leave out options
that should change no value, such as in_place, one by one."""
NOT_A_FUNCTION = """\
A second call with the same arguments gives another result. The loss may
draw numbers with NumPy, or count its calls."""
SHARED_KEY = """\
All microbatches share a key from which the loss draws noise for each place
in the batch. So rows of different microbatches have the same noise."""
PASS_A_KEY = """\
Draw with jax.random, from a key that is an argument of the loss, and name
it. In a carry, let it be a jax.random.key:
  loss_fn(params, batch, key), with rng_argnums=2"""
USE_SUM = """\
reduction="sum"
Or divide by the rows that the loss is given, for a mean.
Or, if the loss returns how much its rows count in the place of an aux, give
it has_weight=True in the place of has_aux=True for the mean."""
SUM = """\
The losses and gradients of the microbatches add up to those of the whole
batch."""
RETURN_BOTH = """\
Let the loss return (total, weight): the sum of the losses of the rows that
it is given, which is no mean, and what the loss divides by, which may be
0. With jnp.maximum(count, 1) a microbatch counts in which nothing does.
Call it with has_weight=True."""
WEIGHTED = """\
The loss is a mean over what the weight_fn below counts: with it the
microbatches agree."""
SOME_WEIGHT = """\
The loss and gradients are a weighted mean of those of the microbatches.
The check did not find what in the batch gives the weights. In 16 bits a
square root of a mean, which has none, looks the same."""
COUPLED = """\
The loss of a row depends on the other rows or on their order, and no
weight of a microbatch explains it: a contrastive loss, statistics of the
batch, a function of a mean (a square root, a ratio), several denominators,
rows in groups, or, with has_weight, a mean in the place of the total."""
RATIO = """\
Return what each aux divides, and what it divides by, as two aux reduced by
"sum"."""
AUX = """\
Loss and gradients agree, but aux does not: aux_reduction does not fit it."""
MENDS = """\
- Several denominators, or statistics of the data (normalized advantages):
  compute the totals of the whole batch before the step, and pass them as a
  further argument that is not split. If sums over rows are divided by them,
  reduction="sum" adds the parts up. A ratio, product or root of means over
  the batch needs its sums in the same way.
- A sum and what it is divided by, also by lax.psum: return both, of the
  device's own rows, (total, weight), with has_weight=True. The total is not
  divided: a mean would be divided twice. A term without rows, such as a
  regularizer, needs a mean over rows, or goes outside.
- A contrastive loss, or another that compares rows: run the encoder by
  optax_accum.microbatch(encode, ...) inside a loss of the whole batch. On
  several devices gather the rows of all by jax.lax.all_gather. See the
  guide to contrastive losses.
- Batch normalization: use group or layer norm, or the running statistics
  of earlier steps (model.eval() in nnx). Or accept that each microbatch is
  normalized by its own rows. See the guide Flax linen.
- Rows in pairs or groups: make each group one row, chosen and rejected in
  one array of two, not in halves of the batch, and flatten it in the loss:
    batch = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), batch)  # of neighbors
    batch = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2), axis=1), batch)  # of halves
- Indices into the flattened batch: let them count within a row.
- A gradient penalty that is the gradient of a mean over the batch: take
  the gradient of each row, by jax.vmap.
- Rows that meet their neighbors, or that are sorted or selected (the
  hardest rows): find what each row meets, or which rows count, before the
  step, for the whole batch, and pass it as a leaf of the batch.
- Rows in a random order (mixup, shuffled negatives): draw the order before
  the step, for the whole batch, and pass to each row what it meets, as
  further leaves of the batch:
    batch = {**batch, "x_other": batch["x"][order]}"""
