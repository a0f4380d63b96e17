"""What a step says of the gradient of each microbatch: right to rounding, and nothing is kept."""

import functools
import re
from typing import Any

from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import collective_losses, devices, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.samples import more

from optax_accum import accumulate, check_split, make_train_step
from optax_accum.flax import linen_train_step, nnx_train_step

DEVICES = 8
TX = optax.sgd(0.1, momentum=0.9)
WORDS = {
  "norms": "mean",
  "largest": "max",
  "count": "sum",
  "each": "stack",
  "both": lambda a, b: {
    "most": jnp.maximum(a["most"], b["most"]),
    "total": a["total"] + b["total"],
  },
}


def measured(grads):
  norms = jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g**2)), grads)
  largest = jnp.max(jnp.abs(grads["w"]))
  total = sum(jax.tree.leaves(norms))
  both = {"most": total, "total": total}
  return {"norms": norms, "largest": largest, "count": 1, "each": total, "both": both}  # fmt: skip


def reduced(values, weights):
  """What `WORDS` make of the values of all microbatches, and the mean of which none is weighed."""
  kept = [i for i, weight in enumerate(weights) if weight]

  def averaged(*x, weights=weights):
    x = np.array(x)
    return np.average(x[kept], axis=0, weights=np.array(weights)[kept])

  norms = [x["norms"] for x in values]
  totals = [values[i]["each"] for i in kept]
  wrong = functools.partial(averaged, weights=[1.0] * len(weights))
  return {
    "norms": jax.tree.map(averaged, *norms),
    "largest": max(values[i]["largest"] for i in kept),
    "count": len(kept),
    "each": np.array(totals),
    "both": {"most": max(totals), "total": sum(totals)},
  }, jax.tree.map(wrong, *norms)


@functools.cache
def make_data():
  rng = np.random.default_rng(1)
  params = {"w": rng.normal(size=(8, 8)), "b": rng.normal(size=8)}
  batch = {"x": rng.normal(size=(64, 8)), "y": rng.normal(size=(64, 8))}
  # Later rows are larger, and fewer of them count.
  batch["y"] *= np.linspace(1, 5, 64)[:, None]
  batch["mask"] = rng.random(64) < np.linspace(0.9, 0.3, 64)
  batch["mask"][0::8] = True
  return params, batch


def loss_fn(params, batch):
  out = jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]
  mask = batch["mask"].astype(out.dtype)
  return jnp.sum(out**2 * mask[:, None]) / jnp.sum(mask)


def valid(batch):
  return jnp.sum(batch["mask"])


def with_weight(params, batch):
  weight = valid(batch)
  return loss_fn(params, batch) * weight.astype(jnp.float64), weight


def expected(params, parts):
  """From the gradient of each microbatch, in float64."""
  gradient = jax.jit(jax.grad(loss_fn))
  values = [measured(gradient(params, part)) for part in parts]
  weights = [float(valid(part)) for part in parts]
  return reduced(jax.device_get(values), weights)


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
  "empty": (
    {"num_microbatches": 4, "skip_empty": True, "noise_scale": True},
    None,
    None,
  ),
  "ragged": ({"microbatch_size": 24}, None, None),
  "one": ({"num_microbatches": 1}, None, None),
  "fsdp": ({"num_microbatches": 2}, AUTO, ("data", "data")),
  "explicit, zero": ({"num_microbatches": 2}, EXPLICIT, (None, "data")),
  "per microbatch": (
    {"num_microbatches": 2, "reduce_gradients": "per_microbatch"},
    AUTO,
    ("data", "data"),
  ),
}


@pytest.mark.parametrize(
  "name",
  [name if name in ("empty", "fsdp") else more(name) for name in CASES],
)
def test_metrics_are_those_of_the_gradients_of_microbatches(name):
  options, kind, specs = CASES[name]
  with jax.enable_x64(True):
    params, batch = jax.tree.map(np.copy, make_data())
    state = trees.strong(TX.init(params))
    parts = trees.strided(batch, options.get("num_microbatches", 3))
    if name == "empty":
      batch["mask"][1::4] = False
    if name == "ragged":  # 24 rows, 24 and 16
      even = trees.strided(trees.index(batch, slice(48)), 2)
      parts = [*even, trees.index(batch, slice(48, None))]
    mesh = None
    if kind is not None:
      mesh = make_mesh(DEVICES, kind=kind)
      blocks = [
        trees.index(trees.blocks(batch, DEVICES), i) for i in range(DEVICES)
      ]
      parts = [part for block in blocks for part in trees.strided(block, 2)]
      held, of_state = map(jax.P, specs)
      params, state = (
        devices.put(params, mesh, held),
        devices.put(state, mesh, of_state),
      )
    fun, weighs = loss_fn, {"weight_fn": valid}
    if name in ("one", "explicit, zero"):
      fun, weighs = with_weight, {"has_weight": True}
    step = make_train_step(
      fun,
      TX,
      **weighs,
      mesh=mesh,
      grad_metrics_fn=measured,
      grad_metrics_reduction=WORDS,
      donate=False,
      **options,
    )
    _, _, metrics = step(params, state, batch)
    found = jax.device_get(metrics["grad_metrics"])
    assert ("noise_scale" in metrics) == ("noise_scale" in options)
    right, wrong = expected(make_data()[0], parts)
    found["each"] = found["each"][np.array([valid(x) > 0 for x in parts])]
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-10), found, right
    )
    if len(parts) > 1:
      # Those of the gradient of the batch, and those of microbatches that all count the same.
      norm = np.hypot(found["norms"]["w"], found["norms"]["b"])
      assert norm > 1.02 * metrics["grad_norm"]
      assert abs(wrong["w"] / right["norms"]["w"] - 1) > 1e-3


@pytest.mark.parametrize(
  "name",
  [
    "all_gather: contrastive, of padded rows",
    more("ppermute: features of the neighbour"),
  ],
)
def test_of_a_loss_that_is_weighed_first_no_weight_is_in_the_gradient(name):
  loss = collective_losses.TABLE[name].fun
  with jax.enable_x64(True):
    params = collective_losses.make_params()
    batch = collective_losses.make_batch([8, 7, 6, 5, 4, 3, 6, 7])
    blocks = trees.blocks(batch, DEVICES)

    def objective(copies, part):
      """The sum of what devices minimise, of whose parameters each has a copy."""
      losses = jax.vmap(loss, axis_name=collective_losses.AXIS)(copies, part)
      return jnp.sum(losses * jnp.sum(part["mask"], 1))

    copies = jax.tree.map(lambda x: np.stack([x] * DEVICES), params)
    values, weights, wrong = [], [], []
    for i in range(2):  # microbatches of each device
      part = jax.tree.map(lambda x, i=i: x[:, i::2], blocks)
      grads = jax.jit(jax.grad(objective))(copies, part)
      for d in range(DEVICES):
        weights.append(part["mask"][d].sum())
        own = trees.index(grads, d)
        wrong.append(optax.tree.norm(own))
        values.append(wrong[-1] / weights[-1])
    step = make_train_step(
      loss,
      TX,
      num_microbatches=2,
      mesh=make_mesh(DEVICES),
      weight_fn=collective_losses.valid_rows,
      grad_metrics_fn=optax.tree.norm,
    )
    metrics = step(params, TX.init(params), batch)[-1]
    right = np.average(values, weights=weights)
    np.testing.assert_allclose(metrics["grad_metrics"], right, rtol=1e-10)
    scaled = np.average(wrong, weights=weights) / np.mean(weights)
    assert abs(scaled / right - 1) > 0.01


def test_what_is_skipped_is_left_out_beside_a_carry_and_aux():
  def loss(params, batch, carry):
    value = loss_fn(params, batch)
    return value, (carry + 1, {"twice": 2 * value})

  params, batch = jax.tree.map(np.copy, make_data())
  cast = lambda x: np.asarray(x, bool if x.dtype == bool else np.float32)  # noqa: E731
  params, batch = jax.tree.map(cast, (params, batch))
  right = expected(params, trees.strided(batch, 4)[:1])[0]
  batch["x"][1::4] = np.nan
  batch["x"][2::4] = np.inf
  batch["x"][3::4] = np.nan
  tx = accumulate(TX, 2)
  step = make_train_step(
    loss,
    tx,
    num_microbatches=4,
    weight_fn=valid,
    has_aux=True,
    carry_argnum=2,
    skip_nonfinite=True,
    grad_metrics_fn=measured,
    grad_metrics_reduction=WORDS,
  )
  held = jax.tree.map(jnp.asarray, params), tx.init(params)
  carry = jnp.zeros((), jnp.int32)
  report = step.check(*held, batch | {"x": batch["y"]}, carry)
  assert report.ok
  for _ in range(2):
    *held, carry, metrics = step(*held, batch, carry)
    found = metrics["grad_metrics"]
    if not metrics["stepped"]:
      found["each"] = found["each"][:1]
      compare = functools.partial(np.testing.assert_allclose, rtol=1e-5)
      jax.tree.map(compare, jax.device_get(found), right)
  assert metrics["stepped"]
  assert metrics["skipped_microbatches"] == 3
  assert carry == 2
  assert metrics["aux"]["twice"] == 2 * metrics["loss"]


@pytest.mark.parametrize("of_devices", [1, DEVICES])
def test_no_gradient_is_kept(of_devices):
  size = 256
  like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  params = [like((size, size))] * 3
  tx = optax.sgd(0.1)

  def network(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def memory(**options):
    mesh = make_mesh(of_devices)
    step = make_train_step(
      network, tx, num_microbatches=4, mesh=mesh, **options
    )
    compiled = step.lower(params, tx.init(params), like((64, size))).compile()
    stats = compiled.memory_analysis()
    return stats.temp_size_in_bytes + stats.output_size_in_bytes

  plain = memory()
  layer = 4 * size**2
  norms = memory(grad_metrics_fn=lambda grads: [optax.tree.norm(g) for g in grads])  # fmt: skip
  # One layer's at most, while its norm is taken (JAX 0.8), of three.
  assert norms - plain < layer
  # What is asked for is kept, and this shows.
  squares = memory(grad_metrics_fn=lambda grads: [g**2 for g in grads])
  assert squares - plain > 2 * layer


def dense(params, x):
  return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_steps_of_flax_give_gradients_as_they_hold_parameters(kind):
  x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
  options = {
    "num_microbatches": 2,
    "grad_metrics_fn": lambda grads: jnp.ravel(grads["w"]),
    "grad_metrics_reduction": "stack",
  }
  weights = jnp.ones((3, 1))
  if kind == "linen":
    params = {"w": jnp.ones((3, 1))}
    state = TrainState.create(apply_fn=dense, params=params, tx=TX)
    step = linen_train_step(
      lambda variables, x, rngs: dense(variables["params"], x), **options
    )
    _, metrics = step(state, x)
  else:

    class Model(nnx.Module):
      def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 1)))

    model = Model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    step = nnx_train_step(lambda model, x: dense({"w": model.w[...]}, x), **options)  # fmt: skip
    metrics = step(model, optimizer, x)
  right = [jax.grad(dense)({"w": weights}, x[i::2])["w"] for i in range(2)]
  np.testing.assert_allclose(
    metrics["grad_metrics"], np.stack(right)[..., 0], rtol=1e-6
  )


def test_what_grad_reduction_overwrites_is_no_gradient():
  params = {"w": jnp.ones((3, 1)), "amax": jnp.zeros(())}
  seen = []
  step = make_train_step(
    lambda params, x: dense(params, x) + params["amax"] * jnp.max(x),
    optax.sgd(0.1),
    num_microbatches=2,
    grad_reduction={"w": "mean", "amax": "max"},
    grad_metrics_fn=lambda grads: seen.append(grads) or optax.tree.norm(grads),
  )
  step(params, optax.sgd(0.1).init(params), jnp.ones((4, 3)))
  assert all(set(x) == {"w", "amax"} and x["amax"] is None for x in seen)


BAD = [
  ({"fn": 3}, TypeError, r"grad_metrics_fn=3 must be a function of the grad"),
  (
    {"reduction": "max"},
    TypeError,
    r"fn=None must be a function .* grad_metrics_reduction='max' combines .* leave both out",
  ),
  (
    {"reduction": {"n": "avg"}},
    ValueError,
    r"grad_metrics_reduction\['n'\]='avg' must be one of 'mean', 'sum'",
  ),
  (
    {"reduction": {"n": "concat"}},
    ValueError,
    r"grad_metrics_reduction\['n'\]=\"concat\" joins values of rows.*use \"stack\"",
  ),
  (
    {"reduction": lambda a: a},
    TypeError,
    r"grad_metrics_reduction=<.*> must take two values, merge\(a, b\)",
  ),
  (
    {"fn": optax.tree.norm, "in_place": True},
    ValueError,
    r"asked for \(grad_metrics\) needs .* in_place=True adds these up within the backward pass",
  ),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD)
def test_options_that_cannot_work_are_refused(options, error, match):
  options = {f"grad_metrics_{k}" if k in ("fn", "reduction") else k: x for k, x in options.items()}  # fmt: skip
  if "one of" in match or "joins" in match or "two" in match:
    options["grad_metrics_fn"] = optax.tree.norm
  with pytest.raises(error, match=match):
    make_train_step(dense, TX, num_microbatches=2, **options)
  with pytest.raises(TypeError, match=r"grad_metrics_fn.*step\.check"):
    check_split(dense, {}, 1, grad_metrics_fn=optax.tree.norm)


def nothing(grads):
  return None


RETURNED = [
  (nothing, None, r"^grad_metrics is None, and grad_metrics_fn must return"),
  (lambda _: {"n": ["norm"]}, None, r"^grad_metrics\['n'\]\[0\] is 'norm', and grad_metrics_fn must"),
  (lambda _: {"n": 1}, None, r"^metrics\['grad_metrics'\]\['n'\] has dtype int32, which \"mean\" cannot keep.* grad_metrics_reduction"),
  (lambda g: {"n": jnp.complex64(1)}, "max", r"^metrics\['grad_metrics'\]\['n'\] has dtype complex64, which has no 'max'.*grad_metrics_reduction"),
  (lambda _: {"n": 1.0}, {"m": "max"}, r"^grad_metrics_reduction=\{'m': 'max'\} is not a prefix tree"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "words", "match"), RETURNED)
def test_what_cannot_be_combined_is_named(fn, words, match):
  params = {"w": jnp.ones((3, 1))}
  step = make_train_step(
    dense,
    TX,
    num_microbatches=2,
    grad_metrics_fn=fn,
    grad_metrics_reduction=words,
  )
  with pytest.raises((TypeError, ValueError)) as caught:
    step(params, TX.init(params), jnp.ones((4, 3)))
  assert re.search(match, str(caught.value))
