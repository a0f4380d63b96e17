"""`microbatch_value_and_grad`: `jax.value_and_grad` of a loss, in microbatches."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Literal, ParamSpec

from jax.typing import DTypeLike

from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import Slots, Split, WeightFn

P = ParamSpec("P")


def microbatch_value_and_grad(
  fun: Callable[P, Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  has_weight: bool = False,
  weight_fn: WeightFn | None = None,
  aux_reduction: ReductionTree = None,
  batch_argnums: Slots = None,
  reduction: Literal["mean", "sum"] = "mean",
  rng_argnums: Slots = None,
  carry_argnum: int | None = None,
  skip_nonfinite: bool = False,
  axis_name: AxisName | None = None,
  in_place: bool = False,
  accumulator_dtype: DTypeLike | None = None,
  carry_reduction: ReductionTree = None,
) -> Callable[P, tuple[Any, ...]]:
  """`jax.value_and_grad` that runs one microbatch after the other, in one `jax.lax.scan`.

  It returns the weighted means ``sum(w * g) / sum(w)`` over the microbatches, where ``w`` is the
  number of rows or what `weight_fn` counts. They equal the values of all rows at once if the loss
  is a mean over what the weights count: `check_split` tests this. Call it under `jax.jit`: outside,
  each call compiles a program of its own.

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
    fun: Returns ``loss``, a real scalar; ``(loss, aux)``; or ``(loss, (carry, aux))``. With
      `has_weight`, ``loss`` is ``(total, weight)``.
    argnums: The position or positions of what is differentiated. Default: 0.
    has_aux: Whether `fun` returns ``(loss, aux)``.
    num_microbatches: The number of equal parts. It must divide the rows. Give this or the next.
    microbatch_size: The rows of one microbatch, on one device. The last one may have fewer.
    has_weight: Whether `fun` returns ``(total, weight)`` where others return the loss: the sum of
      the losses of its rows, and how much they count, as for `weight_fn`. The loss is the sum of
      the totals over that of the weights, and so are gradients; the weight has none. No mask is
      written twice, and one that `fun` draws is counted as drawn. Excludes `weight_fn`
      and ``reduction="sum"``. With `in_place`, rows that do not count must be finite.
    weight_fn: ``weight_fn(batch) -> scalar``, how much a microbatch counts, such as its valid
      tokens: 0 or more. It gets every argument that is split, in the order of `batch_argnums`. The
      loss is multiplied by it before it is differentiated, so both must be in float32 or wider.
      Default: its rows.
    aux_reduction: How aux is combined: ``"mean"`` (weighted), ``"sum"``, ``"max"``, ``"min"``,
      ``"last"``, ``"stack"`` (on a new first axis), ``"concat"`` (the rows, in their order), a
      function ``merge(a, b)``, or a prefix tree of these. Default: the mean, which refuses an aux
      with one value per row.
    batch_argnums: What is split along its first axis: a position, the name of a keyword of the
      call, or a tuple of these, all with as many rows. Default: 1.
    reduction: ``"mean"``, weighted; or ``"sum"``, for a loss that is a sum over rows. What weighs
      0 is then left out, and other weights change nothing.

  Randomness and carried state:
    rng_argnums: The positions, or names of keywords, of random keys, typed or raw, or of pytrees of
      keys, into which the number of the microbatch is folded. Default: none, and then a typed key
      is an error. With ``()`` all microbatches share it.
    carry_argnum: The position of an argument that each microbatch updates for the next, such as
      batch statistics. `fun` then returns ``(loss, (new_carry, aux))``. Microbatches of weight 0 do
      not change it.

  Robustness and monitoring:
    skip_nonfinite: Whether to leave out microbatches whose loss or gradients are not finite. They
      count as weight 0, and a `MicrobatchStats` follows the results.

  Several devices:
    axis_name: Inside `pmap` or `shard_map`, the axis that rows are sharded over. Gradients are
      summed over it once, after the scan. "stack" and "concat" keep the values of each device.

  Expert options:
    in_place: Whether the backward pass adds each layer's gradient to the accumulator directly,
      which saves memory if layers are scanned. Needs JAX 0.10, and parameters in the dtype of their
      accumulators. "Sharp edges" has measurements, and lists the options that exclude it. With
      `weight_fn` and further axes of a mesh, or collectives in the loss, a microbatch that is empty
      on one device runs if it counts on another, and its loss must be finite. Others that are empty
      by `weight_fn` do not run, so "stack" and "concat" have zeros for them.
    accumulator_dtype: The dtype to add losses and gradients up in. Default: float32 or wider.
    carry_reduction: How devices, or merged cycles, combine their carries: a prefix tree of
      ``"mean"`` (weighted; default for floats), ``"sum"`` (the start plus all increments),
      ``"max"``, ``"min"`` and None, the default: ``{"right": "sum", "stats": None}``. A bare word
      is for every leaf, floats too. An integer or boolean that the loss changes has no default: it
      may be a count or an index. An array that the loss returns unchanged stays as it is. Keys are
      not combined: each device folds its index into its own, and those of the first come out.

  Returns:
    A function with `fun`'s arguments that returns what ``jax.value_and_grad(fun)`` does, in the
    same dtypes: ``(loss, grads)``, ``((loss, aux), grads)`` or ``((loss, (carry, aux)), grads)``.
    With `skip_nonfinite` a third result is a `MicrobatchStats`, the pair ``(total_weight,
    skipped_microbatches)``. `jax.jit` returns gradients of sharded parameters whole, unless it is
    given `out_shardings`.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work.
    TypeError: A value has the wrong type, such as a loss that is not a real scalar.
    NotImplementedError: ``in_place=True`` with JAX before 0.10, in `jax.vmap`, or differentiated.

  Edge cases:
    ============================  ======================================================
    one microbatch                the program of `jax.value_and_grad`, nothing added
    a smaller last microbatch     counts less, so that the result is exact
    zero weight                   contributes nothing, even where it is NaN
    all weights zero              zero loss and gradients; their "max" is -inf
    a traced weight below 0       the result is NaN
    NaN or inf                    weight 0 with `skip_nonfinite`; otherwise in the result
    ============================  ======================================================
  """
  # These are all arguments by name; `Split` and `LocalLoss` pick their options.
  asked = locals()
  split = Split.of(asked, default_argnum=1)
  loss = LocalLoss.of(fun, argnums, has_aux, split, asked)

  @functools.wraps(fun)
  def value_and_grad(*args, **kwargs):
    reduced = loss.value_and_grad(*args, **kwargs)
    out = reduced.outputs
    value = out.loss
    # This is a tuple of one carry, or an empty one without `carry_argnum`.
    if reduced.carry:
      value = (value, (*reduced.carry, out.aux))
    elif has_aux:
      value = (value, out.aux)
    if skip_nonfinite:
      return value, out.grads, reduced.stats
    return value, out.grads

  return value_and_grad
