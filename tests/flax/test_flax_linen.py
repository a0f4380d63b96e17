"""`linen_train_step`: a `TrainState` in, the whole batch's `TrainState` and metrics out."""

import functools
from typing import Any

from flax import linen as nn
import flax.core
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import linen, trees
from support.compiled import compilations, temp_bytes
from support.devices import AUTO, EXPLICIT, make_mesh
from support.linen import make_batch, make_state, mean_loss, Model, total, with_weight
from support.samples import more

from optax_accum import accumulate
from optax_accum.flax import linen_train_step

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


def steps_of_flax(state, loss_fn, batch, count):
  @jax.jit
  def step(state, batch):
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))

  for _ in range(count):
    state = step(state, batch)
  return jax.device_get(state)


def layer_norm_loss(variables, batch, rngs):
  assert rngs is None
  return mean_loss(Model(norm="layer").apply(variables, batch["x"]), batch)


@functools.cache
def expected_steps():
  """Three steps on the whole batch."""
  with jax.enable_x64(True):
    batch = make_batch()

    def plain(params, batch):
      return layer_norm_loss({"params": params}, batch, None)

    return steps_of_flax(make_state(Model(norm="layer"), batch), plain, batch, 3)


@pytest.mark.parametrize(("size", "count"), [more(24, None), more(5, None), (16, 8)])
def test_steps_are_those_of_the_whole_batch(size, count):
  mesh = None if count is None else make_mesh(count)
  with jax.enable_x64(True):
    batch = make_batch()
    state = make_state(Model(norm="layer"), batch)
    loss_fn, weighs = layer_norm_loss, {"weight_fn": total}
    if mesh is None:
      loss_fn, weighs = with_weight(loss_fn), {"has_weight": True}
    step = linen_train_step(loss_fn, microbatch_size=size, mesh=mesh, **weighs)
    for _ in range(3):
      state, metrics = step(state, batch)
    trees.assert_close(jax.device_get(state.params), expected_steps().params, 1e-10)
    assert int(state.step) == 3
    assert set(metrics) == {"loss", "grad_norm", "total_weight", "skipped_microbatches", "stepped"}


def with_statistics(model):
  def loss_fn(variables, batch, rngs):
    logits, updates = model.apply(variables, batch["x"], mutable=["batch_stats"])
    return mean_loss(logits, batch), updates

  return loss_fn


@functools.cache
def statistics_of(model):
  """Those after some rows, jitted."""

  @jax.jit
  def updated(params, stats, x):
    variables = {"params": params, "batch_stats": stats}
    return model.apply(variables, x, mutable=["batch_stats"])[1]["batch_stats"]

  return updated


def looped(model, state, batch, count):
  """The statistics of a plain loop over `count` microbatches."""
  stats = state.batch_stats
  for part in trees.strided(batch, count):
    stats = statistics_of(model)(state.params, stats, part["x"])
  return stats


def test_statistics_are_those_of_a_loop_over_microbatches():
  model, batch = Model(norm="batch"), make_batch(np.float32)
  state = make_state(model, batch)
  expected = looped(model, state, batch, 4)
  step = linen_train_step(with_statistics(model), mutable="batch_stats", num_microbatches=4)
  state, metrics = step(state, batch)
  trees.assert_close(state.batch_stats, expected, 1e-5)
  assert "aux" not in metrics


def test_statistics_over_devices_are_weighted_by_what_each_counted():
  model, batch = Model(norm="batch"), make_batch(np.float32)
  # the first device has none
  batch["weight"] = np.repeat(np.arange(8.0, dtype=np.float32), 3)
  state = make_state(model, batch)
  parts = [trees.index(batch, slice(3 * i, 3 * i + 3)) for i in range(8)]
  each = [looped(model, state, part, 3) for part in parts]
  weights = [float(part["weight"].sum()) for part in parts]

  def mean(weights):
    return jax.tree.map(lambda *x: np.average(x, 0, weights).astype(np.float32), *each)

  step = linen_train_step(
    with_weight(with_statistics(model)),
    mutable=("batch_stats",),
    num_microbatches=3,
    has_weight=True,
    mesh=make_mesh(8),
  )
  state, _ = step(state, batch)
  actual = jax.device_get(state.batch_stats)
  trees.assert_close(actual, mean(weights), 1e-5)
  assert trees.largest_difference(actual, mean([1.0] * 8)) > 1e-3


@pytest.mark.parametrize(
  ("mesh", "make_key"),
  [more(None, jax.random.key), (make_mesh(2), jax.random.PRNGKey)],
  ids=["alone", "mesh"],
)
def test_dropout_keys_are_folded_and_repeat(mesh, make_key):
  model = Model(rate=0.5)

  def loss_fn(variables, batch, rngs):
    logits = model.apply(variables, batch["x"], rngs=rngs)
    return mean_loss(logits, batch), logits

  batch = make_batch(np.float32)
  batch["x"] = np.repeat(batch["x"][:1], linen.ROWS, 0)
  step = linen_train_step(
    loss_fn, has_aux=True, num_microbatches=2, aux_reduction="stack", donate=False, mesh=mesh
  )
  state = make_state(model, batch)
  runs = [step(state, batch, {"dropout": make_key(seed)}) for seed in (1, 1, 2)]
  params = [jax.device_get(run[0].params) for run in runs]
  trees.assert_close(params[0], params[1], 0)
  assert trees.largest_difference(params[0], params[2]) > 1e-3
  # the microbatches of one device, then of the next
  logits = np.asarray(runs[0][1]["aux"])
  noises = [x[0] for x in logits]
  assert len(noises) == (2 if mesh is None else 4)
  assert len({x.tobytes() for x in noises}) == len(noises)


RULES = [("rows", "data"), ("embed", "data"), ("wide", "data"), ("heads", "model")]


@pytest.mark.parametrize(("shape", "kind"), [more((8, 1), EXPLICIT), ((2, 4), AUTO)])
def test_annotations_of_flax_stay_and_shard(shape, kind):
  model = linen.Annotated()

  def loss_fn(variables, batch, rngs):
    params = variables["params"]
    with nn.logical_axis_rules(RULES):
      opened = nn.unbox(params)
    assert params["fsdp"].value.shape == opened["fsdp"].shape
    out, updates = model.apply(variables, batch["x"], mutable=["batch_stats"])
    fit = jnp.sum(jnp.mean(out**2, -1) * batch["weight"]) / jnp.maximum(total(batch), 1)
    return fit + sum(jnp.sum(x**2) for x in jax.tree.leaves(opened)), nn.unbox(updates)

  with jax.enable_x64(True), nn.logical_axis_rules(RULES):
    batch = make_batch()
    plain = linen.make_state(model, batch)
    expected = steps_of_flax(
      plain,
      lambda p, b: loss_fn({"params": p, "batch_stats": plain.batch_stats}, b, None)[0],
      batch,
      2,
    )
    mesh = make_mesh(*shape, kind=kind)
    specs = nn.get_partition_spec((plain.params, plain.opt_state, plain.batch_stats))
    rules = [*RULES, ("data", "data"), ("model", "model")]
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    params, opt_state, batch_stats = jax.device_put(
      (plain.params, plain.opt_state, plain.batch_stats), shardings
    )
    state = before = plain.replace(params=params, opt_state=opt_state, batch_stats=batch_stats)
    step = linen_train_step(
      loss_fn, mutable="batch_stats", num_microbatches=3, weight_fn=total, mesh=mesh, donate=False
    )
    with compilations() as programs:
      for _ in range(2):
        state, _ = step(state, batch)
    assert sum("linen_train_step" in line for line in programs) == 1
    trees.assert_close(jax.device_get(state.params), expected.params, 1e-10)
    trees.assert_close(jax.device_get(state.opt_state), expected.opt_state, 1e-10)
    assert jax.tree.structure(state) == jax.tree.structure(before)
    for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
      if isinstance(old, jax.Array):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)


RESHAPED = (nn.DenseGeneral, nn.remat(nn.DenseGeneral), nn.MultiHeadDotProductAttention)


@pytest.mark.parametrize(("layer", "box", "kind"), [
  more(RESHAPED[0], nn.with_partitioning, AUTO),
  (RESHAPED[1], nn.with_logical_partitioning, EXPLICIT),
  more(RESHAPED[2], nn.with_partitioning, EXPLICIT),
])  # fmt: skip
def test_boxes_of_kernels_that_flax_reshapes_stay(layer, box, kind):
  """Kernels of three dimensions have two while flax initializes them."""
  init = box(nn.initializers.lecun_normal(), ("data", "model", None))
  model = layer(2 if layer is RESHAPED[2] else (2, 4), kernel_init=init, use_bias=False)
  rows = np.random.default_rng(0).normal(size=(24, 1, 8)).astype(np.float32)
  loss_fn = lambda variables, x, rngs: jnp.mean(model.apply(variables, x) ** 2)  # noqa: E731
  params = jax.jit(model.init)(jax.random.key(0), rows)["params"]
  state = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
  expected, _ = linen_train_step(loss_fn, num_microbatches=1, donate=False)(state, rows)
  mesh = make_mesh(2, 2, kind=kind)
  shardings = nn.get_sharding(params, mesh)
  placed = jax.tree.map(jax.device_put, jax.tree.leaves(params), jax.tree.leaves(shardings))
  held = state.replace(params=jax.tree.unflatten(jax.tree.structure(params), placed))
  step = linen_train_step(loss_fn, num_microbatches=3, mesh=mesh, donate=False)
  with nn.logical_axis_rules([("data", "data"), ("model", "model")]):
    new, _ = step(held, rows)
  trees.assert_close(jax.device_get(new.params), expected.params, 1e-5)
  assert jax.tree.structure(new.params) == jax.tree.structure(params)


def linear(variables, batch, rngs):
  return jnp.mean(batch["x"] @ variables["params"]["w"])


def linear_state(tx, kind=train_state.TrainState, **fields):
  return kind.create(apply_fn=None, params={"w": jnp.ones(linen.WIDTH)}, tx=tx, **fields)


def test_steps_are_counted():
  padding = make_batch(np.float32) | {"weight": np.zeros(linen.ROWS, np.float32)}
  batch = {**padding, "weight": np.ones(linen.ROWS, np.float32)}
  schedule = optax.sgd(lambda count: jnp.where(count == 0, 1.0, 10.0))
  step = linen_train_step(linear, num_microbatches=2, weight_fn=total)
  for tx, calls, counts in [
    (schedule, [batch, padding, batch], [1, 1, 2]),
    (accumulate(schedule, 2), [batch, padding, batch, batch], [0, 0, 1, 1]),
    (optax.chain(accumulate(schedule, 2), optax.identity()), [batch, padding, batch], [0, 0, 1]),
  ]:
    state = linear_state(tx)
    assert state.step == 0
    for part, count in zip(calls, counts, strict=True):
      state, _ = step(state, part)
      assert (int(state.step), state.step.dtype) == (count, jnp.int32)
  expected = jnp.ones(linen.WIDTH) - np.mean(batch["x"], 0)
  trees.assert_close(state.params["w"], expected, 1e-5)


@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
def test_it_compiles_once_and_donates_the_state(mesh):
  model, batch = Model(norm="batch"), make_batch(np.float32)
  step = linen_train_step(
    with_statistics(model), mutable="batch_stats", num_microbatches=2, mesh=mesh
  )
  state = make_state(model, batch, optax.sgd(0.1, momentum=0.9))
  with compilations() as programs:
    old = state
    for _ in range(3):
      old, (state, _) = state, step(state, batch)
  assert sum("linen_train_step" in line for line in programs) == 1
  assert all(x.is_deleted() for x in jax.tree.leaves(old))
  with pytest.raises(RuntimeError, match=r"state\.params.* has been deleted: an earlier step"):
    step(old, batch)
  state, _ = step(state.replace(step=np.int32(7)), batch)
  assert int(state.step) == 8


def test_a_step_goes_on_where_another_stopped():
  first, second = (linen_train_step(linear, num_microbatches=2) for _ in range(2))
  batch, stale = make_batch(np.float32), None
  state, _ = first(linear_state(optax.sgd(0.1)), batch)
  stale, (state, _) = state, second(state, batch)
  with pytest.raises(RuntimeError, match=r"state\.params\['w'\] has been deleted: an earlier step"):
    first(stale, batch)
  state, _ = first(state, batch)
  assert int(state.step) == 3


def test_one_step_serves_several_optimizers():
  batch = make_batch(np.float32)
  step = linen_train_step(linear, num_microbatches=2)
  states = [linear_state(optax.sgd(rate)) for rate in (0.1, 1.0)]
  for _ in range(2):
    states = [step(state, batch)[0] for state in states]
  moved = [float(jnp.sum(1 - state.params["w"])) for state in states]
  assert moved[1] == pytest.approx(10 * moved[0], rel=1e-4)


class Kept(train_state.TrainState):
  ema: Any
  key: Any
  keys: Any
  counts: Any
  note: Any = flax.struct.field(pytree_node=False, default=None)


class Averaging:
  """A mixin whose `apply_gradients` also keeps an average of the weights."""

  def apply_gradients(self, *, grads, **kwargs):
    new = super().apply_gradients(grads=grads, **kwargs)
    return new.replace(ema=optax.incremental_update(new.params, self.ema, 0.1))


class Averaged(train_state.TrainState):
  ema: Any


class WithMixin(Averaging, Averaged):
  pass


@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
def test_an_apply_gradients_of_the_users_own_is_refused(mesh):
  batch, step = make_batch(np.float32), linen_train_step(linear, num_microbatches=2, mesh=mesh)
  expected = linear_state(optax.sgd(0.1), WithMixin, ema={"w": jnp.zeros(linen.WIDTH)})
  for call in (step, step.lower, step.check):
    with pytest.raises(TypeError, match=r"WithMixin has a method .*\.Averaging\.apply_gradients\)"):
      call(expected, batch)
  got = linear_state(optax.sgd(0.1), Averaged, ema=expected.ema)
  of_params = lambda params: linear({"params": params}, batch, None)  # noqa: E731
  for _ in range(2):  # what the error says to write
    expected = expected.apply_gradients(grads=jax.grad(of_params)(expected.params))
    got, metrics = step(got, batch)
    rate = 0.1 * metrics["stepped"]
    got = got.replace(ema=optax.incremental_update(got.params, got.ema, rate))
  trees.assert_close(jax.device_get(got.ema), jax.device_get(expected.ema), 1e-5)


@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
def test_what_the_step_does_not_touch_is_kept(mesh):
  def loss_fn(variables, batch, rngs):
    # neither keys nor what is static
    assert variables.keys() == {"params", "ema"}
    return linear(variables, batch, rngs)

  key, note = jax.random.key(0), {"note": "fine"}
  fields = {"ema": None, "key": key, "keys": {"dropout": key}, "counts": (jnp.int32(3),)}
  state = linear_state(optax.sgd(0.1), Kept, note=note, **fields)
  # the same arrays
  state = state.replace(ema=state.params, step=state.counts[0])
  step = linen_train_step(loss_fn, num_microbatches=2, mesh=mesh)
  new, batch = state, make_batch(np.float32)
  for _ in range(2):
    new, _ = step(new, batch)
  assert new.key is state.key
  assert new.counts is state.counts
  assert (new.note, int(new.step), int(new.counts[0])) == (note, 5, 3)
  trees.assert_close(jax.device_get(new.ema), {"w": np.ones(linen.WIDTH, np.float32)}, 0)
  assert not state.ema["w"].is_deleted()
  if mesh is None:
    assert new.ema["w"] is state.ema["w"]
  else:  # and so the next step need not put it there
    assert new.ema["w"].sharding.mesh == mesh
  assert float(jnp.max(jnp.abs(jax.device_get(new.params["w"]) - 1))) > 1e-3


def test_a_step_is_called_and_looked_at_as_a_jitted_function():
  def loss_fn(variables, batch, rngs):
    noise = jax.random.normal(rngs["noise"]) if rngs else 0.0
    return linear(variables, batch, rngs) + noise

  step = linen_train_step(loss_fn, num_microbatches=2, donate=False)
  state, batch, rngs = linear_state(optax.sgd(0.1)), make_batch(np.float32), {}
  rngs = {"noise": jax.random.key(0)}
  expected = step(state, batch, rngs)
  for actual in (
    step(state, batch, rngs=rngs),
    step(state, batch=batch, rngs=rngs),
    step(rngs=rngs, batch=batch, state=state),
  ):
    trees.assert_close(actual[0].params, expected[0].params, 0)
  assert float(step(state, batch)[1]["loss"]) == pytest.approx(
    float(step(state, batch, {})[1]["loss"])
  )
  shapes = jax.eval_shape(lambda: linear_state(state.tx))
  made = step.eval_shape(shapes.replace(tx=state.tx), batch, rngs)
  assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, expected)
  assert "linen_train_step" in step.lower(state, batch).compile().as_text()
  assert step.trace(state, batch, rngs=rngs).jaxpr.out_avals
  assert repr(step) == "linen_train_step(loss_fn, num_microbatches=2, donate=False)"


def test_inside_jit_and_a_scan_over_steps_it_is_the_same_step():
  batch = make_batch(np.float32)
  step = linen_train_step(linear, num_microbatches=2)
  state = linear_state(optax.sgd(0.1))
  expected = state
  for _ in range(3):
    expected, _ = linen_train_step(linear, num_microbatches=2, donate=False)(expected, batch)

  @jax.jit
  def loop(state):
    return jax.lax.scan(lambda state, _: step(state, batch), state, None, length=3)

  scanned, metrics = loop(state)
  assert metrics["loss"].shape == (3,)
  trees.assert_close(scanned.params, expected.params, 1e-6)
  once, _ = jax.jit(step)(state, batch)
  assert (int(scanned.step), int(once.step)) == (3, 1)


def test_frozen_dicts_stay_frozen():
  model, batch = Model(norm="batch"), make_batch(np.float32)
  results = []
  for freeze in (lambda x: x, flax.core.freeze):
    state = make_state(model, batch, optax.sgd(0.1, momentum=0.9), freeze)
    kind = type(state.params), type(state.batch_stats)
    step = linen_train_step(with_statistics(model), mutable="batch_stats", num_microbatches=2)
    for _ in range(2):
      state, _ = step(state, batch)
    assert (type(state.params), type(state.batch_stats)) == kind
    results.append([flax.core.unfreeze(x) for x in (state.params, state.batch_stats)])
  trees.assert_close(*results, 0)


class Holding(train_state.TrainState):
  rng: Any = None
  kept: Any = None


def test_arrays_that_are_held_or_passed_twice_are_noticed_in_every_step():
  def loss_fn(variables, batch, rngs):
    key, _ = jax.random.split(variables["rng"]["dropout"])
    noise = jax.random.normal(rngs["dropout"], ())
    loss = jnp.mean((batch["x"] * batch["row"] * variables["params"]["w"]) ** 2 + 0 * noise)
    return loss, {"rng": {"dropout": key}}

  step = linen_train_step(loss_fn, mutable="rng", num_microbatches=2)
  state = Holding.create(
    apply_fn=None,
    params={"w": jnp.ones(4)},
    tx=optax.sgd(0.1),
    rng={"dropout": jax.random.key(0)},
    kept=[None],
  )
  for _ in range(3):
    before = np.array(state.params["w"])
    state.kept[0] = state.params["w"]  # a list in a state can change beneath it
    batch = {"x": jnp.ones((4, 1)), "row": state.params["w"][:, None] * 0 + 1}
    batch["same"] = state.params["w"]
    state, _ = step(state, batch, state.rng)
    np.testing.assert_array_equal(state.kept[0], before)
    np.testing.assert_array_equal(batch["same"], before)
    assert not np.array_equal(state.params["w"], before)


class Lora(train_state.TrainState):
  base: Any


@pytest.mark.parametrize("mesh", [None, make_mesh(8)], ids=["alone", "mesh"])
def test_a_base_in_a_field_has_no_gradient_and_no_accumulator(mesh):
  """Beside adapters, which are the parameters."""
  width, batch = 128, np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
  base = {"kernel": jax.random.normal(jax.random.key(0), (width, width)) / width**0.5}
  adapters = {"a": base["kernel"][:, :2], "b": jnp.zeros((2, width))}

  def loss_fn(variables, x, rngs):
    low = variables["params"]
    return jnp.mean((jnp.tanh(x @ variables["base"]["kernel"] + x @ low["a"] @ low["b"]) - x) ** 2)

  def plain(params, x):
    return loss_fn({"params": params, "base": base}, x, None)

  state = Lora.create(apply_fn=None, params=adapters, base=base, tx=optax.adam(0.01))
  expected = steps_of_flax(state, plain, batch, 2)
  step = linen_train_step(loss_fn, num_microbatches=2, mesh=mesh)
  assert temp_bytes(step, state, batch) < base["kernel"].nbytes
  for _ in range(2):
    state, _ = step(state, batch)
  trees.assert_close(jax.device_get(state.params), expected.params, 1e-4)
  trees.assert_close(jax.device_get(state.base), jax.device_get(base), 0)
