"""A setting of a loss, such as `train=True`: fixed by functools.partial, and what says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.devices import make_mesh

from optax_accum import make_train_step, microbatch, microbatch_value_and_grad

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
  step = make_train_step(
    loss_fn, tx, num_microbatches=1, mesh=mesh, donate=False
  )
  return step(PARAMS, tx.init(PARAMS), BATCH, *args, **kwargs)


def notes(error):
  return "\n".join(error.value.__notes__)


@MESHES
@pytest.mark.parametrize(
  ("args", "kwargs", "names"),
  [
    ((True,), {}, ["train"]),
    ((np.True_,), {}, ["train"]),
    ((), {"layers": 2}, ["layers"]),
    ((True,), {"layers": 2}, ["train", "layers"]),
  ],
)
def test_a_branch_on_an_argument_names_it(args, kwargs, names, count):
  with pytest.raises(TypeError, match="traced") as error:
    take_step(flagged, *args, count=count, **kwargs)
  fix = ", ".join(f"{name}=..." for name in names)
  assert f"functools.partial(loss_fn, {fix})" in notes(error)


def test_it_is_named_where_the_batch_is_too():
  step = make_train_step(
    flagged, optax.sgd(0.1), num_microbatches=2, batch_argnums=1
  )
  with pytest.raises(TypeError, match="traced") as error:
    step(PARAMS, optax.sgd(0.1).init(PARAMS), BATCH, True)
  assert "functools.partial(loss_fn, train=...)" in notes(error)


def test_a_branch_where_nothing_is_a_setting_names_nothing():
  def loss_fn(params, batch, targets):
    loss = jnp.mean((batch @ params - targets) ** 2)
    return loss if loss > 0 else -loss

  with pytest.raises(TypeError, match="traced") as error:
    take_step(loss_fn, jnp.zeros(1))
  assert "functools.partial" not in notes(error)
  assert "batch_argnums" not in notes(error)  # nor are shapes the cause


@MESHES
@pytest.mark.parametrize(
  ("args", "kwargs"), [(("train",), {}), ((), {"mode": "train"})]
)
def test_a_string_is_told_with_what_to_write(count, args, kwargs):
  slot = "'mode'" if kwargs else "3"
  match = f"^argument {slot} is the string 'train' and no array: .* or fix it in the loss, functools"
  with pytest.raises(TypeError, match=match):
    take_step(in_mode, *args, count=count, **kwargs)


@MESHES
@pytest.mark.parametrize(
  "value", [np.array(["a"]), np.array([None]), np.float32]
)
def test_what_holds_no_numbers_is_an_error_of_jax(count, value):
  with pytest.raises(
    TypeError, match=r"JAX (array )?(type|value)|static|data type"
  ):
    take_step(in_mode, value, count=count)


def test_strings_in_a_batch_are_refused():
  run = microbatch(
    lambda batch: batch["x"].sum(), reduction="sum", num_microbatches=2
  )
  for strings in ("a" * 8, np.array(["a"] * 8)):
    message = r"^argument 0\['name'\] has no numbers \(.* is not a valid JAX .*leave it out of"
    with pytest.raises(TypeError, match=message):
      run({"x": BATCH, "name": strings})


@pytest.mark.parametrize(
  ("take", "value"),
  [
    (np.sqrt, 4),
    (float, 0.5),
    (lambda n: 1.0 if n["train"] else 2.0, {"rate": 0.5, "train": True}),
  ],
)
def test_whatever_takes_a_value_names_it(take, value):
  def loss_fn(params, batch, n):
    return jnp.mean(batch @ params) * jnp.sum(take(n))

  with pytest.raises((TypeError, ValueError)) as error:
    take_step(loss_fn, value)
  assert (
    "functools.partial(loss_fn, n=...), and make a step for each value"
    in notes(error)
  )


@MESHES
def test_partial_fixes_a_setting(count):
  expected = take_step(
    lambda params, batch: flagged(params, batch, True), count=count
  )
  for loss_fn in (
    functools.partial(flagged, train=True),
    functools.partial(in_mode, mode="train"),
  ):
    trees.assert_close(take_step(loss_fn, count=count), expected, 0)


def test_a_bool_may_be_data():
  def loss_fn(params, batch, train):
    return jnp.where(train, 2.0, 1.0) * jnp.mean((batch @ params) ** 2)

  losses = [take_step(loss_fn, train)[-1]["loss"] for train in (True, False)]
  assert losses[0] == 2 * losses[1]


def test_without_jit_settings_are_plain_values():
  expected = microbatch_value_and_grad(
    functools.partial(flagged, train=True), num_microbatches=2
  )
  for loss_fn, setting in (flagged, True), (in_mode, "train"):
    value_and_grad = microbatch_value_and_grad(loss_fn, num_microbatches=2)
    trees.assert_close(
      value_and_grad(PARAMS, BATCH, setting), expected(PARAMS, BATCH), 0
    )
    if setting is True:
      with pytest.raises(TypeError, match="traced") as error:
        jax.jit(value_and_grad)(PARAMS, BATCH, setting)
      assert "functools.partial(loss_fn, train=...)" in notes(error)
