"""`plan_microbatches`: the largest microbatch that fits, found by compiling a few sizes."""

import bisect
from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any

from optax_accum import _spellings, _validate
from optax_accum._plan.builder import Builder, BuildStep, GivenArgs
from optax_accum._plan.candidate import PlanCandidate
from optax_accum._plan.report import does_not_fit, MicrobatchPlan


@_spellings.hinted(
  "The arguments of the step are one tuple:"
  " plan_microbatches(build_step, (params, opt_state, batch), batch_size=1024)."
)
def plan_microbatches(
  build_step: BuildStep,
  args: GivenArgs,
  *,
  batch_size: int,
  memory_limit: int | str | None = None,
  choices: Mapping[str, Sequence[Any]] | None = None,
) -> MicrobatchPlan:
  """Finds the largest microbatch that fits in memory, by compiling a few sizes. Nothing runs.

  Sizes are bisected by the memory that XLA reports: 12 divisors take three to five programs per
  choice. Plan for the device that you train on: XLA for CPU may undo rematerialization outside of
  scans. The guide "Choosing the microbatch" also plans for absent TPUs.

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
      function wrapped by `jax.jit`. If it has a parameter ``microbatch_size``, it gets that
      instead, and sizes that do not divide the batch are tried too.
    args: The arguments of a call of the step, as arrays or as `jax.ShapeDtypeStruct`, with their
      shardings if they have any. They are not donated. Or a function: ``args(**choice)`` returns
      them, which compares ways to shard: ``choices={"shard": ["whole", "layers"]}``.
    batch_size: The rows of the batch in `args`, on all devices together; or on one device, for a
      function of your own that splits these inside `shard_map`.
    memory_limit: The memory of one device, in bytes or as a string such as ``"16GiB"`` or ``"80
      GB"``, without what other arrays take. Default: the device's ``memory_stats()["bytes_limit"]``
      (on a GPU 75% of its memory, or XLA_PYTHON_CLIENT_MEM_FRACTION), less 5% for fragmentation.
    choices: Further options of `build_step`, each with a list of values, in all combinations.

  Returns:
    A `MicrobatchPlan`. Its microbatch is the largest that fits, which is not always the fastest.
    Its ``choice`` has the fewest operations of those that fit; of choices that are within 1% of
    that, it sends the fewest bytes; of these (within 1%), it has the fewest microbatches.

  Raises:
    ValueError: Not even one row fits (the message says what takes the memory); `memory_limit` is
      not a size, or the device does not report its memory; two sizes make the same program; the
      batch in `args` does not have `batch_size` rows, in every choice.
    TypeError: An argument has the wrong type, `build_step` returns something without ``lower``, or
      a function `args` does not take the options in `choices`.
    Exception: Any error of compiling, with a note that says which step it was.
  """
  rows = _validate.positive_int("batch_size", batch_size)
  if hasattr(build_step, "lower"):
    raise TypeError(
      f"build_step={build_step!r:.80} is a step; give a function build_step(num_microbatches,"
      " **choice) that returns one."
    )
  if choices is None:
    choices = {}
  if not isinstance(choices, Mapping) or not all(
    map(_is_list, choices.values())
  ):
    raise TypeError(
      f"choices={choices!r} must be a dict from options of build_step to lists of values to try,"
      ' such as {"remat": [False, True]}.'
    )
  builders = []
  for values in itertools.product(*choices.values()):
    choice = dict(zip(choices, values, strict=True))
    builders.append(Builder(build_step, args, rows, choice))
  limit = builders[0].limit(memory_limit)
  # An error in the batch of any choice comes before anything is compiled.
  possible = [builder.sizes() for builder in builders]

  import tqdm  # training does without

  found = []
  with tqdm.tqdm(
    desc="compiling", unit="program", leave=False, disable=None
  ) as bar:
    for builder, (even, uneven) in zip(builders, possible, strict=True):
      compile_size = functools.partial(builder.compile, limit=limit, bar=bar)
      found.append(search(even, rows, limit, compile_size, uneven))
  plan = MicrobatchPlan.of(found, rows, limit)
  if not plan.candidates[0].fits:
    raise ValueError(does_not_fit(plan))
  return plan


def _is_list(values: object) -> bool:
  return isinstance(values, (list, tuple)) and len(values) > 0


def search(
  possible: Sequence[int],
  whole: int,
  limit: int,
  compile_size: Callable[[int], PlanCandidate],
  uneven: Sequence[int] = (),
) -> list[PlanCandidate]:
  """Bisects the possible microbatches, in rows, for the largest that fits: all that it compiled.

  `possible` has the smallest size first; on TPUs one row may need more memory than two. The `whole`
  batch has no scan and no accumulators, so it may fit where half of it does not. It is not compiled
  if several scans show that its activations alone exceed the limit.
  The `uneven` sizes are bisected last, between the answer of `possible` and the next larger one.
  """
  known: dict[int, PlanCandidate] = {}  # by rows

  def too_large(size):
    known[size] = compile_size(size)
    return not known[size].fits

  bisect.bisect_left(possible, True, key=too_large)
  if len(known) < min(len(possible), 2):  # so that two programs are compared
    too_large(possible[0])
  if whole == possible[-1] and whole not in known:
    # XLA writes products of one row in another way, so the smallest size says little of others.
    scans = [
      c
      for size, c in sorted(known.items())
      if size > possible[0] and c.analysed
    ]
    if _needs(whole, scans) <= limit:
      too_large(whole)
  fits = max((size for size, c in known.items() if c.fits), default=0)
  larger = min((size for size in known if size > fits), default=whole + 1)
  between = [size for size in uneven if fits < size < larger]
  bisect.bisect_left(between, True, key=too_large)
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
