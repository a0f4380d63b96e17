"""Functions of a batch, transformed to run in microbatches."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import chex
import jax

from optax_accum import _arguments, _reduce, _reductions, _validate
from optax_accum._scan import MicrobatchStats, run_cycle
from optax_accum._shards import Shards
from optax_accum._split import Call, Split


def microbatch(
  fun: Callable[..., Any],
  *,
  reduction: Any,
  batch_argnums: int | Sequence[int] = 0,
  batch_argnames: str | Sequence[str] = (),
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  batch_axis: int = 0,
  weight_fn: Callable[..., chex.Numeric] | None = None,
  rng_argnums: int | Sequence[int] = (),
  rng_argnames: str | Sequence[str] = (),
  accumulator_dtype: chex.ArrayDType | None = None,
  axis_name: Any = None,
  unroll: int | bool = 1,
) -> Callable[..., Any]:
  """`fun`, run over the microbatches of its batch in one `jax.lax.scan`.

  For evaluation, encoding and statistics on a batch whose intermediate values do not
  fit: the memory is that of one microbatch. For gradients, `microbatch_value_and_grad`.

  Args:
    fun: Any function of arrays; `microbatch` may be around `jax.jit` or inside it.
    reduction: How the microbatches' outputs become one: a prefix tree over the outputs,
      of ``"mean"`` (weighted), ``"sum"``, ``"max"``, ``"min"``, ``"last"``, ``"stack"``
      (a new leading axis of microbatches) and ``"concat"`` (along the leading axis, which
      must be the microbatch's rows; in the batch's own order).
    batch_argnums: The positions of the arguments that are split.
    batch_argnames: The names of keyword arguments that are split.
    num_microbatches: How many; must divide the rows. This or `microbatch_size`.
    microbatch_size: The rows of one microbatch; the last one may be smaller.
    batch_axis: The axis that is split, of every leaf of the batch.
    weight_fn: As in `microbatch_value_and_grad`, and so are all arguments below.
    rng_argnums: The positions of keys, folded with the microbatch's index.
    rng_argnames: The names of such keyword arguments.
    accumulator_dtype: The dtype of sums and means.
    axis_name: The mapped axis that the batch is spread over, inside `pmap` or `shard_map`.
    unroll: As in `jax.lax.scan`.

  Returns:
    A function with `fun`'s arguments and `fun`'s outputs, reduced.

  Raises:
    ValueError: If a count, a name, an argument or a shape cannot work.
    TypeError: If a value has the wrong type, or an output a dtype that its reduction lacks.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_accum
    >>> def evaluate(x):
    ...   return {"logits": 2 * x, "correct": jnp.sum(x > 2)}
    >>> evaluate_in_parts = optax_accum.microbatch(
    ...     evaluate, reduction={"logits": "concat", "correct": "sum"}, microbatch_size=2)
    >>> out = evaluate_in_parts(jnp.arange(5.0))
    >>> out["logits"].tolist(), int(out["correct"])
    ([0.0, 2.0, 4.0, 6.0, 8.0], 2)

  References:
    `optax.microbatching.microbatch` is the closest peer. It needs a batch that divides
    evenly, counts every microbatch the same and folds no keys.
  """
  split = Split(
    num_microbatches=num_microbatches,
    microbatch_size=microbatch_size,
    batch_argnums=batch_argnums,
    batch_argnames=batch_argnames,
    batch_axis=batch_axis,
    weight_fn=weight_fn,
    rng_argnums=rng_argnums,
    rng_argnames=rng_argnames,
    accumulator_dtype=accumulator_dtype,
    axis_name=axis_name,
    unroll=unroll,
  )
  _reductions.check_names("reduction", reduction)

  @functools.wraps(fun)
  def once(*args: Any, **kwargs: Any) -> tuple[None, Any]:
    return None, fun(*args, **kwargs)

  @functools.wraps(fun)
  def microbatched(*args: Any, **kwargs: Any) -> Any:
    return run_cycle(Call(once, split, args, kwargs), reduction)[1]

  return microbatched


def microbatch_value_and_grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  batch_argnums: int | Sequence[int] = 1,
  batch_argnames: str | Sequence[str] = (),
  batch_axis: int = 0,
  reduction: str = "mean",
  weight_fn: Callable[..., chex.Numeric] | None = None,
  aux_reduction: Any = "mean",
  rng_argnums: int | Sequence[int] = (),
  rng_argnames: str | Sequence[str] = (),
  carry_argnum: int | None = None,
  accumulator_dtype: chex.ArrayDType | None = None,
  skip_nonfinite: bool = False,
  axis_name: Any = None,
  unroll: int | bool = 1,
) -> Callable[..., Any]:
  r"""`jax.value_and_grad` that runs microbatch by microbatch, in one `jax.lax.scan`.

  With :math:`w_i` the weight of microbatch i (its rows, or what `weight_fn` counts),
  the value and the gradients are those of the whole batch,

  .. math:: \sum_i w_i g_i \Big/ \sum_i w_i

  for a loss that is itself a mean over what the weights count. A loss in which rows
  meet each other (contrastive, batch normalisation without a threaded carry) is not
  such a mean, and no sum over microbatches gives its gradient.

  The scan compiles one body whatever the number of microbatches, holds the gradient
  sum and one microbatch's activations, and adds plain sums that are divided once.

  ==============================  ====================================================
  edge case                       what happens
  ==============================  ====================================================
  one microbatch                  the program of `jax.value_and_grad`, nothing added
  rows do not divide              `microbatch_size`: the last one is smaller and weighs
                                  less, exactly; `num_microbatches`: an error
  zero weight                     contributes nothing, even where it is NaN
  all weights zero                zero loss, zero gradients, `total_weight` 0
  NaN or inf, `skip_nonfinite`    weight 0, counted; otherwise it shows in the result
  skipped or zero-weight carry    the carry of the microbatch before is kept
  ==============================  ====================================================

  Args:
    fun: Returns a real scalar loss, or ``(loss, aux)`` with `has_aux`, or
      ``(loss, (new_carry, aux))`` with `carry_argnum`.
    argnums: As in `jax.value_and_grad`: what to differentiate, a position or several.
    has_aux: Whether `fun` returns ``(loss, aux)``.
    num_microbatches: How many microbatches; must divide the rows. This or
      `microbatch_size`, exactly one of the two.
    microbatch_size: The rows of one microbatch. More than the batch has means one.
    batch_argnums: The positions of the arguments that are split, each a pytree of arrays
      with the same rows. Default 1: ``fun(params, batch)``.
    batch_argnames: The names of keyword arguments that are split too.
    batch_axis: The axis of every batch leaf that is split.
    reduction: ``"mean"``, the weighted mean of losses and gradients; or ``"sum"``, their
      plain sum, for a loss that is a sum over rows.
    weight_fn: ``weight_fn(*batch_args) -> scalar``, called with the microbatch: the
      number of valid tokens, for a loss that is a mean over valid tokens. Batch arguments
      passed by name are passed by name. Default: the rows.
    aux_reduction: How aux is reduced: a prefix tree of the names that `microbatch` takes.
      ``"mean"`` is weighted as the loss. A value for each row needs ``"concat"``.
    rng_argnums: The positions of random keys, trees of typed or raw uint32 keys; each is
      ``jax.random.fold_in(key, i)`` in microbatch i (after the device's index on
      `axis_name`), with one microbatch too, so that no two share noise.
    rng_argnames: The names of such keyword arguments.
    carry_argnum: The position of an argument that is threaded through the microbatches,
      such as batch statistics: each sees the one that the microbatch before returned.
      They are updated once per microbatch, so N updates with momentum m weigh as one
      with m**N.
    accumulator_dtype: The dtype that losses and gradients are added up in. Default: their
      own promoted with float32, since bfloat16 stops counting at 256 equal addends.
    skip_nonfinite: Leave a microbatch whose loss or gradients are not finite out.
    axis_name: Inside `pmap` or `shard_map`, the axis that the batch is spread over:
      gradients stay local through the scan and are reduced once, weights too. A carry is
      averaged. ``"stack"`` and ``"concat"`` stay local to the device.
    unroll: As in `jax.lax.scan`. The default 1 is right unless the body is tiny.

  Returns:
    A function with `fun`'s arguments that returns what ``jax.value_and_grad(fun)`` does,
    every leaf in the dtype that it has there: ``(loss, grads)``, or
    ``((loss, aux), grads)``, or ``((loss, (carry, aux)), grads)``. With
    `skip_nonfinite` the `MicrobatchStats` follow as a third item, since a skip should be
    seen.

  Raises:
    ValueError: If a count, a name, an argument or a shape cannot work.
    TypeError: If a value has the wrong type: an integer parameter, a loss that is not a
      real scalar, a return that does not fit `has_aux`, an integer aux under "mean".

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> params = jnp.array([1.0, -1.0])
    >>> step = optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=3)
    >>> loss, grads = jax.jit(step)(params, batch)
    >>> float(loss), grads.tolist()
    (4.0, [-20.0, -24.0])

  References:
    `optax.microbatching.micro_grad` and `jax.value_and_grad`.
  """
  split = Split(
    num_microbatches=num_microbatches,
    microbatch_size=microbatch_size,
    batch_argnums=batch_argnums,
    batch_argnames=batch_argnames,
    batch_axis=batch_axis,
    weight_fn=weight_fn,
    rng_argnums=rng_argnums,
    rng_argnames=rng_argnames,
    carry_argnum=carry_argnum,
    accumulator_dtype=accumulator_dtype,
    skip_nonfinite=skip_nonfinite,
    axis_name=axis_name,
    unroll=unroll,
  )
  cycle = value_and_grad_cycle(fun, argnums, has_aux, reduction, aux_reduction, split)

  @functools.wraps(fun)
  def value_and_grad(*args: Any, **kwargs: Any) -> Any:
    carry, outputs, stats = cycle(*args, **kwargs)
    value = outputs.loss
    if carry:
      value = (outputs.loss, (*carry, outputs.aux))
    elif has_aux:
      value = (outputs.loss, outputs.aux)
    return (value, outputs.grads, stats) if skip_nonfinite else (value, outputs.grads)

  return value_and_grad


class Outputs(NamedTuple):
  """What one microbatch of a differentiated function gives, named for the messages."""

  loss: Any
  aux: Any
  grads: Any


def checked_loss(fun: Callable[..., Any], has_aux: bool, carries: bool) -> Callable[..., Any]:
  """`fun`, whose return is checked when it is traced."""

  @functools.wraps(fun)
  def checked(*args: Any, **kwargs: Any) -> Any:
    out = fun(*args, **kwargs)
    _validate.loss(out, has_aux, carries)
    return out

  return checked


def loss_cycle(
  fun: Callable[..., Any],
  has_aux: bool,
  reduction: str,
  split: Split,
  shards: Shards | None = None,
) -> Callable[..., jax.Array]:
  """The loss alone, of the whole batch, in microbatches."""
  carries = split.carry_argnum is not None
  checked = checked_loss(fun, has_aux, carries)

  @functools.wraps(fun)
  def once(*args: Any, **kwargs: Any) -> tuple[Any, Outputs]:
    out = checked(*args, **kwargs)
    loss, aux = out if has_aux or carries else (out, (None,))
    return aux[0] if carries else None, Outputs(loss, None, None)

  def cycle(*args: Any, **kwargs: Any) -> jax.Array:
    if shards is not None:
      args = (shards.gather(args[0]), *args[1:])
    return run_cycle(Call(once, split, args, kwargs), Outputs(reduction, None, None))[1].loss

  return cycle


def value_and_grad_cycle(
  fun: Callable[..., Any],
  argnums: int | Sequence[int],
  has_aux: bool,
  reduction: str,
  aux_reduction: Any,
  split: Split,
  shards: Shards | None = None,
) -> Callable[..., tuple[Any, Outputs, MicrobatchStats]]:
  """`microbatch_value_and_grad` with all that a cycle has in hand: carry, outputs, stats.

  With `shards`, each device is given its shards of the first argument, and returns its
  shards of the gradients.
  """
  _validate.one_of("reduction", reduction, ("mean", "sum"))
  _reductions.check_names("aux_reduction", aux_reduction)
  carries = split.carry_argnum is not None
  has_aux = has_aux or carries
  wanted = _arguments.names_or_positions("argnums", argnums, int)
  if not wanted or len(set(wanted)) < len(wanted):
    raise ValueError(f"argnums={argnums!r} must name one or more arguments, each once.")
  transformed = jax.value_and_grad(checked_loss(fun, has_aux, carries), argnums, has_aux)

  @functools.wraps(fun)
  def once(*args: Any, **kwargs: Any) -> tuple[Any, Outputs]:
    if shards is not None and shards.every_microbatch:
      args = (shards.gather_in_loop(*args), *args[1:])
    value, grads = transformed(*args, **kwargs)
    loss, aux = value if has_aux else (value, None)
    carry = None
    if carries and aux is not None:
      carry, aux = aux
    return carry, Outputs(loss, aux, grads)

  def cycle(*args: Any, **kwargs: Any) -> tuple[Any, Outputs, MicrobatchStats]:
    positions = _arguments.positions("argnums", wanted, args)
    args_ = list(args)
    if shards is not None and not shards.every_microbatch:
      args_[0] = shards.gather(args[0])
    for i in positions:
      _validate.inexact_leaves(f"argument {i}", args[i])
      args_[i] = _reduce.varying(args_[i], split.axis_name)
    call = Call(once, split, args_, kwargs, differentiated=positions)

    def kinds(like: Outputs) -> Outputs:
      return Outputs(
        reduction, _reductions.match("aux_reduction", aux_reduction, like.aux), reduction
      )

    spread = None
    if shards is not None:
      spread = Outputs(_reductions.Spread(), _reductions.Spread(), shards.spread)
    return run_cycle(call, kinds, root="", finite=lambda out: (out.loss, out.grads), spread=spread)

  return cycle
