"""`nnx_train_step`: model and optimizer stepped in place, as by the whole batch."""

import gc
import weakref

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import trees
from support.compiled import compilations
from support.devices import make_mesh, put
from support.linen import with_weight
from support.samples import more

from optax_accum import _versions, accumulate, count_collectives
from optax_accum.flax import nnx_train_step

ROWS, WIDTH, CLASSES = 24, 6, 3

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


class Model(nnx.Module):
  def __init__(self, norm=None, rate=0.0, seed=0):
    rngs, dtype = nnx.Rngs(seed), jnp.result_type(float)
    self.first = nnx.Linear(WIDTH, 8, param_dtype=dtype, rngs=rngs)
    self.norm = norm and norm(8, param_dtype=dtype, rngs=rngs)
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.last = nnx.Linear(8, CLASSES, param_dtype=dtype, rngs=rngs)

  def __call__(self, x):
    x = self.first(x)
    x = self.norm(x) if self.norm else x
    return self.last(self.dropout(nnx.tanh(x)))


def make_batch():
  rng, dtype = np.random.default_rng(0), jnp.result_type(float)
  return {
    "x": rng.normal(size=(ROWS, WIDTH)).astype(dtype),
    "y": rng.integers(CLASSES, size=ROWS).astype(np.int32),
    "weight": rng.integers(0, 3, ROWS).astype(dtype),
  }


def loss_fn(model, batch):
  each = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
  return jnp.sum(each * batch["weight"]) / jnp.sum(batch["weight"])


def total(batch):
  return jnp.sum(batch["weight"])


def make(model, tx=None, wrt=nnx.Param):
  return model, nnx.Optimizer(model, tx or optax.adam(0.1), wrt=wrt)


def arrays(x):
  """What an nnx object holds, by name, keys as numbers."""
  is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
  found = jax.tree_util.tree_leaves_with_path(nnx.state(x), is_leaf=is_variable)
  named = {}
  for path, leaf in found:
    value = leaf.get_raw_value() if is_variable(leaf) else leaf
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
      value = jax.random.key_data(value)
    named[jax.tree_util.keystr(path)] = np.asarray(value)
  return named


@nnx.jit
def hand_written(model, optimizer, parts):
  """A loop over the microbatches, and a step by the weighted mean of their gradients."""
  grads = [nnx.grad(loss_fn)(model, part) for part in parts]
  weights = [total(part) for part in parts]
  mean = jax.tree.map(lambda *g: sum(map(jnp.multiply, g, weights)) / sum(weights), *grads)
  optimizer.update(model, mean)


@pytest.mark.parametrize(("size", "devices"), [more(5, None), (8, 8)])
def test_steps_are_those_of_the_whole_batch(size, devices):
  mesh = devices and make_mesh(devices)
  with jax.enable_x64(True):
    batch = make_batch()
    model, optimizer = make(Model(nnx.LayerNorm))
    expected, other = make(Model(nnx.LayerNorm))
    step = nnx_train_step(loss_fn, microbatch_size=size, weight_fn=total, mesh=mesh)
    for _ in range(3):
      metrics = step(model, optimizer, batch)
      hand_written(expected, other, [batch])
    trees.assert_close(arrays(model), arrays(expected), 1e-10)
    trees.assert_close(arrays(optimizer), arrays(other), 1e-10)
    assert set(metrics) == {"loss", "grad_norm", "total_weight", "skipped_microbatches", "stepped"}


def test_the_model_ends_as_after_a_loop_over_the_microbatches():
  batch = make_batch()  # in float32, as nnx keeps running statistics
  model, optimizer = make(Model(nnx.BatchNorm, rate=0.5), optax.sgd(0.1))
  expected, other = make(Model(nnx.BatchNorm, rate=0.5), optax.sgd(0.1))
  step = nnx_train_step(with_weight(loss_fn), num_microbatches=3, has_weight=True)
  for _ in range(2):
    step(model, optimizer, batch)
    hand_written(expected, other, trees.strided(batch, 3))
  trees.assert_close(arrays(model), arrays(expected), 1e-5, least=1e-3)
  assert arrays(model)["['dropout']['rngs']['count']"] == 6


def test_over_devices_statistics_are_averaged_with_what_each_counted():
  batch = make_batch()
  model, optimizer = make(Model(nnx.BatchNorm), optax.sgd(0.1))
  mesh, kernel = make_mesh(4, 2), model.first.kernel
  kernel.set_raw_value(put(kernel.get_raw_value(), mesh, P(None, "model")))
  step = nnx_train_step(loss_fn, microbatch_size=8, weight_fn=total, mesh=mesh)
  step(model, optimizer, batch)
  # as it came
  assert model.norm.mean.get_raw_value().sharding.is_fully_replicated
  means, weights = [], []
  # a device has rows that follow one another
  for rows in np.split(np.arange(ROWS), 4):
    part = jax.tree.map(lambda x: x[rows], batch)  # noqa: B023
    alone = Model(nnx.BatchNorm)
    for micro in trees.strided(part, 3):
      if total(micro):  # one that counts nothing leaves the model as it was
        alone(micro["x"])
    means.append(arrays(alone)["['norm']['mean']"])
    weights.append(total(part))
  expected = sum(m * w for m, w in zip(means, weights, strict=True)) / sum(weights)
  trees.assert_close(arrays(model)["['norm']['mean']"], np.asarray(expected), 1e-6)
  assert np.abs(np.mean(means, 0) - expected).max() > 1e-3


def test_noise_repeats_and_differs_between_microbatches_and_devices():
  def noise(model, batch):
    return jnp.mean(model(batch)), model.dropout(jnp.ones(64))

  step = nnx_train_step(
    noise, num_microbatches=2, has_aux=True, aux_reduction="stack", mesh=make_mesh(4)
  )
  runs = []
  for _ in range(2):
    model, optimizer = make(Model(rate=0.5))
    runs += [step(model, optimizer, jnp.ones((8, WIDTH)))["aux"] for _ in range(2)]
  trees.assert_close(runs[:2], runs[2:], 0)
  rows = np.concatenate([np.asarray(x) for x in runs[:2]])
  assert len(np.unique(rows, axis=0)) == len(rows) == 4 * 4


def test_a_batch_of_padding_is_no_step_of_any_optimizer():
  batch = make_batch()
  step = nnx_train_step(loss_fn, num_microbatches=2, weight_fn=total)
  for tx, count in ((optax.adam(0.1), 1), (accumulate(optax.adam(0.1), 2), 0)):
    model, optimizer = make(Model(nnx.BatchNorm), tx)
    step(model, optimizer, batch)
    before = arrays(model), arrays(optimizer)
    step(model, optimizer, {**batch, "weight": np.zeros_like(batch["weight"])})
    after = arrays(model), arrays(optimizer)
    trees.assert_close(after[0], before[0], 0)
    assert after[1]["['step']"] == before[1]["['step']"] == count


class Block(nnx.Module):
  def __init__(self, rngs):
    # A bias before a norm would have no gradient but rounding.
    self.layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return x + self.dropout(self.norm(self.layer(x)))


class Transformed(nnx.Module):
  """Transforms of nnx give back every Variable as a new value, and two Variables change places."""

  def __init__(self):
    stacked = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=(0,), out_axes=0))
    self.blocks, self.block = stacked(nnx.Rngs(0)), Block(nnx.Rngs(1))
    self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(2))
    self.left, self.right = nnx.Variable(jnp.float32(1)), nnx.Variable(jnp.float32(2))

  def __call__(self, x):
    left, right = self.left.get_raw_value(), self.right.get_raw_value()
    self.left.set_raw_value(right)
    self.right.set_raw_value(left)
    over_layers = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
    x = nnx.scan(nnx.remat(lambda block, x: block(x)), **over_layers)(self.blocks, x)
    run = lambda block, x: block(x)  # noqa: E731
    x = nnx.cond(jnp.sum(x) < 1e9, run, run, self.block, x)
    x = nnx.fori_loop(0, 2, lambda i, held: (held[0], held[0](held[1])), (self.block, x))[1]
    return self.head(x)


@pytest.mark.more
def test_a_loss_may_use_the_transforms_of_nnx():
  batch = make_batch()
  model, optimizer = make(Transformed(), optax.sgd(0.1))
  step = nnx_train_step(loss_fn, num_microbatches=3, weight_fn=total)
  step(model, optimizer, batch)
  assert arrays(model)["['block']['dropout']['rngs']['count']"] == 3 * 3
  assert arrays(model)["['left']"] == 2  # they changed places three times
  expected, other = make(Transformed(), optax.sgd(0.1))
  hand_written(expected, other, trees.strided(batch, 3))
  trees.assert_close(arrays(model), arrays(expected), 1e-5)


class Adapted(nnx.Module):
  """A large matrix, and an adapter of rank 1 for it."""

  def __init__(self):
    self.base = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    self.adapter = nnx.LoRA(512, 1, 512, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.base(x) + self.adapter(x)


def squares(model, x):
  return jnp.mean(model(x) ** 2)


def size(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_only_adapters_accumulate_and_have_moments():
  x = np.ones((4, 512), np.float32)
  temp = {}
  # the second selects all: an adapter is a parameter too
  for wrt in (nnx.LoRAParam, nnx.Param):
    model, optimizer = make(Adapted(), wrt=wrt)
    step = nnx_train_step(squares, wrt=wrt, num_microbatches=2)
    memory = step.lower(model, optimizer, x).compile().memory_analysis()
    temp[wrt] = memory.temp_size_in_bytes
  adapter, matrix = 4 * 2 * 512, 4 * 512**2
  assert temp[nnx.LoRAParam] < 8 * adapter < matrix < temp[nnx.Param]

  model, optimizer = make(Adapted(), wrt=nnx.LoRAParam)
  # two moments, and two counts
  assert size(arrays(optimizer)) == 2 * adapter + 4 + 4
  kernel, before = model.base.kernel[...], arrays(model)
  nnx_train_step(squares, wrt=nnx.LoRAParam, num_microbatches=2)(model, optimizer, x)
  assert model.base.kernel[...] is kernel  # not copied, and not donated
  moved = {name for name, x in arrays(model).items() if (x != before[name]).any()}
  # lora_a has no gradient while lora_b is zero
  assert moved == {"['adapter']['lora_b']"}


def test_in_a_stream_only_adapters_have_an_accumulator_too():
  model, optimizer = make(Adapted(), accumulate(optax.adam(0.1), 2), wrt=nnx.LoRAParam)
  adapter = 4 * 2 * 512
  # two moments, an accumulator
  assert 3 * adapter <= size(arrays(optimizer)) < 3 * adapter + 64

  @nnx.jit
  def mini_step(model, optimizer, x):
    grads = nnx.grad(squares, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    optimizer.update(model, grads, weight=jnp.float32(len(x)))

  expected, other = make(Adapted(), wrt=nnx.LoRAParam)
  x = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
  for rows in (x[:1], x[1:]):
    mini_step(model, optimizer, rows)
  nnx_train_step(squares, wrt=nnx.LoRAParam, num_microbatches=1)(expected, other, x)
  trees.assert_close(arrays(model), arrays(expected), 1e-5)


def test_a_model_of_another_structure_is_compiled_once():
  batch, (model, optimizer) = make_batch(), make(Model(nnx.BatchNorm, rate=0.5))
  step = nnx_train_step(loss_fn, num_microbatches=2)
  step(model, optimizer, batch)
  with compilations() as compiled:
    for _ in range(3):
      step(model, optimizer, batch)
  assert not compiled
  model.eval()  # another structure: no statistics, no noise
  count = arrays(model)["['dropout']['rngs']['count']"]
  step(model, optimizer, batch)
  assert arrays(model)["['dropout']['rngs']['count']"] == count
  model.train()
  with compilations() as compiled:
    step(model, optimizer, batch)
  assert not compiled
  assert arrays(model)["['dropout']['rngs']['count']"] == count + 2


def test_a_step_keeps_no_model_alive():
  model, optimizer = make(Model())
  step, dead = nnx_train_step(loss_fn, num_microbatches=2), weakref.ref(model.first)
  step(model, optimizer, make_batch())
  del model, optimizer
  gc.collect()
  assert dead() is None


def test_the_best_model_is_kept_and_put_back():
  batch, step = make_batch(), nnx_train_step(loss_fn, num_microbatches=2)
  model, optimizer = make(Model())
  step(model, optimizer, batch)
  best, expected = jax.tree.map(jnp.copy, nnx.state(model)), arrays(model)
  for _ in range(2):
    step(model, optimizer, batch)
    nnx.update(model, jax.tree.map(jnp.copy, best))
    trees.assert_close(arrays(model), expected, 0)
  nnx.update(model, best)
  step(model, optimizer, batch)
  nnx.update(model, best)  # which the step has deleted
  with pytest.raises(RuntimeError, match=r"model\['first'\]\['bias'\] has been deleted"):
    step(model, optimizer, batch)


def test_an_optimizer_whose_arrays_were_deleted_is_named():
  model, optimizer = make(Model(), optax.adam(0.1))
  step, batch = nnx_train_step(loss_fn, num_microbatches=2), make_batch()
  saved = nnx.state(optimizer, nnx.OptState)
  saved = jax.tree.map(lambda x: x, saved)
  step(model, optimizer, batch)
  nnx.update(optimizer, saved)
  with pytest.raises(RuntimeError, match=r"optimizer\['opt_state'\].* has been deleted"):
    step(model, optimizer, batch)


def test_over_a_mesh_gradients_are_reduced_once():
  mesh = make_mesh(8)
  model, optimizer = make(Model(nnx.LayerNorm, rate=0.5), optax.sgd(0.1))
  step = nnx_train_step(loss_fn, num_microbatches=3, mesh=mesh)
  report = count_collectives(step.lower(model, optimizer, make_batch()).compile())
  assert not report.inside
  assert report.outside["all-reduce"].operations >= 1
  step(model, optimizer, make_batch())
  assert {x.sharding.mesh for x in jax.tree.leaves(nnx.state(model))} == {mesh}


def test_synchronized_batch_norm_is_that_of_the_whole_batch():
  class Synced(Model):
    def __init__(self):
      super().__init__(lambda n, **kw: nnx.BatchNorm(n, axis_name="data", **kw))

  batch = make_batch()
  model, optimizer = make(Synced(), optax.sgd(0.1))
  expected, other = make(Model(nnx.BatchNorm), optax.sgd(0.1))
  plain = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
  nnx_train_step(plain, num_microbatches=1, mesh=make_mesh(8))(model, optimizer, batch)
  nnx_train_step(plain, num_microbatches=1)(expected, other, batch)
  trees.assert_close(arrays(model), arrays(expected), 1e-5, least=1e-3)


def sows(model, batch):
  model.hidden = nnx.Intermediate(model.first(batch["x"]))
  return loss_fn(model, batch)


def with_each(model, batch):
  return loss_fn(model, batch), jax.tree.leaves(batch)[0]


OTHER = r"The optimizer was made with wrt=.*Param.*, and the step with wrt="
OPTIMIZER = "optimizer is a {}; it must be an nnx.Optimizer"
MODEL = "model is a {}; nnx_train_step takes an nnx module"
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


class Clipped(nnx.Optimizer):
  def update(self, model, grads, **kwargs):
    grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
    super().update(model, grads, **kwargs)


@pytest.mark.parametrize(("loss", "options", "change", "error", "match"), [
  (sows, {}, None, ValueError, r"returned model\.hidden is not expected"),
  (loss_fn, {"has_aux": True}, None, TypeError, r"return \(loss, aux\)"),
  (with_each, {"has_aux": True}, None, ValueError, 'aux has .* rows, as many as a microbatch.* give "concat"'),
  (loss_fn, {"wrt": nnx.LoRAParam}, None, ValueError, OTHER),
  (loss_fn, {"wrt": nnx.PathContains("last")}, None, ValueError, OTHER),
  (loss_fn, {}, lambda model, optimizer: (optimizer, model), TypeError, OPTIMIZER.format("Model")),
  (loss_fn, {}, lambda model, optimizer: ({}, optimizer), TypeError, MODEL.format("dict")),
  (loss_fn, {}, lambda model, optimizer: (model, ADAM), TypeError, OPTIMIZER.format(r"GradientTransf\w+")),
  (loss_fn, {}, lambda model, _: make(model, optax.MultiSteps(ADAM, 2)), TypeError,
    r"optimizer\.tx is an optax\.MultiSteps"),
  (loss_fn, {}, lambda model, _: (model, Clipped(model, ADAM, wrt=nnx.Param)), TypeError,
    r"Clipped has a method update that flax has not .*chain\(change, tx\)"),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_write(loss, options, change, error, match):
  model, optimizer = make(Model(), SGD)
  step = nnx_train_step(loss, **{"num_microbatches": 2, **options})
  given = change(model, optimizer) if change else (model, optimizer)
  for call in (step, step.lower):
    with pytest.raises(error, match=match):
      call(*given, make_batch())


def test_a_step_shows_its_options_and_takes_flax_s_own_optimizers():
  step = nnx_train_step(squares, wrt=nnx.LoRAParam, num_microbatches=2)
  shown = "nnx_train_step(squares, wrt='LoRAParam', num_microbatches=2)"
  assert repr(step) == shown
  model = Model()
  optimizer = nnx.ModelAndOptimizer(model, ADAM, wrt=nnx.Param)
  nnx_train_step(loss_fn, num_microbatches=2)(model, optimizer, make_batch())
  assert optimizer.step[...] == 1


@pytest.mark.parametrize("donate", [True, more(False)])
def test_an_array_put_into_the_state_of_the_optimizer_is_stepped(donate):
  batch = make_batch()
  tx = optax.inject_hyperparams(optax.adam)(0.1)
  step = nnx_train_step(loss_fn, num_microbatches=1, weight_fn=total, donate=donate)
  (model, optimizer), (expected, other) = make(Model(), tx), make(Model(), tx)
  for rate in (None, 0.01, None):
    if rate is not None:
      for each in (optimizer, other):
        each.opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    step(model, optimizer, batch)
    hand_written(expected, other, [batch])
  trees.assert_close(arrays(model), arrays(expected), 1e-5)
  assert int(optimizer.opt_state.count[...]) == 3


class Quantized(nnx.Variable):
  pass


class Counting(nnx.Module):
  """An adapter on a frozen base of its own kind; it counts, and holds arrays without a Variable."""

  def __init__(self, dtype=jnp.int32):
    rngs = nnx.Rngs(0)
    self.base = Quantized(jnp.arange(64, dtype=jnp.int8).reshape(8, 8))
    self.scale = Quantized(jnp.full(8, 0.1))
    self.adapter = nnx.LoRA(8, 2, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.seen = nnx.Dict(rows=nnx.Variable(jnp.ones((), dtype)))
    self.mean = nnx.Variable(jnp.zeros(()))
    self.largest = jnp.zeros(())

  def __call__(self, x):
    count = self.seen.rows[...]
    self.seen.rows[...] = count + jnp.asarray(jnp.sum(x[:, 0] > 0), count.dtype)
    self.mean[...] += jnp.mean(x)
    self.largest = jnp.maximum(self.largest, jnp.max(x))
    y = x @ (self.base[...] * self.scale[...])
    return self.dropout(y + self.adapter(x))


SEEN = {"seen": "sum", "largest": "max"}
NESTED = {"seen": {"rows": "sum"}, "largest": "max", "mean": None}


@pytest.mark.parametrize(("mesh", "dtype", "words"), [
  (None, jnp.float32, NESTED),
  (8, jnp.int32, SEEN),
  more(None, jnp.int32, SEEN),
  more(8, jnp.float32, NESTED),
])  # fmt: skip
def test_counts_are_those_of_all_rows_and_a_frozen_base_stays(mesh, dtype, words):
  x = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
  mesh = mesh and make_mesh(mesh)
  step = nnx_train_step(
    squares, wrt=nnx.LoRAParam, num_microbatches=2, mesh=mesh, carry_reduction=words
  )

  def call(model, optimizer):
    return step(model, optimizer, x)

  def cycle(model, optimizer):
    cycle = step.add(step.begin(model), model, x[:16])
    return step.finish(model, optimizer, step.add(cycle, model, x[16:]))

  def merged(model, optimizer):
    parts = [step.add(step.begin(model), model, y) for y in (x[:16], x[16:])]
    return step.finish(model, optimizer, step.merge(*parts))

  for way in (call, cycle, merged):
    model, optimizer = make(Counting(dtype), wrt=nnx.LoRAParam)
    before = arrays(model)
    way(model, optimizer)
    after = arrays(model)
    assert after["['seen']['rows']"] == 1 + np.sum(x[:, 0] > 0)
    assert after["['seen']['rows']"].dtype == dtype
    assert model.largest == x.max()
    for name in ("['base']", "['scale']"):
      np.testing.assert_array_equal(after[name], before[name])
  # The base, int8[8, 8], is no more carried by the loop than combined over devices.
  model, optimizer = make(Counting(dtype), wrt=nnx.LoRAParam)
  carried = carried_types(step.trace(model, optimizer, x).jaxpr.jaxpr)
  assert "uint32[]" in carried  # how far the random stream is
  assert not {"int8[8,8]", "float32[8]"} & carried


def carried_types(jaxpr):
  """The types of what the scans of a program carry."""
  found = set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "scan":
      constants, carried = _versions.scan_inputs(eqn)
      avals = [x.aval for x in eqn.invars[constants : constants + carried]]
      found |= {x.str_short().partition("{")[0] for x in avals}
    for inner in _versions.inner_jaxprs(eqn):
      found |= carried_types(inner)
  return found


def test_a_count_without_a_word_is_refused_over_devices():
  x = np.ones((16, 8), np.float32)
  for words, match in (
    (None, r"model\.seen\['rows'\] has dtype int32 and the loss changes it"),
    ({"sean": "sum"}, r"(?s)carry_reduction=.*key sets is\s+\W*sean"),
  ):
    step = nnx_train_step(
      squares, wrt=nnx.LoRAParam, num_microbatches=2, mesh=make_mesh(8), carry_reduction=words
    )
    model, optimizer = make(Counting(), wrt=nnx.LoRAParam)
    with pytest.raises((TypeError, ValueError), match=match):
      step(model, optimizer, x)
    with pytest.raises((TypeError, ValueError), match=match):
      step.add(step.begin(model), model, x)
