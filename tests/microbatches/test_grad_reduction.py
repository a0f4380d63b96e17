"""Gradients with reductions of their own, as the statistics of fp8 layers need."""

import functools

import chex
from flax import linen
from flax.linen import fp8_ops
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.devices import AUTO, EXPLICIT, make_mesh

from optax_accum import (
  accumulate,
  count_collectives,
  make_train_step,
  microbatch_value_and_grad,
)

OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT
FP8 = {"params": "mean", OVERWRITTEN: "max"}


class Fp8Layer(linen.Module):
  """A layer in fp8, with a history that three steps of the whole batch roll through."""

  @linen.compact
  def __call__(self, x):
    op = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=2)
    return linen.Dense(4, dot_general_cls=op)(x)[:, 0]


def overwritten():
  """Replaces parameters by their gradients."""
  return optax.stateless(
    lambda grads, params: jax.tree.map(jnp.subtract, grads, params)
  )


def fp8_optimizer(tx):
  """As the docstring of `make_train_step` has it."""
  labels = lambda tree: {k: k for k in tree}  # noqa: E731
  return optax.partition({"params": tx, OVERWRITTEN: overwritten()}, labels)


def fp8_batches(rows=16):
  rng = np.random.default_rng(0)
  for _ in range(3):
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    x[rng.integers(rows)] *= 100
    yield {"x": x, "y": rng.normal(size=rows).astype(np.float32)}


@functools.cache
def fp8_variables():
  init = jax.jit(Fp8Layer().init)
  return jax.device_get(init(jax.random.key(0), np.ones((1, 8), np.float32)))


@functools.cache
def whole_batch_statistics(of):
  return fp8_statistics(of, oracle.whole_batch_step)


def fp8_statistics(of, make_step):
  """What the layer holds after three steps."""

  def loss_fn(variables, batch):
    return of((Fp8Layer().apply(variables, batch["x"]) - batch["y"]) ** 2)

  variables = fp8_variables()
  tx = fp8_optimizer(optax.sgd(1e-3 if of is jnp.mean else 1e-3 / 16))
  step, state = make_step(loss_fn, tx), tx.init(variables)
  for batch in fp8_batches():
    variables, state, _ = step(variables, state, batch)
  return jax.device_get(
    variables[OVERWRITTEN]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
  )


@pytest.mark.parametrize(("of", "count"), [(jnp.mean, None), (jnp.sum, 2)])
@pytest.mark.usefixtures("usual_promotion")
def test_fp8_scales_after_three_steps_are_the_whole_batchs(of, count):
  reduction = of.__name__
  mesh = None if count is None else make_mesh(count)

  def in_parts(grad_reduction):
    return lambda loss_fn, tx: make_train_step(
      loss_fn,
      tx,
      num_microbatches=4,
      mesh=mesh,
      reduction=reduction,
      grad_reduction=grad_reduction,
    )

  expected = {**whole_batch_statistics(of)}
  actual = fp8_statistics(
    of, in_parts({"params": reduction, OVERWRITTEN: "max"})
  )
  # The mean over a microbatch's rows has cotangents that are as many times larger.
  larger = 4 * (count or 1) if of is jnp.mean else 1
  for name in ("output_grad_scale", "output_grad_amax_history"):
    expected[name] = larger * expected[name]
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)
  assert min(np.ptp(x) for name, x in actual.items() if "history" in name) > 0
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(
      fp8_statistics(of, in_parts(None)), expected, rtol=0.1
    )


@jax.custom_vjp
def keeping(x, statistics, values):
  """`x`; the "gradients" of the `statistics` are the `values`."""
  return x


keeping.defvjp(
  lambda x, statistics, values: (x, values), lambda values, g: (g, values, None)
)

WORDS = ("mean", "sum", "max", "min", "last")
EACH = {"w": "mean", "kept": {word: word for word in WORDS}}


def init_params():
  return {
    "w": np.arange(1.0, 9.0),
    "kept": {word: np.ones(8) for word in WORDS},
  }


def make_batch(rows=48):
  rng = np.random.default_rng(1)
  return {
    "x": rng.normal(size=(rows, 8)),
    "weight": rng.integers(1, 4, rows).astype(float),
  }


def tokens(batch):
  return jnp.sum(batch["weight"])


def largest(x):
  return jnp.max(jnp.abs(x), axis=0)


def loss_fn(params, batch):
  values = {word: largest(batch["x"]) for word in WORDS}
  errors = keeping((batch["x"] @ params["w"]) ** 2, params["kept"], values)
  return jnp.sum(batch["weight"] * errors) / jnp.sum(batch["weight"])


def microbatches(batch, count, size):
  """The microbatches of each of `count` devices, in order."""
  found = []
  for part in np.split(np.arange(len(batch["x"])), count):
    full = len(part) // size
    cut = [part[: full * size][i::full] for i in range(full)]
    cut += [part[full * size :]] if len(part) % size else []
    found += [trees.index(batch, rows) for rows in cut]
  return found


whole_gradient = jax.jit(jax.grad(loss_fn))


def expected_gradients(batch, parts):
  """What the words say of every microbatch's values, and the whole batch's gradient of "w"."""
  values = np.stack([np.abs(part["x"]).max(0) for part in parts])
  kept = {
    "mean": np.average(
      values, axis=0, weights=[part["weight"].sum() for part in parts]
    ),
    "sum": values.sum(0),
    "max": values.max(0),
    "min": values.min(0),
    "last": values[-1],
  }
  return {
    "w": np.asarray(whole_gradient(init_params(), batch)["w"]),
    "kept": kept,
  }


def gradients(step):
  """The gradients that a step takes, as the change of the parameters by them."""

  def run(params, batch):
    new, _, metrics = step(params, optax.sgd(1.0).init(params), batch)
    before, after = jax.device_get((params, new))
    return jax.tree.map(np.subtract, before, after), metrics, new

  return run


# of 5 rows, the last microbatch is smaller
@pytest.mark.parametrize("size", [4, 5])
def test_each_word_reduces_what_it_names(size):
  with jax.enable_x64(True):
    batch = make_batch()
    cycle = microbatch_value_and_grad(
      loss_fn, microbatch_size=size, weight_fn=tokens, grad_reduction=EACH
    )
    _, grads = jax.jit(cycle)(init_params(), batch)
    trees.assert_close(
      grads, expected_gradients(batch, microbatches(batch, 1, size)), 1e-12
    )


kinds = pytest.mark.parametrize(
  "kind", [AUTO, EXPLICIT], ids=["auto", "explicit"]
)
SOME = {
  "w": P("data"),
  "kept": {word: P("data") if word == "max" else P() for word in WORDS},
}


@pytest.mark.parametrize(
  ("kind", "count", "specs", "reduce_gradients"),
  [
    (AUTO, 2, P(), "per_cycle"),
    (EXPLICIT, 4, SOME, "per_cycle"),
    (AUTO, 4, SOME, "per_microbatch"),
    (EXPLICIT, 8, P("data"), "per_microbatch"),
  ],
)
def test_over_a_mesh_each_word_reduces_what_it_names(
  kind, count, specs, reduce_gradients
):
  with jax.enable_x64(True):
    mesh, batch = make_mesh(count, kind=kind), make_batch()
    step = make_train_step(
      loss_fn,
      optax.sgd(1.0),
      microbatch_size=4 * count,
      weight_fn=tokens,
      grad_reduction=EACH,
      mesh=mesh,
      reduce_gradients=reduce_gradients,
      donate=False,
    )
    params = devices.put(init_params(), mesh, specs)
    grads, metrics, new = gradients(step)(params, batch)
    expected = expected_gradients(batch, microbatches(batch, count, 4))
    trees.assert_close(grads, expected, 1e-12)
    assert all(
      x.sharding.is_equivalent_to(p.sharding, p.ndim)
      for x, p in zip(
        jax.tree.leaves(new), jax.tree.leaves(params), strict=True
      )
    )
    norm = np.linalg.norm(
      np.concatenate([expected["w"], expected["kept"]["mean"]])
    )
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)


@pytest.mark.parametrize(
  ("kind", "spec", "reduce_gradients"),
  [
    (EXPLICIT, P("fsdp"), "per_cycle"),
    (AUTO, P(("data", "fsdp")), "per_microbatch"),
  ],
  ids=str,
)
def test_over_several_data_axes_each_word_reduces_what_it_names(
  kind, spec, reduce_gradients
):
  with jax.enable_x64(True):
    mesh, batch = (
      make_mesh(4, 2, axes=("data", "fsdp"), kind=kind),
      make_batch(),
    )
    step = make_train_step(
      loss_fn,
      optax.sgd(1.0),
      num_microbatches=3,
      weight_fn=tokens,
      grad_reduction=EACH,
      mesh=mesh,
      data_axis=("data", "fsdp"),
      reduce_gradients=reduce_gradients,
      donate=False,
    )
    grads, *_ = gradients(step)(devices.put(init_params(), mesh, spec), batch)
    expected = expected_gradients(batch, microbatches(batch, 8, 2))
    trees.assert_close(grads, expected, 1e-12)


@kinds
def test_beside_an_axis_of_tensor_parallelism_shards_are_reduced_alike(kind):
  with jax.enable_x64(True):
    mesh, batch = make_mesh(4, 2, kind=kind), make_batch()

    def fun(params, batch):
      if kind == EXPLICIT:  # explicit axes want to be told where a product goes
        params = jax.tree.map(lambda x: jax.reshard(x, P()), params)
      return loss_fn(params, batch)

    step = make_train_step(
      fun,
      optax.sgd(1.0),
      num_microbatches=3,
      weight_fn=tokens,
      grad_reduction=EACH,
      mesh=mesh,
      donate=False,
    )
    specs = {"w": P("model"), "kept": P("data")}
    grads, *_ = gradients(step)(devices.put(init_params(), mesh, specs), batch)
    expected = expected_gradients(batch, microbatches(batch, 4, 4))
    trees.assert_close(grads, expected, 1e-12)


@pytest.mark.parametrize("place", ["shard_map", "unchecked", "pmap"])
def test_over_an_axis_of_the_users_each_word_reduces_what_it_names(place):
  with jax.enable_x64(True):
    params, batch = init_params(), make_batch()
    cycle = microbatch_value_and_grad(
      loss_fn,
      microbatch_size=5,
      weight_fn=tokens,
      grad_reduction=EACH,
      axis_name="data",
    )
    if place == "pmap":
      mapped = jax.pmap(
        cycle, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:4]
      )
      _, grads = mapped(params, trees.blocks(batch, 4))
      grads = trees.index(jax.device_get(grads), 0)
    else:
      mapped = jax.shard_map(
        cycle,
        mesh=make_mesh(4),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=place == "shard_map",
      )
      _, grads = jax.jit(mapped)(params, batch)
    expected = expected_gradients(batch, microbatches(batch, 4, 5))
    trees.assert_close(jax.device_get(grads), expected, 1e-12)


@pytest.mark.parametrize("mesh_size", [None, 4])
def test_a_sum_of_losses_may_have_statistics_that_are_means(mesh_size):
  def total(params, batch):
    return loss_fn(params, batch) * tokens(batch)

  mesh = None if mesh_size is None else make_mesh(mesh_size)
  with jax.enable_x64(True):
    batch = make_batch()
    step = make_train_step(
      total,
      optax.sgd(1.0),
      num_microbatches=3,
      reduction="sum",
      weight_fn=tokens,
      grad_reduction={**EACH, "w": "sum"},
      mesh=mesh,
      donate=False,
    )
    grads, metrics, _ = gradients(step)(init_params(), batch)
    count = mesh_size or 1
    expected = expected_gradients(
      batch, microbatches(batch, count, 16 // count)
    )
    expected["w"] = expected["w"] * batch["weight"].sum()
    trees.assert_close(grads, expected, 1e-12)
    norm = np.linalg.norm(
      np.concatenate([expected["w"], expected["kept"]["sum"]])
    )
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)


@pytest.mark.parametrize("mesh_size", [None, 2])
def test_microbatches_that_do_not_count_leave_no_statistics(mesh_size):
  count, batch = mesh_size or 1, make_batch(16)
  size = 4 // count
  broken, *_, padding = [
    part["x"] for part in microbatches({"x": np.arange(16)}, count, size)
  ]
  batch["x"][broken[0]] = np.nan
  batch["x"][padding], batch["weight"][padding] = 1e6, 0
  with jax.enable_x64(True):
    step = make_train_step(
      loss_fn,
      optax.sgd(1.0),
      num_microbatches=4,
      weight_fn=tokens,
      skip_nonfinite=True,
      grad_reduction=EACH,
      mesh=mesh_size and make_mesh(mesh_size),
      donate=False,
    )
    grads, metrics, _ = gradients(step)(init_params(), batch)
    parts = microbatches(batch, count, size)[1:-1]
    kept = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    trees.assert_close(grads, expected_gradients(kept, parts), 1e-12)
    assert int(metrics["skipped_microbatches"]) == 1


def test_where_nothing_counts_an_extreme_is_that_of_nothing_and_a_step_moves_nothing():
  params, batch = jax.tree.map(np.float32, (init_params(), make_batch(8)))
  batch["weight"] *= 0
  options = {"num_microbatches": 2, "weight_fn": tokens, "grad_reduction": EACH}
  _, grads = jax.jit(microbatch_value_and_grad(loss_fn, **options))(
    params, batch
  )
  expected = {"mean": 0, "sum": 0, "max": -np.inf, "min": np.inf, "last": 0}
  assert {word: x[0] for word, x in grads["kept"].items()} == expected
  step = make_train_step(loss_fn, optax.sgd(1.0), donate=False, **options)
  new, _, metrics = step(
    params, (optax.EmptyState(), optax.EmptyState()), batch
  )
  chex.assert_trees_all_equal(jax.device_get(new), params)
  assert (metrics["grad_norm"], metrics["total_weight"]) == (0, 0)


def test_one_microbatch_is_the_program_of_value_and_grad():
  params, batch = init_params(), make_batch()
  plain = jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).as_text()
  cycle = microbatch_value_and_grad(
    loss_fn, num_microbatches=1, grad_reduction=EACH
  )
  assert jax.jit(cycle).lower(params, batch).as_text() == plain


def test_extremes_are_reduced_over_devices_once_after_the_loop():
  mesh = make_mesh(8)
  step = make_train_step(
    loss_fn,
    optax.sgd(1.0),
    num_microbatches=3,
    weight_fn=tokens,
    grad_reduction=EACH,
    mesh=mesh,
  )
  params = devices.abstract(jax.tree.map(np.float32, init_params()), mesh)
  batch = devices.abstract(
    jax.tree.map(np.float32, make_batch()), mesh, P("data")
  )
  compiled = step.lower(params, optax.sgd(1.0).init(params), batch).compile()
  report = count_collectives(compiled)
  assert report.inside == {}
  # "last" is a sum over devices too, of zeros but for one: all sums are one reduction.
  assert report.at_least(8 * 4).outside["all-reduce"].operations == len(
    ["sum", "max", "min"]
  )


@pytest.mark.parametrize("mesh_size", [None, 4])
def test_a_line_search_sees_no_derivative_by_what_is_none(mesh_size):
  def update(updates, state, params, *, value_fn, **extra_args):
    reverse = jax.grad(value_fn)(params)
    tangents = jax.tree.map(jnp.ones_like, params)
    forward = jax.jvp(value_fn, (params,), (tangents,))[1]
    return jax.tree.map(jnp.zeros_like, updates), (reverse, forward)

  with jax.enable_x64(True):
    params, batch = init_params(), make_batch()
    tx = optax.GradientTransformationExtraArgs(
      lambda params: (params, np.zeros(())), update
    )
    step = make_train_step(
      loss_fn,
      tx,
      num_microbatches=3,
      weight_fn=tokens,
      grad_reduction={"w": "mean", "kept": "max"},
      mesh=mesh_size and make_mesh(mesh_size),
      donate=False,
    )
    _, (reverse, forward), _ = step(params, tx.init(params), batch)
    expected = jax.tree.map(np.zeros_like, params)
    expected["w"] = np.asarray(whole_gradient(params, batch)["w"])
    trees.assert_close(jax.device_get(reverse), expected, 1e-12)
    np.testing.assert_allclose(forward, expected["w"].sum(), rtol=1e-12)


@pytest.mark.usefixtures("usual_promotion")
def test_statistics_are_to_be_kept_out_of_accumulate():
  def loss_fn(variables, batch):
    return jnp.mean((Fp8Layer().apply(variables, batch["x"]) - batch["y"]) ** 2)

  batch = next(fp8_batches(8))
  parts = trees.strided(batch, 2)  # as many as the history holds
  variables = fp8_variables()
  gradient = jax.jit(jax.grad(loss_fn))
  masked = fp8_optimizer(accumulate(optax.sgd(1e-3), 2))
  averaged = accumulate(fp8_optimizer(optax.sgd(1e-3)), 2)
  seen = {}
  for name, tx in {"masked": masked, "averaged": averaged}.items():
    held, state, update = (
      variables,
      trees.strong(jax.jit(tx.init)(variables)),
      jax.jit(tx.update),
    )
    for part in parts:
      updates, state = update(gradient(held, part), state, held)
      held = jax.device_get(jax.jit(optax.apply_updates)(held, updates))
    kept = held[OVERWRITTEN]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    seen[name] = kept["input_amax_history"].max()
    assert np.any(
      held["params"]["Dense_0"]["kernel"]
      != variables["params"]["Dense_0"]["kernel"]
    )
  np.testing.assert_allclose(
    seen["masked"], np.abs(batch["x"]).max(), rtol=1e-6
  )
  assert seen["averaged"] < 0.7 * seen["masked"]


@pytest.mark.parametrize(
  ("grad_reduction", "match"),
  [
    (
      {"w": "mean", "kept": {"max": "stack"}},
      r"grad_reduction\['kept'\]\['max'\]='stack' must be one of 'mean', .*, 'last'\.",
    ),
    ("concat", "grad_reduction='concat' must be one of 'mean', 'sum'"),
    (
      "average",
      "grad_reduction='average' must be one of 'mean', 'sum', 'max', 'min', 'last'",
    ),
    (
      {"w": 3, "kept": "max"},
      r"grad_reduction\['w'\]=3 must be one of 'mean', ",
    ),
    (
      {"kept": "max"},
      r"(?sm)grad_reduction=\{'kept': 'max'\} is not a prefix tree of the gradients: give one name"
      r" for all, or a tree with a name for each gradient.*key path\n    grad_reduction\n.*^    (w|\['w'\])$",
    ),
    (
      {"w": {"a": "mean"}, "kept": "max"},
      r"(?sm)is not .* key path\n    grad_reduction\['w'\]",
    ),
    (
      {**EACH, "b": "mean"},
      r"(?sm)is not a prefix tree of the gradients.*difference .*\n    (b|\['b'\])$",
    ),
  ],
)
def test_words_that_cannot_work_are_refused(grad_reduction, match):
  params, batch = jax.tree.map(np.float32, (init_params(), make_batch()))
  tx = optax.sgd(1.0)

  def run(mesh):
    options = {
      "num_microbatches": 2,
      "grad_reduction": grad_reduction,
      "mesh": mesh,
    }
    return make_train_step(loss_fn, tx, **options)(
      params, tx.init(params), batch
    )

  for mesh in (None, make_mesh(2)):
    with pytest.raises(ValueError, match=match):
      run(mesh)


def test_complex_gradients_have_no_maximum():
  cycle = microbatch_value_and_grad(
    lambda z, x: jnp.mean(jnp.abs(z["z"] * x)),
    num_microbatches=2,
    grad_reduction="max",
  )
  match = r"grads\['z'\] has dtype complex64, which has no 'max': use \"mean\" or \"sum\""
  with pytest.raises(TypeError, match=match):
    cycle({"z": jnp.complex64(1j)}, jnp.ones(4, jnp.complex64))


def test_of_several_arguments_each_has_its_word():
  def fun(w, x, kept):
    return jnp.mean(keeping(x @ w, kept, largest(x)))

  x = make_batch(8)["x"]
  with jax.enable_x64(True):
    cycle = microbatch_value_and_grad(
      fun,
      argnums=(0, 2),
      num_microbatches=2,
      grad_reduction=("mean", "max"),
      batch_argnums=1,
    )
    _, grads = jax.jit(cycle)(np.ones(8), x, np.ones(8))
    trees.assert_close(grads, (x.mean(0), np.abs(x).max(0)), 1e-12)
