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
MESHES = {"one device": None, "8 devices": (8,), "2 axes": (4, 2)}


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


def added(step, params, calls, *carry):
  """A cycle of microbatches that arrived in these calls."""
  cycle = step.begin(params, *carry)
  for batch in calls:
    cycle = step.add(cycle, params, batch)
  return cycle


def merged(step, params, calls, *carry):
  """A cycle of two that were added up apart: of the first call, and of the others."""
  parts = calls[:1], calls[1:]
  return step.merge(*(added(step, params, part, *carry) for part in parts))


def take(step, params, opt_state, calls, *carry):
  """One step by microbatches that arrive in these calls."""
  return step.finish(params, opt_state, added(step, params, calls, *carry))


def joined(calls):
  return jax.tree.map(lambda *x: np.concatenate(x), *calls)


SKIPPING = {"skip_nonfinite": True, "noise_scale": True}


def total_and_weight(params, batch):
  return loss_fn(params, batch) * tokens(batch), tokens(batch)


@pytest.mark.parametrize(("arrive", "mesh", "spec", "options"), [
  (added, "one device", P(), {"in_place": True}),
  more(added, "one device", P(), {"has_weight": True}),
  (added, "8 devices", P(), SKIPPING),
  (added, "8 devices", P("data"), {"has_weight": True}),
  more(added, "2 axes", P("data"), {}),
  more(added, "2 axes", P(), {"in_place": True}),
  more(merged, "one device", P(), {"in_place": True}),
  (merged, "one device", P(), {"has_weight": True}),
  more(merged, "8 devices", P(), SKIPPING),
  more(merged, "8 devices", P("data"), {"has_weight": True}),
  (merged, "2 axes", P("data"), {}),
  more(merged, "2 axes", P(), {"in_place": True}),
])  # fmt: skip
def test_calls_are_the_step_of_all_rows(arrive, mesh, spec, options):
  shape = MESHES[mesh]
  if "in_place" in options and jax.__version_info__ < (0, 10):
    return
  tx = optax.chain(optax.clip_by_global_norm(0.1), relaxed(optax.adam(0.1)))
  count = 1
  with jax.enable_x64(True):
    params, calls = params_of(), batches()
    if shape is not None:
      options = options | {"mesh": make_mesh(*shape)}
      params = devices.put(params, make_mesh(*shape), spec)
      count = shape[0]
    if "has_weight" not in options:
      options = options | {"weight_fn": tokens}
    step = optax_accum.make_train_step(
      total_and_weight if "has_weight" in options else loss_fn,
      tx,
      microbatch_size=8,
      donate=False,
      **options,
    )
    opt_state = tx.init(params)
    cycle = arrive(step, params, calls)
    assert cycle.total_weight == tokens(joined(calls))
    assert cycle.num_microbatches == sum(CALLS) // 8 * count
    new, state, metrics = step.finish(params, opt_state, cycle)
    whole = oracle.whole_batch_step(loss_fn, tx)
    expected = whole(params_of(), tx.init(params_of()), joined(calls))
    wrong = oracle.whole_batch_step(
      lambda p, calls: sum(loss_fn(p, x) for x in calls) / len(calls), tx
    )(params_of(), tx.init(params_of()), calls)
    for actual, right in zip(*map(jax.tree.leaves, ((new, state), expected[:2])), strict=True):
      np.testing.assert_allclose(actual, right, rtol=1e-12, atol=1e-14)
    assert trees.largest_difference(*jax.device_get((new, wrong[0]))) > 1e-3
    assert metrics["loss"] == pytest.approx(float(expected[2]["loss"]), rel=1e-12)
    assert metrics["total_weight"] == tokens(joined(calls))
    assert bool(metrics["stepped"])
    for x, before in zip(*map(jax.tree.leaves, (new, params)), strict=True):
      assert x.sharding.is_equivalent_to(before.sharding, x.ndim)
    if arrive is merged:  # what the whole batch does not have
      one = take(step, params, opt_state, calls)[2]
      trees.assert_close(*jax.device_get((metrics, one)), 1e-10)


@pytest.mark.parametrize(
  ("shape", "by_name"), [(None, True), ((8,), False), more(None, False), more((8,), True)]
)
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
    rng_argnums="key" if by_name else 3,
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
    with pytest.raises(ValueError, match=r"rng_argnums names argument 'key'"):
      step.add(step.begin(params, start), params, batch, scale=jnp.float32(2))
  params, _, carry, metrics = step.finish(params, opt_state, cycle)
  assert carry["rows"] == 100 + sum(CALLS)
  assert metrics["aux"]["rows"] == sum(CALLS)
  # No two of them drew the same, on whatever device.
  microbatches = sum(CALLS) // 8 * (1 if mesh is None else 8)
  drawn = [jax.random.bits(jax.random.fold_in(key, i), (), jnp.uint32) for i in range(microbatches)]
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
  step = optax_accum.make_train_step(deep, tx, num_microbatches=2, mesh=make_mesh(8))
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
    [(x.kind, x.executions) for x in count_collectives(c).at_least(1024).operations]
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


@pytest.mark.parametrize("shape", [more(None), (8,)], ids=["one device", "mesh"])
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


def test_a_state_may_be_sharded_where_parameters_are_whole():
  mesh, tx = make_mesh(8), optax.sgd(0.1, momentum=0.9)
  step = optax_accum.make_train_step(
    loss_fn, tx, microbatch_size=8, weight_fn=tokens, mesh=mesh, donate=False
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
  new, state, metrics = take(step, params, opt_state, [padding, padding])
  assert not metrics["stepped"]
  assert metrics["total_weight"] == 0
  jax.tree.map(np.testing.assert_array_equal, (new, state), (params, opt_state))
  begin = step.begin(params)
  assert (begin.total_weight, begin.num_microbatches) == (0, 0)
  for empty in begin, step.merge(step.begin(params), step.begin(params)):
    with pytest.raises(ValueError, match="empty"):
      step.finish(params, opt_state, empty)


@pytest.mark.parametrize("arrive", [added, merged])
def test_what_is_not_finite_spoils_its_own_cycle_or_is_skipped(arrive):
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
    cycle = arrive(step, params, [good, bad])
    new, _, metrics = step.finish(params, state, cycle)
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
  pair = begun(step, params, batch), begun(step, params, other)
  step.merge(*pair)
  for given in (new, *pair):
    for use in (
      lambda x: step.add(x, params, other),
      lambda x: step.finish(params, opt_state, x),
      lambda x: step.merge(x, begun(step, params, batch)),
      lambda x: step.merge(begun(step, params, batch), x),
    ):
      with pytest.raises(RuntimeError, match="deleted: the cycle was given to"):
        use(given)


def narrow(params):
  return params | {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}


@pytest.mark.parametrize(("error", "match", "use"), [
  (TypeError, "^add got a dict as cycle: pass what begin", lambda step, params, state, batch: step.add(params, batch)),
  (ValueError, "batch_argnums names argument 1 of the function, to which this call gives 1 pos",
    lambda step, params, state, batch: step.add(step.begin(params), params)),
  (TypeError, "^finish got a dict as cycle", lambda step, params, state, batch: step.finish(state, state, params)),
  (ValueError, "has type float32.8., not float32.4.: the cycle is of another step, of",
    lambda step, params, state, batch: step.add(begun(step, params, batch), narrow(params), batch)),
  (ValueError, "cycle.grads.'b'. is not expected: the cycle is of another step, of",
    lambda step, params, state, batch: step.finish({"w": params["w"]}, state, begun(step, params, batch))),
  (ValueError, "cycle.grads.'b'. has shape .8,., not .4,.: the cycle is of another",
    lambda step, params, state, batch: step.finish(params | {"b": jnp.zeros(4)}, state, begun(step, params, batch))),
  (ValueError, "cycle.* of another",
    lambda step, params, state, batch: step.merge(begun(step, params, batch), begun(step, narrow(params), batch))),
  (ValueError, "merge got one cycle twice: a cycle is used once",
    lambda step, params, state, batch: step.merge(*2 * [begun(step, params, batch)])),
  (ValueError, r"sums of \(\) devices, and the step of \(8,\): with mesh= each device has",
    lambda step, params, state, batch: made(mesh=make_mesh(8))[0].add(begun(step, params, batch), params, batch)),
  (ValueError, r"sums of \(8,\) devices, and the step of \(\): with mesh= .* on as many",
    lambda step, params, state, batch: step.finish(params, state, begun(made(mesh=make_mesh(8))[0], params, batch))),
  (RuntimeError, "params.'b'. has been deleted: an earlier step updated",
    lambda step, params, state, batch: step.add(step.begin(params), deleted(params), batch)),
  (
    TypeError,
    "is in the place of the parameters: the order is .* finish.params, opt_state, c",
    lambda step, params, state, batch: made(tx=optax.adam(0.1))[0].finish(
      optax.adam(0.1).init(params), params, begun(step, params, batch)
    ),
  ),
  (TypeError, "^batch is of type object and no array: leave it",
    lambda step, params, state, batch: step.add(step.begin(params), params, object())),
  (
    ValueError,
    "inside pmap or shard_map over .*microbatch_value_and_grad",
    lambda step, params, state, batch: jax.shard_map(
      lambda x: begun(step, params, {"x": x, "mask": x[:, 0]}).total_weight,
      mesh=make_mesh(8),
      in_specs=P("data"),
      out_specs=P(),
    )(jnp.ones((64, 8))),
  ),
])  # fmt: skip
def test_what_is_no_cycle_of_this_step_is_refused(error, match, use):
  step, params, state, batch, _ = made()
  with pytest.raises(error, match=match):
    use(step, params, state, batch)


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
      flexible, optax.sgd(0.1), num_microbatches=1, has_aux=True, donate=False, **options
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
  with pytest.raises(ValueError, match=r"outputs.aux\['y'\] is missing: the cycle"):
    step.add(cycle, params, {"x": jnp.ones((8, 4)), "y": jnp.ones(8)})


def test_the_carry_is_in_the_cycle_and_nowhere_else():
  def counting(params, batch, seen):
    return loss_fn(params, batch), (seen + 1, None)

  step = optax_accum.make_train_step(counting, optax.sgd(0.1), num_microbatches=1, carry_argnum=2)
  plain, params, opt_state, batch, _ = made()
  with pytest.raises(TypeError, match="carry"):
    step.begin(params)
  with pytest.raises(TypeError, match="finish got 0 carry"):
    step.finish(params, opt_state, begun(plain, params, batch))
  cycle = begun(step, params, batch, jnp.int32(0))
  with pytest.raises(TypeError, match="seen"):
    step.add(cycle, params, batch, seen=jnp.int32(0))
  with pytest.raises(TypeError, match="takes 3 positional"):
    step.add(cycle, params, batch, jnp.int32(0))


@pytest.mark.parametrize(
  ("words", "match"),
  [("stack", "aux_reduction is 'stack'"), ({"x": "concat"}, r"\['x'\] is 'concat'")],
)
def test_what_needs_all_microbatches_at_once_is_refused(words, match):
  step, params, *_ = made(has_aux=True, aux_reduction=words)
  with pytest.raises(ValueError, match=match):
    step.begin(params)


def test_an_optimizer_that_searches_a_line_is_refused():
  step, params, state, batch, _ = made(tx=relaxed(optax.lbfgs()), donate=False)
  cycle = step.add(step.begin(params), params, batch)
  with pytest.raises(NotImplementedError, match="calls value_fn, as line"):
    step.finish(params, state, cycle)


def ends(a, b):
  return {"first": a["first"], "last": b["last"]}


WORDS = {word: word for word in ("mean", "sum", "max", "min", "last")}


@pytest.mark.parametrize("shape", [more(None), (8,)], ids=["one device", "mesh"])
def test_merge_combines_aux_and_carries_by_their_words(shape):
  """As what the cycles finish with, each by itself. One that is skipped has no last aux."""
  carried = {name: WORDS[name] for name in ("mean", "sum", "max")}

  def fun(params, batch, carry):
    loss = loss_fn(params, batch)
    x = jnp.mean(batch["x"])
    aux = dict.fromkeys(WORDS, loss) | {"ends": {"first": x, "last": x}}
    new = {name: 0.5 * value + x for name, value in carry.items()}
    return loss, (new, aux)

  with jax.enable_x64(True):
    tx, params = optax.sgd(0.1), params_of()
    step = optax_accum.make_train_step(
      fun,
      tx,
      microbatch_size=8,
      weight_fn=tokens,
      carry_argnum=2,
      carry_reduction=carried,
      aux_reduction=WORDS | {"ends": ends},
      skip_nonfinite=True,
      mesh=shape and make_mesh(*shape),
      donate=False,
    )
    start = {name: jnp.asarray(3.0) for name in carried}

    def finished(cycle):
      *_, carry, metrics = step.finish(params, tx.init(params), cycle)
      return jax.device_get((carry, metrics))

    first, *others = batches()
    calls = [[first], others]
    apart = [finished(added(step, params, each, start)) for each in calls]
    carries, metrics = zip(*apart, strict=True)
    aux = [x["aux"] for x in metrics]
    weights = [x["total_weight"] for x in metrics]
    assert weights[0] != weights[1]

    def combined(values, word):
      if word == "mean":
        return np.average(values, weights=weights)
      return {"sum": sum, "max": max, "min": min, "last": lambda x: x[1]}[word](values)

    carry, found = finished(merged(step, params, batches(), start))
    for name, word in WORDS.items():
      np.testing.assert_allclose(
        found["aux"][name], combined([x[name] for x in aux], word), rtol=1e-12
      )
    assert found["aux"]["ends"] == ends(*(x["ends"] for x in aux))
    for name, word in carried.items():
      expected = combined([x[name] for x in carries], word)
      if word == "sum":  # the start, and all increments
        expected -= 3.0
      np.testing.assert_allclose(carry[name], expected, rtol=1e-12)

    nothing = first | {"x": np.full_like(first["x"], np.nan)}
    carry, found = finished(merged(step, params, [first, nothing], start))
    trees.assert_close(carry, carries[0], 1e-12)
    assert found["aux"]["last"] == aux[0]["last"]
    assert found["skipped_microbatches"] > 0


@pytest.mark.parametrize("shape", [None, (8,)], ids=["one device", "mesh"])
def test_a_carry_may_start_as_the_parameters(shape):
  """Such as their moving average: finish donates the parameters, and reads the carry."""

  def averaging(params, batch, average):
    return loss_fn(params, batch), ({**average, "b": params["b"]}, None)

  mesh = shape and make_mesh(*shape)
  step = optax_accum.make_train_step(
    averaging, optax.sgd(0.1), num_microbatches=1, carry_argnum=2, mesh=mesh
  )
  params, batch = params_of(np.float32), batches(np.float32, (8,))[0]
  if mesh:
    params = devices.put(params, mesh)
  cycle = begun(step, params, batch, params)
  _, _, average, _ = step.finish(params, optax.sgd(0.1).init(params), cycle)
  trees.assert_close(jax.device_get(average), params_of(np.float32), 1e-6)


@pytest.mark.parametrize("shape", [None, (8,)], ids=["one device", "mesh"])
def test_an_empty_cycle_leaves_the_other_as_it_is(shape):
  step, params, state, batch, other = made(mesh=shape and make_mesh(*shape), donate=False)
  expected = take(step, params, state, [batch, other])
  for empty_first in False, True:
    pair = step.begin(params), added(step, params, [batch, other])
    cycle = step.merge(*pair) if empty_first else step.merge(*pair[::-1])
    assert all(x.is_deleted() for x in jax.tree.leaves(pair[1]))
    found = step.finish(params, state, cycle)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("shape", [None, (8,)], ids=["one device", "mesh"])
def test_merge_can_be_looked_at_and_sends_nothing(shape):
  step, params, _, *calls = made(mesh=shape and make_mesh(*shape), donate=False)
  pair = [begun(step, params, batch) for batch in calls]
  shapes = step.merge.eval_shape(*pair)
  compiled = step.merge.lower(*pair).compile()
  assert count_collectives(compiled).operations == ()
  assert "add" in str(step.merge.trace(*pair).jaxpr)
  new = step.merge(*pair)
  assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, shapes)


def test_workers_on_any_number_of_devices_give_the_same_bits():
  """Each on one device, with a key of its own, and merged in a fixed tree."""

  def dropping(params, batch, key):
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return loss_fn(params, batch | {"x": batch["x"] * kept.astype(jnp.float32)})

  tx = relaxed(optax.adam(0.1))
  step = optax_accum.make_train_step(
    dropping, tx, num_microbatches=2, rng_argnums=2, weight_fn=tokens, donate=False
  )
  workers = batches(np.float32, (8,) * 8)
  keys = jax.random.split(jax.random.key(0), 8)

  def trained(count):
    """Parameters, state and metrics after two steps, all as bytes."""
    params = params_of(np.float32)
    state = tx.init(params)
    for _ in range(2):
      places = [jax.devices()[i * count // 8] for i in range(8)]
      cycles = []
      for place, batch, key in zip(places, workers, keys, strict=True):
        own, key = jax.device_put((params, key), place)
        cycles.append(step.add(step.begin(own), own, batch, key))
      while len(cycles) > 1:
        places = places[::2]
        cycles = [
          step.merge(a, jax.device_put(b, place))
          for a, b, place in zip(cycles[::2], cycles[1::2], places, strict=True)
        ]
      params, state = jax.device_put((params, state), places[0])
      params, state, metrics = step.finish(params, state, *cycles)
    leaves = jax.tree.leaves(jax.device_get((params, state, metrics)))
    return [x.tobytes() for x in leaves]

  expected = trained(1)
  for count in 2, 4, 8:
    assert trained(count) == expected


@pytest.mark.parametrize("mesh", [None, more(8)])
def test_without_jit_nothing_that_is_returned_is_deleted(mesh):
  mesh = None if mesh is None else make_mesh(mesh)

  def counting(w, x):
    return jnp.mean((x @ w) ** 2), {"rows": jnp.int32(len(x))}

  tx = optax.sgd(0.1)
  step = optax_accum.make_train_step(
    counting, tx, num_microbatches=1, has_aux=True, aux_reduction="sum", mesh=mesh
  )
  results = []
  for without in (False, True):
    w = jnp.ones(3)
    with jax.disable_jit(without):
      cycle = step.add(step.begin(w), w, np.ones((16, 3), np.float32))
      results.append(step.finish(w, tx.init(w), cycle))
  trees.assert_close(*jax.device_get(results), 1e-6)
  assert int(results[1][2]["aux"]["rows"]) == 16
