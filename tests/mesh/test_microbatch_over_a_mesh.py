"""`microbatch` over a mesh: outputs and derivatives are those of the whole batch."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import compiled, devices, trees
from support.devices import EXPLICIT, make_mesh
from support.samples import more

from optax_accum import count_collectives, make_train_step, microbatch

P = jax.P
BOTH = ("data", "model")
ROWS = 32


def init_params(dtype=np.float64):
  return np.random.default_rng(0).normal(size=(16, 8)).astype(dtype)


def make_batch():
  """Padded rows: the last ones, and so the last devices, hold far fewer valid numbers."""
  rng = np.random.default_rng(1)
  valid = rng.random((ROWS, 8)) < np.linspace(1.0, 0.2, ROWS)[:, None]
  valid[::8, 0] = True
  return {"x": rng.normal(size=(ROWS, 16)), "valid": valid.astype(float)}


def encode(params, x):
  return jnp.tanh(x @ params)


def outputs(params, batch):
  """Outputs for all reductions, by a loop that starts from a constant, as typed maps refuse it."""
  errors = (encode(params, batch["x"]) - 1) ** 2 * batch["valid"]
  rows = jnp.sum(errors, 1)
  total = lax.fori_loop(0, len(rows), lambda i, held: held + rows[i], 0.0)
  ends = {"first": batch["x"][0, 0], "last": batch["x"][-1, 0]}
  return {
    "mean": total / jnp.sum(batch["valid"]),
    "sum": total,
    "max": jnp.max(rows),
    "min": jnp.min(rows),
    "last": ends["last"],
    "stack": ends["first"],
    "concat": rows,
    "merged": ends,
  }


def in_order(a, b):
  return {"first": a["first"], "last": b["last"]}


WORDS = {
  "mean": "mean",
  "sum": "sum",
  "max": "max",
  "min": "min",
  "last": "last",
  "stack": "stack",
  "concat": "concat",
  "merged": in_order,
}
SPLIT = {"batch_argnums": 1, "num_microbatches": 2}


def valid(batch):
  return jnp.sum(batch["valid"])


def expected_outputs(params, batch, count):
  """Of the whole batch, on so many devices; and the mean of the means of microbatches."""
  errors = (np.tanh(batch["x"] @ params) - 1) ** 2 * batch["valid"]
  rows = np.sum(errors, 1)
  counts = np.sum(batch["valid"], 1)
  # Each device has two microbatches of its rows, by turns.
  of_devices = np.split(np.arange(ROWS), count)
  each = [x for own in of_devices for x in (own[::2], own[1::2])]
  ends = batch["x"][:, 0]
  last = ends[each[-1][-1]]
  means = [rows[x].sum() / counts[x].sum() for x in each]
  expected = {
    "mean": rows.sum() / counts.sum(),
    "sum": rows.sum(),
    "max": rows.max(),
    "min": rows.min(),
    "last": last,
    "stack": ends[[x[0] for x in each]],
    "concat": rows,
    "merged": {"first": ends[0], "last": last},
  }
  return expected, np.mean(means)


MESHES = {
  "1": (make_mesh(1), "data"),
  "8": (make_mesh(8), "data"),
  "8, explicit": (make_mesh(8, kind=EXPLICIT), "data"),
  "4 and a further axis": (make_mesh(4, 2), "data"),
  "4 by 2, explicit": (make_mesh(4, 2, kind=EXPLICIT), BOTH),
}


@pytest.mark.parametrize("name", [more(x) if x in ("1", "8") else x for x in MESHES])
def test_outputs_are_those_of_the_whole_batch(name):
  mesh, axes = MESHES[name]
  with jax.enable_x64(True):
    params, batch = init_params(), make_batch()
    over = (axes,) if isinstance(axes, str) else axes
    count = int(np.prod([mesh.shape[axis] for axis in over]))
    run = microbatch(outputs, reduction=WORDS, weight_fn=valid, mesh=mesh, data_axis=axes, **SPLIT)
    expected, mean_of_means = expected_outputs(params, batch, count)
    placed = devices.put(params, mesh, P(axes)), batch
    found = run(*placed)
    trees.assert_close(found, expected, 1e-12)
    assert abs(found["mean"] - mean_of_means) > 1e-3
    wanted = jax.NamedSharding(mesh, P(axes))
    assert found["concat"].sharding.is_equivalent_to(wanted, 1)
    with compiled.compilations() as compilations:
      run(*placed)
    assert not compilations


def contrastive(encoder, params, batch):
  z = encoder(params, batch["x"])
  if EXPLICIT in jax.typeof(z).sharding.mesh.axis_types:
    # JAX multiplies no two arrays whose rows are sharded alike.
    z = jax.reshard(z, P())
  scores = z @ z.T
  return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.diag(scores))


@functools.cache
def expected_gradients():
  """Of the whole batch; and the mean of those of the devices' rows, each by themselves."""
  gradient = jax.grad(functools.partial(contrastive, encode))

  @jax.jit
  def both(params, batch):
    each = jax.vmap(gradient, (None, 0))(params, trees.blocks(batch, 8))
    return gradient(params, batch), jnp.mean(each, 0)

  return jax.device_get(both(init_params(), make_batch()))


FSDP = {
  "whole": (make_mesh(8), P()),
  "FSDP": (make_mesh(8), P("data")),
  "FSDP, explicit": (make_mesh(8, kind=EXPLICIT), P("data")),
  "a further axis": (make_mesh(4, 2), P("data", "model")),
  "a further axis, explicit": (make_mesh(4, 2, kind=EXPLICIT), P("data")),
}


@pytest.mark.parametrize("name", [x if "explicit" in x else more(x) for x in FSDP])
def test_the_gradient_is_that_of_the_whole_batch_and_reduced_once(name):
  mesh, spec = FSDP[name]
  # Of the rows of a device, the last microbatch has fewer.
  encoder = microbatch(encode, reduction="concat", batch_argnums=1, microbatch_size=24, mesh=mesh)
  gradient = jax.grad(functools.partial(contrastive, encoder))
  with jax.enable_x64(True), jax.set_mesh(mesh):
    expected, of_devices = expected_gradients()
    placed = devices.put(init_params(), mesh, spec)
    batch = devices.put(make_batch(), mesh, P("data"))
    program = jax.jit(gradient).lower(placed, batch).compile()
    trees.assert_close(program(placed, batch), expected, 1e-10)
    assert np.abs(of_devices - expected).max() > 1e-3
  report = count_collectives(program)
  assert not report.inside
  sums = [x for x in report.operations if x.kind != "all-gather"]
  shapes = [f"f64[16,{n}]" for n in (8, 4)]
  assert sum(x.shape in shapes for x in sums) == 1


def test_it_works_outside_of_jit_and_in_a_step_without_a_mesh():
  """Which is written as on one device. Over a mesh a loss would have to gather the rows."""
  mesh = make_mesh(8)
  encoder = microbatch(encode, reduction="concat", mesh=mesh, **SPLIT)
  loss_fn = functools.partial(contrastive, encoder)
  tx = optax.sgd(1.0)
  step = make_train_step(loss_fn, tx, num_microbatches=1, donate=False)
  with jax.enable_x64(True):
    params, batch = init_params(), make_batch()
    expected, _ = expected_gradients()
    moved, _, _ = step(params, tx.init(params), batch)
    trees.assert_close(params - np.asarray(moved), expected, 1e-10)

    def squares(params):
      return jnp.sum(encoder(params, batch["x"]) ** 2)

    of_rows = 2 * np.tanh(batch["x"] @ params)
    of_rows *= 1 - np.tanh(batch["x"] @ params) ** 2
    expected = batch["x"].T @ of_rows
    trees.assert_close(jax.grad(squares)(params), expected, 1e-10)


@pytest.mark.parametrize("split", [{"num_microbatches": 2}, more({"microbatch_size": 24})])
def test_keys_are_those_of_a_step(split):
  def draw(params, batch, key):
    noise = jax.random.normal(key, batch["x"].shape[:1])
    return jnp.sum(params * 0), noise

  options = {"mesh": make_mesh(8), "rng_argnums": 2, **split}
  tx = optax.sgd(1.0)
  step = make_train_step(draw, tx, has_aux=True, aux_reduction="concat", donate=False, **options)
  run = microbatch(draw, reduction=("mean", "concat"), batch_argnums=1, **options)
  params = init_params(np.float32)
  batch = {"x": np.ones((ROWS, 1), np.float32)}
  key = jax.random.key(0)
  _, _, metrics = step(params, tx.init(params), batch, key)
  _, noise = run(params, batch, key)
  np.testing.assert_array_equal(noise, metrics["aux"])
  assert len(np.unique(noise)) == ROWS
