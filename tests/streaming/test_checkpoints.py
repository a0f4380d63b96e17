"""Checkpoints in mid-cycle: saved by orbax, they go on to the bit, or are refused by name."""

import collections
import functools
import importlib.util
import pathlib
import re

from flax import nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from support import trees
from support.devices import make_mesh, put
from support.optimizers import mini_step, relaxed
from support.pages import Page
from support.samples import more

from optax_accum import accumulate, accumulate_specs, AccumulateState, has_updated, make_train_step
import optax_accum.flax

ROOT = pathlib.Path(__file__).parents[2]
ONES = jnp.ones(3)
PARAMS = {"b": ONES, "w": jnp.zeros((8, 3))}
K = 3
INNER = optax.chain(optax.clip_by_global_norm(2.0), relaxed(optax.adam(0.1)))
ROWS = np.random.default_rng(0).normal(size=(2 * K, 16, 8)).astype(np.float32)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2)


def abstract(tree):
  return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def saved_and_restored(folder, held, like=None):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "saved", held)
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(folder / "saved", abstract(held) if like is None else like)


def streaming(**options):
  tx = accumulate(INNER, K, **options)

  @jax.jit
  def step(held, x):
    params, state = held
    # Sums of such weights are rounded.
    return tx.apply(jax.grad(loss_fn)(params, x), state, params, weight=x[0, 0] ** 2)

  return (PARAMS, tx.init(PARAMS)), step


def streaming_over_devices():
  mesh, tx = make_mesh(8), accumulate(INNER, K, axis_name="data", skip_fn=optax.skip_not_finite)
  params = put(PARAMS, mesh)
  specs = accumulate_specs(jax.eval_shape(tx.init, params), "data")
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=((P(), specs), P("data")), out_specs=(P(), specs))
  def step(held, x):
    params, state = held
    local = jax.lax.pcast(params, "data", to="varying")
    return tx.apply(jax.grad(loss_fn)(local, x), state, params)

  return (params, jax.jit(init)(params)), step


def whole_cycles(every_k=1):
  """Over a mesh, with parameters that are sharded (FSDP)."""
  tx = accumulate(INNER, every_k) if every_k > 1 else INNER
  mesh = make_mesh(4)
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False)
  params = put(PARAMS, mesh, {"b": P(), "w": P("data")})
  return (params, jax.jit(tx.init)(params)), lambda held, x: step(*held, x)[:2]


def linen_train_state():
  state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=accumulate(INNER, K))
  step = optax_accum.flax.linen_train_step(
    lambda variables, x, rngs: loss_fn(variables["params"], x), num_microbatches=2, donate=False
  )
  return state.replace(step=jnp.zeros((), jnp.int32)), lambda state, x: step(state, x)[0]


LOOPS = {
  "accumulate with skip_fn": functools.partial(streaming, skip_fn=optax.skip_not_finite),
  "accumulate over devices": streaming_over_devices,
  "make_train_step of accumulate": functools.partial(whole_cycles, every_k=K),
  "linen_train_step": linen_train_state,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_restored_goes_on_to_the_bit(loop, tmp_path):
  held, step = LOOPS[loop]()
  for x in ROWS[: K - 1]:
    held = step(held, x)
  restored = saved_and_restored(tmp_path, held)
  shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
  assert shardings(restored) == shardings(held)
  start = held
  for x in ROWS[K - 1 :]:
    held, restored = step(held, x), step(restored, x)
  trees.assert_close(jax.device_get(restored), jax.device_get(held), 0)
  assert trees.largest_difference(jax.tree.leaves(held), jax.tree.leaves(start)) > 0.01


# Gradients 1, 2, 3, ... under SGD: parameters are minus their mean.
def after(tx, calls, params=0.0, state=None):
  params = jnp.float32(params)
  state = tx.init(params) if state is None else state
  for g in calls:
    params, state = jax.jit(tx.apply)(jnp.float32(g), state, params)
  return params, state


SGD = optax.sgd(1.0)


@pytest.mark.parametrize(("before", "calls", "now", "ends_with"), [
  (5, 4, 3, 5),  # 4 of the 5 were made: the next call ends a cycle of 3
  more(5, 4, lambda _: 2, 5),
  (3, 2, 5, 5),
  more(lambda _: 4, 2, 3, 3),
  (4, 2, lambda _: 1, 3),
])  # fmt: skip
def test_restored_under_another_k_nothing_is_lost(before, calls, now, ends_with):
  _, state = after(accumulate(SGD, before), range(1, calls + 1))
  tx = accumulate(SGD, now)
  params, state = after(tx, range(calls + 1, ends_with), state=state)
  assert (params, int(state.mini_step)) == (0, ends_with - 1)
  params, state = after(tx, [ends_with], state=state)
  assert params == -np.mean(range(1, ends_with + 1))
  assert params != -ends_with  # the cycle begun anew
  assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)


def test_between_k_of_1_and_more_a_state_goes_on_as_the_message_says():
  params, one = jnp.float32(0), accumulate(SGD, 1)
  four = accumulate(SGD, 4)
  state = one.init(params)
  message = (
    r"every_k=1 there are no accumulators: .*flush=True, and replace acc_grads by that of a new"
  )
  with pytest.raises(ValueError, match=message):
    four.apply(params, state, params)
  state = after(one, [7])[1]._replace(acc_grads=four.init(params).acc_grads)
  assert after(four, [1, 2, 3, 4], state=state)[0] == -2.5

  _, state = after(four, [1, 2])
  with pytest.raises(ValueError, match=message):
    one.apply(params, state, params)
  params, state = four.apply(params, state, params, weight=0.0, flush=True)
  assert params == -1.5
  state = state._replace(acc_grads=one.init(params).acc_grads)
  assert after(one, [5], state=state)[0] == -5


def test_with_and_without_skip_fn_a_state_goes_on_as_the_message_says(tmp_path):
  plain, skips = accumulate(SGD, 2), accumulate(SGD, 2, skip_fn=optax.skip_not_finite)
  for i, (old, new) in enumerate([(plain, skips), (skips, plain)]):
    folder = tmp_path / str(i)
    _, state = after(old, [1])
    restored = saved_and_restored(folder, state)
    with pytest.raises(ValueError, match=r"made with another skip_fn, .* Go on with state"):
      new.apply(jnp.float32(3), restored, jnp.float32(0))
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match="skip_state"):
      checkpointer.restore(folder / "saved", jax.eval_shape(new.init, jnp.float32(0)))
    restored = restored._replace(skip_state=new.init(jnp.float32(0)).skip_state)
    assert after(new, [3], state=restored)[0] == -2


def test_a_state_of_another_accumulator_dtype_goes_on_in_its_own_if_that_is_wider(tmp_path):
  wide, narrow = accumulate(SGD, 2), accumulate(SGD, 2, accumulator_dtype=jnp.bfloat16)
  fine = 1 + 2.0**-12  # bfloat16 has 8 bits
  _, state = after(wide, [fine])
  params, state_narrow = after(narrow, [1], state=state)
  assert (params, state_narrow.acc_grads.dtype) == (-(1 + fine) / 2, jnp.float32)
  # What our docstring says of orbax:
  cast = saved_and_restored(tmp_path, state, jax.eval_shape(narrow.init, jnp.float32(0)))
  assert (cast.acc_grads, cast.acc_grads.dtype) == (1, jnp.bfloat16)
  assert after(narrow, [1], state=cast)[0] == -1


def code_of_docs():
  """How to save and restore, how to do so in nnx, and how a state comes onto other devices."""
  page = Page("guides/checkpoints.md")
  rows_and_key, _, save, _ = page.blocks("Save and restore")
  [of_nnx] = page.blocks("A model and optimizer of nnx")
  (onto,) = page.blocks("A streaming state on other devices")
  imports = "".join(re.findall(r"^(?:import|from) .+\n", page.opening, re.MULTILINE))
  return [imports + code for code in (rows_and_key + save, of_nnx, onto)]


def test_what_the_docs_save_and_restore_goes_on(resume, tmp_path):
  (params, opt_state), step = streaming()
  params, opt_state = step((params, opt_state), ROWS[0])
  names = {"params": params, "opt_state": opt_state, "tx": accumulate(INNER, K), "number": 1}
  names |= {"folder": tmp_path, "data": ROWS[0]}
  exec(code_of_docs()[0], names)
  trees.assert_close(names["restored"], {"params": params, "opt_state": opt_state}, 0)
  (rows, key), (again, key_again) = names["rows_and_key"](5), names["rows_and_key"](5)
  np.testing.assert_array_equal(rows, again)
  assert key == key_again
  assert not np.array_equal(rows, names["rows_and_key"](6)[0])

  other = jax.eval_shape(lambda: {"params": OTHER, "opt_state": names["tx"].init(OTHER)})
  with ocp.StandardCheckpointer() as checkpointer:
    stored = checkpointer.metadata(tmp_path / "1").item_metadata.tree
  other_params = {"params": OTHER, "opt_state": opt_state}
  at = {"params.b": other_params, "opt_state.inner_opt_state.1.0.mu.b": other}
  for leaf, like in at.items():
    with pytest.raises(
      ValueError, match=rf"^{leaf} has shape .*\(3,\) in the checkpoint.*here \(4,\)\.$"
    ):
      resume.check_shapes(stored, like)


def test_what_the_docs_save_and_restore_of_nnx_goes_on(tmp_path):
  @nnx.jit
  def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model))

  rows = np.tile(ROWS, 8)
  model, tx = nnx.Linear(64, 10, rngs=nnx.Rngs(0)), accumulate(INNER, K)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  names = {"model": model, "optimizer": optimizer, "tx": tx, "folder": tmp_path, "ocp": ocp}
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    step(model, optimizer, rows[0])
    code = code_of_docs()[1]
    assert "states(*new())" in code
    exec(code.replace("*new()", "model, optimizer"), names)
    for x in rows[1:K]:
      step(model, optimizer, x)
      step(names["model"], names["optimizer"], x)
  assert has_updated(optimizer.opt_state)
  np.testing.assert_array_equal(names["model"].kernel[...], model.kernel[...])

  # As outside nnx: the leaves stay what they are, nnx Variables.
  step(model, optimizer, rows[0] * np.nan)
  before = jax.tree.structure(optimizer.opt_state)
  optimizer.opt_state.mini_step[...] = jnp.zeros((), jnp.int32)
  optimizer.opt_state.acc_weight[...] = jnp.zeros(())
  assert jax.tree.structure(optimizer.opt_state) == before
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    for x in rows[:K]:
      step(model, optimizer, x)
  assert np.all(np.isfinite(model.kernel[...]))


# of 8 rows, three times
VALUES = np.arange(24, dtype=np.float32).reshape(3, 8) ** 2 / 100


@functools.cache
def begun_and_stepped(devices, rows_weigh=True, skip_fn=optax.skip_not_finite):
  """A state of `accumulate` with `axis_name`, and a mini step on 8 rows that all devices share."""
  tx = accumulate(SGD, 3, axis_name="data", skip_fn=skip_fn)
  mesh = make_mesh(devices)
  specs = accumulate_specs(jax.eval_shape(tx.init, jnp.float32(0)), "data")
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
  def step(params, state, rows):
    weight = {"weight": float(len(rows))} if rows_weigh else {}
    return tx.apply(jnp.mean(rows), state, params, **weight)

  return jax.jit(init)(jnp.float32(0)), step


@pytest.mark.parametrize(("before", "now", "rows_weigh"), [(8, 2, True), more(1, 8, False), more(1, 8, True)])  # fmt: skip
def test_restored_on_other_devices_as_the_docs_say(before, now, rows_weigh, tmp_path):
  state, step = begun_and_stepped(before, rows_weigh)
  _, state = step(np.float32(0), state, VALUES[0])
  state = saved_and_restored(tmp_path, jax.device_get(state))
  names = {"jax": jax}
  exec(code_of_docs()[2], names)

  def ends(moved):
    params, (like, step) = np.float32(0), begun_and_stepped(now, rows_weigh)
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, like)
    for rows in VALUES[1:]:
      params, moved = jax.device_get(step(params, moved, rows))
    assert moved.has_updated
    return params

  factors = [1, now / before] if rows_weigh else [now / before, 1]
  moved, wrong = (jax.device_get(names["onto"](now, state, factor)) for factor in factors)
  assert ends(moved) == pytest.approx(-VALUES.mean(), rel=1e-5)
  assert abs(ends(wrong) + VALUES.mean()) > 0.01
  if rows_weigh or before > now:  # one device's gradients in the place of all
    lost = moved._replace(acc_grads=np.broadcast_to(state.acc_grads[:1], now))
    assert abs(ends(lost) + VALUES.mean()) > 0.01
  # The present cycle given up: then the accumulators may be any.
  fresh, step = begun_and_stepped(now, rows_weigh)
  other = optax.tree.set(state, mini_step=0, acc_weight=0.0)
  other = other._replace(acc_grads=fresh.acc_grads, skip_state=fresh.skip_state)
  params = np.float32(0)
  for rows in VALUES:
    params, other = jax.device_get(step(params, other, rows))
  assert params == pytest.approx(-VALUES.mean(), rel=1e-5)


def test_a_checkpoint_of_the_first_version_is_restored_as_the_docs_say(tmp_path):
  tx = accumulate(SGD, 2)
  _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
  new = tx.init(jnp.ones(2))
  fields = new._asdict()
  del fields["acc_value"], fields["value_weight"]
  old = collections.namedtuple("AccumulateState", fields)(*state[: len(fields)])
  with pytest.raises(ValueError, match="acc_value"):
    saved_and_restored(tmp_path / "refused", old, new)
  restored = saved_and_restored(tmp_path, old, fields)
  trees.assert_close(AccumulateState(**restored), state, 0)


def test_optax_tree_set_drops_a_cycle():
  tx = optax.chain(accumulate(optax.sgd(1.0, momentum=0.5), 3), optax.scale(1.0))
  held = (PARAMS, tx.init(PARAMS))
  ones = jax.tree.map(jnp.ones_like, PARAMS)

  @jax.jit
  def step(held, g, weight=1.0):
    return mini_step(tx)(*held, g, weight=weight, value=weight)

  held = expected = step(step(step(held, ones), ones), ones)
  bad = jax.tree.map(lambda x: x * jnp.nan, ones)
  params, state = step(step(held, bad, np.float32(2**25)), bad)
  dropped = optax.tree.set(state, mini_step=0, acc_weight=0.0)
  assert jax.tree.structure(dropped) == jax.tree.structure(state)
  held = params, dropped
  for _ in range(3):
    held, expected = step(held, ones), step(expected, ones)
    trees.assert_close(held, expected, 0)
  assert has_updated(held[1])


def test_a_state_of_multisteps_goes_on_at_the_end_of_a_cycle():
  inner, k = relaxed(optax.adam(0.1)), 4
  calls = np.random.default_rng(0).normal(size=(2, k, 3)).astype(np.float32) + 1
  tx, theirs, params = accumulate(inner, k), optax.MultiSteps(inner, k), ONES
  old, update = theirs.init(params), jax.jit(theirs.update)
  with jax.numpy_dtype_promotion("standard"):
    for grads in calls[0]:
      updates, old = update(grads, old, params)
      params = optax.apply_updates(params, updates)
  # What the docstring of accumulate says.
  state = tx.init(params)._replace(
    inner_opt_state=old.inner_opt_state, gradient_step=old.gradient_step
  )
  for grads in calls[1]:
    params, state = jax.jit(tx.apply)(grads, state, params)
  expected, expected_state = ONES, inner.init(ONES)
  for mean in calls.mean(1):
    expected, expected_state = mini_step(inner)(expected, expected_state, mean)
  trees.assert_close((params, state.inner_opt_state), (expected, expected_state), 1e-5)
  assert (int(state.gradient_step), int(state.mini_step)) == (2, 0)


OTHER = {"b": jnp.ones(4), "w": jnp.zeros((8, 4))}
ADAM = relaxed(optax.adam(0.1))
OF_OTHERS = r"the state is not as init makes it for these parameters\. Restore"


BROADCAST = ADAM.init({**PARAMS, "b": jnp.ones(1)})  # JAX would step by it


@pytest.mark.parametrize(("form", "every_k", "inner_state", "message"), [
  ("update", 2, ADAM.init(OTHER), rf"^inner_opt_state\[0\]\.mu\['b'\] has shape \(4,\), not \(3,\): {OF_OTHERS}"),
  ("apply", 1, ADAM.init(OTHER), rf"^inner_opt_state\[0\]\.mu\['b'\] has shape \(4,\), not \(3,\): {OF_OTHERS}"),
  ("apply", 2, ADAM.init({"w": PARAMS["w"]}), rf"\[0\]\.mu\['b'\] is missing: {OF_OTHERS}"),
  ("update", 2, ADAM.init({**PARAMS, "c": 0.0}), rf"\[0\]\.mu\['c'\] is not expected: {OF_OTHERS}"),
  ("apply", 2, SGD.init(PARAMS), rf"\[0\]\.count is missing: {OF_OTHERS}"),
  ("update", 2, BROADCAST, r"After an update \w*opt_state\[0\]\.mu\['b'\] has shape \(3,\)"),
  ("apply", 2, BROADCAST, r"After an update \w*opt_state\[0\]\.mu\['b'\] has shape \(3,\)"),
  ("apply", 2, ADAM.init({**PARAMS, "b": jnp.ones((2, 3))}), r"After an update params\['b'\] has shape \(2, 3\)"),
])  # fmt: skip
def test_the_state_of_another_model_is_refused_by_name(form, every_k, inner_state, message):
  tx = accumulate(ADAM, every_k)
  state = tx.init(PARAMS)._replace(inner_opt_state=inner_state)
  with jax.numpy_rank_promotion("allow"), pytest.raises(ValueError, match=message):
    jax.eval_shape(mini_step(tx, form), PARAMS, state, PARAMS)


def test_a_step_refuses_a_state_that_is_broadcast():
  step = make_train_step(loss_fn, ADAM, num_microbatches=2)
  with (
    jax.numpy_rank_promotion("allow"),
    pytest.raises(ValueError, match=r"After an update opt_state\[0\]\.mu\['b'\]"),
  ):
    step.eval_shape(PARAMS, BROADCAST, ROWS[0])


def test_a_state_may_be_filled_by_the_first_update():
  updates = lambda grads: jax.tree.map(lambda g: -0.1 * g, grads)  # noqa: E731
  filled = lambda g, s, p=None: (updates(g), g if s is None else s)  # noqa: E731
  tx = optax.GradientTransformation(lambda _: None, filled)
  step = make_train_step(loss_fn, tx, num_microbatches=2, donate=False)
  held = (PARAMS, tx.init(PARAMS))
  for x in ROWS[:3]:
    held = step(*held, x)[:2]
  assert [x.shape for x in jax.tree.leaves(held[1])] == [(3,), (8, 3)]


def test_an_error_of_an_optimizer_is_shown():
  def update(grads, state, params=None):
    raise KeyError("mine")

  tx = accumulate(optax.GradientTransformation(ADAM.init, update), 1)
  state = tx.init(PARAMS)
  with pytest.raises(KeyError, match="mine"):
    tx.update(PARAMS, state, PARAMS)
  state = state._replace(inner_opt_state=ADAM.init(OTHER))
  with pytest.raises(ValueError, match=OF_OTHERS) as error:
    tx.update(PARAMS, state, PARAMS)
  assert isinstance(error.value.__cause__, KeyError)


@pytest.fixture
def resume(monkeypatch):
  spec = importlib.util.spec_from_file_location("resume", ROOT / "examples/resume.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  # conftest's devices
  monkeypatch.setattr(jax.config, "update", lambda name, value: None)
  return module
