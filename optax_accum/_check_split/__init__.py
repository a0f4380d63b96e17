"""`check_split`: whether a loss can be split into microbatches, and if not, why."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
from typing import Any

import jax

from optax_accum import _roles, _rows
from optax_accum._arguments import find_slots, names_or_positions, Slot
from optax_accum._check_split import (
  bent,
  fixed_noise,
  hypotheses,
  loss_facts,
  mends,
  noise_of_rows,
  probes,
)
from optax_accum._check_split.dependence import constant, Value
from optax_accum._check_split.hypotheses import Case
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import agree, in_check_dtype, is_array, Runs
from optax_accum._microbatch import microbatch_value_and_grad
from optax_accum._split import Split


def check_split(loss_fn: Callable[..., Any], /, *args: Any, **options: Any) -> SplitReport:
  """Says whether splitting leaves this loss as it is, and if not, why and what to write.

  Runs ``loss_fn(*args)`` and its gradients on the whole batch and in microbatches, as
  `microbatch_value_and_grad` does with these options, and compares loss, gradients and aux leaf by
  leaf, in float32 (float64 where x64 is enabled). A difference of 1e-4 of a leaf's largest number
  is taken for rounding (1e-9 in float64), and so is a smaller part of the loss that splits badly,
  such as a z-loss. For a test, or a notebook, with a small batch::

    assert optax_accum.check_split(loss_fn, params, batch).ok

  A batch may hide a defect: a mean over a mask of ones is the plain mean. So the same programs also
  run on batches that differ from the given one: with masks inverted, labels and floats of -1, 0 and
  what else the loss compares data with (NaN too), counts doubled, or floats halved, each in a part
  of row 0, and with a row that is empty; with rows drawn again; with other parameters; and with
  floats that are all different. Such a batch on which the loss is not finite, or zero with all its
  gradients, is left out. Differences up to 1e-4 of a leaf and 1e-6 of the largest leaf (1e-9 and
  1e-11 in float64) are taken for rounding, and more where the last bits of the parameters change as
  much: a term that is smaller than that is not seen.
  Nothing is random: the same call gives the same report.

  ===============  ================================================================
  verdict          what it means
  ===============  ================================================================
  ``ok``           all agree, on all of these batches
  ``sum``          the loss, or an aux, is a sum: ``reduction="sum"``
  ``weighted``     a mean over something else than rows: a `weight_fn`
  ``coupled``      rows meet each other beyond what one weight explains: contrastive
                   losses, batch statistics, several denominators
  ``random``       the loss is no function of its arguments, or microbatches share noise
  ``overwritten``  a leaf's gradient is no gradient but what to overwrite the leaf with, as the
                   scales of layers in 8 bits
  ``unsplit``      an argument that has the batch's rows is not split
  ``unknown``      they differ, and none of these explains it
  ===============  ================================================================

  Noise is not compared. Keys that are named in `rng_argnums`, or threaded, are replaced by such of
  which all draws are the same, and, where the loss draws and all agrees, by such whose draws follow
  the rows: rows may meet in a drawn mask that the loss divides by, or in a permutation. Where all
  agrees and the loss takes a maximum, an absolute value or the like of one number that the batch
  comes to, it runs with that function bent too: the batches may all be on one side of a threshold.
  A carry is not threaded: each microbatch gets the given one, and what becomes of it is not
  compared. Nor is an aux under "stack" or "last". A loss that computes in bfloat16 has that
  rounding; check it in float32.

  A mend by options was run: loss and gradients agree with it, and what an aux still needs is on a
  line of its own. Where the defaults refuse the call (``random`` and ``unsplit`` without a table)
  nothing was run, and the loss may have another defect: check again with the mend. That of
  ``unsplit`` has two ways out where an argument may merely have as many rows as the batch, which an
  odd number of rows in the check makes unlikely.

  Layers in 8 bits round cotangents, and those of a mean over fewer rows are larger. So gradients
  differ with the number of microbatches, unless the loss is a sum over rows that is divided by all
  rows of the batch: the mend of ``overwritten``.

  What stays hidden: what a loss does where a microbatch holds nothing that counts; a label that
  says so by a number which neither the batch nor a comparison in the loss has; a missing label that
  makes the gradients NaN; a threshold of several means at once (an array of them); a count of what
  is drawn in a loss that takes no other number of rows, or flattens rows before it draws; and, in a
  batch whose rows are all alike, what only rows that differ much would show, as the balance of a
  router.

  Args:
    loss_fn: As in `microbatch_value_and_grad`.
    *args: What it is called with: arrays of 2 rows or more, and better 8 or more.
    **options: Those of `microbatch_value_and_grad`. `num_microbatches` defaults to the smallest
      number above 1 that divides the rows. Unless `microbatch_size` is given, a split whose last
      microbatch is smaller runs too. `accumulator_dtype` is left at its default, and `axis_name`
      is refused. 1 is for a loss that calls `microbatch` itself, which on the whole batch, with
      this option and without, is told not to split.

  Returns:
    A `SplitReport`: its `ok`, its `verdict`, and a table with the mend as `str`.

  Raises:
    ValueError: The batch has no arrays or one row, or nothing is split.
    TypeError: An option that there is not, or traced arguments.
    Exception: What the loss raises, with a note that says on how many rows it did. A loss that
      takes rows in groups is "coupled" instead, and an aux that its word cannot reduce has a mend.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   each = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6), "mask": jnp.ones(6)}
    >>> report = optax_accum.check_split(loss_fn, jnp.array([1.0, -1.0]), batch)
    >>> report.verdict, report.mend
    ('weighted', "weight_fn=lambda batch: jnp.sum(batch['mask'])")
  """
  call = _Call(loss_fn, args, options)
  return call.refused() or call.report()


class _Call:
  """One call of `check_split`: the loss, its arguments and the options, put in order."""

  def __init__(self, loss_fn: Callable[..., Any], args: Any, options: dict[str, Any]):
    bound = inspect.signature(microbatch_value_and_grad).bind(loss_fn, **options)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given["axis_name"] is not None:
      raise ValueError(
        f"check_split runs on one device: leave axis_name={given['axis_name']!r} out."
      )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
      raise TypeError("check_split got traced arguments: call it outside jax.jit, with arrays.")
    self.sizes = {k: given.pop(k) for k in ("num_microbatches", "microbatch_size")}
    self.split = Split.of({**given, "num_microbatches": 1}, default_argnum=1)
    wanted = names_or_positions("argnums", given["argnums"], int)
    self.argnums = [int(i) for i in find_slots("argnums", wanted, loss_fn, args, {})]
    self.roles = self.split.roles(loss_fn, args, {}, self.argnums)
    arguments: dict[Slot, Any] = dict(enumerate(args))
    self.rows = _rows.batch_rows(self.roles.batch, arguments)
    if self.rows == 1:
      raise ValueError("The batch has 1 row, which cannot be split: give check_split 2 or more.")
    self.names = _names(loss_fn, [int(slot) for slot in self.roles.batch])
    self.keys = [int(slot) for slot in self.roles.rng]
    self.fun, self.args, self.options = loss_fn, args, given

  def refused(self) -> SplitReport | None:
    """The report where the defaults refuse the call."""
    if self.split.batch_argnums is None:
      try:
        _roles.refuse_rows(self.roles, self.split.batch_positions, {self.rows})
      except ValueError as error:
        found = _roles.with_rows(self.roles, {self.rows})
        batch = tuple(sorted(int(slot) for slot in {*self.roles.batch, *dict(found)}))
        mend = mends.split_too(batch, [int(slot) for slot in self.roles.batch])
        return SplitReport("unsplit", str(error), mend)
    if self.split.rng_argnums is None:
      try:
        _roles.refuse_keys(self.roles)
      except ValueError as error:
        slots = [int(slot) for slot in _roles.with_keys(self.roles)]
        alone = all(map(fixed_noise.is_key, jax.tree.leaves([self.args[i] for i in slots])))
        mend = f"rng_argnums={mends.one_or_more(slots)}" if alone else mends.PASS_A_KEY
        return SplitReport("random", str(error), mend)
    return None

  def report(self) -> SplitReport:
    """The report of what was run."""
    args = self._prepared()
    sizes = self._sizes()
    runs = Runs(self._without_carry(), args, self._options(), sizes)
    if sizes == [{"num_microbatches": 1}] and runs.splits_nothing(args):
      raise ValueError(
        "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
        " does: leave it out, or give more."
      )
    with _noted(f"check_split ran it on the whole batch, {self.rows} rows."):
      given, facts = runs.whole(args), loss_facts.facts(runs.traced(args), self._values(args))
    batch = {int(slot): axis for slot, axis in self.roles.batch.items()}
    facts = facts.with_integers(probes.negative_labels(args, batch))
    numbers = facts.integers, facts.floats
    changed = (args, batch, self.argnums, self.keys, self.rows, numbers, self.names)
    tried = list(probes.of_call(*changed))
    case = Case(runs, args, self.roles, self.argnums, self.rows, self.names, tried, facts)
    if not given.is_finite:
      return SplitReport("unknown", mends.NOT_FINITE, mends.OTHER_BATCH)
    try:
      outcomes = case.outcomes
    except Exception as error:
      finding = hypotheses.of_error(case)
      if finding is None:
        failed = next((s for s in sizes if not case.with_sizes([s]).runs_well), sizes[0])
        size = _in_words(failed, self.rows)
        error.add_note(f"check_split ran it in {size}; on all {self.rows} rows it ran.")
        raise
      return SplitReport(*finding[:3])
    compared = [
      (f"{name}; {_in_words(size, self.rows)}", runs.compare(whole, split))
      for name, whole, splits in outcomes
      for size, split in zip(sizes, splits, strict=True)
    ]
    batches = tuple(name for name, _, _ in outcomes)
    left_out = tuple(probe.name for probe in tried if probe.name not in batches)
    wrong = next((c for c in compared if not agree(c[1])), None)
    if wrong is None:
      keys = [*self.keys, *map(int, self.roles.carry)]
      for drawn in noise_of_rows.disagreements(case, keys):
        return SplitReport("coupled", mends.DRAWN, mends.DRAW_OUTSIDE, *drawn, batches, left_out)
      if facts.has_kinks and bent.disagrees(runs, args, self._kinds(), tried):
        return SplitReport("coupled", mends.BENT, mends.TWO_SUMS, "", (), batches, left_out)
      if not outcomes:
        return SplitReport("unknown", mends.ALL_ZERO, mends.OTHER_BATCH_TOO)
      return SplitReport("ok", "", "", *compared[0], batches, left_out)
    return SplitReport(*hypotheses.explain(case)[:3], *wrong, batches, left_out)

  def _kinds(self) -> dict[int, str]:
    kinds = dict.fromkeys(map(int, self.roles.batch), "batch")
    return {**kinds, **dict.fromkeys(self.argnums, "params")}

  def _prepared(self) -> tuple[Any, ...]:
    """The arguments in the dtypes of the check, and with fixed noise."""
    cast = {*self.argnums, *self.roles.batch}
    args = tuple(
      jax.tree.map(lambda x, i=i: in_check_dtype(x) if i in cast or is_array(x) else x, arg)
      for i, arg in enumerate(self.args)
    )
    args = probes.with_noise(args, self.keys, fixed_noise.LEVELS[0])
    carries = list(map(int, self.roles.carry))
    typed, raw = (probes.with_noise(args, carries, fixed_noise.LEVELS[0], x) for x in (False, True))
    if not any(map(fixed_noise.may_be_raw_key, jax.tree.leaves([typed[i] for i in carries]))):
      return typed
    try:  # two words may be something else than a key, and then cannot be one
      jax.eval_shape(lambda: self.fun(*raw))
    except (TypeError, ValueError):
      return typed
    return raw

  def _values(self, args: tuple[Any, ...]) -> list[Value]:
    """What is known of the arrays of the call."""
    kinds = self._kinds()
    return [
      Value(frozenset({kind}), constant(x).numbers if kind == "other" else None)
      for i, arg in enumerate(args)
      for kind in [kinds.get(i, "other")]
      for x in jax.tree.leaves(arg)
      if is_array(x)
    ]

  def _options(self) -> dict[str, Any]:
    """The options of all runs: every argument by its position, and no carry."""
    carries = self.split.carry_argnum is not None
    return {
      **{k: x for k, x in self.options.items() if k not in ("fun", "accumulator_dtype")},
      "has_aux": self.options["has_aux"] or carries,
      "batch_argnums": tuple(self.roles.batch),
      "batch_argnames": (),
      "batch_axis": tuple(self.roles.batch.values()),
      "rng_argnums": tuple(self.roles.rng),
      "rng_argnames": (),
      "carry_argnum": None,
      "carry_reduction": None,
    }

  def _without_carry(self) -> Callable[..., Any]:
    """The loss, whose carry is an argument like others."""
    if self.split.carry_argnum is None:
      return self.fun

    @functools.wraps(self.fun)
    def fun(*args: Any) -> Any:
      loss, (_, aux) = self.fun(*args)
      return loss, aux

    return fun

  def _sizes(self) -> list[dict[str, int]]:
    """The splits to run: as asked for, and a ragged one."""
    number, size = self.sizes.values()
    if size is not None and number is None:
      Split(microbatch_size=size)
      if size >= self.rows:
        raise ValueError(f"microbatch_size={size} does not split {self.rows} rows: give less.")
      return [{"microbatch_size": size}]
    if number is None:
      number = next(n for n in range(2, self.rows + 1) if self.rows % n == 0)
    Split(num_microbatches=number, microbatch_size=size)
    if number == 1:  # what runs in microbatches is within the loss
      return [{"num_microbatches": 1}]
    ragged = -(-2 * self.rows // 3)
    return [{"num_microbatches": number}] + [{"microbatch_size": ragged}] * (ragged < self.rows)


def _names(loss_fn: Callable[..., Any], slots: Sequence[int]) -> Mapping[int, str]:
  """What the loss calls the batch arguments."""
  try:
    names = list(inspect.signature(loss_fn).parameters)
  except (TypeError, ValueError):
    names = []
  return {i: names[i] if i < len(names) else f"batch_{i}" for i in slots}


def _in_words(size: Mapping[str, int], rows: int) -> str:
  if "num_microbatches" in size:
    count = size["num_microbatches"]
    return f"{count} microbatch{'es' if count > 1 else ''} of {rows // count} rows"
  return f"microbatches of {size['microbatch_size']} rows, of {rows}"


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
  """Adds a note to an error of the loss."""
  try:
    yield
  except Exception as error:
    error.add_note(note)
    raise
