"""The guides on sharded state and half precision are true: they train as whole batches do."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest
from sklearn.datasets import load_digits
from support import oracle, trees
from support.pages import Page

import optax_accum

SHARDED = Page("guides/sharded_state.md")
HALF = Page("guides/half_precision.md")
SCALED = pathlib.Path(__file__).parents[2] / "examples" / "loss_scaling.py"

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


IN_SHARDS = SHARDED.blocks("The optimizer's state in shards")[0]
BESIDE = SHARDED.blocks("Beside tensor parallelism")


# What runs, how moments are sharded then, and how many gradients are scattered to them.
@pytest.mark.parametrize(("code", "specs", "scattered"), [
  ([IN_SHARDS], {"embed": P("data"), "layers": P("data"), "out": P("data"), "bias": P()}, 3),
  ([IN_SHARDS, *BESIDE],
    {"embed": P("data", "model"), "layers": P("data", None, "model"), "out": P("model"), "bias": P()}, 2),
], ids=["alone", "beside tensor parallelism"])  # fmt: skip
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


def data():
  digits = load_digits()
  x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
  batches = [{"x": x[i : i + 64], "y": y[i : i + 64]} for i in range(0, 192, 64)]
  return {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}, batches


def of_example(**names):
  """What the example defines; `names` replace what it defined."""
  defined = runpy.run_path(str(SCALED))
  step = defined["step"]
  step.__wrapped__.__globals__.update(names)
  return step, names.get("tx", defined["tx"])


def test_half_precision_trains_as_float32_does():
  params, batches = data()

  def loss_fn(params, batch):
    return small_loss(batch["x"] @ params["w"] + params["b"], batch["y"])

  step = oracle.whole_batch_step(loss_fn, TX)
  expected, *_ = oracle.take_steps(step, TX, params, batches)
  way = trees.largest_difference(expected, params)
  wrong = wrong_order(params, batches)
  assert trees.largest_difference(wrong, expected) > 0.5 * way
  step, tx = of_example(mean_loss=small_loss, tx=TX)
  found, state = jax.tree.map(jnp.copy, params), tx.init(params)
  scaling = jnp.float32(2**15), jnp.int32(0)
  for batch in batches:
    found, state, scaling, _ = step(found, state, scaling, batch)
  assert trees.largest_difference(found, expected) < 2e-3 * way
  assert float(scaling[0]) == 2**15


def test_half_precision_skips_what_overflows_and_finds_a_scale():
  step, tx = of_example(GROW_AFTER=3)
  params, (batch, *_) = data()
  state, scaling = tx.init(params), (jnp.float32(2**20), jnp.int32(0))
  skipped = []
  for _ in range(12):
    before, scale = jax.device_get((params, state)), float(scaling[0])
    params, state, scaling, _ = step(params, state, scaling, batch)
    after = jax.device_get((params, state))
    skipped.append(after[1][0].count == before[1][0].count)
    if skipped[-1]:
      trees.assert_close(after, before, 0)
    third = not any(skipped[-3:]) and int(scaling[1]) == 0
    factor = 2 if third else 1
    assert float(scaling[0]) == scale * (0.5 if skipped[-1] else factor)
  # Down to a scale that fits, and every fourth step tries the double.
  assert skipped == [True] * 2 + ([False] * 3 + [True]) * 2 + [False] * 2


def test_a_sum_in_bfloat16_stops_growing():
  [code] = HALF.blocks("bfloat16")
  names = {}
  exec(code, names)
  params, _ = data()
  digits = load_digits()
  everything = {
    "x": jnp.asarray(digits.data[:1792] / 16, jnp.float32),
    "y": jnp.asarray(digits.target[:1792]),
  }
  exact = jax.jit(jax.grad(names["loss_fn"]))(params, everything)
  halves = optax.tree.cast(params, jnp.bfloat16)
  off = []
  for dtype in (jnp.float32, jnp.bfloat16):
    in_parts = optax_accum.microbatch_value_and_grad(
      names["loss_fn"], num_microbatches=448, accumulator_dtype=dtype
    )
    grads = optax.tree.cast(jax.jit(in_parts)(halves, everything)[1], jnp.float32)
    difference = optax.tree.norm(optax.tree.sub(grads, exact))
    off.append(float(difference / optax.tree.norm(exact)))
  assert off[0] < 0.02 < off[1]
