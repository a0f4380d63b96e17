"""What ``in_place=True`` cannot do, said in words."""

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_accum import _versions, make_train_step, microbatch_value_and_grad


def loss_fn(params, batch):
  return jnp.mean((batch @ params) ** 2)


PARAMS, BATCH = jnp.ones(3), jnp.ones((8, 3))


@pytest.fixture
def supported(monkeypatch):
  """As a JAX that can."""
  monkeypatch.setattr(_versions, "ADDS_TO_REFERENCES", True)


@pytest.mark.usefixtures("supported")
def test_skipping_what_is_not_finite_does_not_go_with_it():
  options = {"num_microbatches": 2, "skip_nonfinite": True, "in_place": True}
  with pytest.raises(ValueError, match=r"skip_nonfinite=True .*in_place=False"):
    make_train_step(loss_fn, optax.sgd(0.1), **options)


def test_a_jax_that_cannot_is_refused(monkeypatch):
  monkeypatch.setattr(_versions, "ADDS_TO_REFERENCES", False)
  message = rf"needs JAX 0\.10 or newer, and this is {jax.__version__}: pass in_place=False"
  with pytest.raises(NotImplementedError, match=message):
    microbatch_value_and_grad(loss_fn, num_microbatches=2, in_place=True)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_whose_accumulators_have_another_dtype_are_refused(dtype):
  run = microbatch_value_and_grad(loss_fn, num_microbatches=2, in_place=True)
  message = rf"params has dtype {jnp.dtype(dtype)}, and its gradients .* added up in float32,"
  with pytest.raises(TypeError, match=message + r".*keep parameters in float32"):
    run(PARAMS.astype(dtype), BATCH.astype(dtype))
  run = microbatch_value_and_grad(
    loss_fn, num_microbatches=2, in_place=True, accumulator_dtype=jnp.bfloat16
  )
  message = r"params has dtype float32, .* in bfloat16, .* give no accumulator_dtype; or"
  with pytest.raises(TypeError, match=message):
    run(PARAMS, BATCH)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("jit", [True, False])
def test_under_vmap_it_is_refused(jit):
  run = microbatch_value_and_grad(loss_fn, num_microbatches=2, in_place=True)
  message = r"mapped by jax\.vmap: .* or take jax\.lax\.map without its batch"
  with pytest.raises(NotImplementedError, match=message):
    jax.vmap(jax.jit(run) if jit else run, (None, 0))(PARAMS, jnp.stack([BATCH, BATCH]))
