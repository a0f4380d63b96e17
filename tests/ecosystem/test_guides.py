"""docs/guides is true: what trains there trains in float64 too as whole batches do."""

import csv

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.pages import Page

LIBRARIES = Page("guides/equinox_haiku.md")
LOGGING = Page("guides/logging.md")
NNX = Page("guides/flax_nnx.md")

pytestmark = pytest.mark.usefixtures("usual_promotion")  # a page's code is for JAX as it comes


@pytest.mark.parametrize(
  ("page", "section"),
  [
    (LIBRARIES, "Plain pytrees"),
    (LIBRARIES, "Equinox"),
    (LIBRARIES, "Haiku"),
    (LOGGING, "A setting of the loss"),
  ],
)
def test_both_ways_end_as_whole_batches_do(page, section):
  ways = LIBRARIES.blocks("Both ways in")
  without = "compare = lambda *args: None"  # the page compares in float32
  with jax.enable_x64(True):
    names = page.run(*ways, without, *page.blocks(section))
    params, loss_fn, tx = (names[name] for name in ("params", "loss_fn", "tx"))
    step = oracle.whole_batch_step(loss_fn, tx)
    expected, *_ = oracle.take_steps(step, tx, params, names["batches"])
    expected = jax.tree.leaves(expected)
    assert {leaf.dtype for leaf in expected} == {np.dtype("float64")}
    for way in "whole_cycles", "one_by_one", "whole_batches":
      trees.assert_close(jax.tree.leaves(names[way](loss_fn, params)), expected, 1e-10)


@pytest.mark.parametrize("section", ["Equinox, with state", "Haiku, with state"])
def test_state_is_that_of_a_loop_over_microbatches(section):
  with jax.enable_x64(True):
    model, _, loop = LIBRARIES.blocks(section)[0].rpartition("step = ")
    start = LIBRARIES.run(model)
    params, state, loss_fn, tx = (start[name] for name in ("params", "state", "loss_fn", "tx"))
    opt_state = tx.init(params)
    grad = jax.jit(jax.grad(loss_fn, has_aux=True))
    for batch in start["batches"]:
      total = jax.tree.map(jnp.zeros_like, params)
      for part in trees.strided(batch, 4):
        grads, (state, _) = grad(params, part, state)
        total = jax.tree.map(lambda t, g: t + g / 4, total, grads)
      updates, opt_state = tx.update(total, opt_state, params)
      params = optax.apply_updates(params, updates)
    actual = LIBRARIES.run(model + "step = " + loop)
    found = jax.tree.leaves((actual["params"], actual["state"]))
    trees.assert_close(found, jax.tree.leaves((params, state)), 1e-10, least=1.0)


def test_nnx_keeps_the_best_model_and_pads():
  names = NNX.run(*NNX.blocks("Statistics, masks, and the best model"))
  model, evaluate, held_out = (names[name] for name in ("model", "evaluate", "held_out"))
  assert float(evaluate(model, held_out)) == pytest.approx(names["least"], rel=1e-6)
  assert names["least"] < 2.3
  # What the mask is for: padding, and what is in it, changes nothing.
  results = []
  for fill in 0.0, 100.0:
    nnx.update(model, jax.tree.map(jnp.copy, names["best"]))
    optimizer = nnx.Optimizer(model, names["tx"], wrt=nnx.Param)
    batch = names["pad"](names["batches"][0], 80)
    batch["x"] = jnp.where(batch["mask"][:, None], batch["x"], fill)
    model.train()
    names["step"](model, optimizer, batch)
    results.append(jax.tree.leaves(nnx.state(model)))
  trees.assert_close(*results, 1e-6)


def test_the_log_has_every_loss(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  names = LOGGING.run(*LOGGING.blocks("Logging"))
  assert int(names["metrics"]["aux"]["rows"]) == 64
  assert names["rows_worth_having"] > 1
  assert names["accuracy"] * 64 == int(names["metrics"]["aux"]["correct"]) > 0
  with open(names["path"]) as file:
    rows = [(int(i), float(loss)) for i, loss in csv.reader(file)]
  assert [i for i, _ in rows] == [0, 1, 2]
  assert rows[0][1] == pytest.approx(np.log(10))
  assert rows[2][1] < rows[0][1]
