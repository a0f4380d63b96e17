"""The noise scale: estimates that are right on average, at no cost to the step."""

import functools

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import devices, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed
from support.samples import more

from optax_accum import count_collectives, gradient_noise_scale, make_train_step, NoiseScaleTerms

DIM, ROWS, STEPS = 8, 32, 3000
SPREAD = np.linspace(0.5, 1.5, DIM)  # of the rows, in each dimension
TRACE, SQUARED_NORM = float(np.sum(SPREAD**2)), 0.7


def quadratic(params, batch):
  """The gradient of a row is ``params - x``; the rows are weighed by a mask."""
  mask = batch["mask"].astype(params.dtype)
  losses = 0.5 * jnp.sum((params[None] - batch["x"]) ** 2, 1)
  return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)


def masked(batch):
  return jnp.sum(batch["mask"])


def true_params():
  # the rows have mean 0
  return jnp.full(DIM, np.sqrt(SQUARED_NORM / DIM), jnp.float32)


def average_terms(step, mask):
  """The terms of many steps on new rows, averaged; the parameters stay."""

  def one(_, key):
    x = jax.random.normal(key, (ROWS, DIM)) * jnp.asarray(SPREAD, jnp.float32)[None]
    return _, step(true_params(), (), {"x": x, "mask": mask})[-1]["noise_scale"]

  keys = jax.random.split(jax.random.key(0), STEPS)
  terms = jax.jit(lambda keys: jax.lax.scan(one, 0, keys)[1])(keys)
  return [float(np.mean(np.asarray(x, np.float64))) for x in terms]


def uneven():
  """A few valid rows in the first microbatches (of any number), many in the last."""
  mask = np.random.default_rng(0).random(ROWS) < np.tile(np.linspace(0.1, 1, 16), 2)
  mask[:16] = True  # every microbatch has a row that counts
  return mask


CASES = {
  "weighed 16": ({"num_microbatches": 16}, None, uneven()),
  # Of several each, the terms are compared with those written out below.
  "8 devices, 1 each": ({"num_microbatches": 1}, AUTO, None),
}


@pytest.mark.parametrize("case", ["weighed 16", more("8 devices, 1 each")])
def test_the_estimates_are_right_on_average(case):
  options, kind, mask = CASES[case]
  if mask is not None:
    options = {**options, "weight_fn": masked}
  mesh = None if kind is None else make_mesh(8, kind=kind)
  step = make_train_step(
    quadratic, optax.set_to_zero(), noise_scale=True, donate=False, mesh=mesh, **options
  )
  squared_norm, trace = average_terms(step, np.ones(ROWS, bool) if mask is None else mask)
  np.testing.assert_allclose([squared_norm, trace], [SQUARED_NORM, TRACE], rtol=0.05)
  np.testing.assert_allclose(trace / squared_norm, TRACE / SQUARED_NORM, rtol=0.05)
  # The norm of the batch's own gradient is far from that of all data.
  rows = ROWS if mask is None else mask.sum()
  assert TRACE / rows > 0.3 * SQUARED_NORM


def make_data(dtype=np.float64):
  rng = np.random.default_rng(1)
  params = {"w": rng.normal(size=(6, 4)), "b": rng.normal(size=4)}
  batch = {"x": rng.normal(size=(32, 6)), "y": rng.normal(size=(32, 4))}
  batch |= {"mask": rng.random(32) < 0.6}
  batch["mask"][:8] = True
  cast = lambda x: np.asarray(x, bool if x.dtype == bool else dtype)  # noqa: E731
  return jax.tree.map(cast, (params, batch))


def loss_fn(params, batch):
  out = jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]
  mask = batch["mask"].astype(out.dtype)
  return jnp.sum(out**2 * mask[:, None]) / jnp.sum(mask)


@jax.jit
def gradient(params, batch):
  return ravel_pytree(jax.grad(loss_fn)(params, batch))[0]


def expected_terms(params, parts):
  """From the microbatches' gradients, written out: an analysis of variance."""
  grads = [np.asarray(gradient(params, part)) for part in parts]
  weights = np.array([part["mask"].sum() for part in parts], np.float64)
  mean = np.average(grads, axis=0, weights=weights)
  spread = sum(w * np.sum((g - mean) ** 2) for w, g in zip(weights, grads, strict=True))
  trace = spread / (len(parts) - 1)
  return np.sum(mean**2) - trace / weights.sum(), trace


def of_devices(batch):
  """The four microbatches of each of four devices."""
  blocks = trees.blocks(batch, 4)
  return [part for i in range(4) for part in trees.strided(trees.index(blocks, i), 4)]


@pytest.mark.parametrize("kind", [None, AUTO], ids=str)
def test_the_terms_of_a_step_are_right_to_rounding(kind):
  with jax.enable_x64(True):
    params, batch = make_data()
    batch["mask"][24:] = True
    mesh, tx = None if kind is None else make_mesh(4, kind=kind), optax.sgd(0.1)
    step = make_train_step(
      loss_fn, tx, num_microbatches=4, weight_fn=masked, noise_scale=True, mesh=mesh
    )
    _, _, metrics = step(params, tx.init(params), batch)
    terms = metrics["noise_scale"]
    parts = trees.strided(batch, 4) if kind is None else of_devices(batch)
    parts = [x for x in parts if x["mask"].any()]
    np.testing.assert_allclose(terms, expected_terms(params, parts), rtol=1e-10)
    assert terms.trace.dtype == terms.squared_norm.dtype == np.float64
    # As if all microbatches counted the same:
    even = [x | {"mask": np.ones_like(x["mask"])} for x in parts]
    assert abs(terms.trace / expected_terms(params, even)[1] - 1) > 0.01


def test_what_does_not_count_changes_no_term():
  params, batch = make_data(np.float32)
  batch["mask"][:] = True
  tx = optax.sgd(0.1)
  options = {"num_microbatches": 4, "noise_scale": True, "donate": False}
  step = make_train_step(loss_fn, tx, skip_nonfinite=True, **options)
  broken = batch | {"x": batch["x"].copy()}
  broken["x"][1::4] = np.nan
  _, _, metrics = step(params, tx.init(params), broken)
  parts = trees.strided(batch, 4)
  expected = expected_terms(params, [parts[0], parts[2], parts[3]])
  np.testing.assert_allclose(metrics["noise_scale"], expected, rtol=1e-4)
  assert metrics["noise_scale"].trace.dtype == np.float32

  step = make_train_step(loss_fn, tx, weight_fn=masked, **options)
  for counted in (0, 1):  # of one alone nothing can be told
    few = batch | {"mask": np.zeros(32, bool)}
    few["mask"][: 4 * counted : 4] = True
    _, _, metrics = step(params, tx.init(params), few)
    assert [float(x) for x in metrics["noise_scale"]] == [0, 0]
    assert metrics["total_weight"] == counted


OPTIONS = {
  "weights, ragged": {"num_microbatches": None, "microbatch_size": 48, "weight_fn": masked},
  "explicit, weights": {"kind": EXPLICIT, "weight_fn": masked},
  "sharded": {"kind": AUTO, "spec": "data"},
}


def big_loss(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
  return loss_fn(params["head"], batch | {"x": hidden})


@functools.cache
def big_data():
  params, batch = make_data(np.float32)
  rng = np.random.default_rng(2)
  head = {"w": rng.normal(size=(64, 4)), "b": params["b"]}
  big = {"w": rng.normal(size=(64, 64)), "b": rng.normal(size=64), "head": head}
  batch = {
    "x": rng.normal(size=(64, 64)).astype(np.float32),
    "y": np.tile(batch["y"], (2, 1)),
    "mask": np.tile(batch["mask"], 2),
  }
  return jax.tree.map(lambda x: np.asarray(x, np.float32), big), batch


@pytest.mark.parametrize("name", [more(x) if x == "sharded" else x for x in OPTIONS])
def test_the_parameters_stay_the_same_to_the_bit_without_a_further_collective(name):
  options = {"num_microbatches": 2, **OPTIONS[name]}
  kind, spec = options.pop("kind", None), options.pop("spec", None)
  params, batch = big_data()
  tx = relaxed(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))
  if kind is not None:
    options["mesh"] = mesh = make_mesh(4, kind=kind)
    params = devices.put(params, mesh, jax.P(spec))

  def run(noise_scale):
    step = make_train_step(big_loss, tx, noise_scale=noise_scale, donate=False, **options)
    held = params, trees.strong(tx.init(params))
    report = None if kind is None else count_collectives(step.lower(*held, batch).compile())
    for _ in range(3):
      *held, metrics = step(*held, batch)
    return jax.device_get(held), metrics, report

  held, metrics, report = run(True)
  plain, plain_metrics, plain_report = run(False)
  jax.tree.map(np.testing.assert_array_equal, held, plain)
  assert metrics["noise_scale"].trace > 0
  assert "noise_scale" not in plain_metrics

  def count(totals):
    return {kind: total.operations for kind, total in totals.items()}

  if kind is not None:
    assert count(report.inside) == count(plain_report.inside)
    assert count(report.outside) == count(plain_report.outside)
    assert report.outside["all-reduce"].operations >= 1


def test_the_terms_are_smoothed_apart_and_then_divided():
  estimate = gradient_noise_scale(decay=0.5)
  state, update = estimate.init(), jax.jit(estimate.update)

  def after(state, *terms):
    return update(NoiseScaleTerms(*map(jnp.float32, terms)), state)

  assert after(state, 0, 0)[0] == np.inf
  scale, state = after(state, 2, 8)
  assert scale == 4
  scale, state = after(state, 1, 0)
  # the mean of the ratios were 2
  assert scale == 0.5 * 8 / (0.5 * 2 + 1)
  # What tells nothing changes nothing.
  for nothing in ((0, 0), (np.nan, 1), (1, np.inf)):
    scale, state = after(state, *nothing)
    assert (scale, state.ema, state.count) == (2, (1.0, 2.0), 2)
  assert after(state, -9, 1)[0] == np.inf
  assert after(state, 9, -9)[0] == 0  # rounding


@pytest.mark.parametrize(("option", "message"), [
  ({"reduction": "sum"}, "noise_scale=True compares .*with reduction='sum'"),
  ({"in_place": True}, "noise_scale=True .*in_place=False"),
])  # fmt: skip
def test_options_that_it_does_not_go_with_are_refused(option, message):
  options = {"num_microbatches": 2, "noise_scale": True, **option}
  with pytest.raises(ValueError, match=message):
    make_train_step(loss_fn, optax.sgd(0.1), **options)


def test_terms_are_added_up_in_full():
  """Whatever the accumulators of gradients hold: counts stop at 256 in bfloat16."""
  x = np.random.default_rng(0).normal(0.3, 1, (1024, 64)).astype(np.float32)
  step = make_train_step(
    lambda params, x: 0.5 * jnp.mean(jnp.sum((params[None] - x) ** 2, 1)),
    optax.sgd(0.1),
    num_microbatches=1024,
    noise_scale=True,
    accumulator_dtype=jnp.bfloat16,
  )
  terms = step(jnp.zeros(64), optax.sgd(0.1).init(jnp.zeros(64)), x)[-1]["noise_scale"]
  np.testing.assert_allclose(terms.trace, np.var(x, 0, ddof=1).sum(), rtol=0.02)
