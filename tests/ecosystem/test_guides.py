"""docs/guides is true: what trains there trains in float64 too as whole batches do."""

import csv
import json
import pathlib
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.pages import Page

BATCH = Page("guides/batch_size.md")
LOGGING = Page("guides/logging.md")
MODELS = Page("guides/nnx_equinox_haiku.md")
TROUBLESHOOTING = Page("guides/troubleshooting.md")

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.parametrize(
  ("page", "section"),
  [
    (MODELS, "Equinox"),
    (MODELS, "Haiku"),
    (LOGGING, "A setting of the loss"),
  ],
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
      names["params"], *_ = oracle.take_steps(
        names["step"], tx, params, names["batches"]
      )
    trees.assert_close(jax.tree.leaves(names["params"]), expected, 1e-10)


def test_the_first_step_deletes_the_arrays_of_an_equinox_model():
  model, _, loop = MODELS.blocks("Equinox")[0].rpartition("step = ")
  keep = "original = jax.tree.leaves(params)\n"
  names = MODELS.run(f"{model}{keep}step = {loop}")
  assert all(leaf.is_deleted() for leaf in names["original"])
  names = MODELS.run(
    f"{model}{keep}step = {loop}".replace("num_m", "donate=False, num_m")
  )
  assert not any(leaf.is_deleted() for leaf in names["original"])


@pytest.mark.parametrize(
  "section", ["Equinox, with state", "Haiku, with state"]
)
def test_state_is_that_of_a_loop_over_microbatches(section):
  with jax.enable_x64(True):
    model, _, loop = MODELS.blocks(section)[0].rpartition("step = ")
    start = MODELS.run(model)
    params, state, loss_fn, tx = (
      start[name] for name in ("params", "state", "loss_fn", "tx")
    )
    opt_state = tx.init(params)
    grad = jax.jit(jax.grad(loss_fn, has_aux=True))
    for batch in start["batches"]:
      total = jax.tree.map(jnp.zeros_like, params)
      for part in trees.strided(batch, 4):
        grads, (state, _) = grad(params, part, state)
        total = jax.tree.map(lambda t, g: t + g / 4, total, grads)
      updates, opt_state = tx.update(total, opt_state, params)
      params = optax.apply_updates(params, updates)
    actual = MODELS.run(model + "step = " + loop)
    found = jax.tree.leaves((actual["params"], actual["state"]))
    trees.assert_close(
      found, jax.tree.leaves((params, state)), 1e-10, least=1.0
    )


def test_nnx_keeps_the_best_model_and_pads():
  names = MODELS.run(*MODELS.blocks("Statistics, masks, and the best model"))
  model, evaluate, held_out = (
    names[name] for name in ("model", "evaluate", "held_out")
  )
  assert float(evaluate(model, held_out)) == pytest.approx(
    names["least"], rel=1e-6
  )
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
  return set(
    re.findall(r"^\| `(\w+)`", LOGGING.sections["Logging"], re.MULTILINE)
  )


def test_the_log_has_every_loss(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  names = LOGGING.run(*LOGGING.blocks("Logging"))
  assert int(names["metrics"]["aux"]["rows"]) == 64
  assert names["accuracy"] * 64 == int(names["metrics"]["aux"]["correct"]) > 0
  logged = names["numbers"](names["before"])
  asked_for = {"noise_scale"}
  noise = {
    f"noise_scale.{field}" for field in names["before"]["noise_scale"]._fields
  }
  assert noise < logged.keys()
  assert logged.keys() - noise == names["before"].keys() - {"noise_scale"}
  assert "aux.rows" in names["numbers"](names["metrics"])
  assert names["metrics"].keys() | asked_for == documented_metrics()
  # The agreement is the mean over pairs.
  params = jax.device_get(names["params"])
  step, loss, batch = (
    names["step"],
    names["loss_fn"],
    names["batches"][0],
  )
  of_grads = names["look_at"](names["params"], batch)
  *_, seen = step(names["params"], names["opt_state"], batch)
  grads = [
    jax.grad(loss)(params, part)["w"] for part in trees.strided(batch, 4)
  ]
  products = np.array([[np.vdot(a, b) for a in grads] for b in grads])
  pairs = (products.sum() - products.trace()) / 12 / (products.trace() / 4)
  ratio = seen["grad_norm"] ** 2 / of_grads["squared"]
  assert (4 * ratio - 1) / 3 == pytest.approx(pairs, rel=1e-3)
  assert 0 < names["agreement"] < 1
  with open(names["path"]) as file:
    rows = [(int(i), float(loss)) for i, loss in csv.reader(file)]
  assert [i for i, _ in rows] == [0, 1, 2]
  assert rows[0][1] == pytest.approx(np.log(10))
  assert rows[2][1] < rows[0][1]


def test_a_mark_of_a_profile_is_a_step_of_the_optimizer():
  section = "Names in a profile"
  documented = set(
    re.findall(r"^\| `(\w+)`", TROUBLESHOOTING.sections[section], re.MULTILINE)
  )
  names = TROUBLESHOOTING.run(*TROUBLESHOOTING.blocks(section))
  scopes = {
    "microbatches",
    "accumulate",
    "optimizer",
    "end_of_cycle",
  }
  assert documented == scopes  # and the page finds the first three
  for mark, function, count in [
    ("train", "train_step", 1),
    ("streaming", "mini_step", 4),
  ]:
    marks = [event for event in names["events"] if event.get("name") == mark]
    assert [event["args"]["step_num"] for event in marks] == ["0", "1"]
    calls = [
      e["ts"]
      for e in names["events"]
      if e.get("name") == f"PjitFunction({function})"
    ]
    in_each = [
      sum(m["ts"] <= t < m["ts"] + m["dur"] for t in calls) for m in marks
    ]
    assert in_each == [len(calls) / 2] * 2
    # JAX may record a call twice, one in the other
    assert len(calls) in (
      2 * count,
      4 * count,
    )


@pytest.fixture(scope="module")
def grown():
  """What the page on the batch defines, in float64 and with fewer calls; and traces of the loss."""
  code = "".join(BATCH.blocks("A batch that grows")[:4])
  shorter = {
    "0:8 10K:16 50K:32": "0:8 1K:16 3K:32",
    "480": "48",
    "101": "9",
    "250": "30",
  }
  for old, new in shorter.items():
    assert old in code
    code = code.replace(old, new)
  promotion = (
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  )
  with jax.enable_x64(True), promotion[0], promotion[1]:
    page, traces = BATCH.run(), []
    model = page["train_lm"].Transformer(layers=1, width=32, dtype=jnp.float64)

    def loss_fn(params, windows):
      traces.append(windows.shape)
      logits = model.apply({"params": params}, windows[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, 1:]
      ).mean()

    def init():
      return jax.tree.map(lambda x: x.astype(np.float64), page["init"]())

    names = BATCH.run(code, loss_fn=loss_fn, init=init)
    return names, list(traces)


def whole_batches(names, beta2):
  """The parameters after the steps of `grown`, each on its whole batch."""

  @jax.jit
  def step(params, state, batch, rate, b2):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=b2))
    updates, state = tx.update(
      jax.grad(names["loss_fn"])(params, batch), state, params
    )
    return optax.apply_updates(params, updates), state

  params, calls, sizes = names["init"](), 0, []
  state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0)).init(
    params
  )
  while calls < 48:
    seen = calls * 8 * 32
    rows = 8 if seen < 1000 else 16 if seen < 3000 else 32
    parts = [
      names["rows_of"](call, 8) for call in range(calls, calls + rows // 8)
    ]
    rate = names["of_tokens"](float(seen)) * (rows / 32) ** 0.5
    params, state = step(
      params, state, np.concatenate(parts), rate, beta2(rows)
    )
    calls, sizes = calls + len(parts), [*sizes, rows]
  return params, sizes


def test_a_batch_that_grows_trains_as_on_whole_batches(grown):
  names, traces = grown
  assert len(traces) == 1  # one program, before and after resuming
  assert (names["steps"], names["calls"]) == (6, 1)  # where it was saved
  with jax.enable_x64(True):
    actual, opt_state, _ = names["state"]
    expected, sizes = whole_batches(names, lambda rows: 0.95 ** (rows / 32))
    wrong, _ = whole_batches(names, lambda rows: 0.95)
  assert sizes == [8] * 4 + [16] * 4 + [32] * 9
  assert (opt_state.gradient_step, opt_state.mini_step) == (len(sizes), 0)
  assert {leaf.dtype for leaf in jax.tree.leaves(expected)} == {
    np.dtype("float64")
  }
  trees.assert_close(actual, expected, 1e-10)
  assert trees.largest_difference(actual, wrong) > 1e-3


def test_a_schedule_is_checked_and_reaches_a_trillion_tokens():
  schedule, optimizer = BATCH.blocks("A batch that grows")[:2]
  schedule = schedule.replace("0:8 10K:16 50K:32", "0:768 250B:1536")
  names = BATCH.run(
    schedule, optimizer.replace("CALLS = 480", "CALLS = 4_000_000_000")
  )
  # the step that begins with 250B tokens or more
  first = -(-250_000_000_000 // (768 * 32))
  assert [int(names["at"](step)[0]) for step in (0, first - 1, first)] == [
    768,
    768,
    1536,
  ]
  seen = float(names["at"](first + 1000)[1])
  assert seen == pytest.approx(first * 768 * 32 + 1000 * 1536 * 32, rel=1e-6)
  assert 0 < float(names["learning_rate"](first)) < np.inf
  for bad in "10K:8", "0:8 50K:16 10K:32", "0:0", "0:-8", "0:12", "0:8 10KB:16":
    with pytest.raises((AssertionError, ValueError)):
      names["batch_schedule"](bad)


def test_bias_correction_takes_all_steps_to_have_had_the_present_batch():
  names = BATCH.run(*BATCH.blocks("A batch that grows")[:2])
  tx = optax.inject_hyperparams(optax.scale_by_adam)(b2=names["b2"])
  ones, factors, rows = jnp.ones(()), [], 0
  state, update = tx.init(ones), jax.jit(tx.update)
  for i in range(119):
    updates, state = update(ones, state)
    factors.append(float(updates))
    rows += int(names["at"](i)[0])
    right = 1 - names["B2"] ** (rows / names["ROWS"])
    assert factors[-1] == pytest.approx(
      float(jnp.sqrt((1 - names["b2"](i) ** (i + 1)) / right)), rel=1e-3
    )
  assert factors[39] == pytest.approx(1, abs=1e-3)
  assert factors[40] == pytest.approx(1.25, abs=0.005)
  assert factors[118] == pytest.approx(1.04, abs=0.005)


def table(name, number):
  found = json.loads((RESULTS / f"{name}.json").read_text())["tables"][number]
  return [
    dict(zip(found["columns"], row, strict=True)) for row in found["rows"]
  ]


def test_small_batches_trained_as_the_pages_say():
  final, curves, timed = (table("batches", number) for number in range(3))
  *adapted, kept = [
    {x: float(row[x]) for x in ("x 0.5", "x 1", "x 2")} for row in final
  ]
  assert all(row["x 1"] == min(row.values()) for row in adapted)
  losses = [row["x 1"] for row in adapted]
  assert losses == sorted(losses)
  assert all(0 < kept[x] - adapted[0][x] < 0.05 for x in kept)
  for look in curves:  # per token, and per second as all take as long
    assert list(look.values())[1:] == sorted(list(look.values())[1:])
  seconds = [row["s for all tokens"] for row in timed]
  assert max(seconds) < 1.1 * min(seconds)
  assert 0.9 < timed[-1]["ms"] / (8 * timed[1]["ms"]) < 1.1
  median, worst = table("noise_scale", 1)[2:]
  assert (round(median["decay 0.9"], 1), round(worst["decay 0.9"], 1)) == (
    1.3,
    3.1,
  )
