"""`step.check`: the report on the loss of a step, as the step calls it."""

from collections.abc import Sequence
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._check_split import check_split, diagnose, words
from optax_accum._check_split.devices import Devices, on, one_device
from optax_accum._check_split.programs import Programs
from optax_accum._check_split.report import SplitReport
from optax_accum._mesh.loss import Loss
from optax_accum._microbatches import cut
from optax_accum._microbatches.options import Split

_ROWS = 4  # at a time: more take longer, and seldom tell more


def check_step(
  loss: Loss,
  args,
  kwargs,
) -> SplitReport:
  """`step.check`: the report on such a call of the loss of a step."""
  local = loss.local
  split = local.split
  check_split.check_concrete(local.fun, args, kwargs)
  devices = Devices()
  if loss.parallel is not None:
    devices = Devices(loss.parallel.axes, loss)
  args, kwargs = jax.tree.map(_on_host, (args, kwargs))
  with on(one_device(devices.mesh, devices.axes)):
    programs = check_split.programs_of(local, args, kwargs)
    programs = dataclasses.replace(programs, devices=devices)
    if devices.axes and not diagnose.refused(programs):
      devices = devices._replace(sends=programs.sends())
      programs = dataclasses.replace(programs, devices=devices)
    if devices.axes or split.num_microbatches != 1:
      report = _first_that_tells(_tries(programs, split))
    else:  # what splits is within the loss
      rows = programs.rows
      whole = dataclasses.replace(programs, sizes=[rows], size=rows)
      report = check_split.report_of(whole)
  # Of "coupled": of batch normalization.
  fix = split.fixes.get(report.verdict)
  if fix is None:
    return report
  if report.verdict == "coupled":
    fix = report.fix.replace(words.BATCH_NORM, fix)
  return dataclasses.replace(report, fix=fix)


def _on_host(x):
  """A copy: of `x` itself NumPy would have a view, and it be donated no more."""
  if is_key(x):
    copy = jnp.asarray(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(copy, impl=jax.random.key_impl(x))
  if isinstance(x, jax.Array):
    return np.asarray(jnp.copy(x))
  return x


def _tries(programs: Programs, split: Split) -> list[Programs]:
  """What to try: few rows first, and at last all, where those tell nothing."""
  rows = programs.rows
  devices = programs.devices
  count = 1
  if devices.loss:
    count = devices.loss.parallel.devices
    split = devices.loss.parallel.on_device(split)
  own = cut.microbatch_rows(
    rows // count, split.num_microbatches, split.microbatch_size
  )
  size = own * count  # of a microbatch on all devices
  halves = 2 if size < rows else 1
  least = count * halves if devices.loss else 1
  some = least * max(1, min(rows, _ROWS) // least)

  def of(rows, size, sizes):
    if devices.sends:
      sizes = [size]
    return dataclasses.replace(programs, rows=rows, size=size, sizes=sizes)

  sizes = check_split.sizes_of(some)
  if split.microbatch_size is None:
    sizes = sizes[:1]  # equal parts: each size is a program to compile
  of_step = [own] if own < rows else programs.sizes
  tries = [of(some, some // halves, sizes), of(rows, size, of_step)]
  if devices.sends and halves > 1:
    # If the loss does not run on one device: beside one microbatch over all of them.
    over_all = devices._replace(is_alone=False)
    tries += [dataclasses.replace(x, devices=over_all) for x in tries]
  return tries


def _first_that_tells(tries: Sequence[Programs]) -> SplitReport:
  """The report on the first that has one with numbers, or on the last."""
  *first, last = tries
  for programs in first:
    # What a loss raises on so few rows, it may not on all.
    with contextlib.suppress(Exception):
      report = check_split.report_of(programs)
      if report.leaves:
        return report
  return check_split.report_of(last)
