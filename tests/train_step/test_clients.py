"""Training loops of other projects, in small: three steps are those on the whole batch."""

from collections.abc import Callable, Mapping
import types
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.devices import make_mesh
from support.optimizers import relaxed

from optax_accum import make_train_step

RNG = np.random.default_rng(0)
ROWS, WIDTH = 32, 4
ADAM = relaxed(optax.adam(0.05))


def normal(*shape):
  return RNG.normal(size=shape)


class Client(NamedTuple):
  """A loss in microbatches, and the same of the whole batch."""

  loss: Callable[..., Any]
  whole: Callable[..., jax.Array]
  params: Any
  batches: list[Any]
  tx: optax.GradientTransformation = ADAM
  options: Mapping[str, Any] = types.MappingProxyType({})
  # Further arguments of a call, of its batch and of what the loop remembers of the parameters.
  further: Callable[..., tuple[Any, ...]] = lambda batch, memory: ()
  arrives: bool = False  # in `add`s of 8 and 24 rows


CLIENTS = {}
PARAMS = {"w": normal(WIDTH, 3), "b": normal(3)}
DATA = [{"x": normal(ROWS, WIDTH), "y": normal(ROWS, 3)} for _ in range(3)]


def outputs(params, x):
  return jnp.tanh(x @ params["w"] + params["b"][(None,) * (x.ndim - 1)])


def errors(params, batch):
  return jnp.sum((outputs(params, batch["x"]) - batch["y"]) ** 2, axis=-1)


# Two terms, each a mean over its own mask: totals of the whole batch are a further argument.
MASKED = [{**batch, "m": RNG.random((ROWS, 2)) < (0.3, 0.8)} for batch in DATA]


def two_terms(params, batch, counts):
  large = jnp.abs(outputs(params, batch["x"])).sum(-1)
  terms = jnp.stack([errors(params, batch), large], axis=1)
  return jnp.sum(jnp.where(batch["m"], terms, 0.0) / counts[None])


def counts_of(batch, memory):
  return (batch["m"].sum(0).astype(float),)


CLIENTS["two denominators"] = Client(
  two_terms, two_terms, PARAMS, MASKED, options={"reduction": "sum"}, further=counts_of
)


# Chosen and rejected in one row, beside a model that does not change.
def preference(params, batch, reference):
  def score(params):
    return outputs(params, batch).sum(-1)

  gain = score(params) - score(reference)
  return -jnp.mean(jax.nn.log_sigmoid(gain[:, 0] - gain[:, 1]))


REFERENCE = {"w": normal(WIDTH, 3), "b": normal(3)}
CLIENTS["pairs in a row"] = Client(
  preference, preference, PARAMS, [normal(ROWS, 2, WIDTH) for _ in range(3)],
  further=lambda batch, memory: (REFERENCE,),
)  # fmt: skip


# The gradient of JAX is the conjugate of the direction of ascent.
def waves(params, batch):
  x, y = (jnp.asarray(batch[name], complex) for name in ("x", "y"))
  return jnp.mean(jnp.abs(x @ params - y) ** 2)


CLIENTS["complex"] = Client(
  waves, waves, normal(WIDTH, 3) + 1j * normal(WIDTH, 3), DATA,
  tx=optax.chain(optax.stateless(lambda g, _: jax.tree.map(jnp.conj, g)), relaxed(optax.sgd(0.1))),
)  # fmt: skip


def regression(params, batch):
  return jnp.mean(errors(params, batch))


CLIENTS["LBFGS"] = Client(regression, regression, PARAMS, DATA[:1] * 3, tx=relaxed(optax.lbfgs()))


# A teacher that is an average of the parameters.
def taught(params, batch, teacher):
  gap = outputs(params, batch["x"]) - outputs(teacher, batch["x"])
  return regression(params, batch) + jnp.mean(gap**2)


CLIENTS["EMA"] = Client(taught, taught, PARAMS, DATA, further=lambda batch, memory: (memory,))


# Sequences of several lengths, with a weight, which arrive.
SPEECH = [
  {
    "x": normal(ROWS, 6, WIDTH),
    "logit": (np.arange(6)[None] >= RNG.integers(4, 7, (ROWS, 1))).astype(float),
    "labels": RNG.integers(1, 3, (ROWS, 2)),
    "label": (np.arange(2)[None] >= RNG.integers(1, 3, (ROWS, 1))).astype(float),
  }
  for _ in range(3)
]


def ctc(params, batch):
  logits = outputs(params, batch["x"])
  given = batch["logit"], batch["labels"], batch["label"]
  # Optax promotes.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    losses = optax.ctc_loss(logits, *given)
  return jnp.sum(losses), jnp.sum(1 - batch["label"])


def ctc_whole(params, batch):
  total, weight = ctc(params, batch)
  return total / weight


CLIENTS["CTC"] = Client(ctc, ctc_whole, PARAMS, SPEECH, options={"has_weight": True}, arrives=True)


# The residual of a differential equation: gradients by the inputs, within that of the loss.
def residual(params, batch):
  def solution(x):
    return outputs(params, x[None]).sum()

  slope = jax.vmap(jax.grad(solution))(batch["x"])
  return jnp.mean(jnp.sum(slope**2, axis=-1) + errors(params, batch))


CLIENTS["grad within grad"] = Client(residual, residual, PARAMS, DATA)


def meta(params, batch):
  """A step within the loss, on each row's own data."""

  def of_row(x, y):
    row = {"x": x[None], "y": y[None]}
    inner = jax.grad(regression)(params, row)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
    return regression(after, row)

  return jnp.mean(jax.vmap(of_row)(batch["x"], batch["y"]))


CLIENTS["MAML"] = Client(meta, meta, PARAMS, DATA)


# Each device sees the rows of all others, as they come around.
def around_a_ring(params, batch):
  queries = outputs(params, batch["x"])
  keys = batch["y"] * params["b"][None]
  own = jnp.sum(queries * keys, axis=1)
  devices = lax.axis_size("data")
  around = [(i, (i + 1) % devices) for i in range(devices)]
  everyone = jnp.zeros(len(queries))
  for _ in range(devices):
    everyone += jnp.exp(queries @ keys.T).sum(1)
    keys = lax.ppermute(keys, "data", around)
  return jnp.mean(jnp.log(everyone) - own)


def contrastive(params, batch):
  keys = batch["y"] * params["b"][None]
  logits = outputs(params, batch["x"]) @ keys.T
  return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))


CLIENTS["a ring"] = Client(
  around_a_ring, contrastive, PARAMS, DATA, options={"num_microbatches": 1}
)


def trained(client, take):
  params = jax.tree.map(jnp.asarray, client.params)
  state = client.tx.init(params)
  memory = params
  for batch in client.batches:
    further = client.further(batch, memory)
    params, state = take(params, state, batch, *further)
    memory = jax.tree.map(lambda m, p: 0.5 * m + 0.5 * p, memory, params)
  return params


def whole_batch(client):
  tx = optax.with_extra_args_support(client.tx)

  @jax.jit
  def take(params, state, batch, *further):
    def value_fn(params):
      return client.whole(params, batch, *further)

    value, grads = jax.value_and_grad(value_fn)(params)
    extra = {"value": value, "grad": grads, "value_fn": value_fn}
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  return take


def in_microbatches(client, mesh):
  options = {"num_microbatches": 4, **client.options}
  if client.arrives:
    options["num_microbatches"] = 1
  step = make_train_step(client.loss, client.tx, mesh=mesh, donate=False, **options)

  def take(params, state, batch, *further):
    if not client.arrives:
      return step(params, state, batch, *further)[:2]
    cycle = step.begin(params)
    for rows in (slice(8), slice(8, None)):
      part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
      cycle = step.add(cycle, params, part, *further)
    return step.finish(params, state, cycle)[:2]

  return take


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", CLIENTS)
def test_three_steps_are_those_on_the_whole_batch(name, devices):
  client = CLIENTS[name]
  # A ring needs a name of its axis, if only of one device.
  mesh = None
  if devices > 1 or name == "a ring":
    mesh = make_mesh(devices)
  with jax.enable_x64(True):
    expected = trained(client, whole_batch(client))
    actual = trained(client, in_microbatches(client, mesh))
    trees.assert_close(jax.device_get(actual), expected, 1e-9)
    # They moved by far more than that.
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), expected, client.params)
    assert min(jax.tree.leaves(moved)) > 1e-3
