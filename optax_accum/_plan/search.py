"""`plan_microbatches`: the largest microbatch that fits, found by compiling few of them."""

import bisect
from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any, TYPE_CHECKING

import jax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Leaf, Leaves, Tree
from optax_accum._plan import sizes
from optax_accum._plan.candidate import Builder, BuildStep, PlanCandidate
from optax_accum._plan.report import does_not_fit, MicrobatchPlan

if TYPE_CHECKING:
  import tqdm


def plan_microbatches(
  build_step: BuildStep,
  args: Args | Leaves,
  *,
  batch_size: int,
  memory_limit: int | str | None = None,
  choices: Mapping[str, Sequence[Any]] | None = None,
) -> MicrobatchPlan:
  """The largest microbatch that fits, found by compiling and reading XLA's own memory analysis.

  Steps are compiled for some of the numbers of microbatches that divide the batch, and what they
  reserve on one device is compared with the limit: arguments, outputs that are not written into
  donated arguments, temporary buffers, and code. Nothing runs, so nothing can run out of memory.
  The possible sizes are bisected: three to five programs for each choice where a batch has 12
  divisors. The answer and the next larger microbatch are among them.

  Plan for the device that you train on: XLA for CPU may merge what rematerialised layers compute
  again, unless they are in a scan. The guide "Choosing the microbatch and the batch" plans for TPUs
  and GPUs that are not there, and times sizes that fit: the largest need not be the fastest.

  Args:
    build_step: ``build_step(num_microbatches, **choice)`` returns the step: what `make_train_step`,
      `linen_train_step` or `nnx_train_step` returns, or another function that `jax.jit` wraps.
    args: The arguments of a call of the step, arrays or `jax.ShapeDtypeStruct`, with shardings if
      any. They are not donated.
    batch_size: The rows of the batch in `args`, on all devices together. The numbers of
      microbatches that are tried divide it; with a step of ``mesh=``, the rows of one device. For a
      function of your own that splits the rows of one device, inside `shard_map`, give those.
    memory_limit: Bytes of one device, less other arrays that live there, as an int or a string such
      as ``"16GiB"`` or ``"80 GB"``. Default: what the device may allocate, its
      ``memory_stats()["bytes_limit"]``, less 5% for fragmentation. (On a GPU 75% of its memory,
      unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.)
    choices: Further options of `build_step`, each with the values to try, in all combinations.

  Returns:
    A `MicrobatchPlan`, which prints as a table. It has the ``num_microbatches``,
    ``microbatch_size`` and ``choice`` to use: the largest microbatch that fits, of the choice with
    the fewest floating-point operations among those that fit. Of choices that differ by less than
    1%, the larger microbatch is taken.

  Raises:
    ValueError: Not even microbatches of one row fit: the message says what takes the memory. Or
      `memory_limit` is no size; or it is None, and the device does not say; or `build_step` makes
      the same program whatever it is given; or the batch has other rows.
    TypeError: `build_step` returns what cannot be lowered, or takes other options than `choices`
      has; an argument has the wrong type.
    Exception: Whatever compiling raises, with a note that says which step it was.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean(jnp.tanh(jnp.tanh(batch @ params) @ params) ** 2)
    >>> tx = optax.sgd(0.1)
    >>> def build_step(num_microbatches, remat=False):
    ...   fun = jax.checkpoint(loss_fn) if remat else loss_fn
    ...   return optax_accum.make_train_step(fun, tx, num_microbatches=num_microbatches)
    >>> params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    >>> plan = optax_accum.plan_microbatches(
    ...   build_step, (params, tx.init(params), batch), batch_size=4096, memory_limit="2MiB",
    ...   choices={"remat": [False, True]})
    >>> plan.num_microbatches * plan.microbatch_size, plan.peak_bytes <= 2 * 2**20
    (4096, True)
    >>> step = build_step(plan.num_microbatches, **plan.choice)  # and print(plan) is a table

  References:
    ``compiled.memory_analysis()`` of `jax.stages.Compiled`. Others find a batch by running out of
    memory: Lightning's batch size finder, accelerate's ``find_executable_batch_size``.
  """
  import tqdm  # takes a while to import

  rows = _validate.positive_int("batch_size", batch_size)
  choices = {} if choices is None else choices
  if hasattr(build_step, "lower"):
    raise TypeError(
      f"build_step={build_step!r:.80} is a step; give a function build_step(num_microbatches,"
      " **choice) that returns one."
    )
  if not isinstance(choices, Mapping) or not all(
    isinstance(values, (list, tuple)) and values for values in choices.values()
  ):
    raise TypeError(
      f"choices={choices!r} must be a dict from options of build_step to lists of values to try,"
      ' such as {"remat": [False, True]}.'
    )
  if not isinstance(args, (tuple, list)):
    raise TypeError(f"args must be a tuple, the arguments of a call of the step: {args!r:.80}.")
  args = tuple(map(_without_deleted, args))
  given = memory_limit is not None and sizes.parse(memory_limit)
  products = itertools.product(*choices.values())
  combinations = [dict(zip(choices, each, strict=True)) for each in products]
  builders = [Builder(build_step, args, rows, choice) for choice in combinations]
  limit = given or sizes.of_device(args, builders[0].first)
  with tqdm.tqdm(desc="compiling", unit="program", leave=False, disable=None) as bar:
    found = [_compiled(builder, args, rows, limit, bar) for builder in builders]
  plan = MicrobatchPlan.of(found, rows, limit)
  if not plan.candidates[0].fits:
    raise ValueError(does_not_fit(plan, builders[0].first, args))
  return plan


def _without_deleted(tree: Tree) -> Tree:
  """The same, with shapes in the place of arrays that a step before has deleted."""

  def is_deleted(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()

  def shape(x: Leaf) -> Leaf:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if is_deleted(x) else x

  # In a tree that is mapped, Variables that an nnx model shares would become several.
  return jax.tree.map(shape, tree) if any(map(is_deleted, jax.tree.leaves(tree))) else tree


def _compiled(
  builder: Builder, args: Args, rows: int, limit: int, bar: "tqdm.tqdm"
) -> list[PlanCandidate]:
  """What was compiled of one choice to find its largest microbatch that fits."""

  def compile_size(size: int) -> PlanCandidate:
    bar.set_postfix_str(builder.call(rows // size))
    candidate = builder.compile(rows // size, limit)
    bar.update()
    return candidate

  counts = builder.counts()
  row_bytes = sizes.of_rows(args, rows) * counts[0] / rows  # on one device
  return search([rows // n for n in counts], rows, limit, row_bytes, compile_size)


def search(
  possible: Sequence[int],
  whole: int,
  limit: int,
  row_bytes: float,
  compile_size: Callable[[int], PlanCandidate],
) -> list[PlanCandidate]:
  """What is compiled of the possible microbatches, in rows, the smallest first.

  They are bisected for the largest that fits. The smallest comes last, after the next larger one:
  on TPUs one row may need more than two.

  The `whole` batch is a program without a scan: without accumulators, and without a copy of a
  microbatch's rows, each of `row_bytes`. So it may fit where half of it does not. It is left out
  where scans of several sizes say that its activations alone are too many.
  """
  known: dict[int, PlanCandidate] = {}  # by rows

  def too_large(size: int) -> bool:
    known[size] = compile_size(size)
    return not known[size].fits

  bisect.bisect_left(possible, True, key=too_large)
  if len(known) < min(len(possible), 2):  # so that programs of several numbers are compared
    too_large(possible[0])
  # XLA writes products of one row in another way, which does not tell of more rows.
  scans = [known[size] for size in sorted(known) if size not in (possible[0], whole)]
  scans = [each for each in scans if each.analysed]
  if whole == possible[-1] and whole not in known:
    needed = 0.0
    if len(scans) > 1:
      rise = scans[-1].peak_bytes - scans[0].peak_bytes
      slope = rise / (scans[-1].microbatch_size - scans[0].microbatch_size)
      needed = scans[-1].fixed_bytes + max(slope - row_bytes, 0) * whole
    if needed <= limit:
      too_large(whole)
  return [*known.values()]
