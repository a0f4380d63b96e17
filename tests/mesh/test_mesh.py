"""Several devices: the global batch's step, one gradient reduction a cycle, no extra work."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.compiled import compilations
from support.devices import AUTO, EXPLICIT, make_mesh
from support.matrix_flops import matrix_flops
from support.optimizers import relaxed, with_loss_elsewhere
from support.samples import more

from optax_accum import (
  count_collectives,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
)

WIDTH, LAYERS, ROWS = 16, 8, 64
kinds = pytest.mark.parametrize(
  "kind", [AUTO, EXPLICIT], ids=["auto", "explicit"]
)


def init_params(dtype=np.float64, width=WIDTH):
  rng = np.random.default_rng(0)
  return {
    "embedding": np.asarray(rng.normal(size=(32, width)), dtype),
    "layers": np.asarray(rng.normal(size=(LAYERS, width, width)) / 4, dtype),
    "bias": np.asarray(rng.normal(size=(width,)), dtype),
  }


def make_batch(rows=ROWS, dtype=np.float64):
  """Padded text: the last rows, and so the last devices, hold far fewer valid tokens."""
  rng = np.random.default_rng(1)
  length = 4
  keep = np.linspace(1.0, 0.1, rows)[:, None]
  return {
    "token": rng.integers(0, 32, (rows, length)),
    "y": np.asarray(rng.normal(size=(rows, length)), dtype),
    "valid": np.asarray(rng.random((rows, length)) < keep, dtype),
  }


def forward(params, batch):
  def layer(x, w):
    return jnp.tanh(x @ w), None

  x = params["embedding"][batch["token"]]
  x, _ = lax.scan(layer, x, params["layers"])
  return jnp.mean(x + params["bias"][None, None], axis=-1)


def loss_fn(params, batch):
  error = (forward(params, batch).astype(batch["y"].dtype) - batch["y"]) ** 2
  return jnp.sum(error * batch["valid"]) / jnp.sum(batch["valid"])


def valid_tokens(batch):
  return jnp.sum(batch["valid"])


def optimizer():
  return relaxed(
    optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
  )


@functools.cache
def expected_steps():
  """Three steps on one device with the whole batch at once."""
  with jax.enable_x64(True):
    params, tx = (
      jax.tree.map(jnp.asarray, init_params()),
      with_loss_elsewhere(optimizer()),
    )
    step = oracle.whole_batch_step(loss_fn, tx)
    return oracle.take_steps(step, tx, params, [make_batch()] * 3)


@functools.cache
def expected_gradients():
  """The loss and the gradients of the whole batch."""
  with jax.enable_x64(True):
    params, batch = jax.tree.map(jnp.asarray, (init_params(), make_batch()))
    return jax.device_get(jax.jit(jax.value_and_grad(loss_fn))(params, batch))


@functools.cache
def expected_elsewhere():
  """The loss at twice the first parameters."""
  with jax.enable_x64(True):
    return float(
      jax.jit(loss_fn)(
        jax.tree.map(lambda x: 2 * x, init_params()), make_batch()
      )
    )


def assert_one_reduction(compiled, params):
  """All-reduces gradients like the parameters in one operation, after the loop."""
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  report = count_collectives(compiled)
  assert report.at_least(1024).inside == {}
  reductions = report.at_least(1024).outside
  assert set(reductions) == {"all-reduce"}
  # Scalars (loss, weights) may ride along.
  assert size <= reductions["all-reduce"].bytes <= size + 64
  assert reductions["all-reduce"].operations == 1


def with_aux(params, batch):
  return loss_fn(params, batch), {"loss": loss_fn(params, batch)}


@pytest.mark.parametrize(
  ("count", "options", "kind"),
  [
    (1, {"num_microbatches": 4}, AUTO),
    more(2, {"num_microbatches": 1}, EXPLICIT),
    (4, {"microbatch_size": 24, "skip_nonfinite": True}, AUTO),
    (8, {"num_microbatches": 8, "has_aux": True}, EXPLICIT),
  ],
)
def test_three_steps_equal_one_devices_whole_batch(count, options, kind):
  """Compiled once, with one reduction of the gradients, for arrays of the host too."""
  with jax.enable_x64(True):
    mesh, tx, made = make_mesh(count, kind=kind), optimizer(), []
    fun = with_aux if "has_aux" in options else loss_fn
    step = make_train_step(
      fun, tx, mesh=mesh, weight_fn=valid_tokens, **options
    )

    def counted(*args):
      out = step(*args)
      made.append(len(programs))
      return out

    with compilations() as programs:
      params, state, loss = oracle.take_steps(
        counted, tx, init_params(), [make_batch()] * 3
      )
    expected, (expected_state, _), expected_loss = expected_steps()
    trees.assert_close(
      (params, state, loss), (expected, expected_state, expected_loss), 1e-9
    )
    assert made[0] == made[-1] > 0
    if count > 1:
      placed = devices.put((params, state), mesh)
      assert_one_reduction(step.lower(*placed, make_batch()).compile(), params)


SHARDED = {
  "embedding": P("data"),
  "layers": P("data"),
  "bias": P(),
}
SHARDED_2D = {
  "embedding": P("data", "model"),
  "layers": P(None, "model", "data"),
  "bias": P(("data", "model")),  # one dimension over two axes: falls back
}
TENSOR_PARALLEL = {
  "embedding": P(None, "model"),
  "layers": P(None, None, "model"),
  "bias": P("model"),
}


def assert_steps_as_the_whole_batch(step, tx, mesh, specs):
  """Three steps from parameters that are sharded so; how to lower the first."""
  shardings = devices.shardings(init_params(), mesh, specs)
  params = jax.device_put(init_params(), shardings)
  opt_state, batch = (
    trees.strong(tx.init(params)),
    devices.put(make_batch(), mesh, P("data")),
  )
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding if x.ndim else None
    ),
    (params, opt_state, batch),
  )
  for i in range(3):
    held = params, opt_state
    params, opt_state, metrics = step(*held, batch)
    if i == 0:
      elsewhere = expected_elsewhere()
      np.testing.assert_allclose(opt_state[1], elsewhere, rtol=1e-12)
      assert abs(elsewhere - metrics["loss"]) > 1e-2
    # The first state is on the mesh but for its numbers.
    given = held if i else [x for x in jax.tree.leaves(held) if x.ndim]
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
  assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
  actual = jax.device_get((params, opt_state, metrics["loss"]))
  trees.assert_close(actual, expected_steps(), 1e-9)
  for name, x in params.items():
    assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
    assert (
      opt_state[0][1][0]
      .mu[name]
      .sharding.is_equivalent_to(shardings[name], x.ndim)
    )
  return functools.partial(step.lower, *shapes)


@kinds
def test_one_step_takes_replicated_and_sharded_parameters(kind):
  with jax.enable_x64(True):
    mesh, tx = make_mesh(8, kind=kind), with_loss_elsewhere(optimizer())
    step = make_train_step(
      loss_fn, tx, mesh=mesh, num_microbatches=4, weight_fn=valid_tokens
    )
    compiled = assert_steps_as_the_whole_batch(step, tx, mesh, P())().compile()
    assert_steps_as_the_whole_batch(step, tx, mesh, SHARDED)
    assert_steps_as_the_whole_batch(step, tx, mesh, P())
    assert_one_reduction(compiled, init_params())


@pytest.mark.parametrize(
  ("specs", "kind"), [(SHARDED_2D, AUTO), (TENSOR_PARALLEL, EXPLICIT)]
)
def test_parameters_may_be_sharded_over_two_axes(specs, kind):
  def fun(params, batch):
    if kind == EXPLICIT:  # explicit axes want to be told where a product goes
      params = jax.tree.map(lambda x: jax.reshard(x, P()), params)
    return loss_fn(params, batch)

  with jax.enable_x64(True):
    mesh, tx = make_mesh(4, 2, kind=kind), with_loss_elsewhere(optimizer())
    step = make_train_step(
      fun, tx, mesh=mesh, num_microbatches=4, weight_fn=valid_tokens
    )
    assert_steps_as_the_whole_batch(step, tx, mesh, specs)


def test_rows_of_an_explicit_mesh_need_not_divide():
  with jax.enable_x64(True):
    mesh, tx = make_mesh(8, kind=EXPLICIT), optimizer()
    step = make_train_step(
      loss_fn, tx, mesh=mesh, microbatch_size=56, weight_fn=valid_tokens
    )
    batch = devices.put(make_batch(), mesh, P("data"))
    params, state, loss = oracle.take_steps(
      step, tx, init_params(), [batch] * 3
    )
    expected, (expected_state, _), expected_loss = expected_steps()
    trees.assert_close(
      (params, state, loss), (expected, expected_state, expected_loss), 1e-9
    )


@pytest.mark.parametrize(
  ("size", "on_each", "kind"),
  [
    (16, [2, 2, 2], EXPLICIT),
    (32, [4, 2], AUTO),
    (40, [5, 1], EXPLICIT),
    (96, [6], AUTO),
  ],
)
def test_microbatch_size_counts_the_rows_on_all_devices(size, on_each, kind):
  def fun(params, x):
    return jnp.mean(params * x), jnp.asarray(len(x))

  tx, mesh = optax.sgd(0.1), make_mesh(8, kind=kind)
  step = make_train_step(
    fun,
    tx,
    mesh=mesh,
    microbatch_size=size,
    has_aux=True,
    aux_reduction="stack",
  )
  _, _, metrics = step(np.float32(1), tx.init(1.0), np.ones(48, np.float32))
  assert metrics["aux"].tolist() == on_each * 8


def test_one_step_takes_the_batch_by_position_and_by_name():
  def fun(params, batch, other):
    return jnp.mean((params * batch - other) ** 2)

  tx, mesh = optax.sgd(0.001), make_mesh(8)
  step = make_train_step(
    fun, tx, mesh=mesh, num_microbatches=2, batch_argnums=(1, 2), donate=False
  )
  x, y = np.arange(16, dtype=np.float32), np.ones(16, np.float32)
  gradient = jax.jit(jax.grad(fun))
  calls = [
    ((x, y), {}),
    ((x,), {"other": y}),
    ((), {"batch": x, "other": y}),
    ((x, y), {}),
  ]
  # with other parameters, or with those that the last call returned
  for goes_on in (
    False,
    True,
  ):
    params, state = jnp.asarray(2.0), tx.init(2.0)
    for args, kwargs in calls:
      expected = params - 0.001 * gradient(params, x, y)
      new, new_state, metrics = step(params, state, *args, **kwargs)
      np.testing.assert_allclose(new, expected, rtol=1e-6)
      assert float(metrics["total_weight"]) == 16
      params, state = (new, new_state) if goes_on else (params, state)


def test_a_batch_from_numpy_is_placed_by_its_rows():
  def fun(params, batch, scale):
    return jnp.mean(params * batch["x"]) * jnp.sum(scale)

  mesh, tx = make_mesh(8), optax.sgd(0.1)
  step = make_train_step(fun, tx, mesh=mesh, num_microbatches=1)
  batch = {"x": np.ones((16, 16), np.float32)}
  params, scale = np.float32(1), np.ones(8, np.float32)
  rows = NamedSharding(mesh, P("data"))
  lowered = step.lower(params, tx.init(params), batch, scale)
  args, _ = lowered.compile().input_shardings
  assert args[2]["x"].is_equivalent_to(rows, 2)
  assert args[0].is_fully_replicated
  assert args[3].is_fully_replicated
  lowered = step.lower(params, tx.init(params), batch=batch, scale=scale)
  _, named = lowered.compile().input_shardings
  assert named["batch"]["x"].is_equivalent_to(rows, 2)
  assert named["scale"].is_fully_replicated


def test_one_step_takes_parameters_of_several_trees():
  def fun(params, x):
    return jnp.mean(sum(jax.tree.leaves(params)) * x)

  tx = optax.sgd(0.25)
  step = make_train_step(fun, tx, mesh=make_mesh(8), num_microbatches=2)
  for params in ({"a": 1.0, "b": 2.0}, (1.0, 2.0), {"c": 1.0, "d": 2.0}):
    params = jax.tree.map(jnp.asarray, params)
    new, _, _ = step(params, tx.init(params), np.full(16, 4, np.float32))
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert [float(w) for w in jax.tree.leaves(new)] == [0, 1]


def compiled_step(
  mesh, fun=loss_fn, width=64, dtype=np.float32, specs=None, rows=256, **options
):
  """The step compiled for float32 gradients large enough to tell from the metrics."""
  tx = optimizer()
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, dtype), init_params(width=width)
  )
  on_mesh = devices.abstract(params, mesh, specs or P())
  batch = jax.eval_shape(
    lambda: jax.tree.map(jnp.asarray, make_batch(rows, np.float32))
  )
  step = make_train_step(fun, tx, mesh=mesh, **options)
  opt_state = jax.eval_shape(tx.init, params)
  shards = {x.shape: x.sharding for x in jax.tree.leaves(on_mesh)}
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=shards.get(x.shape)
    ),
    opt_state,
  )
  return step.lower(on_mesh, opt_state, batch).compile(), params


def test_one_gradient_reduction_a_cycle_in_the_dtype_of_the_accumulators():
  mesh = make_mesh(8)
  compiled, params = compiled_step(
    mesh, num_microbatches=32, dtype=jnp.bfloat16
  )
  accumulators = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params
  )
  assert_one_reduction(compiled, accumulators)


def test_one_gradient_reduction_a_cycle_on_tpus():
  mesh = make_mesh(64, platform="tpu")
  compiled, params = compiled_step(
    mesh, rows=1024, num_microbatches=8, weight_fn=valid_tokens, width=128
  )
  assert_one_reduction(compiled, params)


def test_fsdp_gathers_and_scatters_once():
  sharded = [name for name, spec in SHARDED.items() if spec]
  compiled, params = compiled_step(
    make_mesh(8), width=256, specs=SHARDED, num_microbatches=8, rows=64
  )
  report = count_collectives(compiled).at_least(1024)
  size = sum(4 * params[name].size for name in sharded)
  assert report.outside["all-gather"] == (len(sharded), size)
  assert report.outside["reduce-scatter"] == (len(sharded), size)
  assert not {"all-gather", "reduce-scatter"} & set(report.inside)


def test_every_device_computes_its_share():
  mesh = make_mesh(8)
  params = devices.put(init_params(np.float32, 64), mesh)
  batch = devices.put(make_batch(256, np.float32), mesh, P("data"))
  whole = matrix_flops(
    jax.jit(jax.value_and_grad(loss_fn))
    .lower(jax.device_get(params), jax.device_get(batch))
    .compile()
    .as_text()
  )

  def share(fun):
    program = jax.jit(fun).lower(params, batch).compile().as_text()
    return matrix_flops(program) / whole * mesh.size

  assert share(
    microbatch_value_and_grad(loss_fn, num_microbatches=8)
  ) == pytest.approx(1, abs=0.02)
  # blocks of rows: parallelism is lost
  assert share(oracle.hand_written(loss_fn, 8)) > 2
  compiled, _ = compiled_step(mesh, num_microbatches=8)
  assert matrix_flops(compiled.as_text()) / whole * mesh.size == pytest.approx(
    1, abs=0.02
  )


def test_plain_jit_on_an_explicit_mesh_keeps_rows_where_they_are():
  mesh = make_mesh(8, kind=EXPLICIT)
  params = devices.put(init_params(np.float32), mesh)
  batch = devices.put(make_batch(ROWS, np.float32), mesh, P("data"))

  def mean_square(params, batch):
    return jnp.mean((batch["y"] @ params["layers"][0, :4]) ** 2)

  cycle = jax.jit(microbatch_value_and_grad(mean_square, num_microbatches=4))
  compiled = cycle.lower(params, batch).compile()
  assert set(count_collectives(compiled).inside) <= {"all-reduce"}
  expected = jax.jit(jax.value_and_grad(mean_square))(
    *jax.device_get((params, batch))
  )
  trees.assert_close(jax.device_get(compiled(params, batch)), expected, 1e-5)


def scale_of(gradient_fn, params, batch, **options):
  """By how much a gradient computed on eight devices is off."""
  mesh = make_mesh(8)
  mapped = jax.shard_map(
    gradient_fn,
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P(),
    **options,
  )
  actual = jax.jit(mapped)(params, batch)
  return float(actual / np.mean(batch))


def test_in_shard_map_the_scale_is_right_and_that_of_known_errors_is_not():
  batch, w = jnp.arange(1.0, 65.0), jnp.asarray(2.0)

  def mean(w, x):
    return jnp.mean(w * x)

  def ours(w, x):
    return microbatch_value_and_grad(
      mean, num_microbatches=4, axis_name="data"
    )(w, x)[1]

  for check in (True, False):
    assert scale_of(ours, w, batch, check_vma=check) == pytest.approx(1)
  # summed by JAX, not averaged
  assert scale_of(jax.grad(mean), w, batch) == pytest.approx(8)
  pmean_on_top = lambda w, x: lax.pmean(jax.grad(mean)(w, x), "data")  # noqa: E731
  assert scale_of(pmean_on_top, w, batch) == pytest.approx(8)
  too_small = lambda w, x: jax.grad(lambda w, x: mean(w, x) / 8)(w, x) / 8  # noqa: E731
  assert scale_of(too_small, w, batch) == pytest.approx(1 / 8)
  unreduced = scale_of(jax.grad(mean), w, batch, check_vma=False)
  assert unreduced == pytest.approx(
    float(jnp.mean(batch[:8]) / jnp.mean(batch))
  )


@pytest.mark.parametrize(
  ("axis_name", "check_vma"), [("data", False), (("data", "model"), True)]
)
def test_in_shard_map_axis_name_gives_the_whole_batchs_gradient_reduced_once(
  axis_name, check_vma
):
  with jax.enable_x64(True):
    mesh = make_mesh(8) if axis_name == "data" else make_mesh(4, 2)
    cycle = microbatch_value_and_grad(
      loss_fn, microbatch_size=3, weight_fn=valid_tokens, axis_name=axis_name
    )
    mapped = jax.shard_map(
      cycle,
      mesh=mesh,
      in_specs=(P(), P(axis_name)),
      out_specs=P(),
      check_vma=check_vma,
    )
    params, batch = jax.tree.map(jnp.asarray, (init_params(), make_batch()))
    compiled = jax.jit(mapped).lower(params, batch).compile()
    assert count_collectives(compiled).inside == {}
    trees.assert_close(compiled(params, batch), expected_gradients(), 1e-10)


@pytest.mark.parametrize(
  ("check_vma", "options", "reduction"),
  [
    (True, {"num_microbatches": 2}, "mean"),
    (True, {"microbatch_size": 3}, "sum"),
    (False, {"num_microbatches": 2}, "sum"),
    (False, {"microbatch_size": 3}, "mean"),
  ],
)
def test_rows_weigh_the_same_over_devices_and_microbatches(
  check_vma, options, reduction
):
  with jax.enable_x64(True):
    of = {"mean": jnp.mean, "sum": jnp.sum}[reduction]
    cycle = microbatch_value_and_grad(
      lambda w, x: of(w * x), reduction=reduction, axis_name="data", **options
    )
    mapped = jax.shard_map(
      cycle,
      mesh=make_mesh(8),
      in_specs=(P(), P("data")),
      out_specs=P(),
      check_vma=check_vma,
    )
    x = np.random.default_rng(5).normal(size=64) + 1
    loss, grad = jax.jit(mapped)(jnp.asarray(2.0), x)
    expected = {"mean": x.mean(), "sum": x.sum()}[reduction]
    np.testing.assert_allclose(
      [loss, grad], [2 * expected, expected], rtol=1e-12
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_extremes_are_those_of_all_devices(check_vma):
  def fun(x):
    scale = jnp.max(x).astype(jnp.float8_e8m0fnu)  # which has no zero
    bools = {"all": jnp.all(x > 0), "any": jnp.any(x > 8)}
    return {"max": jnp.max(x), "min": jnp.min(x), "scale": scale, **bools}

  run = microbatch(
    fun,
    reduction={
      "max": "max",
      "min": "min",
      "scale": "max",
      "all": "min",
      "any": "max",
    },
    num_microbatches=2,
    axis_name="data",
  )
  mapped = jax.shard_map(
    run,
    mesh=make_mesh(8),
    in_specs=P("data"),
    out_specs=P(),
    check_vma=check_vma,
  )
  x = np.full(32, 3, np.float32)
  x[[9, 22]] = -1, 9  # on devices 2 and 5, whose extremes no other device has
  out = jax.jit(mapped)(x)
  assert (float(out["max"]), float(out["min"]), float(out["scale"])) == (
    9,
    -1,
    8,
  )
  assert (bool(out["all"]), bool(out["any"])) == (False, True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_of_a_carried_count_the_largest_is_kept(check_vma):
  def fun(w, x, count):
    return jnp.mean(w * x), (count + jnp.sum(x > 0), None)

  cycle = microbatch_value_and_grad(
    fun,
    num_microbatches=2,
    carry_argnum=2,
    carry_reduction="max",
    axis_name="data",
  )
  mapped = jax.shard_map(
    cycle,
    mesh=make_mesh(4),
    in_specs=(P(), P("data"), P()),
    out_specs=P(),
    check_vma=check_vma,
  )
  x = np.asarray([1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0], np.float32)
  (_, (count, _)), _ = jax.jit(mapped)(jnp.asarray(1.0), x, jnp.asarray(10))
  # 12, 13, 11 and 12 on the devices
  assert (int(count), count.dtype) == (
    13,
    jnp.int32,
  )


def test_in_pmap_axis_name_goes_with_keys_carry_aux_and_weights():
  def fun(params, batch, carry, key):
    noise = jax.random.uniform(key)
    aux = {
      "tokens": valid_tokens(batch).astype(jnp.int32),
      "noise": noise,
      "rows": batch["y"],
    }
    return loss_fn(params, batch), (carry + jnp.sum(batch["valid"]), aux)

  with jax.enable_x64(True):
    params, batch = init_params(), make_batch()
    split = trees.blocks(batch, 8)
    cycle = microbatch_value_and_grad(
      fun,
      num_microbatches=2,
      carry_argnum=2,
      rng_argnums=3,
      weight_fn=valid_tokens,
      aux_reduction={"tokens": "sum", "noise": "stack", "rows": "concat"},
      skip_nonfinite=True,
      axis_name="data",
    )
    (loss, (carry, aux)), grads, stats = jax.pmap(
      cycle, axis_name="data", in_axes=(None, 0, None, None)
    )(params, split, jnp.zeros(()), jax.random.key(0))
    first = jax.tree.map(lambda x: x[0], jax.device_get((loss, grads)))
    trees.assert_close(first, expected_gradients(), 1e-10)
    stats, aux, carry = jax.device_get((stats, aux, carry))
    assert stats.total_weight[0] == aux["tokens"][0] == np.sum(batch["valid"])
    # a carry weighs as its device
    counts = np.asarray(batch["valid"]).reshape(8, -1).sum(1)
    np.testing.assert_allclose(carry[0], np.average(counts, weights=counts))
    # no two devices or microbatches share noise
    assert len(np.unique(aux["noise"])) == 16
    np.testing.assert_array_equal(
      np.asarray(aux["rows"]).reshape(batch["y"].shape), batch["y"]
    )


@kinds
def test_over_a_mesh_aux_carry_keys_and_skips_are_as_on_one_device(kind):
  def fun(params, x, carry, key):
    aux = {
      "row": x,
      "noise": jax.random.uniform(key),
      "first": x[0],
      "last": x[0],
      "most": x[0],
    }
    aux["least"] = jnp.min((x - 9) ** 2)
    new = {
      "mean": 0.5 * carry["mean"] + 0.5 * jnp.mean(x),
      "big": carry["big"] + jnp.sum(x == 9),
    }
    return jnp.mean(params * x), (new, aux)

  mesh = make_mesh(4, kind=kind)
  step = make_train_step(
    fun,
    optax.sgd(0.1),
    mesh=mesh,
    num_microbatches=2,
    carry_argnum=2,
    carry_reduction={"mean": "mean", "big": "max"},
    rng_argnums=3,
    skip_nonfinite=True,
    donate=False,
    aux_reduction={
      "row": "concat",
      "noise": "stack",
      "first": "stack",
      "last": "last",
      "most": "max",
      "least": "min",
    },
  )
  x = np.arange(16, dtype=np.float32)
  x[5] = np.nan  # row 1 of device 1: in its second microbatch
  start = devices.put(jnp.asarray(1.0), mesh)
  params, _, carry, metrics = step(
    start,
    optax.sgd(0.1).init(1.0),
    x,
    {"mean": jnp.zeros(()), "big": jnp.asarray(10)},
    jax.random.key(0),
  )
  assert not start.is_deleted()
  kept = np.delete(x, [5, 7])
  assert int(metrics["skipped_microbatches"]) == 1
  assert float(metrics["total_weight"]) == 14
  np.testing.assert_allclose(metrics["loss"], kept.mean(), rtol=1e-6)
  np.testing.assert_allclose(params, 1 - 0.1 * kept.mean(), rtol=1e-6)
  np.testing.assert_array_equal(metrics["aux"]["row"], x)
  assert np.unique(metrics["aux"]["noise"]).size == 8
  # Device by device, and on each its microbatches in turn.
  np.testing.assert_array_equal(
    metrics["aux"]["first"], [0, 1, 4, np.nan, 8, 9, 12, 13]
  )
  assert (float(metrics["aux"]["last"]), float(metrics["aux"]["most"])) == (
    13,
    13,
  )
  assert float(metrics["aux"]["least"]) == 0  # of row 1 of device 2
  means = [
    x[[4 * d, 4 * d + 2]].mean() / 4 + x[[4 * d + 1, 4 * d + 3]].mean() / 2
    for d in range(4)
  ]
  means[1] = x[[4, 6]].mean() / 2  # kept as it was before the skip
  np.testing.assert_allclose(
    carry["mean"], np.average(means, weights=[4, 2, 4, 4]), rtol=1e-6
  )
  assert int(carry["big"]) == 11  # counted by device 2 alone


def test_embedding_gradients_are_exact():
  """Integer cotangents divided by 16: every order of additions gives the same bits."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 50, (64, 6))
  cotangents = rng.integers(-8, 9, (64, 6, 4))
  expected = np.zeros((50, 4))
  np.add.at(expected, tokens, cotangents / 16)

  def fun(table, batch):
    return jnp.sum(table[batch["token"]] * batch["cotangent"])

  batch = {"token": tokens, "cotangent": (cotangents / 16).astype(np.float32)}
  for count, n in [(1, 8), (8, 4), (8, 1)]:
    step = make_train_step(
      fun,
      optax.sgd(1.0),
      mesh=make_mesh(count),
      num_microbatches=n,
      reduction="sum",
    )
    table, _, _ = step(
      np.zeros((50, 4), np.float32), (optax.EmptyState(),) * 2, batch
    )
    np.testing.assert_array_equal(
      -np.asarray(table), expected.astype(np.float32)
    )


def test_accumulators_take_the_shardings_of_the_parameters():
  mesh = make_mesh(8, kind=EXPLICIT)
  params = devices.put(np.ones((16, 4), np.float32), mesh, P("data"))

  def fun(params, x):
    return jnp.mean(params**2) * jnp.mean(x)

  cycle = jax.jit(microbatch_value_and_grad(fun, num_microbatches=2))
  assert cycle(params, jnp.ones(4))[1].sharding.is_equivalent_to(
    params.sharding, 2
  )


def test_last_over_devices_is_the_last_that_counts():
  def fun(x):
    return x[-1]

  run = microbatch(
    fun,
    reduction="last",
    num_microbatches=1,
    weight_fn=lambda x: jnp.sum(x < 6),
    axis_name="data",
  )
  mapped = jax.shard_map(
    run, mesh=make_mesh(8), in_specs=P("data"), out_specs=P()
  )
  assert float(jax.jit(mapped)(jnp.arange(8.0))) == 5
