"""`check_split`: whether a loss can be split into microbatches, and if not, why."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Aux, Leaf, Tree
from optax_accum._check_split import diagnose, words
from optax_accum._check_split.probes import Call, is_array, LEVELS
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import LossFn, noted, Runs
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import (
  find_slots,
  name_of,
  names_or_positions,
  refuse_keys,
  refuse_rows,
  Roles,
  with_keys,
  with_rows,
)
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

_ORDER = "What the loss takes comes by position: check_split(loss_fn, params, batch)."


def check_split(loss_fn: Callable[..., Tree], /, *args: Tree, **options: object) -> SplitReport:
  """Says whether splitting leaves this loss as it is, and if not, why and what to write.

  Runs ``loss_fn(*args)`` and its gradients on the whole batch and in microbatches, as
  `microbatch_value_and_grad` does with these options. Compares loss, gradients and aux leaf by
  leaf, in float32 (float64 where x64 is enabled). For a test, or a notebook, with a small batch::

    assert optax_accum.check_split(loss_fn, params, batch).ok

  A batch may hide a defect: a mean over a mask of ones is the plain mean. So the same programs run
  on more than the given batch. In row 0, and in row 0 and the last, which no split keeps together,
  masks are inverted, integers doubled, floats halved, and labels and floats become 0, -1, or a
  number that the loss compares data with, NaN included. A row is empty; rows are drawn again; all
  floats differ; the parameters are others. A batch on which the loss is not finite is left out, and
  so is one on which it is zero with all its gradients. Nothing is random.

  A difference up to 1e-4 of a leaf's largest number, or 1e-6 of the largest leaf's, is taken for
  rounding (1e-9 and 1e-11 in float64), and more where the last bits of the parameters change as
  much. So a small term of a loss that does split badly, such as a z-loss, may not be seen.

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

  A mend that is options was run: loss and gradients agree with it. What an aux still needs stands
  on a line of its own. Where the report has no table, the defaults refused the call and nothing was
  run: check again with the mend. That of ``unsplit`` has two ways out, because an argument may
  merely have as many rows as the batch. An odd number of rows makes that unlikely.

  `SplitReport.not_checked` says what was not looked at, also where the verdict is ``ok``:

  - Noise is not compared. Keys that are named in `rng_argnums`, or threaded, draw the same number
    everywhere. Rows may meet in a drawn mask that the loss divides by, or in a permutation.
  - A maximum or an absolute value of one number of the whole batch, such as a mean, may be on one
    side of its threshold in all of these batches.

  Three things are no part of the comparison. A loss that calls `microbatch` does not split there
  when it runs on the whole batch; with ``num_microbatches=1`` that is all that is compared. Each
  microbatch gets the given carry, and what becomes of it is not compared. Nor is an aux under
  "stack" or "last".

  Check a loss that computes in bfloat16 in float32. Layers in 8 bits round cotangents, which are
  larger in a mean over fewer rows: gradients differ with the number of microbatches unless the loss
  is a sum, divided by the rows of the whole batch.

  What stays hidden: what a loss does where a microbatch holds nothing that counts; a label that
  says so by a number which neither the batch nor a comparison in the loss has; a missing label that
  makes the gradients NaN; a threshold of several means at once (an array of them); and, in a batch
  whose rows are all alike, what only rows that differ much would show, as the balance of a router.

  Args:
    loss_fn: As in `microbatch_value_and_grad`.
    *args: What it is called with: arrays of 2 rows or more, and better 8 or more.
    **options: Those of `microbatch_value_and_grad`. `num_microbatches` defaults to the smallest
      number above 1 that divides the rows. Unless `microbatch_size` is given, a split whose last
      microbatch is smaller runs too. 1 is an error unless the loss calls `microbatch` itself.
      `accumulator_dtype` is left at its default, and `axis_name` is refused.

  Returns:
    A `SplitReport`: its `ok`, its `verdict`, and a table with the mend as `str`.

  Raises:
    ValueError: The batch has no arrays or one row, or nothing is split.
    TypeError: An option that there is not, traced or abstract arguments, or parameters that cannot
      be differentiated.
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
  given = _options(loss_fn, args, options)
  number, size = (given.pop(name) for name in ("num_microbatches", "microbatch_size"))
  split = Split.of({**given, "num_microbatches": 1}, default_argnum=1)
  wanted = names_or_positions("argnums", given["argnums"], int)
  argnums = [int(i) for i in find_slots("argnums", wanted, loss_fn, args, {})]
  with noted(_ORDER):
    roles = split.roles(loss_fn, args, {}, argnums)
    for i in argnums:
      parameters.check_differentiable(f"argument {i}", args[i])
    rows = cut.batch_rows(roles.batch, dict[int | str, Tree](enumerate(args)))
  if rows == 1:
    raise ValueError("The batch has 1 row, which cannot be split: give check_split 2 or more.")
  if refused := _refused(split, roles, rows):
    return refused
  given |= {
    "argnums": argnums[0] if isinstance(given["argnums"], int) else argnums,
    "has_aux": given["has_aux"] or bool(roles.carry),
    "batch_argnums": tuple(roles.batch),
    "batch_argnames": (),
    "batch_axis": tuple(roles.batch.values()),
    "rng_argnums": tuple(roles.rng),
    "rng_argnames": (),
    "carry_argnum": None,
    "carry_reduction": None,
  }

  @functools.wraps(loss_fn)
  def without_carry(*args: Tree) -> tuple[Leaf, Aux]:  # which is an argument like others
    loss, (_, aux) = loss_fn(*args)
    return loss, aux

  call = _prepared(loss_fn, args, roles, argnums)
  fun = without_carry if roles.carry else loss_fn
  return _report(Runs(fun, call, given, _sizes(number, size, rows)))


def _options(loss_fn: LossFn, args: Args, options: Mapping[str, object]) -> dict[str, object]:
  """All options, checked, and with the arguments."""
  if not callable(loss_fn):
    raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, and no function. {_ORDER}")
  try:
    bound = inspect.signature(microbatch_value_and_grad).bind(loss_fn, **options)
  except TypeError as error:
    raise TypeError(
      f"check_split {error}. Only options of microbatch_value_and_grad have names. {_ORDER}"
    ) from None
  bound.apply_defaults()
  if (axis := bound.arguments["axis_name"]) is not None:
    raise ValueError(f"check_split runs on one device: leave axis_name={axis!r} out.")
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
    raise TypeError("check_split got traced arguments: call it outside jax.jit, with arrays.")
  for name, leaf in _validate.named_leaves("args", args):
    if isinstance(leaf, jax.ShapeDtypeStruct):
      raise TypeError(f"{name} is a ShapeDtypeStruct: check_split runs the loss; pass arrays.")
  return {k: x for k, x in bound.arguments.items() if k not in ("fun", "accumulator_dtype")}


def _refused(split: Split, roles: Roles, rows: int) -> SplitReport | None:
  """The report where the defaults refuse the call."""
  try:
    if split.batch_argnums is None:
      refuse_rows(roles, split.batch_positions, {rows})
  except ValueError as error:
    given = [int(slot) for slot in roles.batch]
    batch = sorted({*given, *(int(slot) for slot, _ in with_rows(roles, {rows}))})
    more = " and ".join(str(slot) for slot in batch if slot not in given)
    options = {"batch": tuple(batch), "more": more, "given": words.one_or_more(given)}
    return SplitReport("unsplit", str(error), words.SPLIT_TOO.format(**options))
  try:
    if split.rng_argnums is None:
      refuse_keys(roles)
  except ValueError as error:
    slots = [int(slot) for slot in with_keys(roles)]
    alone = all(is_key(x) for slot in slots for x in jax.tree.leaves(roles.shared[slot]))
    mend = f"rng_argnums={words.one_or_more(slots)}" if alone else words.PASS_A_KEY
    return SplitReport("random", str(error), mend)
  return None


def _sizes(number: int | None, size: int | None, rows: int) -> list[int]:
  """The rows of a microbatch in each split to run: as asked for, and a ragged one."""
  if number is None and size is None:
    number = next(n for n in range(2, rows + 1) if rows % n == 0)
  Split(num_microbatches=number, microbatch_size=size)
  given = cut.microbatch_rows(rows, number, size)
  if number is None and given == rows:
    raise ValueError(f"microbatch_size={size} does not split {rows} rows: give less.")
  ragged = -(-2 * rows // 3)
  # With one microbatch, what runs in microbatches is within the loss.
  return [given, ragged] if number not in (None, 1) and ragged < rows else [given]


def _prepared(loss_fn: LossFn, args: Args, roles: Roles, argnums: Sequence[int]) -> Call:
  """The call in the dtypes of the check, and with fixed noise."""
  names = [name_of(loss_fn, i).replace("...", f"batch_{i}") for i in range(len(args))]
  batch = {int(slot): axis for slot, axis in roles.batch.items()}
  keys, carries, shared = (list(map(int, x)) for x in (roles.rng, roles.carry, roles.shared))
  cast = {*argnums, *batch}
  call = Call("as given", args, argnums, batch, keys, shared, names)
  call = call.mapped(
    range(len(args)), lambda i, x: _in_check_dtype(x) if i in cast or is_array(x) else x
  ).with_noise(keys, LEVELS[0])
  if not carries:
    return call
  try:  # two words may be something else than a key, and then cannot be one
    raw = call.with_noise(carries, LEVELS[0])
    jax.eval_shape(lambda: loss_fn(*raw.args))
  except (TypeError, ValueError):
    return call.with_noise(carries, LEVELS[0], raw=False)
  return raw


def _in_check_dtype(x: Leaf) -> Leaf:
  """An array as NumPy's, its floats in float32, or float64 where x64 is enabled."""
  if is_key(x):
    return x
  x = jnp.asarray(x)
  for kind, dtype in ((jnp.complexfloating, complex), (jnp.floating, float)):
    if jnp.issubdtype(x.dtype, kind):
      x = x.astype(jnp.result_type(dtype))
  return np.asarray(x)


def _report(runs: Runs) -> SplitReport:
  """The report of what was run."""
  if runs.sizes == [runs.rows] and runs.splits_nothing():
    raise ValueError(
      "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
      " does: leave it out, or give more."
    )
  given, how = runs.given, runs.how()
  report = functools.partial(SplitReport, not_checked=runs.facts.not_checked)
  if not given.is_finite:
    return report("unknown", words.NOT_FINITE, words.OTHER_BATCH)
  try:
    outcomes = runs.outcomes
  except Exception:
    if finding := diagnose.of_error(runs):
      return report(*finding[:3])
    raise
  ran = [tried.call.name for tried in outcomes]
  left_out = [call.name for call in runs.calls if call.name not in ran]
  report = functools.partial(report, batches=tuple(ran), left_out=tuple(left_out))
  for tried in outcomes:
    for size, parts in zip(runs.sizes, tried.splits, strict=True):
      leaves = runs.compare(how, tried.whole, how.joined(parts))
      if not all(leaf.agrees for leaf in leaves.values()):
        where = f"{tried.call.name}; {runs.in_words(size)}"
        finding = diagnose.explain(runs)
        return report(*finding[:3], where, tuple(leaves.values()))
  if not outcomes:
    return report("unknown", words.ALL_ZERO, words.OTHER_BATCH_TOO)
  leaves, where = runs.as_called(), f"as given; {runs.in_words(runs.sizes[0])}"
  if all(leaf.agrees for leaf in leaves.values()):
    return report("ok", "", "", where, tuple(leaves.values()))
  return report("unknown", words.AS_CALLED, words.PLAIN, where, tuple(leaves.values()))
