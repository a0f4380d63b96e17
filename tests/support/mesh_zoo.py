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
from flax import nnx
import haiku as hk
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
  shapes = {
    "w": (WIDTH, WIDTH),
    "u": (WIDTH, WIDTH),
    "b": (WIDTH,),
    "v": (WIDTH,),
  }
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
      return {
        "module": jax.tree.map(np.asarray, tree),
        "v": plain_params()["v"],
      }

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


def of_rows(fun):
  """A loss of each row from that of one."""

  def each(params, batch):
    return jax.vmap(fun, in_axes=(None, 0))(params, batch)

  return each


# Loops of JAX.


@add("scan from zeros")
def scan(params, batch):
  start = jnp.zeros((len(batch["x"]), WIDTH))
  h, _ = lax.scan(
    lambda h, x: (cell(params, h, x), None), start, in_time(batch)
  )
  return error(params, h, batch)


@add("scan that counts and stacks")
def counting_scan(params, batch):
  def body(carry, x):
    h, count = carry
    h = cell(params, h, x) / (1 + count).astype(x.dtype)
    return (h, count + 1), (h, jnp.ones(()))

  start = (jnp.zeros((len(batch["x"]), WIDTH)), jnp.int32(0))
  _, (stacked, ones) = lax.scan(body, start, in_time(batch), reverse=True)
  return error(params, jnp.sum(stacked, 0) / jnp.sum(ones), batch)


@add("scan over rows")
def scan_over_rows(params, batch):
  """A sum that is added up row by row, from zero."""

  def body(total, row):
    of_row = error(params, jnp.mean(dense(params, row["x"]), 0), row)
    return total + of_row * row["mask"], None

  total, _ = lax.scan(body, jnp.zeros(()), batch)
  return jnp.broadcast_to(total / jnp.sum(batch["mask"]), batch["mask"].shape)


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


@add("fori_loop")
def fori_loop(params, batch):
  x = in_time(batch)
  start = jnp.zeros((len(batch["x"]), WIDTH))
  return error(
    params,
    lax.fori_loop(0, TIMES, lambda i, h: cell(params, h, x[i]), start),
    batch,
  )


def of_row(params, row):
  return error(params, jnp.mean(dense(params, row["x"]), 0), row)


@add("map")
def mapped(params, batch):
  return lax.map(functools.partial(of_row, params), batch)


@add("cond with a constant")
def cond(params, batch):
  def one(row):
    return lax.cond(
      row["y"] > 0.5, lambda: of_row(params, row), lambda: jnp.zeros(())
    )

  return lax.map(one, batch)


@add("switch with constants")
def switch(params, batch):
  def one(row):
    branches = [
      lambda: jnp.ones(()),
      lambda: of_row(params, row),
      lambda: jnp.zeros(()),
    ]
    return lax.switch(row["kind"], branches)

  return lax.map(one, batch)


@add("associative_scan")
def associative_scan(params, batch):
  x = in_time(batch)
  decay = jnp.broadcast_to(jax.nn.sigmoid(params["b"]), x.shape)
  first = jnp.zeros((1, *x.shape[1:]))
  decay, x = (
    jnp.concatenate([first + 1, decay]),
    jnp.concatenate([first, x @ params["w"]]),
  )

  def join(a, b):
    return a[0] * b[0], b[0] * a[1] + b[1]

  return error(
    params, jnp.tanh(lax.associative_scan(join, (decay, x))[1][-1]), batch
  )


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


@add("checkpointed scan")
def checkpointed_scan(params, batch):
  @jax.checkpoint
  def body(h, x):
    return cell(params, h, x), None

  start = jnp.zeros((len(batch["x"]), WIDTH))
  return error(params, lax.scan(body, start, in_time(batch))[0], batch)


@add("checkpoint")
def checkpointed(params, batch):
  policy = jax.checkpoint_policies.nothing_saveable

  @functools.partial(jax.checkpoint, policy=policy)
  def features(params, x):
    return lax.fori_loop(
      0, 2, lambda i, h: h + dense(params, x), jnp.zeros(x.shape)
    )

  return error(params, jnp.mean(features(params, batch["x"]), 1), batch)


@add("searchsorted")
def searchsorted(params, batch):
  """By bisection, which is a loop."""
  edges = jnp.sort(params["b"])
  place = jnp.searchsorted(edges, batch["y"], method="scan")
  h = jnp.mean(dense(params, batch["x"]), 1) * params["u"][place % WIDTH]
  return error(params, h, batch)


@add("random.gamma")
def gamma(params, batch):
  """A draw that is rejected until it fits, and its derivative; a key that all rows share."""
  shape = jax.nn.softplus(jnp.mean(batch["x"] @ params["w"], 1)) + 0.5
  draw = jax.vmap(functools.partial(jax.random.gamma, jax.random.key(1)))
  return error(params, draw(shape), batch)


# Derivatives in the loss, and rules of the user's.


@add("vjp of ones")
def vjp_of_ones(params, batch):
  def out(x):
    return jnp.sum(dense(params, x), (1, 2))

  _, backward = jax.vjp(out, batch["x"])
  (g,) = backward(jnp.ones(len(batch["x"])))
  return error(params, jnp.mean(g, 1), batch)


@add("gradient penalty")
def gradient_penalty(params, batch):
  def out(x):
    start = jnp.zeros(x.shape[1:])
    h, _ = lax.scan(
      lambda h, x: (jnp.sin(h + dense(params, x)), None), start, x
    )
    return jnp.sum(h @ params["v"])

  g = jax.grad(out)(in_time(batch))
  return jnp.sum(g**2, (0, 2)) + error(params, batch["x"][:, 0], batch)


@add("jacfwd")
def jacobian(params, batch):
  def one(params, row):
    jacobian = jax.jacfwd(lambda x: dense(params, x))(row["x"][0])
    return jnp.sum(jacobian**2) + of_row(params, row)

  return of_rows(one)(params, batch)


@add("Hessian times vector")
def hessian(params, batch):
  def one(params, row):
    gradient = jax.grad(lambda x: jnp.sum(dense(params, x)))
    _, hvp = jax.jvp(gradient, (row["x"][0],), (jnp.ones(WIDTH),))
    return error(params, hvp, row)

  return of_rows(one)(params, batch)


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


@jax.custom_jvp
def rounded(x, step):
  return jnp.round(x / step) * step


@rounded.defjvp
def rounded_jvp(primals, tangents):
  """Straight through, and zeros for the step."""
  return rounded(*primals), tangents[0] + jnp.zeros(primals[1].shape)


@add("custom_jvp of constants")
def custom_jvp(params, batch):
  h = jnp.mean(dense(params, batch["x"]), 1)
  return error(params, rounded(h, jnp.full(h.shape, 0.125)), batch)


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


@jax.custom_vjp
def of_host(x):
  """Rounded by NumPy, to integers: a callback runs in a thread that may not have float64."""
  like = jax.ShapeDtypeStruct(x.shape, np.int32)
  rounded = lambda x: np.rint(8 * np.asarray(x)).astype(np.int32)  # noqa: E731
  return (
    jax.pure_callback(rounded, like, x, vmap_method="expand_dims").astype(
      x.dtype
    )
    / 8
  )


of_host.defvjp(lambda x: (of_host(x), x), lambda x, g: (g * jnp.cos(x),))


@add("pure_callback")
def callback(params, batch):
  return error(params, of_host(jnp.mean(batch["x"] @ params["w"], 1)), batch)


# Linear algebra and solvers.


def definite(params, batch):
  x = batch["x"]
  return jnp.einsum("rti,rtj->rij", x, x) / TIMES + (
    params["w"] @ params["w"].T + jnp.eye(WIDTH)
  )


@add("Cholesky, triangular solve", usual_promotion=True)
def cholesky(params, batch):
  lower = jnp.linalg.cholesky(definite(params, batch))
  right = jnp.broadcast_to(
    params["b"][None, :, None], (len(batch["x"]), WIDTH, 1)
  )
  solved = lax.linalg.triangular_solve(lower, right, left_side=True, lower=True)
  return error(params, solved[..., 0], batch)


@add("eigh", usual_promotion=True)
def eigh(params, batch):
  values, _ = jnp.linalg.eigh(definite(params, batch))
  return error(params, jnp.log(values), batch)


@add("conjugate gradients", usual_promotion=True)
def conjugate_gradients(params, batch):
  def one(a):
    solved, _ = jax.scipy.sparse.linalg.cg(
      lambda x: a @ x, params["b"], tol=1e-15, maxiter=40
    )
    return solved

  return error(params, jax.vmap(one)(definite(params, batch)), batch)


@add("custom_root")
def custom_root(params, batch):
  """The root of ``x + x**3 = c`` by Newton's method, in a fixed number of steps from zeros."""
  c = jnp.mean(dense(params, batch["x"]), 1)

  def solve(f, start):
    derivative = lambda x: 1 + 3 * x**2  # noqa: E731
    return lax.fori_loop(0, 12, lambda i, x: x - f(x) / derivative(x), start)

  root = lax.custom_root(
    lambda x: x + x**3 - c,
    jnp.zeros(c.shape),
    solve,
    lambda g, y: y / g(jnp.ones(y.shape)),
  )
  return error(params, root, batch)


@add("odeint", usual_promotion=True)
def ode(params, batch):
  def one(params, row):
    field = lambda h, t, params: jnp.tanh(h @ params["w"]) - t * h  # noqa: E731
    times = jnp.array([0.0, 0.5])
    return error(
      params,
      odeint(field, row["x"][0], times, params, rtol=1e-10, atol=1e-10)[-1],
      row,
    )

  return lax.map(functools.partial(one, params), batch)


@add("CTC", usual_promotion=True)
def ctc(params, batch):
  logits = jnp.einsum("rti,ij->rtj", batch["x"], params["w"][:, :CLASSES])
  none = jnp.zeros
  return optax.ctc_loss(
    logits,
    none(logits.shape[:2]),
    batch["label"],
    none(batch["label"].shape),
    blank_id=0,
  )


# What moves numbers about.


@add("top_k and sort")
def top_k(params, batch):
  h = jnp.mean(dense(params, batch["x"]), 1)
  largest, _ = lax.top_k(h * params["b"][None], 3)
  return jnp.sum(largest, -1) + error(params, jnp.sort(h, axis=-1), batch)


@add("cumsum")
def cumsum(params, batch):
  return error(
    params, jnp.mean(jnp.cumsum(dense(params, batch["x"]), 1) ** 2, 1), batch
  )


@add("segment_sum")
def segment_sum(params, batch):
  def one(params, row):
    segments = jnp.concatenate([row["label"], row["label"]])
    sums = jax.ops.segment_sum(dense(params, row["x"]), segments, CLASSES)
    return error(params, jnp.sum(sums**2, 0), row)

  return of_rows(one)(params, batch)


@add("scatter into zeros")
def scatter(params, batch):
  h = jnp.mean(dense(params, batch["x"]), 1)
  here = jnp.arange(len(h))
  out = jnp.zeros((len(h), WIDTH)).at[here, batch["label"][:, 0]].add(h[:, 0])
  return error(params, out.at[:, 0].set(h[:, 1]), batch)


@add("FFT")
def fft(params, batch):
  spectrum = jnp.fft.rfft(batch["x"] @ params["w"], axis=1)
  return error(
    params, jnp.sum(jnp.real(spectrum) ** 2 + jnp.imag(spectrum), 1), batch
  )


# Layers of libraries.


def linen_rnn(layer):
  module = nn.RNN(layer(WIDTH, param_dtype=np.float64))
  params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, TIMES, WIDTH)))
  return params, lambda params, x: module.apply(params, x)[:, -1]


add_module("linen LSTM")(functools.partial(linen_rnn, nn.OptimizedLSTMCell))


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + nn.tanh(nn.Dense(WIDTH, param_dtype=np.float64)(x)), jnp.zeros(
      ()
    )


@add_module("linen, scanned layers under remat")
def linen_layers():
  scanned = nn.scan(
    nn.remat(Layer),
    variable_axes={"params": 0},
    split_rngs={"params": True},
    length=3,
  )
  module = scanned()
  params = jax.jit(module.init, static_argnums=2)(
    jax.random.key(0), jnp.zeros((1, WIDTH)), None
  )
  return params, lambda params, x: module.apply(params, jnp.mean(x, 1), None)[0]


@add_module("nnx LSTM")
def nnx_rnn():
  rngs = nnx.Rngs(0)
  module = nnx.RNN(
    nnx.LSTMCell(WIDTH, WIDTH, param_dtype=np.float64, rngs=rngs)
  )
  graph, params, rest = nnx.split(module, nnx.Param, ...)

  def features(params, x):
    return nnx.merge(graph, params, rest, copy=True)(x)[:, -1]

  return params, features


@add_module("Haiku LSTM")
def haiku_rnn():
  def fun(x):
    lstm = hk.LSTM(WIDTH)
    return hk.dynamic_unroll(
      lstm, jnp.moveaxis(x, 1, 0), lstm.initial_state(len(x))
    )[0][-1]

  transformed = hk.without_apply_rng(hk.transform(fun))
  params = jax.jit(transformed.init)(
    jax.random.key(0), jnp.zeros((1, TIMES, WIDTH))
  )
  return params, transformed.apply


@add_module("Equinox GRU")
def equinox_gru():
  params, rest = eqx.partition(
    eqx.nn.GRUCell(WIDTH, WIDTH, key=jax.random.key(0)), eqx.is_array
  )

  def features(params, x):
    step = eqx.combine(params, rest)
    start = jnp.zeros(WIDTH)
    return jax.vmap(
      lambda x: lax.scan(lambda h, x: (step(x, h), None), start, x)[0]
    )(x)

  return params, features


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


@add("Equinox, error_if", usual_promotion=True)
def equinox_error(params, batch):
  h = jnp.mean(dense(params, batch["x"]), 1)
  h = eqx.error_if(h, jnp.any(jnp.abs(h) > 2), "more than tanh gives")
  return error(params, h, batch)
