"""Losses that need constants of their own: loops from zeros, rules that return zeros, solvers.

Types of values that vary between devices refuse most of them in a `shard_map` (`check_vma=True`).
Each is a function of parameters and a batch that returns the loss of every row, with no word on
devices.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import equinox as eqx
from flax import linen as nn
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.ode import odeint
import jax.numpy as jnp
import numpy as np
import optax

ROWS, TIMES, WIDTH, CLASSES = 32, 4, 8, 4
# Of the 4 rows of each of 8 devices. The first microbatch of the last but one is empty too.
VALID = ((1, 1, 1, 1), (1, 0, 1, 0), (1, 1, 1, 0), (0, 0, 0, 1))
VALID += ((0, 0, 0, 0), (1, 1, 0, 1), (0, 1, 0, 0), (0, 1, 1, 0))


@functools.cache
def make_batch():
  rng = np.random.default_rng(0)
  # Later rows are larger, so that it shows how much each of them counts.
  size = np.linspace(0.5, 1.5, ROWS)
  return {
    "x": rng.normal(size=(ROWS, TIMES, WIDTH)) * size[:, None, None],
    "y": rng.normal(size=ROWS) + size,
    "label": rng.integers(1, CLASSES, (ROWS, 2)),
    "kind": rng.integers(0, 3, ROWS),
    "mask": np.array(VALID, np.float64).reshape(-1),
  }


def all_valid(batch):
  return {**batch, "mask": np.ones(ROWS)}


def partly_valid(batch):
  """What does not count counts a little, so that no device is empty."""
  return {**batch, "mask": np.maximum(batch["mask"], 0.125)}


def valid_rows(batch):
  return jnp.sum(batch["mask"])


def loss_of(each):
  """The mean over valid rows."""

  def loss_fn(params, batch):
    return jnp.sum(each(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])

  return loss_fn


@functools.cache
def plain_params():
  rng = np.random.default_rng(1)
  shapes = {"w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH), "b": (WIDTH,), "v": (WIDTH,)}
  return {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Specimen:
  """A loss of every row, and its parameters."""

  each: Callable[[Any, Any], Any]
  params: Callable[[], Any] = plain_params
  usual_promotion: bool = False  # of a library that needs it


ZOO: dict[str, Specimen] = {}


def add(name, **options):
  def known(each):
    ZOO[name] = Specimen(each, **options)
    return each

  return known


def add_module(name):
  """Of ``make() -> (params, h)``, where ``h(params, x)`` are the features of each row."""

  def known(make):
    made = functools.cache(make)

    def params():
      tree, _ = made()
      return {"module": jax.tree.map(np.asarray, tree), "v": plain_params()["v"]}

    def each(params, batch):
      return error(params, made()[1](params["module"], batch["x"]), batch)

    ZOO[name] = Specimen(each, params, usual_promotion=True)
    return make

  return known


def error(params, h, batch):
  return (h @ params["v"] - batch["y"]) ** 2


def dense(params, x):
  return jnp.tanh(x @ params["w"] + jnp.broadcast_to(params["b"], x.shape))


def in_time(batch):
  return jnp.moveaxis(batch["x"], 1, 0)


def cell(params, h, x):
  return jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"][None])


# Loops of JAX.


@add("scan from zeros")
def scan(params, batch):
  start = jnp.zeros((len(batch["x"]), WIDTH))
  h, _ = lax.scan(lambda h, x: (cell(params, h, x), None), start, in_time(batch))
  return error(params, h, batch)


@add("while_loop")
def while_loop(params, batch):
  """Newton's square root, in as many steps as the rows of a microbatch need."""
  wanted = lax.stop_gradient(jnp.sum(batch["x"] ** 2, (1, 2)))

  def unfinished(state):
    count, root = state
    return (jnp.max(jnp.abs(root**2 - wanted) / wanted) > 1e-15) & (count < 60)

  def newton(state):
    count, root = state
    return count + 1, (root + wanted / root) / 2

  _, root = lax.while_loop(unfinished, newton, (0, jnp.ones(wanted.shape)))
  x = batch["x"] / root[:, None, None]
  return error(params, jnp.mean(dense(params, x), 1), batch)


def of_row(params, row):
  return error(params, jnp.mean(dense(params, row["x"]), 0), row)


@add("cond with a constant")
def cond(params, batch):
  def one(row):
    return lax.cond(row["y"] > 0.5, lambda: of_row(params, row), lambda: jnp.zeros(()))

  return lax.map(one, batch)


@add("dropout in a scan")
def dropout(params, batch):
  """Each time a mask of features, the same for all rows, by a key that the loop carries."""

  def body(carry, x):
    h, key = carry
    key, own = jax.random.split(key)
    keep = jax.random.bernoulli(own, 0.7, (1, WIDTH))
    return (jnp.where(keep, cell(params, h, x) / 0.7, 0), key), None

  start = (jnp.zeros((len(batch["x"]), WIDTH)), jax.random.key(3))
  (h, _), _ = lax.scan(body, start, in_time(batch))
  return error(params, h, batch)


# Derivatives in the loss, and rules of the user's.


@add("gradient penalty")
def gradient_penalty(params, batch):
  def out(x):
    start = jnp.zeros(x.shape[1:])
    h, _ = lax.scan(lambda h, x: (jnp.sin(h + dense(params, x)), None), start, x)
    return jnp.sum(h @ params["v"])

  g = jax.grad(out)(in_time(batch))
  return jnp.sum(g**2, (0, 2)) + error(params, batch["x"][:, 0], batch)


@jax.custom_vjp
def scaled(x, scale):
  return x * scale


def scaled_backward(residuals, g):
  _, scale = residuals
  return g * scale, jnp.zeros(scale.shape)


scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), scaled_backward)


@add("custom_vjp of zeros")
def custom_vjp(params, batch):
  h = jnp.mean(dense(params, batch["x"]), 1)
  return error(params, scaled(h, jnp.broadcast_to(params["b"], h.shape)), batch)


@jax.custom_vjp
def kernel(x, w):
  """A product in Pallas, which starts from zeros."""

  def body(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.zeros(out_ref.shape)
    out_ref[...] += jnp.tanh(x_ref[...] @ w_ref[...])

  shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
  return pl.pallas_call(body, out_shape=shape, interpret=True)(x, w)


def kernel_backward(residuals, g):
  x, w, out = residuals
  g = g * (1 - out**2)
  return g @ w.T, x.T @ g


def kernel_forward(x, w):
  out = kernel(x, w)
  return out, (x, w, out)


kernel.defvjp(kernel_forward, kernel_backward)


@add("Pallas kernel")
def pallas(params, batch):
  return error(params, kernel(jnp.mean(batch["x"], 1), params["w"]), batch)


# A solver, and a loss of sequences.


@add("odeint", usual_promotion=True)
def ode(params, batch):
  def one(params, row):
    field = lambda h, t, params: jnp.tanh(h @ params["w"]) - t * h  # noqa: E731
    times = jnp.array([0.0, 0.5])
    return error(params, odeint(field, row["x"][0], times, params, rtol=1e-10, atol=1e-10)[-1], row)

  return lax.map(functools.partial(one, params), batch)


@add("CTC", usual_promotion=True)
def ctc(params, batch):
  logits = jnp.einsum("rti,ij->rtj", batch["x"], params["w"][:, :CLASSES])
  none = jnp.zeros
  return optax.ctc_loss(
    logits, none(logits.shape[:2]), batch["label"], none(batch["label"].shape), blank_id=0
  )


# Layers of libraries.


def linen_rnn(layer):
  module = nn.RNN(layer(WIDTH, param_dtype=np.float64))
  params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, TIMES, WIDTH)))
  return params, lambda params, x: module.apply(params, x)[:, -1]


add_module("linen LSTM")(functools.partial(linen_rnn, nn.OptimizedLSTMCell))


@add("Equinox, bounded while", usual_promotion=True)
def equinox_bounded(params, batch):
  x = in_time(batch)

  def body(state):
    i, h = state
    return i + 1, cell(params, h, x[i])

  start = (0, jnp.zeros((len(batch["x"]), WIDTH)))
  _, h = eqx.internal.while_loop(
    lambda s: s[0] < TIMES, body, start, kind="bounded", max_steps=TIMES
  )
  return error(params, h, batch)
