"""`step.check`: `check_split` with a step's own loss and options, on a few rows of its batch."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf, Tree
from optax_accum._check_split import words
from optax_accum._check_split.check_split import check_concrete, report_of, runs_of, sizes_of
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import LossFn, Runs
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._microbatches import cut
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import name_of, Slot

_ROWS = 4  # at a time: more take longer, and seldom tell more
_NOTES = {
  "unbound axis name": words.NO_COLLECTIVES,
  "RESOURCE_EXHAUSTED": words.TOO_LARGE,
  "context mesh": words.OTHER_MESH,
}


def check_step(
  loss: LocalLoss,
  parallel: DataParallel | None,
  args: Args,
  kwargs: Kwargs,
  drawing: Sequence[str] = ("rng", "carry"),
  fixes: Mapping[str, str] | None = None,
) -> SplitReport:
  """The report on such a call of the loss that a step has on one of its devices.

  `drawing` is as in `runs_of`. `fixes` says of a verdict (of "coupled": of batch normalization)
  what to write instead, where the loss is not called as `check_split` says.
  """
  check_concrete(loss.fun, [*enumerate(args), *kwargs.items()])
  args, kwargs = jax.tree.map(_on_host, (args, kwargs))
  fun, args, options = _by_position(loss, args, kwargs)
  names = list(inspect.signature(fun).parameters)
  several = parallel is not None or loss.split.axis_name is not None
  with _one_device(parallel.mesh if parallel else None), _explained():
    runs = runs_of(fun, args, options, drawing)
    if isinstance(runs, SplitReport):
      report = runs
    elif loss.split.num_microbatches == 1 and not several:
      report = report_of(_some(runs, runs.rows, [runs.rows]))  # what splits is within the loss
    else:
      report = _report(runs, loss, parallel)
  notes = (*report.not_checked, words.ONE_DEVICE) if several else report.not_checked
  reason, fix = (
    words.by_name(x, len(args) - len(kwargs), names) for x in (report.reason, report.fix)
  )
  if other := (fixes or {}).get(report.verdict):
    fix = fix.replace(words.BATCH_NORM, other) if report.verdict == "coupled" else other
  return dataclasses.replace(report, reason=reason, fix=fix, not_checked=notes)


def _report(runs: Runs, loss: LocalLoss, parallel: DataParallel | None) -> SplitReport:
  """The report on few rows, or on all where those tell nothing."""
  local = parallel.local_split(loss.split, runs.rows) if parallel else loss.split
  each = runs.rows // (parallel.devices if parallel else 1)
  own = cut.microbatch_rows(each, local.num_microbatches, local.microbatch_size)
  some = min(runs.rows, _ROWS)
  # Equal parts, unless the step may have a smaller one: each size is a program to compile.
  sizes = sizes_of(None, None, some)[: 1 + (loss.split.microbatch_size is not None)]
  # Other rows, in the programs of the first, refute what is a weight by chance.
  starts = np.unique(np.linspace(0, runs.rows - some, 8).astype(int))[1:]
  few, take = _some(runs, some, sizes), runs.call.take
  few.others = [take(np.arange(i, i + some))._replace(name=f"rows from {i} on") for i in starts]
  with contextlib.suppress(Exception):  # what a loss raises on so few rows, it may not on all
    report = report_of(few)
    if report.leaves:
      note = (words.SOME_ROWS.format(some=some, rows=runs.rows),) * (some < runs.rows)
      return dataclasses.replace(report, not_checked=report.not_checked + note)
  return report_of(_some(runs, runs.rows, [own] if own < runs.rows else runs.sizes))


def _some(runs: Runs, rows: int, sizes: Sequence[int]) -> Runs:
  return Runs(runs.fun, runs.call.take(np.arange(rows)), runs.options, sizes)


def _by_position(loss: LocalLoss, args: Args, kwargs: Kwargs) -> tuple[LossFn, Args, Kwargs]:
  """A loss with all arguments by position, these, and the options of the step for it."""
  fun, split, count = loss.fun, loss.split, len(args)
  roles = split.roles(fun, args, kwargs, (0,))
  names = list(kwargs)
  if names:  # in the order of the loss, whose second argument is the batch
    order = list(inspect.signature(fun).parameters)
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
  position: dict[Slot, int] = {slot: i for i, slot in enumerate([*range(count), *names])}

  @functools.wraps(fun)
  def by_position(*values: Tree) -> Tree:
    return fun(*values[:count], **dict(zip(names, values[count:], strict=True)))

  called = [name_of(fun, i).replace("...", f"batch_{i}") for i in range(count)]
  kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
  parameters = [inspect.Parameter(name, kind) for name in (*called, *names)]
  vars(by_position)["__signature__"] = inspect.Signature(parameters)

  def weight_fn(*batch: Tree) -> Any:
    assert split.weight_fn
    given = dict(zip(roles.batch, batch, strict=True))
    of_names = {slot: x for slot, x in given.items() if isinstance(slot, str)}
    return split.weight_fn(*(x for slot, x in given.items() if slot not in of_names), **of_names)

  says_batch = split.batch_argnums is not None or split.batch_argnames
  says_keys = split.rng_argnums is not None or split.rng_argnames
  options = {
    **loss.asked,
    "has_aux": loss.has_aux,
    "batch_argnums": tuple(position[slot] for slot in roles.batch) if says_batch else None,
    "batch_axis": tuple(roles.batch.values()),
    "weight_fn": split.weight_fn and weight_fn,
    "rng_argnums": tuple(position[slot] for slot in roles.rng) if says_keys else None,
    "carry_argnum": position[roles.carry[0]] if roles.carry else None,
    **{k: getattr(split, k) for k in ("skip_nonfinite", "skip_empty", "in_place", "unroll")},
  }
  return by_position, (*args, *(kwargs[name] for name in names)), options


def _on_host(x: Leaf) -> Leaf:
  if not isinstance(x, jax.Array):
    return x
  if not (x.is_fully_addressable or x.is_fully_replicated):
    raise ValueError(
      f"An array of shape {x.shape} is spread over several processes, and step.check runs the loss"
      " on one device: check in one process, with a small model and a few rows."
    )
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


@contextlib.contextmanager
def _explained() -> Iterator[None]:
  """Says of two errors that they come of running on one device."""
  try:
    yield
  except Exception as error:
    for note in [note for text, note in _NOTES.items() if text in str(error)]:
      error.add_note(note)
    raise
