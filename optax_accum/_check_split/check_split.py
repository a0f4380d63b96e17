"""`check_split`: whether a loss can be split into microbatches, and if not, why."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._check_split import diagnose, words
from optax_accum._check_split.facts import fingerprint
from optax_accum._check_split.probes import Call, LEVELS
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import LossFn, Runs
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.loss import check_loss
from optax_accum._microbatches.options import (
  find_slots,
  name_of,
  names_or_positions,
  OTHER_NAMES,
  refuse_keys,
  Roles,
  Slot,
  Split,
  with_keys,
)
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

_ORDER = "What the loss takes comes by position: check_split(loss_fn, params, batch)."
_OPTIONS = inspect.signature(microbatch_value_and_grad)


def check_split(loss_fn: Callable[..., Tree], /, *args: Tree, **options: object) -> SplitReport:
  """Tests whether a loss is the same in microbatches; if not, says why and how to fix it.

  Use it in a test or a notebook, with a small batch. `TrainStep.check` tests the loss of a step.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   each = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6), "mask": jnp.ones(6)}
    >>> report = optax_accum.check_split(loss_fn, jnp.array([1.0, -1.0]), batch)
    >>> report.ok, report.verdict, report.fix
    (False, 'weighted', "weight_fn=lambda batch: jnp.sum(batch['mask'])")

  Args:
    loss_fn: As in `microbatch_value_and_grad`.
    *args: The arguments of `loss_fn`: arrays of 2 rows or more, better 8 or more.
    **options: Those of `microbatch_value_and_grad`, except `axis_name` and `accumulator_dtype`.
      `num_microbatches` defaults to the smallest number above 1 that divides the rows; 1 is an
      error unless the loss itself calls `microbatch`. Unless `microbatch_size` is given, a split
      with a smaller last microbatch runs too.

  Returns:
    A `SplitReport`, which prints as a table. Its ``verdict`` is one of these words.

    ===============  ======================================================================
    ``ok``           everything agrees, on all batches that were tried
    ``sum``          the loss, or an aux, is a sum: ``reduction="sum"``
    ``weighted``     the loss is a mean over something other than rows: a `weight_fn`
    ``coupled``      rows depend on each other (contrastive losses, batch normalization), or
                     terms have several denominators
    ``random``       equal arguments give unequal losses, or microbatches share noise
    ``overwritten``  the "gradient" of a leaf is its new value, as for scales of fp8 layers
    ``unsplit``      an argument that has as many rows as the batch is not split
    ``unknown``      results differ for another reason, such as rounding in bfloat16
    ===============  ======================================================================

  Raises:
    ValueError: The batch has no arrays or one row, or nothing is split.
    TypeError: There is no such option, or arguments are traced, abstract or not differentiable.
    Exception: What the loss raises, with a note on how many rows it had. A loss that takes rows in
      groups is "coupled" instead, and an aux that its word cannot reduce gets a fix.

  Calls:
    It compares loss, gradients and aux of all rows with those of the microbatches, in float32
    (float64 with x64). It also changes parameters, masks, labels and floats, because a batch can
    hide a defect: a mean over a mask of ones is the plain mean. Options in a fix have been tried,
    except for "unsplit". Differences up to 1e-4 of a leaf's largest number, or 1e-6 of the largest
    leaf's (1e-9 and 1e-11 in float64), pass for rounding. The carry is not compared, nor an aux
    under "stack", "last" or a function, nor what ``not_checked`` and the guide "When something is
    wrong" list.
  """
  check_concrete(loss_fn, enumerate(args))
  try:
    runs = runs_of(loss_fn, args, options)
  except TypeError as error:
    unknown = options.keys() - _OPTIONS.parameters.keys()
    if not unknown or unknown & inspect.signature(loss_fn).parameters.keys():
      error.add_note(_ORDER)
    raise
  return runs if isinstance(runs, SplitReport) else report_of(runs)


def runs_of(
  loss_fn: LossFn, args: Args, options: Kwargs, drawing: Sequence[str] = ("rng", "carry")
) -> Runs | SplitReport:
  """What `check_split` runs, or a report where the defaults refuse the call.

  For keys in arguments of the roles `drawing`, every draw is the same number.
  """
  given = _options(loss_fn, options)
  split = Split.of({**given, "num_microbatches": 1, "microbatch_size": None}, default_argnum=1)
  wanted = names_or_positions("argnums", given["argnums"], int)
  argnums = [int(i) for i in find_slots("argnums", wanted, loss_fn, args, {})]
  given_as = split.roles(loss_fn, args, {}, argnums)
  for i in argnums:
    parameters.check_differentiable(f"argument {i}", args[i])
  rows = cut.batch_rows(given_as.batch, dict[int | str, Tree](enumerate(args)))
  if rows == 1:
    raise ValueError("The batch has 1 row, which cannot be split: give 2 or more.")
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
  runs = Runs(checked, call, {**given, **by_position}, sizes)
  if split.batch_argnums is None and (finding := diagnose.unsplit(runs)):
    return SplitReport(*finding[:3])
  return (_shares_keys(given_as) if split.rng_argnums is None else None) or runs


def _options(loss_fn: LossFn, options: Kwargs) -> Kwargs:
  """All options, checked."""
  if of_step := options.keys() & {"mesh", "data_axis", "reduce_gradients", "donate", "noise_scale"}:
    raise TypeError(
      f"check_split runs the loss on one device, and has no {min(of_step)}=: leave it out, or have"
      " a step check its own loss, step.check(params, opt_state, batch)."
    )
  plain = inspect.unwrap(microbatch_value_and_grad)
  if why := _validate.hint_on(plain, (loss_fn,), options, OTHER_NAMES):
    raise TypeError(f"check_split: {why}")
  bound = _OPTIONS.bind(loss_fn, **options)
  bound.apply_defaults()
  if (axis := bound.arguments["axis_name"]) is not None:
    raise ValueError(f"check_split runs on one device: leave axis_name={axis!r} out.")
  return {k: x for k, x in bound.arguments.items() if k not in ("fun", "accumulator_dtype")}


def check_concrete(loss_fn: LossFn, given: Iterable[tuple[Slot, Tree]]) -> None:
  """Checks that the arguments of a loss are arrays that have values."""
  for slot, tree in given:
    argument = name_of(loss_fn, slot).replace("...", f"argument {slot}")
    for name, leaf in _validate.named_leaves(argument, tree):
      if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        what = "traced" if isinstance(leaf, jax.core.Tracer) else "a ShapeDtypeStruct"
        raise TypeError(f"{name} is {what}: check outside jax.jit, with arrays.")
  if isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError("This is traced, and what it runs would be: check outside jax.jit.")


def _shares_keys(given_as: Roles) -> SplitReport | None:
  """The report where the defaults refuse the call for a key that all microbatches would share."""
  try:
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


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
  """Settings under which only the loss makes a difference, and may be NaN."""
  with jax.default_matmul_precision("highest"), jax.debug_nans(False), np.errstate(all="ignore"):
    yield


@_exactly()
def report_of(runs: Runs) -> SplitReport:
  """What the runs tell."""
  one = runs.sizes == [runs.rows]
  if one and fingerprint(runs.traced()) == fingerprint(runs.traced(is_whole=False)):
    raise ValueError(
      "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
      " does: give 2 or more."
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
  # What an odd batch shows counts if some fix explains it: no length is -1.
  runs.outcomes = [tried for tried in outcomes if not tried.call.is_odd] or outcomes
  finding = diagnose.explain(runs)
  if finding.how:
    likely, runs.outcomes = runs.outcomes, outcomes
    again = diagnose.explain(runs) if runs.wrong(finding.how) else finding
    finding, runs.outcomes = (again, outcomes) if again.how else (finding, likely)
  ran = [tried.call.name for tried in runs.outcomes]
  left_out = [call.name for call in runs.calls if call.name not in ran]
  report = functools.partial(report, batches=tuple(ran), left_out=tuple(left_out))
  split = f"microbatches of {{}} rows, of {runs.rows}"
  for tried in runs.outcomes:
    for parts in tried.splits:
      leaves = runs.compare(how, tried.whole, how.join(parts))
      if not all(leaf.agrees for leaf in leaves.values()):
        where = f"{tried.call.name}; {split.format(len(parts[0].rows))}"
        return report(*finding[:3], where, tuple(leaves.values()))
  leaves, where = runs.as_called(), f"as given; {split.format(runs.sizes[0])}"
  differ = not all(leaf.agrees for leaf in leaves.values())
  found = ("unknown", words.AS_CALLED, words.PLAIN) if differ else ("ok", "", "")
  return report(*found, where, tuple(leaves.values()))
