"""The model of a draw as a user writes it, in JAX; `support.plain` has the same in NumPy."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from support import cycles, plain

# How a batch is passed.
POSITIONAL = {"one": ["batch"], "two": ["x", "rest"], "named": [], "mixed": ["x"]}
NAMED = {"one": [], "two": [], "named": ["batch"], "mixed": ["rest"]}
AUX = {name: name for name in ("mean", "sum", "max", "min", "last", "stack", "concat")}
AUX["constant"] = "last"


class Model:
  """A loss function of a draw, what it is called with, and the options that go with it."""

  def __init__(self, draw):
    self.draw = draw
    self.positional = [*POSITIONAL[draw.batch]]
    self.positional += ["key"] * (draw.key in ("typed", "raw")) + ["carry"] * draw.carry
    self.positional += ["further"] * (draw.further != "none")

  def unpacked(self, args, kwargs):
    """The arguments of the loss after the parameters, by name."""
    named = dict(zip(self.positional, args, strict=False)) | kwargs
    batch = named["batch"] if "batch" in named else {"x": named["x"], **named["rest"]}
    return batch, named.get("key"), named.get("carry"), named.get("further", 1.0)

  def loss(self, params, *args, **kwargs):
    batch, key, carry, further = self.unpacked(args, kwargs)
    offset = jnp.zeros((), batch["x"].dtype)
    if key is not None:
      noise = jax.random.uniform(key, (cycles.OUT,), jnp.float32)
      offset = (0.25 * noise).astype(offset.dtype)[None]
    if carry is not None:
      offset = offset + carry["mean"]
    size, loss = self.scored(params, batch, offset)
    loss = loss * further
    if self.draw.has_weight:
      loss = loss, jnp.sum(batch["mask"])
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
    if self.draw.has_weight:
      is_mean = False
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
      "concat": lambda: size,
      "constant": lambda: 0.5,
    }
    if wanted == "all":
      return {name: found[name]() for name in AUX}
    return None if wanted == "none" else found[wanted]()

  def weight(self, *split):
    names = POSITIONAL[self.draw.batch] + NAMED[self.draw.batch]
    named = dict(zip(names, split, strict=True))
    return jnp.sum(self.unpacked((), named)[0]["mask"])

  def options(self):
    draw, of_batch = self.draw, len(POSITIONAL[self.draw.batch])
    out = {"reduction": draw.reduction}
    if draw.tail or draw.arrives:
      out["microbatch_size"] = draw.full_size // (draw.devices if draw.local else 1)
    else:
      out["num_microbatches"] = draw.microbatches
    if draw.batch != "one":
      out["batch_argnums"] = (*range(1, 1 + of_batch), *NAMED[draw.batch])
    if draw.key == "named":
      out["rng_argnums"] = "key"
    elif draw.key != "none":
      out["rng_argnums"] = 1 + of_batch
    if draw.carry:
      out["carry_argnum"] = 1 + of_batch + (draw.key in ("typed", "raw"))
    if draw.has_weight:
      out["has_weight"] = True
    elif draw.weights != "none":
      out["weight_fn"] = self.weight
    if draw.aux != "none":
      out["aux_reduction"] = AUX if draw.aux == "all" else AUX[draw.aux]
      out["has_aux"] = not draw.carry
    if draw.local:
      out["axis_name"] = "data"
    if draw.carry and (draw.parts > 1 or draw.local):
      out["carry_reduction"] = plain.carry_reductions(draw)
    if draw.accumulator_dtype != "default":
      out["accumulator_dtype"] = draw.accumulator_dtype
    return out | {"skip_nonfinite": draw.nan}

  def arguments(self, batch, carry, key):
    """What follows the parameters in a call of the loss function."""
    rest = {"y": batch["y"], "mask": batch["mask"]}
    named = {"batch": batch, "x": batch["x"], "rest": rest, "carry": carry, "key": key}
    named["further"] = cycles.FURTHER
    if self.draw.further == "array":
      named["further"] = jnp.asarray(cycles.FURTHER, batch["x"].dtype)
    kwargs = {name: named[name] for name in NAMED[self.draw.batch]}
    if self.draw.key == "named":
      kwargs["key"] = key
    return [named[name] for name in self.positional], kwargs
