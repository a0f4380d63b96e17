"""`microbatch`: any function in microbatches, where its arrays are or over a mesh."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import ParamSpec, TypeVar

import jax
from jax.typing import DTypeLike

from optax_accum._arithmetic import dtypes, reduction_words
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._arithmetic.trees import Tree
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.on_devices import on_each_device, place_arguments
from optax_accum._microbatches.function import LocalFunction
from optax_accum._microbatches.options import Slots, Split, WeightFn
from optax_accum._microbatches.recompute import widened
from optax_accum._microbatches.roles import map_by_slot, RolesOf
from optax_accum._microbatches.whole import splits_nothing

P = ParamSpec("P")
Out = TypeVar("Out")


def microbatch(
  fun: Callable[P, Out],
  *,
  reduction: ReductionTree,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  weight_fn: WeightFn | None = None,
  batch_argnums: Slots = None,
  rng_argnums: Slots = None,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  axis_name: AxisName | None = None,
  accumulator_dtype: DTypeLike | None = None,
) -> Callable[P, Out]:
  """Makes `fun` run on one microbatch of its batch after the other, in one `jax.lax.scan`.

  Use it for evaluation, encoding and statistics, where the intermediate values of the whole batch
  do not fit. For a loss that is a mean over rows use `microbatch_value_and_grad`.

  This differs from `optax.microbatching.microbatch` in:

  1. A batch that does not divide evenly is exact: the last microbatch has fewer rows, and counts
     less.
  2. A mean is weighted, by rows or by `weight_fn`, and leaves out what has weight 0, even NaN.
  3. Sums are taken in float32 or wider, and not in the dtype of the outputs.
  4. Microbatches draw different noise: a key has the number of the microbatch folded in.
  5. Differentiated, it keeps the intermediate values of one microbatch, and not of all.
  6. With `mesh` or `axis_name` the results are those of all devices.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def evaluate(x):
    ...   return {"logits": 2 * x, "correct": jnp.sum(x > 2)}
    >>> evaluate_in_parts = optax_accum.microbatch(
    ...     evaluate, reduction={"logits": "concat", "correct": "sum"}, microbatch_size=2)
    >>> out = evaluate_in_parts(jnp.arange(5.0))
    >>> out["logits"].tolist(), int(out["correct"])
    ([0.0, 2.0, 4.0, 6.0, 8.0], 2)

  Args:
    fun: A function of arrays. `microbatch` works around `jax.jit` and inside it. Call it inside:
      outside, without `mesh`, each call compiles a program of its own.
    reduction: How the outputs of all microbatches are combined: ``"mean"`` (weighted), ``"sum"``,
      ``"max"``, ``"min"``, ``"last"``, ``"stack"`` (along a new first axis, of microbatches),
      ``"concat"`` (the rows, in their order), a function of your own, or a prefix tree of these.
      A value per row is for "concat": "mean" would average different rows, and nothing refuses it.
    num_microbatches: The number of equal parts. It must divide the rows (with `mesh`, those on each
      device). Give this or the next.
    microbatch_size: The rows of one microbatch; with `mesh`, on all devices together, a multiple of
      their number; with `axis_name`, on one device. The last one may have fewer.
    weight_fn: ``weight_fn(batch) -> scalar``, how much a microbatch counts in a mean: 0 or more. It
      gets every argument that is split, in the order of `batch_argnums`. Default: its rows.
    batch_argnums: What is split along its first axis: a position, the name of a keyword of the
      call, or a tuple of these. Default: the only argument that is not a key.
    rng_argnums: The positions, or names of keywords, of random keys, typed or raw, into which the
      number of the microbatch is folded. Default: none, and then a typed key is an error. With
      ``()`` all share it.

  Several devices:
    mesh: A `jax.sharding.Mesh`, whose devices share the rows: see "Over a mesh". Default: where the
      arrays are.
    data_axis: The axis of `mesh` that rows are sharded over, or several.
    axis_name: Instead of `mesh`, inside `pmap` or `shard_map`: the axis that rows are sharded over,
      or several. "stack" and "concat" keep the values of each device.

  Expert options:
    accumulator_dtype: The dtype in which outputs are summed, and gradients of unsplit arguments.

  Returns:
    A function with `fun`'s arguments that returns `fun`'s outputs, combined.

  Raises:
    ValueError, TypeError: An argument or an option cannot work, or an output cannot be reduced so.

  A reduction of your own:
    ``merge(a, b)`` makes one value of two. A value is one output, or a tree of all that is below
    the node at which the function stands; structure, shapes and dtypes must stay. The function must
    be associative, which is not checked. Values are merged in the order of the microbatches, and
    then of the devices, without those of weight zero; if nothing counts, the result is zeros. What
    is merged cannot be differentiated: return `jax.lax.stop_gradient` of it. The function may close
    over arrays, and by these the result can be differentiated.

    >>> import jax
    >>> log_sum_exp = optax_accum.microbatch(
    ...     jax.nn.logsumexp, reduction=jnp.logaddexp, num_microbatches=2)
    >>> round(float(log_sum_exp(jnp.arange(6.0))), 4)
    5.4562

  Over a mesh:
    Each device runs the microbatches of its own rows, as with the `mesh` of `make_train_step`, and
    the number of devices must divide the rows. Results are those of the whole batch. "concat" is in
    the order of the batch, and sharded over `data_axis`; "stack" has the microbatches of one device
    after those of another; functions of your own merge in the order of the mesh. Keys differ
    between devices too. What is not split may be sharded or not: parts over `data_axis` are
    gathered once a call, and other axes are left to the compiler. Arrays elsewhere are put on the
    mesh. It works inside `jax.jit` and outside, and traces all arguments. What `fun` has summed
    over devices itself, by `jax.lax.psum`, "sum" counts once for each device.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> evaluate_over_mesh = optax_accum.microbatch(
    ...     evaluate, reduction={"logits": "concat", "correct": "sum"}, num_microbatches=2,
    ...     mesh=mesh)
    >>> out = evaluate_over_mesh(jnp.arange(2.0 * mesh.size))
    >>> bool((out["logits"] == 2 * jnp.arange(2.0 * mesh.size)).all())
    True

  Differentiation:
    The backward pass computes each microbatch again from its inputs, with the same keys, so it
    keeps the intermediate values of only one: see the guide "Contrastive losses, and large
    vocabularies". Pass parameters as arguments: their gradients are then added up in float32 or
    wider, without microbatches of weight 0, and with `mesh`, or `axis_name` in a `shard_map` of
    yours, summed over devices once. Of what `fun` closes over JAX adds gradients up in their own
    dtype, and in every microbatch. Gradients of parameters sharded over automatic axes come out
    whole, unless `jax.jit` is given `out_shardings`. Outside `jax.jit`, JAX differentiates over
    explicit axes only in `jax.set_mesh(mesh)`. What `fun` changes in place is lost. A `fun` that
    calls `jax.experimental.io_callback` cannot be differentiated.
  """
  # Nothing is assigned yet, so `locals()` has the arguments by name.
  split = Split.of(locals())
  # None as the last argument: a `reduction` of None has no default.
  reductions = reduction_words.named("reduction", reduction, None)
  local = LocalFunction(fun, split, RolesOf(fun, split), reductions)
  whole = dataclasses.replace(split, num_microbatches=1, microbatch_size=None)
  run: Callable[..., Tree] = local.outputs
  if mesh is not None:
    if axis_name is not None:
      raise ValueError(
        f"axis_name={axis_name!r} is for a call inside pmap or shard_map, and mesh= for one"
        " outside: give one of the two."
      )
    run = _over_mesh(local, DataParallel.of(mesh, data_axis))

  @functools.wraps(fun)
  def microbatched(*args, **kwargs):
    # `check_split` compares with the function on the whole batch.
    if splits_nothing():
      return local._replace(split=whole).outputs(*args, **kwargs)
    return run(*args, **kwargs)

  return microbatched


def _over_mesh(
  local: LocalFunction, parallel: DataParallel
) -> Callable[..., Tree]:
  """The outputs of a function on all devices, from its arguments."""
  split = local.split

  def on_mesh(args, kwargs):
    batch = local.roles_of(args, kwargs).batch

    # Cotangents of what is not split are added up over the devices where they leave the map. So
    # wide copies go into the map, and `narrowed` gives the function each in its own dtype.
    def widen(slot, tree):
      if slot in batch:
        return tree
      return jax.tree.map(functools.partial(widened, split), tree)

    wide_args, wide_kwargs = map_by_slot(widen, args, kwargs)
    # Of these `narrowed` takes the dtypes only: its own arguments are one microbatch.
    given = args, kwargs

    def narrowed(*args, **kwargs):
      within = args, kwargs
      args, kwargs = jax.tree.map(dtypes.in_dtype_of, within, given)
      return local.fun(*args, **kwargs)

    split_of_device = parallel.on_device(split)
    on_device = local._replace(fun=narrowed, split=split_of_device)

    # `_` has what is each device's own: nothing, the () below.
    def run(_, args, kwargs):
      return on_device.outputs(*args, **kwargs)

    specs = jax.tree.map(parallel.output_spec, local.reductions)
    mapped = on_each_device(
      parallel, run, (), wide_args, wide_kwargs, specs, batch
    )
    return mapped()

  # Arguments are placed before this, because `place` leaves tracers where they are.
  jitted = jax.jit(on_mesh)

  def outputs(*args, **kwargs):
    roles = local.roles_of(args, kwargs)
    placed = place_arguments(parallel, split, roles, args, kwargs)
    return jitted(*placed)

  return outputs
