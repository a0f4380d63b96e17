"""`check_split`, and `step.check`: whether a loss can be split, and if not, why."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _spellings, _validate
from optax_accum._arithmetic.across_devices import names_of
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf, Tree
from optax_accum._check_split import diagnose, words
from optax_accum._check_split.devices import Devices, on, one_device
from optax_accum._check_split.probes import Call, LEVELS
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import LossFn, Runs
from optax_accum._mesh.loss import LossWithoutMesh, PlacedLoss
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.call import checked_rows
from optax_accum._microbatches.options import (
  names_or_positions,
  Slot,
  Split,
)
from optax_accum._microbatches.roles import by_slot, RolesOf, Signature
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

_DRAWING = ("rng", "carry")  # the roles of arguments whose keys draw one number
_ROWS = 4  # of a step at a time: more take longer, and seldom tell more
_SIGNATURE = inspect.signature(microbatch_value_and_grad)
_OF_STEPS = dict.fromkeys(
  ("mesh", "data_axis", "reduce_gradients", "donate", "noise_scale"),
  "The check runs the loss on one device: leave it out, or have a step check its own loss,"
  " step.check(params, opt_state, batch).",
)


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
    ``coupled``      rows depend on each other, or terms have several denominators
    ``random``       equal arguments give unequal losses, or microbatches share noise
    ``overwritten``  the "gradient" of a leaf is its new value, as for scales of fp8 layers
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
  _check_concrete(loss_fn, enumerate(args))
  try:
    runs = _runs_of(loss_fn, args, {}, options)
  except TypeError as error:
    unknown = options.keys() - _SIGNATURE.parameters.keys()
    if not unknown or unknown & inspect.signature(loss_fn).parameters.keys():
      error.add_note(
        "What the loss takes comes by position: check_split(loss_fn, params, batch)."
      )
    raise
  return _report_of(runs)


def _runs_of(
  loss_fn: LossFn,
  args: Args,
  kwargs: Kwargs,
  given: Kwargs,
  drawing: Sequence[str] = _DRAWING,
  names: Mapping[Slot, str] | None = None,
) -> Runs:
  """What is to run. For keys in arguments of the roles `drawing`, every draw is the same number."""
  asked = _asked(loss_fn, given)
  one = {"num_microbatches": 1, "microbatch_size": None, "names": names or {}}
  split = Split.of({**asked, **one}, default_argnum=1)
  argnums = names_or_positions("argnums", asked["argnums"], int)
  roles_of = RolesOf(loss_fn, split, argnums)
  roles = roles_of(args, kwargs)
  for i in roles.differentiated:
    parameters.check_differentiable(split.name(i), args[i])
  rows = checked_rows(split, roles, by_slot(args, kwargs))
  of = split.name(*roles.batch)
  if rows == 1:
    raise ValueError(
      f"The batch ({of}) has 1 row, which cannot be split: give 2 or more."
    )
  call = Call.of(roles_of.signature, args, kwargs, roles)
  for role in drawing:
    call = call.with_noise(role, LEVELS[0])
  sizes = _sizes_of(
    asked["num_microbatches"], asked["microbatch_size"], rows, of
  )
  return Runs(loss_fn, call, asked, sizes, rows)


def _asked(loss_fn: LossFn, given: Kwargs) -> Kwargs:
  """All options, checked."""
  plain = inspect.unwrap(microbatch_value_and_grad)
  if why := _spellings.hint_on(plain, (loss_fn,), given, _OF_STEPS):
    raise TypeError(f"check_split: {why}")
  bound = _SIGNATURE.bind(loss_fn, **given)
  bound.apply_defaults()
  if (axis := bound.arguments["axis_name"]) is not None:
    raise ValueError(
      f"check_split runs on one device: leave axis_name={axis!r} out."
    )
  return {**bound.arguments, "accumulator_dtype": None}


def _check_concrete(
  loss_fn: LossFn, given: Iterable[tuple[Slot, Tree]]
) -> None:
  """Checks that the arguments of a loss are arrays that have values."""
  signature = Signature(loss_fn)
  for slot, tree in given:
    argument = signature.name(slot).replace("...", f"argument {slot}")
    for name, leaf in _validate.named_leaves(argument, tree):
      if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        what = (
          "traced"
          if isinstance(leaf, jax.core.Tracer)
          else "a ShapeDtypeStruct"
        )
        raise TypeError(
          f"{name} is {what}: check outside jax.jit, with arrays."
        )
  if isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(
      "This is traced, and what it runs would be: check outside jax.jit."
    )


def _sizes_of(
  number: int | None, size: int | None, rows: int, of: str = "the batch"
) -> Sequence[int]:
  """The rows of a microbatch in each split to run: as asked for, and a ragged one."""
  if number is None and size is None:
    number = next(n for n in range(2, rows + 1) if rows % n == 0)
  Split.of({"num_microbatches": number, "microbatch_size": size})
  given = cut.microbatch_rows(rows, number, size, of)
  if number is None and given == rows:
    raise ValueError(
      f"microbatch_size={size} does not split {rows} rows: give less."
    )
  ragged = -(-2 * rows // 3)
  # With one microbatch, what runs in microbatches is within the loss.
  return (
    [given, ragged] if number not in (None, 1) and ragged < rows else [given]
  )


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
def _report_of(runs: Runs) -> SplitReport:
  """What the runs tell."""
  if finding := diagnose.refused(runs):
    return SplitReport(*finding[:3])
  devices = runs.devices
  splits_nothing = runs.sizes == [runs.rows] and not devices.sends
  if splits_nothing and runs.fingerprint() == runs.fingerprint(is_whole=False):
    raise ValueError(
      "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
      " does: give 2 or more."
    )
  how = runs.how()  # runs the whole batch, and notes where the loss raises
  notes = runs.facts.not_checked + (words.NOT_ALONE,) * (not devices.is_alone)
  report = functools.partial(SplitReport, not_checked=notes)
  if not runs.given.is_finite:
    return report("unknown", words.NOT_FINITE, words.OTHER_BATCH)
  try:
    outcomes = runs.outcomes
  except Exception:
    if finding := diagnose.unsplit(runs) or diagnose.groups(runs):
      return report(*finding[:3])
    raise
  if not outcomes:
    return report("unknown", words.ALL_ZERO, words.OTHER_BATCH)
  finding = _of_likely_batches(runs)
  ran = tuple(tried.call.name for tried in runs.outcomes)
  left_out = tuple(call.name for call in runs.calls if call.name not in ran)
  differ = lambda leaves: not all(leaf.agrees for leaf in leaves)  # noqa: E731
  if finding.verdict != "ok":
    compared = list(runs.comparisons(how))
    where, leaves = next((x for x in compared if differ(x[1])), compared[0])
    if devices.sends:
      finding = finding._replace(reason=f"{finding.reason}\n{words.SENDS}")
  else:
    as_called = list(runs.as_called())
    if not as_called:
      return report("unknown", words.ALL_ZERO, words.OTHER_BATCH)
    where, leaves = next((x for x in as_called if differ(x[1])), as_called[0])
    if differ(leaves):
      why = (
        (words.OVER_MESH, words.OWN_MEAN)
        if devices.loss
        else (words.AS_CALLED, words.PLAIN)
      )
      finding = diagnose.Finding("unknown", *why)
  return report(*finding[:3], where, tuple(leaves), ran, left_out)


def _of_likely_batches(runs: Runs) -> diagnose.Finding:
  """What is wrong. What an odd batch shows counts if some fix explains it: no length is -1."""
  finding, outcomes = diagnose.explain(runs), runs.outcomes
  for most in (1, 0):
    likely = [tried for tried in outcomes if tried.call.oddity <= most]
    if finding.how or not likely or len(likely) == len(runs.outcomes):
      continue
    before, runs.outcomes = runs.outcomes, likely
    without = diagnose.explain(runs)
    if most == 0 and without.verdict == "ok":  # what no row has may come
      runs.outcomes = before
    else:
      finding = without
  return finding


def check_step(
  loss: LossWithoutMesh | PlacedLoss,
  args: Args,
  kwargs: Kwargs,
  drawing: Sequence[str] = _DRAWING,
  fixes: Mapping[str, str] | None = None,
) -> SplitReport:
  """`step.check`: the report on such a call of the loss of a step.

  `drawing` is as in `_runs_of`. `fixes` says of a verdict (of "coupled": of batch normalization)
  what to write instead, where the loss is not called as `check_split` says.
  """
  local, split = loss.local, loss.local.split
  _check_concrete(local.fun, [*enumerate(args), *kwargs.items()])
  over_mesh = loss if isinstance(loss, PlacedLoss) else None
  axes = over_mesh.parallel.axes if over_mesh else names_of(split.axis_name)
  args, kwargs = jax.tree.map(_on_host, (args, kwargs))
  options = {
    k: getattr(split, k) for k in _SIGNATURE.parameters if hasattr(split, k)
  }
  options |= {**local.asked, "has_aux": local.has_aux}
  options |= dict.fromkeys(("num_microbatches", "microbatch_size", "axis_name"))
  devices = Devices(axes, over_mesh)
  with on(one_device(devices.mesh, axes)):
    runs = _runs_of(local.fun, args, kwargs, options, drawing, split.names)
    if axes and not diagnose.refused(runs):
      devices = devices._replace(sends=_sends(loss, devices, args, kwargs))
    if (
      split.num_microbatches == 1 and not axes
    ):  # what splits is within the loss
      report = _report_of(runs.resized([runs.rows], runs.rows))
    else:
      report = _on_few_rows(runs, split, devices)
  notes = report.not_checked + (words.ONE_DEVICE,) * bool(
    axes and not over_mesh
  )
  fix, other = report.fix, (fixes or {}).get(report.verdict)
  if other:
    fix = (
      fix.replace(words.BATCH_NORM, other)
      if report.verdict == "coupled"
      else other
    )
  return dataclasses.replace(report, fix=fix, not_checked=notes)


def _sends(
  loss: LossWithoutMesh | PlacedLoss,
  devices: Devices,
  args: Args,
  kwargs: Kwargs,
) -> bool:
  """Whether devices exchange something in the loss of a step over a mesh. Raises what that does."""
  told: list[bool] = []
  local = dataclasses.replace(loss.local, tell=told.append)
  own = loss._replace(local=local)
  run = lambda args, kwargs: own.value_and_grad(None, *args, **kwargs)  # noqa: E731
  with on(devices.mesh):
    jax.eval_shape(run if devices.mesh else devices.on_one(run), args, kwargs)
  return any(told) and devices.mesh is not None


def _on_few_rows(runs: Runs, split: Split, devices: Devices) -> SplitReport:
  """The report on few rows, or on all where those tell nothing."""
  rows, loss, count = runs.rows, devices.loss, 1
  if loss:
    count, split = loss.parallel.devices, loss.parallel.local_split(split, rows)
  own = cut.microbatch_rows(
    rows // count, split.num_microbatches, split.microbatch_size
  )
  halves = 1 + (own * count < rows)
  each = count * halves if loss else 1
  some = each * max(1, min(rows, _ROWS) // each)
  # Equal parts, unless the step may have a smaller one: each size is a program to compile.
  sizes = _sizes_of(None, None, some)[: 1 + (split.microbatch_size is not None)]
  few, full = (
    devices._replace(size=size) for size in (some // halves, own * count)
  )
  tries = [
    (sizes, some, few),
    ([own] if own < rows else runs.sizes, rows, full),
  ]
  if devices.sends:
    tries = [([x.size], n, x) for _, n, x in tries]
    tries += [
      (size, n, x._replace(is_alone=False))
      for size, n, x in tries
      if halves > 1
    ]
  for sizes, n, where in tries[:-1]:
    with contextlib.suppress(
      Exception
    ):  # what a loss raises on so few rows, it may not on all
      report = _report_of(runs.resized(sizes, n, where))
      if report.leaves:
        note = (words.SOME_ROWS.format(some=n, rows=rows),) * (n < rows)
        return dataclasses.replace(
          report, not_checked=report.not_checked + note
        )
  return _report_of(runs.resized(*tries[-1]))


def _on_host(x: Leaf) -> Leaf:
  if not isinstance(x, jax.Array):
    return x
  if is_key(x):
    data = jnp.asarray(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return np.asarray(
    jnp.copy(x)
  )  # of `x` itself NumPy would have a view, and it be donated no more
