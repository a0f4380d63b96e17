"""Transformations for tests, and the mini step that calls one."""

import jax
import jax.numpy as jnp
import optax

FORMS = ("update", "apply")


def mini_step(tx, form="update"):
  """``step(params, state, grads, ...)``: by `tx.update` and `optax.apply_updates`, or `tx.apply`.

  Keywords (weight, flush, value, ...) go to `tx`.
  """

  def by_update(params, state, grads, **kwargs):
    updates, state = tx.update(grads, state, params, **kwargs)
    return optax.apply_updates(params, updates), state

  def by_apply(params, state, grads, **kwargs):
    return tx.apply(grads, state, params, **kwargs)

  return {"update": by_update, "apply": by_apply}[form]


def relaxed(tx):
  """`tx` with JAX's usual promotion: optax's own code promotes (Adam's bias correction does)."""

  def update(updates, state, params=None, **extra_args):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def clipped_adamw(norm=0.5):
  """What large models are trained with: a step looks at all gradients, and has two moments."""
  return relaxed(optax.chain(optax.clip_by_global_norm(norm), optax.adamw(1e-2)))


def loss_elsewhere():
  """A transformation that steps by nothing; its state is the loss at twice the parameters."""

  def update(updates, state, params, *, value_fn, **extra_args):
    value = value_fn(jax.tree.map(lambda x: x + x, params))
    return jax.tree.map(jnp.zeros_like, updates), value

  return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


def with_loss_elsewhere(tx):
  """`tx`, with the loss at twice the parameters as another part of its state."""

  def update(updates, state, params, *, value_fn, **extra_args):
    value = value_fn(jax.tree.map(lambda x: x + x, params))
    updates, inner = tx.update(updates, state[0], params, value_fn=value_fn, **extra_args)
    return updates, (inner, value)

  def init(params):
    return tx.init(params), jnp.zeros(())

  return optax.GradientTransformationExtraArgs(init, update)


# By name, for runs whose parameters are "w", "b" and "scale". An eps bounds how much the step of a
# parameter whose gradient is nearly zero magnifies rounding.
DRAWN = {
  "sgd": lambda: optax.sgd(0.3),
  "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
  "adam": lambda: optax.adam(0.1, eps=1e-2),
  "clip+adamw": lambda: optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(
      optax.linear_schedule(0.1, 0.01, 3), eps=1e-2, weight_decay=0.1
    ),
  ),
  "lion": lambda: optax.lion(0.05),
  "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
  "partition": lambda: optax.partition({"a": optax.adam(0.1, eps=1e-2), "s": optax.sgd(0.1)}, GROUPS),
  "masked": lambda: optax.chain(
    optax.masked(
      optax.add_decayed_weights(0.1), {"w": True, "b": False, "scale": False}
    ),
    optax.sgd(0.2),
  ),
  "inject": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 3), eps=1e-2),
  "lbfgs": lambda: optax.lbfgs(),
  "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.5),
  "linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=12)),
}  # fmt: skip
GROUPS = {"w": "a", "b": "s", "scale": "s"}
