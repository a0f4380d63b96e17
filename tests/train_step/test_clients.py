"""Training loops of other projects, in small: three steps are those on the whole batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.devices import make_mesh
from support.optimizers import relaxed
from support.samples import more

from optax_accum import make_train_step

RNG = np.random.default_rng(0)
ROWS, WIDTH = 32, 4


def normal(*shape):
  return RNG.normal(size=shape)


PARAMS = {"w": normal(WIDTH, 3), "b": normal(3)}
DATA = [{"x": normal(ROWS, WIDTH), "y": normal(ROWS, 3)} for _ in range(3)]


class Client(NamedTuple):
  """A loss of parameters, a batch, and what the loop remembers of the parameters."""

  loss: Callable[..., jax.Array]
  params: Any = PARAMS
  tx: optax.GradientTransformation = relaxed(optax.adam(0.05))


def outputs(params, x):
  return jnp.tanh(x @ params["w"] + params["b"][None])


def regression(params, batch, memory=None):
  return jnp.mean(jnp.sum((outputs(params, batch["x"]) - batch["y"]) ** 2, axis=-1))


def preference(params, batch, memory):
  """Chosen and rejected in one row, beside a model that does not change."""

  def score(params):
    pair = batch["x"][:, None] + jnp.array([0.0, 1.0])[None, :, None]
    return jnp.sum(jnp.tanh(pair @ params["w"]), axis=-1)

  gain = score(params) - score(PARAMS)
  return -jnp.mean(jax.nn.log_sigmoid(gain[:, 0] - gain[:, 1]))


def waves(params, batch, memory):
  """The gradient of JAX is the conjugate of the direction of ascent."""
  x, y = (jnp.asarray(batch[name], complex) for name in ("x", "y"))
  return jnp.mean(jnp.abs(x @ params - y) ** 2)


def taught(params, batch, memory):
  """A teacher that is an average of the parameters."""
  gap = outputs(params, batch["x"]) - outputs(memory, batch["x"])
  return regression(params, batch) + jnp.mean(gap**2)


def meta(params, batch, memory):
  """A step within the loss, on each row's own data."""

  def of_row(x, y):
    row = {"x": x[None], "y": y[None]}
    inner = jax.grad(regression)(params, row)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
    return regression(after, row)

  return jnp.mean(jax.vmap(of_row)(batch["x"], batch["y"]))


ASCENT = optax.stateless(lambda g, _: jax.tree.map(jnp.conj, g))
CLIENTS = {
  "pairs in a row": Client(preference, {"w": normal(WIDTH, 3)}),
  "complex": Client(waves, normal(WIDTH, 3) + 1j * normal(WIDTH, 3), optax.chain(ASCENT, relaxed(optax.sgd(0.1)))),
  "EMA": Client(taught),
  "MAML": Client(meta),
}  # fmt: skip


def trained(client, make):
  params = memory = jax.tree.map(jnp.asarray, client.params)
  state = client.tx.init(params)
  step = make(client.loss, client.tx)
  for batch in DATA:
    params, state, _ = step(params, state, batch, memory)
    memory = jax.tree.map(lambda m, p: 0.5 * m + 0.5 * p, memory, params)
  return params


@pytest.mark.parametrize("mesh", [more(None), 8])
@pytest.mark.parametrize("name", CLIENTS)
def test_three_steps_are_those_on_the_whole_batch(name, mesh):
  client = CLIENTS[name]

  def in_microbatches(loss, tx):
    over = mesh and make_mesh(mesh)
    return make_train_step(loss, tx, num_microbatches=4, mesh=over, donate=False)

  with jax.enable_x64(True):
    expected = trained(client, oracle.whole_batch_step)
    actual = trained(client, in_microbatches)
    trees.assert_close(jax.device_get(actual), expected, 1e-9)
    # They moved by far more than that.
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), expected, client.params)
    assert min(jax.tree.leaves(moved)) > 1e-3
