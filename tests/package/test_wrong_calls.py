"""Calls that do not fit: Python's own TypeErrors, and what a loss and an optimizer must be."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_accum import (
  accumulate,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
  plan_microbatches,
)
from optax_accum.flax import linen_train_step, nnx_train_step

SGD = optax.sgd(0.1)
BATCH = {"x": jnp.ones((4, 2))}


def linen_loss(variables, batch, rngs):
  return jnp.mean((batch["x"] @ variables["params"]["w"]) ** 2)


def nnx_loss(model, batch):
  return jnp.mean(model(batch["x"]) ** 2)


@pytest.mark.parametrize(("call", "match"), [
  (lambda: accumulate(SGD, every_k_schedule=4), "unexpected .*'every_k_schedule'"),
  (lambda: accumulate(SGD, 4, skipfn=3), "unexpected keyword argument 'skipfn'"),
  (lambda: accumulate(8, SGD), r"inner=8 is not an optax\.Grad"),
  (lambda: accumulate(SGD, 2.5), r"^every_k=2\.5 must be an int"),
  (lambda: make_train_step(jnp.mean, SGD, 8), "takes 2 positional arguments but 3"),
  (lambda: make_train_step(jnp.mean, SGD, every_k=8), "unexpected .*'every_k'"),
  (lambda: microbatch(jnp.mean, num_microbatches=4), "missing .*'reduction'"),
  (lambda: microbatch_value_and_grad(jnp.mean, 0, False, 4), "3 positional arguments but 4"),
  (lambda: plan_microbatches(lambda n: None, (), (), BATCH), "2 positional arguments but 4"),
  (lambda: linen_train_step(linen_loss, accum_steps=2), "unexpected .*'accum_steps'"),
  (lambda: linen_train_step(linen_loss, SGD, num_microbatches=2), "1 positional argument but 2"),
  (lambda: nnx_train_step(nnx_loss, every_k=2), "unexpected .*'every_k'"),
  (lambda: nnx_train_step(nnx_loss, SGD, num_microbatches=2), "1 positional argument but 2"),
])  # fmt: skip
def test_names_that_a_function_has_not_are_pythons_type_errors(call, match):
  with pytest.raises(TypeError, match=match):
    call()


def elsewhere(params, batch):
  return jnp.mean(batch @ params)


elsewhere.__module__ = "optax_losses"


@pytest.mark.parametrize(("make", "match"), [
  (lambda: make_train_step(SGD, jnp.mean, num_microbatches=8),
    r"tx=<function mean .* is not an optax\.GradientTransformation"),
  (lambda: make_train_step(elsewhere, optax.adam, num_microbatches=8), r"call it first, as in adam\("),
  (lambda: make_train_step(elsewhere, optax.MultiSteps(SGD, 2), num_microbatches=8),
    "tx is an optax.MultiSteps object"),
  *(
    (
      lambda make=make, value=value: make(value),
      f"The loss is of type {name}.*: give the function itself, not its value, an optimizer or a",
    )
    for make in (
      lambda value: make_train_step(value, SGD, num_microbatches=8),
      lambda value: microbatch_value_and_grad(value, num_microbatches=8),
      lambda value: linen_train_step(value, num_microbatches=8),
      lambda value: nnx_train_step(value, num_microbatches=8),
    )
    for value, name in (
      (8, "int"),
      (jnp.zeros(()), "ArrayImpl"),
      (SGD, "GradientTransform"),
    )
  ),
])  # fmt: skip
def test_what_is_no_loss_and_no_optimizer_is_named(make, match):
  with pytest.raises(TypeError, match=match):
    make()


def mean_loss(params, batch):
  return jnp.mean((batch["x"] @ params["w"]) ** 2)


PARAMS = {"w": jnp.ones((2, 1))}


def test_a_number_of_microbatches_by_position_gets_its_name():
  # argnums and has_aux, as in jax.value_and_grad
  for positional in ((4,), (0, 4)):
    with pytest.raises(ValueError, match=r"num_microbatches=None and .* exactly one .* by name"):
      microbatch_value_and_grad(mean_loss, *positional)


def test_functions_of_the_user_that_do_not_fit_are_named():
  step = make_train_step(mean_loss, SGD, num_microbatches=2, weight_fn=lambda params, batch: 1.0)
  with pytest.raises(TypeError, match=r"weight_fn gets only the arg.* that are split"):
    step(PARAMS, SGD.init(PARAMS), BATCH)
  step = make_train_step(jax.value_and_grad(mean_loss), SGD, num_microbatches=2)
  with pytest.raises(TypeError, match=r"if it is jax\.value_and_grad of a loss, give that"):
    step(PARAMS, SGD.init(PARAMS), BATCH)


@pytest.mark.parametrize("decorate", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_decorated_loss_has_its_own_errors(decorate):
  @functools.wraps(mean_loss)
  def weighed(params, batch, weight=1.0):
    return weight * mean_loss(params, batch)

  step = make_train_step(decorate(weighed), SGD, num_microbatches=2, donate=False)
  assert step(PARAMS, SGD.init(PARAMS), BATCH, weight=2.0)[-1]["loss"] == 8
  with pytest.raises(KeyError, match="'x'"):
    step(PARAMS, SGD.init(PARAMS), {"y": BATCH["x"]}, weight=2.0)
