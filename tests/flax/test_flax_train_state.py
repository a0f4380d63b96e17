"""`optax_accum.flax.TrainState`: flax's, in a loop that has one microbatch at a time."""

import functools

import flax.core
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.compiled import copies_of
from support.linen import make_batch, make_state, mean_loss, Model, total
from support.samples import more

from optax_accum import accumulate
from optax_accum.flax import TrainState

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


@pytest.mark.parametrize(
  ("outermost", "freeze"),
  [more(True, flax.core.freeze), (False, lambda x: x)],
  ids=["frozen", "dict in a chain"],
)
def test_it_steps_as_the_whole_batch(outermost, freeze):
  model = Model()

  def loss_fn(params, batch):
    return mean_loss(model.apply({"params": params}, batch["x"]), batch)

  with jax.enable_x64(True):
    batch, tx = make_batch(), optax.adam(0.1)
    params = make_state(model, batch, freeze=freeze).params
    expected = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def whole_step(state):
      grads = jax.grad(loss_fn)(state.params, batch)
      return state.apply_gradients(grads=grads)

    for _ in range(3):
      expected = whole_step(expected)
    streaming = accumulate(tx, 4)
    streaming = streaming if outermost else optax.chain(streaming, optax.scale(1.0))
    state = TrainState.create(apply_fn=None, params=params, tx=streaming)

    @functools.partial(jax.jit, donate_argnums=0)
    def mini_step(state, part, flush):
      grads = jax.grad(loss_fn)(state.params, part)
      return state.apply_gradients(grads=grads, weight=total(part), flush=flush)

    for i in range(8):
      state = mini_step(state, trees.index(batch, slice(i % 4, None, 4)), False)
    for i in range(2):  # an epoch that ends in mid-cycle
      state = mini_step(state, trees.index(batch, slice(i, None, 2)), i == 1)
    trees.assert_close(state.params, expected.params, 1e-10)
    assert (int(state.step), int(state.gradient_step)) == (10, 3)
    assert isinstance(state, TrainState)
    assert state.gradient_step.dtype == jnp.int32


LARGE = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in "abcd"}
LARGE_BYTES = 4 * 512 * 512 * len(LARGE)


@pytest.mark.parametrize("nested", [False, True])
def test_parameters_and_state_are_updated_in_place(nested):
  tx = accumulate(optax.adamw(0.1), 8)
  tx = optax.chain(tx, optax.identity()) if nested else tx
  state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), LARGE)

  def mini_step(state, grads, weight, flush):
    return state.apply_gradients(grads=grads, weight=weight, flush=flush)

  jitted = jax.jit(mini_step, donate_argnums=0)
  executable = jitted.lower(state, LARGE, jnp.float32(2), jnp.bool_(False)).compile()
  memory = executable.memory_analysis()
  assert memory.temp_size_in_bytes < 0.01 * LARGE_BYTES
  assert memory.alias_size_in_bytes == pytest.approx(4 * LARGE_BYTES, rel=0.01)
  assert copies_of(executable.as_text(), 512 * 512) == 0


def test_it_is_flax_s_where_nothing_accumulates():
  grads = {"w": jnp.ones(2)}

  def make(kind):
    return kind.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))

  ours, theirs = (
    make(kind).apply_gradients(grads=grads) for kind in (TrainState, train_state.TrainState)
  )
  trees.assert_close(ours.params, theirs.params, 0)
  assert ours.step == theirs.step == 1
  state = make(TrainState)
  for given in ({"weight": 2.0}, {"flush": True}, {"weight": jnp.float32(1)}):
    with pytest.raises(
      ValueError, match=r"tx is not an accumulate and holds none, so it would ignore"
    ):
      state.apply_gradients(grads=grads, **given)


def test_multi_steps_is_refused():
  tx = optax.MultiSteps(optax.sgd(0.1), 2)
  match = r"tx is an optax.MultiSteps.*accumulate\(optimizer, every_k\)"
  with pytest.raises(TypeError, match=match):
    TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)


def test_a_state_of_multi_steps_is_refused():
  params, tx = {"w": jnp.ones(2)}, optax.sgd(0.1)
  state = TrainState.create(apply_fn=None, params=params, tx=accumulate(tx, 2))
  state = state.replace(opt_state=optax.MultiSteps(tx, 2).init(params))
  with pytest.raises(ValueError, match="state is a MultiStepsState and not an AccumulateState"):
    state.apply_gradients(grads=params, weight=16.0)


def test_further_fields_are_replaced_and_fp8_statistics_are_refused():
  params, tx = {"w": jnp.ones(2)}, accumulate(optax.sgd(1.0), 2)
  state = TrainState.create(apply_fn=None, params=params, tx=tx)
  state = state.replace(step=np.int32(5)).apply_gradients(grads=params, apply_fn=len)
  assert (int(state.step), state.apply_fn) == (6, len)
  assert state.params["w"].tolist() == [1, 1]
  overwritten = {"_overwrite_with_gradient": {"amax": jnp.ones(())}}
  with pytest.raises(TypeError, match=r"fp8 statistics, .* no mean over"):
    TrainState.create(apply_fn=None, params={"params": params, **overwritten}, tx=tx)
