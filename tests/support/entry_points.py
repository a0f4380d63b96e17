"""A draw's way into the library: a train step, a gradient, or microbatches one by one."""

import functools

from flax import linen as nn
from flax.training.train_state import TrainState
import jax
import numpy as np
import optax

from optax_accum import accumulate, make_train_step, microbatch_value_and_grad
from optax_accum.flax import linen_train_step
from support.model import Model
from support.optimizers import DRAWN, GROUPS, mini_step, relaxed


class Training:
  """A draw's optimizer, and `call`, which runs one batch (of a device, where `axis_name` is).

  It goes from ``(params, state, carry, batch, key, flush)`` to ``(params, state, carry, metrics)``.
  """

  def __init__(self, draw, mesh):
    self.draw, self.mesh, self.model = draw, mesh, Model(draw)
    inner = relaxed(DRAWN[draw.optimizer]())
    self.tx = _wrapped(draw, inner) if draw.accumulates else inner

  @functools.cached_property
  def call(self):
    if self.draw.streams:
      return self.stream
    return {"gradient": self.gradient, "linen": self.linen}.get(self.draw.entry, self.step)

  @functools.cached_property
  def train_step(self):
    draw, options = self.draw, self.model.options()
    if draw.place == "mesh":
      options["mesh"] = self.mesh
      if "fsdp" in draw.mesh:
        options["data_axis"] = ("data", "fsdp")
    if draw.entry == "linen":
      return linen_train_step(self.variables_loss, donate=draw.donate, **options)
    return make_train_step(self.model.loss, self.tx, donate=draw.donate, **options)

  def variables_loss(self, variables, batch, rngs):
    return self.model.loss(nn.unbox(variables["params"]), batch)

  def step(self, params, state, carry, batch, key, flush):
    if self.draw.arrives:
      return self.two_calls(params, state, carry, batch, key)
    args, kwargs = self.model.arguments(batch, carry, key)
    params, state, *new_carry, metrics = self.train_step(params, state, *args, **kwargs)
    return params, state, new_carry[0] if new_carry else carry, metrics

  def two_calls(self, params, state, carry, batch, key):
    """The step of microbatches that arrive in two calls, of one cycle or of two."""
    step, carried = self.train_step, [carry] if self.draw.carry else []
    cycle = step.begin(params, *carried)
    for part in _parts(self.draw, batch):
      args, kwargs = self.model.arguments(part, carry, key)
      args = [x for x in args if x is not carry]
      if self.draw.arrives == "merged":
        other = step.add(step.begin(params, *carried), params, *args, **kwargs)
        cycle = step.merge(cycle, other)
      else:
        cycle = step.add(cycle, params, *args, **kwargs)
    params, state, *new_carry, metrics = step.finish(params, state, cycle)
    return params, state, new_carry[0] if new_carry else carry, metrics

  def linen(self, params, state, carry, batch, key, flush):
    (batch,), _ = self.model.arguments(batch, carry, key)
    state = TrainState(0, self.model.loss, params, self.tx, state)
    state, metrics = self.train_step(state, batch)
    return state.params, state.opt_state, carry, metrics

  def gradient(self, params, state, carry, batch, key, flush):
    args, kwargs = self.model.arguments(batch, carry, key)
    options = self.model.options()
    has_aux = options.pop("has_aux", False)
    value_and_grad = microbatch_value_and_grad(self.model.loss, has_aux=has_aux, **options)
    value, grads, *stats = value_and_grad(params, *args, **kwargs)
    metrics = stats[0]._asdict() if stats else {}
    if self.draw.carry:
      value, (carry, aux) = value
      metrics |= {} if aux is None else {"aux": aux}
    elif has_aux:
      value, metrics["aux"] = value
    updates, state = self.tx.update(grads, state, params, value=value)
    return optax.apply_updates(params, updates), state, carry, {"loss": value, **metrics}

  def stream(self, params, state, carry, batch, key, flush):
    given = params
    if self.draw.place == "shard_map":
      given = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
    value, grads = jax.value_and_grad(self.model.loss)(given, batch)
    extra_args = {"flush": flush} if self.draw.flush else {}
    if self.draw.weights != "none":
      extra_args["weight"] = self.stream_weight(batch)
    if self.draw.optimizer == "polyak":
      extra_args["value"] = value
    take = mini_step(self.tx, self.draw.entry)
    return *take(params, state, grads, **extra_args), carry, {}

  def stream_weight(self, batch):
    weight = self.model.weight(batch)
    return weight.item() if self.draw.loop == "python" else weight


def _parts(draw, batch):
  """The batch in two, each with some of the microbatches that each device has of it."""
  rows = np.arange(draw.rows).reshape(draw.parts, -1)
  size = draw.full_size // draw.parts
  full = rows.shape[1] // size
  each = rows[:, : full * size].reshape(draw.parts, size, full)
  first, second = (x.reshape(draw.parts, -1) for x in np.split(each, [(full + 1) // 2], axis=2))
  second = np.concatenate([second, rows[:, full * size :]], axis=1)
  return [jax.tree.map(lambda x, of=of: x[of.ravel()], batch) for of in (first, second) if of.size]


def _wrapped(draw, inner):
  """`accumulate` around an optimizer, on its own or in a wrapper."""
  options = {"reduction": draw.reduction, "differentiable": draw.differentiable}
  if draw.accumulator_dtype != "default":
    options["accumulator_dtype"] = draw.accumulator_dtype
  if draw.streams:
    options["skip_fn"] = optax.skip_not_finite if draw.nan else None
    options["axis_name"] = "data" if draw.local else None
  every_k = (lambda step: 1 + step % 3) if draw.every_k == "schedule" else draw.every_k
  tx = accumulate(inner, every_k, **options)
  if draw.wrap == "chain":
    return optax.chain(optax.identity(), tx)
  if draw.wrap == "partition":  # an accumulation for each group
    return optax.partition({"a": tx, "s": tx}, GROUPS)
  return tx
