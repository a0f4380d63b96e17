"""A state that is sharded (ZeRO-1): gradients are scattered to it, and parameters gathered."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import clipped_adamw, relaxed, with_loss_elsewhere
from support.padded import init_params, loss_fn, make_batch, valid
from support.samples import more

from optax_accum import accumulate, count_collectives, make_train_step
from optax_accum.flax import nnx_train_step

kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@functools.cache
def expected_steps(steps=3):
  """Steps on one device with the whole batch at once: parameters, state and the last loss."""
  with jax.enable_x64(True):
    tx = clipped_adamw()
    step, batch = oracle.whole_batch_step(loss_fn, tx), make_batch()
    return oracle.take_steps(step, tx, init_params(), [batch] * steps)


@functools.cache
def expected_at_the_last_step():
  """The norm of the last of three gradients, and the loss at twice the parameters before it."""
  with jax.enable_x64(True):
    two, _, _ = expected_steps(2)
    grads = jax.jit(jax.grad(loss_fn))(two, make_batch())
    elsewhere = jax.jit(loss_fn)(jax.tree.map(lambda x: 2 * x, two), make_batch())
    return float(optax.tree.norm(grads)), float(elsewhere)


def sharded(tx, params, mesh, specs):
  """The state of `tx`: what follows a parameter is sharded as `specs` say."""
  shardings = devices.shardings(params, mesh, specs)
  state = trees.strong(tx.init(params))
  state = optax.tree_utils.tree_map_params(tx, jax.device_put, state, shardings)
  return jax.tree.map(lambda x: x if x.ndim else devices.put(x, mesh), state)


def scatters(step, *args):
  """Of how many parameters the gradients are scattered."""
  return str(step.trace(*args).jaxpr).count("reduce_scatter[")


STATE = {"w": P("data"), "b": P("data"), "three": P()}
ALL = {"w": P(), "b": P(), "three": P()}


@kinds
def test_three_steps_equal_one_devices_whole_batch(kind):
  with jax.enable_x64(True):
    mesh, tx = make_mesh(8, kind=kind), with_loss_elsewhere(clipped_adamw())
    step = make_train_step(loss_fn, tx, mesh=mesh, num_microbatches=2, weight_fn=valid)
    params = devices.put(init_params(), mesh)
    state = sharded(tx, params, mesh, STATE)
    assert scatters(step, params, state, make_batch()) == 2
    for _ in range(3):
      params, state, metrics = step(params, state, make_batch())
    state, elsewhere = state
    norm, expected_elsewhere = expected_at_the_last_step()
    trees.assert_close(jax.device_get((params, state, metrics["loss"])), expected_steps(), 1e-10)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-10)
    assert norm > 1  # it was clipped
    # value_fn has shards
    np.testing.assert_allclose(elsewhere, expected_elsewhere, rtol=1e-12)
    for name, spec in STATE.items():
      sharding = NamedSharding(mesh, spec)
      assert params[name].sharding.is_fully_replicated
      for x in (state[1][0].mu[name], state[1][0].nu[name]):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


@kinds
def test_parameters_alone_are_gathered(kind):
  mesh, tx = make_mesh(8, kind=kind), clipped_adamw()
  step = make_train_step(loss_fn, tx, mesh=mesh, num_microbatches=2, weight_fn=valid)
  params = devices.put(init_params(np.float32), mesh)
  args = params, sharded(tx, params, mesh, STATE), make_batch(np.float32)
  report = count_collectives(step.lower(*args).compile())
  size = params["w"].nbytes + params["b"].nbytes
  assert report.outside["all-gather"].bytes == size
  assert report.outside["reduce-scatter"].bytes == size


# On meshes of two axes: of the parameters, of the state, and of how many the state decides.
BESIDE = {
  "tensor parallel": ({"w": P(None, "model"), "b": P("model"), "three": P()},
                      {"w": P("data", "model"), "b": P("model"), "three": P()}, 1),
  "not told to be": ({"w": P(None, "model"), "b": P(), "three": P()},
                     {"w": P("data"), "b": P("data"), "three": P()}, 2),
  "one dimension over both": (ALL, {"w": P(("data", "model")), "b": P("data"), "three": P()}, 1),
  "along another dimension": ({"w": P("data"), "b": P(), "three": P()},
                              {"w": P(None, "data"), "b": P(), "three": P()}, 1),
  "a dimension divided further": ({"w": P(None, "model"), "b": P("model"), "three": P()},
    {"w": P(None, ("model", "data")), "b": P(("data", "model")), "three": P()}, 0),
  "one dimension over another axis": ({"w": P(None, "model"), "b": P("model"), "three": P()},
                                      {"w": P(None, "data"), "b": P("data"), "three": P()}, 2),
  "an axis on another dimension": ({"w": P(None, "model"), "b": P("model"), "three": P()},
    {"w": P("model"), "b": P(("model", "data")), "three": P()}, 0),
}  # fmt: skip


@pytest.mark.parametrize(("case", "types"), [
  ("tensor parallel", (AUTO, AUTO)),
  more("not told to be", (AUTO, EXPLICIT)),
  ("one dimension over both", (EXPLICIT, EXPLICIT)),
  more("along another dimension", (AUTO, AUTO)),
  ("a dimension divided further", (AUTO, AUTO)),
  more("one dimension over another axis", (AUTO, AUTO)),
  ("an axis on another dimension", (EXPLICIT, EXPLICIT)),
])  # fmt: skip
def test_beside_a_second_axis_three_steps_equal_the_whole_batch(types, case):
  specs, state_specs, count = BESIDE[case]

  def fun(params, batch):
    # explicit axes want to be told where a product goes
    if types[1] == EXPLICIT:
      params = jax.tree.map(lambda x: jax.reshard(x, P()), params)
    return loss_fn(params, batch)

  with jax.enable_x64(True):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=types)
    tx = clipped_adamw()
    step = make_train_step(fun, tx, mesh=mesh, num_microbatches=2, weight_fn=valid)
    params = devices.put(init_params(), mesh, specs)
    state = sharded(tx, params, mesh, state_specs)
    # JAX cannot scatter where another axis is explicit: the sum is taken, and a part of it kept.
    assert scatters(step, params, state, make_batch()) == (0 if types[1] == EXPLICIT else count)
    for _ in range(3):
      params, state, metrics = step(params, state, make_batch())
    held = jax.device_get((params, state, metrics["loss"]))
    trees.assert_close(held, expected_steps(), 1e-10)
    for name, spec in state_specs.items():
      at, of_state = NamedSharding(mesh, specs[name]), NamedSharding(mesh, spec)
      assert params[name].sharding.is_equivalent_to(at, params[name].ndim)
      assert state[1][0].nu[name].sharding.is_equivalent_to(of_state, params[name].ndim)


@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_beside_tensor_parallel_parameters_only_shards_are_sent(parameters):
  """XLA would gather parameters and gradients over the other axis to send them over this one."""
  mesh, tx = make_mesh(4, 2, axes=("data", "model"), kind=AUTO), clipped_adamw()
  specs = {"v": P("data", "model"), "w": P("model", "data")}
  of_params = specs if parameters == "sharded" else {"v": P(None, "model"), "w": P("model", None)}
  like = {name: jax.ShapeDtypeStruct((128, 128), jnp.float32) for name in "vw"}
  params = devices.abstract(like, mesh, of_params)
  state = jax.tree.map(lambda x: devices.abstract(x, mesh), jax.eval_shape(tx.init, like))
  state = optax.tree_utils.tree_map_params(
    tx, lambda _, x, spec: devices.abstract(x, mesh, spec), state, like, specs
  )
  step = make_train_step(squares, tx, mesh=mesh, num_microbatches=2)
  batch = jax.ShapeDtypeStruct((16, 128), jnp.float32)
  report = count_collectives(step.lower(params, state, batch).compile()).at_least(1024)
  local = 4 * 2 * 128**2 // 2
  sent = {kind: x.bytes for kind, x in report.outside.items()}
  assert sent == {"reduce-scatter": local, "all-gather": local}


@pytest.mark.parametrize(("kind", "shape"), [more(AUTO, (1, 8)), (EXPLICIT, (1, 8))])
def test_over_a_data_axis_of_one_device_nothing_is_reduced(kind, shape):
  """XLA cannot reduce over such an axis beside others, and there is nothing to reduce."""
  specs = {"w": P("data", "model"), "b": P("model"), "three": P()}

  def fun(params, batch):
    if kind == EXPLICIT:  # explicit axes want to be told where a product goes
      params = jax.tree.map(lambda x: jax.reshard(x, P()), params)
    zero = jax.lax.pcast(jnp.zeros((), batch["x"].dtype), "data", to="varying")
    return jax.lax.pmean(loss_fn(params, batch) + zero, "data")

  with jax.enable_x64(True):
    mesh, tx = make_mesh(*shape, kind=kind), clipped_adamw()
    step = make_train_step(
      fun,
      tx,
      mesh=mesh,
      microbatch_size=24,
      weight_fn=lambda batch: valid(batch) * jax.lax.axis_size("data"),
    )
    params = devices.put(init_params(), mesh, specs)
    # one part, of three numbers
    state = sharded(tx, params, mesh, specs | {"three": P("data")})
    # Under a jit the shardings are not known.
    first = jax.jit(step) if kind == EXPLICIT else step
    held = first(params, state, make_batch())
    for _ in range(2):
      params, state, metrics = held = step(*held[:2], make_batch())
    held = jax.device_get((params, state, metrics["loss"]))
    trees.assert_close(held, expected_steps(), 1e-10)
    for name, spec in specs.items():
      at = NamedSharding(mesh, spec)
      assert params[name].sharding.is_equivalent_to(at, params[name].ndim)


def test_over_two_data_axes_three_steps_equal_the_whole_batch():
  with jax.enable_x64(True):
    mesh = make_mesh(4, 2, axes=("data", "fsdp"), kind=EXPLICIT)
    tx, axes = clipped_adamw(), ("data", "fsdp")
    step = make_train_step(
      loss_fn, tx, mesh=mesh, data_axis=axes, num_microbatches=2, weight_fn=valid
    )
    # Sharded over one axis, and the state over both.
    params = devices.put(init_params(), mesh, {"w": P("fsdp"), "b": P(), "three": P()})
    state = sharded(tx, params, mesh, {"w": P(("fsdp", "data")), "b": P(axes), "three": P()})
    for _ in range(3):
      params, state, metrics = step(params, state, make_batch())
    held = jax.device_get((params, state, metrics["loss"]))
    trees.assert_close(held, expected_steps(), 1e-10)


def mixed(params, mesh, tx):
  """Adam's first moments sharded and its second ones not."""
  state = sharded(tx, params, mesh, STATE)
  adam = state[0]._replace(nu=devices.put(state[0].nu, mesh))
  return adam, *state[1:]


def put_all(params, mesh, tx):
  """Every leaf sharded that can be."""
  spec = lambda x: P("data") if x.ndim and x.shape[0] % 8 == 0 else P()  # noqa: E731
  return jax.tree.map(lambda x: devices.put(x, mesh, spec(x)), trees.strong(tx.init(params)))


def rows_and_norms():
  """Momentum of the gradients' first column, and a number for each parameter."""

  def init(params):
    rows = jax.tree.map(lambda p: p.reshape(len(p), -1)[:, 0] * 0, params)
    return rows, jax.tree.map(lambda p: jnp.zeros((), p.dtype), params)

  def update(updates, state, params=None):
    first = jax.tree.map(lambda g: g.reshape(len(g), -1)[:, 0], updates)
    rows = jax.tree.map(lambda r, g: 0.9 * r + g, state[0], first)
    step = jax.tree.map(lambda r, g: -0.1 * (r.reshape(-1, *[1] * (g.ndim - 1)) + g), rows, updates)
    return step, (rows, jax.tree.map(lambda g: jnp.sum(g**2), updates))

  return optax.GradientTransformation(init, update)


# How the state is made, and how many gradients are scattered to it.
OPTIMIZERS = {
  "moments disagree": (optax.adam(0.1), mixed, 0),
  "no moments": (optax.sgd(0.1), put_all, 0),
  "of other shapes": (optax.adafactor(0.1, min_dim_size_to_factor=2), put_all, 0),
  "of another shape, and numbers": (rows_and_norms(), put_all, 1),
  "momentum": (optax.sgd(0.1, momentum=0.9), put_all, 2),
  "some have moments": (
    optax.partition({"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s", "three": "s"}),
    put_all,
    1,
  ),
  "masked": (optax.masked(optax.sgd(0.1, momentum=0.9), {"w": False, "b": True, "three": True}), put_all, 1),
  "accumulate": (accumulate(optax.adam(0.1), 2), put_all, 2),
  "multi steps": (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), put_all, 2),
}  # fmt: skip


# Of each kind of state one is compared with the whole batch.
COMPARED = ("of another shape, and numbers", "some have moments", "accumulate")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gradients_are_scattered_whose_moments_are_sharded_alike(name):
  tx, make_state, count = OPTIMIZERS[name]
  tx = relaxed(tx)
  with jax.enable_x64(True):
    mesh = make_mesh(8)
    step = make_train_step(loss_fn, tx, mesh=mesh, num_microbatches=2, weight_fn=valid)
    params = devices.put(init_params(), mesh)
    state = make_state(params, mesh, tx)
    assert scatters(step, params, state, make_batch()) == count
    if name not in COMPARED:
      return
    shardings = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(2):
      params, state, metrics = step(params, state, make_batch())
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
      assert x.sharding.is_equivalent_to(sharding, x.ndim)
    start = jax.tree.map(jnp.asarray, init_params())
    whole_batch_step = oracle.whole_batch_step(loss_fn, tx)
    expected = oracle.take_steps(whole_batch_step, tx, start, [make_batch()] * 2)
    held = jax.device_get((params, state, metrics["loss"]))
    trees.assert_close(held, expected, 1e-8)


def test_names_that_end_alike_are_not_mixed_up():
  def fun(params, batch):
    return jnp.mean(sum(jnp.sum(x) ** 2 for x in jax.tree.leaves(params)) * batch)

  mesh, tx = make_mesh(8), optax.sgd(0.1, momentum=0.9)
  step = make_train_step(fun, tx, mesh=mesh, num_microbatches=1)
  batch, ones = np.ones(8, np.float32), np.ones(8, np.float32)
  for tree, specs, count in (
    ({"w": ones, "deep": {"w": ones}}, {"w": P("data"), "deep": {"w": P()}}, 1),
    ({"w": ones, "deep": {"w": ones}}, {"w": P(), "deep": {"w": P("data")}}, 1),
    ([ones, [ones]], [P("data"), [P("data")]], 2),
    (ones, P("data"), 1),
  ):
    params = devices.put(tree, mesh)
    assert scatters(step, params, sharded(tx, params, mesh, specs), batch) == count


# What is sharded over explicit axes, of the parameter and of its momentum.
APART = {
  "whole momentum": (P("data"), P()),
  "whole momentum, one dimension over both": (P(("data", "model")), P()),
  "momentum over another axis": (P(), P("model")),
  "each over another axis": (P("data"), P(None, "model")),
}


MOMENTUM = optax.sgd(0.01, momentum=0.9)


def mean_square(w, x):
  return jnp.mean((x @ w) ** 2)


@functools.cache
def two_steps_by_hand(fun, tx):
  start, x = init_params()["w"], make_batch()["x"]
  return oracle.take_steps(oracle.whole_batch_step(fun, tx), tx, jnp.asarray(start), [x] * 2)


@pytest.mark.parametrize("specs", APART.values(), ids=APART)
def test_explicit_shardings_come_out_as_they_came(specs):
  with jax.enable_x64(True):
    mesh, tx, fun = make_mesh(4, 2, kind=EXPLICIT), MOMENTUM, mean_square
    step = make_train_step(fun, tx, mesh=mesh, num_microbatches=2, donate=False)
    start = init_params()["w"]
    batch = devices.put(make_batch()["x"], mesh, P("data"))
    params, state = devices.put(start, mesh, specs[0]), tx.init(jnp.asarray(start))
    held = params, devices.put(state, mesh, specs[1])

    def two_steps(held):
      return step(*step(*held, batch)[:2], batch)[:2]

    expected = two_steps_by_hand(fun, tx)
    for two in (two_steps, jax.jit(two_steps)):
      new = two(held)
      for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(held), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
      trees.assert_close(jax.device_get(new), expected[:2], 1e-12)


def test_where_no_sharding_is_known_nothing_is_scattered():
  mesh, tx = make_mesh(8), relaxed(optax.adam(0.1))
  step = make_train_step(loss_fn, tx, mesh=mesh, num_microbatches=2, donate=False)
  params = devices.put(init_params(np.float32), mesh)
  state, batch = sharded(tx, params, mesh, STATE), make_batch(np.float32)
  program = jax.make_jaxpr(lambda params: step(params, state, batch))(params)
  assert str(program).count("reduce_scatter[") == 0


WIDTH = 8192


def squares(params, batch):
  return jnp.mean((batch @ params["w"] @ params["v"]) ** 2)


def compiled_for_tpus():
  """A step of 8 chips, of parameters that do not fit in the memory on a chip."""
  mesh, tx = make_mesh(8, platform="tpu"), clipped_adamw()
  shapes = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in "vw"}
  state = jax.tree.map(
    lambda x: devices.abstract(x, mesh, P("data") if x.ndim else P()),
    jax.eval_shape(tx.init, shapes),
  )
  step = make_train_step(squares, tx, mesh=mesh, num_microbatches=4)
  batch = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)
  return step.lower(devices.abstract(shapes, mesh), state, batch).compile()


def test_tpus_scatter_the_gradients_and_gather_the_parameters_once():
  size = 2 * 4 * WIDTH**2
  program = compiled_for_tpus()
  report = count_collectives(program).at_least(1024)
  assert report.inside == {}
  once = {"reduce-scatter": size, "all-gather": size}
  assert {kind: x.bytes for kind, x in report.outside.items()} == once
  # Without the tie to what they take the place of, it is 2.5 times the parameters.
  assert program.memory_analysis().temp_size_in_bytes < 1.6 * size


@pytest.mark.parametrize(("made", "kind"), [("jitted", AUTO), more("in part", EXPLICIT)])
def test_a_state_that_is_on_no_mesh_goes_where_its_parameters_are(made, kind):
  with jax.enable_x64(True):
    mesh, tx, batch = make_mesh(4, kind=kind), accumulate(clipped_adamw(), 2), make_batch()
    specs = {"w": P(None, "data"), "b": P("data"), "three": P()}
    placed = devices.put(init_params(), mesh, specs)
    state = jax.jit(tx.init)(init_params())
    if made == "in part":  # one leaf is whole on every device, and meant to be
      acc = {**state.acc_grads, "w": devices.put(state.acc_grads["w"], mesh)}
      state = state._replace(acc_grads=acc)
    step = make_train_step(
      loss_fn, tx, weight_fn=valid, num_microbatches=2, mesh=mesh, donate=False
    )
    params, new, _ = step(placed, state, batch)
    params, new, _ = step(params, new, batch)

    adam = new.inner_opt_state[1][0]
    for tree in (adam.mu, adam.nu, new.acc_grads, params):
      for name, x in tree.items():
        whole = made == "in part" and tree is new.acc_grads and name == "w"
        sharding = NamedSharding(mesh, P() if whole else specs[name])
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (name, x.sharding)
    if made == "jitted":  # shapes are placed as arrays are
      states = (jax.eval_shape(tx.init, init_params()), new)
      sizes = [argument_bytes(step, placed, x, batch) for x in states]
      assert sizes[0] == sizes[1]
    trees.assert_close(params, expected_steps(1)[0], 1e-10)


def argument_bytes(step, *args):
  return step.lower(*args).compile().memory_analysis().argument_size_in_bytes


def test_a_leaf_of_another_shape_than_its_parameter_is_held_whole():
  mesh, tx = make_mesh(4), optax.adafactor(1e-2, min_dim_size_to_factor=4)
  placed = devices.put(init_params(np.float32), mesh, {**ALL, "w": P("data")})
  state = jax.device_get(relaxed(tx).init(init_params(np.float32)))
  step = make_train_step(loss_fn, relaxed(tx), num_microbatches=2, mesh=mesh, donate=False)
  params, new, _ = step(placed, state, make_batch(np.float32))
  assert params["w"].sharding.spec == P("data")
  factors = [x for x in jax.tree.leaves(new) if x.shape in ((16,), (8,)) and x.ndim]
  assert factors
  assert all(x.sharding.is_fully_replicated for x in factors)


@pytest.mark.usefixtures("usual_promotion")
def test_a_state_of_nnx_goes_where_its_parameters_are():
  def fun(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

  rng, mesh = np.random.default_rng(0), make_mesh(8)
  batch = {"x": rng.normal(size=(16, 8)), "y": rng.normal(size=(16, 16))}
  batch = jax.tree.map(np.float32, batch)
  model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
  model.kernel.set_value(devices.put(model.kernel[...], mesh, P("data")))
  nnx_train_step(fun, num_microbatches=2, mesh=mesh)(model, optimizer, batch)
  for x in (model.kernel, optimizer.opt_state[0].mu["kernel"], optimizer.opt_state[0].nu["kernel"]):
    assert x[...].sharding.spec == P("data")
  assert model.bias[...].sharding.is_fully_replicated
