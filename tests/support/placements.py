"""Runs of a draw: on one device, over a mesh, in `shard_map`, `pmap`, or a scan of the user's."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from optax_accum import accumulate_specs, AccumulateState
from support import cycles, devices, trees
from support.entry_points import Training
from support.model import AUX


def mesh_of(draw):
  kinds, _, second = draw.mesh.partition("+")
  shape, axes, kinds = (draw.devices,), ("data",), [kinds]
  if second:
    *other, name = second.split()
    shape, axes = (draw.devices, 2), ("data", "model")
    if name == "fsdp":
      shape, axes = (draw.devices // 2, 2), ("data", "fsdp")
    kinds += other or kinds
  types = tuple(devices.EXPLICIT if kind == "explicit" else devices.AUTO for kind in kinds)
  those = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
  return jax.sharding.Mesh(those, axes, axis_types=types)


SPECS = {
  "whole": P(),
  "data": {"w": P("data"), "b": P(), "scale": P()},
  "model": {"w": P(None, "model"), "b": P("model"), "scale": P()},
  "data+model": {"w": P("data", "model"), "b": P("model"), "scale": P()},
  "fsdp": {"w": P("fsdp"), "b": P("fsdp"), "scale": P()},
  "data,fsdp": {"w": P(("data", "fsdp")), "b": P(), "scale": P()},
}


def run(draw, all_cycles):
  """What is held after each call, as `plain.whole_batch_steps` has it, in NumPy."""
  with jax.enable_x64(draw.dtype == "float64"):
    training = Training(draw, mesh_of(draw))
    params = jax.tree.map(jnp.asarray, cycles.initial_params(draw))
    carry = jax.tree.map(jnp.asarray, cycles.initial_carry(draw)) if draw.carry else None
    calls = [call for calls in all_cycles for call in calls]
    inputs = [(c.batch, _key(draw, c), jnp.asarray(c.flush)) for c in calls]
    place = {"shard_map": _in_shard_map, "pmap": _in_pmap}.get(draw.place, _outside)
    call, params, state, inputs, plainly = place(training, params, inputs)
    scanned = _scanned if draw.loop == "scan" else _looped
    return [_held(draw, plainly(h)) for h in scanned(call, (params, state, carry), inputs)]


def _key(draw, call):
  return cycles.key_of(draw, call) if draw.key != "none" else None


def _looped(call, held, inputs):
  for given in inputs:
    *held, metrics = call(*held, *given)
    yield jax.device_get((*held, metrics))


def _scanned(call, held, inputs):
  """The calls in one scan of the user's."""

  def body(held, given):
    *held, metrics = call(*held, *given)
    return tuple(held), (*held, metrics)

  held = trees.strong(held)
  scan = jax.jit(lambda held, inputs: jax.lax.scan(body, held, inputs)[1])
  every = jax.device_get(scan(held, trees.stack(inputs)))
  return [jax.tree.map(lambda x, i=i: x[i], every) for i in range(len(inputs))]


def _outside(training, params, inputs):
  """On one device, on a mesh, or with arrays that are sharded and a library that is not told."""
  draw, call = training.draw, training.call
  if not draw.steps and draw.loop != "python":
    call = jax.jit(call)
  if draw.place == "one":
    params = _boxed(draw, params)
    return call, params, trees.strong(training.tx.init(params)), inputs, lambda held: held
  mesh = training.mesh
  params = _boxed(draw, devices.put(params, mesh, SPECS[draw.params]))
  state = trees.strong(training.tx.init(params))
  if draw.opt_state == "data":
    state = jax.tree.map(lambda x: devices.put(x, mesh, _rows_of_weights(x)), state)
  if draw.opt_state == "whole":
    state = devices.put(state, mesh)
  if draw.place == "jit" or draw.placed:
    rows = P(("data", "model")) if draw.spread else P("data")
    inputs = [(devices.put(batch, mesh, rows), *rest) for batch, *rest in inputs]
  if draw.place == "jit":
    state = jax.tree.map(lambda x: _on(x, mesh), state)
  return call, params, state, inputs, lambda held: held


def _boxed(draw, params):
  """Arrays with names for their dimensions, as a module's annotations leave them."""
  if not draw.boxed:
    return params

  def box(x, spec):
    names = tuple(spec) + (None,) * (x.ndim - len(spec))
    return nn.Partitioned(x, names) if x.ndim else x

  return jax.tree.map(box, params, jax.tree.broadcast(SPECS[draw.params], params))


def _rows_of_weights(x):
  return P("data") if x.shape[:1] == (cycles.IN,) else P()


def _on(x, mesh):
  return x if isinstance(x.sharding, NamedSharding) else devices.put(x, mesh)


def _in_shard_map(training, params, inputs):
  draw, tx, mesh = training.draw, training.tx, training.mesh
  specs = P()
  if draw.streams:
    specs = accumulate_specs(jax.eval_shape(tx.init, params), "data")
  metrics = P()
  if not draw.streams and draw.aux != "none":
    rows = {"stack": P("data"), "concat": P("data")}
    aux = {name: rows.get(name, P()) for name in AUX}
    metrics = {"loss": P()}
    if draw.nan:
      metrics |= {"total_weight": P(), "skipped_microbatches": P()}
    metrics["aux"] = aux if draw.aux == "all" else aux[draw.aux]
  mapped = jax.shard_map(
    training.call,
    mesh=mesh,
    in_specs=(P(), specs, P(), P("data"), P(), P()),
    out_specs=(P(), specs, P(), metrics),
  )
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  # where they are after a step, so that one step is compiled
  params = devices.put(params, mesh)
  return jax.jit(mapped), params, trees.strong(jax.jit(init)(params)), inputs, lambda held: held


def _in_pmap(training, params, inputs):
  """Every device's copy of what it holds; the results must be the same on all."""
  count = training.draw.devices
  in_axes = (0, 0, 0, 0, None, None)
  mapped = jax.pmap(training.call, axis_name="data", in_axes=in_axes, devices=jax.devices()[:count])

  copies = jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=jax.devices()[:count])
  copies = functools.partial(copies, np.zeros(count))

  def call(params, state, carry, batch, key, flush):
    carry = carry if carry is None or carry["mean"].ndim else copies(carry)
    return mapped(params, state, carry, batch, key, flush)

  def by_device(batch):
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

  inputs = [(by_device(batch), *rest) for batch, *rest in inputs]
  state = copies(trees.strong(training.tx.init(params)))
  return call, copies(params), state, inputs, _of_all_devices


def _of_all_devices(held):
  """What all devices hold alike, of one of them."""
  params, state, carry, metrics = held
  same = {name: x for name, x in metrics.items() if name != "aux"}
  params, state, carry, same = jax.tree.map(_of_one, (params, _shared(state), carry, same))
  return params, state, carry, metrics | same


def _of_one(x):
  np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape), "The devices disagree")
  return x[0]


def _accumulates(x):
  return isinstance(x, AccumulateState)


def _map_states(fun, state):
  """An optimizer state with every state of `accumulate` in it replaced."""
  return jax.tree.map(lambda x: fun(x) if _accumulates(x) else x, state, is_leaf=_accumulates)


def _shared(state):
  """A state without what each device accumulates by itself."""
  return _map_states(lambda x: x._replace(acc_grads=(), skip_state=()), state)


def _held(draw, held):
  """What is held after a call, by name; aux by the names of the reductions."""
  params, state, carry, metrics = held
  aux = metrics.get("aux")
  aux = {} if aux is None else aux if draw.aux == "all" else {draw.aux: aux}
  if draw.place == "pmap":
    of_all = ("stack", "concat")  # every device's own, one after the other
    aux = {k: np.concatenate(list(x)) if k in of_all else _of_one(x) for k, x in aux.items()}
  aux = {f"aux {name}": x for name, x in aux.items()}
  inner = _map_states(lambda x: x.inner_opt_state, state)
  held = {"params": params, "state": inner, **metrics, **aux}
  for x in filter(_accumulates, jax.tree.leaves(state, is_leaf=_accumulates)):
    held["counters"] = (x.mini_step, x.gradient_step, x.has_updated)
  return held if carry is None else held | {"carry": carry}
