"""Losses that use collectives, and the objective that says what a step must make of each.

The loss of a device is L_d, and its weight w_d. The objective is ``sum_d w_d L_d / sum_d w_d``,
with parameters that all devices share. `jax.vmap` over the rows of the devices, which gives
collectives the same axis name, takes its gradient on one device.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from optax_accum import make_train_step, microbatch_value_and_grad
from support import trees
from support.devices import make_mesh

ROWS, WIDTH = 8, 8  # rows of each device
AXIS = "data"


class Row(NamedTuple):
  """A loss of the table."""

  fun: Any
  typed: bool = True  # whether JAX's types of varying values take it
  alone: bool = False  # whether it sends nothing to other devices


TABLE: dict[str, Row] = {}


def row(name, **options):
  def known(fun):
    TABLE[name] = Row(fun, **options)
    return fun

  return known


@functools.cache
def make_params():
  rng = np.random.default_rng(1)
  shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "v": (WIDTH,)}
  return {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}


def make_batch(valid):
  """So many valid rows on each device."""
  devices, rng = len(valid), np.random.default_rng(0)
  # later devices have other losses
  size = np.linspace(0.5, 1.5, devices * ROWS)
  mask = np.arange(ROWS) < np.array(valid)[:, None]
  return {
    "x": rng.normal(size=(devices * ROWS, WIDTH)) * size[:, None],
    "y": rng.normal(size=devices * ROWS) + size,
    "mask": mask.astype(np.float64).reshape(-1),
  }


def valid_rows(batch):
  return jnp.sum(batch["mask"])


def with_weight(fun):
  """A loss as a total and its weight."""

  def total(params, batch):
    weight = valid_rows(batch)
    return fun(params, batch) * weight, weight

  return total


# What losses are made of. An own mean is finite where no row is valid.


def features(params, batch):
  return jnp.tanh(batch["x"] @ params["w"] + params["b"][None])


def errors(params, h, batch):
  return (h @ params["v"] - batch["y"]) ** 2


def total(each, batch):
  return jnp.sum(each * batch["mask"])


def own_mean(each, batch):
  return total(each, batch) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def plain(params, batch):
  return own_mean(errors(params, features(params, batch), batch), batch)


def total_error(params, batch):
  return total(errors(params, features(params, batch), batch), batch)


def second(params, batch):
  """Another term of a loss."""
  return jnp.mean(jnp.cos(batch["x"] @ params["b"]) * batch["y"])


def of_features(name, **options):
  """A loss on features that `fun` made of the device's own ones."""

  def known(fun):
    def loss(params, batch):
      return own_mean(errors(params, fun(features(params, batch), batch), batch), batch)

    TABLE[name] = Row(loss, **options)
    return fun

  return known


row("no collective", alone=True)(plain)


# In the network.


def standardised(h, batch):
  """Batch norm over valid rows of all devices."""
  mask = batch["mask"][:, None]
  n = lax.psum(jnp.sum(mask), AXIS)
  mean = lax.psum(jnp.sum(h * mask, 0, keepdims=True), AXIS) / n
  var = lax.psum(jnp.sum((h - mean) ** 2 * mask, 0, keepdims=True), AXIS) / n
  return (h - mean) / jnp.sqrt(var + 0.1)


of_features("psum: batch norm")(standardised)


@of_features("psum: batch norm in each layer of a scan")
def scanned(h, batch):
  return lax.scan(lambda h, _: (jnp.sin(standardised(h, batch)), None), h, None, length=2)[0]


@row("psum: in both branches of a cond")
def in_cond(params, batch):
  h = features(params, batch)
  yes = lambda h: h - lax.pmean(jnp.mean(h, 0, keepdims=True), AXIS)  # noqa: E731
  no = lambda h: h * lax.pmean(jnp.mean(h), AXIS)  # noqa: E731
  h = lax.cond(jnp.sum(params["b"] ** 2) > 0, yes, no, h)
  return own_mean(errors(params, h, batch), batch)


@row("psum: advantages")
def advantages(params, batch):
  """Rewards that are standardised over all devices weigh the outputs."""
  n = lax.psum(jnp.sum(batch["mask"]), AXIS)
  mean = lax.psum(total(batch["y"], batch), AXIS) / n
  var = lax.psum(total((batch["y"] - mean) ** 2, batch), AXIS) / n
  return -own_mean(
    (batch["y"] - mean) / jnp.sqrt(var + 0.1) * (features(params, batch) @ params["v"]), batch
  )


@row("psum: a constant", alone=True)
def constant(params, batch):
  return plain(params, batch) / lax.psum(1.0, AXIS)


@of_features("pmax: scaled")
def scaled_by_largest(h, batch):
  return h / lax.pmax(lax.stop_gradient(jnp.max(jnp.abs(h))), AXIS)


def contrastive(z, of_all, first):
  scores = z @ of_all.T
  own = first + jnp.arange(len(z), dtype=jnp.int32)
  chosen = jnp.take_along_axis(scores, own[:, None], axis=1)[:, 0]
  return jax.nn.logsumexp(scores, axis=1) - chosen


@row("all_gather: contrastive")
def gathered(params, batch):
  z = features(params, batch)
  of_all = lax.all_gather(z, AXIS).reshape(-1, WIDTH)
  return own_mean(contrastive(z, of_all, lax.axis_index(AXIS) * len(z)), batch)


def to_next():
  n = lax.axis_size(AXIS)
  return [(i, (i + 1) % n) for i in range(n)]


@of_features("ppermute: features of the neighbour")
def neighbour(h, batch):
  return h + 0.3 * lax.ppermute(h, AXIS, to_next())


@row("psum_scatter: sums of features")
def scattered(params, batch):
  h = features(params, batch)
  part = lax.psum_scatter(jnp.sum(h, axis=0), AXIS, tiled=True)
  return own_mean(errors(params, h, batch), batch) + 0.01 * jnp.sum(part**2)


@row("all_to_all: columns of all rows")
def exchanged(params, batch):
  h = features(params, batch)
  columns = lax.all_to_all(h, AXIS, 1, 0, tiled=True)
  return own_mean(errors(params, h, batch), batch) + jnp.mean(jnp.cumsum(columns, axis=0) ** 2)


@row("axis_index", alone=True)
def by_index(params, batch):
  return plain(params, batch) * (1.0 + lax.axis_index(AXIS).astype(np.float64))


@row("pcast", alone=True)
def cast(params, batch):
  start = jnp.zeros((len(batch["x"]), WIDTH))
  # the axis of a vmap has no types
  if AXIS in jax.sharding.get_abstract_mesh().manual_axes:
    start = lax.pcast(start, AXIS, to="varying")
  h, _ = lax.scan(lambda h, _: (features(params, batch) + h, None), start, None, length=2)
  return own_mean(errors(params, h, batch), batch)


@jax.custom_vjp
def shared(x):
  return x


shared.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, AXIS),))


@row("psum: in the rule of a custom_vjp", typed=False)
def own_rule(params, batch):
  return own_mean(errors(params, shared(features(params, batch)), batch), batch)


# As a denominator, and as a numerator.


@row("mean, weighed by all rows / psum(count)")
def by_frequency(params, batch):
  """A class counts in inverse proportion to its rows: their number on all devices is known."""
  frequent = batch["y"] > 0
  count = lax.psum(jnp.sum(frequent, dtype=jnp.float64), AXIS)
  each = errors(params, features(params, batch), batch)
  return own_mean(each * jnp.where(frequent, 4 * ROWS / (count + 1), 1), batch)


@row("sum / psum(count)")
def over_count(params, batch):
  return total_error(params, batch) / lax.psum(jnp.sum(batch["mask"]), AXIS)


@row("own + sum / psum(count)")
def own_and_over_count(params, batch):
  return second(params, batch) + over_count(params, batch)


@row("psum(sum) / count")
def numerator(params, batch):
  count = jnp.maximum(jnp.sum(batch["mask"]), 1)
  return lax.psum(total_error(params, batch), AXIS) / count


# The whole loss is reduced.


@row("pmean, last")
def mean_last(params, batch):
  return lax.pmean(plain(params, batch), AXIS)


@row("psum, last")
def sum_last(params, batch):
  return lax.psum(plain(params, batch), AXIS)


@row("psum(sum) / psum(count)")
def sum_over_sum(params, batch):
  count = lax.psum(jnp.sum(batch["mask"]), AXIS)
  return lax.psum(total_error(params, batch), AXIS) / count


@row("pmean + own penalty")
def mean_and_own_penalty(params, batch):
  """To types the parameters vary, and so does the sum. But each device has the same ones."""
  return lax.pmean(plain(params, batch), AXIS) + 0.1 * jnp.sum(params["w"] ** 2)


@row("pmean, last, in a cond")
def mean_in_cond(params, batch):
  mean = lambda x: lax.pmean(x, AXIS)  # noqa: E731
  most = lambda x: lax.psum(x, AXIS)  # noqa: E731
  return lax.cond(batch["y"].shape[0] > jnp.zeros(()), mean, most, plain(params, batch))


@row("pmean, last, in a vmap", typed=False)  # which JAX 0.8.2 cannot
def mean_in_vmap(params, batch):
  each = errors(params, features(params, batch), batch)
  return jnp.sum(jax.vmap(lambda x: lax.pmean(x, AXIS))(each))


# Terms of all devices beside own ones.


@row("own + pmean(aux)")
def own_and_mean(params, batch):
  return plain(params, batch) + 0.1 * lax.pmean(second(params, batch), AXIS)


@row("own - pmean(own) squared")
def spread(params, batch):
  own = plain(params, batch)
  return own + (own - lax.pmean(own, AXIS)) ** 2


@row("own + load balance")
def load_balance(params, batch):
  h = features(params, batch)
  p = jax.nn.softmax(h)
  chosen = lax.stop_gradient(jax.nn.one_hot(jnp.argmax(p, -1), WIDTH, dtype=p.dtype))
  shares = lax.pmean(jnp.mean(chosen, 0), AXIS), lax.pmean(jnp.mean(p, 0), AXIS)
  return own_mean(errors(params, h, batch), batch) + WIDTH * jnp.sum(shares[0] * shares[1])


# Under a derivative within the loss.


@row("a gradient by inputs, of a centred network")
def inner_gradient(params, batch):
  def out(x):
    h = features(params, {**batch, "x": x})
    h = h - lax.pmean(jnp.mean(h, 0, keepdims=True), AXIS)
    return jnp.sum(jnp.sin(h @ params["v"]))

  return own_mean(jnp.sum(jax.grad(out)(batch["x"]) ** 2, -1), batch)


@row("a gradient by inputs, of a mean over devices", typed=False)
def inner_gradient_of_mean(params, batch):
  """Where values have types, JAX gives a part of what it gives where they have none."""

  def out(x):
    return lax.pmean(jnp.sum(features(params, {**batch, "x": x}) @ params["v"]), AXIS)

  return own_mean(jnp.sum(jax.grad(out)(batch["x"]) ** 2, -1), batch)


@row("an inner step by mean gradients")
def inner_step(params, batch):
  inner = jax.grad(plain)(params, batch)
  inner = jax.tree.map(lambda w, g: w - 0.1 * lax.pmean(g, AXIS), params, inner)
  return plain(inner, batch)


@row("a Jacobian of a centred network")
def inner_jacobian(params, batch):
  def out(b):
    h = features({**params, "b": b}, batch)
    return jnp.mean(h - lax.pmean(jnp.mean(h, 0, keepdims=True), AXIS), 0) * params["v"]

  return plain(params, batch) + jnp.sum(jax.jacfwd(out)(params["b"]) ** 2)


# The objective, and the steps.


def microbatches(batch, devices, num_microbatches=None, microbatch_size=None):
  """The microbatches, each with a first axis of devices. A size counts rows of one device."""
  of_devices = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)
  size = microbatch_size or ROWS // num_microbatches
  full = ROWS // size

  def rows(index):
    return jax.tree.map(lambda x: x[:, index], of_devices)

  tail = [rows(slice(full * size, None))] if ROWS % size else []
  return [rows(slice(i, full * size, full)) for i in range(full)] + tail


@functools.partial(jax.jit, static_argnums=0)
def objective_and_grad(loss, params, batch, weights):
  """``sum_d w_d L_d`` of one microbatch, and its gradient."""

  def objective(params):
    return jnp.sum(weights * jax.vmap(functools.partial(loss, params), axis_name=AXIS)(batch))

  return jax.value_and_grad(objective)(params)


def expected(loss, params, batch, devices, weighs=True, alone=False, **split):
  """The gradient and the loss of the objective over all microbatches, without those with a NaN.

  The microbatch of a device that has a NaN is left out `alone`, or with those of all devices.
  """
  held = None
  for part in microbatches(batch, devices, **split):
    rows = np.ones_like(part["mask"])
    weights = np.sum(part["mask"] if weighs else rows, axis=1)
    spoiled = np.isnan(part["x"]).any((1, 2))
    if spoiled.any() and not alone:
      continue
    part["x"] = np.where(spoiled[:, None, None], 0, part["x"])
    weights = np.where(spoiled, 0, weights)
    new = (*objective_and_grad(loss, params, part, weights), weights.sum())
    held = new if held is None else jax.tree.map(np.add, held, new)
  value, grads, weight = jax.device_get(held)
  return jax.tree.map(lambda x: x / weight, (grads, value))


# How the library is called: a step over a mesh, or its gradients in a `shard_map`.
ENTRIES = ("mesh", "shard_map, typed", "shard_map, untyped")


def gradient_function(loss, entry, devices, weighs=True, microbatch_size=None, **options):
  """A function of parameters and a batch that gives the gradient and the loss, by the library."""
  mesh = make_mesh(devices)
  if options.get("has_weight"):
    loss = with_weight(loss)
  elif weighs:
    options["weight_fn"] = valid_rows
  if entry == "mesh":
    tx, size = optax.sgd(1.0), microbatch_size and microbatch_size * devices
    step = make_train_step(loss, tx, mesh=mesh, microbatch_size=size, donate=False, **options)

    def by_step(params, batch):
      new, _, metrics = step(params, tx.init(params), batch)
      return jax.tree.map(lambda x, y: np.asarray(x - y), params, new), np.asarray(metrics["loss"])

    return by_step

  run = microbatch_value_and_grad(loss, microbatch_size=microbatch_size, axis_name=AXIS, **options)

  def on_device(params, batch):
    loss, grads, *_ = run(params, batch)
    return grads, loss

  mapped = jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(P(), P(AXIS)),
    out_specs=P(),
    check_vma=entry == "shard_map, typed",
  )
  jitted = jax.jit(mapped)
  return lambda params, batch: jax.device_get(jitted(params, batch))


def error_of(actual, wanted):
  """The largest error, relative to the largest number."""
  most = max(float(np.max(np.abs(x))) for x in jax.tree.leaves(wanted))
  if most < 1e-25:  # zero, but for rounding
    most = 1.0
  difference = trees.largest_difference(actual, wanted)
  return difference / most if math.isfinite(difference) else math.inf


# Loops from constants, which `jax.shard_map` refuses where values have types.


def looped(name, params, x):
  """The features `x` of rows, after a loop of this name."""
  zeros = jnp.zeros(x.shape)
  if name == "scan":
    return lax.scan(lambda h, _: (jnp.sin(h + x * params["b"][None]), None), zeros, None, length=2)[
      0
    ]
  if name == "fori_loop":
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ params["w"] + x), zeros)
  if name == "while_loop":  # in as many steps as the rows of this device need
    most = jnp.max(jnp.abs(lax.stop_gradient(x)))
    unfinished = lambda state: (state[1] < most) & (state[0] < 20)  # noqa: E731
    grow = lambda state: (state[0] + 1, state[1] + 0.5)  # noqa: E731
    steps, _ = lax.while_loop(unfinished, grow, (0, jnp.zeros(())))
    return jnp.cos(x * params["b"][None]) + 0.0 * steps.astype(x.dtype)
  if name == "cond":
    yes, no = (lambda row: jnp.sin(row @ params["w"])), lambda row: jnp.zeros(row.shape)
    return lax.map(lambda row: lax.cond(row[0] <= 0, no, yes, row), x)
  return x
