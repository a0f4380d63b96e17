"""A small language model, whose layers are sharded over further axes than that of the data."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from support import oracle
from support.optimizers import clipped_adamw

ROWS, WIDTH, WORDS = 32, 8, 24
AXES = ("replica", "fsdp", "model")
BOTH = P(AXES[:2])


def init_params():
  rng = np.random.default_rng(0)
  layers = {"w": rng.normal(size=(3, WIDTH, WIDTH)) / 3, "b": rng.normal(size=(3, WIDTH))}
  table, head = rng.normal(size=(WORDS, WIDTH)), rng.normal(size=(WIDTH, WORDS))
  return {"table": table, "layers": layers, "head": head}


def make_batch(empty=()):
  """Padded text, whose last rows have few valid words."""
  rng = np.random.default_rng(1)
  words = rng.integers(0, WORDS, size=(ROWS, 6))
  mask = (rng.random((ROWS, 5)) < np.linspace(1.0, 0.2, ROWS)[:, None]).astype(np.float64)
  mask[list(empty)] = 0
  return {"words": words, "mask": mask}


def losses_of(params, batch, gathers=True):
  """Without gathers it works beside a third automatic axis too, where XLA ends the process."""
  one_hot = functools.partial(jax.nn.one_hot, num_classes=WORDS, dtype=params["table"].dtype)
  words = batch["words"][:, :-1]
  h = params["table"][words] if gathers else one_hot(words) @ params["table"]

  @jax.checkpoint
  def layer(h, at):
    return h + jnp.tanh(h @ at["w"] + at["b"][None, None]), None

  h, _ = jax.lax.scan(layer, h, params["layers"])
  logits, labels = h @ params["head"], batch["words"][:, 1:]
  if not gathers:
    return optax.softmax_cross_entropy(logits, one_hot(labels))
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def loss_fn(params, batch):
  return jnp.sum(losses_of(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def without_gathers(params, batch):
  return jnp.sum(losses_of(params, batch, False) * batch["mask"]) / jnp.sum(batch["mask"])


def valid(batch):
  return jnp.sum(batch["mask"])


def over_fsdp(tree, mesh):
  """The last dimension over "fsdp", and the one before over "model", as far as there are such."""

  def spec(x):
    last = ["model" if n % 2 == 0 else None for n in x.shape[-2:-1]] + ["fsdp"]
    dims = [None] * (x.ndim - len(last)) + last
    return P(*(name if name in mesh.axis_names else None for name in dims))

  return jax.tree.map(spec, tree)


@functools.cache
def whole_batch(empty=()):
  step, tx = oracle.whole_batch_step(loss_fn, clipped_adamw()), clipped_adamw()
  params, _, loss = oracle.take_steps(step, tx, init_params(), [make_batch(empty)] * 3)
  return params, loss
