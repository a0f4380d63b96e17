"""`skip_nonfinite`: what is left out counts nowhere, whatever in it is not a number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh
from support.samples import more

from optax_accum import make_train_step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 3))
P = np.ones(3)


def over(mesh):
  return {"mesh": None if mesh is None else make_mesh(mesh), "donate": False}


def squares(p, x):
  return jnp.sum((x @ p) ** 2)


def total_and_weight(p, batch):
  return squares(p, batch["x"]), jnp.sum(batch["m"])


def mean(p, batch):
  return squares(p, batch["x"]) / len(batch["x"])


@pytest.mark.parametrize(("bad", "told_by", "mesh"), [
  (np.nan, "has_weight", 8),
  (np.inf, "weight_fn", None),
  (-50.0, "weight_fn", 8),
  more(np.inf, "has_weight", None),
  more(-50.0, "has_weight", None),
])  # fmt: skip
def test_a_microbatch_whose_weight_is_no_count_is_left_out(bad, told_by, mesh):
  weights = np.ones(32)
  # Of one of two microbatches, of the device that has it: 16 rows, or 2.
  devices = mesh or 1
  rows = np.arange(32).reshape(devices, -1)[0]
  weights[rows[1]] = bad
  left_out = rows[1::2]
  kept = np.delete(X, left_out, axis=0)
  with jax.enable_x64(True):
    options = {"has_weight": True}
    loss = total_and_weight
    if told_by == "weight_fn":
      options = {"weight_fn": lambda batch: jnp.sum(batch["m"])}
      loss = mean
    tx = optax.sgd(0.1)
    step = make_train_step(
      loss, tx, num_microbatches=2, skip_nonfinite=True, **options, **over(mesh)
    )
    new, _, metrics = step(P, tx.init(P), {"x": X, "m": weights})
    expected = P - 0.1 * jax.grad(squares)(P, kept) / len(kept)
  np.testing.assert_allclose(new, expected, rtol=1e-12)
  assert metrics["stepped"]
  assert int(metrics["skipped_microbatches"]) == 1
  assert float(metrics["total_weight"]) == len(kept)


class Seen(NamedTuple):
  value: jax.Array


def asks_at(factor):
  """An optimizer that asks for the loss at other parameters."""

  def update(grads, state, params, *, value_fn, **_):
    return grads, Seen(value_fn(factor * params))

  init = lambda params: Seen(jnp.zeros(()))  # noqa: E731
  return optax.GradientTransformationExtraArgs(init, update)


def importance(p, x):
  """Weights by the current model, without a gradient."""
  q = jax.lax.stop_gradient(jax.nn.sigmoid(3 * x @ p))
  return jnp.sum(q * (x @ p - 1) ** 2), jnp.sum(q)


@pytest.mark.parametrize(
  ("spoilt", "mesh"), [(True, 8), (False, None), more(False, 8), more(True, None)]
)
def test_other_parameters_have_weights_of_their_own(spoilt, mesh):
  """What was kept says which microbatches were left out, and nothing else."""
  x = X.copy()
  rows = np.arange(32).reshape(mesh or 1, -1)[0]
  kept = np.ones(32, bool)
  if spoilt:
    x[rows[1]] = np.nan
    kept[rows[1::2]] = False
  with jax.enable_x64(True):
    tx = asks_at(2.0)
    step = make_train_step(
      importance, tx, num_microbatches=2, has_weight=True, skip_nonfinite=True, **over(mesh)
    )
    _, seen, metrics = step(P, tx.init(P), x)
    total, weight = map(float, importance(2 * P, x[kept]))
    old = float(importance(P, x[kept])[1])
    np.testing.assert_allclose(seen.value, total / weight, rtol=1e-12)
    # The weights at the parameters of the gradient are others
    assert abs(old - weight) > 1e-4 * weight
  assert int(metrics["skipped_microbatches"]) == spoilt
