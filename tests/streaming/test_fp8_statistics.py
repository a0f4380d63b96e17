"""Statistics of fp8 layers, which their gradients overwrite, beside an accumulation."""

import functools

from flax import linen
from flax.linen import fp8_ops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees

from optax_accum import accumulate

OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT


class Fp8Layer(linen.Module):
  """A layer in fp8, whose history holds as much as two steps leave there."""

  @linen.compact
  def __call__(self, x):
    op = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=2)
    return linen.Dense(4, dot_general_cls=op)(x)[:, 0]


def loss_fn(variables, batch):
  return jnp.mean((Fp8Layer().apply(variables, batch["x"]) - batch["y"]) ** 2)


def with_overwritten(tx):
  """`tx` for the parameters, beside statistics that are replaced by their gradients."""
  replaced = optax.stateless(
    lambda grads, params: jax.tree.map(jnp.subtract, grads, params)
  )
  labels = lambda tree: {k: k for k in tree}  # noqa: E731
  return optax.partition({"params": tx, OVERWRITTEN: replaced}, labels)


@pytest.mark.usefixtures("usual_promotion")
def test_statistics_are_to_be_kept_out_of_accumulate():
  rng = np.random.default_rng(0)
  batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=8)}
  batch["x"][rng.integers(8)] *= 100
  batch = jax.tree.map(np.float32, batch)
  init = jax.jit(Fp8Layer().init)
  variables = jax.device_get(init(jax.random.key(0), batch["x"]))
  gradient, seen = jax.jit(jax.grad(loss_fn)), {}
  masked = with_overwritten(accumulate(optax.sgd(1e-3), 2))
  averaged = accumulate(with_overwritten(optax.sgd(1e-3)), 2)
  for name, tx in {"masked": masked, "averaged": averaged}.items():
    held, update = variables, jax.jit(tx.update)
    state = trees.strong(jax.jit(tx.init)(variables))
    for part in trees.strided(batch, 2):
      updates, state = update(gradient(held, part), state, held)
      held = jax.device_get(jax.jit(optax.apply_updates)(held, updates))
    kept = held[OVERWRITTEN]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    seen[name] = kept["input_amax_history"].max()
    kernels = (x["params"]["Dense_0"]["kernel"] for x in (held, variables))
    assert np.any(np.not_equal(*kernels))
  largest = np.abs(batch["x"]).max()
  np.testing.assert_allclose(seen["masked"], largest, rtol=1e-6)
  assert seen["averaged"] < 0.7 * seen["masked"]
