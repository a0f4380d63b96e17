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
  the whole batch if the loss is itself a mean over what the weights count: ask `check_split`.

  ============================  ======================================================
  edge case                     what happens
  ============================  ======================================================
  one microbatch                the program of `jax.value_and_grad`, nothing added
  a smaller last microbatch     weighs less, so that the result is exact
  zero weight                   contributes nothing, even where it is NaN
  all weights zero              zero loss and gradients; their "max" is -inf
  NaN or inf, `skip_nonfinite`  weight 0, counted; otherwise it shows in the result
  ============================  ======================================================

  Args:
    fun: Returns a real scalar loss; with `has_aux` ``(loss, aux)``; with `carry_argnum`
      ``(loss, (new_carry, aux))``.
    argnums: As in `jax.value_and_grad`: what to differentiate, a position or several.
    has_aux: Whether `fun` returns ``(loss, aux)``.
    num_microbatches: How many; must divide the rows. Give this or `microbatch_size`, not both.
    microbatch_size: The rows of one microbatch, on one device; the last may have fewer.
    batch_argnums: The positions of the arguments that are split: pytrees of arrays, which all have
      the same rows. Default: 1, and a call in which another argument has as many rows is an error:
      name both, ``(1, 2)``, or 1 if all microbatches get it whole.
    batch_argnames: The names of keyword arguments that are split too.
    batch_axis: The axis that is split: one for all leaves, or a tuple with one for each batch
      argument, in the order of `batch_argnums` and then of `batch_argnames`.
    reduction: ``"mean"``, weighted, or the plain ``"sum"``, for a loss that is a sum over rows.
    grad_reduction: How gradients become one, where not as the losses do: a word or a prefix tree of
      words, ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"last"``. For parameters that are
      overwritten with their "gradient" (see the guide to half precision). Default: `reduction`.
    weight_fn: ``weight_fn(*batch_args) -> scalar``, how much a microbatch counts, such as its valid
      tokens: 0, or from 1e-30 to 1e30, and a traced one below 0 gives NaN. It gets what `fun` gets
      of the batch, by position or by name. Default: the rows.
    aux_reduction: How aux is reduced: a word or a prefix tree of words, as in `microbatch`.
      Default: the weighted mean, and an aux with a microbatch's rows is an error: say ``"concat"``
      for values per row, or ``"mean"``.
    concat_axis: The axis of aux that "concat" joins, as in `microbatch`.
    rng_argnums: The positions of random keys, typed or raw, or trees of them. Microbatch i gets
      ``jax.random.fold_in(key, i)``, and a device of `axis_name` its index first. Default: none,
      and a call with a typed key that is not named is an error; ``()`` has microbatches share it.
    rng_argnames: The names of such keyword arguments.
    carry_argnum: The position of an argument that is threaded through the microbatches, such as
      batch statistics: each microbatch gets what the last one that counted returned.
    carry_reduction: With `axis_name`, how the devices' carries become one: a word or a prefix tree
      of words. ``"mean"`` (weighted, default of floats), ``"max"`` (of integers), ``"min"``, or
      ``"sum"``, the start plus all increments. Of typed keys the first device's comes out.
    accumulator_dtype: What losses and gradients are added up in. Default: float32 or wider.
    skip_nonfinite: Whether to leave out a microbatch whose loss or gradients are not finite.
      "stack" and "concat" still have its values, and reverse-mode derivatives are then NaN.
    skip_empty: Whether a microbatch of weight zero is not run; "stack" and "concat" have zeros for
      it. Needs `weight_fn`. Reverse mode cannot pass. See the guide to padded text.
    in_place: Whether the backward pass adds gradients to their accumulators, layer by layer, which
      saves memory where layers are scanned. Needs JAX 0.10, and parameters in the dtype of their
      accumulators. The page of sharp edges has what it saves, and what it does not go with.
    axis_name: Inside `pmap` or `shard_map`, the axis that the batch is spread over. `fun` returns
      the loss of its device's rows. Gradients are reduced once, after the scan; "stack" and
      "concat" keep each device's values.
    unroll: As in `jax.lax.scan`.

  Returns:
    A function with `fun`'s arguments that returns what ``jax.value_and_grad(fun)`` does, in the
    same dtypes: ``(loss, grads)``, ``((loss, aux), grads)`` or ``((loss, (carry, aux)), grads)``.
    With `skip_nonfinite` a `MicrobatchStats` follows, which counts what was skipped.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work.
    TypeError: A value has the wrong type, as a loss that is not a real scalar.
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
