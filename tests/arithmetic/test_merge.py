"""Reductions of one's own: `merge(a, b)` in `microbatch`, in the gradient, and in a step."""

import dataclasses
import functools
import operator

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import devices
from support.samples import more

import optax_accum

ROWS = np.linspace(-2.0, 3.0, 24, dtype=np.float32)


@flax.struct.dataclass
class Average:
  """A metric that merges, as those of clu."""

  total: jax.Array
  count: jax.Array

  @classmethod
  def of(cls, x):
    return cls(jnp.sum(x), jnp.asarray(x.shape[0], jnp.float32))

  def merge(self, other):
    return Average(self.total + other.total, self.count + other.count)


def moments(x):
  return {"mean": jnp.mean(x), "m2": jnp.sum((x - jnp.mean(x)) ** 2), "n": jnp.float32(x.shape[0])}


def merge_moments(a, b):
  """Of Chan, Golub and LeVeque."""
  n, apart = a["n"] + b["n"], b["mean"] - a["mean"]
  m2 = a["m2"] + b["m2"] + apart**2 * a["n"] * b["n"] / n
  return {"mean": a["mean"] + apart * b["n"] / n, "m2": m2, "n": n}


def first_and_last(x):
  return x[0], x[-1]


# What a microbatch gives, how two of these merge, and what the whole batch gives.
KINDS = {
  "average": (Average.of, Average.merge),
  "moments": (moments, merge_moments),
  "logsumexp": (jax.nn.logsumexp, jnp.logaddexp),
  "histogram": (lambda x: jnp.histogram(x, 4, (-2.0, 3.0))[0].astype(jnp.int32), jnp.add),
  "ends": (first_and_last, lambda a, b: (a[0], b[1])),  # not commutative
}
MERGES = {name: merge for name, (_, merge) in KINDS.items()}


def statistics(x):
  return {name: of(x) for name, (of, _) in KINDS.items()}


def microbatches(x, size):
  """As the library cuts them: row i, i + N, ..., and the smaller last one."""
  full = len(x) // size
  parts = [x[i : full * size : full] for i in range(full)]
  return parts + ([x[full * size :]] if len(x) % size else [])


def folded(x, size, devices=1):
  """What microbatches that count (have a row above 0) merge to, in their order."""
  parts = [p for own in np.split(x, devices) for p in microbatches(own, size // devices)]
  each = [jitted_statistics(p) for p in parts if np.any(p > 0)]
  return jax.device_get(functools.reduce(merge_all, each))


jitted_statistics = jax.jit(statistics)


@jax.jit
def merge_all(a, b):
  return {name: merge(a[name], b[name]) for name, merge in MERGES.items()}


def any_above_zero(x):
  return jnp.sum(x > 0)


@pytest.mark.parametrize("size", [more(4), 7, 24])
@pytest.mark.usefixtures("usual_promotion")
def test_a_merge_is_a_fold_over_microbatches_that_count(size):
  run = optax_accum.microbatch(
    statistics, reduction=MERGES, microbatch_size=size, weight_fn=any_above_zero
  )
  got = jax.jit(run)(ROWS[::-1])
  chex.assert_trees_all_close(got, folded(ROWS[::-1], size), rtol=1e-6)


@pytest.mark.usefixtures("usual_promotion")
def test_weights_of_zero_are_left_out():
  # microbatch i has the rows 4 i to 4 i + 3 in order
  x = np.sort(ROWS).reshape(6, 4).T.ravel()
  x[x < 0] = np.nan
  for weight_fn, left in ((lambda x: jnp.all(x > 0), 3), (lambda x: jnp.sum(x) * 0 > 0, 0)):
    run = optax_accum.microbatch(
      statistics, reduction=MERGES, num_microbatches=6, weight_fn=weight_fn
    )
    got = jax.jit(run)(x)
    assert float(got["average"].count) == 4 * left
    if left:
      np.testing.assert_allclose(got["average"].total, np.sort(ROWS)[-12:].sum(), rtol=1e-6)
    else:
      chex.assert_trees_all_equal(got, jax.tree.map(jnp.zeros_like, got))


def loss_fn(params, x):
  return jnp.mean(params * x), statistics(x)


@pytest.mark.parametrize("kind", ["auto", more("explicit")])
@pytest.mark.usefixtures("usual_promotion")
def test_devices_are_merged_in_the_order_of_the_mesh(kind):
  mesh = devices.make_mesh(8, kind={"auto": devices.AUTO, "explicit": devices.EXPLICIT}[kind])
  tx = optax.sgd(0.1)
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=3, has_aux=True, aux_reduction=MERGES, mesh=mesh,
    weight_fn=any_above_zero,
  )  # fmt: skip
  params = jnp.float32(1.0)
  *_, metrics = step(params, tx.init(params), ROWS)
  chex.assert_trees_all_close(metrics["aux"], folded(ROWS, 8, devices=8), rtol=1e-6)
  # the first devices had none that counts
  assert float(metrics["aux"]["ends"][0]) != ROWS[0]


@pytest.mark.usefixtures("usual_promotion")
def test_a_merge_may_be_beside_words():
  def with_words(params, x):
    return jnp.mean(params * x), {"rows": x, "both": {"s": jnp.sum(x), "m": moments(x)}}

  mesh, tx = devices.make_mesh(4), optax.sgd(0.1)
  words = {"rows": "concat", "both": {"s": "sum", "m": merge_moments}}
  step = optax_accum.make_train_step(
    with_words, tx, microbatch_size=8, has_aux=True, aux_reduction=words, mesh=mesh,
    skip_nonfinite=True,
  )  # fmt: skip
  params = jnp.float32(1.0)
  *_, metrics = step(params, tx.init(params), ROWS)
  aux = metrics["aux"]
  np.testing.assert_array_equal(aux["rows"], ROWS)
  np.testing.assert_allclose(aux["both"]["m"]["mean"], np.mean(ROWS), rtol=1e-5)
  np.testing.assert_allclose(aux["both"]["m"]["m2"], 24 * np.var(ROWS), rtol=1e-5)


def run(fun, merge, **options):
  return optax_accum.microbatch(fun, reduction=merge, num_microbatches=2, **options)(ROWS)


def a_and_b(x):
  return {"a": jnp.mean(x), "b": jnp.mean(x)}


@pytest.mark.parametrize(("fun", "merge", "error", "match"), [
  (a_and_b, lambda a, b: {"a": a["a"] + b["a"]}, ValueError, r"\(a, b\) returned output\['b'\] is missing: return"),
  (jnp.mean, lambda a, b: (a + b)[None], ValueError, r"output has type float32\[1\], not float32\[\]: return"),
  (jnp.mean, lambda a, b: (a + b).astype(jnp.float16), ValueError,
    r"output has type float16\[\], not float32\[\]: return"),
  (a_and_b, {"a": operator.add}, ValueError, "not a prefix tree of the outputs"),
])  # fmt: skip
def test_a_merge_that_does_not_fit_is_refused(fun, merge, error, match):
  with pytest.raises(error, match=match):
    run(fun, merge)


def test_only_what_has_no_gradient_merges_under_differentiation():
  def loss(scale, stop):
    def fun(scale, x):
      return jnp.mean(scale * x), stop(jax.nn.logsumexp(scale * x))

    split = optax_accum.microbatch(
      fun, reduction=("mean", jnp.logaddexp), num_microbatches=3, batch_argnums=1
    )
    return split(scale, ROWS)

  gradient = jax.grad(lambda s: loss(s, jax.lax.stop_gradient)[0])(jnp.float32(2.0))
  np.testing.assert_allclose(gradient, np.mean(ROWS), rtol=1e-6)
  with pytest.raises(NotImplementedError, match=r"return jax\.lax\.stop_gradient of it, or reduce"):
    jax.grad(lambda s: loss(s, lambda x: x)[1])(jnp.float32(2.0))


@pytest.mark.parametrize("padding", [[0, 1, 1], more([1, 1, 0]), [0, 0, 0]])
def test_a_merge_that_is_singular_at_ones_has_its_gradient(padding):
  def merged(scale, fold):  # correlations, by Fisher's z
    return fold(lambda a, b: scale * jnp.tanh(jnp.arctanh(a / scale) + jnp.arctanh(b / scale)))

  values, counted = np.array([0.3, -0.2, 0.4], np.float32), np.array(padding, np.float32)

  def split(merge):
    run = optax_accum.microbatch(
      lambda x, w: x[0], reduction=merge, num_microbatches=3, batch_argnums=(0, 1),
      weight_fn=lambda x, w: w[0],
    )  # fmt: skip
    return run(values, counted)

  def by_hand(merge):
    kept = values[counted > 0]
    return functools.reduce(merge, kept) if kept.size else jnp.zeros(())

  got, expected = (
    jax.jit(jax.value_and_grad(functools.partial(merged, fold=fold)))(1.0)
    for fold in (split, by_hand)
  )
  chex.assert_trees_all_close(got, expected, rtol=1e-5)


def merge_by(power):
  """Merges power means. The derivative of those of zeros, which are no value, is NaN."""

  def merge(a, b):
    terms = [x["n"] * jnp.exp(power * jnp.log(x["mean"])) for x in (a, b)]
    n = a["n"] + b["n"]
    return {"n": n, "mean": jnp.exp(jnp.log(sum(terms) / n) / power)}

  return merge


@pytest.mark.parametrize(("counted", "count"), [("some", 3), more("none", 1)])
def test_what_a_merge_closes_over_has_its_gradient(counted, count):
  # one in each microbatch
  values = np.array([1.0, 2.0, 4.0, 3.0, 7.0, 5.0], np.float32)
  kept = (values == 2) | (values == 7) if counted == "some" else values < 0
  values = np.where(kept, values, np.nan)
  rows = values.reshape(count, 1, -1).repeat(4, 1).ravel()
  of = lambda x: {"n": jnp.float32(x.shape[0]), "mean": jnp.mean(x)}  # noqa: E731

  def split(power, rows):
    run = optax_accum.microbatch(
      of, reduction=merge_by(power), microbatch_size=4, weight_fn=lambda x: jnp.sum(x > 0),
      axis_name="data" if count > 1 else None,
    )  # fmt: skip
    return run(rows)["mean"]

  if count > 1:
    mesh, row = devices.make_mesh(count), jax.P("data")
    split = jax.shard_map(split, mesh=mesh, in_specs=(jax.P(), row), out_specs=jax.P())

  def by_hand(power):
    parts = [of(jnp.full(4, value)) for value in values if value > 0]
    return functools.reduce(merge_by(power), parts)["mean"] if parts else 0 * power

  def derivatives(fun):
    power, gradient = jnp.float32(1.5), jax.grad(fun)
    of_several = gradient
    # before, no vmap of a sum over devices
    if count == 1 or jax.__version_info__ >= (0, 9):
      of_several = lambda power: jax.vmap(gradient)(power[None])[0]  # noqa: E731
    return fun(power), gradient(power), jax.jvp(fun, (power,), (power,))[1], of_several(power)

  expected = jax.jit(lambda: derivatives(by_hand))()
  got = jax.jit(lambda: derivatives(lambda power: split(power, jnp.asarray(rows))))()
  chex.assert_trees_all_close(got, expected, rtol=1e-4)


def test_a_function_may_change_the_containers_that_it_is_given():
  def into(a, b, changed):
    changed["n"], changed["low"] = a["n"] + b["n"], jnp.minimum(a["low"], b["low"])
    return changed

  fun = lambda x: {"n": jnp.float32(x.shape[0]), "low": jnp.min(x)}  # noqa: E731
  for merge in (lambda a, b: into(a, b, a), lambda a, b: into(a, b, b)):
    got = optax_accum.microbatch(
      fun, reduction=merge, num_microbatches=6, weight_fn=lambda x: jnp.all(x > 0)
    )(np.sort(ROWS).reshape(6, 4).T.ravel())
    assert got == {"n": 12, "low": np.sort(ROWS)[12]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
  """A node that can be called, as modules of Equinox: no function that merges."""

  weight: object
  bias: object

  def __call__(self, x):
    return x * self.weight + self.bias


def test_a_node_that_can_be_called_is_a_tree_of_words():
  loss = lambda layer, x: (jnp.mean(layer(x)), Layer(jnp.sum(x), jnp.max(x)))  # noqa: E731
  run = optax_accum.microbatch_value_and_grad(
    loss, has_aux=True, num_microbatches=2, aux_reduction=Layer("sum", jnp.maximum)
  )
  (_, aux), _ = run(Layer(jnp.float32(2.0), jnp.float32(1.0)), ROWS)
  np.testing.assert_allclose([aux.weight, aux.bias], [ROWS.sum(), ROWS.max()], rtol=1e-6)
