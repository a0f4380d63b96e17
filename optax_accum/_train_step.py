"""The whole cycle: N backward passes and one optimizer step in one jitted call."""

from collections.abc import Callable
from typing import Any, cast, Unpack

import chex
import jax
import jax.numpy as jnp
import optax

from optax_accum import _reduce, _validate
from optax_accum._conditional import update_if
from optax_accum._microbatch import loss_cycle, value_and_grad_cycle
from optax_accum._split import MicrobatchOptions, Split


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  has_aux: bool = False,
  donate: bool = True,
  **options: Unpack[MicrobatchOptions],
) -> Callable[..., Any]:
  """A jitted training step on a batch that is run in microbatches.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` computes the
  loss and gradients of the whole batch as `microbatch_value_and_grad` does, and takes
  one optimizer step with them, in one XLA program. Where nothing in the batch counted
  (all weights zero, or all microbatches skipped) there is no gradient to step with:
  parameters and optimizer state stay as they are and the metrics say so.

  Args:
    loss_fn: ``loss_fn(params, batch, ...)``, returning what `microbatch_value_and_grad`
      asks for. Its first argument is differentiated.
    tx: Any optax transformation. It is given the extra arguments ``value`` (the loss),
      ``grad``, ``value_fn`` (the loss of this batch at other parameters, in microbatches
      too, for a line search) and ``weight`` (the total weight), so a `tx` that
      accumulates over calls weighs them right.
    has_aux: Whether `loss_fn` returns ``(loss, aux)``.
    donate: Donate the parameters and the optimizer state to the step, which updates them
      in place: the arrays passed in are deleted. Without it the step needs room for both
      twice.
    **options: The keyword arguments of `microbatch_value_and_grad`; `num_microbatches` or
      `microbatch_size` is required.

  Returns:
    The jitted step. Arguments of `loss_fn` after the batch follow the batch in the call.
    With `carry_argnum` the new carry comes before the metrics. ``step.lower(...)`` takes
    the same arguments, so ``step.lower(...).compile().memory_analysis()`` tells the
    memory before anything runs.

    ``metrics`` is a dict of arrays: ``loss``; ``grad_norm``, the global norm of the
    gradients before `tx`, in float32 or better; ``aux``, where there is one;
    ``total_weight`` (float32) and ``skipped_microbatches`` (int32).

  Raises:
    ValueError, TypeError: As `microbatch_value_and_grad`, and if `tx` is no optax
      transformation.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> tx = optax.sgd(0.01)
    >>> step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=3)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> params = jnp.array([1.0, -1.0])
    >>> params, opt_state, metrics = step(params, tx.init(params), batch)
    >>> float(metrics["loss"]), float(metrics["total_weight"])
    (4.0, 6.0)
  """
  _validate.transformation(tx, "tx")
  tx = optax.with_extra_args_support(tx)
  reduction = options.pop("reduction", "mean")
  aux_reduction = options.pop("aux_reduction", "mean")
  split = Split(**cast(Any, {"batch_argnums": 1, **options}))
  cycle = value_and_grad_cycle(loss_fn, 0, has_aux, reduction, aux_reduction, split)
  loss_only = loss_cycle(loss_fn, has_aux, reduction, split)

  def train_step(params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    carry, out, stats = cycle(params, *args, **kwargs)

    def value_fn(params: Any, weight: Any = None) -> jax.Array:
      del weight  # optax's line searches refuse an extra argument that value_fn lacks
      return loss_only(params, *args, **kwargs)

    def update(held: Any) -> Any:
      params, opt_state = held
      updates, opt_state = tx.update(
        out.grads,
        opt_state,
        params,
        value=out.loss,
        grad=out.grads,
        value_fn=value_fn,
        weight=stats.total_weight,
      )
      return optax.apply_updates(params, updates), opt_state

    with jax.named_scope("optimizer"):
      if split.weighs:
        held = update_if(stats.total_weight > 0, update, (params, opt_state))
      else:
        held = update((params, opt_state))
    metrics = {"loss": out.loss, "grad_norm": _global_norm(out.grads), **stats._asdict()}
    if has_aux or carry:
      metrics["aux"] = out.aux
    return *held, *carry, metrics

  if not donate:
    return jax.jit(train_step)
  return _DonatingStep(jax.jit(train_step, donate_argnums=(0, 1)))


class _DonatingStep:
  """A jitted step that takes states in which one array stands twice.

  ``init`` of optax's `lookahead` and `lbfgs` returns such states, and XLA refuses to be
  donated one buffer twice. All that the step returns is distinct, so this copies once.
  """

  def __init__(self, jitted: Callable[..., Any]):
    self._jitted = jitted

  def __call__(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    seen: set[int] = set()

    def distinct(x: Any) -> Any:
      if id(x) in seen and isinstance(x, jax.Array):
        return jnp.copy(x)
      seen.add(id(x))
      return x

    params, opt_state = jax.tree.map(distinct, (params, opt_state))
    return self._jitted(params, opt_state, *args, **kwargs)

  def __getattr__(self, name: str) -> Any:  # lower, trace, eval_shape, clear_cache, ...
    return getattr(self._jitted, name)


def _global_norm(tree: chex.ArrayTree) -> jax.Array:
  return optax.tree.norm(jax.tree.map(lambda x: x.astype(_reduce.accumulator_dtype(x.dtype)), tree))
