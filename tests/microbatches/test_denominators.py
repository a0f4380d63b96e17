"""Terms with denominators of their own: the step is the whole batch's, and no mean of means."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.devices import make_mesh
from support.samples import more

from optax_accum import _versions, make_train_step, microbatch

# 40 rows are ragged on 1, 2 and 8 devices
ROWS, SIZE, LENGTH, WIDTH, EXPERTS = (40, 16, 3, 4, 3)
LABELLED = (3, 5, 31)
MICROBATCHES = 5
TX = optax.sgd(0.5)


pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  shapes = {"trunk": (WIDTH, WIDTH), "router": (WIDTH, EXPERTS), "second": (WIDTH,)}
  return {name: rng.normal(size=shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
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


def make_step(loss_fn, count, **options):
  """A step on `count` devices."""
  mesh = None if count == 1 else make_mesh(count)
  return make_train_step(loss_fn, TX, mesh=mesh, donate=False, **options)


def run(step, params, batch, totals):
  """Parameters, loss and terms after a step, and the labelled rows of each microbatch."""
  new, _, metrics = jax.device_get(step(params, TX.init(params), batch, totals))
  return (new, metrics["loss"], metrics["aux"]["terms"]), metrics["aux"]["labelled"]


@pytest.fixture(scope="module")
def whole_batch(params, batch):
  """The same without microbatches: parameters, loss and terms."""
  with jax.enable_x64(True):
    totals = counts_of(batch)
    step = oracle.whole_batch_step(lambda *args: loss_fn(*args, totals)[0], TX)
    new, _, metrics = step(params, TX.init(params), batch)
    return jax.device_get((new, metrics["loss"], loss_fn(params, batch, totals)[1]["terms"]))


devices = pytest.mark.parametrize("count", [1, 8])


@devices
def test_sums_over_totals_are_the_whole_batchs_step(count, params, batch, whole_batch):
  step = make_step(loss_fn, count, microbatch_size=SIZE, **EXACT)
  actual, labelled = run(step, params, batch, counts_of(batch))
  assert 0 in labelled
  trees.assert_close(actual, whole_batch, 1e-12)

  # A term without rows is zero: its total is given as 1, and its parameters stay.
  unlabelled = {**batch, "labelled": np.zeros(ROWS, bool)}
  totals = {**counts_of(unlabelled), "second": jnp.float64(1)}
  (new, _, terms), _ = run(step, params, unlabelled, totals)
  assert terms["second"] == 0
  np.testing.assert_array_equal(new["second"], params["second"])
  assert np.all(np.isfinite(new["trunk"]))

  if count > 1:
    return
  wrong, _ = run(
    make_step(own_totals, count, microbatch_size=SIZE, **MEAN_OF_MEANS),
    params,
    batch,
    counts_of(batch),
  )
  for part, whole in zip(wrong, whole_batch, strict=True):
    assert trees.largest_difference(part, whole) > 1e-2


# A loss may tell what it divides by: a sum, and how much its rows count.


def sum_and_count(params, batch, key):
  """As codebases of language models have it: no mask is written a second time."""
  del key
  return sums_of(params, batch)["tokens"], jnp.sum(batch["valid"])


def drawn(params, batch, key):
  """Masked language: the loss draws which of the valid tokens count."""
  chosen = jax.random.bernoulli(key, 0.3, batch["valid"].shape)
  return sum_and_count(params, {**batch, "valid": batch["valid"] & chosen}, key)


def mean_of_pair(pair):
  def mean(*args):
    total, weight = pair(*args)
    return total / jnp.maximum(weight, 1).astype(total.dtype)

  return mean


def over_microbatches(pair, count):
  """The loss of the whole batch: the pairs of all microbatches, each of its rows and its key."""
  own = ROWS // count
  first = np.arange(ROWS).reshape(count, own // MICROBATCHES, MICROBATCHES)
  rows = np.moveaxis(first, 2, 1).reshape(count * MICROBATCHES, -1)

  def loss_fn(params, batch, key):
    parts = jax.tree.map(lambda x: x[rows], batch)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(rows)))
    totals, weights = jax.vmap(pair, (None, 0, 0))(params, parts, keys)
    return jnp.sum(totals) / jnp.sum(weights).astype(totals.dtype)

  return loss_fn


@pytest.mark.parametrize(
  ("count", "pair"), [more(1, drawn), (8, sum_and_count), more(1, sum_and_count), more(8, drawn)]
)
def test_a_loss_that_returns_a_sum_and_its_count_takes_the_whole_batchs_step(
  pair, count, params, batch
):
  batch = {**batch, "valid": batch["valid"].copy()}
  batch["valid"][-ROWS // 8 :] = False  # a device of padding
  key = jax.random.key(3)
  whole = functools.partial(over_microbatches(pair, count), key=key)
  expected = once(whole, params, batch)
  options = {"num_microbatches": MICROBATCHES, "rng_argnums": 2}
  ways = [{"in_place": _versions.ADDS_TO_REFERENCES}, {"skip_nonfinite": True}]
  for way in ways:
    step = make_step(pair, count, has_weight=True, **options, **way)
    new, _, metrics = step(params, TX.init(params), batch, key)
    actual = new, TX.init(params), metrics["loss"]
    trees.assert_close(jax.device_get(actual), expected, 1e-12)
    if pair is sum_and_count:
      assert int(metrics["total_weight"]) == np.sum(batch["valid"])
  # Means of microbatches: the mistake.
  step = make_step(mean_of_pair(pair), count, **options)
  wrong, _, _ = step(params, TX.init(params), batch, key)
  assert trees.largest_difference(jax.device_get(wrong), expected[0]) > 1e-3


# A router's loss may be a product of means, which no sum over microbatches is.


def once(loss_fn, params, batch):
  """A step on the whole batch."""
  with jax.enable_x64(True):
    return oracle.take_steps(oracle.whole_batch_step(loss_fn, TX), TX, params, [batch])


def shares_of(params, batch):
  """By expert, over tokens: the sum of the probabilities, and how many choose it."""
  probabilities = jax.nn.softmax(jnp.tanh(batch["x"] @ params["trunk"]) @ params["router"])
  chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS)
  return jnp.sum(probabilities, axis=(0, 1)), jnp.sum(chosen, axis=(0, 1))


def balance(shares_of, axis_name=None):
  def loss_fn(params, batch):
    shares = shares_of(params, batch)
    if axis_name is not None:
      shares = lax.psum(shares, axis_name)
    probability, chosen = (x / jnp.sum(x) for x in shares)
    return EXPERTS * jnp.sum(probability * chosen)

  return loss_fn


@pytest.fixture(scope="module")
def by_balance(params, batch):
  return once(balance(shares_of), params, batch)


@devices
def test_a_product_of_means_is_a_function_of_sums_in_microbatches(count, params, batch, by_balance):
  options = {"reduction": "sum", "batch_argnums": 1, "microbatch_size": SIZE // count}
  whole = balance(microbatch(shares_of, **options), None if count == 1 else "data")
  step = make_step(whole, count, num_microbatches=1)
  trees.assert_close(oracle.take_steps(step, TX, params, [batch]), by_balance, 1e-12)
  if count == 1:
    step = make_step(balance(shares_of), count, microbatch_size=SIZE)
    wrong = oracle.take_steps(step, TX, params, [batch])
    assert trees.largest_difference(wrong[0], by_balance[0]) > 1e-4
