"""`microbatch`: any function in microbatches; the backward pass computes each of them again."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import functools
from typing import Any, cast, ParamSpec, TypeVar

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  hoisting,
  reduction_words,
  weighted_mean,
)
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._arithmetic.trees import Batch, Carry, Leaf, Leaves, Tree
from optax_accum._microbatches.cut import Microbatches, Take
from optax_accum._microbatches.loop import (
  Microbatch,
  Run,
  run_in_microbatches,
  runner,
)
from optax_accum._microbatches.options import OTHER_NAMES, Split, WeightFn

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
  batch_axis: int | tuple[int, ...] = 0,
  batch_argnames: str | Sequence[str] = (),
  rng_argnames: str | Sequence[str] = (),
) -> Callable[Args, Out]:
  """Makes `fun` run on one microbatch of its batch after the other, in one `jax.lax.scan`.

  Use it for evaluation, encoding and statistics, where the intermediate values of the whole batch
  do not fit. For a loss that is a mean over rows use `microbatch_value_and_grad`.
  `optax.microbatching.microbatch` has no smaller last microbatch and no weights.

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
    num_microbatches, microbatch_size: As in `microbatch_value_and_grad`.
    weight_fn: As in `make_train_step`.
    batch_argnums: The positions of what is split. Default: the only argument that is not a key.
    rng_argnums: As in `make_train_step`.
    axis_name: Inside `pmap` or `shard_map`, the axis that rows are sharded over.

  Expert options:
    accumulator_dtype: The dtype in which outputs are summed, and gradients of unsplit arguments.
    batch_axis, batch_argnames, rng_argnames: As in `microbatch_value_and_grad`.

  Returns:
    A function with `fun`'s arguments that returns `fun`'s outputs, combined.

  Raises:
    ValueError, TypeError: An argument or an option cannot work, or an output cannot be reduced so.

  A reduction of your own:
    ``merge(a, b)`` makes one value of two. A value is one output, or a tree of all that is below
    the node at which the function stands; structure, shapes and dtypes must stay. The function must
    be associative, which is not checked. Values are merged in the order of the microbatches, and
    then of the devices, without those of weight zero; if nothing counts, the result is zeros. What
    is merged cannot be differentiated: return `jax.lax.stop_gradient` of it. By what the function
    closes over it can be.

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
  reductions = reduction_words.named("reduction", reduction, None)

  def run_fn(call: Microbatches, _: object, *inputs: Tree) -> tuple[None, Tree]:
    args, kwargs = call.arguments(inputs)
    return None, fun(*args, **cast(Any, kwargs))

  @functools.wraps(fun)
  def microbatched(*args: Args.args, **kwargs: Args.kwargs) -> Out:
    asked = split
    if _is_whole.get():
      asked = dataclasses.replace(
        split, num_microbatches=1, microbatch_size=None
      )
    call = Microbatches(fun, asked, args, kwargs)
    run = runner(call, run_fn)
    if not call.is_whole:
      run = Recomputed(
        call, run, any(r.collected for r in jax.tree.leaves(reductions))
      )
    return cast(Out, run_in_microbatches(call, run, reductions).outputs)

  return microbatched


@contextlib.contextmanager
def whole_batches() -> Iterator[None]:
  """Traces what calls `microbatch` as if it did not split: what `check_split` compares with."""
  token = _is_whole.set(True)
  try:
    # Part of the key of JAX's caches: a jitted function that calls `microbatch` is traced again.
    with set_xla_metadata(microbatch="whole"):
      yield
  finally:
    _is_whole.reset(token)


class Recomputed:
  """Runs a microbatch so that the backward pass computes it again, and keeps its arguments only.

  The loop gets a wide copy of each shared array, such as parameters, and casts it back in its body.
  So JAX adds up the gradients of the copies in the dtype of accumulators, and sums them over the
  devices of `axis_name` once, after the loop. A microbatch of weight zero adds none, even where it
  is NaN, unless its outputs are `collected`.
  """

  def __init__(self, call: Microbatches, run: Run, collected: bool) -> None:
    self.call, self.split = call, call.split
    self._guards = self.split.weighs and not collected
    self._links: dict[int, jax.Array] = {}  # by the id of what it is a copy of
    call.map_shared(self._varying)
    take, tail = call.cut
    self._traced: dict[
      int, tuple[Any, Any, Leaves]
    ] = {}  # and copies of what it holds
    for rows, batch in ((call.size, take(0)), (call.tail_rows, tail)):
      if rows:

        def one(index, batch, rows=rows):
          return run(index, (), lambda: batch, rows)

        closed, like = jax.make_jaxpr(one, return_shape=True)(
          jnp.int32(0), batch
        )
        copies = [self._linked(x) for x in closed.consts]
        self._traced[rows] = closed, jax.tree.structure(like), copies

  def _varying(self, x: Leaf) -> Leaf:
    """`x`, typed as differing between devices; its copy, to add up in, is reduced over them."""
    if not _may_have_tangent(x) or self.split.axis_name is None:
      return x
    varying = across_devices.varying(x, self.split.axis_name)
    self._links[id(varying)] = across_devices.varying(
      self._wide(x), self.split.axis_name
    )
    return varying

  def _wide(self, x: jax.Array) -> jax.Array:
    wide = dtypes.accumulator_dtype(x.dtype, self.split.accumulator_dtype)
    return x.astype(dtypes.promote(x.dtype, wide))

  def _linked(self, x: Leaf) -> Leaf:
    """The copy of `x` in a dtype to add up cotangents in; `x` itself if it has none."""
    if not _may_have_tangent(x):
      return x
    return self._links[id(x)] if id(x) in self._links else self._wide(x)

  def __call__(
    self,
    index: ArrayLike,
    carry: Carry,
    take: Take,
    rows: int,
    unit: Leaf = None,
  ) -> Microbatch:
    """The function on one microbatch."""
    call = self.call
    # What a loop's body computes again cannot be merged with what the loop before it computed.
    in_loop = rows == call.size and call.rows >= 2 * call.size
    return jax.checkpoint(
      lambda: self._run(index, take(), rows), prevent_cse=not in_loop
    )()

  def _run(self, index: ArrayLike, batch: Batch, rows: int) -> Microbatch:
    closed, out_tree, copies = self._traced[rows]
    gathered = hoisting.shapes_in(closed.jaxpr)

    def narrow(x: Leaf, copy: Leaf) -> Leaf:
      # Cast back in the loop's body, so that the loop adds up what is wide.
      return (
        hoisting.unhoisted(copy, gathered).astype(x.dtype)
        if _may_have_tangent(x)
        else x
      )

    held = list(map(narrow, closed.consts, copies))
    if self._guards:
      counted = weighted_mean.counts(self.call.weight(index, batch, rows))
      guard = lambda x: jnp.where(counted, x, lax.stop_gradient(x))  # noqa: E731
      guarded = lambda x: guard(x) if _may_have_tangent(x) else x  # noqa: E731
      held, batch = jax.tree.map(guarded, (held, batch))
    inputs = jnp.int32(index), *jax.tree.leaves(batch)
    outputs = jax.core.eval_jaxpr(closed.jaxpr, held, *inputs)
    return cast(Microbatch, out_tree.unflatten(outputs))


def _may_have_tangent(x: Leaf) -> bool:
  return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
