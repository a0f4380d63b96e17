"""`step.check`: `check_split` with a step's own loss and options, on a few rows of its batch."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf
from optax_accum._check_split import check_split, words
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import Runs
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._microbatches import cut
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import Split

_ROWS = 4  # at a time: more take longer, and seldom tell more


def check_step(
  loss: LocalLoss,
  parallel: DataParallel | None,
  args: Args,
  kwargs: Kwargs,
  drawing: Sequence[str] = check_split.DRAWING,
  fixes: Mapping[str, str] | None = None,
) -> SplitReport:
  """The report on such a call of the loss that a step has on one of its devices.

  `drawing` is as in `runs_of`. `fixes` says of a verdict (of "coupled": of batch normalization)
  what to write instead, where the loss is not called as `check_split` says.
  """
  check_split.check_concrete(loss.fun, [*enumerate(args), *kwargs.items()])
  args, kwargs = jax.tree.map(_on_host, (args, kwargs))
  split = loss.split
  options = {k: getattr(split, k) for k in check_split.OPTIONS.parameters if hasattr(split, k)}
  options |= {**loss.asked, "has_aux": loss.has_aux}
  options |= dict.fromkeys(("num_microbatches", "microbatch_size", "axis_name"))
  several = parallel is not None or split.axis_name is not None
  with _one_device(parallel.mesh if parallel else None):
    runs = check_split.runs_of(loss.fun, args, kwargs, options, drawing)
    if split.num_microbatches == 1 and not several:  # what splits is within the loss
      report = check_split.report_of(runs.some([runs.rows], runs.rows))
    else:
      report = _report(runs, split, parallel)
  notes = (*report.not_checked, words.ONE_DEVICE) if several else report.not_checked
  fix, other = report.fix, (fixes or {}).get(report.verdict)
  if other:
    fix = fix.replace(words.BATCH_NORM, other) if report.verdict == "coupled" else other
  return dataclasses.replace(report, fix=fix, not_checked=notes)


def _report(runs: Runs, split: Split, parallel: DataParallel | None) -> SplitReport:
  """The report on few rows, or on all where those tell nothing."""
  local = parallel.local_split(split, runs.rows) if parallel else split
  each = runs.rows // (parallel.devices if parallel else 1)
  own = cut.microbatch_rows(each, local.num_microbatches, local.microbatch_size)
  some = min(runs.rows, _ROWS)
  # Equal parts, unless the step may have a smaller one: each size is a program to compile.
  sizes = check_split.sizes_of(None, None, some)[: 1 + (split.microbatch_size is not None)]
  with contextlib.suppress(Exception):  # what a loss raises on so few rows, it may not on all
    report = check_split.report_of(runs.some(sizes, some))
    if report.leaves:
      note = (words.SOME_ROWS.format(some=some, rows=runs.rows),) * (some < runs.rows)
      return dataclasses.replace(report, not_checked=report.not_checked + note)
  return check_split.report_of(runs.some([own] if own < runs.rows else runs.sizes, runs.rows))


def _on_host(x: Leaf) -> Leaf:
  if not isinstance(x, jax.Array):
    return x
  if is_key(x):
    data = jnp.asarray(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return np.asarray(jnp.copy(x))  # of `x` itself NumPy would have a view, and it be donated no more


def _one_device(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
  """A mesh of one device with these axes, which constraints in the loss may name."""
  mesh = mesh or jax.sharding.get_mesh()
  if mesh.empty:
    return contextlib.nullcontext()
  device = np.reshape(mesh.local_devices[:1], (1,) * len(mesh.axis_names))
  return jax.set_mesh(Mesh(device, mesh.axis_names, axis_types=mesh.axis_types))
