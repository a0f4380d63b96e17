"""`linen_train_step`: a `TrainState` in, the whole batch's `TrainState` and metrics out."""

import functools
from typing import Any

import flax.linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.devices import make_mesh

from optax_accum import accumulate
import optax_accum.flax
from optax_accum.flax import linen_train_step

ROWS, WIDTH, CLASSES = 24, 6, 3


class TrainState(train_state.TrainState):
  batch_stats: Any = None


class Model(nn.Module):
  norm: bool = False
  rate: float = 0.0

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(8, param_dtype=x.dtype, dtype=x.dtype)(x)
    if self.norm:
      x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=x.dtype)(x)
    x = nn.Dropout(self.rate, deterministic=not train)(nn.tanh(x))
    return nn.Dense(CLASSES, param_dtype=x.dtype, dtype=x.dtype)(x)


@pytest.fixture(autouse=True)
def usual_promotion():
  """JAX's usual promotion, which flax relies on."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def make_batch(dtype=np.float64):
  rng = np.random.default_rng(0)
  return {
    "x": rng.normal(size=(ROWS, WIDTH)).astype(dtype),
    "y": rng.integers(CLASSES, size=ROWS),
    "weight": rng.integers(0, 3, ROWS).astype(dtype),
  }


def make_state(model, batch, tx=None):
  variables = model.init(jax.random.key(0), batch["x"], train=False)
  return TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    tx=tx or optax.adam(0.1),
    batch_stats=variables.get("batch_stats"),
  )


def mean_loss(logits, batch):
  each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  return jnp.sum(each * batch["weight"]) / jnp.sum(batch["weight"])


def total(batch):
  return jnp.sum(batch["weight"])


def steps_of_flax(state, loss_fn, batch, count):
  for _ in range(count):
    state = state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))
  return state


@pytest.mark.parametrize("size", [24, 8, 5, 1])
@pytest.mark.parametrize("count", [None, 8])
def test_steps_are_those_of_the_whole_batch(size, count):
  model = Model()
  mesh = None if count is None else make_mesh(count)
  if mesh is not None and size in (5, 1):
    size = 16 if size == 5 else 8

  def loss_fn(variables, batch, rngs):
    assert rngs is None
    return mean_loss(model.apply(variables, batch["x"]), batch)

  with jax.enable_x64(True):
    batch = make_batch()
    state = make_state(model, batch)
    plain = lambda params, batch: loss_fn({"params": params}, batch, None)  # noqa: E731
    expected = steps_of_flax(state, plain, batch, 3)
    step = linen_train_step(loss_fn, microbatch_size=size, weight_fn=total, mesh=mesh)
    for _ in range(3):
      state, metrics = step(state, batch)
    trees.assert_close(jax.device_get(state.params), expected.params, 1e-10)
    assert int(state.step) == 3
    assert set(metrics) == {"loss", "grad_norm", "total_weight", "skipped_microbatches"}


def test_statistics_are_those_of_a_loop_over_microbatches():
  model = Model(norm=True)

  def loss_fn(variables, batch, rngs):
    logits, updates = model.apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])), updates

  batch = make_batch(np.float32)
  state = make_state(model, batch)
  stats = state.batch_stats
  for i in range(4):
    part = jax.tree.map(lambda x: x[i::4], batch)  # noqa: B023
    variables = {"params": state.params, "batch_stats": stats}
    stats = model.apply(variables, part["x"], mutable=["batch_stats"])[1]["batch_stats"]
  step = linen_train_step(loss_fn, mutable="batch_stats", num_microbatches=4)
  state, metrics = step(state, batch)
  trees.assert_close(state.batch_stats, stats, 1e-5)
  assert "aux" not in metrics


def test_dropout_keys_are_folded_and_repeat():
  model = Model(rate=0.5)

  def loss_fn(variables, batch, rngs):
    logits = model.apply(variables, batch["x"], rngs=rngs)
    return mean_loss(logits, batch), logits

  batch = make_batch(np.float32)
  batch["x"] = np.repeat(batch["x"][:1], ROWS, 0)
  step = linen_train_step(
    loss_fn, has_aux=True, num_microbatches=4, aux_reduction="stack", donate=False
  )
  state = make_state(model, batch)
  runs = [step(state, batch, {"dropout": jax.random.key(1)}) for _ in range(2)]
  trees.assert_close(runs[0][0].params, runs[1][0].params, 0)
  logits = np.asarray(runs[0][1]["aux"])
  assert not np.allclose(logits[0], logits[1])


@pytest.mark.parametrize("outermost", [True, False])
def test_a_streaming_state_steps_as_the_whole_batch(outermost):
  model = Model()

  def loss_fn(params, batch):
    return mean_loss(model.apply({"params": params}, batch["x"]), batch)

  with jax.enable_x64(True):
    batch, tx = make_batch(), optax.adam(0.1)
    expected = steps_of_flax(make_state(model, batch, tx), loss_fn, batch, 2)
    streaming = accumulate(tx, 4)
    streaming = streaming if outermost else optax.chain(streaming, optax.scale(1.0))
    params = make_state(model, batch).params
    state = optax_accum.flax.TrainState.create(apply_fn=None, params=params, tx=streaming)

    @functools.partial(jax.jit, donate_argnums=0)
    def mini_step(state, part):
      grads = jax.grad(loss_fn)(state.params, part)
      return state.apply_gradients(grads=grads, weight=total(part))

    for i in range(8):
      state = mini_step(state, jax.tree.map(lambda x: x[i % 4 :: 4], batch))  # noqa: B023
    trees.assert_close(state.params, expected.params, 1e-10)
    assert (int(state.step), int(state.gradient_step)) == (8, 2)


def test_a_state_without_accumulate_is_refused():
  state = optax_accum.flax.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1)
  )
  with pytest.raises(ValueError, match=r"tx is no accumulate and holds none: wrap it, accumulate"):
    state.apply_gradients(grads={"w": jnp.ones(2)}, weight=2.0)
  with pytest.raises(ValueError, match=r"has no gradient_step: use state\.step"):
    state.gradient_step  # noqa: B018


def lacking(variables, batch, rngs):
  return jnp.mean(batch["x"]) * variables["params"]["w"], {"other": 1.0}


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"rng_argnums": 2}, TypeError, "takes no rng_argnums: pass keys as rngs"),
    ({"microbatches": 2}, TypeError, "has no option 'microbatches': see those of make_train_step"),
    ({"mutable": "cache"}, ValueError, "mutable names 'cache', and TrainState has no such field"),
    ({"mutable": "batch_stats"}, ValueError, r"returned the collections \['other'\], and mutable="),
  ],
)
def test_what_cannot_work(options, error, match):
  state = TrainState.create(
    apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.1), batch_stats={"m": jnp.ones(2)}
  )
  with pytest.raises(error, match=match):
    linen_train_step(lacking, num_microbatches=2, **options)(state, make_batch(np.float32))


def test_the_parts_of_a_state_are_refused():
  step = linen_train_step(lacking, num_microbatches=2)
  with pytest.raises(TypeError, match="state is a dict; linen_train_step takes a flax TrainState"):
    step({"w": 1.0}, make_batch(np.float32))
