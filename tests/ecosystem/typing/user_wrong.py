"""Mistakes that people make with optax_accum: each marked line is for a type checker to find.

mypy --strict user_wrong.py; pyright user_wrong.py    # an error on each marked line, no others
"""

import jax
import jax.numpy as jnp
import optax

from optax_accum import accumulate, make_train_step, microbatch, microbatch_value_and_grad
from optax_accum.flax import linen_train_step, nnx_train_step

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def loss_fn(params: Params, batch: Batch) -> jax.Array:
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def flax_loss(*args: Batch) -> jax.Array:
  return jnp.zeros(())


def predict(params: Params, batch: Batch) -> jax.Array:
  return batch["x"] @ params["w"]


def wrong(params: Params, batch: Batch) -> None:
  tx = optax.adamw(1e-3)

  # A reduction that there is not.
  accumulate(tx, every_k=8, reduction="avg")  # MISTAKE 1
  microbatch_value_and_grad(loss_fn, num_microbatches=8, reduction="avg")  # MISTAKE 1
  make_train_step(loss_fn, tx, num_microbatches=8, reduction="avg")  # MISTAKE 1
  microbatch(predict, reduction="cat", batch_argnums=1, num_microbatches=8)  # MISTAKE 1
  make_train_step(loss_fn, tx, num_microbatches=8, has_aux=True, aux_reduction="avg")  # MISTAKE 1

  # A number that is text.
  make_train_step(loss_fn, tx, num_microbatches="8")  # MISTAKE 2
  microbatch_value_and_grad(loss_fn, num_microbatches="8")  # MISTAKE 2
  accumulate(tx, every_k="8")  # MISTAKE 2
  linen_train_step(flax_loss, num_microbatches="8")  # MISTAKE 2

  # A misspelt keyword.
  make_train_step(loss_fn, tx, num_microbatch=8)  # MISTAKE 3
  microbatch_value_and_grad(loss_fn, num_microbatch=8)  # MISTAKE 3
  accumulate(tx, k=8)  # MISTAKE 3
  linen_train_step(flax_loss, num_microbatch=8)  # MISTAKE 3
  nnx_train_step(flax_loss, num_microbatch=8)  # MISTAKE 3

  # An option that is not the user's there.
  linen_train_step(flax_loss, num_microbatches=8, rng_argnums=2)  # MISTAKE 3
  make_train_step(loss_fn, tx, num_microbatches=8, axis_name="data")  # MISTAKE 3

  # What a function that runs in microbatches is called with.
  encode = microbatch(predict, reduction="concat", batch_argnums=1, num_microbatches=8)
  encode(params)  # MISTAKE 4
  encode(params, batch["x"])  # MISTAKE 4
  encode(params, batch, batch)  # MISTAKE 4
  step = make_train_step(loss_fn, tx, num_microbatches=8)
  step(params, tx.init(params))  # MISTAKE 4
  step(params, tx.init(params), batch["x"])  # MISTAKE 4
  step(batch["x"], tx.init(params), batch)  # MISTAKE 4

  # What `apply` returns.
  streaming = accumulate(tx, every_k=8)
  state = streaming.init(params)
  applied: Params = streaming.apply(params, state, params)  # MISTAKE 5
  print(applied)
