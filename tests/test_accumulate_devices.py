"""`accumulate` with `axis_name`: one reduction per cycle, and devices that always agree."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from optax_accum import accumulate

DEVICES = 8
NAN = float("nan")


def replicate(tree):
  return jax.tree.map(lambda x: jnp.stack([x] * DEVICES), tree)


def step_of(tx, form):
  def step(params, state, grads, weight=1.0, flush=False):
    if form == "apply":
      return tx.apply(grads, state, params, weight=weight, flush=flush)
    updates, state = tx.update(grads, state, params, weight=weight, flush=flush)
    return optax.apply_updates(params, updates), state

  return step


forms = pytest.mark.parametrize("form", ["update", "apply"])


def run(tx, form, calls):
  """Parameters and states after each call; gradients, weights, flushes are per device."""
  params = {"w": jnp.zeros(3)}
  step = jax.pmap(step_of(tx, form), axis_name="batch")
  params, state, trace = replicate(params), replicate(tx.init(params)), []
  for grad, weight, flush in calls:
    grad = np.broadcast_to(np.reshape(grad, (-1, 1)), (DEVICES, 3))
    grads = {"w": jnp.asarray(grad, jnp.float32)}
    weight = jnp.asarray(np.broadcast_to(weight, DEVICES), jnp.float32)
    flush = jnp.asarray(np.broadcast_to(flush, DEVICES))
    params, state = step(params, state, grads, weight, flush)
    trace.append((np.asarray(params["w"]), jax.device_get(state)))
  return trace


def same_on_all(x):
  assert np.all(x == x.flat[0])
  return x.flat[0]


@forms
@pytest.mark.parametrize("every_k", [1, 2])
def test_the_step_is_the_global_weighted_mean(form, every_k):
  rng = np.random.default_rng(0)
  grads = rng.normal(size=(every_k, DEVICES))
  weights = rng.integers(0, 5, (every_k, DEVICES))
  grads[weights == 0] = NAN
  weights[0, 3] = weights[-1, 3] = 0  # this device has nothing to say
  trace = run(accumulate(optax.sgd(1.0), every_k, axis_name="batch"), form,
              [(g, w, False) for g, w in zip(grads, weights, strict=True)])  # fmt: skip
  exact = np.nansum(grads * weights) / weights.sum()
  np.testing.assert_allclose(trace[-1][0], -exact, rtol=1e-5)
  with np.errstate(invalid="ignore"):
    means = [np.nansum(g * w) / w.sum() for g, w in zip(grads.T, weights.T, strict=True) if w.sum()]
  assert abs(np.mean(means) - exact) > 0.01


@forms
def test_the_sum_is_over_all_devices(form):
  tx = accumulate(optax.sgd(1.0), 2, reduction="sum", axis_name="batch")
  trace = run(tx, form, [(np.arange(8.0), 1.0, False)] * 2)
  np.testing.assert_allclose(trace[-1][0], -56.0)


@forms
def test_a_nan_on_one_device_is_skipped_by_all(form):
  tx = accumulate(optax.sgd(1.0), 2, skip_fn=optax.skip_not_finite, axis_name="batch")
  bad = np.ones(DEVICES)
  bad[5] = NAN
  trace = run(tx, form, [(1.0, 1.0, False), (bad, 1.0, False), (3.0, 1.0, False)])
  assert [int(same_on_all(s.mini_step)) for _, s in trace] == [1, 1, 0]
  assert [bool(same_on_all(s.has_updated)) for _, s in trace] == [False, False, True]
  assert same_on_all(trace[-1][0]) == -2


@forms
def test_a_flush_on_one_device_flushes_all(form):
  one = np.arange(DEVICES) == 2
  trace = run(accumulate(optax.sgd(1.0), 5, axis_name="batch"), form,
              [(2.0, 1.0, False), (4.0, 1.0, one)])  # fmt: skip
  assert same_on_all(trace[-1][0]) == -3
  assert same_on_all(trace[-1][1].mini_step) == 0


@forms
@pytest.mark.parametrize("every_k", [1, 2])
def test_zero_weight_on_all_devices_is_no_step_but_on_some_it_is(form, every_k):
  tx = accumulate(optax.sgd(1.0), every_k, axis_name="batch")
  some = np.arange(DEVICES) % 2
  trace = run(tx, form, [(NAN, 0.0, False)] * every_k + [(2.0, some, False)] * every_k)
  assert same_on_all(trace[every_k - 1][0]) == 0
  assert same_on_all(trace[every_k - 1][1].gradient_step) == 0
  assert same_on_all(trace[-1][0]) == -2


def computations(text):
  """The lines of each computation of a compiled program."""
  found, name = {}, None
  for line in text.splitlines():
    head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head:
      name = head[1]
    found.setdefault(name, []).append(line)
  return found


@forms
@pytest.mark.parametrize("options", [False, True], ids=["plain", "weights_and_skips"])
def test_one_gradient_all_reduce_in_the_branch_that_emits(form, options):
  skip_fn = optax.skip_not_finite if options else None
  tx = accumulate(optax.sgd(1.0), 4, axis_name="batch", skip_fn=skip_fn)
  params = {"w": jnp.zeros((64, 64))}
  args = [replicate(x) for x in (params, tx.init(params), params)]
  args += [jnp.ones(DEVICES), jnp.zeros(DEVICES, bool)] if options else []
  text = jax.pmap(step_of(tx, form), axis_name="batch").lower(*args).compile().as_text()
  bodies = re.findall(r"body=%?([\w.\-]+)", text)
  assert len(bodies) == 1
  inside, outside = [], []
  for name, lines in computations(text).items():
    reduces = [line for line in lines if re.search(r" all-reduce(-start)?\(", line)]
    (inside if name in bodies else outside).extend(reduces)
  gradient = r"f32\[(1,)?64,64\]"
  assert sum(bool(re.search(gradient, line)) for line in inside) == 1
  # What the devices agree about on every call is four numbers.
  assert len(outside) == int(options)
  assert all(re.search(r"f32\[4\]", line) for line in outside)


@forms
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("skip_fn", [None, optax.skip_not_finite])
def test_in_shard_map(form, check_vma, skip_fn):
  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  tx = accumulate(optax.sgd(1.0), 2, axis_name="data", skip_fn=skip_fn)
  params = {"w": jnp.zeros(3)}
  whole, local = PartitionSpec(), PartitionSpec("data")
  state = tx.init(params)
  specs = jax.tree.map(lambda _: whole, state)._replace(acc_grads=local, acc_weight=local)
  specs = specs._replace(skip_state=jax.tree.map(lambda _: local, state.skip_state))

  def over_devices(change, state):  # what belongs to one device has an axis of devices outside
    own = (state.acc_grads, state.acc_weight, state.skip_state)
    acc_grads, acc_weight, skip_state = jax.tree.map(change, own)
    return state._replace(acc_grads=acc_grads, acc_weight=acc_weight, skip_state=skip_state)

  def body(params, state, grads):
    state = over_devices(lambda x: x[0], state)
    params, state = step_of(tx, form)(params, state, {"w": grads[0]})
    return params, over_devices(lambda x: x[None], state)

  step = jax.jit(
    jax.shard_map(
      body, mesh=mesh, in_specs=(whole, specs, local), out_specs=(whole, specs), check_vma=check_vma
    )
  )
  state = over_devices(lambda x: jnp.stack([x] * DEVICES), state)
  grads = jax.random.normal(jax.random.key(0), (2, DEVICES, 3))
  for g in grads:
    params, state = step(params, state, g)
  np.testing.assert_allclose(params["w"], -grads.mean((0, 1)), rtol=1e-5, atol=1e-6)
  assert int(state.gradient_step) == 1
