"""A small linen model, its `TrainState`, and a weighted batch."""

import functools
from typing import Any

import flax.linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, WIDTH, CLASSES = 24, 6, 3


class TrainState(train_state.TrainState):
  batch_stats: Any = None


class Model(nn.Module):
  norm: str = ""
  rate: float = 0.0

  @nn.compact
  def __call__(self, x, train=True):
    kind = {"param_dtype": x.dtype, "dtype": x.dtype}
    x = nn.Dense(8, **kind)(x)
    if self.norm == "batch":
      x = nn.BatchNorm(use_running_average=not train, momentum=0.9, **kind)(x)
    elif self.norm == "layer":
      x = nn.LayerNorm(**kind)(x)
    x = nn.Dropout(self.rate, deterministic=not train)(nn.tanh(x))
    return nn.Dense(CLASSES, **kind)(x)


class Annotated(nn.Module):
  """Parameters and statistics in flax's boxes, of each kind."""

  def count(self, name, x, axis):
    zeros = nn.with_partitioning(jnp.zeros, (axis,))
    mean = self.variable("batch_stats", name, zeros, x.shape[-1:], x.dtype)
    if not self.is_initializing():
      mean.value = 0.9 * mean.value + 0.1 * jnp.mean(x, 0)

  @nn.compact
  def __call__(self, x, train=True):
    def kernel(name, box, *names, **rules):
      init = box(nn.initializers.normal(0.3), names, **rules)
      return self.param(name, init, (x.shape[-1], 8), x.dtype)

    x = jnp.tanh(x @ kernel("fsdp", nn.with_partitioning, None, "data"))
    x = jnp.tanh(x @ kernel("logical", nn.with_logical_partitioning, "embed", None))
    own = {"rules": (("own", "data"),)}
    x = jnp.tanh(x @ kernel("own", nn.with_logical_partitioning, None, "own", **own))
    x = nn.with_logical_constraint(x, ("rows", None))
    self.count("whole", x, None)
    x = jnp.tanh(x @ kernel("tensor", nn.with_partitioning, None, "model"))
    self.count("spread", x, "model")
    ones = nn.with_logical_partitioning(nn.initializers.ones, ("heads",))
    return x * self.param("heads", ones, x.shape[-1:], x.dtype)


def make_batch(dtype=np.float64):
  rng = np.random.default_rng(0)
  return {
    "x": rng.normal(size=(ROWS, WIDTH)).astype(dtype),
    "y": rng.integers(CLASSES, size=ROWS),
    "weight": rng.integers(0, 3, ROWS).astype(dtype),
  }


@functools.cache
def _variables(model, dtype):
  x = np.zeros((ROWS, WIDTH), dtype)
  init = jax.jit(lambda: model.init(jax.random.key(0), x, train=False))
  return jax.tree.map(np.asarray, init())


def make_state(model, batch, tx=None, freeze=lambda x: x):
  variables = jax.tree.map(jnp.asarray, _variables(model, batch["x"].dtype))
  return TrainState.create(
    apply_fn=model.apply,
    params=freeze(variables["params"]),
    tx=tx or optax.adam(0.1),
    batch_stats=freeze(variables.get("batch_stats", {})),
  )


def mean_loss(logits, batch):
  each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  return jnp.sum(each * batch["weight"]) / jnp.maximum(jnp.sum(batch["weight"]), 1)


def total(batch):
  return jnp.sum(batch["weight"])


def with_weight(loss_fn):
  """A loss that returns its total and its weight where `loss_fn` returns the loss."""

  def pair(model, batch, *rngs):
    out = loss_fn(model, batch, *rngs)
    weight = total(batch)
    if not isinstance(out, tuple):
      return out * weight, weight
    loss, updates = out
    return (loss * weight, weight), updates

  return pair
