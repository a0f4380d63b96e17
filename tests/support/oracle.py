"""Training without the library: what its results must equal, and its costs are compared with."""

import jax
from jax import lax
import jax.numpy as jnp
import optax

from support import trees


def whole_batch_step(loss_fn, tx):
  """The ordinary step on the whole batch at once, jitted; `tx` may search along a line."""
  tx = optax.with_extra_args_support(tx)

  @jax.jit
  def step(params, opt_state, *args):
    def value_fn(params):
      return loss_fn(params, *args)

    value, grad = jax.value_and_grad(value_fn)(params)
    extra_args = {"value": value, "grad": grad, "value_fn": value_fn}
    updates, opt_state = tx.update(grad, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), opt_state, {"loss": value}

  return step


def take_steps(step, tx, params, batches):
  """Parameters, optimizer state and last loss after a step on each of the batches, in NumPy.

  `step` is `whole_batch_step`'s or `make_train_step`'s.
  """
  opt_state = trees.strong(tx.init(params))
  for batch in batches:
    params, opt_state, metrics = step(params, opt_state, batch)
  return jax.device_get((params, opt_state, metrics["loss"]))


def hand_written(loss_fn, n):
  """Loss and gradients as people write them: a scan over blocks of rows that adds gradients."""

  def value_and_grad(params, batch):
    def body(total, part):
      return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(body, start, trees.blocks(batch, n))
    return jax.tree.map(lambda x: x / n, total)

  return value_and_grad


def with_optimizer(value_and_grad, tx):
  """A jitted step by these gradients, with the metrics of ours, and buffers donated."""

  def step(params, opt_state, batch):
    loss, grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(params, updates), opt_state, metrics

  return jax.jit(step, donate_argnums=(0, 1))
