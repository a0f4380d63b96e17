"""A setting of a loss, such as `train=True`: fixed by functools.partial, and what says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.devices import make_mesh

from optax_accum import make_train_step, microbatch_value_and_grad

PARAMS, BATCH = jnp.arange(3.0), jnp.ones((8, 3))
MESHES = pytest.mark.parametrize("count", [None, 8])


def flagged(params, batch, train=False, *, layers=1):
  outputs = batch @ params
  for _ in range(layers):
    outputs = 2 * outputs
  return jnp.mean(outputs**2) if train else jnp.max(outputs)


def in_mode(params, batch, mode):
  return flagged(params, batch, mode == "train")


def take_step(loss_fn, *args, count=None, **kwargs):
  mesh = None if count is None else make_mesh(count)
  tx = optax.sgd(0.1)
  step = make_train_step(loss_fn, tx, num_microbatches=1, mesh=mesh, donate=False)
  return step(PARAMS, tx.init(PARAMS), BATCH, *args, **kwargs)


def notes(error):
  return "\n".join(error.value.__notes__)


@MESHES
@pytest.mark.parametrize(
  ("args", "kwargs", "names"),
  [
    ((True,), {}, ["train"]),
    ((), {"train": True}, ["train"]),
    ((np.True_,), {}, ["train"]),
    ((), {"layers": 2}, ["layers"]),
    ((True,), {"layers": 2}, ["train", "layers"]),
  ],
)
def test_a_branch_on_an_argument_names_it(args, kwargs, names, count):
  with pytest.raises(TypeError, match="traced") as error:
    take_step(flagged, *args, count=count, **kwargs)
  described = " or ".join(f"argument {name!r}" for name in names)
  fix = ", ".join(f"{name}=..." for name in names)
  assert f"If the loss branches on {described}: a step traces" in notes(error)
  assert f"functools.partial(loss_fn, {fix})" in notes(error)


def test_it_is_named_where_the_batch_is_too():
  step = make_train_step(flagged, optax.sgd(0.1), num_microbatches=2, batch_argnums=1)
  with pytest.raises(TypeError, match="traced") as error:
    step(PARAMS, optax.sgd(0.1).init(PARAMS), BATCH, True)
  assert "argument 'train'" in notes(error)


def test_a_branch_on_something_else_names_nothing():
  def loss_fn(params, batch, targets, scale):
    loss = scale * jnp.mean((batch @ params - targets) ** 2)
    return loss if loss > 0 else -loss

  with pytest.raises(TypeError, match="traced") as error:
    take_step(loss_fn, jnp.zeros(1), 2.0)
  assert "functools.partial" not in notes(error)
  assert "batch_argnums" not in notes(error)  # nor are shapes the cause


@MESHES
@pytest.mark.parametrize("named", [False, True])
def test_a_string_is_refused(count, named):
  args, kwargs = ((), {"mode": "train"}) if named else (("train",), {})
  message = (
    r"^argument 'mode' is 'train', of type str, and a step takes arrays\. A setting is fixed in the"
    r" loss, functools.partial\(loss_fn, mode='train'\), and what is none left out\.$"
  )
  with pytest.raises(TypeError, match=message):
    take_step(in_mode, *args, count=count, **kwargs)


def test_strings_in_a_batch_are_refused():
  tx = optax.sgd(0.1)
  step = make_train_step(lambda params, batch: 0.0, tx, num_microbatches=1)
  batch = {"x": BATCH, "name": ["a"]}
  with pytest.raises(TypeError, match=r"argument 'batch'\['name'\]\[0\] is 'a', of type str, "):
    step.lower(PARAMS, tx.init(PARAMS), batch)


@MESHES
def test_partial_fixes_a_setting(count):
  expected = take_step(lambda params, batch: flagged(params, batch, True), count=count)
  for loss_fn in functools.partial(flagged, train=True), functools.partial(in_mode, mode="train"):
    trees.assert_close(take_step(loss_fn, count=count), expected, 0)


def test_a_bool_may_be_data():
  def loss_fn(params, batch, train):
    return jnp.where(train, 2.0, 1.0) * jnp.mean((batch @ params) ** 2)

  losses = [take_step(loss_fn, train)[-1]["loss"] for train in (True, False)]
  assert losses[0] == 2 * losses[1]


def test_without_jit_settings_are_plain_values():
  expected = microbatch_value_and_grad(functools.partial(flagged, train=True), num_microbatches=2)
  for loss_fn, setting in (flagged, True), (in_mode, "train"):
    value_and_grad = microbatch_value_and_grad(loss_fn, num_microbatches=2)
    trees.assert_close(value_and_grad(PARAMS, BATCH, setting), expected(PARAMS, BATCH), 0)
    if setting is True:
      with pytest.raises(TypeError, match="traced") as error:
        jax.jit(value_and_grad)(PARAMS, BATCH, setting)
      assert "argument 'train'" in notes(error)
