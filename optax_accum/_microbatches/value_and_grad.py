"""`microbatch_value_and_grad`: `jax.value_and_grad` of a loss, in microbatches."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Literal, ParamSpec

from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import GradReductionTree, ReductionTree
from optax_accum._microbatches.loss import local_loss
from optax_accum._microbatches.options import OTHER_NAMES, Split, WeightFn

Args = ParamSpec("Args")


@_validate.hinted(
  "Options go by name: microbatch_value_and_grad(fun, num_microbatches=8).", names=OTHER_NAMES
)
def microbatch_value_and_grad(
  fun: Callable[Args, Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  weight_fn: WeightFn | None = None,
  aux_reduction: ReductionTree = None,
  batch_argnums: int | Sequence[int] | None = None,
  reduction: Literal["mean", "sum"] = "mean",
  rng_argnums: int | Sequence[int] | None = None,
  carry_argnum: int | None = None,
  skip_nonfinite: bool = False,
  skip_empty: bool = False,
  axis_name: AxisName | None = None,
  in_place: bool = False,
  accumulator_dtype: DTypeLike | None = None,
  unroll: int | bool = 1,
  grad_reduction: GradReductionTree = None,
  carry_reduction: ReductionTree = None,
  concat_axis: int | None = None,
  batch_axis: int | tuple[int, ...] = 0,
  batch_argnames: str | Sequence[str] = (),
  rng_argnames: str | Sequence[str] = (),
) -> Callable[Args, tuple[Any, ...]]:
  """`jax.value_and_grad` that runs one microbatch after the other, in one `jax.lax.scan`.

  The value and the gradients are weighted means ``sum(w * g) / sum(w)`` over the microbatches,
  where ``w`` is the number of rows, or what `weight_fn` counts. They are those of all rows at once
  if the loss is a mean over what the weights count: ask `check_split`.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> params = jnp.array([1.0, -1.0])
    >>> value_and_grad = optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=3)
    >>> loss, grads = jax.jit(value_and_grad)(params, batch)
    >>> float(loss), grads.tolist()
    (4.0, [-20.0, -24.0])

  Args:
    fun: Returns a real scalar loss; with `has_aux` ``(loss, aux)``; with `carry_argnum`
      ``(loss, (new_carry, aux))``.
    argnums, has_aux: As in `jax.value_and_grad`: what to differentiate, and whether there is aux.
    num_microbatches: The number of equal parts. It must divide the rows. Give this or the next.
    microbatch_size: The rows of one microbatch, on one device. The last one may have fewer.
    weight_fn: How much a microbatch counts. `make_train_step` says more, of all options below too.
    aux_reduction: How the aux of all microbatches is combined. Default: the weighted mean.
    batch_argnums: The positions of the arguments that are split. Default: 1.
    reduction: ``"mean"``, weighted; or ``"sum"``, for a loss that is a sum over rows.
    rng_argnums: The positions of random keys, which get the microbatch's index folded in.
    carry_argnum: The position of an argument that each microbatch updates for the next.
    skip_nonfinite: Whether to leave out a microbatch whose loss or gradients are not finite.
    skip_empty: Whether a microbatch of weight 0 is not run.
    axis_name: Inside `pmap` or `shard_map`, the axis that the rows are sharded over. `fun` returns
      the loss of its device's rows. Gradients are summed over devices once, after the scan. "stack"
      and "concat" keep each device's values.

  Expert options:
    in_place, accumulator_dtype, unroll: How gradients are added up; scan steps at once.
    grad_reduction, carry_reduction: How gradients, and the carries of all devices, are combined.
    concat_axis, batch_axis: The axis that "concat" joins, and the one that is split.
    batch_argnames, rng_argnames: The names of keyword arguments that are split, or random keys.

  Returns:
    A function with `fun`'s arguments that returns what ``jax.value_and_grad(fun)`` does, in the
    same dtypes: ``(loss, grads)``, ``((loss, aux), grads)`` or ``((loss, (carry, aux)), grads)``.
    With `skip_nonfinite` a `MicrobatchStats` follows, which counts what was skipped.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work.
    TypeError: A value has the wrong type, as a loss that is not a real scalar.
    NotImplementedError: With `in_place`: JAX is older than 0.10, or the call is differentiated or
      inside `jax.vmap`.

  Edge cases:
    ============================  ======================================================
    one microbatch                the program of `jax.value_and_grad`, nothing added
    a smaller last microbatch     counts less, so that the result is exact
    zero weight                   contributes nothing, even where it is NaN
    all weights zero              zero loss and gradients; their "max" is -inf
    a traced weight below 0       the result is NaN
    NaN or inf, `skip_nonfinite`  weight 0, counted; otherwise it shows in the result
    ============================  ======================================================
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
