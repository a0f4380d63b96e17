"""A draw's training run by the library, as users write one: every entry point, every placement."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from optax_accum import (
  accumulate,
  accumulate_specs,
  AccumulateState,
  make_train_step,
  microbatch_value_and_grad,
)
from support import cycles, devices, plain, trees
from support.optimizers import DRAWN, GROUPS, mini_step, relaxed

POSITIONAL = {"one": ["batch"], "two": ["x", "rest"], "named": [], "mixed": ["x"]}
NAMED = {"one": [], "two": [], "named": ["batch"], "mixed": ["rest"]}
COLLECTED = ("stack", "concat")  # of devices that call the library, each has its own
AUX = {name: name for name in ("mean", "sum", "max", "min", "last", "stack", "concat")}
AUX["constant"] = "last"


class Run:
  """What a draw makes of the model, the optimizer and the library's options."""

  def __init__(self, draw):
    self.draw = draw
    self.positional = [*POSITIONAL[draw.batch]]
    self.positional += ["key"] * (draw.key in ("typed", "raw")) + ["carry"] * draw.carry
    self.positional += ["further"] * (draw.further != "none")
    inner = relaxed(DRAWN[draw.optimizer]())
    self.tx = _wrapped(draw, inner) if draw.accumulates else inner

  # The user's model.

  def unpacked(self, args, kwargs):
    """The arguments of the loss after the parameters, by name, with rows first."""
    named = dict(zip(self.positional, args, strict=False)) | kwargs
    batch = named["batch"] if "batch" in named else {"x": named["x"], **named["rest"]}
    if self.draw.batch_axis:
      batch = jax.tree.map(jnp.transpose, batch)
    return batch, named.get("key"), named.get("carry"), named.get("further", 1.0)

  def loss(self, params, *args, **kwargs):
    batch, key, carry, further = self.unpacked(args, kwargs)
    offset = jnp.zeros((), batch["x"].dtype)
    if key is not None:
      noise = jax.random.normal(key, (cycles.OUT,), jnp.float32)
      offset = (0.25 * noise).astype(offset.dtype)[None]
    if carry is not None:
      offset = offset + carry["mean"]
    size, loss = self.scored(params, batch, offset)
    loss = loss * further
    aux = self.aux(batch, size)
    if carry is not None:
      rows, mean = batch["x"].shape[0], jnp.mean(batch["x"][:, 0])
      new = {"mean": 0.5 * carry["mean"] + 0.5 * mean, "seen": carry["seen"] + rows}
      return loss, (new, aux)
    return loss if aux is None else (loss, aux)

  def scored(self, params, batch, offset):
    """The size of every prediction, and the loss."""
    if "explicit" in self.draw.mesh and "model" in self.draw.mesh:
      # Such axes want to be told where a product goes.
      params = jax.tree.map(lambda x: jax.reshard(x, P()), params)
    if self.draw.dtype == "bfloat16":
      params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    dtype = params["w"].dtype
    z = batch["x"].astype(dtype) @ params["w"] + params["b"][None]
    out = params["scale"].astype(dtype) * jnp.tanh(z) + offset.astype(dtype)
    difference = out - batch["y"]
    mask = batch["mask"].astype(batch["x"].dtype)
    total = jnp.sum(jnp.real(difference * jnp.conj(difference)) * mask)
    if self.draw.reduction == "sum":
      total = total * cycles.sum_scale(self.draw)
    # A stream of weighted gradients is one of means: a weight times a mean is a sum.
    is_mean = self.draw.reduction == "mean" or (self.draw.streams and self.draw.weights != "none")
    return jnp.abs(out), total / jnp.sum(mask) if is_mean else total

  def aux(self, batch, size):
    mask, wanted = batch["mask"].astype(size.dtype), self.draw.aux
    found = {
      "mean": lambda: jnp.sum(size * mask) / jnp.sum(mask),
      "sum": lambda: jnp.sum(batch["x"][:, 0] > 0, dtype=jnp.int32),
      "max": lambda: jnp.max(size),
      "min": lambda: jnp.min(size),
      "last": lambda: jnp.mean(jnp.real(batch["y"])),
      "stack": lambda: jnp.mean(size),
      "concat": lambda: size.T if self.draw.concat_axis else size,
      "constant": lambda: 0.5,
    }
    if wanted == "all":
      return {name: found[name]() for name in AUX}
    return None if wanted == "none" else found[wanted]()

  def weight(self, *args, **kwargs):
    return jnp.sum(self.unpacked(args, kwargs)[0]["mask"])

  # The library's options.

  def options(self):
    draw, of_batch = self.draw, len(POSITIONAL[self.draw.batch])
    out = {"batch_axis": draw.batch_axis, "reduction": draw.reduction, "unroll": draw.unroll}
    if draw.tail:
      out["microbatch_size"] = draw.full_size // (draw.devices if draw.local else 1)
    else:
      out["num_microbatches"] = draw.microbatches
    if draw.batch != "one":
      out["batch_argnums"] = tuple(range(1, 1 + of_batch))
      out["batch_argnames"] = tuple(NAMED[draw.batch])
    if draw.key == "named":
      out["rng_argnames"] = "key"
    elif draw.key != "none":
      out["rng_argnums"] = 1 + of_batch
    if draw.carry:
      out["carry_argnum"] = 1 + of_batch + (draw.key in ("typed", "raw"))
    if draw.weights != "none":
      out["weight_fn"] = self.weight
    if draw.aux != "none":
      out["aux_reduction"] = AUX if draw.aux == "all" else AUX[draw.aux]
      out["has_aux"] = not draw.carry
    if draw.local:
      out["axis_name"] = "data"
    if draw.aux in ("concat", "all") and (draw.concat_axis or draw.batch_axis):
      out["concat_axis"] = draw.concat_axis
    if draw.carry_reduction != "default":
      out["carry_reduction"] = plain.carry_reductions(draw)
    if draw.accumulator_dtype != "default":
      out["accumulator_dtype"] = draw.accumulator_dtype
    return out | {"skip_nonfinite": draw.nan}

  def arguments(self, batch, carry, key):
    """What follows the parameters in a call of the loss function."""
    if self.draw.batch_axis:
      batch = jax.tree.map(lambda x: x.T, batch)
    rest = {"y": batch["y"], "mask": batch["mask"]}
    named = {"batch": batch, "x": batch["x"], "rest": rest, "carry": carry, "key": key}
    named["further"] = cycles.FURTHER
    if self.draw.further == "array":
      named["further"] = jnp.asarray(cycles.FURTHER, batch["x"].dtype)
    kwargs = {name: named[name] for name in NAMED[self.draw.batch]}
    if self.draw.key == "named":
      kwargs["key"] = key
    return [named[name] for name in self.positional], kwargs

  # One call of an entry point: (params, state, carry, batch, key, flush) to the first three, and
  # the metrics.

  @functools.cached_property
  def call(self):
    if self.draw.streams:
      return self.stream
    return self.gradient if self.draw.entry == "gradient" else self.step

  @functools.cached_property
  def train_step(self):
    draw, options = self.draw, self.options()
    if draw.place == "mesh":
      options |= {"mesh": mesh_of(draw), "reduce_gradients": draw.reduce_gradients}
      if "fsdp" in draw.mesh:
        options["data_axis"] = ("data", "fsdp")
    return make_train_step(self.loss, self.tx, donate=draw.donate, **options)

  def step(self, params, state, carry, batch, key, flush):
    args, kwargs = self.arguments(batch, carry, key)
    params, state, *new_carry, metrics = self.train_step(params, state, *args, **kwargs)
    return params, state, new_carry[0] if new_carry else carry, metrics

  def gradient(self, params, state, carry, batch, key, flush):
    args, kwargs = self.arguments(batch, carry, key)
    options = self.options()
    has_aux = options.pop("has_aux", False)
    value_and_grad = microbatch_value_and_grad(self.loss, has_aux=has_aux, **options)
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
    value, grads = jax.value_and_grad(self.loss)(given, batch)
    extra_args = {"flush": flush} if self.draw.flush else {}
    if self.draw.weights != "none":
      extra_args["weight"] = self.stream_weight(batch)
    if self.draw.optimizer == "polyak":
      extra_args["value"] = value
    take = mini_step(self.tx, self.draw.entry)
    return *take(params, state, grads, **extra_args), carry, {}

  def stream_weight(self, batch):
    weight = self.weight(batch)
    return weight.item() if self.draw.loop == "python" else weight


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


def mesh_of(draw):
  kinds, _, second = draw.mesh.partition("+")
  shape, axes, kinds = (draw.devices,), ("data",), [kinds]
  if second:
    *other, name = second.split()
    shape, axes = ((draw.devices, 2), ("data", "model"))
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
    training = Run(draw)
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
  if not draw.entry.startswith("step") and draw.loop != "python":
    call = jax.jit(call)
  if draw.place == "one":
    return call, params, trees.strong(training.tx.init(params)), inputs, lambda held: held
  mesh = mesh_of(draw)
  params = devices.put(params, mesh, SPECS[draw.params])
  state = trees.strong(training.tx.init(params))
  if draw.opt_state == "data":
    state = jax.tree.map(lambda x: devices.put(x, mesh, _rows_of_weights(x)), state)
  if draw.place == "jit" or draw.placed:
    inputs = [(devices.put(batch, mesh, P("data")), *rest) for batch, *rest in inputs]
  if draw.place == "jit":
    state = jax.tree.map(lambda x: _on(x, mesh), state)
  return call, params, state, inputs, lambda held: held


def _rows_of_weights(x):
  return P("data") if x.shape[:1] == (cycles.IN,) else P()


def _on(x, mesh):
  return x if isinstance(x.sharding, NamedSharding) else devices.put(x, mesh)


def _in_shard_map(training, params, inputs):
  draw, tx, mesh = training.draw, training.tx, mesh_of(training.draw)
  specs = P()
  if draw.streams:
    specs = accumulate_specs(jax.eval_shape(tx.init, params), "data")
  metrics = P()
  if not draw.streams and draw.aux in (*COLLECTED, "all"):
    metrics = {name: P() for name in _metric_names(draw)}
    metrics["aux"] = P("data")
    if draw.aux == "all":
      metrics["aux"] = {name: P("data") if name in COLLECTED else P() for name in AUX}
  mapped = jax.shard_map(
    training.call,
    mesh=mesh,
    in_specs=(P(), specs, P(), P("data"), P(), P()),
    out_specs=(P(), specs, P(), metrics),
  )
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  params = devices.put(params, mesh)  # where they are after a step, so that one step is compiled
  return jax.jit(mapped), params, trees.strong(jax.jit(init)(params)), inputs, lambda held: held


def _metric_names(draw):
  names = ["loss", "aux"]
  if draw.nan or draw.entry != "gradient":
    names += ["total_weight", "skipped_microbatches"]
  return names if draw.entry == "gradient" else [*names, "grad_norm"]


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
  """What all devices hold alike: of the states of `accumulate`, only those of the optimizers."""
  params, state, carry, metrics = held
  same = {name: x for name, x in metrics.items() if name != "aux"}
  params, state, carry, same = jax.tree.map(_of_one, (params, _inner(state), carry, same))
  return params, state, carry, metrics | same


def _of_one(x):
  np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape), "The devices disagree")
  return x[0]


def _inner(state):
  """The states of the optimizers in an optimizer state, without those of `accumulate`."""

  def accumulates(x):
    return isinstance(x, AccumulateState)

  return jax.tree.map(
    lambda x: x.inner_opt_state if accumulates(x) else x, state, is_leaf=accumulates
  )


def _held(draw, held):
  """What is held after a call, by name; aux by the names of the reductions."""
  params, state, carry, metrics = held
  aux = metrics.get("aux")
  aux = {} if aux is None else aux if draw.aux == "all" else {draw.aux: aux}
  if draw.place == "pmap":
    aux = {name: _joined(x) if name in COLLECTED else _of_one(x) for name, x in aux.items()}
  aux = {f"aux {name}": x for name, x in aux.items()}
  held = {"params": params, "state": _inner(state), **metrics, **aux}
  return held if carry is None else held | {"carry": carry}


def _joined(x):
  """Every device's own rows, or microbatches, one after the other."""
  return x.reshape(-1, *x.shape[2:])
