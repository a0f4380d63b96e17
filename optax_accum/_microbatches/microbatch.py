"""`microbatch`: any function, transformed to run in microbatches."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import functools
from typing import cast, ParamSpec, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._arithmetic.trees import Tree
from optax_accum._microbatches.cut import Microbatches
from optax_accum._microbatches.loop import run_in_microbatches, runner
from optax_accum._microbatches.options import OTHER_NAMES, Split, WeightFn
from optax_accum._microbatches.recompute import Recomputed

Args = ParamSpec("Args")
Out = TypeVar("Out")

_is_whole = contextvars.ContextVar("is_whole", default=False)


@_validate.hinted(
  "Options go by name, and reduction has no default:"
  ' microbatch(fun, reduction="mean", num_microbatches=8).',
  names=OTHER_NAMES,
)
def microbatch(
  fun: Callable[Args, Out],
  *,
  reduction: ReductionTree,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  weight_fn: WeightFn | None = None,
  batch_argnums: int | Sequence[int] | None = None,
  rng_argnums: int | Sequence[int] | None = None,
  axis_name: AxisName | None = None,
  accumulator_dtype: DTypeLike | None = None,
  unroll: int | bool = 1,
  concat_axis: int | None = None,
  batch_axis: int | tuple[int, ...] = 0,
  batch_argnames: str | Sequence[str] = (),
  rng_argnames: str | Sequence[str] = (),
) -> Callable[Args, Out]:
  """Makes `fun` run on one microbatch of its batch after the other, in one `jax.lax.scan`.

  Use it for evaluation, encoding and statistics, where the intermediate values of the whole batch
  do not fit. For a loss that is a mean over rows use `microbatch_value_and_grad`.

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
    reduction: How the outputs of all microbatches are combined. A word for all outputs, or a prefix
      tree of words: ``"mean"`` (weighted), ``"sum"``, ``"max"``, ``"min"``, ``"last"``, ``"stack"``
      (along a new first axis, of microbatches) or ``"concat"`` (the rows, in their order).
    num_microbatches: The number of equal parts. It must divide the rows. Give this or the next.
    microbatch_size: The rows of one microbatch, on one device. The last one may have fewer.
    weight_fn: How much a microbatch counts. `make_train_step` says more, of all options below too.
    batch_argnums: The positions of the arguments that are split. Default: the only argument that is
      not a key. Needed where there are several, of which none is the batch by convention.

  Randomness and carried state:
    rng_argnums: The positions of random keys, which get the microbatch's index folded in.

  Several devices:
    axis_name: Inside `pmap` or `shard_map`, the axis that the rows are sharded over.

  Expert options:
    accumulator_dtype: The dtype that outputs are added up in, and so are the gradients of arguments
      that are not split.
    unroll: As in `jax.lax.scan`. Above 1, differentiation keeps the intermediate values of at least
      that many microbatches.
    concat_axis, batch_axis: The axis that "concat" joins, and the one that is split.
    batch_argnames, rng_argnames: The names of keyword arguments that are split, or random keys.

  Returns:
    A function with `fun`'s arguments, which returns `fun`'s outputs, combined.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work.
    TypeError: A value has the wrong type, or an output has a dtype that its reduction refuses.

  Differentiation:
    The function can be differentiated, for losses that are not a mean over rows: the guides to
    contrastive losses and to a large vocabulary show how. The backward pass computes each
    microbatch again from its inputs, with the same keys, so that only the intermediate values of
    one microbatch are kept.

    In a `shard_map` of your own, pass parameters as arguments, and give `axis_name`: their
    gradients are then summed over devices once, and not in every microbatch. What `fun` changes in
    place is lost. A `fun` that calls `jax.experimental.io_callback` cannot be differentiated.

  References:
    `optax.microbatching.microbatch` is the most similar function. It has no smaller last microbatch
    and no weights.
  """
  split = Split.of(locals())
  reductions = reduction_words.named("reduction", reduction, concat_axis, split.batch_axis)
  untyped: Callable[..., Tree] = fun

  def run_fn(call: Microbatches, _: object, *inputs: Tree) -> tuple[None, Tree]:
    args, kwargs = call.arguments(inputs)
    return None, untyped(*args, **kwargs)

  @functools.wraps(fun)
  def microbatched(*args: Args.args, **kwargs: Args.kwargs) -> Out:
    asked = split
    if _is_whole.get():
      asked = dataclasses.replace(split, num_microbatches=1, microbatch_size=None)
    call = Microbatches(fun, asked, args, kwargs)
    run = runner(call, run_fn)
    if not call.is_whole:
      run = Recomputed(call, run, any(r.collected for r in jax.tree.leaves(reductions)))
    return cast(Out, run_in_microbatches(call, run, reductions).outputs)

  return microbatched


@contextlib.contextmanager
def whole_batches() -> Iterator[None]:
  """Traces what calls `microbatch` as if it did not split: what `check_split` compares with."""
  token = _is_whole.set(True)
  try:
    # Part of the key of JAX's caches: a jitted function that calls `microbatch` is traced anew.
    with set_xla_metadata(microbatch="whole"):
      yield
  finally:
    _is_whole.reset(token)
