"""docs/recipes.md is true: each recipe trains, both ways in, as whole batches do."""

import csv

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.pages import Page

PAGE = Page("recipes.md")
CYCLE, STREAM = PAGE.blocks("Both ways in")

pytestmark = pytest.mark.usefixtures("usual_promotion")  # a page's code is for JAX as it comes


@pytest.mark.parametrize("section", ["Plain pytrees", "Equinox", "Haiku", "A setting of the loss"])
def test_both_ways_end_as_whole_batches_do(section):
  model = PAGE.blocks(section)
  with jax.enable_x64(True):
    start = PAGE.run(*model)
    step = oracle.whole_batch_step(start["loss_fn"], start["tx"])
    expected, *_ = oracle.take_steps(step, start["tx"], start["params"], start["batches"])
    for loop in CYCLE, STREAM:
      actual = PAGE.run(*model, loop)["params"]
      trees.assert_close(jax.tree.leaves(actual), jax.tree.leaves(expected), 1e-10)


def test_a_state_in_shards_ends_as_whole_batches_do():
  with jax.enable_x64(True):
    names = PAGE.run(PAGE.blocks("The optimizer's state in shards")[0])
    tx, batches = names["tx"], names["batches"]
    start = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    step = oracle.whole_batch_step(names["loss_fn"], tx)
    expected, *_ = oracle.take_steps(step, tx, start, batches)
    trees.assert_close(jax.device_get(names["params"]), expected, 1e-10)
    moments = names["opt_state"][0].mu
    assert moments["w"].addressable_shards[0].data.shape == (8, 10)
    assert names["params"]["w"].sharding.is_fully_replicated
    program = names["step"].lower(names["params"], names["opt_state"], batches[0]).as_text()
    assert program.count("reduce_scatter") == 1


def test_a_state_in_shards_beside_tensor_parallel_parameters():
  first, second = PAGE.blocks("The optimizer's state in shards")
  one, two = '((jax.device_count(),), ("data",)', '((4, 2), ("data", "model")'
  first = first.replace(one, two).replace("(AxisType.Auto,)", "(AxisType.Auto,) * 2")
  names = PAGE.run(first, second, specs={"w": P(None, "model"), "b": P("model")})
  assert names["mesh"].size == 8
  adam = names["shardings"][0]
  assert adam.count.spec == P()
  for moments in (adam.mu, adam.nu):
    assert {name: s.spec for name, s in moments.items()} == {
      "w": P("data", "model"),
      "b": P("model"),
    }


@pytest.mark.parametrize("section", ["Equinox, with state", "Haiku, with state"])
def test_state_is_that_of_a_loop_over_microbatches(section):
  with jax.enable_x64(True):
    model, _, loop = PAGE.blocks(section)[0].rpartition("step = ")
    start = PAGE.run(model)
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
    actual = PAGE.run(model + "step = " + loop)
    found = jax.tree.leaves((actual["params"], actual["state"]))
    trees.assert_close(found, jax.tree.leaves((params, state)), 1e-10)


def test_nnx_keeps_the_best_model_and_pads():
  names = PAGE.run(*PAGE.blocks("Flax nnx"))
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


# A loss whose gradients float16 does not have, and steps that are as large as ever.
SMALL = 1e-7
TX = optax.sgd(1 / SMALL)


def small_loss(logits, y):
  return SMALL * optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def wrong_order(params, batches):
  """As the recipe, but for the scale, which each microbatch divides out in float16."""
  half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float16), tree)  # noqa: E731

  def scaled(params, part):
    logits = part["x"].astype(jnp.float16) @ params["w"] + params["b"]
    return small_loss(logits.astype(jnp.float32), part["y"]) * 2**15

  @jax.jit
  def step(params, batch):
    parts = [jax.grad(scaled)(half(params), part) for part in trees.strided(batch, 4)]
    grads = [jax.tree.map(lambda g: (g / 2**15).astype(jnp.float32), part) for part in parts]
    grads = jax.tree.map(lambda *g: sum(g) / 4, *grads)
    return optax.apply_updates(params, TX.update(grads, TX.init(params))[0])

  for batch in batches:
    params = step(params, batch)
  return params


def test_half_precision_trains_as_float32_does():
  start = PAGE.run(*PAGE.blocks("Plain pytrees"), mean_loss=small_loss)
  step = oracle.whole_batch_step(start["loss_fn"], TX)
  expected, *_ = oracle.take_steps(step, TX, start["params"], start["batches"])
  found = PAGE.run(*PAGE.blocks("Half precision"), mean_loss=small_loss, tx=TX)
  way = trees.largest_difference(expected, start["params"])
  assert trees.largest_difference(found["params"], expected) < 2e-3 * way
  assert float(found["scaling"][0]) == 2**15
  wrong = wrong_order(start["params"], start["batches"])
  assert trees.largest_difference(wrong, expected) > 0.5 * way


def test_half_precision_skips_what_overflows_and_finds_a_scale():
  recipe, _ = PAGE.blocks("Half precision")
  names = PAGE.run(recipe)
  names["GROW_AFTER"] = 3
  tx, batch = names["tx"], names["batches"][0]
  params = {"w": jnp.zeros((64, 10), jnp.float32), "b": jnp.zeros(10, jnp.float32)}
  state, scaling = tx.init(params), (jnp.float32(2**20), jnp.int32(0))
  skipped = []
  for _ in range(12):
    before, scale = jax.device_get((params, state)), float(scaling[0])
    params, state, scaling, _ = names["step"](params, state, scaling, batch)
    after = jax.device_get((params, state))
    skipped.append(after[1][0].count == before[1][0].count)
    if skipped[-1]:
      trees.assert_close(after, before, 0)
    third = not any(skipped[-3:]) and int(scaling[1]) == 0
    assert float(scaling[0]) == scale * (0.5 if skipped[-1] else 2 if third else 1)
  # Down to a scale that fits, and every fourth step tries the double.
  assert skipped == [True] * 2 + ([False] * 3 + [True]) * 2 + [False] * 2


@pytest.mark.parametrize(("scale", "value"), [(1.0, jnp.nan), (2.0**24, 1.0)])
def test_the_scale_of_half_precision_has_bounds(scale, value):
  names = PAGE.run(PAGE.blocks("Half precision")[0], mean_loss=small_loss)
  names["GROW_AFTER"] = 1
  tx, batch = names["tx"], names["batches"][0]
  params = {"w": jnp.zeros((64, 10), jnp.float32), "b": jnp.zeros(10, jnp.float32)}
  scaling, batch = (jnp.float32(scale), jnp.int32(0)), {**batch, "x": value * batch["x"]}
  _, state, (new_scale, _), _ = names["step"](params, tx.init(params), scaling, batch)
  assert state[0].count == (0 if scale == 1 else 1)
  assert float(new_scale) == scale


def test_the_log_has_every_loss(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = PAGE.run(*PAGE.blocks("Logging"))
  assert int(names["metrics"]["aux"]["rows"]) == 64
  assert names["rows_worth_having"] > 1
  assert names["accuracy"] * 64 == int(names["metrics"]["aux"]["correct"]) > 0
  with open("losses.csv") as file:
    rows = [(int(i), float(loss)) for i, loss in csv.reader(file)]
  assert [i for i, _ in rows] == [0, 1, 2]
  assert rows[0][1] == pytest.approx(np.log(10))
  assert rows[2][1] < rows[0][1]
