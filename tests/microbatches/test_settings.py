"""A setting of a loss, such as `train=True`: fixed by functools.partial, and what says so."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh

from optax_accum import make_train_step

PARAMS, BATCH = jnp.arange(3.0), jnp.ones((8, 3))
MESHES = pytest.mark.parametrize("count", [None, 8])


def flagged(params, batch, train=False, *, layers=1):
  outputs = batch @ params
  for _ in range(layers):
    outputs = 2 * outputs
  return jnp.mean(outputs**2) if train else jnp.max(outputs)


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
  [((np.True_,), {}, ["train"]), ((True,), {"layers": 2}, ["train", "layers"])],
)
def test_a_branch_on_an_argument_names_it(args, kwargs, names, count):
  with pytest.raises(TypeError, match="traced") as error:
    take_step(flagged, *args, count=count, **kwargs)
  fix = ", ".join(f"{name}=..." for name in names)
  assert f"functools.partial(loss_fn, {fix})" in notes(error)


def test_a_branch_where_nothing_is_a_setting_names_nothing():
  def loss_fn(params, batch, targets):
    loss = jnp.mean((batch @ params - targets) ** 2)
    return loss if loss > 0 else -loss

  with pytest.raises(TypeError, match="traced") as error:
    take_step(loss_fn, jnp.zeros(1))
  assert "functools.partial" not in notes(error)
  assert "batch_argnums" not in notes(error)  # nor are shapes the cause


@pytest.mark.parametrize(("take", "value"), [
  (np.sqrt, 4),
  (float, 0.5),
  (lambda n: 1.0 if n["train"] else 2.0, {"rate": 0.5, "train": True}),
])  # fmt: skip
def test_whatever_takes_a_value_names_it(take, value):
  def loss_fn(params, batch, n):
    return jnp.mean(batch @ params) * jnp.sum(take(n))

  with pytest.raises((TypeError, ValueError)) as error:
    take_step(loss_fn, value)
  assert "functools.partial(loss_fn, n=...), and make a step for each value" in notes(error)
