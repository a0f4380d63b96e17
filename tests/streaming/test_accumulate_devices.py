"""`accumulate` with `axis_name`: one reduction per cycle, and devices that always agree."""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import clipped_adamw, mini_step
from support.samples import more

from optax_accum import accumulate, accumulate_specs, count_collectives

DEVICES = 8
NAN = float("nan")


def replicate(tree):
  return jax.tree.map(lambda x: np.stack([x] * DEVICES), jax.device_get(tree))


def same_on_all(x):
  assert np.all(x == x.flat[0])
  return x.flat[0]


EACH = np.arange(DEVICES)
ONE, SOME = EACH == 5, EACH % 2
BAD = np.where(ONE, NAN, 1.0)
SKIPS = {"skip_fn": optax.skip_not_finite}


# The gradient, the weight and the flush of calls, of all devices or for each of them; then the
# parameters and the number of the mini step in the end.
@pytest.mark.parametrize(("form", "options", "calls", "param", "mini_step_number"), [
  ("update", SKIPS, [(1, 1, False), (BAD, 1, False)], 0, 1),
  ("apply", SKIPS, [(1, 1, False), (BAD, 1, False), (3, 1, False)], -2, 0),
  more("update", {"every_k": 3}, [(2, 1, False), (4, 1, ONE)], -3, 0),
  ("apply", {"every_k": 3}, [(2, 1, False), (4, 1, ONE)], -3, 0),
  more("update", {}, [(NAN, 0, False)] * 2, 0, 0),
  ("apply", {}, [(NAN, 0, False), (2, SOME, False)], -2, 0),
  more("update", {"every_k": 1}, [(NAN, 0, False), (2, SOME, False)], -2, 0),
  ("apply", {"reduction": "sum"}, [(EACH, 1, False)] * 2, -56, 0),
])  # fmt: skip
def test_all_devices_do_what_one_of_them_asks_for(form, options, calls, param, mini_step_number):
  tx = accumulate(optax.sgd(1.0), **{"every_k": 2, **options}, axis_name="batch")
  start = {"w": np.zeros(3, np.float32)}
  step = jax.pmap(mini_step(tx, form), axis_name="batch")
  held = replicate((start, tx.init(start)))
  for grad, weight, flush in calls:
    grads = np.broadcast_to(np.reshape(grad, (-1, 1)), (DEVICES, 3))
    weight = np.float32(np.broadcast_to(weight, DEVICES))
    flush = np.broadcast_to(flush, DEVICES)
    held = step(*held, {"w": np.float32(grads)}, weight=weight, flush=flush)
  params, state = jax.device_get(held)
  assert same_on_all(params["w"]) == param
  assert same_on_all(state.mini_step) == mini_step_number
  assert same_on_all(state.gradient_step) == (param != 0)
  assert same_on_all(state.has_updated) == (param != 0)


@pytest.mark.parametrize(
  ("form", "every_k", "weighted", "check_vma"),
  [("update", 2, True, True), ("apply", 2, False, False), ("update", 1, True, False)],
)
def test_value_and_grad_are_those_of_all_devices(form, every_k, weighted, check_vma):
  def update(updates, state, params=None, *, value, grad):
    return updates, (value, grad)

  inner = optax.GradientTransformationExtraArgs(lambda params: (params, params), update)
  tx, zero = accumulate(inner, every_k, axis_name="data"), jnp.zeros(())
  values = np.arange(1.0, 1 + every_k * DEVICES, dtype=np.float32).reshape(every_k, DEVICES) ** 2
  weights = np.float32(values % 3) if weighted else np.ones_like(values)
  values[weights == 0] = NAN
  specs = accumulate_specs(jax.eval_shape(tx.init, zero), "data")
  mesh, row = make_mesh(DEVICES), P("data")
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)

  @jax.jit
  @jax.shard_map(
    mesh=mesh, in_specs=(P(), specs, row, row), out_specs=(P(), specs), check_vma=check_vma
  )
  def step(params, state, value, weight):
    extra_args = {"value": value[0], "grad": -value[0]}
    if weighted:
      extra_args["weight"] = weight[0]
    return mini_step(tx, form)(params, state, -value[0], **extra_args)

  params, state = zero, jax.jit(init)(zero)
  for value, weight in zip(values, weights, strict=True):
    params, state = step(params, state, value, weight)
  expected = np.nansum(values * weights) / weights.sum()
  assert state.has_updated
  np.testing.assert_allclose(state.inner_opt_state, [expected, -expected], rtol=1e-6)
  np.testing.assert_allclose(params, -expected, rtol=1e-6)


@pytest.mark.parametrize(("form", "every_k"), [("update", 1), ("apply", 2)])
def test_weights_are_not_rounded_to_the_dtype_of_the_gradients(form, every_k):
  weights = np.float32(np.where(np.arange(DEVICES) % 2, 255, 257))
  signs = np.where(np.arange(DEVICES) % 2, -1, 1).astype(jnp.bfloat16)
  assert float(jnp.bfloat16(257)) == 256  # which would halve the mean
  tx = accumulate(optax.sgd(1.0), every_k, axis_name="batch")
  params = {"w": np.zeros(3, jnp.bfloat16)}
  grads = {"w": np.broadcast_to(signs[:, None], (DEVICES, 3))}
  step = jax.pmap(mini_step(tx, form), axis_name="batch")
  params, state = replicate(params), replicate(tx.init(params))
  for _ in range(every_k):
    params, state = step(params, state, grads, weight=weights)
  assert params["w"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(params["w"].astype(jnp.float32), -(257 - 255) / (257 + 255))


def init_params(dtype=np.float64):
  rng = np.random.default_rng(2)
  return {
    "w": np.asarray(rng.normal(size=(16, 8)), dtype),
    "b": np.asarray(rng.normal(size=8), dtype),
    "scale": np.asarray(1.5, dtype),
  }


def make_batch(rows):
  """Padded rows: the last ones, and so the last devices, hold far fewer valid values."""
  rng = np.random.default_rng(3)
  keep = np.linspace(1.0, 0.1, rows)[:, None]
  return {
    "x": rng.normal(size=(rows, 16)),
    "y": rng.normal(size=(rows, 8)),
    "valid": (rng.random((rows, 8)) < keep).astype(float),
  }


def loss_fn(params, batch):
  y = params["scale"] * jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
  return jnp.sum(batch["valid"] * (y - batch["y"]) ** 2) / jnp.sum(batch["valid"])


def vary(params, axes="data"):
  return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), params)


def sharded_step(tx, form, mesh, params, check_vma, axes="data", weighted=True, **shard_map_args):
  """``init`` and ``step(params, state, batch)`` in shard_map, as a user writes them."""
  specs = accumulate_specs(jax.eval_shape(tx.init, params), axes)
  shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma, **shard_map_args)

  def step(params, state, batch):
    grads = jax.grad(loss_fn)(vary(params, axes), batch)
    weight = jnp.sum(batch["valid"]) if weighted else 1.0
    return mini_step(tx, form)(params, state, grads, weight=weight)

  init = shard_map(tx.init, in_specs=P(), out_specs=specs)
  step = shard_map(step, in_specs=(P(), specs, P(axes)), out_specs=(P(), specs))
  return jax.jit(init), jax.jit(step, donate_argnums=(0, 1)), specs


def run_steps(init, step, params, batches, mesh):
  """Parameters and state after the batches, and the collectives of a step."""
  # where a step leaves them: there is one program
  params = devices.put(params, mesh)
  state = init(params)
  program = step.lower(params, state, batches[0]).compile()
  for batch in batches:
    params, state = program(params, state, batch)
  return jax.device_get(params), state, count_collectives(program)


def microbatches(number, rows=16):
  return trees.strided(make_batch(number * rows), number)


@functools.cache
def whole_batch(every_k, number, rows=16):
  """The same optimizer's steps on one device, with the rows of a cycle in one batch."""
  tx, parts = clipped_adamw(), microbatches(number, rows)
  cycles = [parts[i : i + every_k] for i in range(0, number, every_k)]
  batches = [jax.tree.map(lambda *x: np.concatenate(x), *cycle) for cycle in cycles]
  return oracle.take_steps(oracle.whole_batch_step(loss_fn, tx), tx, init_params(), batches)[0]


def nested(tx, form):  # `apply` is not there behind a chain
  return optax.chain(tx, optax.scale(1.0)) if form == "update" else tx


def assert_one_reduction(report, params, outside):
  """One of the gradients, in the branch that emits; outside of it one of so many bytes, or none."""
  nbytes = sum(x.nbytes for x in jax.tree.leaves(params))
  assert report.at_cycle_end == {"all-reduce": (1, nbytes)}
  assert report.inside == {}
  # What the devices agree about on every call.
  assert report.outside == ({"all-reduce": (1, outside)} if outside else {})


@pytest.mark.parametrize(("form", "check_vma", "count", "every_k"), [
  ("update", True, 8, 3),
  more("update", False, 2, 3),
  ("apply", False, 8, 3),
  more("apply", True, 8, 1),
])  # fmt: skip
def test_steps_in_shard_map_equal_the_whole_batch(form, check_vma, count, every_k):
  with jax.enable_x64(True):
    tx = nested(accumulate(clipped_adamw(), every_k, axis_name="data"), form)
    init, step, specs = sharded_step(tx, form, make_mesh(count), init_params(), check_vma)
    batches = microbatches(2 * every_k)
    params, state, report = run_steps(init, step, init_params(), batches, make_mesh(count))
    trees.assert_close(params, whole_batch(every_k, 2 * every_k), 1e-13)
    if every_k > 1:
      assert_one_reduction(report, params, 8)  # a weight
  for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
    assert leaf.sharding.is_equivalent_to(NamedSharding(make_mesh(count), spec), leaf.ndim)
  acc_grads = optax.tree.get(state, "acc_grads")
  if every_k > 1:
    expected = jax.tree.map(lambda x: (count, *x.shape), init_params())
    assert jax.tree.map(jnp.shape, acc_grads) == expected


@pytest.mark.parametrize(("form", "check_vma"), [more("update", False), ("apply", True)])
def test_a_skip_on_one_device_in_shard_map_skips_the_call_on_all(form, check_vma):
  with jax.enable_x64(True):
    tx = accumulate(clipped_adamw(), 2, axis_name="data", skip_fn=optax.skip_not_finite)
    mesh = make_mesh(DEVICES)
    init, step, _ = sharded_step(tx, form, mesh, init_params(), check_vma)
    first, second = microbatches(2)
    bad = {**first, "x": np.where(np.arange(16)[:, None] == 5, NAN, first["x"])}
    params, _, report = run_steps(init, step, init_params(), [first, bad, second], mesh)
    trees.assert_close(params, whole_batch(2, 2), 1e-13)
    _, state, _ = run_steps(init, step, init_params(), [first, bad], mesh)
    assert_one_reduction(report, params, 16)  # and whether it is skipped
  assert (int(state.mini_step), bool(state.has_updated)) == (1, False)
  assert float(state.acc_weight) == first["valid"].sum()
  # Which device it was can be read.
  assert np.flatnonzero(state.skip_state["should_skip"]).tolist() == [2]


@pytest.mark.parametrize(
  ("form", "every_k", "reduction", "check_vma"),
  [("update", 1, "mean", True), ("update", 3, "sum", False), ("apply", 3, "mean", True)],
)
def test_without_weights_calls_and_devices_count_the_same(form, check_vma, every_k, reduction):
  tx = accumulate(optax.sgd(1.0), every_k, reduction=reduction, axis_name="data")
  params = devices.put({"w": np.zeros(3, np.float32)}, make_mesh(DEVICES))
  grads = np.random.default_rng(6).normal(size=(every_k, DEVICES, 3)) + 1
  specs = accumulate_specs(jax.eval_shape(tx.init, params), "data")
  shard_map = functools.partial(jax.shard_map, mesh=make_mesh(DEVICES), check_vma=check_vma)

  def call(params, state, grads):
    return mini_step(tx, form)(params, state, {"w": grads[0]})

  state = jax.jit(shard_map(tx.init, in_specs=P(), out_specs=specs))(params)
  step = jax.jit(shard_map(call, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
  for grad in grads:
    params, state = step(params, state, np.float32(grad))
  expected = {"mean": grads.mean((0, 1)), "sum": grads.sum((0, 1))}[reduction]
  np.testing.assert_allclose(params["w"], -expected, rtol=1e-5)
  assert (int(state.gradient_step), int(state.mini_step)) == (1, 0)
  if every_k > 1:
    report = count_collectives(step.lower(params, state, np.float32(grads[0])).compile())
    assert_one_reduction(report, params, 0)


def test_it_reduces_over_several_axes():
  with jax.enable_x64(True):
    axes = ("replica", "data")
    tx = accumulate(clipped_adamw(), 2, axis_name=axes)
    mesh = make_mesh(2, 4, axes=axes)
    init, step, specs = sharded_step(tx, "apply", mesh, init_params(), True, axes)
    assert specs.acc_grads["w"] == P(axes)
    batches = microbatches(2)
    params, *_ = run_steps(init, step, init_params(), batches, mesh)
    trees.assert_close(params, whole_batch(2, 2), 1e-13)


@pytest.mark.parametrize(
  ("form", "check_vma", "kind"), [more("update", True, AUTO), ("apply", False, EXPLICIT)]
)
def test_other_mesh_axes_stay_as_they_are(form, check_vma, kind):
  with jax.enable_x64(True):
    tx = accumulate(clipped_adamw(), 2, axis_name="data")
    mesh = make_mesh(4, 2, kind=kind)
    init, step, _ = sharded_step(
      tx, form, mesh, init_params(), check_vma, axis_names=frozenset({"data"})
    )
    specs = {"w": P(None, "model"), "b": P("model"), "scale": P()}
    params = devices.put(init_params(), mesh, specs)
    batches = devices.put(microbatches(2), mesh, P("data"))
    with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
      state = init(params)
      for batch in batches:
        acc = state.acc_grads["w"]
        assert acc.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "model")), 3)
        params, state = step(params, state, batch)
    trees.assert_close(jax.device_get(params), whole_batch(2, 2), 1e-13)


def own(params, batch, axes):
  return jax.grad(loss_fn)(vary(params, axes), batch)


def shared(params, batch, axes):
  return jax.grad(loss_fn)(params, batch)


def zero(params, batch, axes):
  return own(params, batch, axes) | {"b": jnp.zeros_like(params["b"])}


def summed(over):
  def grads_of(params, batch, axes):
    grads = own(params, batch, axes)
    return grads | {"b": jax.lax.psum(grads["b"], over)}

  return grads_of


TWO = ("replica", "data")


@pytest.mark.parametrize(("grads_of", "axes", "leaf", "reduced"), [
  (shared, "data", r"\w", "'data'"),
  (zero, "data", "b", "'data'"),
  (summed("data"), "data", "b", "'data'"),
  (summed("data"), TWO, "b", "'data'"),
  (summed(TWO), TWO, "b", "'data', 'replica'"),
])  # fmt: skip
def test_a_gradient_that_was_reduced_before_is_refused_by_name(grads_of, axes, leaf, reduced):
  tx = accumulate(optax.sgd(1.0), 2, axis_name=axes)

  def step(params, batch):
    grads = grads_of(params, batch, axes)
    return tx.update(grads, tx.init(params), params)[0]

  mesh = make_mesh(2, 4, axes=TWO)
  specs = {"in_specs": (P(), P(axes)), "out_specs": P()}
  mapped = jax.shard_map(step, mesh=mesh, **specs)
  message = rf"updates\['{leaf}'\] is the same on all devices of the axes \[{reduced}\].*pcast"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(mapped, init_params(np.float32), make_batch(16))


@pytest.mark.parametrize("call", ["init", "update", "apply"])
def test_parameters_that_are_sharded_are_refused(call):
  """Their gradients come summed over devices, and scattered, from an `all_gather` in the loss."""
  tx = accumulate(optax.sgd(1.0), 2, axis_name="data")

  def step(params, whole):
    state = tx.init(params if call == "init" else whole)
    return getattr(tx, call)(params, state, params)[0] if call != "init" else state

  mapped = jax.shard_map(step, mesh=make_mesh(8), in_specs=(P("data"), P()), out_specs=P("data"))
  message = "differs between the devices of the axes .* optax_accum.make_train_step"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(mapped, {"w": jnp.zeros(8)}, {"w": jnp.zeros(1)})


@pytest.mark.parametrize(
  ("form", "check_vma", "weighs_and_skips"), [more("update", True, False), ("apply", False, True)]
)
def test_tpus_reduce_the_gradients_once_in_the_branch_that_emits(form, check_vma, weighs_and_skips):
  kwargs = {"skip_fn": optax.skip_not_finite} if weighs_and_skips else {}
  mesh = make_mesh(DEVICES, platform="tpu")
  tx = nested(accumulate(clipped_adamw(), 4, axis_name="data", **kwargs), form)
  params = init_params(np.float32)
  init, step, specs = sharded_step(tx, form, mesh, params, check_vma, weighted=weighs_and_skips)
  args = (params, jax.eval_shape(init, params), jax.tree.map(np.float32, make_batch(64)))
  args = devices.abstract(args, mesh, (P(), specs, P("data")))
  report = count_collectives(step.lower(*args).compile())
  assert_one_reduction(report, params, 8 if weighs_and_skips else 0)


def test_specs_are_those_of_the_outermost_accumulation():
  # The accumulators of the inner one add up what the devices have reduced.
  tx = accumulate(accumulate(optax.sgd(1.0), 2), 3, axis_name="data")
  state = {"params": jnp.ones(3), "opt": (jax.eval_shape(tx.init, jnp.ones(3)), None)}
  specs = accumulate_specs(state, "data")
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  assert specs["params"] == specs["opt"][0].acc_weight == P()
  assert specs["opt"][0].acc_grads == P("data")
  assert specs["opt"][0].inner_opt_state.acc_grads == P()


SPECS = {"a": P("data", "model"), "b": P("model"), "c": P(None, "data"), "d": P()}
SHAPES = {"a": (16, 8), "b": (8,), "c": (4, 8), "d": ()}


def sharded_params(mesh):
  params = {name: np.ones(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
  return devices.put(params, mesh, SPECS)


def assert_sharded_as(tree, params):
  for (path, x), like in zip(
    jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(params), strict=True
  ):
    assert x.sharding.is_equivalent_to(like.sharding, x.ndim), (path, x.sharding, like.sharding)


@pytest.mark.parametrize(("form", "kind", "init"), [("apply", AUTO, "eager"), ("update", EXPLICIT, "jit")])  # fmt: skip
def test_accumulators_are_sharded_as_the_parameters(form, kind, init):
  mesh = make_mesh(4, 2, kind=kind)
  params = sharded_params(mesh)
  tx = accumulate(optax.sgd(1.0, momentum=0.9), 2)
  # From 0.12 on, what optax makes under jit on an explicit mesh is only sharded where it is set.
  with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
    state = (tx.init if init == "eager" else jax.jit(tx.init))(params)
  assert_sharded_as(state.acc_grads, params)
  assert {x.dtype for x in jax.tree.leaves(state.acc_grads)} == {jnp.dtype("float32")}
  assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(state.acc_grads))
  step = jax.jit(mini_step(tx, form))
  grads = sharded_params(mesh)
  for emits in (False, True):
    # Everything is added where it is, in the mini steps and in the step.
    assert count_collectives(step.lower(params, state, grads).compile()).operations == ()
    params, state = step(params, state, grads)
    assert bool(state.has_updated) == emits
    assert_sharded_as(state.acc_grads, grads)
    assert_sharded_as(params, grads)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_accumulators_made_under_jit_are_sharded_on_tpus(kind):
  mesh = make_mesh(4, 2, kind=kind, platform="tpu")
  shapes = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
  params = devices.abstract(shapes, mesh, SPECS)
  tx = accumulate(optax.sgd(1.0), 2)
  state = jax.jit(tx.init).lower(params).compile().output_shardings
  for name, shape in SHAPES.items():
    assert state.acc_grads[name].is_equivalent_to(params[name].sharding, len(shape)), name
