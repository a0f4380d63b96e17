"""The guides on sharded state and on half precision are true: they train as whole batches do."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest
from support import oracle, trees
from support.pages import Page

SHARDED = Page("guides/sharded_state.md")
HALF = Page("guides/half_precision.md")
RECIPE, LOOP = HALF.blocks("float16 with loss scaling")

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


IN_SHARDS = SHARDED.blocks("The optimizer's state in shards")[0]
BESIDE = SHARDED.blocks("Beside tensor parallelism")


# What runs, how moments are sharded then, and how many gradients are scattered to them.
@pytest.mark.parametrize(
  ("code", "specs", "scattered"),
  [
    (
      [IN_SHARDS],
      {"embed": P("data"), "layers": P("data"), "out": P("data"), "bias": P()},
      3,
    ),
    (
      [IN_SHARDS, *BESIDE],
      {
        "embed": P("data", "model"),
        "layers": P("data", None, "model"),
        "out": P("model"),
        "bias": P(),
      },
      2,
    ),
  ],
  ids=["alone", "beside tensor parallelism"],
)
def test_a_state_in_shards_ends_as_whole_batches_do(code, specs, scattered):
  with jax.enable_x64(True):
    names = SHARDED.run(*code)
    tx, mesh, batches = names["tx"], names["mesh"], names["batches"]
    step = oracle.whole_batch_step(names["loss_fn"], tx)
    expected, *_ = oracle.take_steps(step, tx, names["start"], batches)
    assert expected["layers"].dtype == jnp.float64
    params, opt_state = names["params"], names["opt_state"]
    trees.assert_close(jax.device_get(params), expected, 1e-10)
    program = names["step"].lower(params, opt_state, batches[0]).as_text()
  assert program.count("reduce_scatter") == scattered
  assert mesh.size == 8
  assert opt_state[0].count.sharding.is_fully_replicated
  for name, spec in specs.items():
    sharding = NamedSharding(mesh, spec)
    for x in (opt_state[0].mu[name], opt_state[0].nu[name]):
      assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert params[name].sharding.is_fully_replicated == ("model" not in spec)


# A loss whose gradients float16 does not have, and steps that are as large as ever.
SMALL = 1e-7
TX = optax.sgd(1 / SMALL)


def small_loss(logits, y):
  return (
    SMALL * optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
  )


def wrong_order(params, batches):
  """As the recipe, but for the scale, which each microbatch divides out in float16."""
  half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float16), tree)  # noqa: E731

  def scaled(params, part):
    logits = part["x"].astype(jnp.float16) @ params["w"] + params["b"]
    return small_loss(logits.astype(jnp.float32), part["y"]) * 2**15

  @jax.jit
  def step(params, batch):
    parts = [
      jax.grad(scaled)(half(params), part) for part in trees.strided(batch, 4)
    ]
    grads = [
      jax.tree.map(lambda g: (g / 2**15).astype(jnp.float32), part)
      for part in parts
    ]
    grads = jax.tree.map(lambda *g: sum(g) / 4, *grads)
    return optax.apply_updates(params, TX.update(grads, TX.init(params))[0])

  for batch in batches:
    params = step(params, batch)
  return params


def test_half_precision_trains_as_float32_does():
  start = HALF.run(mean_loss=small_loss)
  step = oracle.whole_batch_step(start["loss_fn"], TX)
  expected, *_ = oracle.take_steps(step, TX, start["params"], start["batches"])
  found = HALF.run(RECIPE, LOOP, mean_loss=small_loss, tx=TX)
  way = trees.largest_difference(expected, start["params"])
  assert trees.largest_difference(found["params"], expected) < 2e-3 * way
  assert float(found["scaling"][0]) == 2**15
  wrong = wrong_order(start["params"], start["batches"])
  assert trees.largest_difference(wrong, expected) > 0.5 * way


def test_half_precision_skips_what_overflows_and_finds_a_scale():
  names = HALF.run(RECIPE)
  names["GROW_AFTER"] = 3
  tx, batch = names["tx"], names["batches"][0]
  params = {
    "w": jnp.zeros((64, 10), jnp.float32),
    "b": jnp.zeros(10, jnp.float32),
  }
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
    assert float(scaling[0]) == scale * (
      0.5 if skipped[-1] else 2 if third else 1
    )
  # Down to a scale that fits, and every fourth step tries the double.
  assert skipped == [True] * 2 + ([False] * 3 + [True]) * 2 + [False] * 2


@pytest.mark.parametrize(("scale", "value"), [(1.0, jnp.nan), (2.0**24, 1.0)])
def test_the_scale_of_half_precision_has_bounds(scale, value):
  names = HALF.run(RECIPE, mean_loss=small_loss)
  names["GROW_AFTER"] = 1
  tx, batch = names["tx"], names["batches"][0]
  params = {
    "w": jnp.zeros((64, 10), jnp.float32),
    "b": jnp.zeros(10, jnp.float32),
  }
  scaling, batch = (
    (jnp.float32(scale), jnp.int32(0)),
    {**batch, "x": value * batch["x"]},
  )
  _, state, (new_scale, _), _ = names["step"](
    params, tx.init(params), scaling, batch
  )
  assert state[0].count == (0 if scale == 1 else 1)
  assert float(new_scale) == scale
