"""`microbatch` differentiated: the whole batch's derivatives, and one microbatch's memory."""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import compiled, devices, trees
from support.devices import make_mesh
from support.samples import more

from optax_accum import count_collectives, make_train_step, microbatch

WIDTH = 6


def encode(params, x):
  return jnp.tanh(jnp.tanh(x @ params["in"]) @ params["out"])


def init_params(dtype=np.float64, width=WIDTH):
  rng = np.random.default_rng(0)
  shapes = {"in": (width, 8), "out": (8, 4)}
  return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}


def two_views(rows, dtype=np.float64):
  rng = np.random.default_rng(rows)
  return tuple(jnp.asarray(rng.normal(size=(rows, WIDTH)), dtype) for _ in range(2))


def contrastive(a, b):
  """The loss of CLIP: each row's own view among all rows' views, both ways."""
  a, b = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
  logits = 3 * a @ b.T
  both = (jnp.diag(jax.nn.log_softmax(logits, axis)) for axis in (0, 1))
  return -sum(map(jnp.mean, both))


def in_parts(fun, **options):
  return microbatch(fun, **{"reduction": "concat", "batch_argnums": 1, **options})


@pytest.mark.parametrize("shared", [True, False])
def test_a_contrastive_loss_has_the_whole_batchs_gradient(shared):
  rows, size = 5, 3

  def loss_fn(encoder, params, other, views):
    first, second = views
    a, b = encoder(params, first), encoder(params if shared else other, second)
    return contrastive(a, b)

  with jax.enable_x64(True):
    params, views = init_params(), two_views(rows)
    other = jax.tree.map(lambda p: np.asarray(p) + 1, params)
    arguments = params, other, views
    expected, actual = (
      jax.jit(jax.value_and_grad(functools.partial(loss_fn, e), (0, 1, 2)))(*arguments)
      for e in (encode, in_parts(encode, microbatch_size=size))
    )
    trees.assert_close(actual, expected, 1e-10)
    if not shared:
      return
    # Each microbatch against its own rows is another loss.
    alone = microbatch(contrastive, reduction="mean", batch_argnums=(0, 1), microbatch_size=size)
    other_loss = alone(*(encode(params, x) for x in views))
    assert abs(other_loss - expected[0]) > 1e-3


REDUCED = {
  "mean": lambda y: jnp.mean(y),
  "sum": lambda y: jnp.sum(y),
  "max": lambda y: jnp.max(y, axis=0),
  "min": lambda y: jnp.min(y, axis=0),
  "last": lambda y: y[0],
  "stack": lambda y: jnp.mean(y, axis=0),
  "concat": lambda y: y,
}


def hessian_product(fun, params, x):
  def total(params):
    return sum(jnp.sum(y**2) for y in jax.tree.leaves(fun(params, x)))

  return jax.jvp(jax.grad(total), (params,), (params,))[1]


def test_every_reduction_has_its_derivative():
  """Of all outputs at once, to the parameters and to the batch."""

  def fun(params, x):
    return {name: of(encode(params, x)) for name, of in REDUCED.items()}

  def whole(params, x):
    parts = [x[i::3] for i in range(3)]  # a strided split
    each = [fun(params, part) for part in parts]
    out = {name: jnp.stack([y[name] for y in each]) for name in REDUCED}
    all_rows = jnp.stack([out["concat"][i] for i in range(3)], 1).reshape(9, 4)
    return {
      "mean": jnp.mean(out["mean"]),
      "sum": jnp.sum(out["sum"]),
      "max": jnp.max(out["max"], axis=0),
      "min": jnp.min(out["min"], axis=0),
      "last": out["last"][-1],
      "stack": out["stack"],
      "concat": all_rows,
    }

  split = in_parts(fun, reduction={name: name for name in REDUCED}, num_microbatches=3)
  with jax.enable_x64(True):
    params, x = init_params(), two_views(9)[0]
    expected, actual = (
      jax.jit(functools.partial(hessian_product, f))(params, x) for f in (whole, split)
    )
    trees.assert_close(actual, expected, 1e-10)


def test_noise_is_the_same_going_backward():
  """Dropout: the gradient is that of the masks which the loss was computed with."""

  def dropped(params, x, key):
    y = encode(params, x)
    return y * jax.random.bernoulli(key, 0.5, y.shape).astype(y.dtype)

  split = microbatch(dropped, reduction="concat", batch_argnums=1, rng_argnums=2, microbatch_size=3)
  key = jax.random.key(0)
  with jax.enable_x64(True):
    params, x = init_params(), two_views(8)[0]
    weights = np.random.default_rng(1).normal(size=(8, 4))

    def loss_fn(params):
      y = split(params, x, key)
      return jnp.sum(weights * y), y

    actual, y = jax.jit(jax.grad(loss_fn, has_aux=True))(params)
    kept = np.where(np.asarray(y) != 0, 1.0, 0.0)
    assert 0.2 < kept.mean() < 0.8
    expected = jax.jit(jax.grad(lambda p: jnp.sum(weights * kept * encode(p, x))))(params)
    trees.assert_close(actual, expected, 1e-10)


@pytest.mark.more
def test_cotangents_of_bfloat16_parameters_are_added_up_in_float32():
  rng = np.random.default_rng(0)
  params = jnp.asarray(rng.normal(size=(16, 16)) / 10, jnp.bfloat16)
  x = jnp.asarray(rng.normal(size=(4096, 16)), jnp.bfloat16)

  def fun(params, x):
    return jnp.tanh(x @ params)

  def as_jax_adds(params, x):
    return lax.map(lambda rows: fun(params, rows), x.reshape(1024, 4, 16)).reshape(-1, 16)

  def error(encoder):
    grads = jax.jit(jax.grad(lambda p: jnp.sum(encoder(p, x).astype(jnp.float32) ** 2)))(params)
    assert grads.dtype == jnp.bfloat16
    return np.linalg.norm(np.asarray(grads, np.float64) - exact) / np.linalg.norm(exact)

  with jax.enable_x64(True):
    wide, wide_params = np.asarray(x, np.float64), np.asarray(params, np.float64)
    exact = jax.jit(jax.grad(lambda p: jnp.sum(fun(p, wide) ** 2)))(wide_params)
    exact = np.asarray(exact)

  whole = error(fun)
  assert error(in_parts(fun, microbatch_size=4)) < 1.2 * whole
  assert error(as_jax_adds) > 10 * whole
  assert error(in_parts(fun, microbatch_size=4, accumulator_dtype=jnp.bfloat16)) > 10 * whole


def test_padding_that_is_not_finite_adds_nothing():
  """A microbatch of padding is 0/0: its loss, and the derivative of that, are left out."""

  def fun(params, batch):
    errors = encode(params, batch["x"]) ** 2 * batch["mask"][:, None]
    return jnp.sum(errors) / jnp.sum(batch["mask"])

  split = in_parts(
    fun, reduction="mean", num_microbatches=4, weight_fn=lambda batch: jnp.sum(batch["mask"])
  )
  with jax.enable_x64(True):
    params, x = init_params(), two_views(8)[0]
    # microbatch 2 is padding
    batch = {"x": x, "mask": jnp.asarray([1.0, 1, 0, 1, 0, 1, 0, 1])}

    def derivatives(fun, params, x):
      by_rows = jax.grad(lambda x: fun(params, {**batch, "x": x}))(x)
      tangent = jax.jvp(lambda p: fun(p, batch), (params,), (params,))[1]
      return jax.value_and_grad(fun)(params, batch), by_rows, tangent

    expected, actual = (jax.jit(functools.partial(derivatives, f))(params, x) for f in (fun, split))
    trees.assert_close(actual, expected, 1e-10)


def test_rows_that_are_kept_have_their_derivative_whatever_they_weigh():
  def fun(params, batch):
    y = encode(params, batch["x"])
    return {"y": y, "first": y[0], "loss": jnp.sum(y**2) / jnp.maximum(1, jnp.sum(batch["mask"]))}

  def loss_fn(params, batch, run):
    out = run(params, batch)
    return jnp.sum(jnp.sin(out["y"])) + jnp.sum(jnp.cos(out["first"])) + out["loss"]

  words = {"y": "concat", "first": "stack", "loss": "mean"}
  split = in_parts(
    fun, reduction=words, num_microbatches=2, weight_fn=lambda batch: jnp.sum(batch["mask"])
  )

  def whole(params, batch):
    out = [fun(params, jax.tree.map(lambda x, i=i: x[i::2], batch)) for i in range(2)]
    return {**jax.tree.map(lambda *x: jnp.stack(x), *out), "loss": out[0]["loss"]}

  with jax.enable_x64(True):
    params, x = init_params(), two_views(6)[0]
    batch = {"x": x, "mask": jnp.asarray([1.0, 0] * 3)}
    gradient = jax.jit(jax.grad(loss_fn), static_argnums=2)
    expected, actual = (gradient(params, batch, run) for run in (whole, split))
    trees.assert_close(actual, expected, 1e-10)


def test_complex_parameters_keep_their_imaginary_part():
  def fun(params, x):
    return jnp.sum(jnp.abs(x @ params) ** 2)

  options = {"num_microbatches": 2, "accumulator_dtype": jnp.float32}
  split = in_parts(fun, reduction="sum", **options)
  params = np.full(WIDTH, 1 + 2j, np.complex64)
  x = two_views(4, np.complex64)[0]
  actual, expected = (np.asarray(jax.jit(jax.grad(f))(params, x)) for f in (split, fun))
  assert np.abs(expected.imag).max() > 1
  trees.assert_close(actual, expected, 1e-5)


def deep(params, x):
  for w in params:
    x = jnp.tanh(x @ w)
  return x[:, :8]


def deep_case(rows=1024, width=32, layers=6):
  params = [jax.ShapeDtypeStruct((width, width), np.float32)] * layers
  return params, jax.ShapeDtypeStruct((rows, width), np.float32)


def drawn(shapes):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes)


def loss_around(encoder):
  return lambda params, x: jnp.sum(jnp.cos(encoder(params, x)) * encoder(params, x[::-1]))


# At most so much of the whole batch's; of 60 rows there is a smaller one at the end.
@pytest.mark.parametrize(
  ("by", "most"),
  [(0, {60: 0.5}), more((0, 1), {64: 0.4})],
  ids=["params", "params and batch"],
)
def test_memory_is_that_of_one_microbatch(by, most):
  whole, *temps = (
    compiled.temp_bytes(jax.jit(jax.grad(loss_around(encoder), by)), *deep_case())
    for encoder in (deep, *(in_parts(deep, microbatch_size=size) for size in most))
  )
  for temp, share in zip(temps, most.values(), strict=True):
    assert temp < share * whole


@pytest.mark.parametrize(("options", "kept_from_merging"), [
  ({"microbatch_size": 3}, [False, True]),  # a loop, and a smaller one
  ({"microbatch_size": 5}, [True, True]),  # one trip, which XLA unrolls
], ids=str)  # fmt: skip
def test_what_is_computed_again_is_not_merged_with_what_was(options, kept_from_merging):
  """Or XLA would keep the intermediate values of all microbatches. In a loop it cannot."""
  text = str(jax.make_jaxpr(in_parts(deep, **options))(*deep_case(8, 4, 1)))
  found = [word == "True" for word in re.findall(r"prevent_cse=(\w+)", text)]
  assert sorted(found) == kept_from_merging


def test_nothing_is_computed_again_where_nothing_is_differentiated():
  split = in_parts(deep, microbatch_size=64)

  def products(fun):
    return str(jax.make_jaxpr(fun)(*deep_case(layers=1))).count("dot_general")

  assert products(split) == products(deep) == 1
  # Going forward, again, and to the parameters: the batch, of one layer, has no derivative.
  whole, again = (products(jax.grad(lambda p, x, f=f: jnp.sum(f(p, x)))) for f in (deep, split))
  assert (whole, again) == (2, 3)


def test_one_microbatch_is_the_plain_program():
  split = in_parts(deep, num_microbatches=1)
  texts = [jax.jit(jax.grad(loss_around(f))).lower(*deep_case()).as_text() for f in (deep, split)]
  assert texts[0] == texts[1]


def test_what_is_closed_over_has_its_gradient_too():
  params, x = init_params(np.float32), two_views(8, np.float32)[0]

  def loss_of(run):
    return lambda p: jnp.sum(run(functools.partial(encode, p))(x) ** 2)

  split = functools.partial(microbatch, reduction="concat", num_microbatches=4)
  actual, expected = (jax.jit(jax.grad(loss_of(run)))(params) for run in (split, lambda f: f))
  trees.assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(
  ("kind", "platform"), [(devices.AUTO, "cpu"), more(devices.EXPLICIT, "tpu")]
)
def test_a_step_over_a_mesh_reduces_once(kind, platform):
  """Every device encodes its rows in microbatches, and holds them against all devices' rows."""

  def loss_fn(params, views):
    a, b = (in_parts(deep, num_microbatches=4)(params, x) for x in views)
    every = lax.all_gather(b, "data", tiled=True)
    own = lax.axis_index("data") * a.shape[0] + jnp.arange(a.shape[0])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(a @ every.T), own[:, None], 1))

  def whole(params, views):
    a, b = (deep(params, x) for x in views)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T)))

  mesh = make_mesh(8, kind=kind, platform=platform)
  tx = optax.sgd(0.1)
  step = make_train_step(loss_fn, tx, num_microbatches=1, mesh=mesh, donate=False)
  params, x = deep_case(128, 16, 2)
  views = (x, x)
  if platform == "tpu":
    views = devices.abstract(views, mesh, P("data"))
    params = devices.abstract(params, mesh)
    report = count_collectives(step.lower(params, tx.init(params), views).compile())
  else:
    params, views = drawn((params, views))
    report = count_collectives(step.lower(params, tx.init(params), views).compile())
    moved, _, metrics = step(params, tx.init(params), views)
    value, grads = jax.device_get(jax.jit(jax.value_and_grad(whole))(params, views))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    expected = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads)
    trees.assert_close(moved, expected, 1e-5)
  assert not report.inside
  # TPUs gather what is small by an all-reduce too.
  assert sum("f32[16,16]" in c.shape for c in report.operations) == 1


@pytest.mark.parametrize("how", ["axis_name", "mesh"])
def test_devices_add_up_cotangents_in_float32(how):
  """Rows sorted by class, as in a file: what the devices have nearly cancels."""
  rng = np.random.default_rng(0)
  labels = np.repeat(2 * np.arange(8) - 6, 128)
  x = jnp.asarray(rng.normal(size=(1024, 64)) + 1, jnp.bfloat16)
  y = jnp.asarray(labels + rng.normal(size=1024) / 10, jnp.bfloat16)
  params = jnp.asarray(np.ones(64) / 64, jnp.bfloat16)

  def fun(params, x, y):
    return jnp.mean((x @ params - y).astype(jnp.float32) ** 2)

  over = {"mesh": make_mesh(8)}
  if how == "axis_name":
    over = {"axis_name": "data"}
  split = microbatch(fun, reduction="mean", batch_argnums=(1, 2), num_microbatches=2, **over)
  mapped = gradient = jax.grad(split)
  if how == "axis_name":
    axes = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    # Without the names that it has of `fun`.
    on_device = lambda params, x, y: gradient(params, x, y)  # noqa: E731
    mapped = jax.shard_map(on_device, mesh=make_mesh(8), **axes)
  mapped = jax.jit(mapped)
  wide_params, wide_x, wide_y = (np.asarray(a, np.float64) for a in (params, x, y))
  exact = 2 * wide_x.T @ (wide_x @ wide_params - wide_y) / 1024

  def error(grads):
    return np.linalg.norm(np.asarray(grads, np.float64) - exact) / np.linalg.norm(exact)

  assert error(mapped(params, x, y)) < 1.2 * error(jax.jit(jax.grad(fun))(params, x, y))


@pytest.mark.parametrize("how", ["axis_name", "pcast", "neither"])
def test_in_a_users_shard_map_the_gradient_is_that_of_all_devices(how):
  mesh = make_mesh(8)
  option = {"axis_name": "data"} if how == "axis_name" else {}
  split = in_parts(deep, num_microbatches=4, **option)

  def gradient(params, x):
    if how == "pcast":
      params = lax.pcast(params, "data", to="varying")
    grads = jax.grad(lambda p: jnp.sum(split(p, x) ** 2))(params)
    return lax.psum(grads, "data") if how == "pcast" else grads

  mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
  params, x = drawn(deep_case(128, 16, 2))
  program = mapped.lower(params, x).compile()
  expected = jax.jit(jax.grad(lambda p: jnp.sum(deep(p, x) ** 2)))(params)
  trees.assert_close(mapped(params, x), expected, 1e-5)
  assert bool(count_collectives(program).inside) == (how == "neither")
