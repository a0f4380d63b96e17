"""`microbatch_value_and_grad`: `jax.value_and_grad` of a loss, in microbatches."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Literal, ParamSpec

from jax.typing import DTypeLike

from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import GradReductionTree, ReductionTree
from optax_accum._microbatches.loss import local_loss
from optax_accum._microbatches.options import Split, WeightFn

Args = ParamSpec("Args")


def microbatch_value_and_grad(
  fun: Callable[Args, Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  batch_argnums: int | Sequence[int] | None = None,
  batch_argnames: str | Sequence[str] = (),
  batch_axis: int | tuple[int, ...] = 0,
  reduction: Literal["mean", "sum"] = "mean",
  grad_reduction: GradReductionTree = None,
  weight_fn: WeightFn | None = None,
  aux_reduction: ReductionTree = None,
  concat_axis: int | None = None,
  rng_argnums: int | Sequence[int] | None = None,
  rng_argnames: str | Sequence[str] = (),
  carry_argnum: int | None = None,
  carry_reduction: ReductionTree = None,
  accumulator_dtype: DTypeLike | None = None,
  skip_nonfinite: bool = False,
  skip_empty: bool = False,
  in_place: bool = False,
  axis_name: AxisName | None = None,
  unroll: int | bool = 1,
) -> Callable[Args, tuple[Any, ...]]:
  """`jax.value_and_grad` that runs microbatch by microbatch, in one `jax.lax.scan`.

  Let ``w`` be the weight of a microbatch: its rows, or what `weight_fn` counts. The value and the
  gradients are the weighted means, ``sum(w * g) / sum(w)`` over the microbatches. They are those of
  the whole batch if the loss is itself a mean over what the weights count. A loss in which rows
  interact is not such a mean: a contrastive loss, or one through batch normalisation. No sum over
  microbatches gives its gradient. `check_split` says which a loss is, and what to write.

  One body is compiled (two, if the last microbatch is smaller). The scan holds one microbatch's
  activations and the plain sum of the gradients, which is divided once.

  What `fun` changes in place is lost, as under `jax.value_and_grad`: the statistics and the random
  counts of a flax nnx module stay as they were. Take them out (``nnx.split``), thread them with
  `carry_argnum` (``nnx.merge`` with ``copy=True``), and return the new ones.

  Under ``jax_debug_nans`` JAX can tell no more than that a NaN came from the scan. With
  ``num_microbatches=1``, and without `weight_fn` and `skip_nonfinite`, there is no scan, and the
  error points at the operation.

  ==============================  ====================================================
  edge case                       what happens
  ==============================  ====================================================
  one microbatch                  the program of `jax.value_and_grad`, nothing added
  rows do not divide              `microbatch_size`: the last one is smaller and weighs
                                  less, exactly; `num_microbatches`: an error
  zero weight                     contributes nothing, even where it is NaN
  all weights zero                zero loss, zero gradients, `total_weight` 0; where
                                  `grad_reduction` is "max" -inf, and "min" inf
  NaN or inf, `skip_nonfinite`    weight 0, counted; otherwise it shows in the result
  carry of a microbatch left out  the carry of the microbatch before is kept
  ==============================  ====================================================

  What ``in_place=True`` saves: temporary memory of a Transformer's AdamW step in 8 microbatches, in
  parameters' bytes, plain to in place (v5e and H100 as compiled), and the time in place over the
  plain time. Parameters and state are donated. If they are not, XLA puts gradients where the
  outputs go, and ``in_place=True`` may save nothing.

  ==============================  ============  ============  ============  ========
  layers                          TPU v5e       H100          CPU           CPU time
  ==============================  ============  ============  ============  ========
  scanned                         3.24 to 2.33  3.07 to 2.16  3.26 to 2.51  0.86
  scanned and rematerialised      2.48 to 1.35  2.07 to 1.10  2.23 to 1.57  0.97
  parameters cast before that     1.85 to 1.85  2.05 to 2.05  2.22 to 2.22  1.05
  `jax.checkpoint` of the scan    3.24 to 3.24  3.07 to 3.07  3.26 to 3.26  0.98
  in a Python loop                1.85 to 1.79  1.85 to 1.85  2.48 to 2.48  0.94
  rematerialised, tied embedding  2.29 to 1.63  1.92 to 1.39
  of 50,000 words
  ==============================  ============  ============  ============  ========

  (Printed by ``benchmarks/memory.py --time --forms ...``, with JAX 0.12; the H100 with JAX 0.10.)

  Args:
    fun: Returns a real scalar loss, or ``(loss, aux)`` with `has_aux`, or
      ``(loss, (new_carry, aux))`` with `carry_argnum`.
    argnums: As in `jax.value_and_grad`: what to differentiate, a position or several.
    has_aux: Whether `fun` returns ``(loss, aux)``.
    num_microbatches: How many; must divide the rows. Give this or `microbatch_size`, not both.
    microbatch_size: The rows of one microbatch. With `axis_name` those on one device. The last one
      may be smaller.
    batch_argnums: The positions of the arguments that are split. Each is a pytree of arrays,
      and all arrays have the same number of rows. Default: 1, ``fun(params, batch)``, and a call in
      which another argument has as many rows is an error, because ``fun(params, x, y)`` may well
      broadcast and not fail where only ``x`` is split. Name both, ``(1, 2)``; an explicit ``1``
      says that every microbatch gets all of ``y``. Name it, too, where the rows differ from call to
      call: a last, smaller batch may happen to have as many as an argument that is not split.
    batch_argnames: The names of keyword arguments that are split too.
    batch_axis: The axis that is split: one for all leaves, or a tuple with one for each batch
      argument, in the order of `batch_argnums` and then of `batch_argnames`.
    reduction: ``"mean"``: the weighted mean of losses and gradients. ``"sum"``: their plain,
      unweighted sum, for a loss that is a sum over rows (a weight of zero still leaves a
      microbatch out).
    grad_reduction: How gradients become one, where some are to otherwise than losses: a word or a
      prefix tree of words over the gradients, ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or
      ``"last"``. Default: `reduction`, for all. It is for parameters that are overwritten with
      their "gradient", as the largest values (amax) that fp8 layers of flax keep, of which a mean
      is silently wrong: ``{"params": "mean", "_overwrite_with_gradient": "max"}``. Values of
      microbatches are what is reduced. In the backward pass of a loss that is a mean over rows they
      are larger than the whole batch's, N times for N microbatches: an amax of output gradients
      is right for the microbatches that it scales; under ``reduction="sum"``, and for inputs and
      kernels, it is the whole batch's too.
    weight_fn: ``weight_fn(*batch_args) -> scalar``, how much a microbatch counts. For a loss that
      is a mean over valid tokens, return the number of valid tokens. It is called with the
      microbatch's part of the batch arguments, by position or by name as the call had them.
      0, or from 1e-30 to 1e30. A traced one below 0 gives NaN, and so does a total that float32
      cannot divide by. The derivative with respect to a weight of exactly 0 is 0. Where you
      differentiate by the batch, a loss that is 0/0 in a microbatch of padding has NaN derivatives:
      guard the division. Default: the rows.
    aux_reduction: How aux is reduced: a word or a prefix tree of words, as in `microbatch`.
      ``"mean"`` is weighted as the loss is. ``"concat"`` is for values for each row. Default: the
      mean, and an aux that has as many rows as a microbatch, on a `batch_axis` or on its first
      axis, is an error, because rows of different microbatches would be averaged: say ``"concat"``,
      or ``"mean"`` if it merely has that size. Where microbatches have one row, or there is one, it
      is no error.
    concat_axis: The axis of aux that "concat" joins, as in `microbatch`. Default: 0, and it must be
      given where a `batch_axis` is not 0.
    rng_argnums: The positions of random keys, typed or raw uint32, or trees of them. Microbatch i
      gets ``jax.random.fold_in(key, i)``, also where there is only one, so no two microbatches
      share noise. With `axis_name` the device's index is folded in first. Default: none, and a
      call with a typed key that is not named is an error, because all microbatches would have the
      same noise; ``()`` says that they are to share it.
    rng_argnames: The names of such keyword arguments.
    carry_argnum: The position of an argument that is threaded through the microbatches, such as
      batch statistics: each microbatch gets what the one before returned. N updates with
      momentum m then weigh as one with m**N.
    carry_reduction: With `axis_name`, how the devices' carries become one: a word or a prefix tree
      of words. ``"mean"``, the default for floats, is weighted by what each device counted.
      ``"max"``, the default for integers, is right for step counts. ``"sum"`` is the start plus
      every device's increment, for counts of rows. Or ``"min"``. Each device folds its index into
      a typed key on the way in, and the first device's key comes out. What looks like a raw key
      (uint32, 2 or 4 on the last axis) is an error, unless a word says that it is numbers.
    accumulator_dtype: The dtype that losses and gradients are added up in. Default: their own
      dtype promoted with float32, because a bfloat16 sum of ones stops growing at 256.
    skip_nonfinite: Whether to leave out a microbatch whose loss or gradients are not finite.
      "stack" and "concat" still have its values, and reverse-mode derivatives of the result are
      NaN where one was left out.
    skip_empty: Whether a microbatch of weight zero is not run at all, so that a batch that is
      padded to a fixed number of microbatches costs what it holds. Needs `weight_fn`. Row r is in
      microbatch ``r % N``, so padding at the end of a batch is in all of them. Deal the rows out
      first: for N microbatches of S rows on each of D devices,
      ``np.moveaxis(x.reshape(N, D, S, *x.shape[1:]), 0, 2).reshape(x.shape)``. "stack" and
      "concat" have zeros for what was not run. Over devices each skips its own, unless a microbatch
      sends something to others: then it is run by all if it counts on one. Default: False, because
      reverse-mode differentiation cannot pass, and TPUs hold 0.2 of the parameters more.
    in_place: Whether the backward pass adds gradients to their accumulators, layer by layer, so
      that a microbatch's whole gradient never exists. It saves memory where layers are scanned
      (``jax.lax.scan`` over stacked parameters) and a layer's parameters are cast, if at all, in
      the scan's body: see the table. Gradients are those of the plain scan but for rounding: what a
      parameter used twice adds up associates otherwise, and a weight is in the cotangents before
      they are rounded (in bfloat16 compute gradients differ by 1%, as either does from float32).
      Where JAX is not known to add a parameter's gradient rightly, as in a `jax.lax.dynamic_slice`
      of it, the whole gradient is made and then added.
      With weights, or a smaller last microbatch, the loss must be as wide as the parameters: it is
      multiplied by the weight. A microbatch of weight zero is not run: "stack" and "concat"
      have zeros for it. Where the call itself is differentiated (MAML), in either mode and in a
      loop too, the plain scan is what runs, with its memory. So it is where the loss prints, calls
      back, has `checkify`'s checks, or changes a reference. Parameters must have the dtype of their
      accumulators, as they have by default if they are float32. Not for `skip_nonfinite`, for
      `grad_reduction`, under `jax.vmap` (take `jax.lax.map`), or for a loss with weights that sends
      something to other devices. Not before JAX 0.10; the JAX that is installed is tried once in a
      process (half a second). Default: False, because it saves little elsewhere.
    axis_name: Inside `pmap` or `shard_map`, the axis that the batch is spread over. `fun` returns
      the loss of its device's own rows. (One that it reduced is refused, where `shard_map` checks
      types.) Gradients stay on their device during the scan. Gradients and weights are reduced
      once, after it, a carry as `carry_reduction` says. ``"stack"`` and ``"concat"`` keep each
      device's own values.
    unroll: As in `jax.lax.scan`. The default 1 is right unless the body is tiny.

  Returns:
    A function with `fun`'s arguments that returns what ``jax.value_and_grad(fun)`` does,
    every leaf in the dtype that it has there: ``(loss, grads)``, or
    ``((loss, aux), grads)``, or ``((loss, (carry, aux)), grads)``. With `skip_nonfinite`
    a `MicrobatchStats` follows as a third item, which tells how many were skipped.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work.
    TypeError: A value has the wrong type: an integer parameter, a loss that is not a
      real scalar, a return that does not fit `has_aux`, an integer aux under "mean".
    NotImplementedError: With `in_place`, JAX is older than 0.10, or `jax.vmap` is around it.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> params = jnp.array([1.0, -1.0])
    >>> step = optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=3)
    >>> loss, grads = jax.jit(step)(params, batch)
    >>> float(loss), grads.tolist()
    (4.0, [-20.0, -24.0])

  References:
    `jax.value_and_grad`, and `optax.microbatching.micro_grad`. This differs from the latter: the
    last microbatch may be smaller, microbatches may have weights, bfloat16 gradients are added
    up in float32, keys are folded, and statistics are threaded through.
  """
  split = Split.of(locals(), default_argnum=1)
  loss = local_loss(
    fun, argnums, has_aux, reduction, grad_reduction, aux_reduction, concat_axis, split
  )

  @functools.wraps(fun)
  def value_and_grad(*args: Args.args, **kwargs: Args.kwargs) -> tuple[Any, ...]:
    reduced = loss.value_and_grad(None, *args, **kwargs)
    value, out = reduced.outputs.loss, reduced.outputs
    if reduced.carry:
      value = (value, (*reduced.carry, out.aux))
    elif has_aux:
      value = (value, out.aux)
    return (value, out.grads, reduced.stats) if skip_nonfinite else (value, out.grads)

  return value_and_grad
