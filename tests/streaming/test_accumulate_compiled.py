"""What the compiled step costs: memory, copies, compilations, and what may transform it."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.compiled import compilations, copies_of
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import FORMS, mini_step
from support.samples import more

from optax_accum import accumulate, accumulate_specs

LEAF = 1 << 20
LARGE = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in "abcd"}
LARGE_BYTES = 4 * LEAF * len(LARGE)

OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9),
  "adamw": optax.adamw(0.1),
  "clip_adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
  "lion": optax.lion(0.1),
  "adafactor": optax.adafactor(0.1),
}


@pytest.fixture(autouse=True)
def _optax_promotes():
  with jax.numpy_dtype_promotion("standard"):
    yield


forms = pytest.mark.parametrize("form", FORMS)


def scanned(tx):
  def cycle(params, state, grads):
    def body(carry, scale):
      return mini_step(tx)(*carry, jax.tree.map(lambda g: g * scale, grads)), None

    return jax.lax.scan(body, (params, state), jnp.arange(8.0))[0]

  return cycle


def compiled(step, tx, params=LARGE, **kwargs):
  state = jax.eval_shape(tx.init, params)
  return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params, **kwargs).compile()


@functools.cache
def alone(name):
  """An optimizer without `accumulate`."""
  tx = optax.with_extra_args_support(OPTIMIZERS[name])
  return compiled(mini_step(tx), tx)


def temp(executable):
  """Temporary memory, in sizes of the parameters."""
  return executable.memory_analysis().temp_size_in_bytes / LARGE_BYTES


@pytest.mark.parametrize(("name", "form"), [
  *((name, "update") for name in ("momentum", "lion", "adafactor")),
  *((name, "apply") for name in ("adamw", "clip_adamw")),
  *((name, "scan") for name in ("sgd", "adamw")),
])  # fmt: skip
def test_the_conditional_costs_no_memory_and_no_copies(name, form):
  tx = accumulate(OPTIMIZERS[name], 8)
  ours = compiled(scanned(tx) if form == "scan" else mini_step(tx, form), tx)
  # Lion reads the momentum and the gradient for both of its results, so XLA copies one of
  # two buffers that are overwritten, for a leaf at a time: here it is also the slot.
  # Adafactor divides the gradient twice; XLA on CPU keeps one of the two more here.
  slack = 0.01 if form == "apply" else {"lion": 0.26, "adafactor": 1.01}.get(name, 0.01)
  assert temp(ours) <= temp(alone(name)) + slack
  if name in ("sgd", "momentum", "adamw"):
    assert temp(ours) < 0.005
  if name != "lion":
    assert copies_of(ours.as_text(), LEAF) == 0
  assert " while(" in ours.as_text()


def compiled_over_devices(tx, form, mesh, params, check_vma=True, weighted=False):
  """The accumulation alone, in shard_map: each device's gradients are arguments."""
  specs = accumulate_specs(jax.eval_shape(tx.init, params), "data")
  shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

  def step(params, state, grads, weight, flush):
    grads = jax.tree.map(lambda x: x[0], grads)
    kwargs = {"weight": weight[0], "flush": flush} if weighted else {}
    return mini_step(tx, form)(params, state, grads, **kwargs)

  init = shard_map(tx.init, in_specs=P(), out_specs=specs)
  grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), params)
  held = devices.abstract(params, mesh)
  more = (jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_))
  args = (params, jax.eval_shape(init, held), grads, *more)
  in_specs = (P(), specs, P("data"), P("data"), P())
  step = shard_map(step, in_specs=in_specs, out_specs=(P(), specs))
  args = devices.abstract(args, mesh, in_specs)
  return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


@pytest.mark.parametrize(("platform", "form", "check_vma", "kind", "weighted"), [
  more("tpu", "update", True, AUTO, True),
  more("tpu", "update", False, AUTO, False),
  ("tpu", "apply", True, EXPLICIT, False),
  ("cpu", "apply", True, AUTO, True),
])  # fmt: skip
def test_devices_reduce_in_the_accumulators(platform, kind, weighted, check_vma, form):
  # What is small stays on the chip of a TPU, where it is not counted.
  side = {"cpu": 512, "tpu": 8192}[platform]
  params = {name: jax.ShapeDtypeStruct((side, side), jnp.float32) for name in "ab"}
  tx = accumulate(OPTIMIZERS["adamw"], 8, axis_name="data")
  mesh = make_mesh(8, kind=kind, platform=platform)
  step = compiled_over_devices(tx, form, mesh, params, check_vma, weighted)
  # Updates that are typed as the same on all devices cannot be in an accumulator, which differs.
  # And XLA for CPU does not reduce in place.
  own_buffer = (form == "update" and check_vma) or platform == "cpu"
  in_params = step.memory_analysis().temp_size_in_bytes / (4 * side**2 * len(params))
  assert in_params == pytest.approx(int(own_buffer), abs=0.005)
  if platform == "tpu":
    assert copies_of(step.as_text(), side**2) == 0
  elif form == "apply":  # but in the calls that do not emit
    assert copies_of(step.as_text().split("\nENTRY ")[1], side**2) == 0


@pytest.mark.optax_bug
def test_multisteps_does_cost_memory():
  theirs = optax.MultiSteps(OPTIMIZERS["adamw"], 8)
  assert temp(compiled(mini_step(theirs), theirs)) > 1


def large_operations(executable):
  """The operations on whole parameters in a compiled program, counted by name."""
  return collections.Counter(re.findall(r"= f32\[1024,1024\]\S* ([\w-]+)\(", executable.as_text()))


@pytest.mark.parametrize(
  ("name", "form"), [("sgd", "update"), ("adamw", "apply"), ("clip_adamw", "update")]
)
def test_k_of_one_compiles_to_inner(name, form):
  tx = accumulate(OPTIMIZERS[name], 1)
  ours = compiled(mini_step(tx, form), tx)
  assert large_operations(ours) == large_operations(alone(name))
  assert temp(ours) == pytest.approx(temp(alone(name)), abs=1e-4)
  for word in (" while(", " conditional("):
    assert word not in ours.as_text()


@forms
def test_one_compilation_for_any_weight_flush_and_step_with_donation(form):
  tx = accumulate(optax.adam(0.1), lambda step: 1 + step % 2, skip_fn=optax.skip_not_finite)
  step = jax.jit(mini_step(tx, form), donate_argnums=(0, 1))
  params = {"w": jnp.ones(3)}
  state = jax.jit(tx.init)(params)
  types = jax.tree.map(jax.typeof, tx.init(params))
  calls = [(1, 0, 1), (0.5, 1, 2), (0, 0, 3), (2, 1, np.nan), (1, 0, 4)]
  with compilations() as programs:
    for weight, flush, value in np.asarray(calls, np.float32):
      grads, kwargs = {"w": np.full(3, value)}, {"weight": weight, "flush": flush != 0}
      params, state = step(params, state, grads, **kwargs)
      assert jax.tree.map(jax.typeof, state) == types
  assert len(programs) == 1


@forms
@pytest.mark.parametrize("every_k", [more(1), 2])
def test_a_fresh_state_can_be_donated(every_k, form):
  tx = accumulate(optax.sgd(0.5, momentum=0.9), every_k, skip_fn=optax.skip_not_finite)
  for start in (1.0, 0.0):
    params = {"w": jnp.full(3, start)}
    state = tx.init(params)
    leaves = jax.tree.leaves((params, state))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    step = jax.jit(mini_step(tx, form), donate_argnums=(0, 1), keep_unused=True)
    for i in range(every_k):
      params, state = step(params, state, {"w": jnp.full(3, 2.0 * i + 1)})
      if i == 0:
        assert all(x.is_deleted() for x in leaves)
    np.testing.assert_array_equal(params["w"], start - 0.5 * every_k)
    assert int(state.gradient_step) == 1


@pytest.mark.parametrize(
  ("form", "every_k", "differentiable"),
  [("update", 1, False), ("update", 2, True), ("apply", 2, False)],
)
def test_inner_is_traced_once(form, every_k, differentiable):
  calls, inner = [], optax.with_extra_args_support(OPTIMIZERS["momentum"])

  def update(*args, **extra_args):
    calls.append(None)
    return inner.update(*args, **extra_args)

  counting = optax.GradientTransformationExtraArgs(inner.init, update)
  params = {"w": jnp.ones(3)}
  mesh = make_mesh(8, kind=EXPLICIT)

  def traces(run, **kwargs):
    tx = accumulate(counting, every_k, differentiable=differentiable, **kwargs)
    calls.clear()
    run(lambda p, grads: mini_step(tx, form)(p, tx.init(p), grads)[0])
    return len(calls)

  def over_devices(step):
    def of_own(params, grads):
      return step(params, jax.lax.pcast(grads, "data", to="varying"))

    mapped = jax.shard_map(of_own, mesh=mesh, in_specs=P(), out_specs=P())
    jax.jit(mapped).lower(*devices.put((params, params), mesh))

  assert traces(lambda step: jax.jit(step).lower(params, params)) == 1
  assert traces(lambda step: step(params, params)) == 1
  two = trees.stack([(params, params)] * 2)
  assert traces(lambda step: jax.jit(jax.vmap(step)).lower(*two)) == 1
  assert traces(over_devices, axis_name="data") == 1


@pytest.mark.parametrize(("form", "differentiable"), [more("update", True), ("apply", False)])
def test_a_population_is_its_members(form, differentiable):
  tx = accumulate(optax.adam(0.1), 2, differentiable=differentiable)
  weights = jnp.array([[1.0, 2, 0, 1], [3, 1, 0, 1], [1, 1, 1, 1]])
  flushes = jnp.array([[0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 1]], bool)
  params = jnp.arange(12.0).reshape(4, 3)
  state = jax.vmap(tx.init)(params)
  members = [(p, tx.init(p)) for p in params]
  call = jax.jit(lambda p, s, g, w, f: mini_step(tx, form)(p, s, g, weight=w, flush=f))
  population = jax.vmap(call)
  for w, f in zip(weights, flushes, strict=True):
    grads = jnp.cos(params)
    members = [call(p, s, g, *kw) for (p, s), g, *kw in zip(members, grads, w, f, strict=True)]
    params, state = population(params, state, grads, w, f)
  assert len(set(state.gradient_step.tolist())) > 1
  trees.assert_close((params, state), trees.stack(members), 1e-6)


@functools.partial(jax.jit, static_argnums=(1, 2))
def loss_after_training(learning_rate, differentiable, form):
  tx = accumulate(optax.sgd(learning_rate), 2, differentiable=differentiable)
  params = jnp.ones(2)
  state = tx.init(params)
  for i in range(4):
    grads = jax.grad(lambda p, i=i: jnp.sum((p - i) ** 2))(params)
    params, state = mini_step(tx, form)(params, state, grads)
  return jnp.sum(params**2)


@pytest.mark.parametrize("form", ["apply", more("update")])
def test_forward_mode_by_default_and_reverse_mode_on_request(form):
  with jax.enable_x64(True):
    rate, width = jnp.float64(0.1), 1e-6
    low, high = (loss_after_training(rate + d, False, form) for d in (-width, width))
    expected = (high - low) / (2 * width)
    assert abs(expected) > 1
    for differentiable in (False, True):
      forward = jax.jacfwd(loss_after_training)(rate, differentiable, form)
      np.testing.assert_allclose(forward, expected, rtol=1e-6)
    reverse = jax.grad(loss_after_training)(rate, True, form)
    np.testing.assert_allclose(reverse, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"[Rr]everse-mode"):
      jax.grad(loss_after_training)(rate, False, form)
