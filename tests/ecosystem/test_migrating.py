"""docs/migrating.md is true: each loop and the one that takes its place end alike.

Those of PyTorch are in tests/peers.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from support import migrating, trees
from support.migrating import Pair

import optax_accum

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


def linear(params, x):
  w, b = params
  return x @ w + b


def test_the_loop_of_multi_steps_has_the_same_steps():
  trained = lambda names: [names["params"]["w"], names["params"]["b"]]  # noqa: E731
  pair = Pair("`optax.MultiSteps`", trained, linear, optax.adam(0.01))
  migrating.assert_a_pair(pair, "uneven", "cut short")


def converted():
  """The page's function of that name."""
  [code] = migrating.PAGE.blocks("Checkpoints of `MultiSteps`")
  names = {}
  exec(code.partition("old_tx")[0], names)
  return names["converted"]


def test_multi_steps_goes_on_after_a_cycle():
  before, after = migrating.PAGE.blocks("`optax.MultiSteps`")
  [code] = migrating.PAGE.blocks("Checkpoints of `MultiSteps`")
  old = migrating.PAGE.run(before, batches=migrating.EVEN[:8])
  names = migrating.PAGE.run(after, batches=[])
  names["restore"] = lambda like: (old["params"], old["opt_state"])
  exec(code, names)
  for batch in migrating.EVEN[8:]:
    state = names["params"], names["opt_state"]
    names["params"], names["opt_state"] = names["mini_step"](*state, batch, False)
  expected = migrating.PAGE.run(before, batches=migrating.EVEN)["params"]
  trees.assert_close(names["params"], expected, 1e-6)


if hasattr(optax, "microbatching"):  # since optax 0.2.7

  def test_the_loop_of_optax_microbatching_has_the_same_steps():
    trained = lambda names: [names["params"]["w"], names["params"]["b"]]  # noqa: E731
    pair = Pair("`optax.microbatching`", trained, linear, optax.adam(0.01))
    migrating.assert_a_pair(pair, "uneven", "cut short")


def linen_weights(names):
  params = names["state"].params if "state" in names else names["params"]
  return [params["w"], params["b"]]


def test_the_loop_of_a_linen_train_state_has_the_same_steps():
  pair = Pair("A linen `TrainState`", linen_weights, linear, optax.adam(0.01))
  migrating.assert_a_pair(pair, "uneven", "cut short")


def test_a_linen_train_state_goes_on_after_a_cycle():
  section = "A linen `TrainState`"
  before, after = migrating.PAGE.blocks(section)
  [code] = re.findall(r"`(state\.replace\(.*\))`\.", migrating.PAGE.sections[section])
  old = migrating.PAGE.run(before, batches=migrating.EVEN[:8])["state"]
  names = migrating.PAGE.run(after, batches=[])
  names["state"] = eval(code, {**names, "old": old, "converted": converted()})
  for batch in migrating.EVEN[8:]:
    names["state"] = names["mini_step"](names["state"], batch, False)
  expected = linen_weights(migrating.PAGE.run(before, batches=migrating.EVEN))
  trees.assert_close(linen_weights(names), expected, 1e-6)


def test_the_loops_of_flax_have_the_same_steps():
  trained = lambda names: [names["model"].kernel[...], names["model"].bias[...]]  # noqa: E731
  pair = Pair("Flax's cookbook", trained, linear, optax.adam(0.01))
  migrating.assert_a_pair(pair, "uneven", "cut short")


def test_the_loop_of_an_engine_has_the_same_steps():
  trained = lambda names: [names["params"]["w"], names["params"]["b"]]  # noqa: E731
  pair = Pair("MaxText", trained, linear, optax.adam(0.01))
  migrating.assert_a_pair(pair, "uneven", "cut short")


def test_the_loop_of_an_accumulator_has_the_same_steps():
  trained = lambda names: [names["model"].kernel[...], names["model"].bias[...]]  # noqa: E731
  shared = migrating.PAGE.blocks("Flax's cookbook")[:1]
  pair = Pair("Tunix", trained, linear, optax.adam(0.01), shared)
  migrating.assert_a_pair(pair, "uneven", "cut short")


def test_flax_goes_on_after_a_cycle():
  section = "Flax's cookbook"
  shared, before, after = migrating.PAGE.blocks(section)
  [code] = re.findall(r"`(optimizer\.opt_state = .*)`\.", migrating.PAGE.sections[section])
  trained = lambda names: [names["model"].kernel[...], names["model"].bias[...]]  # noqa: E731
  old = migrating.PAGE.run(shared, before, batches=migrating.EVEN[:8])
  # The loop after, around the model that the loop before has trained.
  names = migrating.PAGE.run(
    shared, "model = trained_model", after, batches=[], trained_model=old["model"]
  )
  exec(code, {**names, "old": old["optimizer"], "converted": converted()})
  for batch in migrating.EVEN[8:]:
    names["mini_step"](names["model"], names["optimizer"], batch, False)
  expected = trained(migrating.PAGE.run(shared, before, batches=migrating.EVEN))
  trees.assert_close(trained(names), expected, 1e-6)


def keras_weights(names):
  return [variable.value for variable in names["model"].trainable_variables]


def test_the_loop_of_keras_has_the_same_steps():
  def logits(params, x):
    w1, b1, w2, b2 = params
    return jnp.tanh(x @ w1 + b1) @ w2 + b2

  pair = Pair("Keras", keras_weights, logits, optax.sgd(0.5, momentum=0.9))
  migrating.assert_a_pair(pair, "cut short")


@pytest.mark.parametrize(("in_keras", "in_optax", "same"), [
  ("SGD(0.5", "sgd(0.5", True),
  ("Adam(0.01, epsilon=1e-12", "adam(0.01, eps=1e-12", True),
  ("Adam(0.01", "adam(0.01, eps=1e-7", False),
])  # fmt: skip
def test_the_loop_of_keras_has_the_same_steps_with_other_optimizers(in_keras, in_optax, same):
  *shared, before, after = migrating.PAGE.blocks("Keras")
  assert "SGD(\n  0.5, momentum=0.9" in before
  assert "sgd(0.5, momentum=0.9" in after
  before = before.replace("SGD(\n  0.5, momentum=0.9", in_keras)
  after = after.replace("sgd(0.5, momentum=0.9", in_optax)
  before, after = (keras_weights(migrating.PAGE.run(*shared, loop)) for loop in (before, after))
  assert (trees.largest_difference(after, before) < 2e-6) == same


def test_keras_dropout_draws_anew_in_each_microbatch():
  shared, _, after = migrating.PAGE.blocks("Keras")
  dense = 'keras.layers.Dense(16, "tanh"), '
  assert dense in shared
  layers = f"{dense}keras.layers.Dropout(0.5), keras.layers.BatchNormalization(), "
  names = migrating.PAGE.run(shared.replace(dense, layers), after)
  seeds, mean, _ = (variable.value for variable in names["model"].non_trainable_variables)
  assert seeds[1] == len(names["batches"])  # how often it was drawn from
  assert jnp.any(mean != 0)


# What the page says in a row of "Version 0.3", as a program.


def start(**names):
  """The page's set-up, an optimizer, and the batch of a step."""
  names = migrating.PAGE.run(**names)
  names["tx"] = optax.sgd(0.1)
  names["batch"] = names["joined"](names["batches"][: migrating.K])
  return names


def whole_batch_step(names):
  params = names["params"]
  grads = jax.grad(names["loss_fn"])(params, names["batch"])
  updates, _ = names["tx"].update(grads, names["tx"].init(params))
  return optax.apply_updates(params, updates)


def test_rows_in_the_last_axis_are_moved():
  names = start()
  loss_fn, batch, tx = names["loss_fn"], names["batch"], names["tx"]

  def loss_of_last(params, batch):
    return loss_fn(params, {**batch, "x": batch["x"].T})

  def loss_of_first(params, batch):
    return loss_of_last(params, {**batch, "x": jnp.moveaxis(batch["x"], 0, -1)})

  step = optax_accum.make_train_step(loss_of_first, tx, num_microbatches=4, donate=False)
  last = {**batch, "x": batch["x"].T}
  first = {**last, "x": jnp.moveaxis(last["x"], -1, 0)}
  params = names["params"]
  new, _, _ = step(params, tx.init(params), first)
  trees.assert_close(new, whole_batch_step(names), 1e-6)


def test_a_batch_goes_by_name():
  names = start()

  def loss_by_name(params, *, batch):
    return names["loss_fn"](params, batch)

  value_and_grad = optax_accum.microbatch_value_and_grad(
    loss_by_name, num_microbatches=4, batch_argnums="batch"
  )
  found = value_and_grad(names["params"], batch=names["batch"])
  expected = jax.value_and_grad(names["loss_fn"])(names["params"], names["batch"])
  trees.assert_close(found, expected, 1e-6)


def test_what_is_empty_is_left_out():
  names = start(batches=migrating.batches([16, 0, 7, 0]))
  tx, params = names["tx"], names["params"]
  step = optax_accum.make_train_step(
    names["loss_fn"],
    tx,
    num_microbatches=1,
    weight_fn=lambda batch: batch["mask"].sum(),
    donate=False,
  )
  cycle = step.begin(params)
  for part in names["batches"][: migrating.K]:
    if part["mask"].any():
      cycle = step.add(cycle, params, part)
  new, _, metrics = step.finish(params, tx.init(params), cycle)
  trees.assert_close(new, whole_batch_step(names), 1e-6)
  assert metrics["total_weight"] == 23


def test_gradients_are_reduced_in_every_microbatch_without_a_mesh():
  names = start()
  tx, params = names["tx"], names["params"]
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  rows = jax.NamedSharding(mesh, jax.P("data"))
  everywhere = jax.NamedSharding(mesh, jax.P())
  step = optax_accum.make_train_step(names["loss_fn"], tx, num_microbatches=4, donate=False)
  args = (
    *jax.device_put((params, tx.init(params)), everywhere),
    jax.device_put(names["batch"], rows),
  )
  new, _, _ = step(*args)
  trees.assert_close(jax.device_get(new), whole_batch_step(names), 1e-6)
  report = optax_accum.count_collectives(step.lower(*args).compile())
  assert report.inside


@pytest.mark.parametrize("jitted", [True, False])
def test_a_cycle_is_dropped(jitted):
  pages = "".join(migrating.PAGE.sections.values())
  [code] = set(re.findall(r"`(optax\.tree\.set\(state, .*?\))`", pages))
  tx = optax_accum.accumulate(optax.adam(0.01), every_k=2)
  update = jax.jit(tx.update) if jitted else tx.update
  params, grads = jnp.ones(3), jnp.arange(3.0)
  expected = tx.init(params)
  _, begun = tx.update(jnp.full(3, jnp.nan), expected, params, weight=3.0)
  state = eval(code, {"optax": optax, "state": begun})
  for _ in range(2):
    updates, state = update(grads, state, params)
    like, expected = update(grads, expected, params)
    trees.assert_close(updates, like, 0)
  assert optax_accum.has_updated(state)
