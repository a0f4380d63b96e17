"""What `linen_train_step` refuses, in its own words."""

from flax.training import dynamic_scale, train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh
from support.linen import make_batch, TrainState

from optax_accum import make_train_step
from optax_accum.flax import linen_train_step

STATS = {"norm": {"mean": jnp.zeros(2)}}

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


def make_state(kind=TrainState, tx=None, **fields):
  params = fields.pop("params", {"w": jnp.ones(())})
  if kind is TrainState:
    fields = {"batch_stats": STATS} | fields
  return kind.create(apply_fn=None, params=params, tx=tx or optax.sgd(0.1), **fields)


def returning(*rest):
  def loss_fn(variables, batch, rngs):
    loss = jnp.mean(batch["x"]) * variables["params"]["w"]
    return (loss, *rest) if rest else loss

  return loss_fn


STATS_ALONE = {"mutable": ("batch_stats",)}
WITH_AUX = {**STATS_ALONE, "has_aux": True}
GOOD = {"batch_stats": STATS}


MEAN = r"returned state\.batch_stats\['norm'\]\['mean'\]"


def norm(**stats):
  return {"batch_stats": {"norm": stats}}


@pytest.mark.parametrize(("returned", "options", "error", "match"), [
  ((), STATS_ALONE, TypeError, r"returned a \w+: .* \(loss, updates\)"),
  ((GOOD,), WITH_AUX, TypeError, r"a tuple: .* \(loss, \(updates, aux\)\)"),
  ((GOOD, 1.0), STATS_ALONE, TypeError, r"a tuple: .* \(loss, updates\)"),
  (((GOOD, 1.0),), STATS_ALONE, ValueError, MEAN + " is missing"),
  ((GOOD,), {}, TypeError, "The loss is a tuple.* pass has_aux=True"),
  ((), {"has_weight": True}, TypeError,
    r"a single value; with has_weight=True it must return \(total, weight\) in the place"),
  ((), {"has_aux": True}, TypeError, r"has_aux=True .* return \(loss, aux\)"),
  (((GOOD, {"each": jnp.ones(12)}),), WITH_AUX, ValueError,
    r"aux\['each'\] has .* rows, as many as a microbatch.* give \"concat\""),
  (({},), STATS_ALONE, ValueError, MEAN + " is missing: return the same"),
  ((1.0,), STATS_ALONE, ValueError, MEAN + " is missing"),
  (({**GOOD, "cache": {"key": jnp.ones(2)}},), STATS_ALONE, ValueError,
    r"returned state\.cache\['key'\] is not expected"),
  ((norm(mean=jnp.zeros(2), var=jnp.ones(2)),), STATS_ALONE, ValueError,
    r"state\.batch_stats\['norm'\]\['var'\] is not expected: return"),
  (({"batch_stats": {}},), STATS_ALONE, ValueError, MEAN + " is missing"),
  ((norm(mean=jnp.zeros(3)),), STATS_ALONE, ValueError, MEAN + r" has type float32\[3\], not float32\[2\]: "),
  ((norm(mean=jnp.zeros(2, jnp.bfloat16)),), STATS_ALONE, ValueError,
    MEAN + r" has type bfloat16\[2\], not float32\[2\]: "),
])  # fmt: skip
def test_what_the_loss_must_not_return_is_named(returned, options, error, match):
  step = linen_train_step(returning(*returned), num_microbatches=2, **options)
  with pytest.raises(error, match=match):
    step(make_state(), make_batch(np.float32))


class Scaled(train_state.TrainState):
  scale: dynamic_scale.DynamicScale


FP8 = {"params": {"w": 1.0}, "_overwrite_with_gradient": {"amax": 1.0}}


@pytest.mark.parametrize(("make", "options", "error", "match"), [
  (lambda: {"w": 1.0}, {}, TypeError, "state is a dict; linen_train_step takes a flax TrainState"),
  (lambda: make_state(tx=optax.MultiSteps(optax.sgd(0.1), 2)), {}, TypeError,
    r"state\.tx is an optax\.MultiSteps.*takes that optimizer; a loop"),
  (lambda: make_state(train_state.TrainState), STATS_ALONE, AttributeError,
    "'TrainState' object has no attribute 'batch_stats'"),
  (lambda: make_state(Scaled, scale=dynamic_scale.DynamicScale()), {}, ValueError,
    r"state\.scale is a DynamicScale, which linen_train_step does not use: .*microbatch"),
  (lambda: make_state(params=jax.tree.map(jnp.float32, FP8)), {}, TypeError,
    r"state\.params\['_overwrite_with_gradient'\]\['amax'\] is one of .* no mean over"),
  (lambda: make_state().replace(params={"w": jnp.int32(1)}), {}, TypeError,
    r"state\.params\['w'\] has dtype int32 and cannot be differentiated"),
])  # fmt: skip
def test_states_that_cannot_be_stepped_are_named(make, options, error, match):
  step = linen_train_step(returning(), num_microbatches=2, **options)
  with pytest.raises(error, match=match):
    step(make(), make_batch(np.float32))


def test_fp8_statistics_are_refused_without_flax_too():
  params = jax.tree.map(jnp.float32, FP8)
  tx = optax.sgd(0.1)
  step = make_train_step(
    lambda params, x: jnp.mean(x) * params["params"]["w"], tx, num_microbatches=2
  )
  with pytest.raises(TypeError, match=r"fp8 statistics, .* no mean over"):
    step(params, tx.init(params), np.ones((4, 1), np.float32))


def test_a_batch_and_statistics_are_named_as_in_the_call():
  step = linen_train_step(returning(STATS), mutable="batch_stats", num_microbatches=2)
  batch = make_batch(np.float32)
  for call in (step, step.check):
    with pytest.raises(ValueError, match=r"^batch\['n'\] has shape \(\), without rows"):
      call(make_state(), {**batch, "n": np.float32(1)})
  raw = {"norm": {"key": jax.random.PRNGKey(0)}}
  step = linen_train_step(
    returning({"batch_stats": raw}), mutable="batch_stats", num_microbatches=2, mesh=make_mesh(2)
  )
  with pytest.raises(TypeError, match=r"^state\.batch_stats\['norm'\]\['key'\] has dtype uint32"):
    step(make_state(batch_stats=raw), batch)
