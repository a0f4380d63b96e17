"""Microbatches that arrive in several calls, in the steps of Flax: that of all rows at once."""

import copy
import gc
import weakref

from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.compiled import compilations
from support.devices import make_mesh
from support.samples import more

from optax_accum.flax import linen_train_step, nnx_train_step

pytestmark = pytest.mark.usefixtures("usual_promotion")
MESHES = pytest.mark.parametrize("shape", [more(None), (8,)])


def rows(*counts):
  rng = np.random.default_rng(0)
  return [rng.normal(size=(n, 4)) for n in counts]


def options(shape):
  mesh = None if shape is None else make_mesh(*shape)
  return {"num_microbatches": 1, "mesh": mesh}


class Counting(nn.Module):
  """A network that counts the rows that it has seen."""

  @nn.compact
  def __call__(self, x):
    seen = self.variable("seen", "rows", lambda: jnp.zeros((), jnp.int32))
    seen.value += x.shape[0]
    hidden = jnp.tanh(nn.Dense(8, param_dtype=float)(x))
    return nn.Dense(1, param_dtype=float)(hidden)


class State(TrainState):
  seen: dict


@MESHES
def test_linen(shape):
  model = Counting()

  def loss_fn(variables, batch, rngs, scale):
    out, updates = model.apply(variables, batch, mutable=["seen"])
    return scale * jnp.mean(out**2), updates

  with jax.enable_x64(True):
    calls = rows(8, 24)
    start = model.init(jax.random.key(0), calls[0])
    state = State.create(
      apply_fn=model.apply, params=start["params"], tx=optax.sgd(0.1), seen=start["seen"]
    )
    step = linen_train_step(
      loss_fn,
      mutable=["seen"],
      donate=False,
      carry_reduction={"seen": {"rows": "sum"}},
      **options(shape),
    )
    expected, metrics = step(state, np.concatenate(calls), None, 2.0)

    def added(*calls):
      cycle = step.begin(state)
      for batch in calls:
        cycle = step.add(cycle, state, batch, None, scale=2.0)
      return cycle

    pair = added(calls[0]), added(calls[1])
    shapes = step.merge.eval_shape(*pair)
    for cycle in added(*calls), step.merge(*pair):
      for x, like in zip(*map(jax.tree.leaves, (cycle, shapes)), strict=True):
        assert x.shape == like.shape
      assert cycle.total_weight == 32
      assert cycle.num_microbatches == 2 * (shape or (1,))[0]
      shaped, _ = step.finish.eval_shape(state, cycle)
      new, found = step.finish(state, cycle)
      trees.assert_close(new.params, expected.params, 1e-12)
      assert found["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-12)
      assert new.seen["rows"] == expected.seen["rows"] == 8 + 32
      assert new.step == 1
      assert shaped.step.dtype == new.step.dtype
    with pytest.raises(ValueError, match="empty"):
      step.finish(new, step.begin(new))


def test_a_count_of_linen_without_a_word_is_refused_over_devices():
  def loss_fn(variables, batch, rngs):
    seen = {"rows": variables["seen"]["rows"] + batch.shape[0]}
    return jnp.mean(batch @ variables["params"]["w"]), {"seen": seen}

  state = State.create(
    apply_fn=None, params={"w": jnp.ones(4)}, tx=optax.sgd(0.1), seen={"rows": jnp.int32(0)}
  )
  step = linen_train_step(loss_fn, mutable=["seen"], **options((8,)))
  batch = np.ones((8, 4), np.float32)
  match = r"^state\.seen\['rows'\] has dtype int32 and the loss changes it"
  with pytest.raises(TypeError, match=match):
    step(state, batch)
  with pytest.raises(TypeError, match=match):
    step.add(step.begin(state), state, batch)


class Dropping(nnx.Module):
  """A network with a stream of random numbers, and a count of rows."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.dense = nnx.Linear(4, 1, param_dtype=float, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    self.seen = nnx.BatchStat(jnp.zeros(()))

  def __call__(self, x):
    self.seen[...] += x.shape[0]
    return self.dense(x)


@MESHES
def test_nnx(shape):
  def loss_fn(model, batch, scale):
    model.drop(batch)
    return scale * jnp.mean(model(batch) ** 2)

  with jax.enable_x64(True):
    calls = rows(8, 24)
    model = Dropping()
    twin = copy.deepcopy(model)
    optimizers = [nnx.Optimizer(x, optax.sgd(0.1), wrt=nnx.Param) for x in (model, twin)]
    step = nnx_train_step(loss_fn, donate=False, **options(shape))
    for number in 1, 2:
      metrics = step(model, optimizers[0], np.concatenate(calls), 2.0)
      cycle = step.begin(twin)
      for batch in calls:
        before = twin.seen[...]
        cycle = step.add(cycle, twin, batch, scale=2.0)
        assert twin.seen[...] == before  # until the cycle has finished
      found = step.finish(twin, optimizers[1], cycle)
      trees.assert_close(*(nnx.state(x, nnx.Param) for x in (twin, model)), 1e-12)
      assert found["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-12)
      assert optimizers[1].step[...] == number
      # Of the mean of the devices, where there are several.
      assert twin.seen[...] == model.seen[...] > 0
      # Two microbatches, where the step has one.
      assert twin.drop.rngs.count[...] == 2 * number
    # Another step, as in another process, goes on.
    cycle = step.add(step.begin(twin), twin, calls[0], 2.0)
    again = nnx_train_step(loss_fn, donate=False, **options(shape))
    cycle = again.add(cycle, twin, calls[1], 2.0)
    assert again.finish(twin, optimizers[1], cycle)["stepped"]
    with pytest.raises(ValueError, match="empty"):
      step.finish(twin, optimizers[1], step.begin(twin))
    assert optimizers[1].step[...] == 3


@MESHES
def test_cycles_of_an_nnx_model_are_merged(shape):
  """Its parameters are those of one cycle, and what it counts is the mean by weight."""

  def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)

  with jax.enable_x64(True):
    calls = rows(8, 24)
    step = nnx_train_step(loss_fn, donate=False, **options(shape))
    found = []
    for merges in False, True:
      model = Dropping()
      optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      cycle = step.add(step.begin(model), model, calls[0])
      if merges:
        other = step.add(step.begin(model), model, calls[1])
        cycle = step.merge(cycle, other)
      else:
        cycle = step.add(cycle, model, calls[1])
      assert cycle.total_weight == 32
      metrics = step.finish(model, optimizer, cycle)
      found += [(nnx.state(model, nnx.Param), metrics)]
    trees.assert_close(*found, 1e-12)
    count = (shape or (1,))[0]
    assert model.seen[...] == pytest.approx((8 * 8 + 24 * 24) / 32 / count)


def test_nothing_holds_a_step_that_had_a_cycle():
  step = nnx_train_step(lambda model, batch: jnp.mean(model.dense(batch)), num_microbatches=1)
  model = Dropping()
  step.add(step.begin(model), model, *rows(2))
  dropped = weakref.ref(step)
  del step
  gc.collect()
  assert dropped() is None


MODEL = "model is a {}; nnx_train_step takes an nnx module"
OPTIMIZER = "optimizer is a {}; it must be an nnx.Optimizer"


@pytest.mark.parametrize(("match", "use"), [
  (MODEL.format("int"), lambda step, m, o: step.begin(3)),
  (MODEL.format("NoneType"), lambda step, m, o: step.add(m, None, 0)),
  (MODEL.format("Optimizer"), lambda step, m, o: step.finish(o, o, m)),
  (OPTIMIZER.format("Dropping"), lambda step, m, o: step.finish(o, m, step.begin(m))),
])  # fmt: skip
def test_what_is_in_another_order_is_refused(match, use):
  model = Dropping()
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = nnx_train_step(lambda model, batch, scale: 0.0, num_microbatches=1)
  with pytest.raises(TypeError, match=match):
    use(step, model, optimizer)


def test_linen_refuses_another_order():
  state = State.create(apply_fn=None, params={"w": jnp.ones(1)}, tx=optax.sgd(0.1), seen={})
  step = linen_train_step(lambda variables, batch, rngs: 0.0, num_microbatches=1)
  with pytest.raises(TypeError, match="state is a Cycle; linen_train_step takes a flax TrainState"):
    step.finish(step.begin(state), state)


class Teacher(nnx.Variable):
  pass


class Taught(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.ones((4, 2)))
    self.teacher = Teacher(self.w[...])


class TaughtState(TrainState):
  teacher: dict


@MESHES
def test_finish_leaves_what_starts_as_the_parameters(shape):
  x, tx = rows(16)[0].astype(np.float32), optax.sgd(0.1)

  def distance(w, batch, teacher):
    return jnp.mean((batch @ w - 2 * batch @ teacher) ** 2)

  step = linen_train_step(
    lambda v, batch, _: distance(v["params"]["w"], batch, v["teacher"]["w"]), **options(shape)
  )
  params = {"w": jnp.ones((4, 2))}
  state = TaughtState.create(apply_fn=None, params=params, tx=tx, teacher=params)
  state, _ = step.finish(state, step.add(step.begin(state), state, x))
  assert state.teacher["w"].tolist() == np.ones((4, 2)).tolist()

  model = Taught()
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = nnx_train_step(
    lambda m, batch: distance(m.w[...], batch, m.teacher[...]), **options(shape)
  )
  step.finish(model, optimizer, step.add(step.begin(model), model, x))
  assert model.teacher[...].tolist() == np.ones((4, 2)).tolist()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_cycles_compile_once(kind):
  batch = np.ones((4, 4), np.float32)
  if kind == "nnx":
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    begun = (model,)
    ended = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    loss_fn = lambda model, batch: jnp.mean(model(batch) ** 2)  # noqa: E731
    step = nnx_train_step(loss_fn, num_microbatches=2, donate=False)
  else:
    params = {"w": jnp.ones(4)}
    begun = ended = (TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1)),)

    def loss_fn(variables, batch, rngs):
      return jnp.mean((batch @ variables["params"]["w"]) ** 2)

    step = linen_train_step(loss_fn, num_microbatches=2, donate=False)

  def added():
    return step.add(step.add(step.begin(*begun), *begun, batch), *begun, batch)

  def take_step():
    step.finish(*ended, step.merge(added(), added()))

  take_step()
  with compilations() as compiled:
    take_step()
  assert not compiled
