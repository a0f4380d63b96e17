"""`plan_microbatches`: which microbatch fits, by compiling and never by running out of memory."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any

import jax

from optax_accum import _validate
from optax_accum._plan import counts, sizes
from optax_accum._plan.candidate import Builder, call_of, check_choices, PlanCandidate
from optax_accum._plan.report import does_not_fit, MicrobatchPlan
from optax_accum._plan.search import Search


def plan_microbatches(
  build_step: Callable[..., Any],
  args: Sequence[Any],
  *,
  batch_size: int,
  memory_limit: int | str | None = None,
  choices: Mapping[str, Sequence[Any]] | None = None,
) -> MicrobatchPlan:
  """The largest microbatch that fits, found by compiling and reading XLA's own memory analysis.

  Steps are compiled for some of the numbers of microbatches that divide the batch, and their memory
  compared with the limit. Memory grows with the microbatch nearly along a straight line, so three
  or four programs for each choice are enough where a batch has 12 divisors. The answer and the next
  larger microbatch are among them. Nothing runs, so nothing can run out of memory. (XLA for TPU
  refuses to compile what is larger than the chip. Such a step does not fit.) ::

    def build_step(num_microbatches, remat=False):
      loss_fn = make_loss_fn(remat=remat)
      return optax_accum.make_train_step(loss_fn, tx, num_microbatches=num_microbatches)

    plan = optax_accum.plan_microbatches(
        build_step, (params, opt_state, batch), batch_size=256, memory_limit="16GiB",
        choices={"remat": [False, True]})
    print(plan)
    step = build_step(plan.num_microbatches, **plan.choice)

  What counts is what the program reserves on one device: arguments, outputs that are not written
  into donated arguments, temporary buffers, and code. Other arrays that live on the device, such as
  the next batches, are not in it. Set them off against `memory_limit`.

  Nothing is timed either. Beyond a few rows on each device a smaller microbatch may be as fast as
  the largest, or faster: time two or three of the table. Give a batch with many divisors: of 241
  rows there are microbatches of 1 and of 241. And plan for the device that you train on. XLA for
  CPU may merge what rematerialised layers compute again, unless they are in a scan.

  **For devices that are not there**, `args` are shapes with shardings over a described topology.
  For 64 chips of a TPU v5e, or 8 (``"v5e:2x4"``), with libtpu installed, and the mesh passed to
  `make_train_step`::

    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec as P
    topology = topologies.get_topology_desc("v5e:8x8", platform="tpu")
    mesh = topologies.make_mesh(topology, (64,), ("data",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    like = lambda tree, sharding: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
    args = like(params, whole), like(opt_state, whole), like(batch, rows)

  One chip is ``jax.sharding.SingleDeviceSharding(topology.devices[0])``; a program may have 15.75
  GiB of it. Where no TPU is, libtpu wants the environment variables ``TPU_SKIP_MDS_QUERY=1``,
  ``TPU_ACCELERATOR_TYPE=v5litepod-8`` and ``TPU_WORKER_HOSTNAMES=localhost``. For a GPU (with
  jax-cuda12-plugin and jax-cuda12-pjrt)::

    topologies.get_topology_desc(
        "", platform="cuda", topology="1x1x8", target_config=open("h100.txtpb").read())

  where the file is XLA's description of the GPU (``xla/backends/gpu/target_config/specs`` in its
  source).

  Args:
    build_step: ``build_step(num_microbatches, **choice)`` returns the step: what `make_train_step`,
      `linen_train_step` or `nnx_train_step` returns, or another function that `jax.jit` wraps.
    args: The arguments of a call of the step, arrays or `jax.ShapeDtypeStruct`, with shardings if
      any. `jax.eval_shape` (`nnx.eval_shape`) makes such shapes of a model that is too large to be
      made here. They are not donated.
    batch_size: The rows of the batch in `args`, on all devices together. The numbers of
      microbatches that are tried divide it; with a step of ``mesh=``, the rows of one device. For a
      function of your own that splits the rows of one device, inside `shard_map`, give those.
    memory_limit: Bytes of one device, as an int or a string such as ``"16GiB"`` or ``"80 GB"``.
      Default: what the device may allocate, its ``memory_stats()["bytes_limit"]``, less 5% for
      fragmentation. (On a GPU that is 75% of its memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says
      otherwise.)
    choices: Further options of `build_step`, each with the values to try. All combinations are
      tried.

  Returns:
    A `MicrobatchPlan`, which prints as a table. It has the ``num_microbatches``,
    ``microbatch_size`` and ``choice`` to use. Without `choices` that is the largest microbatch that
    fits. With them each choice has its largest, and the choice with the fewest floating-point
    operations is taken: rematerialised layers need up to a third more, so they are chosen where
    nothing else fits. Where choices differ by less than 1%, the larger microbatch is taken.

  Raises:
    ValueError: Not even microbatches of one row fit: the message says what takes the memory. Or
      `memory_limit` is no size or not above 0; or it is None, and the device does not say; or
      `build_step` makes the same program whatever it is given; or the batch has other rows.
    TypeError: `build_step` returns what cannot be lowered, or takes other options than `choices`
      has; an argument has the wrong type.
    Exception: Whatever compiling raises, with a note that says which step it was.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean(jnp.tanh(jnp.tanh(batch @ params) @ params) ** 2)
    >>> tx = optax.sgd(0.1)
    >>> def build_step(num_microbatches):
    ...   return optax_accum.make_train_step(loss_fn, tx, num_microbatches=num_microbatches)
    >>> params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    >>> plan = optax_accum.plan_microbatches(
    ...   build_step, (params, tx.init(params), batch), batch_size=4096, memory_limit="2MiB")
    >>> plan.num_microbatches * plan.microbatch_size, plan.peak_bytes <= 2 * 2**20
    (4096, True)

  References:
    ``compiled.memory_analysis()`` of `jax.stages.Compiled`. Others find a batch by running out of
    memory: Lightning's batch size finder, accelerate's ``find_executable_batch_size``.
  """
  rows = _validate.positive_int("batch_size", batch_size)
  check_choices(build_step, choices := {} if choices is None else choices)
  if not isinstance(args, (tuple, list)):
    raise TypeError(f"args must be a tuple, the arguments of a call of the step: {args!r:.80}.")
  args = tuple(map(_without_deleted, args))
  products = itertools.product(*choices.values())
  combinations = [dict(zip(choices, each, strict=True)) for each in products]
  limit = 0 if memory_limit is None else sizes.parse("memory_limit", memory_limit)
  builder = Builder(build_step, args, rows, limit)
  steps = [builder.step(1, choice) for choice in combinations]
  builder.limit = limit or sizes.of_device(args, steps[0])
  found: list[list[PlanCandidate]] = []
  with _progress() as bar:
    for choice, step in zip(combinations, steps, strict=True):
      possible = counts.possible(step, args, rows)
      row_bytes = sizes.of_rows(args, rows) * possible[0] / rows  # on one device
      compile_size = functools.partial(_compile, builder, rows, choice, bar)
      search = Search([rows // n for n in possible], rows, builder.limit, row_bytes, compile_size)
      search.run()
      found.append([*search.known.values()])
      builder.check_used(possible, choice)
  plan = MicrobatchPlan.of(found, rows, builder.limit)
  if not plan.candidates[0].fits:
    raise ValueError(does_not_fit(plan, steps[0], args))
  return plan


def _compile(
  builder: Builder, rows: int, choice: Mapping[str, Any], bar: Any, size: int
) -> PlanCandidate:
  """Compiles the step of a microbatch of so many rows."""
  bar.set_postfix_str(call_of(rows // size, choice))
  candidate = builder.compile(rows // size, choice)
  bar.update()
  return candidate


def _without_deleted(tree: Any) -> Any:
  """The same, with shapes in the place of arrays that a step before has deleted."""
  leaves = jax.tree.leaves(tree)
  if not any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
    return tree

  def shape(x: Any) -> Any:
    deleted = isinstance(x, jax.Array) and x.is_deleted()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if deleted else x

  return jax.tree.map(shape, tree)


def _progress() -> Any:
  import tqdm  # takes a while to import

  return tqdm.tqdm(desc="compiling", unit="program", leave=False, disable=None)
