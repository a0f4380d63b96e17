"""One jitted call is one optimizer step on the whole batch."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.compiled import compilations, temp_bytes
from support.devices import make_mesh
from support.optimizers import loss_elsewhere, relaxed
from support.samples import more

import optax_accum


def digits(rows, dtype=np.float32):
  """Numbers like those of images of 8 by 8 pixels, and their classes."""
  rng = np.random.default_rng(1)
  x, y = rng.uniform(size=(512, 64)), rng.integers(10, size=512)
  return {"x": np.asarray(x[:rows], dtype), "y": np.int32(y[:rows])}


def init_params(dtype=np.float32, hidden=32):
  rng = np.random.default_rng(0)
  return {
    "w1": jnp.asarray(rng.normal(size=(64, hidden)) / 8, dtype),
    "w2": jnp.asarray(rng.normal(size=(hidden, 10)) / 6, dtype),
  }


def loss_fn(params, batch):
  logits = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  return jnp.mean(losses)


@jax.jit
def value_grad_and_norm(params, batch):
  """Of the loss, on all these rows at once."""
  value, grads = jax.value_and_grad(loss_fn)(params, batch)
  return value, grads, optax.tree.norm(grads)


def test_metrics_are_those_of_the_whole_batch():
  def with_aux(params, batch):
    return loss_fn(params, batch), {"rows": batch["y"]}

  params, batch = init_params(), digits(13)
  tx = relaxed(optax.adam(1e-3))
  step = optax_accum.make_train_step(
    with_aux, tx, microbatch_size=4, has_aux=True, aux_reduction="concat", donate=False
  )
  _, _, metrics = step(params, tx.init(params), batch)
  loss, _, norm = value_grad_and_norm(params, batch)
  names = ["aux", "grad_norm", "loss", "skipped_microbatches", "stepped", "total_weight"]
  assert sorted(metrics) == names
  chex.assert_trees_all_close(metrics["loss"], loss, rtol=1e-6)
  chex.assert_trees_all_close(metrics["grad_norm"], norm, rtol=1e-6)
  chex.assert_trees_all_equal(metrics["aux"]["rows"], batch["y"])
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(metrics))
  counts = metrics["total_weight"], metrics["skipped_microbatches"]
  assert counts == (13, 0)
  assert metrics["stepped"].dtype == bool
  assert metrics["stepped"]


def test_grad_norm_of_half_precision_gradients_is_float32():
  params, batch = init_params(jnp.bfloat16), digits(8, jnp.bfloat16)
  step = optax_accum.make_train_step(loss_fn, optax.sgd(0.1), num_microbatches=2, donate=False)
  new, _, metrics = step(params, optax.sgd(0.1).init(params), batch)
  assert metrics["grad_norm"].dtype == jnp.float32
  chex.assert_trees_all_equal_dtypes(new, params)


@pytest.mark.parametrize(("reduction", "size"), [("mean", 30), ("sum", 7)])
def test_value_fn_is_the_loss_of_the_whole_batch_at_other_parameters(reduction, size):
  def fun(params, batch):
    rows = {"mean": 1.0, "sum": len(batch["y"])}[reduction]
    return rows * loss_fn(params, batch)

  with jax.enable_x64(True):
    params, batch = init_params(np.float64, hidden=4), digits(30, np.float64)
    tx = loss_elsewhere()
    step = optax_accum.make_train_step(
      fun, tx, microbatch_size=size, reduction=reduction, donate=False
    )
    _, elsewhere, metrics = step(params, tx.init(params), batch)
    expected = jax.jit(lambda p: fun(jax.tree.map(lambda x: 2 * x, p), batch))(params)
    np.testing.assert_allclose(elsewhere, expected, rtol=1e-12)
    assert abs(expected - metrics["loss"]) > 1e-2


def test_a_line_search_of_several_calls_is_refused():
  def take(every_k):
    tx = optax_accum.accumulate(relaxed(optax.lbfgs()), every_k)
    step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=2)
    step.eval_shape(init_params(), tx.init(init_params()), digits(4))

  take(1)
  with pytest.raises(
    NotImplementedError, match=r"calls value_fn.*Take the step in one call, of all"
  ):
    take(2)


HALF = optax_accum.accumulate(optax.sgd(0.1), 2)


@pytest.mark.parametrize(("tx", "expected"), [
  (optax_accum.accumulate(HALF, 2), [False, False, False, True]),
  (optax.chain(HALF, optax.identity()), [False, True, False, True]),
  (optax.partition({"all": HALF, "none": optax_accum.accumulate(optax.sgd(0.1), 3)}, "all"),
    [False, True, False, True]),
  (optax.sgd(0.1), [True] * 4),
], ids=["nested", "in a chain", "labels of nothing", "none"])  # fmt: skip
@pytest.mark.parametrize("weight_fn", [more(None), lambda batch: jnp.sum(batch["x"])])
def test_stepped_is_whether_parameters_move(tx, expected, weight_fn, usual_promotion):
  params = init_params()
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=2, donate=False, weight_fn=weight_fn
  )
  state, stepped, moved = tx.init(params), [], []
  for _ in range(4):
    new, state, metrics = step(params, state, digits(4))
    stepped.append(bool(metrics["stepped"]))
    moved.append(trees.largest_difference(new, params) > 0)
    params = new
  assert stepped == moved == expected


def test_weight_reaches_a_transformation_that_wants_it():
  def update(updates, state, params=None, *, weight, value, **extra):
    return updates, (weight, value)

  tx = optax.GradientTransformationExtraArgs(lambda params: (0.0, 0.0), update)
  params, batch = init_params(), digits(6)
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=2, weight_fn=lambda b: jnp.sum(b["y"] > 2), donate=False
  )
  _, state, metrics = step(params, (jnp.zeros(()), jnp.zeros(())), batch)
  assert (
    float(state[0]) == float(metrics["total_weight"]) == int(np.sum(np.asarray(batch["y"]) > 2))
  )
  assert float(state[1]) == float(metrics["loss"])


def test_skipped_microbatches_are_counted_and_all_skipped_is_no_step():
  tx, params, batch = relaxed(optax.adamw(0.1)), init_params(), digits(8)
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=4, skip_nonfinite=True, donate=False
  )
  for bad, moves in [(1, True), (4, False)]:
    # row i: in i % 4
    x = np.where(np.arange(8)[:, None] < bad, np.float32(np.nan), batch["x"])
    new, _, metrics = step(params, tx.init(params), {**batch, "x": x})
    assert int(metrics["skipped_microbatches"]) == bad
    assert float(metrics["total_weight"]) == 8 - 2 * bad
    assert (trees.largest_difference(new, params) > 0) == moves
    chex.assert_tree_all_finite((new, metrics))


everywhere = pytest.mark.parametrize("mesh", [None, make_mesh(8)], ids=["alone", "mesh"])
# Where arguments are placed, and whether they are given away.
placed = pytest.mark.parametrize(
  ("mesh", "donate"), [more(None, False), (make_mesh(8), True)], ids=["alone", "mesh"]
)


@everywhere
def test_a_step_shows_what_it_is_and_how_it_is_called(mesh):
  def noisy(params, batch, key, *, scale=0.1):
    return loss_fn(params, batch) + scale * jax.random.uniform(key)

  make = functools.partial(optax_accum.make_train_step, noisy, optax.sgd(0.1), mesh=mesh)
  step = make(num_microbatches=4, rng_argnums=2)
  assert isinstance(step, optax_accum.TrainStep)
  assert str(inspect.signature(step)) == "(params, opt_state, batch, key, *, scale=0.1)"
  for shown in ("noisy", "num_microbatches=4", f"mesh={mesh}"):
    assert (shown in repr(step)) == (shown != "mesh=None"), shown
  assert "microbatch_size=8" in repr(make(microbatch_size=8))


@placed
def test_a_call_by_keyword_is_the_call_by_position(mesh, donate):
  tx, batch = optax.sgd(0.1, momentum=0.9), digits(16)
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh, donate=donate)

  def fresh():
    params = init_params(hidden=8)
    return devices.put(params, mesh) if mesh else params

  expected = jax.device_get(step(fresh(), tx.init(fresh()), batch))
  params = fresh()
  held = params, tx.init(params)
  actual = step(batch=batch, opt_state=held[1], params=params)
  chex.assert_trees_all_equal(jax.device_get(actual), expected)
  assert {x.is_deleted() for x in jax.tree.leaves(held)} == {donate}


@placed
def test_a_step_can_be_looked_at_before_it_runs(mesh, donate):
  tx = relaxed(optax.adam(1e-3))
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh, donate=donate)
  params, batch = init_params(hidden=8), digits(16)
  held = (params, tx.init(params))
  shapes = jax.eval_shape(lambda: (*held, batch))
  for args in ((*held, batch), shapes):
    memory = step.lower(*args).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 0
    assert (memory.alias_size_in_bytes > 0) == donate
    assert "dot_general" in str(step.trace(*args).jaxpr)
    seen = step.eval_shape(*args)
    assert not any(x.is_deleted() for x in jax.tree.leaves(held))
  by_name = step.eval_shape(batch=batch, opt_state=held[1], params=params)
  out = step(*held, batch)
  for shape in (seen, by_name):
    chex.assert_trees_all_equal_shapes_and_dtypes(shape, out)


# What of a state is made anew, as a count, is on no device in particular.
@pytest.mark.parametrize("committed", [False, True])
def test_one_compilation_serves_every_step(committed):
  @chex.assert_max_traces(n=1)
  def counted(params, batch):
    return loss_fn(params, batch)

  chex.clear_trace_counter()
  tx, params, batch = relaxed(optax.adam(1e-3)), init_params(), digits(8)
  if committed:
    params = jax.device_put(params, jax.devices()[0])
  step = optax_accum.make_train_step(counted, tx, num_microbatches=4)
  opt_state = tx.init(params)
  made = []
  with compilations() as programs:
    for _ in range(4):
      params, opt_state, _ = step(params, opt_state, batch)
      made.append(len(programs))
  assert made[0] == made[-1] > 0


@pytest.mark.parametrize("weighted", [more(False), True])
def test_step_takes_no_more_memory_than_a_hand_written_one(weighted):
  tx, params, batch, n = relaxed(optax.adamw(1e-3)), init_params(hidden=512), digits(256), 4
  options = {"weight_fn": lambda b: jnp.sum(b["y"] >= 0)} if weighted else {}
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=n, **options)
  args = (params, tx.init(params), batch)
  by_hand = oracle.with_optimizer(oracle.hand_written(loss_fn, n), tx)
  assert temp_bytes(step, *args) <= 1.05 * temp_bytes(by_hand, *args)


@pytest.mark.parametrize("name", ["local", "tx", "value"])
def test_arguments_of_the_loss_may_have_any_name(name):
  def fun(w, batch, **named):
    return jnp.mean((batch * w) ** 2) * named[name]

  step = optax_accum.make_train_step(fun, optax.sgd(0.5), num_microbatches=2)
  w, _, metrics = step(
    jnp.ones(()), optax.sgd(0.5).init(1.0), jnp.ones(4), **{name: jnp.full((), 0.5)}
  )
  assert (float(w), float(metrics["loss"])) == (0.5, 0.5)


@pytest.mark.parametrize(("loss", "names"), [
  (lambda w, x, rate: w, ["params", "opt_state", "x", "rate"]),
  (lambda *args: args, ["params", "opt_state", "args"]),
  (lambda **named: named, ["params", "opt_state", "named"]),
  (lambda w, *, x: w, ["params", "opt_state", "x"]),
  (lambda w, params: w, ["params", "opt_state", "args", "kwargs"]),
  (functools.partial(lambda rate, w, x: w, 0.1), ["params", "opt_state", "x"]),
])  # fmt: skip
def test_a_step_has_the_signature_of_its_loss(loss, names):
  step = optax_accum.make_train_step(loss, optax.sgd(0.1), num_microbatches=2)
  assert list(inspect.signature(step).parameters) == names


@pytest.mark.parametrize("mesh", [None, 8])
def test_a_batch_of_padding_moves_no_parameter_whatever_else_is_in_the_optimizer(mesh):
  def masked(params, batch):
    errors = (batch["x"] @ params["w1"]) ** 2
    valid = batch["valid"][:, None]
    return jnp.sum(errors * valid) / jnp.sum(valid) + 0 * jnp.sum(params["w2"])

  adamw = relaxed(optax.adamw(0.1, weight_decay=0.1))
  labels = {"w1": "every call", "w2": "every second"}
  tx = optax.partition(
    {"every call": adamw, "every second": optax_accum.accumulate(adamw, 2)}, labels
  )
  step = optax_accum.make_train_step(
    masked,
    tx,
    num_microbatches=2,
    donate=False,
    weight_fn=lambda batch: jnp.sum(batch["valid"]),
    mesh=mesh and make_mesh(mesh),
  )
  x, params = digits(16)["x"], init_params()
  good, padding = ({"x": x, "valid": jnp.full(16, v)} for v in (1.0, 0.0))
  held = step(params, tx.init(params), good)[:2]
  *after, metrics = step(*held, padding)
  assert float(metrics["total_weight"]) == 0
  before, after = jax.device_get(held), jax.device_get(tuple(after))
  chex.assert_trees_all_equal(after[0], before[0])
  states = [state.inner_states for state in (after[1], before[1])]
  chex.assert_trees_all_equal(*states)
  after = step(*step(*held, padding)[:2], good)[0]
  assert np.abs(after["w2"] - held[0]["w2"]).max() > 1e-3
  assert trees.largest_difference(step(*held, good)[0], held[0]) > 1e-3
