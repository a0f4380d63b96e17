"""The whole batch's steps in NumPy and float64: what any way to accumulate must come to.

The model is ``scale * tanh(x @ w + b) + offset`` for each row, where the offset is the noise and
the threaded mean of the row's microbatch. What is padding or left out is not in the batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from support import cycles
from support.cycles import sum_scale
from support.optimizers import DRAWN, GROUPS, relaxed


def rows_of(draw, call, carry, chosen):
  """The rows of some of a call's microbatches as one batch, with each row's offset.

  Where each row was run (call, device, microbatch) is there too, for wrong answers alone.
  """
  offsets, _ = offsets_and_carries(draw, call, carry)
  parts = []
  for m, offset in zip(call.microbatches, offsets, strict=True):
    where = np.tile([call.number, m.device, m.index], (len(m.rows), 1))
    part = {"offset": np.tile(offset, (len(m.rows), 1)), "where": where}
    parts += [part | {k: x[m.rows] for k, x in call.batch.items()}] * chosen(m)
  return join(parts)


def join(batches):
  """Batches as one; `None` is a batch without rows."""
  batches = [b for b in batches if b is not None]
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]} if batches else None


def predict(params, batch, tanh=np.tanh):
  return params["scale"] * tanh(batch["x"] @ params["w"] + params["b"]) + batch["offset"]


def loss_of(draw, params, batch, xp=np):
  """The loss of one whole batch."""
  further = 1.0 if draw.further == "none" else cycles.FURTHER
  error = further * xp.abs(predict(params, batch, xp.tanh) - batch["y"]) ** 2
  total = xp.sum(error * batch["mask"])
  return total / xp.sum(batch["mask"]) if draw.reduction == "mean" else total * sum_scale(draw)


def gradient(draw, params, batch):
  """The derivative of `loss_of`, written out. Complex ones have JAX's sign: dL/dx - i dL/dy."""
  t = np.tanh(batch["x"] @ params["w"] + params["b"])
  scale = 1 / batch["mask"].sum() if draw.reduction == "mean" else sum_scale(draw)
  further = 1.0 if draw.further == "none" else cycles.FURTHER
  d_out = 2 * further * scale * batch["mask"] * np.conj(predict(params, batch) - batch["y"])
  d_z = d_out * params["scale"] * (1 - t**2)
  d_scale = np.sum(d_out * t).real
  return {"w": batch["x"].T @ d_z, "b": d_z.sum(0), "scale": d_scale}


def offsets_and_carries(draw, call, carry):
  """The offset of each microbatch, and the carry that each device ends with.

  A device threads its carry through its microbatches in order; one that is left out keeps it.
  """
  held, offsets = {}, []
  for m in call.microbatches:
    offset = np.zeros(cycles.OUT)
    if draw.key != "none":
      of_device = 1 + max(m.index for m in call.microbatches)
      key = jax.random.fold_in(cycles.key_of(draw, call), m.device * of_device + m.index)
      offset = offset + 0.25 * np.asarray(jax.random.uniform(key, (cycles.OUT,), jnp.float32))
    if draw.carry:
      mean, seen = held.get(m.device, (carry["mean"], carry["seen"]))
      offset = offset + mean
      x = call.batch["x"][m.rows, 0].astype(np.float64)
      new = (0.5 * mean + 0.5 * x.mean(), seen + len(m.rows)) if m.counts else (mean, seen)
      held[m.device] = new
    offsets.append(offset)
  return offsets, held


def next_carry(draw, call, carry):
  """Over devices, whose means are weighted by what each counted."""
  if not draw.carry:
    return carry
  _, held = offsets_and_carries(draw, call, carry)
  weights = [
    sum(weight_of(call, m) for m in call.microbatches if m.device == device and m.counts)
    for device in held
  ]
  if not any(weights):
    return carry
  over_devices = {
    "mean": lambda start, ends: np.average(ends, weights=weights),
    "max": lambda start, ends: max(ends),
    "min": lambda start, ends: min(ends),
    "sum": lambda start, ends: start + sum(end - start for end in ends),
  }
  names = carry_reductions(draw)
  each = zip(carry, zip(*held.values(), strict=True), strict=True)
  return {key: over_devices[names[key]](carry[key], ends) for key, ends in each}


def carry_reductions(draw):
  """What `carry_reduction` is. No mean is that of integers."""
  name = draw.carry_reduction
  return {"mean": name, "seen": "max" if name == "mean" else name}


def weight_of(call, m):
  return call.batch["mask"][m.rows].astype(np.float64).sum()


def aux_of(draw, call, params, carry):
  """Every reduction of what the loss function gives beside the loss."""
  counted = [m for m in call.microbatches if m.counts]
  if not counted:
    return {}
  every = rows_of(draw, call, carry, lambda m: True)
  size = np.abs(predict(params, every))  # in the order of the microbatches
  order = np.concatenate([m.rows for m in call.microbatches])
  at = {id(m): np.isin(order, m.rows) for m in call.microbatches}
  weights = [weight_of(call, m) for m in counted]
  means = [np.average(size[at[id(m)]], weights=call.batch["mask"][m.rows]) for m in counted]
  last = max(counted, key=lambda m: (m.device, m.index))
  return {
    "aux mean": np.average(means, weights=weights),
    "aux sum": sum((call.batch["x"][m.rows, 0] > 0).sum() for m in counted),
    "aux max": max(size[at[id(m)]].max() for m in counted),
    "aux min": min(size[at[id(m)]].min() for m in counted),
    "aux last": call.batch["y"][last.rows].real.astype(np.float64).mean(),
    "aux stack": np.array([size[at[id(m)]].mean() for m in call.microbatches]),
    "aux concat": size[np.argsort(order)],
    "aux constant": 0.5,
  }


def optimizer_of(name, by_group):
  """An optimizer by its name, or one for each group of parameters."""
  inner = DRAWN[name]()
  return relaxed(optax.partition({"a": inner, "s": inner}, GROUPS) if by_group else inner)


def wide(tree):
  """Arrays in float64, or complex128."""
  return jax.tree.map(
    lambda x: np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64), tree
  )


@functools.cache
def _update(optimizer, by_group):
  return jax.jit(optimizer_of(optimizer, by_group).update)


@functools.lru_cache(maxsize=1)
def _searching_update(draw):
  """The update of an optimizer that evaluates the loss, of the batch `cycle`."""
  tx = optimizer_of(draw.optimizer, draw.wrap == "partition")

  def update(grads, state, params, *, cycle, **extra_args):
    def value_fn(params):
      return jnp.zeros(()) if cycle is None else loss_of(draw, params, cycle, jnp)

    return tx.update(grads, state, params, value_fn=value_fn, **extra_args)

  return jax.jit(update)


def whole_batch_steps(draw, all_cycles, gradient=gradient):
  """What is held after each call: parameters, optimizer state, carry, and the call's metrics.

  `gradient` is of the batches of a cycle, joined; tests give a wrong one.
  """
  with jax.enable_x64(True):
    params = wide(cycles.initial_params(draw))
    state = optimizer_of(draw.optimizer, draw.wrap == "partition").init(
      jax.tree.map(jnp.asarray, params)
    )
    carry, held, steps, emits = cycles.initial_carry(draw), [], 0, False
    for calls in all_cycles:
      batches, mini_step = [], 0
      for call in calls:
        batch = rows_of(draw, call, carry, lambda m: m.counts)
        metrics = _metrics(draw, call, params, carry, batch, gradient)
        carry, batches = next_carry(draw, call, carry), [*batches, batch]
        mini_step += draw.every_k != 1 and not call.skipped
        # The state of a step of which nothing counted is the one before.
        emits = emits and call.skipped and not draw.streams
        if call is calls[-1]:
          cycle = join(batches)
          params, state = _step(draw, params, state, cycle, gradient)
          mini_step, emits = 0, cycle is not None
          steps += emits
        held.append({"params": params, "state": state, "carry": carry, **metrics})
        held[-1]["counters"] = (mini_step, steps, emits)
  return held


def _metrics(draw, call, params, carry, batch, gradient):
  if draw.streams:
    return {"loss": 0.0 if batch is None else loss_of(draw, params, batch)}
  grads = jax.tree.map(np.zeros_like, params)
  if batch is not None:
    grads = gradient(draw, params, batch)
  counted = [m for m in call.microbatches if m.counts]
  weights = [weight_of(call, m) if draw.weights != "none" else len(m.rows) for m in counted]
  return {
    "loss": 0.0 if batch is None else loss_of(draw, params, batch),
    "grad_norm": np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in grads.values())),
    "total_weight": sum(weights),
    "skipped_microbatches": sum(m.skipped for m in call.microbatches),
    **aux_of(draw, call, params, carry),
  }


def _step(draw, params, state, cycle, gradient):
  """One step of the optimizer."""
  if cycle is None and draw.stepless:
    return params, state
  grads, value = jax.tree.map(np.zeros_like, params), 0.0
  if cycle is not None:
    grads, value = gradient(draw, params, cycle), loss_of(draw, params, cycle)
  tx = (draw.optimizer, draw.wrap == "partition")
  update, extra_args = _update(*tx), {"value": jnp.asarray(value)}
  if draw.optimizer in ("linesearch", "lbfgs"):
    extra_args |= {"grad": grads, "cycle": cycle}
    update = _searching_update(draw)
  updates, state = update(grads, state, jax.tree.map(jnp.asarray, params), **extra_args)
  return jax.device_get(optax.apply_updates(params, updates)), state
