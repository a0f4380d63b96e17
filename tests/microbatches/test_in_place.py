"""``in_place=True``: the backward pass adds gradients to their accumulators (from JAX 0.10 on)."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import trees
from support.compiled import temp_bytes
from support.devices import AUTO, EXPLICIT, make_mesh, put
from support.optimizers import relaxed
from support.samples import more

from optax_accum import count_collectives, make_train_step, microbatch_value_and_grad

LAYERS, WIDTH, VOCABULARY, LENGTH = 3, 8, 16, 4


pytestmark = pytest.mark.usefixtures("x64")


def normed(x):
  return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


@jax.custom_vjp
def doubled_back(x):
  return x


doubled_back.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def scanned(params, batch, rematerialised=True):
  """A tied embedding, scanned layers, and a function with a backward pass of its own."""

  def layer(x, w):
    h = jnp.tanh(normed(x) @ w["up"])
    return x + doubled_back(h) @ w["down"], None

  x = params["embedding"][batch["tokens"]]
  body = jax.checkpoint(layer) if rematerialised else layer
  x, _ = jax.lax.scan(body, x, params["layers"])
  logits = normed(x) @ params["embedding"].T
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
  return jnp.sum(nats * batch["mask"]) / jnp.sum(batch["mask"])


def convolution(params, batch):
  x, layout = jax.nn.one_hot(batch["tokens"], WIDTH), ("NWC", "WIO", "NWC")
  for _ in range(2):  # shared
    x = jax.lax.conv_general_dilated(x, params["kernel"], (1,), "SAME", None, None, layout)
    x = jnp.tanh(x)
  return jnp.sum(jnp.mean(x**2, -1) * batch["mask"]) / jnp.sum(batch["mask"])


def params_of(loss_fn):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape))  # noqa: E731
  if loss_fn is convolution:
    return {"kernel": normal(3, WIDTH, WIDTH)}
  layers = {"up": normal(LAYERS, WIDTH, 2 * WIDTH), "down": normal(LAYERS, 2 * WIDTH, WIDTH)}
  return {"embedding": normal(VOCABULARY, WIDTH), "layers": layers}


def make_batch(rows=24, padded=False):
  """Rows of tokens; padded, some rows count nothing, and in some microbatches all do."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, WIDTH, size=(2, rows, LENGTH))
  mask = np.ones((rows, LENGTH))
  if padded:
    mask *= rng.uniform(size=(rows, LENGTH)) < 0.6
    mask[::4] = mask[4:9] = 0
  return jax.tree.map(jnp.asarray, {"tokens": tokens[0], "labels": tokens[1], "mask": mask})


def tokens_in(batch):
  return jnp.sum(batch["mask"])


@functools.cache
def jitted_value_and_grad(loss_fn):
  return jax.jit(jax.value_and_grad(loss_fn))


def whole(loss_fn, padded=False):
  return jitted_value_and_grad(loss_fn)(params_of(loss_fn), make_batch(padded=padded))


CASES = [
  more(scanned, False, {"microbatch_size": 5}),
  (scanned, True, {"microbatch_size": 5}),
  (convolution, True, {"microbatch_size": 7}),
]


@pytest.mark.parametrize(("loss_fn", "padded", "split"), CASES)
def test_the_gradient_is_that_of_the_whole_batch(loss_fn, padded, split):
  params, batch = params_of(loss_fn), make_batch(padded=padded)
  options = split | ({"weight_fn": tokens_in} if padded else {})
  run = jax.jit(microbatch_value_and_grad(loss_fn, in_place=True, **options))
  trees.assert_close(run(params, batch), whole(loss_fn, padded), 1e-10)


def test_sums_aux_carry_and_keys_are_those_of_the_plain_scan():
  def loss_fn(params, batch, seen, key):
    noise = jax.random.uniform(key, batch["tokens"].shape)
    scaled = convolution(params, batch) * (1 + 0.1 * jnp.sum(noise)) + seen["rows"] * 1e-3
    return scaled, ({"rows": seen["rows"] + len(noise)}, {"first": batch["tokens"][:, 0]})

  args = (params_of(convolution), make_batch(10), {"rows": np.zeros(())}, jax.random.key(3))
  options = {
    "microbatch_size": 4,
    "reduction": "sum",
    "aux_reduction": "concat",
    "carry_argnum": 2,
    "rng_argnums": 3,
    "weight_fn": tokens_in,
  }
  ours, plain = (
    jax.jit(microbatch_value_and_grad(loss_fn, in_place=x, **options))(*args) for x in (True, False)
  )
  trees.assert_close(ours, plain, 1e-12)


@pytest.mark.more
def test_outside_jit_and_by_several_arguments_it_is_the_same_gradient():
  def loss_fn(scale, batch, params):
    return scale * scanned(params, batch)

  args = jnp.asarray(1.5), make_batch(6), params_of(scanned)
  run = microbatch_value_and_grad(loss_fn, [-1, 0], in_place=True, num_microbatches=3)
  expected = jax.jit(jax.value_and_grad(loss_fn, (2, 0)))(*args)
  trees.assert_close(run(*args), expected, 1e-10)


def test_padding_that_is_not_a_number_stays_out():
  params, batch = params_of(scanned), make_batch()
  mask = np.ones((24, LENGTH))
  mask[:2] = mask[12:14] = 0  # the first two microbatches, of 0/0
  batch["mask"] = jnp.asarray(mask)
  options = {"num_microbatches": 12, "weight_fn": tokens_in}
  _, grads = jax.jit(microbatch_value_and_grad(scanned, in_place=True, **options))(params, batch)
  trees.assert_close(grads, jitted_value_and_grad(scanned)(params, batch)[1], 1e-10)


@pytest.mark.parametrize(
  ("kind", "padded", "specs"), [(AUTO, True, "replicated"), more(EXPLICIT, False, "sharded")]
)
def test_over_devices_each_adds_its_own_and_they_are_reduced_once(kind, padded, specs):
  mesh = make_mesh(4, kind=kind)
  params, batch, tx = params_of(scanned), make_batch(24, padded), optax.sgd(1.0)
  _, grads = jax.device_get(whole(scanned, padded))
  expected = jax.tree.map(np.subtract, jax.device_get(params), grads)
  spec = {"embedding": P("data"), "layers": P(None, "data")} if specs == "sharded" else P()
  placed = put(params, mesh, spec)
  weighs = {"weight_fn": tokens_in} if padded else {}
  step = make_train_step(
    scanned, tx, num_microbatches=3, mesh=mesh, in_place=True, donate=False, **weighs
  )
  compiled = step.lower(placed, tx.init(placed), batch).compile()
  new, *_ = step(placed, tx.init(placed), batch)
  trees.assert_close(jax.device_get(new), expected, 1e-10)
  assert not count_collectives(compiled).inside


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_over_further_axes_a_microbatch_runs_on_all_devices_or_on_none(shape):
  """The compiler may have them send something in it."""
  params, tx = params_of(scanned), optax.sgd(1.0)
  options = {"in_place": True, "weight_fn": tokens_in, "mesh": make_mesh(*shape)}
  step = make_train_step(scanned, tx, num_microbatches=3, **options)
  text = str(step.trace(params, tx.init(params), make_batch(24)).jaxpr)
  assert ("pmax" in text) == (len(shape) > 1)


def test_it_takes_less_memory_than_the_plain_scan():
  """Layers that are scanned and rematerialised: at most 0.75 of the plain scan's temp."""
  like = jax.eval_shape(lambda: params_of(scanned))
  like["layers"] = {
    "up": jax.ShapeDtypeStruct((8, 128, 512), jnp.float32),
    "down": jax.ShapeDtypeStruct((8, 512, 128), jnp.float32),
  }
  like["embedding"] = jax.ShapeDtypeStruct((WIDTH, 128), jnp.float32)
  batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch(16)))
  batch["mask"] = jax.ShapeDtypeStruct((16, LENGTH), jnp.float32)
  tx = relaxed(optax.adamw(1e-3))
  state = jax.eval_shape(tx.init, like)
  temp = [
    temp_bytes(make_train_step(scanned, tx, num_microbatches=4, in_place=x), like, state, batch)
    for x in (True, False)
  ]
  assert temp[0] < 0.75 * temp[1]


def beside_a_value(params, batch):
  """A scan over a parameter, and over what was computed from one."""

  def layer(x, ws):
    return jnp.tanh(x * ws[0][None] + ws[1][None]), None

  w = jnp.sin(params["layers"]["down"])[:, 0]
  x, _ = jax.lax.scan(layer, batch["mask"] @ jnp.ones((LENGTH, WIDTH)), (w, params["bias"]))
  return jnp.mean(x**2)


def beside_a_carry(params, batch):
  """A scan over what a loop around it carries, and over a parameter."""

  def layer(x, rows):
    return jnp.tanh(x * rows[0] + rows[1]), None

  def around(h, _):
    x, _ = jax.lax.scan(layer, jnp.ones(WIDTH), (h, params["bias"]))
    return h + x[None], None

  start = jnp.ones((LAYERS, WIDTH)) * jnp.mean(batch["mask"])
  h, _ = jax.lax.scan(around, start, None, length=2)
  return jnp.mean(h**2)


@pytest.mark.parametrize("loss_fn", [more(beside_a_value), beside_a_carry])
def test_a_scan_that_some_versions_mix_up_is_right(loss_fn):
  params, batch = params_of(scanned) | {"bias": jnp.full((LAYERS, WIDTH), 0.3)}, make_batch(8)
  expected = jitted_value_and_grad(loss_fn)(params, batch)
  run = jax.jit(microbatch_value_and_grad(loss_fn, in_place=True, num_microbatches=4))
  trees.assert_close(run(params, batch), expected, 1e-10)


def clamped(params, batch):
  """A slice that starts before its array, for which JAX reads from its start."""
  start = batch["tokens"][0, 0].astype(jnp.int32) - 2 * VOCABULARY
  w = jax.lax.dynamic_slice_in_dim(params["embedding"], start, LENGTH)
  return jnp.mean((batch["mask"] @ w) ** 2)


def twice(params, batch):
  """One parameter that goes into an inner function twice."""
  w = params["embedding"]
  return jnp.mean(
    (batch["mask"][:, :1] @ jnp.ones((1, VOCABULARY)) @ jax.jit(lambda a, b: a * jnp.sin(b))(w, w))
    ** 2
  )


def before_the_array(params, batch):
  """An index that is out of range, for which a row of zeros is read."""
  rows = (
    params["embedding"]
    .at[batch["tokens"] - 3]
    .get(mode="fill", fill_value=0, wrap_negative_indices=False)
  )
  return jnp.mean(rows**2)


def behind_a_barrier(params, batch):
  return jnp.mean(jax.lax.optimization_barrier(params["embedding"]) ** 2) * jnp.mean(batch["mask"])


@pytest.mark.parametrize(
  "loss_fn", [clamped, more(twice), before_the_array, more(behind_a_barrier)]
)
def test_what_is_not_known_to_be_right_is_added_whole(loss_fn):
  params, batch = {"embedding": params_of(scanned)["embedding"]}, make_batch(8)
  expected = jitted_value_and_grad(loss_fn)(params, batch)[1]
  run = microbatch_value_and_grad(loss_fn, in_place=True, num_microbatches=4)
  trees.assert_close(jax.jit(run)(params, batch)[1], expected, 1e-10)


def of_map(step, p):
  return jnp.sum(jax.lax.map(lambda s: step(p, s), jnp.arange(1.0, 4.0)))


def of_fori(step, p):
  return jax.lax.fori_loop(0, 3, lambda i, q: q * step(p, q), jnp.sum(p))


REFUSED = r"in_place=True adds gradients to references, which cannot be differentiated"


@pytest.mark.parametrize(
  ("loop", "jit", "moves"),
  [more(of_map, True, "params"), (of_fori, False, "batch"), (of_fori, True, "weights")],
)
def test_derivatives_in_a_loop_are_refused(loop, jit, moves):
  """JAX would be silently wrong. One thing depends on what is differentiated, and the rest not."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))

  def total(p):
    of = {k: p if k == moves else jnp.ones(3) for k in ("params", "batch", "closure", "weights")}

    def step(_, s):
      def loss_fn(w, batch):
        return s * jnp.mean(jnp.tanh(batch @ w) ** 2) + jnp.sum(of["closure"] * w**2)

      def weight_fn(batch):
        return len(batch) + jnp.sum(of["weights"] ** 2)

      options = {"in_place": True, "microbatch_size": 2, "weight_fn": weight_fn}
      loss, grads = microbatch_value_and_grad(loss_fn, **options)(
        of["params"], x * of["batch"][None]
      )
      return loss + jnp.sum(grads**3)

    return loop(step, p)

  p = jnp.asarray([0.3, -0.2, 0.5])
  for derivative in (jax.grad(total), lambda p: jax.jvp(total, (p,), (p,))):
    with pytest.raises(NotImplementedError, match=REFUSED):
      (jax.jit(derivative) if jit else derivative)(p)
