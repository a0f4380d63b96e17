"""What ``in_place=True`` cannot do, said in words."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from support.devices import make_mesh

from optax_accum import _versions, make_train_step, microbatch_value_and_grad


def loss_fn(params, batch):
  return jnp.mean((batch @ params) ** 2)


def rows_of(batch):
  return jnp.float32(1) * len(batch)


PARAMS, BATCH = jnp.ones(3), jnp.ones((8, 3))


@pytest.fixture
def supported(monkeypatch):
  """As a JAX that can."""
  monkeypatch.setattr(_versions, "ADDS_TO_REFERENCES", True)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"skip_nonfinite": True},
      r"complete, so that skip_nonfinite=True with .* cannot leave them out.*: pass in_place=False",
    ),
    (
      {"grad_reduction": "sum"},
      r"grad_reduction='sum' cannot .* in another way than losses: pass",
    ),
    (
      {"mesh": make_mesh(2), "reduce_gradients": "per_microbatch"},
      r'"per_microbatch" keeps shards: pass in_place=False, or "per_cycle"',
    ),
  ],
)
def test_options_that_it_does_not_go_with_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    make_train_step(
      loss_fn, optax.sgd(0.1), num_microbatches=2, in_place=True, **options
    )


def test_a_jax_that_cannot_is_refused(monkeypatch):
  monkeypatch.setattr(_versions, "ADDS_TO_REFERENCES", False)
  message = rf"needs JAX 0\.10 or newer, and this is {jax.__version__}: pass in_place=False"
  with pytest.raises(NotImplementedError, match=message):
    microbatch_value_and_grad(loss_fn, num_microbatches=2, in_place=True)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_whose_accumulators_have_another_dtype_are_refused(dtype):
  run = microbatch_value_and_grad(loss_fn, num_microbatches=2, in_place=True)
  message = rf"argument 0 has dtype {jnp.dtype(dtype)}, and its gradients .* added up in float32;"
  with pytest.raises(
    TypeError, match=message + r".*Keep parameters in float32"
  ):
    run(PARAMS.astype(dtype), BATCH.astype(dtype))
  run = microbatch_value_and_grad(
    loss_fn, num_microbatches=2, in_place=True, accumulator_dtype=jnp.bfloat16
  )
  message = r"argument 0 has dtype float32, .* in bfloat16; .* give no accumulator_dtype, or"
  with pytest.raises(TypeError, match=message):
    run(PARAMS, BATCH)


@pytest.mark.usefixtures("supported")
def test_a_narrow_loss_that_is_weighed_is_refused():
  def run(dtype, *params):
    def narrow(params, batch):
      return sum(
        loss_fn(x, batch.astype(x.dtype)).astype(dtype) for x in params
      )

    microbatch_value_and_grad(narrow, microbatch_size=3, in_place=True)(
      params, BATCH
    )

  message = r"The loss has dtype {}, .*return the loss in the parameters' dtype"
  with pytest.raises(TypeError, match=message.format("bfloat16")):
    run(jnp.bfloat16, PARAMS)
  with (
    jax.enable_x64(True),
    pytest.raises(TypeError, match=message.format("float32")),
  ):
    run(jnp.float32, PARAMS, PARAMS.astype(jnp.float64))


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("jit", [True, False])
def test_under_vmap_it_is_refused(jit):
  run = microbatch_value_and_grad(loss_fn, num_microbatches=2, in_place=True)
  message = r"jax\.vmap cannot give a further axis: .* or take jax\.lax\.map \(without its batch"
  with pytest.raises(NotImplementedError, match=message):
    jax.vmap(jax.jit(run) if jit else run, (None, 0))(
      PARAMS, jnp.stack([BATCH, BATCH])
    )


@pytest.mark.usefixtures("supported")
def test_outside_of_a_step_weights_and_a_loss_that_communicates_are_refused():
  def together(params, batch):
    return loss_fn(params, batch) + 0 * jax.lax.psum(jnp.sum(batch), "data")

  def gradient(params, batch):
    run = microbatch_value_and_grad(
      together, num_microbatches=2, in_place=True, weight_fn=rows_of
    )
    return run(params, batch)[1]

  on_each = jax.shard_map(
    gradient,
    mesh=make_mesh(2),
    in_specs=(P(), P("data")),
    out_specs=P(),
    check_vma=False,
  )
  with pytest.raises(
    ValueError, match=r"in_place=True with weight_fn, and .* give axis_name"
  ):
    jax.jit(on_each)(PARAMS, BATCH)
