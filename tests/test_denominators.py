"""Terms with denominators of their own: the step is the whole batch's, and no mean of means."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.devices import make_mesh

from optax_accum import make_train_step, microbatch

ROWS, SIZE, LENGTH, WIDTH, EXPERTS = 40, 16, 3, 4, 3  # 40 rows are ragged on 1, 2 and 8 devices
LABELLED = (3, 5, 31)
TX = optax.sgd(0.5)


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def params():
  rng = np.random.default_rng(0)
  shapes = {"trunk": (WIDTH, WIDTH), "router": (WIDTH, EXPERTS), "second": (WIDTH,)}
  return {name: rng.normal(size=shape) for name, shape in shapes.items()}


@pytest.fixture
def batch():
  """Rows of 3 tokens, ever more of them padding; few rows have a label for the second head."""
  rng = np.random.default_rng(1)
  return {
    "x": rng.normal(size=(ROWS, LENGTH, WIDTH)),
    "valid": rng.random((ROWS, LENGTH)) < np.linspace(1.0, 0.2, ROWS)[:, None],
    "labelled": np.isin(np.arange(ROWS), LABELLED),
  }


def sums_of(params, batch):
  """Over valid tokens, over all tokens, and over labelled rows."""
  x = jnp.tanh(batch["x"] @ params["trunk"])
  return {
    "tokens": jnp.sum(jnp.sum(x**2, axis=-1), where=batch["valid"]),
    "router": jnp.sum(jax.nn.logsumexp(x @ params["router"], axis=-1) ** 2),
    "second": jnp.sum((jnp.mean(x, axis=1) @ params["second"] - 1) ** 2, where=batch["labelled"]),
  }


def counts_of(batch):
  counts = {
    "tokens": jnp.sum(batch["valid"]),
    "router": jnp.asarray(batch["valid"].size),
    "second": jnp.sum(batch["labelled"]),
  }
  return jax.tree.map(lambda count: count.astype(jnp.float64), counts)


def add_up(terms):
  return terms["tokens"] + 0.1 * terms["router"] + 0.5 * terms["second"]


def loss_fn(params, batch, totals):
  terms = jax.tree.map(jnp.divide, sums_of(params, batch), totals)
  return add_up(terms), {"terms": terms, "labelled": jnp.sum(batch["labelled"])}


def own_totals(params, batch, totals):
  """What people write: a microbatch divides by what it has, and 1 where it has nothing."""
  return loss_fn(params, batch, jax.tree.map(lambda n: jnp.maximum(n, 1.0), counts_of(batch)))


AUX = {"terms": "sum", "labelled": "stack"}
EXACT = {"has_aux": True, "aux_reduction": AUX, "reduction": "sum"}
MEAN_OF_MEANS = {"has_aux": True, "aux_reduction": {**AUX, "terms": "mean"}}


def run(loss_fn, options, count, params, batch):
  """A step on `count` devices: what it returns."""
  mesh = None if count == 1 else make_mesh(count)
  step = make_train_step(loss_fn, TX, microbatch_size=SIZE, mesh=mesh, donate=False, **options)
  return jax.device_get(step(params, TX.init(params), batch, counts_of(batch)))


def whole_batch(params, batch):
  """The same without microbatches: parameters, loss and terms."""
  totals = counts_of(batch)
  step = oracle.whole_batch_step(lambda *args: loss_fn(*args, totals)[0], TX)
  new, _, metrics = step(params, TX.init(params), batch)
  return new, metrics["loss"], loss_fn(params, batch, totals)[1]["terms"]


devices = pytest.mark.parametrize("count", [1, 2, 8])


@devices
def test_sums_over_totals_are_the_whole_batchs_step(count, params, batch):
  expected = whole_batch(params, batch)
  new, _, metrics = run(loss_fn, EXACT, count, params, batch)
  assert 0 in metrics["aux"]["labelled"]
  trees.assert_close((new, metrics["loss"], metrics["aux"]["terms"]), expected, 1e-12)

  new, _, metrics = run(own_totals, MEAN_OF_MEANS, count, params, batch)
  for actual, whole in zip((new, metrics["loss"], metrics["aux"]["terms"]), expected, strict=True):
    assert trees.largest_difference(actual, whole) > 1e-2


@devices
def test_a_term_without_rows_is_zero(count, params, batch):
  """Its total is given as 1, and its parameters stay."""
  batch = {**batch, "labelled": np.zeros(ROWS, bool)}
  step = make_train_step(loss_fn, TX, microbatch_size=SIZE, mesh=make_mesh(count), **EXACT)
  totals = {**counts_of(batch), "second": 1.0}
  new, _, metrics = jax.device_get(step(params, TX.init(params), batch, totals))
  assert metrics["aux"]["terms"]["second"] == 0
  np.testing.assert_array_equal(new["second"], params["second"])
  assert np.all(np.isfinite(new["trunk"]))


# A router's loss may be a product of means, which no sum over microbatches is.


@devices
def test_a_router_beside_a_token_mean(count, params, batch):
  """All sums of the whole batch are taken first, also over devices: the loss is then a mean."""

  def sums(params, batch):
    probabilities, chosen = shares_of(params, batch)
    terms = {"probabilities": probabilities, "chosen": chosen}
    return {**sums_of(params, batch), **terms, "valid": jnp.sum(batch["valid"]).astype(jnp.float64)}

  def loss_of(sums_of_all):
    def loss_fn(params, batch):
      all_sums = sums_of_all(params, batch)
      router = jnp.sum(all_sums["probabilities"] * all_sums["chosen"]) / all_sums["valid"] ** 2
      return all_sums["tokens"] / all_sums["valid"] + router

    return loss_fn

  in_parts = microbatch(sums, reduction="sum", batch_argnums=1, microbatch_size=SIZE // count)

  def over_devices(params, batch):
    return jax.tree.map(lambda x: lax.all_gather(x, "data").sum(0), in_parts(params, batch))

  expected = oracle.take_steps(oracle.whole_batch_step(loss_of(sums), TX), TX, params, [batch])
  loss_fn, mesh = loss_of(in_parts if count == 1 else over_devices), None
  if count > 1:
    mesh = make_mesh(count)
  step = make_train_step(loss_fn, TX, num_microbatches=1, mesh=mesh, donate=False)
  trees.assert_close(oracle.take_steps(step, TX, params, [batch]), expected, 1e-12)
  if count > 1:  # what is gathered on every device is counted by every device
    options = {"num_microbatches": 1, "mesh": mesh, "reduction": "sum", "donate": False}
    wrong = oracle.take_steps(make_train_step(loss_fn, TX, **options), TX, params, [batch])
    assert trees.largest_difference(wrong[0], expected[0]) > 1e-2


def shares_of(params, batch):
  """By expert, over tokens: the sum of the probabilities, and how many choose it."""
  probabilities = jax.nn.softmax(jnp.tanh(batch["x"] @ params["trunk"]) @ params["router"])
  chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS)
  return jnp.sum(probabilities, axis=(0, 1)), jnp.sum(chosen, axis=(0, 1))


def balance(shares_of, axis_name=None):
  def loss_fn(params, batch):
    shares = shares_of(params, batch)
    if axis_name is not None:  # gathered, because a loss that is reduced by psum is refused
      shares = jax.tree.map(lambda x: jnp.sum(lax.all_gather(x, axis_name), axis=0), shares)
    probability, chosen = (x / jnp.sum(x) for x in shares)
    return EXPERTS * jnp.sum(probability * chosen)

  return loss_fn


@devices
def test_a_product_of_means_is_a_function_of_sums_in_microbatches(count, params, batch):
  expected = oracle.take_steps(oracle.whole_batch_step(balance(shares_of), TX), TX, params, [batch])
  in_parts = microbatch(shares_of, reduction="sum", batch_argnums=1, microbatch_size=SIZE // count)
  mesh = None if count == 1 else make_mesh(count)
  whole = balance(in_parts, None if mesh is None else "data")
  step = make_train_step(whole, TX, num_microbatches=1, mesh=mesh, donate=False)
  trees.assert_close(oracle.take_steps(step, TX, params, [batch]), expected, 1e-12)

  wrong = make_train_step(balance(shares_of), TX, microbatch_size=SIZE, mesh=mesh, donate=False)
  actual = oracle.take_steps(wrong, TX, params, [batch])
  assert trees.largest_difference(actual[0], expected[0]) > 1e-4
