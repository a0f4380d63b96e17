"""`check_split`: whether a loss can be split into microbatches, and if not, why."""

from collections.abc import Callable, Iterable, Sequence
import functools
import inspect

import jax
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._check_split import diagnose, words
from optax_accum._check_split.facts import fingerprint
from optax_accum._check_split.probes import Call, LEVELS
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import LossFn, noted, Runs
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.loss import check_loss
from optax_accum._microbatches.options import (
  find_slots,
  name_of,
  names_or_positions,
  OTHER_NAMES,
  refuse_keys,
  refuse_rows,
  Roles,
  Slot,
  Split,
  with_keys,
  with_rows,
)
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

_ORDER = "What the loss takes comes by position: check_split(loss_fn, params, batch)."


def check_split(loss_fn: Callable[..., Tree], /, *args: Tree, **options: object) -> SplitReport:
  """Says whether splitting leaves this loss as it is, and if not, why and what to write.

  Runs ``loss_fn(*args)`` and its gradients on the whole batch and on each microbatch, makes one of
  the microbatches as `microbatch_value_and_grad` does with these options, and compares loss,
  gradients and aux leaf by leaf, in float32 (float64 where x64 is enabled). A batch may hide a
  defect: a mean over a mask of ones is the plain mean. So the same is done with other parameters,
  and on batches whose masks, labels and floats are changed in a row or two. Those on which the loss
  is not finite, or zero with all its gradients, are left out. Nothing is random. For a test, or a
  notebook, with a small batch; a step checks its own loss by `TrainStep.check`::

    assert optax_accum.check_split(loss_fn, params, batch).ok

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
  ``unknown``      they differ, and none of these explains it, as in bfloat16
  ===============  ================================================================

  With a fix that is nothing but options, loss and gradients agree on all of these batches; that of
  "unsplit" is not tried. `SplitReport.not_checked` says what was not looked at, even if ``ok``. Nor
  is the carry compared, which each microbatch gets as given, or an aux under "stack" or "last", or
  a difference up to 1e-4 of a leaf's largest number or 1e-6 of the largest leaf's (1e-9 and 1e-11
  in float64), which may be rounding, and may be a small term, such as a z-loss.

  Args:
    loss_fn: As in `microbatch_value_and_grad`.
    *args: What it is called with: arrays of 2 rows or more, and better 8 or more.
    **options: Those of `microbatch_value_and_grad`. `num_microbatches` defaults to the smallest
      number above 1 that divides the rows. Unless `microbatch_size` is given, a split whose last
      microbatch is smaller runs too. 1 is an error unless the loss calls `microbatch` itself, which
      does not split in the whole batch that it is compared with. `accumulator_dtype` is left at its
      default, and `axis_name` is refused.

  Returns:
    A `SplitReport`: its `ok`, its `verdict`, and a table with the fix as `str`.

  Raises:
    ValueError: The batch has no arrays or one row, or nothing is split.
    TypeError: An option that there is not, traced or abstract arguments, or parameters that cannot
      be differentiated.
    Exception: What the loss raises, with a note that says on how many rows it did. A loss that
      takes rows in groups is "coupled" instead, and an aux that its word cannot reduce has a fix.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   each = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6), "mask": jnp.ones(6)}
    >>> report = optax_accum.check_split(loss_fn, jnp.array([1.0, -1.0]), batch)
    >>> report.verdict, report.fix
    ('weighted', "weight_fn=lambda batch: jnp.sum(batch['mask'])")
  """
  runs = runs_of(loss_fn, args, options)
  return runs if isinstance(runs, SplitReport) else report_of(runs)


def runs_of(
  loss_fn: LossFn, args: Args, options: Kwargs, drawing: Sequence[str] = ("rng", "carry")
) -> Runs | SplitReport:
  """What `check_split` runs, or a report where the defaults refuse the call.

  Of keys in arguments of the roles `drawing` every draw is the same number.
  """
  with noted(_ORDER):
    given = _options(loss_fn, args, options)
    split = Split.of({**given, "num_microbatches": 1, "microbatch_size": None}, default_argnum=1)
    wanted = names_or_positions("argnums", given["argnums"], int)
    argnums = [int(i) for i in find_slots("argnums", wanted, loss_fn, args, {})]
    given_as = split.roles(loss_fn, args, {}, argnums)
    for i in argnums:
      parameters.check_differentiable(f"argument {i}", args[i])
    rows = cut.batch_rows(given_as.batch, dict[int | str, Tree](enumerate(args)))
  if rows == 1:
    raise ValueError("The batch has 1 row, which cannot be split: give check_split 2 or more.")
  if refused := _refused(split, given_as, rows):
    return refused
  carries = bool(given_as.carry)

  @functools.wraps(loss_fn)
  def checked(*args: Tree) -> Tree:
    out = loss_fn(*args)
    check_loss(out, given["has_aux"] or carries, carries)
    return (out[0], out[1][1]) if carries else out  # the carry is an argument like others

  by_position = {
    "argnums": argnums[0] if isinstance(given["argnums"], int) else argnums,
    "has_aux": given["has_aux"] or carries,
    "batch_argnums": tuple(given_as.batch),
    "batch_axis": tuple(given_as.batch.values()),
    "rng_argnums": tuple(given_as.rng),
    **dict.fromkeys(("batch_argnames", "rng_argnames"), ()),
    **dict.fromkeys(("carry_argnum", "carry_reduction"), None),
  }
  call = Call.of(loss_fn, args, given_as, argnums)
  for role in drawing:
    call = call.with_noise(role, LEVELS[0])
  sizes = sizes_of(given["num_microbatches"], given["microbatch_size"], rows)
  return Runs(checked, call, {**given, **by_position}, sizes)


def _options(loss_fn: LossFn, args: Args, options: Kwargs) -> Kwargs:
  """All options, checked, and with the arguments."""
  if of_step := options.keys() & {"mesh", "data_axis", "reduce_gradients", "donate", "noise_scale"}:
    raise TypeError(
      f"check_split runs the loss on one device, and has no {min(of_step)}=: leave it out, or have"
      " a step check its own loss, step.check(params, opt_state, batch)."
    )
  plain = inspect.unwrap(microbatch_value_and_grad)
  if why := _validate.hint_on(plain, (loss_fn,), options, OTHER_NAMES):
    raise TypeError(f"check_split: {why}")
  bound = inspect.signature(microbatch_value_and_grad).bind(loss_fn, **options)
  bound.apply_defaults()
  if (axis := bound.arguments["axis_name"]) is not None:
    raise ValueError(f"check_split runs on one device: leave axis_name={axis!r} out.")
  check_concrete(loss_fn, enumerate(args))
  return {k: x for k, x in bound.arguments.items() if k not in ("fun", "accumulator_dtype")}


def check_concrete(loss_fn: LossFn, given: Iterable[tuple[Slot, Tree]]) -> None:
  """Checks that the arguments of a loss are arrays that have values."""
  for slot, tree in given:
    argument = name_of(loss_fn, slot).replace("...", f"argument {slot}")
    for name, leaf in _validate.named_leaves(argument, tree):
      if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        what = "traced" if isinstance(leaf, jax.core.Tracer) else "a ShapeDtypeStruct"
        raise TypeError(f"{name} is {what}: check outside jax.jit, with arrays.")


def _refused(split: Split, given_as: Roles, rows: int) -> SplitReport | None:
  """The report where the defaults refuse the call."""
  try:
    if split.batch_argnums is None:
      refuse_rows(given_as, {rows})
  except ValueError as error:
    more = {int(slot) for slot, _ in with_rows(given_as, {rows})}
    return SplitReport("unsplit", str(error), words.split_too(map(int, given_as.batch), more))
  try:
    if split.rng_argnums is None:
      refuse_keys(given_as)
  except ValueError as error:
    keys = [int(slot) for slot in with_keys(given_as)]
    alone = all(is_key(x) for slot in keys for x in jax.tree.leaves(given_as.shared[slot]))
    fix = f"rng_argnums={words.one_or_more(keys)}" if alone else words.PASS_A_KEY
    return SplitReport("random", str(error), fix)
  return None


def sizes_of(number: int | None, size: int | None, rows: int) -> list[int]:
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


@np.errstate(all="ignore")
def report_of(runs: Runs) -> SplitReport:
  """What the runs tell."""
  if (
    runs.sizes == [runs.rows]
    and len({str(fingerprint(runs.traced(x))) for x in (True, False)}) == 1
  ):
    raise ValueError(
      "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
      " does: leave it out, or give more."
    )
  how = runs.how()  # runs the whole batch, and notes where the loss raises
  report = functools.partial(SplitReport, not_checked=runs.facts.not_checked)
  if not runs.given.is_finite:
    return report("unknown", words.NOT_FINITE, words.OTHER_BATCH)
  try:
    outcomes = runs.outcomes
  except Exception:
    if finding := diagnose.of_error(runs):
      return report(*finding[:3])
    raise
  if not outcomes:
    return report("unknown", words.ALL_ZERO, words.OTHER_BATCH)
  ran = [tried.call.name for tried in outcomes]
  left_out = [call.name for call in runs.calls if call.name not in ran]
  report = functools.partial(report, batches=tuple(ran), left_out=tuple(left_out))
  split = f"microbatches of {{}} rows, of {runs.rows}"
  for tried in outcomes:
    for size, parts in zip(runs.sizes, tried.splits, strict=True):
      leaves = runs.compare(how, tried.whole, how.join(parts))
      if not all(leaf.agrees for leaf in leaves.values()):
        finding, where = diagnose.explain(runs), f"{tried.call.name}; {split.format(size)}"
        return report(*finding[:3], where, tuple(leaves.values()))
  leaves, where = runs.as_called(), f"as given; {split.format(runs.sizes[0])}"
  differ = not all(leaf.agrees for leaf in leaves.values())
  found = ("unknown", words.AS_CALLED, words.PLAIN) if differ else ("ok", "", "")
  return report(*found, where, tuple(leaves.values()))
