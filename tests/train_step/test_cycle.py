"""Microbatches that arrive in several calls are one step: `begin`, `add` and `finish`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from support import devices, oracle, trees
from support.compiled import compilations
from support.devices import make_mesh
from support.optimizers import relaxed
from support.samples import more

import optax_accum
from optax_accum import count_collectives

# Rows of each call: with a microbatch of one row on each of 8 devices, 1, 3 and 2 of them.
CALLS = 8, 24, 16
MESHES = {
  "one device": None,
  "8 devices": (8,),
  "2 axes": (4, 2),
}


def loss_fn(params, batch):
  """A mean over what the mask counts, of a small network."""
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
  each = jnp.sum(hidden**2, axis=1) * batch["mask"]
  return jnp.sum(each) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def tokens(batch):
  return jnp.sum(batch["mask"])


def batches(dtype=np.float64, rows=CALLS):
  rng = np.random.default_rng(3)
  return [
    {
      "x": rng.normal(size=(n, 8)).astype(dtype),
      # A third counts; of the first call less.
      "mask": (rng.random(n) < 0.3).astype(dtype),
    }
    for n in rows
  ]


def params_of(dtype=np.float64):
  rng = np.random.default_rng(4)
  return {
    "w": jnp.asarray(rng.normal(size=(8, 8)), dtype),
    "b": jnp.asarray(rng.normal(size=8), dtype),
  }


def take(step, params, opt_state, calls, *carry):
  """One step by microbatches that arrive in these calls."""
  cycle = step.begin(params, *carry)
  for batch in calls:
    cycle = step.add(cycle, params, batch)
  return step.finish(params, opt_state, cycle)


def joined(calls):
  return jax.tree.map(lambda *x: np.concatenate(x), *calls)


IN_LOOP = {"reduce_gradients": "per_microbatch"}
SKIPPING = {"skip_nonfinite": True, "noise_scale": True}


@pytest.mark.parametrize(
  ("mesh", "spec", "options"),
  [
    ("one device", P(), {"in_place": True}),
    more("one device", P(), {}),
    more("one device", P(), SKIPPING),
    ("8 devices", P(), SKIPPING),
    ("8 devices", P("data"), IN_LOOP),
    more("8 devices", P(), {}),
    more("8 devices", P(), {"in_place": True}),
    more("8 devices", P(), IN_LOOP),
    more("8 devices", P("data"), {}),
    ("2 axes", P("data"), {}),
    more("2 axes", P(), {"in_place": True}),
    more("2 axes", P(), SKIPPING),
    more("2 axes", P("data"), IN_LOOP),
  ],
)
def test_calls_are_the_step_of_all_rows(mesh, spec, options):
  shape = MESHES[mesh]
  if "in_place" in options and jax.__version_info__ < (0, 10):
    return
  tx = optax.chain(optax.clip_by_global_norm(0.1), relaxed(optax.adam(0.1)))
  with jax.enable_x64(True):
    params, calls = params_of(), batches()
    if shape is not None:
      options = options | {"mesh": make_mesh(*shape)}
      params = devices.put(params, make_mesh(*shape), spec)
    step = optax_accum.make_train_step(
      loss_fn,
      tx,
      microbatch_size=8,
      weight_fn=tokens,
      donate=False,
      **options,
    )
    new, state, metrics = take(step, params, tx.init(params), calls)
    whole = oracle.whole_batch_step(loss_fn, tx)
    expected = whole(params_of(), tx.init(params_of()), joined(calls))
    wrong = oracle.whole_batch_step(
      lambda p, calls: sum(loss_fn(p, x) for x in calls) / len(calls), tx
    )(params_of(), tx.init(params_of()), calls)
    for actual, right in zip(
      *map(jax.tree.leaves, ((new, state), expected[:2])), strict=True
    ):
      np.testing.assert_allclose(actual, right, rtol=1e-12, atol=1e-14)
    assert trees.largest_difference(*jax.device_get((new, wrong[0]))) > 1e-3
    assert metrics["loss"] == pytest.approx(
      float(expected[2]["loss"]), rel=1e-12
    )
    assert metrics["total_weight"] == tokens(joined(calls))
    assert bool(metrics["stepped"])
    for x, before in zip(*map(jax.tree.leaves, (new, params)), strict=True):
      assert x.sharding.is_equivalent_to(before.sharding, x.ndim)


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("shape", [None, (8,)], ids=["one device", "mesh"])
def test_carry_aux_and_keys_go_on_through_the_cycle(shape, by_name):
  def drawing(params, batch, seen, key, scale):
    bits = jax.random.bits(key, (), jnp.uint32).astype(jnp.int32) // 2**8
    new = {"rows": seen["rows"] + batch["x"].shape[0]}
    loss = loss_fn(params, batch) * scale
    return loss, (new, {"bits": bits, "rows": jnp.int32(batch["x"].shape[0])})

  def drawing_last(params, batch, key, scale, seen):
    return drawing(params, batch, seen, key, scale)

  mesh = None if shape is None else make_mesh(*shape)
  step = optax_accum.make_train_step(
    drawing_last if by_name else drawing,
    optax.sgd(0.1),
    microbatch_size=8,
    carry_argnum=4 if by_name else -3,
    carry_reduction="sum",
    rng_argnames="key",
    aux_reduction={"bits": "sum", "rows": "sum"},
    mesh=mesh,
    donate=False,
  )
  params, key = params_of(np.float32), jax.random.key(5)
  opt_state = optax.sgd(0.1).init(params)
  start = {"rows": jnp.int32(100)}
  cycle = step.begin(params, start)
  for batch in batches(np.float32):
    if by_name:
      cycle = step.add(cycle, params, batch, key=key, scale=jnp.float32(2))
    else:
      cycle = step.add(cycle, params, batch, key, jnp.float32(2))
  if by_name:
    with pytest.raises(TypeError, match=r"^step.add: missing .*: 'key'"):
      step.add(step.begin(params, start), params, batch, scale=jnp.float32(2))
  params, _, carry, metrics = step.finish(params, opt_state, cycle)
  assert carry["rows"] == 100 + sum(CALLS)
  assert metrics["aux"]["rows"] == sum(CALLS)
  # No two of them drew the same, on whatever device.
  microbatches = sum(CALLS) // 8 * (1 if mesh is None else 8)
  drawn = [
    jax.random.bits(jax.random.fold_in(key, i), (), jnp.uint32)
    for i in range(microbatches)
  ]
  expected = np.sum(np.asarray(drawn).astype(np.int32) // 2**8)
  assert metrics["aux"]["bits"] == expected


@pytest.mark.parametrize("spec", [P(), P(None, "data")], ids=["whole", "fsdp"])
def test_add_sends_no_gradient_and_holds_no_state(spec):
  def deep(params, batch):
    def layer(x, w):
      return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
    return jnp.mean(x**2)

  params = devices.put(jnp.ones((4, 64, 64)), make_mesh(8), spec)
  size = 4 * 64 * 64 * 4
  tx = relaxed(optax.adam(0.1))
  step = optax_accum.make_train_step(
    deep, tx, num_microbatches=2, mesh=make_mesh(8)
  )
  opt_state, batch = tx.init(params), jnp.ones((32, 64))
  cycle = step.add(step.begin(params), params, batch)
  whole, add, finish = (
    call.lower(*args).compile()
    for call, args in (
      (step, (params, opt_state, batch)),
      (step.add, (cycle, params, batch)),
      (step.finish, (params, opt_state, cycle)),
    )
  )
  sent = [
    [
      (x.kind, x.executions)
      for x in count_collectives(c).at_least(1024).operations
    ]
    for c in (add, finish)
  ]
  gathered = [("all-gather", 1)] if spec else []
  reduced = [("reduce-scatter", 1)] if spec else [("all-reduce", 1)]
  assert sent == [gathered, reduced]
  held = add.memory_analysis()
  own = size // 8 if spec else size
  rows = batch.nbytes // 8
  assert held.argument_size_in_bytes < own + size + rows + 1024
  assert held.alias_size_in_bytes >= size  # the sums are added to in place
  temp = whole.memory_analysis().temp_size_in_bytes
  assert held.temp_size_in_bytes <= temp
  # What shapes alone tell is the same program.
  like = step.add.eval_shape(step.begin(params), params, batch)
  assert jax.tree.map(jnp.shape, like) == jax.tree.map(jnp.shape, cycle)
  shapes = step.finish.lower(params, opt_state, like).as_text()
  assert shapes == step.finish.lower(params, opt_state, cycle).as_text()


@pytest.mark.parametrize("shape", [None, (8,)], ids=["one device", "mesh"])
def test_a_cycle_that_was_saved_goes_on_to_the_bit(shape, tmp_path):
  mesh = None if shape is None else make_mesh(*shape)
  tx = relaxed(optax.adam(0.1))

  def make():
    return optax_accum.make_train_step(
      loss_fn, tx, microbatch_size=8, weight_fn=tokens, mesh=mesh, donate=False
    )

  first, *rest = batches(np.float32)
  params = params_of(np.float32)
  step, opt_state = make(), tx.init(params)
  expected = take(step, params, opt_state, [first, *rest])

  cycle = step.add(step.begin(params), params, first)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "cycle", cycle)
    checkpointer.wait_until_finished()
    step = make()
    like = step.add.eval_shape(step.begin(params), params, first)
    cycle = checkpointer.restore(tmp_path / "cycle", like)
  for batch in rest:
    cycle = step.add(cycle, params, batch)
  resumed = step.finish(params, opt_state, cycle)
  jax.tree.map(np.testing.assert_array_equal, resumed, expected)


@pytest.mark.parametrize("when", ["per_cycle", "per_microbatch"])
def test_a_state_may_be_sharded_where_parameters_are_whole(when):
  mesh, tx = make_mesh(8), optax.sgd(0.1, momentum=0.9)
  step = optax_accum.make_train_step(
    loss_fn,
    tx,
    microbatch_size=8,
    weight_fn=tokens,
    mesh=mesh,
    reduce_gradients=when,
    donate=False,
  )
  params = devices.put(params_of(np.float32), mesh)
  opt_state = devices.put(tx.init(params), mesh, P("data"))
  calls = batches(np.float32)
  expected = step(params, opt_state, joined(calls))
  found = take(step, params, opt_state, calls)
  for x, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-6)
    assert x.sharding.is_equivalent_to(right.sharding, x.ndim)


def test_a_cycle_in_host_memory_goes_back_to_explicit_axes():
  mesh = make_mesh(4, 2, kind=devices.EXPLICIT)
  tx = optax.sgd(0.1)
  step = optax_accum.make_train_step(
    lambda params, batch: jnp.mean((batch["x"] @ params) ** 2),
    tx,
    num_microbatches=1,
    mesh=mesh,
    donate=False,
  )
  params = devices.put(jnp.arange(8.0), mesh, P("model"))
  opt_state = tx.init(params)
  calls = batches(np.float32, (8, 8))
  expected = take(step, params, opt_state, calls)
  cycle = step.add(step.begin(params), params, calls[0])
  cycle = step.add(jax.device_get(cycle), params, calls[1])
  found = step.finish(params, opt_state, jax.device_get(cycle))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("shape", [None, (8,)], ids=["one device", "mesh"])
def test_a_cycle_of_nothing_is_no_step(shape):
  mesh = None if shape is None else make_mesh(*shape)
  tx = relaxed(optax.adam(0.1))
  step = optax_accum.make_train_step(
    loss_fn, tx, microbatch_size=8, weight_fn=tokens, mesh=mesh, donate=False
  )
  params = params_of(np.float32)
  opt_state = tx.init(params)
  (batch,) = batches(np.float32, (8,))
  padding = batch | {"mask": np.zeros_like(batch["mask"])}
  for calls in [], [padding, padding]:
    new, state, metrics = take(step, params, opt_state, calls)
    assert not metrics["stepped"]
    assert metrics["total_weight"] == 0
    jax.tree.map(
      np.testing.assert_array_equal, (new, state), (params, opt_state)
    )


def test_what_is_not_finite_spoils_its_own_cycle_or_is_skipped():
  tx = optax.sgd(0.1)
  params = params_of(np.float32)
  good, bad = batches(np.float32, (8, 8))
  bad["x"][0] = np.nan
  bad["mask"][0] = 1
  for skip in False, True:
    step = optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=1, skip_nonfinite=skip, donate=False
    )
    state = tx.init(params)
    new, _, metrics = take(step, params, state, [good, bad])
    assert bool(jnp.isfinite(metrics["loss"])) == skip
    assert metrics["skipped_microbatches"] == int(skip)
    alone = take(step, params, state, [good])
    assert jnp.isfinite(alone[2]["loss"])
    if skip:
      jax.tree.map(np.testing.assert_array_equal, new, alone[0])


def test_each_number_of_rows_is_compiled_once():
  tx = optax.sgd(0.1)
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1)
  params = params_of(np.float32)
  opt_state = tx.init(params)
  calls = batches(np.float32, (8, 16))
  params, opt_state, _ = take(step, params, opt_state, calls)
  with compilations() as compiled:
    for _ in range(2):
      params, opt_state, _ = take(step, params, opt_state, calls)
  assert not compiled
  # Of parameters that were put on a device too.
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1)
  params = jax.device_put(params_of(np.float32), jax.devices()[3])
  with compilations() as compiled:
    take(step, params, tx.init(params), 3 * calls[:1])
  assert sum("add_to_cycle" in line for line in compiled) == 1


def made(**options):
  tx = options.pop("tx", optax.sgd(0.1))
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1, **options)
  params = params_of(np.float32)
  return step, params, tx.init(params), *batches(np.float32, (8, 8))


def begun(step, params, batch, *carry):
  """A cycle with microbatches."""
  return step.add(step.begin(params, *carry), params, batch)


def test_a_cycle_is_used_once():
  step, params, opt_state, batch, other = made(donate=False)
  cycle = step.add(step.begin(params), params, batch)
  new = step.add(cycle, params, other)
  with pytest.raises(RuntimeError, match="deleted: the cycle was given to an"):
    step.add(cycle, params, other)
  step.finish(params, opt_state, new)
  for use in step.add, step.finish:
    given = (
      (new, params, other) if use is step.add else (params, opt_state, new)
    )
    with pytest.raises(RuntimeError, match="or to finish, which ended it"):
      use(*given)


@pytest.mark.parametrize(
  ("error", "match", "use"),
  [
    (
      TypeError,
      r"^step\.add\(cycle, params, .* got a dict as cycle: pass what begin",
      lambda step, params, state, batch: step.add(params, batch),
    ),
    (
      TypeError,
      "^step.add: too many positional arguments. It takes step.add.cycle, params, batch, .* no opt",
      lambda step, params, state, batch: step.add(
        step.begin(params), params, state, batch
      ),
    ),
    (
      TypeError,
      "^step.add: missing a required argument: 'batch'",
      lambda step, params, state, batch: step.add(step.begin(params), params),
    ),
    (
      TypeError,
      r"^step\.finish\(params, opt_state, cycle, /\) got a dict as cycle",
      lambda step, params, state, batch: step.finish(state, state, params),
    ),
    (
      TypeError,
      "begin got 2 arguments, and the loss has 0 carry",
      lambda step, params, state, batch: step.begin(params, {}),
    ),
    (
      ValueError,
      "has type float32.8., not float32.4.: the cycle is of another step, of",
      lambda step, params, state, batch: step.add(
        step.add(step.begin(params), params, batch),
        params | {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)},
        batch,
      ),
    ),
    (
      ValueError,
      "cycle.grads.'b'. is not expected: the cycle is of another step, of",
      lambda step, params, state, batch: step.finish(
        {"w": params["w"]}, state, step.add(step.begin(params), params, batch)
      ),
    ),
    (
      ValueError,
      "cycle.grads.'b'. has shape .8,., not .4,.: the cycle is of another",
      lambda step, params, state, batch: step.finish(
        params | {"b": jnp.zeros(4)},
        state,
        step.add(step.begin(params), params, batch),
      ),
    ),
    (
      ValueError,
      "cycle.metrics.'noise_scale'. is missing: the cycle is of another step",
      lambda step, params, state, batch: made(noise_scale=True)[0].finish(
        params, state, step.add(step.begin(params), params, batch)
      ),
    ),
    (
      ValueError,
      "cycle is of reduction='mean', and this step of reduction='sum': go on",
      lambda step, params, state, batch: made(reduction="sum")[0].finish(
        params, state, step.add(step.begin(params), params, batch)
      ),
    ),
    (
      ValueError,
      "cycle.number has shape .., not .8,.: with mesh= a cycle has sums of each",
      lambda step, params, state, batch: made(mesh=make_mesh(8))[0].add(
        step.add(step.begin(params), params, batch), params, batch
      ),
    ),
    (
      ValueError,
      "cycle.number has shape .8,., not ..: with mesh= .* Go on with it on as many",
      lambda step, params, state, batch: step.finish(
        params, state, made_on_mesh(params, batch)
      ),
    ),
    (
      RuntimeError,
      "params.'b'. has been deleted: an earlier step updated",
      lambda step, params, state, batch: step.add(
        step.begin(params), deleted(params), batch
      ),
    ),
    (
      TypeError,
      r"dot_general .* got \(4,\) and \(8,\)",
      lambda step, params, state, batch: step.add(
        begun(step, params, batch), params, batch | {"x": batch["x"][:, :4]}
      ),
    ),
    (
      KeyError,
      "mask",
      lambda step, params, state, batch: step.add(
        begun(step, params, batch), params, {"x": batch["x"]}
      ),
    ),
    (
      TypeError,
      "argument 0 is one of argument 1: the order is finish.params, opt_state, c",
      lambda step, params, state, batch: made(tx=optax.adam(0.1))[0].finish(
        optax.adam(0.1).init(params), params, begun(step, params, batch)
      ),
    ),
    (
      TypeError,
      "^batch is of type object and no array: leave it",
      lambda step, params, state, batch: step.add(
        step.begin(params), params, object()
      ),
    ),
    (
      ValueError,
      "opt_state.0..count is missing: the state is not as init makes it",
      lambda step, params, state, batch: made(tx=optax.adam(0.1))[0].finish(
        params, state, begun(step, params, batch)
      ),
    ),
    (
      ValueError,
      "called inside pmap or shard_map over .* without axis_name",
      lambda step, params, state, batch: jax.shard_map(
        lambda x: begun(step, params, {"x": x, "mask": x[:, 0]}).held.number,
        mesh=make_mesh(8),
        in_specs=P("data"),
        out_specs=P(),
      )(jnp.ones((64, 8))),
    ),
  ],
)
def test_what_is_no_cycle_of_this_step_is_refused(error, match, use):
  step, params, state, batch, _ = made()
  with pytest.raises(error, match=match):
    use(step, params, state, batch)


def made_on_mesh(params, batch):
  step, *_ = made(mesh=make_mesh(8))
  return step.add(step.begin(params), params, batch)


def deleted(params):
  for x in jax.tree.leaves(params):
    x.delete()
  return params


def test_batches_of_a_cycle_may_differ_where_their_results_are_alike():
  def flexible(params, batch):
    of_row = jnp.mean(batch["x"].astype(jnp.float32), axis=1)
    aux = {name: jnp.sum(x) for name, x in batch.items()}
    return jnp.mean(of_row) * jnp.sum(params), aux

  def begin(**options):
    step = optax_accum.make_train_step(
      flexible,
      optax.sgd(0.1),
      num_microbatches=1,
      has_aux=True,
      donate=False,
      **options,
    )
    return step, step.add(step.begin(params), params, {"x": jnp.ones((8, 4))})

  params = jnp.ones(3)
  step, cycle = begin()
  cycle = step.add(cycle, params, {"x": jnp.full((4, 2), 4.0)})
  metrics = step.finish(params, optax.sgd(0.1).init(params), cycle)[2]
  assert metrics["loss"] == (8 * 3 + 4 * 12) / 12
  step, cycle = begin(aux_reduction="sum")
  with pytest.raises(ValueError, match=r"aux\['x'\] has type float32.*int32"):
    step.add(cycle, params, {"x": jnp.ones((8, 4), jnp.int32)})
  with pytest.raises(ValueError, match=r"outputs has other leaves: the cycle"):
    step.add(cycle, params, {"x": jnp.ones((8, 4)), "y": jnp.ones(8)})


def test_the_carry_is_in_the_cycle_and_nowhere_else():
  def counting(params, batch, seen):
    return loss_fn(params, batch), (seen + 1, None)

  step = optax_accum.make_train_step(
    counting, optax.sgd(0.1), num_microbatches=1, carry_argnum=2
  )
  other, params, state, batch, _ = made()
  with pytest.raises(TypeError, match=r"1 carry .* it is begin\(params, carry"):
    step.begin(params)
  cycle = begun(step, params, batch, jnp.int32(0))
  with pytest.raises(TypeError, match="got seen=, the carry, which is in the"):
    step.add(cycle, params, batch, seen=jnp.int32(0))
  with pytest.raises(TypeError, match=r"too many .* no carry, which is in"):
    step.add(cycle, params, batch, jnp.int32(0))
  with pytest.raises(ValueError, match="a cycle with 1 carry, and the loss ha"):
    other.add(cycle, params, batch)
  with pytest.raises(ValueError, match="finish got a cycle with 0 carry"):
    step.finish(params, state, begun(other, params, batch))


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"has_aux": True, "aux_reduction": "stack"}, "aux_reduction is 'stack'"),
    (
      {"has_aux": True, "aux_reduction": {"x": "concat"}},
      r"\['x'\] is 'concat'",
    ),
    (
      {
        "grad_metrics_fn": optax.tree.norm,
        "grad_metrics_reduction": "stack",
      },
      "grad_metrics_reduction is 'stack', which needs all microbatches at once",
    ),
    ({"axis_name": "data"}, "make the step with mesh="),
  ],
)
def test_what_needs_all_microbatches_at_once_is_refused(options, match):
  step, params, *_ = made(**options)
  with pytest.raises(ValueError, match=match):
    step.begin(params)


def test_an_optimizer_that_searches_a_line_is_refused():
  step, params, state, batch, _ = made(tx=relaxed(optax.lbfgs()), donate=False)
  cycle = step.add(step.begin(params), params, batch)
  with pytest.raises(NotImplementedError, match="calls value_fn, as line"):
    step.finish(params, state, cycle)
