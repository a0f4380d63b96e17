"""docs/guides is true: what trains there trains in float64 too as whole batches do."""

import csv
import re

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
TROUBLESHOOTING = Page("guides/troubleshooting.md")

pytestmark = pytest.mark.usefixtures("usual_promotion")  # a page's code is for JAX as it comes


@pytest.mark.parametrize(
  ("page", "section"),
  [(LIBRARIES, "Equinox"), (LIBRARIES, "Haiku"), (LOGGING, "A setting of the loss")],
)
def test_training_ends_as_on_whole_batches(page, section):
  model, _, loop = page.blocks(section)[0].rpartition("step = ")
  with jax.enable_x64(True):
    start = page.run(model)
    params, loss_fn, tx = (start[name] for name in ("params", "loss_fn", "tx"))
    step = oracle.whole_batch_step(loss_fn, tx)
    expected, *_ = oracle.take_steps(step, tx, params, start["batches"])
    expected = jax.tree.leaves(expected)
    assert {leaf.dtype for leaf in expected} == {np.dtype("float64")}
    names = page.run(model + "step = " + loop)
    if page is LOGGING:  # which makes a step there, and takes none
      names["params"], *_ = oracle.take_steps(names["step"], tx, params, names["batches"])
    trees.assert_close(jax.tree.leaves(names["params"]), expected, 1e-10)


def test_the_first_step_deletes_the_arrays_of_an_equinox_model():
  model, _, loop = LIBRARIES.blocks("Equinox")[0].rpartition("step = ")
  keep = "original = jax.tree.leaves(params)\n"
  names = LIBRARIES.run(f"{model}{keep}step = {loop}")
  assert all(leaf.is_deleted() for leaf in names["original"])
  names = LIBRARIES.run(f"{model}{keep}step = {loop}".replace("num_m", "donate=False, num_m"))
  assert not any(leaf.is_deleted() for leaf in names["original"])


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


def documented_metrics():
  """The names in the table of metrics."""
  return set(re.findall(r"^\| `(\w+)`", LOGGING.sections["Logging"], re.MULTILINE))


def test_the_log_has_every_loss(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  names = LOGGING.run(*LOGGING.blocks("Logging"))
  assert int(names["metrics"]["aux"]["rows"]) == 64
  assert names["accuracy"] * 64 == int(names["metrics"]["aux"]["correct"]) > 0
  logged = names["numbers"](names["before"])
  noise = {f"noise_scale.{field}" for field in names["before"]["noise_scale"]._fields}
  assert noise < logged.keys()
  assert logged.keys() - noise == names["before"].keys() - {"noise_scale"}
  assert "aux.rows" in names["numbers"](names["metrics"])
  assert names["metrics"].keys() | {"noise_scale"} == documented_metrics()
  with open(names["path"]) as file:
    rows = [(int(i), float(loss)) for i, loss in csv.reader(file)]
  assert [i for i, _ in rows] == [0, 1, 2]
  assert rows[0][1] == pytest.approx(np.log(10))
  assert rows[2][1] < rows[0][1]


def test_a_mark_of_a_profile_is_a_step_of_the_optimizer():
  section = "Names in a profile"
  documented = set(re.findall(r"^\| `(\w+)`", TROUBLESHOOTING.sections[section], re.MULTILINE))
  names = TROUBLESHOOTING.run(*TROUBLESHOOTING.blocks(section))
  assert documented == {"microbatches", "accumulate", "optimizer"}  # and the page finds them
  for mark, function, count in [("train", "train_step", 1), ("streaming", "mini_step", 4)]:
    marks = [event for event in names["events"] if event.get("name") == mark]
    assert [event["args"]["step_num"] for event in marks] == ["0", "1"]
    calls = [e["ts"] for e in names["events"] if e.get("name") == f"PjitFunction({function})"]
    in_each = [sum(m["ts"] <= t < m["ts"] + m["dur"] for t in calls) for m in marks]
    assert in_each == [len(calls) / 2] * 2
    assert len(calls) in (2 * count, 4 * count)  # JAX may record a call twice, one in the other
