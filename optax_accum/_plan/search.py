"""`plan_microbatches`: the largest microbatch that fits, found by compiling a few sizes."""

import bisect
from collections.abc import Callable, Mapping, Sequence
import itertools
import operator
from typing import Any, TypeAlias

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Leaves
from optax_accum._plan import programs, sizes
from optax_accum._plan.programs import BuildStep, PlanCandidate
from optax_accum._plan.report import MicrobatchPlan

# The arguments of a call of the step, or a function of the choice that returns them.
GivenArgs: TypeAlias = Args | Leaves | Callable[..., Args]


def plan_microbatches(
  build_step: BuildStep,
  args: GivenArgs,
  *,
  batch_size: int,
  memory_limit: int | str | None = None,
  choices: Mapping[str, Sequence[Any]] | None = None,
) -> MicrobatchPlan:
  """Finds the largest microbatch that fits in memory, by compiling a few sizes. Nothing runs.

  Sizes are bisected by the memory that XLA reports: for 12 divisors the step is compiled three or
  four times, and each time a line on standard error says so. Plan for the device that you train on:
  XLA for CPU may undo rematerialization outside of scans. The guide "Choosing the microbatch" also
  plans for absent TPUs.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean(jnp.tanh(jnp.tanh(batch @ params) @ params) ** 2)
    >>> tx = optax.sgd(0.1)
    >>> def build_step(num_microbatches, remat=False):
    ...   fun = jax.checkpoint(loss_fn) if remat else loss_fn
    ...   return optax_accum.make_train_step(fun, tx, num_microbatches=num_microbatches)
    >>> params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> args = params, tx.init(params), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    >>> plan = optax_accum.plan_microbatches(
    ...   build_step, args, batch_size=4096, memory_limit="2MiB", choices={"remat": [False, True]})
    >>> step = build_step(plan.num_microbatches, **plan.choice)
    >>> plan.num_microbatches * plan.microbatch_size, plan.peak_bytes <= 2 * 2**20
    (4096, True)

  Args:
    build_step: ``build_step(num_microbatches, **choice)`` returns a step of this library, or a
      function wrapped by `jax.jit`.
    args: The arguments of a call of the step, as arrays or as `jax.ShapeDtypeStruct`, with their
      shardings if they have any. They are not donated. Or a function: ``args(**choice)`` returns
      them, which tries ways to shard: ``choices={"shard": ["whole", "layers"]}``.
    batch_size: The rows of the batch in `args`, on all devices together.
    memory_limit: The memory of one device, in bytes or as a string such as ``"16GiB"`` or ``"80
      GB"``, without what other arrays take. Default: the device's ``memory_stats()["bytes_limit"]``
      (on a GPU 75% of its memory, or XLA_PYTHON_CLIENT_MEM_FRACTION), less 5% for fragmentation.
    choices: Further options of `build_step`, each with a list of values in the order of preference.
      Combinations are tried until a step fits; of several options the last is the first to change.

  Returns:
    A `MicrobatchPlan`. Its microbatch is the largest that fits, which is not always the fastest, of
    the first choice of which any fits.

  Raises:
    ValueError: Not even one row fits (the message has all that was compiled); `memory_limit` is not
      a size, or the device does not report its memory; the batch in `args` does not have
      `batch_size` rows.
    Exception: Any error of compiling.
  """
  rows = _validate.positive_int("batch_size", batch_size)
  choices = choices or {}
  found: list[PlanCandidate] = []
  for values in itertools.product(*choices.values()):
    choice = dict(zip(choices, values, strict=True))
    given = args
    if callable(given):
      given = given(**choice)
    given = tuple(given)
    if memory_limit is None:
      limit = programs.memory_of_a_device(given)
    else:
      limit = sizes.parse(memory_limit)
    possible = programs.possible_sizes(build_step(1, **choice), given, rows)

    def compile_size(size, choice=choice, given=given, limit=limit):
      candidate = PlanCandidate(rows // size, size, choice)
      return programs.compiled(build_step, given, candidate, limit)

    found += search(possible, rows, limit, compile_size)
    if any(c.fits for c in found):
      break
  found.sort(key=operator.attrgetter("fits", "microbatch_size"), reverse=True)
  plan = MicrobatchPlan(rows, limit, tuple(found))
  if not found[0].fits:
    raise ValueError(
      "Nothing fits: give a larger memory_limit, shard parameters or optimizer state over more"
      " devices, use donate=True, in_place=True or rematerialization, or use a smaller model.\n"
      f"{plan}"
    )
  return plan


def search(
  possible: Sequence[int],
  whole: int,
  limit: int,
  compile_size: Callable[[int], PlanCandidate],
) -> list[PlanCandidate]:
  """Bisects the possible microbatches, in rows, for the largest that fits: all that it compiled.

  `possible` has the smallest size first; on TPUs one row may need more memory than two. The `whole`
  batch has no scan and no accumulators, so it may fit where half of it does not. It is not compiled
  if several scans show that its activations alone exceed the limit.
  """
  known: dict[int, PlanCandidate] = {}  # by rows

  def too_large(size):
    known[size] = compile_size(size)
    return not known[size].fits

  bisect.bisect_left(possible, True, key=too_large)
  if whole == possible[-1] and whole not in known:
    # XLA writes products of one row in another way, so the smallest size says little of others.
    scans = [
      c
      for size, c in sorted(known.items())
      if size > possible[0] and c.peak_bytes
    ]
    if _needs(whole, scans) <= limit:
      too_large(whole)
  return [*known.values()]


def _needs(whole: int, scans: Sequence[PlanCandidate]) -> float:
  """What the whole batch needs at least, by the line through what several scans need; else 0."""
  if len(scans) < 2:
    return 0
  first = scans[0]
  last = scans[-1]
  rise = last.peak_bytes - first.peak_bytes
  slope = rise / (last.microbatch_size - first.microbatch_size)
  return last.fixed_bytes + max(slope, 0) * whole
