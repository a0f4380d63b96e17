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

from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._arithmetic.trees import Tree
from optax_accum._microbatches.cut import Microbatches
from optax_accum._microbatches.loop import run_in_microbatches, runner
from optax_accum._microbatches.options import Split, WeightFn
from optax_accum._microbatches.recompute import Recomputed

Args = ParamSpec("Args")
Out = TypeVar("Out")

_is_whole = contextvars.ContextVar("is_whole", default=False)


def microbatch(
  fun: Callable[Args, Out],
  *,
  reduction: ReductionTree,
  batch_argnums: int | Sequence[int] | None = None,
  batch_argnames: str | Sequence[str] = (),
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  batch_axis: int | tuple[int, ...] = 0,
  concat_axis: int | None = None,
  weight_fn: WeightFn | None = None,
  rng_argnums: int | Sequence[int] | None = None,
  rng_argnames: str | Sequence[str] = (),
  accumulator_dtype: DTypeLike | None = None,
  axis_name: AxisName | None = None,
  unroll: int | bool = 1,
) -> Callable[Args, Out]:
  """Runs `fun` on one microbatch of its batch after the other, in one `jax.lax.scan`.

  Use it for evaluation, encoding and statistics, where the intermediate values of the whole batch
  do not fit. `microbatch_value_and_grad` is for a loss that is a mean over rows.

  It can be differentiated, which serves losses that are no such mean: the guides to contrastive
  losses and to a large vocabulary show how. Going backward, each microbatch is computed again from
  its inputs, with the same keys, so that only one microbatch's intermediate values are kept.

  In a `shard_map` of your own, pass parameters as arguments, and `axis_name`: their cotangents are
  then reduced over devices once, and not in every microbatch. What `fun` changes in place is lost,
  and it can have no `jax.experimental.io_callback` where it is differentiated.

  Args:
    fun: A function of arrays. `microbatch` works around `jax.jit` and inside it.
    reduction: How the outputs of the microbatches become one. A word for all outputs, or a prefix
      tree of words: ``"mean"`` (weighted), ``"sum"``, ``"max"``, ``"min"``, ``"last"``,
      ``"stack"`` (a new leading axis of microbatches) or ``"concat"`` (the rows, in their order).
    batch_argnums: The positions of the arguments that are split. Default: the only argument that is
      no key, or those of `batch_argnames` alone.
    batch_argnames: The names of keyword arguments that are split.
    num_microbatches: How many; must divide the rows. Give this or `microbatch_size`.
    microbatch_size: The rows of one microbatch, on one device; the last may have fewer.
    batch_axis: The axis that is split: one for all leaves, or a tuple with one for each batch
      argument, in the order of `batch_argnums` and then of `batch_argnames`.
    concat_axis: The axis of outputs that "concat" joins: 0, or say it where `batch_axis` is not 0.
    weight_fn: How much a microbatch counts. As in `microbatch_value_and_grad`, with all below.
    rng_argnums: The positions of random keys, which get the microbatch's index folded in. Default:
      none, and a call with a typed key that is not named is an error; ``()`` shares keys.
    rng_argnames: The names of such keyword arguments.
    accumulator_dtype: What sums and means are added up in, and cotangents of what is not split.
      Default: float32 or wider.
    axis_name: The axis that the batch is spread over, inside `pmap` or `shard_map`.
    unroll: As in `jax.lax.scan`. Above 1, differentiation keeps that many microbatches or more.

  Returns:
    A function with `fun`'s arguments, which returns `fun`'s outputs, reduced.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work.
    TypeError: A value has the wrong type, or an output has a dtype that its reduction refuses.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def evaluate(x):
    ...   return {"logits": 2 * x, "correct": jnp.sum(x > 2)}
    >>> evaluate_in_parts = optax_accum.microbatch(
    ...     evaluate, reduction={"logits": "concat", "correct": "sum"}, microbatch_size=2)
    >>> out = evaluate_in_parts(jnp.arange(5.0))
    >>> out["logits"].tolist(), int(out["correct"])
    ([0.0, 2.0, 4.0, 6.0, 8.0], 2)

  References:
    `optax.microbatching.microbatch` is the closest peer; it has no smaller last microbatch and no
    weights.
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
