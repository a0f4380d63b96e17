"""A cycle of microbatches equals the whole batch, whatever the split, weights and dtypes."""

import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import oracle, trees
from support.compiled import temp_bytes
from support.devices import make_mesh
from support.samples import more

import optax_accum


def init_params(dtype=np.float64):
  rng = np.random.default_rng(0)
  return {"w": rng.normal(size=(3, 4)).astype(dtype), "b": rng.normal(size=(4,)).astype(dtype)}


def make_batch(rows, masked=False, dtype=np.float64):
  rng = np.random.default_rng(rows)
  valid = np.ones((rows, 2))
  if masked:  # some rows are all padding, and so is, often, a whole microbatch
    valid = (rng.random((rows, 2)) < 0.5) * (rng.random((rows, 1)) < 0.6)
    valid[0, 0] = 1
  return {
    "x": rng.normal(size=(rows, 2, 3)).astype(dtype),
    "y": rng.normal(size=(rows, 2)).astype(dtype),
    "valid": valid.astype(dtype),
  }


def valid_tokens(batch):
  return jnp.sum(batch["valid"])


def masked_mean_loss(params, batch, has_aux=False):
  """A mean over valid tokens: 0/0 in an all-padding microbatch."""
  hidden = (batch["x"] @ params["w"] + params["b"][None, None]) ** 2
  error = (jnp.sum(hidden, -1) - batch["y"]) * batch["valid"]
  loss = jnp.sum(error**2) / jnp.sum(batch["valid"])
  if not has_aux:
    return loss
  return loss, {
    "mae": jnp.sum(jnp.abs(error)) / jnp.sum(batch["valid"]),
    "tokens": jnp.sum(batch["valid"]).astype(jnp.int32),
    "worst": jnp.max(jnp.abs(error)),
    "rows": error,
  }


AUX = {"mae": "mean", "tokens": "sum", "worst": "max", "rows": "concat"}


whole = jax.jit(jax.value_and_grad(masked_mean_loss))


def mean_of_means(params, batch, size):
  """The planted wrong answer: every microbatch counts the same."""
  rows = batch["x"].shape[0]
  parts = [trees.index(batch, slice(i, i + size)) for i in range(0, rows, size)]
  losses, grads = zip(*[jax.device_get(whole(params, p)) for p in parts], strict=True)
  return sum(losses) / len(parts), jax.tree.map(lambda *g: sum(g) / len(parts), *grads)


# Whole, even, ragged by one and by more, and too large.
@pytest.mark.parametrize(
  ("rows", "sizes", "masked"),
  [(1, [1, 13], False), more(7, [2, 3, 5, 6], False), (12, [1, 5, 7, 13], True)],
)
def test_every_split_equals_the_whole_batch(rows, sizes, masked):
  with jax.enable_x64(True):
    params, batch = init_params(), make_batch(rows, masked)

    def cycle(size, has_aux):
      return optax_accum.microbatch_value_and_grad(
        functools.partial(masked_mean_loss, has_aux=has_aux),
        has_aux=has_aux,
        microbatch_size=size,
        weight_fn=valid_tokens if masked else None,
        aux_reduction=AUX if has_aux else "mean",
      )(params, batch)

    # One program for all sizes: one for each would take three times as long. Aux leaves loss and
    # gradients as they are, so one size will do without.
    every = jax.jit(lambda: [{5: cycle(5, False)}, {size: cycle(size, True) for size in sizes}])()
    loss_fn = functools.partial(masked_mean_loss, has_aux=True)
    (loss, aux), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch)
    for has_aux, actual in enumerate(every):
      expected = ((loss, aux) if has_aux else loss), grads
      for of_size in actual.values():
        trees.assert_close(of_size, expected, 1e-10)
      if not has_aux and _weighs_unevenly(rows, 5, batch):
        with pytest.raises(AssertionError):
          trees.assert_close(mean_of_means(params, batch, 5), expected, 1e-10)


def _weighs_unevenly(rows, size, batch):
  valid = np.asarray(batch["valid"]).sum(1)
  return len({valid[i : i + size].sum() for i in range(0, rows, size)}) > 1


def test_arguments_are_found_by_position_or_name():
  def loss_fn(params, x, y):
    return jnp.mean((x * params - y) ** 2)

  @functools.wraps(loss_fn)
  def decorated(*args, more=None, **named):  # takes more than its signature
    return loss_fn(*args, **named)

  params, x, y = jnp.asarray(2.0), np.arange(6, dtype=np.float32), np.ones(6, np.float32)
  expected = np.mean((2 * x - y) ** 2), np.mean(2 * x * (2 * x - y))

  @jax.jit
  def every(params, x, y):
    run = functools.partial(optax_accum.microbatch_value_and_grad, num_microbatches=3)
    return [
      run(decorated if "more" in kwargs else loss_fn, **options)(params, *args, **kwargs)
      for options, args, kwargs in [
        ({"batch_argnums": (1, 2)}, (x,), {"y": y, "more": 1}),
        ({"batch_argnums": (1, 2)}, (x, y), {}),
        ({"batch_argnums": (-2, -1)}, (x, y), {}),
        ({"batch_argnums": (1, 2)}, (), {"x": x, "y": y}),
        ({"batch_argnums": (1, "y")}, (x,), {"y": y}),
        ({"batch_argnums": ("y", 1)}, (x,), {"y": y, "more": 1}),
        ({"batch_argnums": ("x", "y")}, (), {"x": x, "y": y}),
        ({"batch_argnums": [1, "x", "y"]}, (), {"x": x, "y": y}),
      ]
    ]

  for actual in every(params, x, y):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("argnums", [(1, "valid"), ("valid", 1)])
def test_weight_fn_is_given_every_batch_argument_in_their_order(argnums):
  def loss_fn(params, x, *, valid):
    return params * jnp.sum(x[:, 0] * valid) / jnp.sum(valid)

  def weight_fn(*split):
    x, valid = split if argnums[0] == 1 else split[::-1]
    assert (x.shape, valid.shape) == ((2, 1), (2,))
    return jnp.sum(valid)

  x = np.arange(6, dtype=np.float32)[:, None]
  valid = np.float32([1, 1, 1, 0, 0, 0])
  cycle = optax_accum.microbatch_value_and_grad(
    loss_fn, microbatch_size=2, batch_argnums=argnums, weight_fn=weight_fn
  )
  loss, grad = jax.jit(cycle)(jnp.asarray(3.0), x, valid=valid)
  assert (float(loss), float(grad)) == (3.0, 1.0)


@pytest.mark.parametrize("broken_at_zero", [
  lambda p, x: jnp.mean(jnp.sqrt(p["z"] * x)),
  lambda p, x: jnp.mean(jnp.sqrt(jnp.real(p["c"] * jnp.conj(p["c"])) * x)),
  lambda p, x: jnp.where(x[0] == 0, jnp.inf, 0.0),
], ids=["a later gradient", "a complex gradient", "the loss"])  # fmt: skip
def test_skip_nonfinite_looks_at_the_loss_and_at_every_gradient(broken_at_zero):
  def loss_fn(params, x):
    return jnp.mean(params["a"] * (x - 1)) + broken_at_zero(params, x)

  params = {"a": jnp.asarray(3.0), "c": jnp.asarray(1 + 1j), "z": jnp.asarray(2.0)}
  x, whole = np.float32([1, 0, 4]), jax.jit(jax.value_and_grad(loss_fn))
  finite = [bool(np.isfinite(leaf)) for leaf in jax.tree.leaves(whole(params, x[1:2]))]
  assert finite.count(False) == 1  # of loss, a, c, z
  assert finite[1]
  cycle = optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=3, skip_nonfinite=True)
  loss, grads, stats = jax.jit(cycle)(params, x)
  assert (int(stats.skipped_microbatches), float(stats.total_weight)) == (1, 2.0)
  expected = whole(params, x[::2])
  trees.assert_close((loss, grads), expected, 1e-6)


def test_padding_is_not_counted_as_skipped():
  batch = make_batch(4, dtype=np.float32)
  batch["valid"][1::2] = 0  # microbatch 1 of 2, whose loss is 0/0
  cycle = optax_accum.microbatch_value_and_grad(
    masked_mean_loss, num_microbatches=2, weight_fn=valid_tokens, skip_nonfinite=True
  )
  _, _, stats = jax.jit(cycle)(init_params(np.float32), batch)
  assert (int(stats.skipped_microbatches), float(stats.total_weight)) == (0, 4.0)


def statistics(x):
  return {
    "row": 2 * x,
    "of": (jnp.sum(x), jnp.max(x), jnp.min(x)),
    "flags": [jnp.any(x > 5), jnp.any(x > 9), jnp.all(x > 0), jnp.all(x > 5)],
    "small": jnp.sum(x).astype(jnp.int8),
  }


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_prefix_tree_gives_each_output_its_reduction(size):
  x = np.float32([3, 1, 4, 1, 5, 9, 2])
  run = optax_accum.microbatch(
    statistics,
    reduction={
      "row": "concat",
      "of": ("sum", "max", "min"),
      "flags": ["max", "max", "min", "min"],
      "small": "sum",
    },
    microbatch_size=size,
  )
  out = jax.jit(run)(x)
  chex.assert_trees_all_equal(out["row"], 2 * x)
  assert [float(v) for v in out["of"]] == [25, 9, 1]
  # "max" of bools is whether any is true, and "min" whether all are.
  assert [v.tolist() for v in out["flags"]] == [True, False, True, False]
  assert {v.dtype for v in out["flags"]} == {jnp.dtype(jnp.bool_)}
  assert int(out["small"]) == 25
  # as jnp.sum: a sum of int8 soon leaves int8
  assert out["small"].dtype == jnp.int32


@pytest.mark.parametrize("names", ["last", ("stack", "last", "sum")])
def test_the_smaller_last_microbatch_is_last(names):
  fun = jnp.sum if names == "last" else lambda x: (jnp.sum(x),) * 3
  run = optax_accum.microbatch(fun, reduction=names, microbatch_size=2)
  # rows 0 and 2, rows 1 and 3, row 4
  out = jax.jit(run)(np.float32([1, 2, 4, 8, 16]))
  if names == "last":
    assert float(out) == 16
  else:
    assert (out[0].tolist(), float(out[1]), float(out[2])) == ([5, 10, 16], 16, 31)


def test_min_max_sum_and_last_leave_out_what_has_no_weight():
  x = np.float32([1, -5, 2, 9])
  run = optax_accum.microbatch(
    lambda x: (x[0], x[0], x[0], x[0]),
    reduction=("max", "min", "last", "sum"),
    num_microbatches=4,
    weight_fn=lambda x: jnp.sum((x > 0) & (x < 9)),
  )
  assert [float(v) for v in jax.jit(run)(x)] == [2, 1, 2, 3]


@pytest.mark.parametrize(
  ("impl", "mesh"),
  [("threefry2x32", 8), more("rbg", None), more("unsafe_rbg", None), ("unsafe_rbg", 8)],
)
def test_no_two_microbatches_of_all_steps_share_noise(impl, mesh):
  """A fold of "unsafe_rbg" by a step and one by a microbatch commute."""
  tx = optax.sgd(0.1)
  step = optax_accum.make_train_step(
    lambda p, x, key: (jnp.mean(p * x), jax.random.uniform(key, x.shape)),
    tx,
    num_microbatches=8,
    mesh=mesh and make_mesh(mesh),
    rng_argnums=2,
    has_aux=True,
    aux_reduction="concat",
    donate=False,
  )
  params, x = jnp.ones(()), np.ones(64, np.float32)
  start = jax.random.key(0, impl=impl)
  keys = [jax.random.fold_in(start, i) for i in range(8)]
  noise = [step(params, tx.init(params), x, key)[-1]["aux"] for key in keys]
  assert len(np.unique(noise)) == 8 * 64


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_may_be_alone_by_name_and_in_arrays(make_key):
  def draw(x, *, key, keys):
    return jax.random.uniform(key), jax.vmap(jax.random.uniform)(keys)

  key, keys = make_key(0), jax.random.split(make_key(1), 3)
  names = ("key", "keys", "key")  # one of them twice
  run = optax_accum.microbatch(draw, reduction="stack", num_microbatches=2, rng_argnums=names)
  one, three = jax.jit(run)(np.arange(4, dtype=np.float32), key=key, keys=keys)

  @jax.jit
  def expected(key, keys, i):
    of_each = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, i)))
    return jax.random.uniform(jax.random.fold_in(key, i)), of_each(keys)

  for i in range(2):
    chex.assert_trees_all_equal((one[i], three[i]), expected(key, keys, i))


def with_statistics(params, batch, stats, momentum=0.9):
  mean = jnp.mean(batch)
  new = {"mean": momentum * stats["mean"] + (1 - momentum) * mean, "steps": stats["steps"] + 1}
  return jnp.mean(params * (batch - mean) ** 2), (new, {"seen": stats["mean"]})


@pytest.mark.parametrize("size", [2, 4])
def test_a_carry_goes_from_each_microbatch_to_the_next(size):
  params, batch = jnp.asarray(1.5), np.arange(6, dtype=np.float32)
  parts = {2: [batch[i::3] for i in range(3)], 4: [batch[:4], batch[4:]]}[size]
  stats = {"mean": jnp.asarray(1.0), "steps": jnp.asarray(0)}
  cycle = optax_accum.microbatch_value_and_grad(
    with_statistics, has_aux=True, microbatch_size=size, carry_argnum=2, aux_reduction="stack"
  )
  (_, (new, aux)), _ = jax.jit(cycle)(params, batch, stats)
  carry, seen = stats, []
  for part in parts:
    seen.append(carry["mean"])
    _, (carry, _) = jax.jit(with_statistics)(params, part, carry)
  chex.assert_trees_all_close((new, aux["seen"]), (carry, np.stack(seen)), rtol=1e-6)
  assert int(new["steps"]) == len(parts)


def test_half_precision_is_added_up_in_float32():
  dtype = jnp.bfloat16

  def loss_fn(params, x):
    return jnp.mean(params * x)

  x, params = np.ones(1024, dtype), np.ones((), dtype)
  cycle = optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=1024, reduction="sum")
  loss, grad = jax.jit(cycle)(params, x)
  assert (loss.dtype, grad.dtype) == (dtype, dtype)
  assert (float(loss), float(grad)) == (1024.0, 1024.0)
  naive = lax.scan(lambda c, x: (c + x, None), jnp.zeros((), jnp.bfloat16), x.astype(jnp.bfloat16))
  assert float(naive[0]) == 256.0  # where bfloat16 stops counting
  in_bfloat16 = optax_accum.microbatch_value_and_grad(
    loss_fn, num_microbatches=1024, reduction="sum", accumulator_dtype=jnp.bfloat16
  )
  assert float(jax.jit(in_bfloat16)(params, x)[1]) == 256.0


def test_weights_beyond_float32_are_not_rounded():
  def loss_fn(params, x):
    return params * jnp.mean(x)

  with jax.enable_x64(True):
    heavy = 2**24 + 1  # the first integer that float32 does not hold
    cycle = optax_accum.microbatch_value_and_grad(
      loss_fn, num_microbatches=2, weight_fn=lambda x: jnp.where(x[0] > 0, 1, heavy)
    )
    loss, grad = jax.jit(cycle)(jnp.asarray(1.0), np.array([0.0, 1.0]))
    assert grad.dtype == np.float64
    rounded = 1 / (np.float64(np.float32(heavy)) + 1)
    assert abs(rounded * (heavy + 1) - 1) > 1e-8
    np.testing.assert_allclose([loss, grad], 1 / (heavy + 1), rtol=1e-12)


def test_the_sums_of_microbatch_are_in_accumulator_dtype():
  def totals(x, dtype):
    run = optax_accum.microbatch(
      lambda x: (x[0], x[0]),
      reduction=("sum", "mean"),
      num_microbatches=len(x),
      accumulator_dtype=dtype,
    )
    total, mean = jax.jit(run)(x)
    assert total.dtype == mean.dtype == x.dtype
    return float(total), float(mean) * len(x)

  ones = np.ones(1024, jnp.bfloat16)
  assert (totals(ones, None), totals(ones, jnp.bfloat16)) == ((1024,) * 2, (256,) * 2)
  with jax.enable_x64(True):
    x = np.array([2.0**24, 1, 1, 1], np.float32)
    # 2**24 + 3 is rounded once, to 2**24 + 4; in float32 every 1 would be lost.
    assert (totals(x, None), totals(x, jnp.float64)) == ((2**24,) * 2, (2**24 + 4,) * 2)


def test_integers_keep_their_dtype_and_small_ones_are_widened():
  widened = [(jnp.uint32, jnp.uint32), (jnp.uint8, jnp.uint32), (jnp.int16, jnp.int32)]
  for n in (1, 2):
    run = optax_accum.microbatch(lambda x: x[0], reduction="sum", num_microbatches=n)
    totals = jax.jit(lambda *each, run=run: [run(x) for x in each])(
      *(np.full(2, 200, dtype) for dtype, _ in widened)
    )
    for total, (_, summed) in zip(totals, widened, strict=True):
      assert (total.dtype, int(total)) == (summed, 200 * n)


def test_one_microbatch_is_the_program_of_value_and_grad():
  params, batch = init_params(np.float32), make_batch(6, dtype=np.float32)
  loss_fn = functools.partial(masked_mean_loss, has_aux=True)
  functools.update_wrapper(loss_fn, masked_mean_loss)
  for has_aux, fun in [(False, masked_mean_loss), (True, loss_fn)]:
    plain = jax.jit(jax.value_and_grad(fun, has_aux=has_aux)).lower(params, batch).as_text()
    for option in [{"num_microbatches": 1}, {"microbatch_size": 6}, {"microbatch_size": 99}]:
      cycle = optax_accum.microbatch_value_and_grad(
        fun, has_aux=has_aux, aux_reduction="last", **option
      )
      assert jax.jit(cycle).lower(params, batch).as_text() == plain


def test_the_program_does_not_grow_with_the_number_of_microbatches():
  params, batch = init_params(np.float32), make_batch(64, dtype=np.float32)

  def lines(n):
    cycle = optax_accum.microbatch_value_and_grad(masked_mean_loss, num_microbatches=n)
    text = jax.jit(cycle).lower(params, batch).as_text()
    assert text.count("stablehlo.while") == 1
    return len(text.splitlines())

  assert lines(2) == lines(8) == lines(64)


def test_the_loop_has_a_name_in_a_profile():
  params, batch = init_params(np.float32), make_batch(8, dtype=np.float32)
  cycle = optax_accum.microbatch_value_and_grad(masked_mean_loss, num_microbatches=4)
  text = jax.jit(cycle).lower(params, batch).as_text(debug_info=True)
  assert "microbatches/" in text
  assert "accumulate/" in text


def mlp_loss(params, batch):
  hidden = batch
  for w in params:
    hidden = jnp.tanh(hidden @ w)
  return jnp.mean(hidden**2)


def test_memory_is_that_of_one_microbatch():
  params = [jax.ShapeDtypeStruct((256, 256), np.float32)] * 4
  batch = jax.ShapeDtypeStruct((2048, 256), np.float32)
  whole = temp_bytes(jax.jit(jax.value_and_grad(mlp_loss)), params, batch)
  for n in (2, 32):
    ours = temp_bytes(
      jax.jit(optax_accum.microbatch_value_and_grad(mlp_loss, num_microbatches=n)), params, batch
    )
    by_hand = temp_bytes(jax.jit(oracle.hand_written(mlp_loss, n)), params, batch)
    assert ours <= 1.05 * by_hand
    assert ours < whole


def test_a_batch_that_does_not_divide_takes_no_more_memory():
  def loss_fn(params, batch):
    return jnp.mean((batch @ params) ** 2)

  shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2048, 8), (1024, 2048))]
  even, ragged = (
    temp_bytes(
      jax.jit(optax_accum.microbatch_value_and_grad(loss_fn, microbatch_size=size)), *shapes
    )
    for size in (128, 127)
  )
  assert ragged < 1.2 * even  # the batch itself is 8 times as large

  def layered(params, batch):
    hidden, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)
    return jnp.mean(hidden**2)

  shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 256, 256), (30, 256))]
  even, ragged = (
    temp_bytes(
      jax.jit(optax_accum.microbatch_value_and_grad(layered, microbatch_size=size)), *shapes
    )
    for size in (6, 7)
  )
  assert ragged < 1.1 * even


def test_it_works_inside_vmap_and_under_an_outer_grad():
  with jax.enable_x64(True):
    params, batch = init_params(), make_batch(6, masked=True)
    cycle = optax_accum.microbatch_value_and_grad(
      masked_mean_loss, microbatch_size=4, weight_fn=valid_tokens
    )
    population = jax.tree.map(lambda x: np.stack([x, 2 * x, -x]), params)
    trees.assert_close(
      jax.jit(jax.vmap(cycle, (0, None)))(population, batch),
      jax.jit(jax.vmap(whole, (0, None)))(population, batch),
      1e-10,
    )
    # the NaN of 0/0 has a NaN derivative
    batch["valid"] = np.ones_like(batch["valid"])
    even = optax_accum.microbatch_value_and_grad(masked_mean_loss, num_microbatches=2)

    def squared_norm(params, value_and_grad):
      return sum(jnp.sum(g**2) for g in jax.tree.leaves(value_and_grad(params, batch)[1]))

    expected, *found = (
      jax.jit(jax.grad(functools.partial(squared_norm, value_and_grad=f)))(params)
      for f in (whole, cycle, even)
    )
    for actual in found:
      trees.assert_close(actual, expected, 1e-10)


def test_axis_name_may_be_that_of_a_vmap():
  params, batch = init_params(np.float32), make_batch(8, dtype=np.float32)
  split = trees.blocks(batch, 2)
  cycle = optax_accum.microbatch_value_and_grad(
    masked_mean_loss, num_microbatches=2, axis_name="rows"
  )
  both = jax.jit(jax.vmap(cycle, (None, 0), axis_name="rows"))(params, split)
  expected = whole(params, batch)
  trees.assert_close(jax.tree.map(lambda x: x[1], jax.device_get(both)), expected, 1e-5)
