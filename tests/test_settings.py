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
from optax_accum._microbatches import settings

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
  assert f"If the loss takes the value of {described}, as a branch, a dict's key" in notes(error)
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
    r"^argument 'mode' is 'train', of type str, and a step takes arrays of numbers\. A setting is"
    r" fixed in the loss, functools.partial\(loss_fn, mode='train'\), and what is none left out\.$"
  )
  with pytest.raises(TypeError, match=message):
    take_step(in_mode, *args, count=count, **kwargs)


def test_strings_in_a_batch_are_refused():
  tx = optax.sgd(0.1)
  step = make_train_step(lambda params, batch: 0.0, tx, num_microbatches=1)
  batch = {"x": BATCH, "name": ["a"]}
  with pytest.raises(TypeError, match=r"argument 'batch'\['name'\]\[0\] is 'a', of type str, "):
    step.lower(PARAMS, tx.init(PARAMS), batch)
  run = microbatch(lambda batch: batch["x"].sum(), reduction="sum", num_microbatches=2)
  for strings, kind in (("a" * 8, "str"), (np.array(["a"] * 8), "ndarray and dtype <U1")):
    message = rf"^batch argument 0\['name'\] is .*, of type {kind}, and a batch has arrays of"
    with pytest.raises(TypeError, match=message):
      run({"x": BATCH, "name": strings})


def zeros(count):
  return jnp.zeros(count)


@pytest.mark.parametrize(
  ("take", "value", "name"),
  [
    (zeros, 2, "'n'"),
    (np.sqrt, 4, "'n'"),
    (float, 0.5, "'n'"),
    ({2: 1.0}.get, 2, "'n'"),
    (jax.jit(zeros, static_argnums=0), 2, "'n'"),
    (lambda n: 1.0 if n["train"] else 2.0, {"rate": 0.5, "train": True}, "'n'['train']"),
  ],
)
def test_whatever_takes_a_value_names_it(take, value, name):
  def loss_fn(params, batch, n):
    return jnp.mean(batch @ params) * jnp.sum(take(n))

  with pytest.raises((TypeError, ValueError)) as error:
    take_step(loss_fn, value)
  assert f"If the loss takes the value of argument {name}, as a branch, a dict's key" in notes(
    error
  )
  assert "functools.partial(loss_fn, n=...)" in notes(error)


@pytest.mark.parametrize(
  ("value", "kind"),
  [
    (jnp.bfloat16, "_ScalarMeta"),
    (np.float32, "type"),
    (np.dtype(np.float32), "Float32DType"),
    (np.str_("train"), "str_"),
    (np.datetime64("2020-01-01"), "datetime64"),
    (np.array(["a"]), "ndarray and dtype <U1"),
    (np.array([None]), "ndarray and dtype object"),
  ],
)
def test_what_holds_no_numbers_is_refused(value, kind):
  with pytest.raises(
    TypeError, match=f"^argument 'mode'.* is .*, of type {kind}, and a step takes"
  ):
    take_step(in_mode, value)


def test_numbers_of_every_kind_are_data():
  dtypes = [np.bool_, np.uint8, np.int64, np.complex64, jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn]
  keys = jax.random.split(jax.random.key(0))
  data = [*(np.ones(2, d) for d in dtypes), keys, np.float32(1), 1j, None]
  data.append(np.zeros(2, jax.dtypes.float0))
  shapes = jax.eval_shape(lambda: keys)

  class Holder:
    def __jax_array__(self):
      return jnp.ones(2)

  others = [shapes, Holder()]
  settings.refuse(jax.tree.leaves([data, others]), flagged, (data, others), {})
  jax.jit(lambda data: 0.0)(data)  # which JAX takes too


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
