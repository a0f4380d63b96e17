"""`check_split`: whether a loss can be split, and if not, why."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import inspect
import operator

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic.trees import Tree
from optax_accum._check_split import diagnose, words
from optax_accum._check_split.call import Call
from optax_accum._check_split.devices import Devices
from optax_accum._check_split.evidence import Evidence, How
from optax_accum._check_split.probes import LEVELS
from optax_accum._check_split.programs import Programs
from optax_accum._check_split.report import SplitReport
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import by_slot, Signature
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad
from optax_accum._microbatches.whole import whole_batches

# The roles of arguments whose keys draw one number.
_DRAWING = "rng", "carry", "held"
_SIGNATURE = inspect.signature(microbatch_value_and_grad)
_ABSTRACT = {
  jax.core.Tracer: "traced",
  jax.ShapeDtypeStruct: "a ShapeDtypeStruct",
}


def check_split(
  loss_fn: Callable[..., Tree], /, *args: Tree, **options: object
) -> SplitReport:
  """Tests whether a loss is the same in microbatches; if not, says why and how to fix it.

  Use it in a test or a notebook, with a small batch. `TrainStep.check` tests the loss of a step.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   each = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6), "mask": jnp.ones(6)}
    >>> report = optax_accum.check_split(loss_fn, jnp.array([1.0, -1.0]), batch)
    >>> report.ok, report.verdict, report.fix.splitlines()[0]
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
    ``coupled``      rows depend on each other, or terms have several denominators
    ``random``       equal arguments give unequal losses, or microbatches share noise
    ``unsplit``      an argument that has as many rows as the batch is not split
    ``unknown``      results differ for another reason: rounding in bfloat16, or devices
    ===============  ======================================================================

  Raises:
    ValueError: The batch has no arrays or one row, or nothing is split.
    TypeError: There is no such option, or arguments are traced, abstract or not differentiable.
    Exception: What the loss raises on all rows, or on each smaller number, with a note. A loss that
      runs on some numbers of rows only is "coupled".

  Calls:
    It compares loss, gradients and aux of all rows with those of the microbatches, in float32
    (float64 with x64), also with changed parameters, masks, labels and floats: a mask of ones hides
    that a loss divides by its sum. Options in a fix have been tried, except for "unsplit".
    Differences up to 1e-4 of a leaf's largest number, or 1e-6 of the largest leaf's (1e-9 and 1e-11
    in float64), pass for rounding. The carry is not compared, nor an aux under "stack", "last" or a
    function, nor what ``not_checked`` and the guide "When something is wrong" list.
  """
  if hasattr(loss_fn, "check") and hasattr(loss_fn, "eval_shape"):
    raise TypeError(
      "check_split takes a loss, and this is a step: write step.check(params, opt_state,"
      " batch), with the arguments of the step."
    )
  check_concrete(loss_fn, args, {})
  try:
    asked = _asked(loss_fn, options)
    whole = {**asked, "num_microbatches": 1, "microbatch_size": None}
    split = Split.of(whole, default_argnum=1)
    local = LocalLoss.of(
      loss_fn, asked["argnums"], asked["has_aux"], split, asked
    )
    programs = programs_of(local, args, {})
  except TypeError as error:
    unknown = options.keys() - _SIGNATURE.parameters.keys()
    if not unknown or unknown & inspect.signature(loss_fn).parameters.keys():
      error.add_note(
        "What the loss takes comes by position: check_split(loss_fn, params, batch)."
      )
    raise
  of = split.name(*programs.batch.roles.batch)
  number = asked["num_microbatches"]
  size = asked["microbatch_size"]
  sizes = sizes_of(programs.rows, number, size, of)
  return report_of(dataclasses.replace(programs, sizes=sizes, size=sizes[0]))


def _asked(loss_fn: Callable[..., Tree], options):
  """All options, as `microbatch_value_and_grad` would be given them."""
  bound = _SIGNATURE.bind(loss_fn, **options)
  bound.apply_defaults()
  axis = bound.arguments["axis_name"]
  if axis is not None:
    raise ValueError(
      f"check_split runs on one device: leave axis_name={axis!r} out."
    )
  return bound.arguments


def programs_of(
  local: LocalLoss,
  args,
  kwargs,
) -> Programs:
  """What runs a loss on such a call, which is checked."""
  split = local.split
  roles = local.roles_of(args, kwargs)
  for i in roles.differentiated:
    parameters.check_differentiable(split.name(i), args[i])
  rows = cut.batch_rows(split, roles.batch, by_slot(args, kwargs))
  if rows == 1:
    of = split.name(*roles.batch)
    raise ValueError(
      f"The batch ({of}) has 1 row, which cannot be split: give 2 or more."
    )
  call = Call.of(local.roles_of.signature, args, kwargs, roles)
  for role in _DRAWING:
    call = call.with_noise(role, LEVELS[0])
  split = dataclasses.replace(
    split,
    num_microbatches=1,
    microbatch_size=None,
    axis_name=None,
    accumulator_dtype=None,
  )
  asked = dict(local.asked)
  if asked["aux_reduction"] is None:
    # Which refuses an aux of as many rows as a microbatch: a comparison finds those.
    asked["aux_reduction"] = "mean"
  whole = LocalLoss.of(local.fun, local.argnums, local.has_aux, split, asked)
  sizes = sizes_of(rows)
  return Programs(whole, call, rows, sizes, sizes[0])


def check_concrete(loss_fn: Callable[..., Tree], args, kwargs) -> None:
  """Checks that the arguments of a loss are arrays that have values."""
  signature = Signature(loss_fn)
  for slot, tree in by_slot(args, kwargs).items():
    argument = signature.name(slot).replace("...", f"argument {slot}")
    for name, leaf in _validate.named_leaves(argument, tree):
      for kind, what in _ABSTRACT.items():
        if isinstance(leaf, kind):
          raise TypeError(
            f"{name} is {what}: check outside jax.jit, with arrays."
          )
  if isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(
      "This is traced, and what it runs would be: check outside jax.jit."
    )


def sizes_of(
  rows: int,
  number: int | None = None,
  size: int | None = None,
  of: str = "the batch",
) -> list[int]:
  """The rows of a microbatch in each split to run: as asked for, and a ragged one."""
  if number is None and size is None:
    number = next(n for n in range(2, rows + 1) if rows % n == 0)
  Split.of({"num_microbatches": number, "microbatch_size": size})  # checks
  given = cut.microbatch_rows(rows, number, size, of)
  if number is None and given == rows:
    raise ValueError(
      f"microbatch_size={size} does not split {rows} rows: give less."
    )
  ragged = -(-2 * rows // 3)
  # With one microbatch, what runs in microbatches is within the loss.
  if number in (None, 1) or ragged == rows:
    return [given]
  return [given, ragged]


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
  """Settings under which only the loss makes a difference, and may be NaN."""
  with (
    jax.default_matmul_precision("highest"),
    jax.debug_nans(False),
    np.errstate(all="ignore"),
  ):
    yield


@_exactly()
def report_of(programs: Programs) -> SplitReport:
  """What the programs tell."""
  devices = programs.devices
  finding = diagnose.refused(programs)
  if finding:
    return finding.report(not_checked=_not_sent(devices))
  _check_that_it_splits(programs)
  is_finite = programs.given.is_finite  # runs the whole batch
  not_checked = _not_checked(programs)
  if not is_finite:
    return _unknown(words.NOT_FINITE, not_checked)
  how = How.of(programs)
  try:
    evidence = Evidence.of(programs)
  except Exception:
    finding = diagnose.maybe_unsplit(programs) or diagnose.groups(programs)
    if finding:
      return finding.report(not_checked=not_checked)
    raise
  if not evidence.tried:
    return _unknown(words.ALL_ZERO, not_checked)
  finding, evidence = diagnose.explain(evidence)
  if finding.verdict == "ok":
    compared = evidence.as_called()
  else:
    compared = evidence.compared(how)
  # The first that differs, or else the first.
  shown = min(compared, key=operator.attrgetter("agrees"), default=None)
  if shown is None:
    return _unknown(words.ALL_ZERO, not_checked)
  if finding.verdict == "ok" and not shown.agrees:
    finding = diagnose.of_step(devices)
  elif finding.verdict != "ok" and devices.sends:
    finding = finding._replace(reason=f"{finding.reason}\n{words.SENDS}")
    if finding.verdict == "coupled":
      finding = finding._replace(fix=f"{words.OWN_MEAN}\n{finding.fix}")
  ran = [x.whole.call.name for x in evidence.tried]
  return finding.report(
    where=shown.where,
    leaves=tuple(shown.leaves),
    batches=tuple(ran),
    left_out=tuple(x.name for x in programs.calls if x.name not in ran),
    not_checked=not_checked,
  )


def _unknown(reason: str, not_checked) -> SplitReport:
  """The report where nothing can be compared."""
  finding = diagnose.Finding("unknown", reason, words.OTHER_BATCH)
  return finding.report(not_checked=not_checked)


def _check_that_it_splits(programs: Programs) -> None:
  """Refuses one microbatch of all rows, unless the loss runs microbatches itself."""
  if programs.devices.sends or programs.sizes != [programs.rows]:
    return
  with whole_batches():
    whole = programs.fingerprint()
  if whole == programs.fingerprint():
    raise ValueError(
      "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
      " does: give 2 or more."
    )


def _not_checked(programs: Programs) -> tuple[str, ...]:
  """What the report does not look at."""
  devices = programs.devices
  rows = programs.batch.rows
  facts = programs.facts
  notes = []
  if facts.draws:
    notes.append(words.DRAWS)
  if "bends" in facts.couplings:
    notes.append(words.BENDS)
  if not devices.is_alone:
    notes.append(words.NOT_ALONE)
  if programs.rows < rows:
    notes.append(words.SOME_ROWS.format(some=programs.rows, rows=rows))
  return (*notes, *_not_sent(devices))


def _not_sent(devices: Devices) -> tuple[str, ...]:
  """What one device does not tell, where a loss has the axes of several."""
  if devices.axes and not devices.loss:
    return (words.ONE_DEVICE,)
  return ()
