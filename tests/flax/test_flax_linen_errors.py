"""What `linen_train_step` refuses, in its own words."""

from flax.training import dynamic_scale, train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh
from support.linen import make_batch, TrainState

from optax_accum.flax import linen_train_step

STATS = {"norm": {"mean": jnp.zeros(2)}}

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


def make_state(kind=TrainState, tx=None, **fields):
  params = fields.pop("params", {"w": jnp.ones(())})
  if kind is TrainState:
    fields = {"batch_stats": STATS} | fields
  return kind.create(
    apply_fn=None, params=params, tx=tx or optax.sgd(0.1), **fields
  )


def returning(*rest):
  def loss_fn(variables, batch, rngs):
    loss = jnp.mean(batch["x"]) * variables["params"]["w"]
    return (loss, *rest) if rest else loss

  return loss_fn


STATS_ALONE = {"mutable": ("batch_stats",)}
WITH_AUX = {**STATS_ALONE, "has_aux": True}
GOOD = {"batch_stats": STATS}


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    (
      {"rng_argnums": 2},
      TypeError,
      "has no option 'rng_argnums': Pass keys to the step, as rngs",
    ),
    (
      {"carry_reduction": "max"},
      ValueError,
      "carry_reduction combines what mutable names, and",
    ),
    (
      {"carry_argnum": 2},
      TypeError,
      "has no option 'carry_argnum': Name collections in mutable",
    ),
    (
      {"tx": optax.sgd(0.1)},
      TypeError,
      "has no option 'tx': It is the state's",
    ),
    ({"axis_name": "data"}, TypeError, "axis_name"),
    (
      {"mutable": True},
      TypeError,
      r'mutable=True must name collections, .*\("batch_stats",\)',
    ),
    (
      {"mutable": ("params",)},
      TypeError,
      r"mutable=\('params',\) must name collections, fields",
    ),
    (
      {"num_microbatches": 0},
      ValueError,
      "num_microbatches=0 must be at least 1",
    ),
    ({"num_microbatches": None}, ValueError, "give exactly one of the two"),
  ],
)
def test_options_that_cannot_work_are_refused(options, error, match):
  with pytest.raises(error, match=match):
    linen_train_step(returning(), **{"num_microbatches": 2, **options})


@pytest.mark.parametrize(
  ("returned", "options", "error", "match"),
  [
    (
      (),
      STATS_ALONE,
      TypeError,
      r"returned an array; with mutable=\('batch_stats',\) .* return \(loss, updates\)\.",
    ),
    (
      (GOOD,),
      WITH_AUX,
      TypeError,
      r"returned a tuple; .*must return \(loss, \(updates, aux\)\)\.",
    ),
    (
      (GOOD, 1.0),
      STATS_ALONE,
      TypeError,
      r"with .*has_aux=False it must return \(loss, updates\)\.",
    ),
    (
      ((GOOD, 1.0),),
      STATS_ALONE,
      ValueError,
      r"updates\['batch_stats'\]\['norm'\].* is missing",
    ),
    (
      (GOOD,),
      {},
      TypeError,
      r"returned a tuple; with mutable=\(\) .* return loss\. Name updates.* or has_weight=True if",
    ),
    (
      (),
      {"has_weight": True},
      TypeError,
      r"a single value; with has_weight=True it must return \(total, weight\) in the place",
    ),
    (
      (),
      {"has_aux": True},
      TypeError,
      r"with .*has_aux=True it must return \(loss, aux\)",
    ),
    (
      ((GOOD, {"each": jnp.ones(12)}),),
      WITH_AUX,
      ValueError,
      r"aux\['each'\] has .* rows, as many as a microbatch.* give \"concat\"",
    ),
    (
      ({},),
      STATS_ALONE,
      ValueError,
      r"returned, updates\['batch_stats'\].* is missing: return the updates",
    ),
    (
      (1.0,),
      STATS_ALONE,
      ValueError,
      r"returned, updates\['batch_stats'\].* is missing",
    ),
    (
      ({**GOOD, "cache": {"key": jnp.ones(2)}},),
      STATS_ALONE,
      ValueError,
      r"returned, updates\['cache'\]\['key'\] is not expected",
    ),
    (
      ({"batch_stats": {"norm": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}},),
      STATS_ALONE,
      ValueError,
      r"returned, updates\['batch_stats'\]\['norm'\]\['var'\] is not expected: return",
    ),
    (
      ({"batch_stats": {}},),
      STATS_ALONE,
      ValueError,
      r"returned, updates\['batch_stats'\]\['norm'\]\['mean'\] is missing",
    ),
    (
      ({"batch_stats": {"norm": {"mean": jnp.zeros(3)}}},),
      STATS_ALONE,
      ValueError,
      r"updates\['batch_stats'\]\['norm'\]\['mean'\] has type float32\[3\], not float32\[2\]: ",
    ),
    (
      ({"batch_stats": {"norm": {"mean": jnp.zeros(2, jnp.bfloat16)}}},),
      STATS_ALONE,
      ValueError,
      r"updates\['batch_stats'\]\['norm'\]\['mean'\] has type bfloat16\[2\], not float32\[2\]: ",
    ),
  ],
)
def test_what_the_loss_must_not_return_is_named(
  returned, options, error, match
):
  step = linen_train_step(returning(*returned), num_microbatches=2, **options)
  with pytest.raises(error, match=match):
    step(make_state(), make_batch(np.float32))


class Scaled(train_state.TrainState):
  scale: dynamic_scale.DynamicScale


@pytest.mark.parametrize(
  ("make", "options", "error", "match"),
  [
    (
      lambda: {"w": 1.0},
      {},
      TypeError,
      "state is a dict; linen_train_step takes a flax TrainState",
    ),
    (
      lambda: make_state(tx=optax.MultiSteps(optax.sgd(0.1), 2)),
      {},
      TypeError,
      r"state\.tx is an optax\.MultiSteps.*takes that optimizer; a loop",
    ),
    (
      lambda: make_state(train_state.TrainState),
      STATS_ALONE,
      ValueError,
      "names 'batch_stats', and TrainState has no such collection: declare the field",
    ),
    (
      lambda: make_state(batch_stats=None),
      STATS_ALONE,
      ValueError,
      r"has no such collection: .* pass batch_stats=variables\['batch_stats'\] to create",
    ),
    (
      lambda: make_state().replace(step=np.zeros(8, np.int32)),
      {},
      ValueError,
      r"state\.step has shape \(8,\) .* a state that is replicated for pmap .*unreplicate",
    ),
    (
      lambda: make_state(Scaled, scale=dynamic_scale.DynamicScale()),
      {},
      ValueError,
      r"state\.scale is a DynamicScale, which linen_train_step does not use: .*microbatch",
    ),
    (
      lambda: make_state(
        params={
          "params": {"w": jnp.ones(())},
          "_overwrite_with_gradient": {"amax": jnp.ones(())},
        }
      ),
      {},
      (TypeError, ValueError),
      "_overwrite_with_gradient",
    ),
    (
      lambda: make_state().replace(step=1.5),
      {},
      ValueError,
      r"state\.step has shape \(\) and dtype float\d\d; it must be one integer",
    ),
    (
      lambda: make_state().replace(params={"w": jnp.int32(1)}),
      {},
      TypeError,
      r"state\.params\['w'\] has dtype int32 and cannot be differentiated",
    ),
  ],
)
def test_states_that_cannot_be_stepped_are_named(make, options, error, match):
  step = linen_train_step(returning(), num_microbatches=2, **options)
  with pytest.raises(error, match=match):
    step(make(), make_batch(np.float32))


def test_a_batch_and_statistics_are_named_as_in_the_call():
  step = linen_train_step(
    returning(STATS), mutable="batch_stats", num_microbatches=2
  )
  batch = make_batch(np.float32)
  for call in (step, step.check):
    with pytest.raises(
      ValueError, match=r"^batch\['n'\] has shape \(\), without rows"
    ):
      call(make_state(), {**batch, "n": np.float32(1)})
  raw = {"norm": {"key": jax.random.PRNGKey(0)}}
  step = linen_train_step(
    returning({"batch_stats": raw}),
    mutable="batch_stats",
    num_microbatches=2,
    mesh=make_mesh(2),
  )
  with pytest.raises(
    TypeError, match=r"^state\.batch_stats\['norm'\]\['key'\] has dtype uint32"
  ):
    step(make_state(batch_stats=raw), batch)


def test_a_batch_that_does_not_divide_is_refused():
  step = linen_train_step(returning(), num_microbatches=5)
  with pytest.raises(
    ValueError, match=r"num_microbatches=5 does not divide .*24 rows"
  ):
    step(make_state(), make_batch(np.float32))
