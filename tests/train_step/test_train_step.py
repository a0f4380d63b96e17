"""One jitted call is one optimizer step on the whole batch."""

import copy
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


def whole_batch_steps(tx, params, batch, steps, loss_fn=loss_fn):
  step = oracle.whole_batch_step(loss_fn, tx)
  return oracle.take_steps(step, tx, params, [batch] * steps)


def accumulated_steps(tx, params, batch, steps, loss_fn=loss_fn, **options):
  step = optax_accum.make_train_step(loss_fn, tx, donate=False, **options)
  return oracle.take_steps(step, tx, params, [batch] * steps)


@functools.cache
def three_steps_of_32_rows(tx):
  with jax.enable_x64(True):
    return whole_batch_steps(
      tx, init_params(np.float64), digits(32, np.float64), 3
    )


@pytest.mark.parametrize(
  ("tx", "options"),
  [
    (optax.sgd(0.1, momentum=0.9), {"num_microbatches": 4}),
    (
      relaxed(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
      {"microbatch_size": 5},
    ),
  ],
  ids=["sgd", "clip+adamw"],
)
def test_32_rows_in_microbatches_equal_32_at_once(tx, options):
  with jax.enable_x64(True):
    params, batch = init_params(np.float64), digits(32, np.float64)
    actual = accumulated_steps(tx, params, batch, 3, **options)
    trees.assert_close(actual, three_steps_of_32_rows(tx), 1e-10)


def test_five_microbatches_of_plain_sgd_subtract_the_sum_of_their_gradients():
  params, batch, lr = init_params(), digits(20), 0.01
  step = optax_accum.make_train_step(
    loss_fn, optax.sgd(lr), num_microbatches=5, reduction="sum", donate=False
  )
  new, _, metrics = step(params, optax.sgd(lr).init(params), batch)
  each = [value_grad_and_norm(params, part) for part in trees.strided(batch, 5)]
  losses, grads, _ = zip(*jax.device_get(each), strict=True)
  start = jax.device_get(params)
  expected = jax.tree.map(
    lambda v, *g: v - np.float32(lr) * sum(g), start, *grads
  )
  trees.assert_close(new, expected, 1e-6)
  chex.assert_trees_all_close(metrics["loss"], sum(losses), rtol=1e-6)


def test_clipping_after_accumulation_is_not_clipping_each_microbatch():
  params, batch = init_params(), digits(32)
  tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(1.0))
  accumulated, _, _ = accumulated_steps(
    tx, params, batch, 1, num_microbatches=4
  )
  whole, _, _ = whole_batch_steps(tx, params, batch, 1)
  clip = optax.clip_by_global_norm(0.05)
  clipped = jax.jit(
    lambda part: clip.update(jax.grad(loss_fn)(params, part), ())[0]
  )
  grads = jax.device_get([clipped(part) for part in trees.strided(batch, 4)])
  each = jax.tree.map(
    lambda v, *g: v - sum(g) / 4, jax.device_get(params), *grads
  )
  assert trees.largest_difference(accumulated, whole) < 1e-6
  assert trees.largest_difference(each, whole) > 1e-4


def test_remat_and_bfloat16_compose():
  params, batch = init_params(hidden=256), digits(512)

  def mixed(params, batch):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch["x"]))
    logits = jnp.tanh(half[1] @ half[0]["w1"]) @ half[0]["w2"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), batch["y"]
    )
    return jnp.mean(losses)

  # Gradients are rounded as what they are computed in, parameters (below 1) as float32.
  for fun, eps in [
    (jax.checkpoint(loss_fn), 2.0**-23),
    (mixed, 2.0**-8),
    (jax.checkpoint(mixed), 2.0**-8),
  ]:
    tx = optax.sgd(0.1)
    accumulated, _, _ = accumulated_steps(
      tx, params, batch, 1, fun, num_microbatches=8
    )
    whole, _, _ = whole_batch_steps(tx, params, batch, 1, fun)
    moved = trees.largest_difference(whole, params)
    assert moved > 1e-3
    assert (
      trees.largest_difference(accumulated, whole) < 2 * eps * moved + 2.0**-22
    )


def test_metrics_are_those_of_the_whole_batch():
  def with_aux(params, batch):
    return loss_fn(params, batch), {"rows": batch["y"]}

  params, batch = init_params(), digits(13)
  tx = relaxed(optax.adam(1e-3))
  step = optax_accum.make_train_step(
    with_aux,
    tx,
    microbatch_size=4,
    has_aux=True,
    aux_reduction="concat",
    donate=False,
  )
  _, _, metrics = step(params, tx.init(params), batch)
  loss, _, norm = value_grad_and_norm(params, batch)
  names = [
    "aux",
    "grad_norm",
    "loss",
    "skipped_microbatches",
    "stepped",
    "total_weight",
  ]
  assert sorted(metrics) == names
  chex.assert_trees_all_close(metrics["loss"], loss, rtol=1e-6)
  chex.assert_trees_all_close(metrics["grad_norm"], norm, rtol=1e-6)
  chex.assert_trees_all_equal(metrics["aux"]["rows"], batch["y"])
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(metrics))
  assert (
    float(metrics["total_weight"]),
    int(metrics["skipped_microbatches"]),
  ) == (13.0, 0)
  assert metrics["stepped"].dtype == bool
  assert metrics["stepped"]


def test_grad_norm_of_half_precision_gradients_is_float32():
  params, batch = init_params(jnp.bfloat16), digits(8, jnp.bfloat16)
  step = optax_accum.make_train_step(
    loss_fn, optax.sgd(0.1), num_microbatches=2, donate=False
  )
  new, _, metrics = step(params, optax.sgd(0.1).init(params), batch)
  assert metrics["grad_norm"].dtype == jnp.float32
  chex.assert_trees_all_equal_dtypes(new, params)


def test_value_reaches_reduce_on_plateau():
  tx = relaxed(
    optax.chain(
      optax.sgd(0.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    )
  )
  params, batch = init_params(), digits(8)
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=2, donate=False
  )
  opt_state = tx.init(params)
  for _ in range(4):
    params, opt_state, metrics = step(params, opt_state, batch)
  plateau = opt_state[1]
  chex.assert_trees_all_close(plateau.best_value, metrics["loss"], rtol=1e-6)
  assert float(plateau.scale) < 1


@pytest.mark.parametrize(
  ("reduction", "size"), [("mean", 7), ("mean", 30), ("sum", 7)]
)
def test_value_fn_is_the_loss_of_the_whole_batch_at_other_parameters(
  reduction, size
):
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
    expected = jax.jit(lambda p: fun(jax.tree.map(lambda x: 2 * x, p), batch))(
      params
    )
    np.testing.assert_allclose(elsewhere, expected, rtol=1e-12)
    assert abs(expected - metrics["loss"]) > 1e-2


def gradient_elsewhere():
  """As `loss_elsewhere`, and its state is the gradient: a line search takes it too."""

  def update(updates, state, params, *, value_fn, **extra_args):
    grads = jax.grad(value_fn)(jax.tree.map(lambda x: x + x, params))
    return jax.tree.map(jnp.zeros_like, updates), grads

  return optax.GradientTransformationExtraArgs(lambda params: params, update)


@pytest.mark.parametrize(
  ("tx", "aux"),
  [
    (loss_elsewhere(), np.float32(1)),
    (gradient_elsewhere(), {"a": np.ones(2, np.float32)}),
  ],
  ids=["number", "dict"],
)
def test_a_line_search_goes_with_aux(tx, aux):
  params, batch = init_params(hidden=4), digits(12)
  step = optax_accum.make_train_step(
    lambda p, b: (loss_fn(p, b), jax.tree.map(jnp.asarray, aux)),
    tx,
    num_microbatches=3,
    has_aux=True,
    donate=False,
  )
  _, _, metrics = step(params, tx.init(params), batch)
  chex.assert_trees_all_equal(metrics["aux"], aux)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_k_calls_of_n_microbatches_are_one_step_of_k_times_n(reduction):
  def tokens(batch):
    return jnp.sum(batch["valid"])

  def fun(params, batch):
    logits = batch["x"] @ params["w1"] @ params["w2"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    total = jnp.sum(losses * batch["valid"])
    return total / tokens(batch) if reduction == "mean" else total

  params = init_params()
  rng = np.random.default_rng(0)
  batch = {
    **digits(24),
    "valid": jnp.asarray(rng.random(24) < 0.5, jnp.float32),
  }
  tx = optax_accum.accumulate(optax.sgd(0.1), 2, reduction=reduction)
  step = optax_accum.make_train_step(
    fun,
    tx,
    num_microbatches=3,
    weight_fn=tokens,
    reduction=reduction,
    donate=False,
  )
  new, state = params, tx.init(params)
  for part in (slice(0, 9), slice(9, 24)):
    new, state, _ = step(new, state, trees.index(batch, part))
  whole, _, _ = whole_batch_steps(optax.sgd(0.1), params, batch, 1, fun)
  trees.assert_close(new, whole, 1e-6)


POLYAK, MAX = (
  optax.polyak_sgd(max_learning_rate=10.0),
  {"max_learning_rate": 10.0},
)


@pytest.mark.parametrize(
  ("tx", "mesh"),
  [
    (optax_accum.accumulate(POLYAK, 2), devices.AUTO),
    more(
      optax.partition(
        {"all": optax_accum.accumulate(POLYAK, lambda _: 2)}, "all"
      ),
      None,
    ),
    (
      optax.chain(
        optax_accum.accumulate(
          optax_accum.accumulate(
            optax.inject_hyperparams(optax.polyak_sgd)(**MAX), 2
          ),
          1,
        ),
        optax.identity(),
      ),
      devices.EXPLICIT,
    ),
  ],
)
def test_the_value_of_calls_that_are_one_step_is_that_of_all_rows(
  tx, mesh, usual_promotion
):
  def masked(params, batch):
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(errors * batch["valid"]) / jnp.sum(batch["valid"])

  x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
  y = x.sum(1) + np.repeat(np.float32([0, 3]), 12)
  # a microbatch, or a part of one, is padding
  valid = np.arange(24, dtype=np.float32) % 8 > 1
  batch, params = (
    {"x": x, "y": y, "valid": np.float32(valid)},
    {"w": jnp.zeros(3)},
  )
  mesh = mesh and make_mesh(2, kind=mesh)
  step = optax_accum.make_train_step(
    masked,
    tx,
    microbatch_size=2,
    mesh=mesh,
    weight_fn=lambda b: jnp.sum(b["valid"]),
    donate=False,
  )
  new, state = params, tx.init(params)
  for part in (slice(0, 8), slice(8, 24)):
    new, state, metrics = step(new, state, trees.index(batch, part))
  loss, grads = jax.jit(jax.value_and_grad(masked))(params, batch)
  updates, _ = POLYAK.update(grads, POLYAK.init(params), params, value=loss)
  assert abs(metrics["loss"] - loss) > 0.1
  trees.assert_close(new, updates, 1e-5)


def test_a_line_search_of_several_calls_is_refused():
  def take(every_k):
    tx = optax_accum.accumulate(relaxed(optax.lbfgs()), every_k)
    step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=2)
    step.eval_shape(init_params(), tx.init(init_params()), digits(4))

  take(1)
  with pytest.raises(
    NotImplementedError,
    match=r"calls value_fn.*Take the step in one call, of all",
  ):
    take(2)


def test_a_call_without_weight_is_no_mini_step_of_a_tx_that_accumulates():
  tx = optax_accum.accumulate(optax.sgd(0.1), 2)
  step = optax_accum.make_train_step(
    padded_loss,
    tx,
    num_microbatches=2,
    weight_fn=lambda b: jnp.sum(b["valid"]),
    donate=False,
  )
  params = init_params()
  state, seen = tx.init(params), []
  for valid in (1.0, 1.0, 0.0, 1.0, 1.0, 0.0):
    new, state, metrics = step(
      params, state, {**digits(4), "valid": jnp.full(4, valid)}
    )
    moved, params = trees.largest_difference(new, params) > 0, new
    assert bool(metrics["stepped"]) == moved
    seen.append((int(state.mini_step), int(state.gradient_step), moved))
  assert seen == [
    (1, 0, False),
    (0, 1, True),
    (0, 1, False),
    (1, 1, False),
    (0, 2, True),
    (0, 2, False),
  ]


HALF = optax_accum.accumulate(optax.sgd(0.1), 2)


@pytest.mark.parametrize(
  ("tx", "expected"),
  [
    (optax_accum.accumulate(HALF, 2), [False, False, False, True]),
    (optax.chain(HALF, optax.identity()), [False, True, False, True]),
    (
      optax.partition(
        {"all": HALF, "none": optax_accum.accumulate(optax.sgd(0.1), 3)}, "all"
      ),
      [False, True, False, True],
    ),
    (optax.sgd(0.1), [True] * 4),
  ],
  ids=["nested", "in a chain", "labels of nothing", "none"],
)
@pytest.mark.parametrize("weight_fn", [None, lambda batch: jnp.sum(batch["x"])])
def test_stepped_is_whether_parameters_move(
  tx, expected, weight_fn, usual_promotion
):
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


def test_a_weight_that_is_not_a_number_shows():
  step = optax_accum.make_train_step(
    loss_fn,
    optax.sgd(0.1),
    num_microbatches=2,
    weight_fn=lambda b: jnp.nan * b["x"][0, 0],
  )
  params, _, _ = step(
    init_params(), optax.sgd(0.1).init(init_params()), digits(4)
  )
  assert np.isnan(params["w1"]).all()


def test_weight_reaches_a_transformation_that_wants_it():
  def update(updates, state, params=None, *, weight, value, **extra):
    return updates, (weight, value)

  tx = optax.GradientTransformationExtraArgs(lambda params: (0.0, 0.0), update)
  params, batch = init_params(), digits(6)
  step = optax_accum.make_train_step(
    loss_fn,
    tx,
    num_microbatches=2,
    weight_fn=lambda b: jnp.sum(b["y"] > 2),
    donate=False,
  )
  _, state, metrics = step(params, (jnp.zeros(()), jnp.zeros(())), batch)
  assert (
    float(state[0])
    == float(metrics["total_weight"])
    == int(np.sum(np.asarray(batch["y"]) > 2))
  )
  assert float(state[1]) == float(metrics["loss"])


def padded_loss(params, batch):
  return (
    loss_fn(params, batch) * jnp.sum(batch["valid"]) / jnp.sum(batch["valid"])
  )


@pytest.mark.parametrize(
  "tx",
  [relaxed(optax.adamw(0.1)), optax.chain(optax.clip(1.0), optax.sgd(0.1))],
)
def test_a_batch_of_padding_takes_no_step(tx):
  params = init_params()
  batch = {**digits(8), "valid": np.zeros(8, np.float32)}
  step = optax_accum.make_train_step(
    padded_loss,
    tx,
    num_microbatches=4,
    weight_fn=lambda b: jnp.sum(b["valid"]),
    donate=False,
  )
  opt_state = tx.init(params)
  new, new_state, metrics = step(params, opt_state, batch)
  chex.assert_trees_all_equal((new, new_state), (params, opt_state))
  assert (float(metrics["total_weight"]), float(metrics["loss"])) == (0.0, 0.0)
  assert not metrics["stepped"]
  batch["valid"] = np.eye(8, dtype=np.float32)[3]
  new, _, metrics = step(params, opt_state, batch)
  assert float(metrics["total_weight"]) == 1.0
  assert metrics["stepped"]
  assert trees.largest_difference(new, params) > 0.01


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


def test_further_arguments_and_a_carry_follow_the_batch():
  def noisy(params, batch, mean, key, *, scale):
    noise = scale * jax.random.normal(key, batch["x"].shape)
    new_mean = 0.9 * mean + 0.1 * jnp.mean(batch["x"])
    return loss_fn(params, {**batch, "x": batch["x"] + noise}), (
      new_mean,
      {"mean": mean},
    )

  tx, params, batch = optax.sgd(0.1), init_params(), digits(8)
  step = optax_accum.make_train_step(
    noisy,
    tx,
    num_microbatches=2,
    rng_argnums=3,
    carry_argnum=2,
    aux_reduction="stack",
  )
  mean = jnp.asarray(0.0)
  copied = jax.tree.map(jnp.copy, params)
  _, _, carry, metrics = step(
    copied,
    tx.init(copied),
    batch,
    mean,
    jax.random.key(0),
    scale=jnp.asarray(0.1),
  )
  x = np.asarray(batch["x"])
  means = [0.0, 0.1 * x[::2].mean()]
  chex.assert_trees_all_close(
    metrics["aux"]["mean"], jnp.asarray(means, jnp.float32), rtol=1e-5
  )
  chex.assert_trees_all_close(
    float(carry), 0.9 * means[1] + 0.1 * x[1::2].mean(), rtol=1e-5
  )
  assert not mean.is_deleted()


everywhere = pytest.mark.parametrize(
  "mesh", [None, make_mesh(8)], ids=["alone", "mesh"]
)
# Where arguments are placed, and whether they are given away.
placed = pytest.mark.parametrize(
  ("mesh", "donate"),
  [(None, False), (make_mesh(8), True)],
  ids=["alone", "mesh"],
)


@everywhere
def test_a_step_shows_what_it_is_and_how_it_is_called(mesh):
  def noisy(params, batch, key, *, scale=0.1):
    return loss_fn(params, batch) + scale * jax.random.uniform(key)

  make = functools.partial(
    optax_accum.make_train_step, noisy, optax.sgd(0.1), mesh=mesh
  )
  step = make(num_microbatches=4, rng_argnums=2)
  assert isinstance(step, optax_accum.TrainStep)
  assert (
    str(inspect.signature(step))
    == "(params, opt_state, batch, key, *, scale=0.1)"
  )
  for shown in ("noisy", "num_microbatches=4", f"mesh={mesh}"):
    assert (shown in repr(step)) == (shown != "mesh=None"), shown
  assert "microbatch_size=8" in repr(make(microbatch_size=8))


def test_a_loss_whose_names_do_not_fit_the_signature_of_a_step():
  def with_state(params, opt_state):
    return jnp.mean(params * opt_state)

  step = optax_accum.make_train_step(
    with_state, optax.sgd(1.0), num_microbatches=2, donate=False
  )
  assert list(inspect.signature(step).parameters) == [
    "params",
    "opt_state",
    "args",
    "kwargs",
  ]
  params = jnp.float32(1)
  new, _, _ = step(params, optax.sgd(1.0).init(params), jnp.array([1.0, 3.0]))
  assert float(new) == -1


@placed
def test_a_call_by_keyword_is_the_call_by_position(mesh, donate):
  tx, batch = optax.sgd(0.1, momentum=0.9), digits(16)
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=2, mesh=mesh, donate=donate
  )

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
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=2, mesh=mesh, donate=donate
  )
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


@pytest.mark.parametrize(
  ("copied", "size", "donate"),
  [(copy.copy, None, True), (copy.deepcopy, 8, False)],
)
def test_a_step_can_be_copied(copied, size, donate):
  mesh = None if size is None else make_mesh(size)
  tx, batch = optax.sgd(0.1), digits(32)
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=2, mesh=mesh, donate=donate
  )

  def first(step):
    return jax.device_get(step(init_params(), tx.init(init_params()), batch))

  uncalled, expected = copied(step), first(step)
  for other in (uncalled, copied(step)):
    chex.assert_trees_all_equal(first(other), expected)
  assert trees.largest_difference(expected[0], init_params()) > 1e-3


def test_states_that_hold_one_array_twice_can_be_donated():
  params, batch = init_params(), digits(8)
  tx = relaxed(optax.lbfgs(learning_rate=0.1, linesearch=None))
  opt_state = tx.init(params)
  ids = [id(x) for x in jax.tree.leaves((params, opt_state))]
  assert len(set(ids)) < len(ids)
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=2)
  for _ in range(2):
    params, opt_state, metrics = step(params, opt_state, batch)
  assert float(metrics["loss"]) < float(
    value_grad_and_norm(init_params(), batch)[0]
  )


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


def test_memory_can_be_inspected_before_a_step_and_falls_with_n():
  tx, params, batch = (
    relaxed(optax.adam(1e-3)),
    init_params(hidden=256),
    digits(512),
  )
  shapes = jax.eval_shape(lambda: (params, tx.init(params), batch))
  temps = [
    temp_bytes(
      optax_accum.make_train_step(loss_fn, tx, num_microbatches=n), *shapes
    )
    for n in (1, 2, 4, 8)
  ]
  assert temps == sorted(temps, reverse=True)
  assert temps[-1] < 0.5 * temps[0]


@pytest.mark.parametrize("weighted", [False, True])
def test_step_takes_no_more_memory_than_a_hand_written_one(weighted):
  tx, params, batch, n = (
    relaxed(optax.adamw(1e-3)),
    init_params(hidden=512),
    digits(256),
    4,
  )
  options = {"weight_fn": lambda b: jnp.sum(b["y"] >= 0)} if weighted else {}
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=n, **options)
  args = (params, tx.init(params), batch)
  by_hand = oracle.with_optimizer(oracle.hand_written(loss_fn, n), tx)
  assert temp_bytes(step, *args) <= 1.05 * temp_bytes(by_hand, *args)


@pytest.mark.parametrize("name", ["local", "loss", "tx", "value", "stats"])
def test_arguments_of_the_loss_may_have_any_name(name):
  def fun(w, batch, **named):
    return jnp.mean((batch * w) ** 2) * named[name]

  step = optax_accum.make_train_step(fun, optax.sgd(0.5), num_microbatches=2)
  w, _, metrics = step(
    jnp.ones(()),
    optax.sgd(0.5).init(1.0),
    jnp.ones(4),
    **{name: jnp.full((), 0.5)},
  )
  assert (float(w), float(metrics["loss"])) == (0.5, 0.5)


def test_a_loss_may_be_passed_an_argument_called_self():
  run = optax_accum.microbatch_value_and_grad(
    lambda w, batch, **named: jnp.mean(batch * w) * named["self"],
    num_microbatches=2,
  )
  loss, grads = run(jnp.ones(()), jnp.ones(4), self=jnp.full((), 3.0))
  assert (float(loss), float(grads)) == (3, 3)


@pytest.mark.parametrize(
  ("loss", "names"),
  [
    (lambda w, x, rate: w, ["params", "opt_state", "x", "rate"]),
    (lambda *args: args, ["params", "opt_state", "args"]),
    (lambda **named: named, ["params", "opt_state", "named"]),
    (lambda w, *, x: w, ["params", "opt_state", "x"]),
    (lambda w, params: w, ["params", "opt_state", "args", "kwargs"]),
    (
      functools.partial(lambda rate, w, x: w, 0.1),
      ["params", "opt_state", "x"],
    ),
  ],
)
def test_a_step_has_the_signature_of_its_loss(loss, names):
  step = optax_accum.make_train_step(loss, optax.sgd(0.1), num_microbatches=2)
  assert list(inspect.signature(step).parameters) == names


def test_a_bad_leaf_is_reported_without_what_the_loss_holds():
  big = np.arange(1000.0)
  step = optax_accum.make_train_step(
    functools.partial(lambda big, w, x: w + jnp.mean(x["x"]), big),
    optax.sgd(0.1),
    num_microbatches=2,
  )
  with pytest.raises(
    TypeError, match=r"batch\['name'\] is the string 'a' and no array"
  ) as error:
    step(jnp.ones(()), (), {"x": jnp.ones(4), "name": "a"})
  assert len(str(error.value)) < 500


def test_a_step_has_a_name_under_an_outer_jit():
  step = optax_accum.make_train_step(
    lambda w, x: jnp.mean(w * x), optax.sgd(0.1), num_microbatches=2
  )
  lowered = jax.jit(step).lower(
    jnp.ones(()), optax.sgd(0.1).init(1.0), jnp.ones(4)
  )
  assert "jit_train_step" in lowered.as_text()


@pytest.mark.parametrize("mesh", [None, 8])
def test_a_batch_of_padding_moves_no_parameter_whatever_else_is_in_the_optimizer(
  mesh,
):
  def masked(params, batch):
    errors = (batch["x"] @ params["w1"]) ** 2
    valid = batch["valid"][:, None]
    return jnp.sum(errors * valid) / jnp.sum(valid) + 0 * jnp.sum(params["w2"])

  adamw = relaxed(optax.adamw(0.1, weight_decay=0.1))
  labels = {"w1": "every call", "w2": "every second"}
  tx = optax.partition(
    {"every call": adamw, "every second": optax_accum.accumulate(adamw, 2)},
    labels,
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
