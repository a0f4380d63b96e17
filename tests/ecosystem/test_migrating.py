"""docs/migrating.md is true: each loop and the one that takes its place end alike.

Those of PyTorch are in tests/peers.
"""

import re

import jax.numpy as jnp
import optax
import pytest
from support import migrating, trees
from support.migrating import Pair

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


def linear(params, x):
  w, b = params
  return x @ w + b


def of_dict(names):
  return [names["params"]["w"], names["params"]["b"]]


def of_linen(names):
  params = names["state"].params if "state" in names else names["params"]
  return [params["w"], params["b"]]


def of_nnx(names):
  return [names["model"].kernel[...], names["model"].bias[...]]


# A section, and what its loops end with.
LOOPS = {
  "`optax.MultiSteps`": of_dict,
  "A linen `TrainState`": of_linen,
  "Flax's cookbook": of_nnx,
  "MaxText": of_dict,
  "Tunix": of_nnx,
}
if hasattr(optax, "microbatching"):  # since optax 0.2.7
  LOOPS["`optax.microbatching`"] = of_dict


@pytest.mark.parametrize("section", LOOPS)
def test_the_loops_of_a_section_have_the_same_steps(section):
  shared = migrating.PAGE.blocks("Flax's cookbook")[:1] if section == "Tunix" else ()
  pair = Pair(section, LOOPS[section], linear, optax.adam(0.01), shared)
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


def test_a_linen_train_state_goes_on_after_a_cycle():
  section = "A linen `TrainState`"
  before, after = migrating.PAGE.blocks(section)
  [code] = re.findall(r"`(state\.replace\(.*\))`\.", migrating.PAGE.sections[section])
  old = migrating.PAGE.run(before, batches=migrating.EVEN[:8])["state"]
  names = migrating.PAGE.run(after, batches=[])
  names["state"] = eval(code, {**names, "old": old, "converted": converted()})
  for batch in migrating.EVEN[8:]:
    names["state"] = names["mini_step"](names["state"], batch, False)
  expected = of_linen(migrating.PAGE.run(before, batches=migrating.EVEN))
  trees.assert_close(of_linen(names), expected, 1e-6)


def test_flax_goes_on_after_a_cycle():
  section = "Flax's cookbook"
  shared, before, after = migrating.PAGE.blocks(section)
  [code] = re.findall(r"`(optimizer\.opt_state = .*)`\.", migrating.PAGE.sections[section])
  old = migrating.PAGE.run(shared, before, batches=migrating.EVEN[:8])
  # The loop after, around the model that the loop before has trained.
  names = migrating.PAGE.run(
    shared, "model = trained_model", after, batches=[], trained_model=old["model"]
  )
  exec(code, {**names, "old": old["optimizer"], "converted": converted()})
  for batch in migrating.EVEN[8:]:
    names["mini_step"](names["model"], names["optimizer"], batch, False)
  expected = of_nnx(migrating.PAGE.run(shared, before, batches=migrating.EVEN))
  trees.assert_close(of_nnx(names), expected, 1e-6)


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
