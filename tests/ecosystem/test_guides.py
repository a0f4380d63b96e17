"""docs/guides is true: what trains there trains in float64 too as whole batches do."""

import functools
import gzip
import json
import pathlib
import re

import flax.linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.profiler import StepTraceAnnotation
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits
from support import oracle, trees
from support.pages import Page

import optax_accum
from optax_accum.flax import linen_train_step

CONTRASTIVE = Page("guides/contrastive.md")
LINEN = Page("guides/flax_linen.md")
LOGGING = Page("guides/logging.md")
MODELS = Page("guides/nnx_equinox_haiku.md")
TROUBLESHOOTING = Page("guides/troubleshooting.md")

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.parametrize(("page", "section"), [(MODELS, "Equinox"), (LOGGING, "A setting of the loss")])  # fmt: skip
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


def documented_metrics():
  """The names in the table of metrics."""
  return set(re.findall(r"^\|`(\w+)`", LOGGING.sections["Logging"], re.MULTILINE))


def test_the_log_has_every_loss():
  names = LOGGING.run(*LOGGING.blocks("Logging"))
  logged = names["numbers"](names["before"])
  noise = {f"noise_scale.{field}" for field in names["before"]["noise_scale"]._fields}
  assert noise < logged.keys()
  assert logged.keys() - noise == names["before"].keys() - {"noise_scale"}
  assert names["before"].keys() | {"aux"} == documented_metrics()
  losses = [entry["loss"] for entry in names["log"]]
  assert losses[0] == pytest.approx(np.log(10))
  assert len(losses) == 3
  assert losses[2] < losses[0]


def test_an_average_of_bfloat16_weights_moves():
  [code] = [block for block in LOGGING.blocks("Logging") if "def averaged" in block]
  start, _, _ = code.partition("for batch")
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  names = LOGGING.run(start, params=params)
  average = names["average"]
  for _ in range(300):
    average = names["averaged"](average, {"w": 1.5 * params["w"]}, True)
  trees.assert_close(average, {"w": jnp.full(3, 1.5 - 0.5 * 0.99**300)}, 1e-4)


def test_the_log_shows_gradients_and_counts():
  names = LOGGING.run(*LOGGING.blocks("Logging"))
  params, batch = names["params"], names["batches"][0]
  parts = trees.strided(batch, 4)
  expected = [optax.tree.norm(jax.grad(names["loss_fn"])(params, part)["w"]) for part in parts]
  found = names["look"](params, batch)["w"]
  trees.assert_close(found, jnp.stack(expected), 1e-5)
  step = optax_accum.make_train_step(
    names["counted_loss"], names["tx"], microbatch_size=20, has_aux=True, aux_reduction="sum"
  )
  _, _, metrics = step(params, names["opt_state"], batch)
  assert int(metrics["aux"]["rows"]) == 64
  assert 0 < int(metrics["aux"]["correct"]) < 64


def test_a_mark_of_a_profile_is_a_step_of_the_optimizer(tmp_path):
  documented = re.findall(
    r"^\|`(\w+)`", TROUBLESHOOTING.sections["Names in a profile"], re.MULTILINE
  )
  assert set(documented) == {"microbatches", "accumulate", "optimizer", "end_of_cycle"}
  names = LOGGING.run(*LOGGING.blocks("Logging")[:1])
  params, batch, loss_fn = (names[name] for name in ("params", "batch", "loss_fn"))
  tx = names["tx"]
  streaming = optax_accum.accumulate(tx, every_k=4)
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=4, donate=False)

  @jax.jit
  def mini_step(params, opt_state, batch):
    return streaming.apply(jax.grad(loss_fn)(params, batch), opt_state, params)

  opt_state, held = tx.init(params), streaming.init(params)
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # not every call of Python
  with jax.profiler.trace(tmp_path, profiler_options=options):
    for number in range(2):
      with StepTraceAnnotation("train", step_num=number):
        new = step(params, opt_state, batch)
      with StepTraceAnnotation("streaming", step_num=number):
        for _ in range(4):
          params, held = mini_step(params, held, batch)
    jax.block_until_ready((new, params))
  [profile] = tmp_path.rglob("*.xplane.pb")
  [timeline] = tmp_path.rglob("*.trace.json.gz")
  for name in (b"microbatches", b"accumulate", b"optimizer"):
    assert b"/%b/" % name in profile.read_bytes()
  events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
  for mark, function, count in [("train", "train_step", 1), ("streaming", "mini_step", 4)]:
    marks = [event for event in events if event.get("name") == mark]
    assert [event["args"]["step_num"] for event in marks] == ["0", "1"]
    calls = [e["ts"] for e in events if e.get("name") == f"PjitFunction({function})"]
    in_each = [sum(m["ts"] <= t < m["ts"] + m["dur"] for t in calls) for m in marks]
    assert in_each == [len(calls) / 2] * 2
    # JAX may record a call twice, one in the other
    assert len(calls) in (2 * count, 4 * count)


def test_the_encoder_in_microbatches_has_the_gradient_of_the_whole_batch():
  alone, over_devices = (
    CONTRASTIVE.blocks("A contrastive loss"),
    CONTRASTIVE.blocks("On several devices"),
  )
  names = CONTRASTIVE.run(*alone, *over_devices)
  params, batch = names["params"], names["batch"]
  losses = {
    "whole": functools.partial(names["loss_fn"], encode=names["encode"]),
    "parts": names["loss_fn"],
  }
  grads, temp = {}, {}
  for name, loss in losses.items():
    compiled = jax.jit(jax.grad(loss)).lower(params, batch).compile()
    temp[name] = compiled.memory_analysis().temp_size_in_bytes
    grads[name] = jax.device_get(compiled(params, batch))
  trees.assert_close(grads["parts"], grads["whole"], 1e-5)
  assert temp["parts"] < temp["whole"] / 2
  told = re.search(
    r"takes (\d+) MiB of temporary memory instead of (\d+) MiB",
    " ".join(CONTRASTIVE.sections["A contrastive loss"].split()),
  )
  found = [round(temp[name] / 2**20) for name in ("parts", "whole")]
  assert [int(x) for x in told.groups()] == found

  unit = optax.sgd(1.0)  # its step is the gradient
  for loss, right in ((names["gathered_loss"], True), (losses["parts"], False)):
    step = optax_accum.make_train_step(
      loss, unit, num_microbatches=1, mesh=names["mesh"], donate=False
    )
    new, _, _ = jax.device_get(step(params, unit.init(params), batch))
    gradient = optax.tree.sub(jax.device_get(params), new)
    off = optax.tree.norm(optax.tree.sub(gradient, grads["whole"]))
    error = float(off / optax.tree.norm(grads["whole"]))
    assert error < 1e-5 if right else error > 0.1


class Network(nn.Module):
  norm: str

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(32)(x)
    if self.norm == "batch":
      x = nn.BatchNorm(use_running_average=False)(x)
    else:
      x = nn.GroupNorm(num_groups=4)(x)
    return nn.Dense(10)(nn.relu(x))


class StatsState(train_state.TrainState):
  batch_stats: dict


def test_batch_norm_sees_a_microbatch_and_group_norm_a_row():
  digits = load_digits()
  x, y = np.float32(digits.data[:128] / 16), digits.target[:128]
  found = {}
  for norm in ("batch", "group"):
    model = Network(norm)

    def loss_fn(variables, batch, rngs, model=model):
      logits, updates = model.apply(variables, batch["x"], mutable=["batch_stats"])
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
      return losses.mean(), {"batch_stats": updates.get("batch_stats", {})}

    start = {"batch_stats": {}, **model.init(jax.random.key(0), x)}
    state = StatsState.create(apply_fn=None, tx=optax.sgd(0.1), **start)
    moved = []
    for number in (1, 8):
      step = linen_train_step(
        loss_fn, mutable=("batch_stats",), num_microbatches=number, donate=False
      )
      after, _ = step(state, {"x": x, "y": y})
      moved.append(optax.tree.sub(after.params, state.params))
    off = optax.tree.norm(optax.tree.sub(*moved))
    found[norm] = float(off / optax.tree.norm(moved[0]))
  section = LINEN.sections["Batch norm sees a microbatch"]
  told = dict(re.findall(r"(batch|group) norm: .* step (\S+)", section))
  assert float(told["batch"]) == pytest.approx(found["batch"], rel=0.3)
  assert found["group"] < 1e-5
  assert float(told["group"]) < 1e-5


def table(name, number):
  found = json.loads((RESULTS / f"{name}.json").read_text())["tables"][number]
  return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def test_small_batches_trained_as_the_pages_say():
  final, curves, timed = (table("batches", number) for number in range(3))
  *adapted, kept = [{x: float(row[x]) for x in ("x 0.5", "x 1", "x 2")} for row in final]
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
  assert (round(median["decay 0.9"], 1), round(worst["decay 0.9"], 1)) == (1.3, 3.1)
