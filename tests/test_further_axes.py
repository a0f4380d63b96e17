"""Rows over further automatic axes than `data_axis`: the step is the same.

Gradients are reduced over `data_axis` once per cycle. Over the other axes the compiler gathers
parameters where they are used, and reduces in every microbatch.
"""

import functools

from flax import nnx
import flax.linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.devices import AUTO, EXPLICIT
from support.optimizers import relaxed

from optax_accum import (
  _versions,
  accumulate,
  count_collectives,
  make_train_step,
  plan_microbatches,
)
from optax_accum.flax import linen_train_step, nnx_train_step

ROWS, WIDTH, WORDS = 32, 8, 24
AXES = ("replica", "fsdp")
BOTH = P(AXES)


def init_params():
  rng = np.random.default_rng(0)
  layers = {"w": rng.normal(size=(3, WIDTH, WIDTH)) / 3, "b": rng.normal(size=(3, WIDTH))}
  table, head = rng.normal(size=(WORDS, WIDTH)), rng.normal(size=(WIDTH, WORDS))
  return {"table": table, "layers": layers, "head": head}


def make_batch(empty=()):
  """Padded text, whose last rows have few valid words."""
  rng = np.random.default_rng(1)
  words = rng.integers(0, WORDS, size=(ROWS, 6))
  mask = (rng.random((ROWS, 5)) < np.linspace(1.0, 0.2, ROWS)[:, None]).astype(np.float64)
  mask[list(empty)] = 0
  return {"words": words, "mask": mask}


def losses_of(params, batch, key=None):
  h = params["table"][batch["words"][:, :-1]]
  if key is not None:
    h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0)

  @jax.checkpoint
  def layer(h, at):
    return h + jnp.tanh(h @ at["w"] + at["b"][None, None]), None

  h, _ = jax.lax.scan(layer, h, params["layers"])
  return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], batch["words"][:, 1:])


def loss_fn(params, batch):
  return jnp.sum(losses_of(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def with_aux(params, batch, key, carry):
  losses = losses_of(params, batch, key) * batch["mask"]
  aux = {"rows": losses.sum(1), "mean": losses.mean(), "most": losses.max(), "seen": losses.size}
  return losses.sum() / jnp.maximum(batch["mask"].sum(), 1), (carry + losses.sum(), aux)


def valid(batch):
  return jnp.sum(batch["mask"])


def optimizer():
  return relaxed(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


def over_fsdp(tree, mesh):
  """The last dimension of each parameter over the further axis, or nothing where there is none."""
  last = lambda x: P(*[None] * (x.ndim - 1), "fsdp")  # noqa: E731
  return jax.tree.map(last, tree) if "fsdp" in mesh.axis_names else P()


def over_replicas(tree, mesh):
  """Each parameter over the data axis, so that it is gathered and its gradient scattered once."""
  return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "replica"), tree)


def three_steps(shape, loss, *, tx=None, batch=None, more=(), specs=over_fsdp, **options):
  """Parameters after three steps and the metrics of the last, in NumPy."""
  mesh = devices.make_mesh(*shape, axes=AXES)
  params, tx = init_params(), tx or optimizer()
  params = devices.put(params, mesh, specs(params, mesh))
  opt_state = trees.strong(tx.init(params))
  batch = devices.put(batch or make_batch(), mesh, P(AXES[: len(shape)]))
  step = make_train_step(loss, tx, mesh=mesh, data_axis="replica", **options)
  shardings = jax.tree.map(lambda x: x.sharding, params)
  carry = [jnp.zeros(())] if "carry_argnum" in options else []
  for _ in range(3):
    params, opt_state, *carry, metrics = step(params, opt_state, batch, *more, *carry)
  assert jax.tree.map(lambda x: x.sharding, params) == shardings
  return jax.device_get((params, carry, metrics))


@functools.cache
def whole_batch():
  step, tx = oracle.whole_batch_step(loss_fn, optimizer()), optimizer()
  params, _, loss = oracle.take_steps(step, tx, init_params(), [make_batch()] * 3)
  return params, loss


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8)], ids=str)
def test_three_steps_are_those_of_the_whole_batch(shape):
  with jax.enable_x64(True):
    expected, loss = whole_batch()
    params, _, metrics = three_steps(shape, loss_fn, num_microbatches=4, weight_fn=valid)
    trees.assert_close(params, expected, 1e-10)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-10)
    naive, _, _ = three_steps(shape, loss_fn, num_microbatches=4)
    assert np.abs(naive["head"] - expected["head"]).max() > 1e-4  # a mean of means


def test_only_the_last_reduction_is_between_replicas():
  mesh, tx = devices.make_mesh(2, 4, axes=AXES), optax.sgd(0.1)
  params = jax.tree.map(np.float32, init_params())
  params = devices.abstract(params, mesh, over_fsdp(params, mesh))
  batch = devices.abstract(jax.tree.map(jnp.asarray, make_batch()), mesh, BOTH)
  batch["mask"] = batch["mask"].update(dtype=jnp.float32)
  step = make_train_step(loss_fn, tx, mesh=mesh, data_axis="replica", num_microbatches=4)
  found = count_collectives(step.lower(params, tx.init(params), batch).compile()).operations
  gradients = sum(4 * x.size // 4 for x in jax.tree.leaves(params))  # a quarter of the parameters
  between = [c for c in found if c.groups == ((0, 4), (1, 5), (2, 6), (3, 7)) and c.bytes > 64]
  assert not any(c.loop for c in between)
  assert sum(c.bytes for c in between) == pytest.approx(gradients, rel=0.02)
  within = [c for c in found if c.groups == ((0, 1, 2, 3), (4, 5, 6, 7))]
  assert any(c.kind == "all-gather" and c.loop for c in within)


NAN = make_batch()
NAN["mask"][1, 0] = np.nan
EMPTY = make_batch(empty=range(1, ROWS, 4))  # of 4 microbatches, one in four rows each
TIMES = {"num_microbatches": 4, "weight_fn": valid}
OPTIONS = {
  "ragged": {"microbatch_size": 24, "weight_fn": valid},
  "skip_nonfinite": {**TIMES, "batch": NAN, "skip_nonfinite": True},
  "skip_empty": {**TIMES, "batch": EMPTY, "skip_empty": True},
  "noise_scale": {**TIMES, "noise_scale": True},
  "per_microbatch": {**TIMES, "reduce_gradients": "per_microbatch"},
  "accumulate": {**TIMES, "tx": accumulate(optimizer(), 2)},
  "sharded over replicas": {**TIMES, "specs": over_replicas},
}
if _versions.ADDS_TO_REFERENCES:
  OPTIONS["in_place"] = {"num_microbatches": 4, "in_place": True}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_what_it_does_without_the_further_axis(name):
  options = dict(OPTIONS[name])
  with jax.enable_x64(True):
    here = three_steps((2, 4), loss_fn, **options)
    there = three_steps((2,), loss_fn, **options)
    trees.assert_close(here, there, 1e-10)


def test_aux_keys_and_carry_are_those_without_the_further_axis():
  options = {
    "num_microbatches": 4,
    "batch_argnums": 1,
    "rng_argnums": 2,
    "carry_argnum": 3,
    "aux_reduction": {"rows": "concat", "mean": "mean", "most": "max", "seen": "sum"},
    "more": (jax.random.key(0),),
  }
  with jax.enable_x64(True):
    here, there = (three_steps(shape, with_aux, **options) for shape in ((2, 4), (2,)))
    trees.assert_close(here, there, 1e-10)
    assert here[2]["aux"]["rows"].shape == (ROWS,)


# Of Flax: rows of numbers, and losses that weigh them.
NUMBERS = {"x": np.random.default_rng(2).normal(size=(ROWS, 16)), "w": np.linspace(1.0, 0.1, ROWS)}


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    for names, width in ((None, "embed"), 64), (("embed", None), 8):
      init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
      x = nn.tanh(nn.Dense(width, kernel_init=init, param_dtype=x.dtype)(x))
    return x


class Nnx(nnx.Module):
  def __init__(self):
    self.inner = nnx.Linear(16, 64, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    self.outer = nnx.Linear(64, 8, rngs=nnx.Rngs(1), param_dtype=jnp.float64)

  def __call__(self, x):
    return self.outer(nnx.tanh(self.inner(x)))


def weighted(out, batch):
  return jnp.sum(jnp.mean(out**2, 1) * batch["w"]) / jnp.sum(batch["w"])


def total(batch):
  return jnp.sum(batch["w"])


FLAX = {"num_microbatches": 4, "weight_fn": total}


@pytest.mark.usefixtures("usual_promotion")
def test_a_linen_model_with_logical_axes():
  mesh, rules = devices.make_mesh(2, 4, axes=AXES), [("embed", "fsdp")]
  model, tx = Linen(), optax.adamw(1e-2)
  with jax.enable_x64(True), nn.logical_axis_rules(rules):
    params = model.init(jax.random.key(0), NUMBERS["x"])["params"]
    loss = lambda params, batch: weighted(model.apply({"params": params}, batch["x"]), batch)  # noqa: E731
    step = oracle.whole_batch_step(loss, tx)
    expected, _, _ = oracle.take_steps(step, tx, nn.unbox(params), [NUMBERS] * 3)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(params), mesh, rules)
    params = jax.jit(lambda x: x, out_shardings=shardings)(params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    step = linen_train_step(
      lambda variables, batch, rngs: loss(variables["params"], batch),
      **{**FLAX, "mesh": mesh, "data_axis": "replica"},
    )
    batch = devices.put(NUMBERS, mesh, BOTH)
    for _ in range(3):
      state, _ = step(state, batch)
    assert state.params["Dense_0"]["kernel"].value.sharding.spec == P(None, "fsdp")
    trees.assert_close(jax.device_get(nn.unbox(state.params)), expected, 1e-10)


@pytest.mark.usefixtures("usual_promotion")
def test_an_nnx_model_that_is_sharded():
  mesh, tx = devices.make_mesh(2, 4, axes=AXES), optax.adamw(1e-2)
  loss = lambda model, batch: weighted(model(batch["x"]), batch)  # noqa: E731
  with jax.enable_x64(True):
    whole, model = Nnx(), Nnx()
    optimizer = nnx.Optimizer(whole, tx, wrt=nnx.Param)
    for _ in range(3):
      optimizer.update(whole, nnx.grad(loss)(whole, NUMBERS))
    state = nnx.state(model)
    specs = jax.tree.map(lambda x: P(None, "fsdp") if x.ndim == 2 else P(), state)
    nnx.update(model, devices.put(state, mesh, specs))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx_train_step(loss, **FLAX, mesh=mesh, data_axis="replica")
    for _ in range(3):
      step(model, optimizer, devices.put(NUMBERS, mesh, BOTH))
    assert model.inner.kernel[...].sharding.spec == P(None, "fsdp")
    trees.assert_close(*(jax.device_get(nnx.state(x, nnx.Param)) for x in (model, whole)), 1e-10)


def refused(match, *, kind=AUTO, spec=BOTH, **options):
  mesh = devices.make_mesh(2, 4, axes=AXES, kind=kind)
  step = make_train_step(loss_fn, optimizer(), mesh=mesh, data_axis="replica", **options)
  params = init_params()
  batch = devices.put(make_batch(), mesh, spec)
  with pytest.raises(ValueError, match=match):
    step(params, optimizer().init(params), batch)


def test_rows_that_the_further_axis_does_not_divide():
  fit = r"num_microbatches= one of \[1, 2, 4\], or microbatch_size=, a multiple of 8"
  refused(rf"Microbatches of 4 rows are not divided by the 8 devices .*{fit}", num_microbatches=8)
  refused(rf"Microbatches of 12 rows \(the last 8\) are not.*{fit}", microbatch_size=12)
  refused(r"\(the last 12\)", microbatch_size=20)


def test_axes_that_rows_cannot_be_over():
  first = r"rows sharded over .*: shard them over data_axis='replica' first"
  refused(f"words'.*{first}|mask'.*{first}", spec=P("fsdp"), num_microbatches=4)
  refused(first, spec=P(("fsdp", "replica")), num_microbatches=4)
  refused("only if they are automatic.*for 'fsdp'", kind=EXPLICIT, num_microbatches=4)


def test_an_axis_of_one_device_shards_nothing():
  mesh, tx = devices.make_mesh(8, 1, axes=AXES), optax.sgd(0.1)
  step = make_train_step(loss_fn, tx, mesh=mesh, data_axis="replica", num_microbatches=4)
  params = jax.tree.map(np.float32, init_params())
  batch = jax.tree.map(jnp.asarray, make_batch())
  batch["mask"] = jnp.ones_like(batch["mask"], jnp.float32)
  metrics = step(params, tx.init(params), devices.put(batch, mesh, P("fsdp")))[-1]
  assert np.isfinite(metrics["loss"])


def test_a_plan_has_microbatches_that_the_further_axis_divides():
  mesh, tx = devices.make_mesh(2, 4, axes=AXES), optax.sgd(0.1)
  params = devices.abstract(jax.tree.map(np.float32, init_params()), mesh)
  words = jax.ShapeDtypeStruct((40, 6), jnp.int32)
  batch = {"words": words, "mask": jax.ShapeDtypeStruct((40, 5), jnp.float32)}

  def build(num_microbatches):
    options = {"mesh": mesh, "data_axis": "replica", "num_microbatches": num_microbatches}
    return make_train_step(loss_fn, tx, **options)

  args = params, tx.init(params), devices.abstract(batch, mesh, BOTH)
  with pytest.raises(ValueError, match="Nothing fits"):
    plan_microbatches(build, args, batch_size=40, memory_limit=100)
