"""How often a loss is traced: it takes seconds for a large model in a Python loop over layers."""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed

import optax_accum
from optax_accum import make_train_step, microbatch, microbatch_value_and_grad

ROWS = 16
PACKAGE = pathlib.Path(optax_accum.__file__).parent


def rows_of(batch):
  return jnp.sum(batch["mask"])


class Counted:
  """A loss that counts its traces, by the rows that it saw."""

  def __init__(self):
    self.rows = []

  def __call__(self, params, batch):
    self.rows.append(len(batch["x"]))
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def arguments():
  rng = np.random.default_rng(0)
  batch = {"x": rng.normal(size=(ROWS, 4)), "y": rng.normal(size=ROWS), "mask": np.ones(ROWS)}
  return {"w": jnp.zeros(4)}, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)


@pytest.mark.parametrize(
  ("options", "mesh"),
  [({}, None), ({}, EXPLICIT), ({"weight_fn": rows_of}, AUTO), ({"skip_nonfinite": True}, None)],
)
def test_equal_microbatches_are_traced_once(options, mesh):
  (params, batch), loss, tx = arguments(), Counted(), relaxed(optax.adam(0.1))
  mesh = mesh and make_mesh(2, kind=mesh)
  step = make_train_step(loss, tx, num_microbatches=4, mesh=mesh, **options)
  step(params, tx.init(params), batch)
  assert loss.rows == [2 if mesh else 4]


def test_a_ragged_batch_is_traced_once_for_each_size():
  (params, batch), loss, tx = arguments(), Counted(), relaxed(optax.adam(0.1))
  step = make_train_step(loss, tx, microbatch_size=5)
  step(params, tx.init(params), batch)
  assert sorted(loss.rows) == [1, 5]


def test_a_line_search_traces_it_for_the_gradient_the_value_and_their_search():
  (params, batch), loss, tx = arguments(), Counted(), relaxed(optax.lbfgs())
  step = make_train_step(loss, tx, num_microbatches=4)
  step(params, tx.init(params), batch)
  assert len(loss.rows) <= 3


def test_other_functions_are_traced_once():
  (params, batch), loss = arguments(), Counted()
  options = {"batch_argnums": 1, "num_microbatches": 4}
  derivative = jax.grad(microbatch(loss, reduction="mean", **options))
  for run in (derivative, microbatch_value_and_grad(loss, **options)):
    jax.jit(run)(params, batch)
  assert loss.rows == [4, 4]


def test_few_frames_stand_between_a_call_and_the_loss():
  depths = []

  def loss(params, batch):
    ours = [f for f in traceback.extract_stack() if PACKAGE in pathlib.Path(f.filename).parents]
    depths.append(len(ours))
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

  (params, batch), tx = arguments(), relaxed(optax.adam(0.1))
  microbatch_value_and_grad(loss, num_microbatches=4)(params, batch)
  for mesh in (None, make_mesh(2, kind=AUTO)):
    step = make_train_step(loss, tx, num_microbatches=4, mesh=mesh, donate=False)
    step(params, tx.init(params), batch)
  assert np.all(np.array(depths) <= [6, 9, 11]), depths
