"""Models and options drawn at random, and what training ends with on some number of devices."""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

import optax_accum

VIRTUAL = 8
STEPS = 5
LENGTH, WORDS, WIDTH = 4, 7, 8
LAYERS = ("convolution", "recurrence", "attention", "perceptron")
OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
  "clip+adamw": optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)
  ),
  "lion": optax.lion(1e-3),
  "rmsprop": optax.rmsprop(1e-2),
  "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
  "lamb": optax.lamb(1e-2),
  "accumulate": optax_accum.accumulate(optax.adam(1e-2), 2),
}


@dataclasses.dataclass(frozen=True)
class Draw:
  """One configuration."""

  layers: tuple[str, ...] = ("perceptron",)
  microbatches: int = 2
  size: int = 1  # rows of a microbatch on a virtual device
  dtype: str = "float32"
  optimizer: str = "sgd"
  key: str = "threefry2x32"  # of dropout
  weights: str = "none"
  skips: str = "none"
  aux: bool = False
  carry: bool = False
  noise_scale: bool = False
  state: str = "whole"
  arrives: bool = False  # in two calls
  explicit: bool = False  # whether the axis of the mesh is

  def __str__(self) -> str:
    fields = dataclasses.asdict(self).items()
    return " ".join(f"{k}={v}" for k, v in fields if v != getattr(Draw(), k))


def drawn(seed: int) -> Draw:
  rng = np.random.default_rng(seed)

  def pick(*options):
    return options[rng.integers(len(options))]

  layers = tuple(name for name in LAYERS if rng.random() < 0.4)
  weights = pick("none", "weight_fn", "has_weight")
  skips = pick("none", "none", "nonfinite", "empty")
  if skips == "empty" and weights != "weight_fn":
    skips = "none"
  return Draw(
    layers=layers or ("perceptron",),
    microbatches=pick(1, 2, 3, 4, 5, 6),
    size=pick(1, 2, 3),
    dtype=pick("float32", "float32", "bfloat16"),
    optimizer=pick(*OPTIMIZERS),
    key=pick("threefry2x32", "rbg", "unsafe_rbg"),
    weights=weights,
    skips=skips,
    aux=pick(False, True),
    carry=pick(False, True),
    noise_scale=pick(False, True),
    state=pick("whole", "ZeRO-1", "FSDP"),
    arrives=pick(False, False, True),
    explicit=pick(False, True),
  )


def initial(draw: Draw):
  """Parameters."""
  rng = np.random.default_rng(1)
  shapes: dict[str, tuple[int, ...]] = {
    "embedding": (WORDS, WIDTH),
    "scale": (WIDTH,),
    "bias": (WORDS,),
    "out": (WIDTH, WORDS),
  }
  for layer in draw.layers:
    shapes[layer] = (3, WIDTH, WIDTH)
    if layer in ("attention", "perceptron"):  # parameters of one shape
      del shapes[layer]
      shapes |= {f"{layer} {i}": (WIDTH, WIDTH) for i in range(3)}
  values = {k: rng.normal(0, 0.4, shape) for k, shape in shapes.items()}
  return {k: jnp.asarray(x, draw.dtype) for k, x in values.items()}


def through(layer: str, weights, h):
  """The hidden states `h` (rows, positions, width) after one more layer."""
  if layer == "convolution":
    dims = ("NWC", "WIO", "NWC")
    return h + jax.nn.gelu(
      lax.conv_general_dilated(h, weights, (1,), "SAME", dimension_numbers=dims)
    )
  if layer == "recurrence":

    def step(state, x):
      gate = jax.nn.sigmoid(x @ weights[0] + state @ weights[1])
      state = gate * state + (1 - gate) * jnp.tanh(x @ weights[2])
      return state, state

    inputs = jnp.moveaxis(h, 1, 0)
    states = lax.scan(step, jnp.zeros_like(inputs[0]), inputs)[1]
    return h + jnp.moveaxis(states, 0, 1)
  if layer == "attention":
    query, key, value = (h @ w for w in weights)
    scores = jnp.einsum("btd,bsd->bts", query, key) / WIDTH**0.5
    past = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(past, scores, jnp.finfo(scores.dtype).min)
    return h + jax.nn.softmax(scores) @ value
  return h + (jax.nn.silu(h @ weights[0]) * (h @ weights[1])) @ weights[2]


def losses_of(draw: Draw, params, words, key):
  """The loss of each position, and the hidden states."""
  h = params["embedding"][words]
  for layer in draw.layers:
    square = jnp.mean(h * h, -1, keepdims=True)
    h = h * lax.rsqrt(square + 1e-6) * params["scale"]
    weights = params.get(layer)
    if weights is None:
      weights = [params[f"{layer} {i}"] for i in range(3)]
    h = through(layer, weights, h)
  h = h * jax.random.bernoulli(key, 0.9, h.shape).astype(h.dtype)
  logits = (h @ params["out"] + params["bias"]).astype(jnp.float32)
  wanted = jnp.roll(words, -1, 1)
  return optax.softmax_cross_entropy_with_integer_labels(logits, wanted), h


def make_loss(draw: Draw):
  def loss_fn(params, batch, key, *carry):
    words, counted, spoiled = batch
    each, h = losses_of(draw, params, words, key)
    each = each * spoiled[:, None]  # 1 or NaN
    count = counted.sum()
    if draw.weights == "none":
      loss = each.mean()
    else:
      loss = jnp.sum(jnp.where(counted > 0, each, 0))
    if draw.weights == "weight_fn":
      loss = loss / jnp.maximum(count, 1)
    if draw.weights == "has_weight":
      loss = loss, count
    h = h.astype(jnp.float32)
    aux = {"mean": h.mean(), "sum": h.sum((0, 1)), "max": h.max(), "last": h[0]}
    aux |= {"stack": h.std(), "concat": h[:, 0], "merge": h.min()}
    if draw.arrives:
      aux = {k: x for k, x in aux.items() if k not in ("stack", "concat")}
    if not draw.carry:
      return (loss, aux) if draw.aux else loss
    (carry,) = carry
    new = {
      "mean": 0.9 * carry["mean"] + 0.1 * h.mean((0, 1)),
      "seen": carry["seen"] + len(words),
      "counted": carry["counted"] + counted.sum(),
    }
    return loss, (new, aux)

  return loss_fn


def log_sum(a, b):
  return jnp.logaddexp(a, b)


def batches(draw: Draw, steps: int):
  """The batch of each step."""
  rng = np.random.default_rng(2)
  rows = VIRTUAL * draw.microbatches * draw.size
  for _ in range(steps):
    words = rng.integers(0, WORDS, (rows, LENGTH))
    counted = rng.random((rows, LENGTH)) < 0.7
    if draw.skips == "empty":
      counted[: rows // 3] = False
    spoiled = np.ones(rows)
    if draw.skips == "nonfinite":
      spoiled[rng.integers(rows)] = np.nan
    yield (
      jnp.asarray(words),
      jnp.asarray(counted, jnp.float32),
      jnp.asarray(spoiled, jnp.float32),
    )


def step_of(draw: Draw, mesh, virtual, microbatches: int):
  options: dict[str, Any] = {}
  if draw.weights == "weight_fn":
    options["weight_fn"] = lambda batch: batch[1].sum()
  if draw.aux or draw.carry:
    words = ["mean", "sum", "max", "last"]
    if not draw.arrives:
      words += ["stack", "concat"]
    options["aux_reduction"] = {k: k for k in words} | {"merge": log_sum}
  if draw.carry:
    options["carry_argnum"] = 3
    words = {"mean": "mean", "seen": "sum", "counted": "sum"}
    options["carry_reduction"] = words
  return optax_accum.make_train_step(
    make_loss(draw),
    OPTIMIZERS[draw.optimizer],
    num_microbatches=microbatches,
    rng_argnums=2,
    has_weight=draw.weights == "has_weight",
    has_aux=draw.aux and not draw.carry,
    skip_nonfinite=draw.skips == "nonfinite",
    skip_empty=draw.skips == "empty",
    noise_scale=draw.noise_scale,
    mesh=mesh,
    virtual_devices=virtual,
    **options,
  )


def sharded(mesh, tree):
  """Each array over the first dimension that the devices divide."""

  def put(x):
    dims: list[Any] = [None] * x.ndim
    for i, size in enumerate(x.shape):
      if size % mesh.size == 0:
        dims[i] = "data"
        break
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*dims)))

  return jax.tree.map(put, tree)


def trained(
  draw: Draw, devices: int, virtual: int | None = VIRTUAL, steps: int = STEPS
):
  """What training ends with on so many devices: parameters, state, carry and metrics.

  0 devices are one without a mesh.
  """
  mesh = None
  if devices:
    kinds = (AxisType.Explicit if draw.explicit else AxisType.Auto,)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=kinds)
  step = step_of(draw, mesh, virtual, draw.microbatches)
  params = initial(draw)
  opt_state = OPTIMIZERS[draw.optimizer].init(params)
  if mesh and draw.state == "FSDP":
    params = sharded(mesh, params)
  if mesh and draw.state != "whole":
    opt_state = sharded(mesh, opt_state)
  carry: list[Any] = []
  if draw.carry:
    zero = jnp.zeros(())
    carry = [{"mean": jnp.zeros(WIDTH), "seen": jnp.int32(0), "counted": zero}]
  key = jax.random.key(3, impl=draw.key)
  metrics: Any = {}
  for number, batch in enumerate(batches(draw, steps)):
    own = jax.random.fold_in(key, number)
    if not draw.arrives:
      out = step(params, opt_state, batch, own, *carry)
    else:
      cycle = step.begin(params, *carry)
      for _ in range(2):
        cycle = step.add(cycle, params, batch, own)
      out = step.finish(params, opt_state, cycle)
    params, opt_state, *carry, metrics = out
  return jax.device_get((params, opt_state, carry, metrics))


def different(one, other) -> list[str]:
  """The paths of the leaves that are not equal to the bit."""
  named = jax.tree_util.tree_leaves_with_path(one)
  pairs = zip(named, jax.tree.leaves(other), strict=True)
  return [
    jax.tree_util.keystr(path)
    for (path, a), b in pairs
    if np.asarray(a).tobytes() != np.asarray(b).tobytes()
  ]
