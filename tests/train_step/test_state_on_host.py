"""`state_on_host`: the steps of the optimizer to the bit, and its state in the host's memory."""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from support import devices
from support.compiled import compilations
from support.devices import make_mesh
from support.optimizers import relaxed, with_loss_elsewhere
from support.samples import more

from optax_accum import (
  _versions,
  accumulate,
  accumulate_specs,
  make_train_step,
  state_on_host,
)

# "pinned_host", but for CPUs of JAX 0.8, which have one memory.
HOST = jax.device_put(np.zeros(1), jax.memory.Space.Host).sharding.memory_kind
RNG = np.random.default_rng(0)
# XLA of JAX 0.8 for CPU refuses to move what is sharded over explicit axes.
EXPLICIT = devices.EXPLICIT if HOST == "pinned_host" else devices.AUTO
PARAMS = {"b": np.zeros(8, np.float32), "w": RNG.normal(size=(16, 8)).astype(np.float32)}
BATCH = RNG.normal(size=(32, 16)).astype(np.float32)
WHOLE = P()
SHARDS = {"b": P("data"), "w": P("data")}


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2)


def positive(x):
  return jnp.sum(x[:, 0] > 0).astype(x.dtype)


def check_kinds(state):
  """Every array is in the host's memory, and every scalar on the device."""
  for x in jax.tree.leaves(state):
    kind = HOST if x.ndim else "device"
    assert x.sharding.memory_kind == kind, (x.shape, x.sharding)


def assert_same(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def trained(tx, place, calls=3, **options):
  """Parameters and state after some calls, and how often the step was compiled."""
  step = make_train_step(loss_fn, tx, num_microbatches=2, **options)
  params, state = place(tx)
  given = jax.tree.map(lambda x: x.sharding, state)
  with compilations() as compiled:
    for _ in range(calls):
      params, state, _ = step(params, state, BATCH)
  assert jax.tree.all(
    jax.tree.map(lambda x, was: x.sharding.is_equivalent_to(was, x.ndim), state, given)
  ), "sharding of the state"
  steps = [line for line in compiled if "jit(train_step)" in line]
  return params, state, len(steps)


def in_place(tx, mesh=None, of_params=WHOLE, of_state=WHOLE):
  """Parameters, and a state that follows them."""
  if mesh is None:
    params = jax.tree.map(jnp.asarray, PARAMS)
    return params, tx.init(params)
  like = devices.put(PARAMS, mesh, of_state)
  state = tx.init(like)
  scalars = jax.tree.map(lambda x: x if x.ndim else devices.put(x, mesh), state)
  return devices.put(PARAMS, mesh, of_params), scalars


@pytest.mark.parametrize(("kind", "of_params", "of_state", "weight_fn"), [
  more(None, WHOLE, WHOLE, None),
  more(None, WHOLE, WHOLE, positive),
  (devices.AUTO, WHOLE, SHARDS, positive),
  (EXPLICIT, SHARDS, SHARDS, positive),
], ids=["one device", "weighted", "ZeRO-1", "explicit"])  # fmt: skip
def test_steps_are_those_of_the_optimizer(kind, of_params, of_state, weight_fn):
  mesh = None
  if kind is not None:
    mesh = make_mesh(8, kind=kind)
  place = functools.partial(in_place, mesh=mesh, of_params=of_params, of_state=of_state)
  options = {"mesh": mesh, "weight_fn": weight_fn}
  tx = relaxed(optax.adamw(1e-2))
  expected = trained(tx, place, **options)
  actual = trained(state_on_host(tx), place, **options)
  assert_same(actual, expected)
  check_kinds(actual[1])
  assert actual[2] == 1


@pytest.mark.parametrize("sharded", [more(False), True])
def test_in_a_cycle_of_calls(sharded):
  mesh = None
  if sharded:
    mesh = make_mesh(8)

  def cycles(tx):
    step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh)
    params, state = in_place(tx, mesh, SHARDS, SHARDS)
    for _ in range(2):
      cycle = step.begin(params)
      for _ in range(2):
        cycle = step.add(cycle, params, BATCH)
      params, state, _ = step.finish(params, state, cycle)
    return params, state

  tx = relaxed(optax.adam(1e-2))
  actual = cycles(state_on_host(tx))
  assert_same(actual, cycles(tx))
  check_kinds(actual[1])


def test_a_state_that_is_on_no_mesh_goes_where_its_parameters_are():
  mesh = make_mesh(8)

  def place(tx):
    params = devices.put(PARAMS, mesh, SHARDS)
    return params, tx.init(PARAMS)

  tx = state_on_host(relaxed(optax.adam(1e-2)))
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh)
  params, state = place(tx)
  _, state, _ = step(params, state, BATCH)
  check_kinds(state)
  for name, spec in SHARDS.items():
    assert state[0].nu[name].sharding.spec == spec


@pytest.mark.parametrize(("wrapped", "plain"), [
  (lambda tx: optax.chain(optax.clip_by_global_norm(0.5), state_on_host(tx)),
    lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx)),
  more(lambda tx: state_on_host(optax.apply_if_finite(tx, 3)), lambda tx: optax.apply_if_finite(tx, 3)),
  (lambda tx: state_on_host(with_loss_elsewhere(tx)), with_loss_elsewhere),
  (lambda tx: accumulate(state_on_host(tx), 2), lambda tx: accumulate(tx, 2)),
], ids=["in a chain", "around", "value_fn", "in accumulate"])  # fmt: skip
def test_within_and_around_others(wrapped, plain):
  tx = optax.adam(1e-2)
  actual = trained(relaxed(wrapped(tx)), in_place, weight_fn=positive)
  expected = trained(relaxed(plain(tx)), in_place, weight_fn=positive)
  assert_same(actual[:2], expected[:2])
  moments = [x for x in jax.tree.leaves(actual[1]) if x.ndim]
  assert HOST in {x.sharding.memory_kind for x in moments}


def test_in_accumulate_over_devices():
  mesh = make_mesh(8)
  mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

  def calls(inner):
    tx = accumulate(inner, 2, axis_name="data")

    def call(params, state, x):
      return tx.apply(jax.grad(loss_fn)(params, x), state, params)

    specs = accumulate_specs(jax.eval_shape(tx.init, PARAMS), "data")
    init = mapped(tx.init, in_specs=P(), out_specs=specs)
    given = P(), specs, P("data")
    call = mapped(call, in_specs=given, out_specs=(P(), specs))
    params = devices.put(PARAMS, mesh)
    state = jax.jit(init)(params)
    check_kinds_of_inner(inner, state)
    call = jax.jit(call, donate_argnums=(0, 1))
    for _ in range(4):
      params, state = call(params, state, BATCH)
    check_kinds_of_inner(inner, state)
    assert state.gradient_step == 2
    return params, state

  def check_kinds_of_inner(inner, state):
    if inner is not tx:
      check_kinds(state.inner_opt_state)
    sums = jax.tree.leaves(state.acc_grads)
    assert {x.sharding.memory_kind for x in sums} == {"device"}

  tx = relaxed(optax.adam(1e-2))
  assert_same(calls(state_on_host(tx)), calls(tx))


def test_the_state_alone_is_donated_where_shardings_are_given():
  tx = accumulate(state_on_host(relaxed(optax.adam(1e-2))), 2)
  grads = jax.tree.map(jnp.asarray, PARAMS)
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = tx.init(params)
  given = jax.tree.map(lambda x: x.sharding, (grads, state, params))
  _, of_state, of_params = given
  options = {"in_shardings": given, "out_shardings": (of_params, of_state)}
  if HOST != "pinned_host":
    options = {}  # XLA of JAX 0.8 for CPU cannot compile these
  apply = jax.jit(tx.apply, donate_argnums=1, **options)
  for _ in range(2):
    params, state = apply(grads, state, params)
  check_kinds(state.inner_opt_state)


def test_a_checkpoint_is_restored_to_the_host(tmp_path):
  mesh = make_mesh(8)
  tx = state_on_host(relaxed(optax.adam(1e-2)))
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False)
  params, state = in_place(tx, mesh, SHARDS, SHARDS)
  held = step(params, state, BATCH)[:2]
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "saved", held)
  like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(tmp_path / "saved", like)
  check_kinds(restored[1])
  assert_same(step(*restored, BATCH)[:2], step(*held, BATCH)[:2])


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_what_the_type_of_an_array_hides_is_refused(donate):
  """As Orbax restores it on one device: donated, it would end the process."""
  tx = state_on_host(relaxed(optax.trace(0.9)))
  step = make_train_step(loss_fn, tx, num_microbatches=2, donate=donate)
  params = jax.tree.map(jnp.asarray, PARAMS)
  like = tx.init(params)

  def hidden(x):
    value = np.asarray(x)
    return jax.make_array_from_callback(x.shape, x.sharding, value.__getitem__)

  if HOST == "pinned_host":
    restored = jax.tree.map(hidden, like)
    with pytest.raises(RuntimeError, match=r"type, float32.*, does not say so\. Orbax"):
      step(params, restored, BATCH)
  shapes = jax.eval_shape(tx.init, params)
  restored = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  placed = jax.device_put(restored, jax.tree.map(lambda x: x.sharding, like))
  check_kinds(step(params, placed, BATCH)[1])


def test_a_state_of_numpy_is_put_back_on_the_host():
  tx = state_on_host(relaxed(optax.adam(1e-2)))
  params = devices.put(PARAMS, make_mesh(8), SHARDS)
  state = tx.init(params)
  shardings = jax.tree.map(lambda x: x.sharding if x.ndim else None, state)
  state = jax.device_put(jax.device_get(state), shardings)
  # Without mesh= a scalar that was put on one device would not go with the others.
  step = make_train_step(loss_fn, tx, num_microbatches=2)
  _, state, _ = step(params, state, BATCH)
  check_kinds(state)


@pytest.mark.parametrize("mesh", [None, 8])
def test_a_state_on_the_device_stays_there_with_a_warning(mesh):
  plain = relaxed(optax.adam(1e-2))
  mesh = None if mesh is None else make_mesh(mesh)
  place = functools.partial(in_place, plain, mesh)
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    _, state, _ = trained(state_on_host(plain), lambda _: place(), mesh=mesh, weight_fn=positive)
  told = [x for x in told if "so state_on_host saves nothing" in str(x.message)]
  # One for the program, however often it runs; none where the types do not tell.
  assert len(told) == _versions.TYPES_SAY_MEMORY
  assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device"}
  # Without arrays there is nothing to move.
  trained(state_on_host(relaxed(optax.sgd(1e-2))), in_place)


def test_arrays_of_keys_stay_on_the_device():
  def split(updates, state, params=None):
    return updates, jax.random.split(state[0])

  keys = jax.random.split(jax.random.key(0))
  tx = optax.GradientTransformation(lambda _: keys, split)
  trained(state_on_host(tx), in_place)


def test_what_is_refused(monkeypatch):
  with pytest.raises(TypeError, match="call it first, as in adam"):
    state_on_host(optax.adam)
  grows = optax.GradientTransformation(
    lambda params: {}, lambda updates, state, params: (updates, updates)
  )
  tx = state_on_host(grows)
  params = jax.tree.map(jnp.asarray, PARAMS)
  with pytest.raises(ValueError, match=r"state\['b'\] is not expected: state_on"):
    tx.update(params, tx.init(params), params)
  narrow = optax.tree_utils.tree_cast(params, jnp.bfloat16)
  tx = accumulate(state_on_host(relaxed(optax.trace(0.9))), 2)
  with pytest.raises(
    ValueError, match=r"state.trace\['b'\] has type float32\[8\], not bfloat16\[8\]: "
  ):
    jax.jit(tx.apply)(params, tx.init(narrow), narrow)

  class Memoryless:
    def addressable_memories(self):
      return []

  monkeypatch.setattr(jax, "devices", lambda: [Memoryless()])
  with pytest.raises(NotImplementedError, match=r"devices have \[\]: leave"):
    tx.init(params)
