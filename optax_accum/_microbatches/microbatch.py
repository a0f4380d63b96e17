"""`microbatch`: any function in microbatches."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import ParamSpec, TypeVar

import jax
from jax.typing import DTypeLike

from optax_accum import _spellings
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.loop import run_in_microbatches, runner
from optax_accum._microbatches.options import Split, WeightFn
from optax_accum._microbatches.recompute import Recomputed
from optax_accum._microbatches.roles import RolesOf
from optax_accum._microbatches.whole import is_whole

P = ParamSpec("P")
Out = TypeVar("Out")


@_spellings.hinted(
  "Options go by name, and reduction has no default:"
  ' microbatch(fun, reduction="mean", num_microbatches=8). See help(microbatch).'
)
def microbatch(
  fun: Callable[P, Out],
  *,
  reduction: ReductionTree,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  weight_fn: WeightFn | None = None,
  batch_argnums: int | Sequence[int] | None = None,
  rng_argnums: int | Sequence[int] | None = None,
  axis_name: AxisName | None = None,
  accumulator_dtype: DTypeLike | None = None,
  batch_axis: int | tuple[int, ...] = 0,
  batch_argnames: str | Sequence[str] = (),
  rng_argnames: str | Sequence[str] = (),
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
  6. With `axis_name` the results are those of all devices.
  7. There is no `num_real_microbatches`: fill up with rows that `weight_fn` counts as 0.

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
    fun: A function of arrays. `microbatch` works around `jax.jit` and inside it.
    reduction: How the outputs of all microbatches are combined: ``"mean"`` (weighted), ``"sum"``,
      ``"max"``, ``"min"``, ``"last"``, ``"stack"`` (along a new first axis, of microbatches),
      ``"concat"`` (the rows, in their order), a function of your own, or a prefix tree of these.
    num_microbatches: The number of equal parts. It must divide the rows. Give this or the next.
    microbatch_size: The rows of one microbatch, on one device. The last one may have fewer.
    weight_fn: ``weight_fn(batch) -> scalar``, how much a microbatch counts in a mean: 0, or from
      1e-30 to 1e30. It gets every argument that is split. Default: its rows.
    batch_argnums: The positions of what is split. Default: the only argument that is not a key.
    rng_argnums: The positions of random keys, typed or raw, into which the number of the microbatch
      is folded. Default: none, and then a typed key is an error. With ``()`` all share it.
    axis_name: Inside `pmap` or `shard_map`, the axis that rows are sharded over.

  Expert options:
    accumulator_dtype: The dtype in which outputs are summed, and gradients of unsplit arguments.
    batch_axis: The axis that is split: one for all arrays, or a tuple with one per argument, in the
      order of `batch_argnums` and then `batch_argnames`.
    batch_argnames, rng_argnames: The names of keyword arguments that are split, or random keys.

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

  Differentiation:
    The backward pass computes each microbatch again from its inputs, with the same keys, so it
    keeps the intermediate values of only one: see the guide "Contrastive losses, and large
    vocabularies". In a `shard_map` of your own, pass parameters as arguments and give `axis_name`:
    their gradients are then summed over devices once, not in every microbatch. What `fun` changes
    in place is lost. A `fun` that calls `jax.experimental.io_callback` cannot be differentiated.
  """
  split = Split.of(locals())
  roles_of = RolesOf(fun, split)
  reductions = reduction_words.named("reduction", reduction, None)
  keeps_all = any(kind.collected for kind in jax.tree.leaves(reductions))

  @functools.wraps(fun)
  def microbatched(*args, **kwargs):
    asked = split
    if is_whole():
      asked = dataclasses.replace(
        split, num_microbatches=1, microbatch_size=None
      )
    call = Microbatches(asked, roles_of(args, kwargs), args, kwargs)

    def run_fn(_, *inputs):
      args, kwargs = call.arguments(inputs)
      return None, fun(*args, **kwargs)

    run = runner(call, run_fn)
    if not call.is_whole:
      run = Recomputed(call, run, keeps_all)
    return run_in_microbatches(call, run, reductions).outputs

  return microbatched
