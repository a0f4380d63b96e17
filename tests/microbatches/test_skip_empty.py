"""`skip_empty`: a microbatch of padding is not run, and nothing else changes."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import compiled, devices, trees
from support.devices import make_mesh

from optax_accum import make_train_step, microbatch_value_and_grad

COUNT = {"weight_fn": lambda batch: jnp.sum(batch["mask"])}


def loss_fn(params, batch):
  errors = (jnp.tanh(batch["x"] @ params["w"]) + params["b"] - batch["y"]) ** 2
  return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


def init_params(dtype=np.float64):
  rng = np.random.default_rng(0)
  return {"w": rng.normal(size=8).astype(dtype), "b": np.asarray(0.5, dtype)}


def make_batch(rows, counted, dtype=np.float64):
  """Strided, as a split is: microbatch i of N has rows i, i + N ..."""
  rng = np.random.default_rng(1)
  x, y = (
    rng.normal(size=(rows, 8)).astype(dtype),
    rng.normal(size=rows).astype(dtype),
  )
  mask = np.isin(np.arange(rows), counted).astype(dtype)
  return {"x": x, "y": np.where(mask, y, y.dtype.type(7)), "mask": mask}


whole_value_and_grad = jax.jit(jax.value_and_grad(loss_fn))


def whole(params, batch):
  rows = np.flatnonzero(batch["mask"])
  return whole_value_and_grad(
    params, {name: x[rows] for name, x in batch.items()}
  )


@pytest.mark.parametrize(
  "size", [{"num_microbatches": 3}, {"microbatch_size": 2}], ids=str
)
def test_the_gradient_is_that_of_what_counts(size):
  with jax.enable_x64(True):
    split = jax.jit(
      microbatch_value_and_grad(loss_fn, skip_empty=True, **COUNT, **size)
    )
    for counted in ([0], [1, 5], [0, 1, 2, 3, 6], list(range(8)), [8]):
      params, batch = init_params(), make_batch(9, counted)
      trees.assert_close(split(params, batch), whole(params, batch), 1e-10)


def test_where_nothing_counts_nothing_moves():
  params, batch, tx = (
    init_params(np.float32),
    make_batch(8, [], np.float32),
    optax.sgd(0.1),
  )
  step = make_train_step(
    loss_fn, tx, num_microbatches=4, skip_empty=True, donate=False, **COUNT
  )
  moved, _, metrics = step(params, tx.init(params), batch)
  trees.assert_close(moved, params, 0)
  assert (metrics["loss"], metrics["total_weight"]) == (0, 0)


def test_what_is_collected_has_zeros_and_a_carry_waits():
  def fun(params, batch, carry):
    loss = loss_fn(params, batch)
    aux = {
      "loss": loss,
      "y": batch["y"],
      "most": jnp.max(batch["y"]),
      "n": jnp.int32(1),
    }
    return loss, (carry + 1, aux)

  words = {"loss": "stack", "y": "concat", "most": "max", "n": "sum"}
  split = microbatch_value_and_grad(
    fun,
    has_aux=True,
    microbatch_size=2,
    carry_argnum=2,
    aux_reduction=words,
    skip_empty=True,
    skip_nonfinite=True,
    **COUNT,
  )
  params, batch = (
    init_params(np.float32),
    make_batch(9, [0, 1, 2, 4, 5], np.float32),
  )
  (loss, (carry, aux)), _, stats = jax.jit(split)(params, batch, jnp.int32(0))
  empty = np.array([False, False, False, True, True])
  assert (int(carry), int(aux["n"]), int(stats.skipped_microbatches)) == (
    3,
    3,
    0,
  )
  np.testing.assert_array_equal(aux["loss"] == 0, empty)
  np.testing.assert_array_equal(np.flatnonzero(aux["y"] == 0), [3, 7, 8])
  assert aux["most"] == batch["y"][[0, 1, 2, 4, 5, 6]].max()
  assert np.isfinite(loss)


def dealt(x, count, size=2, devices=1):
  """As the docstring deals out the rows of a batch that is padded at its end."""
  return np.moveaxis(
    x.reshape(count, devices, size, *x.shape[1:]), 0, 2
  ).reshape(x.shape)


def test_dealt_rows_fill_one_microbatch_of_all_devices_after_the_other():
  rows = dealt(np.arange(24), 4, 3, devices=2).reshape(2, 12)  # of each device
  for index in range(4):
    assert set(rows[:, index::4].ravel()) == set(
      range(6 * index, 6 * index + 6)
    )


def test_one_program_does_the_work_of_what_it_holds():
  calls = []

  def counted_loss(params, batch):
    jax.debug.callback(lambda: calls.append(1))
    return loss_fn(params, batch)

  step = jax.jit(
    microbatch_value_and_grad(
      counted_loss, num_microbatches=8, skip_empty=True, **COUNT
    )
  )
  params = init_params(np.float32)
  step(params, make_batch(16, list(range(16)), np.float32))
  jax.effects_barrier()
  with compiled.compilations() as compilations:
    for full in range(9):
      for batch in (
        make_batch(16, [i for i in range(16) if i % 8 < full], np.float32),
        jax.tree.map(
          lambda x: dealt(x, 8), make_batch(16, range(2 * full), np.float32)
        ),
      ):
        calls.clear()
        step(params, batch)
        jax.effects_barrier()
        assert len(calls) == full
  assert compilations == []


def test_it_costs_no_memory():
  zeros = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)  # noqa: E731
  large = {"w": zeros(256, 256), "b": zeros(1, 256)}
  batch = {"x": zeros(64, 256), "y": zeros(64, 256), "mask": zeros(64, 1)}
  temps, copies = [], []
  for options in ({}, {"skip_empty": True}):
    step = jax.jit(
      microbatch_value_and_grad(loss_fn, num_microbatches=8, **COUNT, **options)
    )
    executable = step.lower(large, batch).compile()
    temps.append(executable.memory_analysis().temp_size_in_bytes)
    copies.append(compiled.copies_of(executable.as_text(), 256 * 256))
  assert temps[1] <= 1.02 * temps[0]
  assert copies[1] <= copies[0]


@pytest.mark.parametrize(
  ("kind", "spec", "reduce_gradients"),
  [
    (devices.AUTO, P(), "per_cycle"),
    (devices.EXPLICIT, P(), "per_microbatch"),
    (devices.EXPLICIT, P("data"), "per_cycle"),
    (devices.AUTO, P("data"), "per_microbatch"),
  ],
  ids=str,
)
def test_devices_may_differ_in_what_they_skip(kind, spec, reduce_gradients):
  # Device 0 has rows 0 to 3, in microbatches of 0 and 2, and of 1 and 3; and so on.
  counted = [0, 2, 4, 5, 15]
  mesh, tx = make_mesh(4, kind=kind), optax.sgd(0.1)
  params, batch = init_params(np.float32), make_batch(16, counted, np.float32)
  loss, grads = jax.device_get(whole(params, batch))
  params = devices.put(params, mesh, {"w": spec, "b": P()})

  def with_aux(params, batch):
    loss = loss_fn(params, batch)
    return loss, loss

  step = make_train_step(
    with_aux,
    tx,
    has_aux=True,
    aux_reduction="stack",
    num_microbatches=2,
    skip_empty=True,
    mesh=mesh,
    reduce_gradients=reduce_gradients,
    donate=False,
    **COUNT,
  )
  moved, _, metrics = step(params, tx.init(params), batch)
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  step_by = lambda p, g: p - np.float32(0.1) * g  # noqa: E731
  expected = jax.tree.map(step_by, init_params(np.float32), grads)
  trees.assert_close(jax.device_get(moved), expected, 1e-5)
  # Of each device in turn, whether a microbatch ran there for others or not.
  runs = [True, False, True, True, False, False, False, True]
  np.testing.assert_array_equal(metrics["aux"] != 0, runs)


@pytest.mark.parametrize("kind", [devices.AUTO, devices.EXPLICIT])
def test_beside_an_axis_of_tensor_parallelism_it_changes_no_step(kind):
  mesh, tx = make_mesh(4, 2, kind=kind), optax.sgd(0.1)
  params, batch = (
    init_params(np.float32),
    make_batch(16, [0, 2, 4, 5, 15], np.float32),
  )
  step = make_train_step(
    loss_fn,
    tx,
    num_microbatches=2,
    skip_empty=True,
    mesh=mesh,
    donate=False,
    **COUNT,
  )
  _, _, metrics = step(params, tx.init(params), batch)
  np.testing.assert_allclose(
    metrics["loss"], whole(params, batch)[0], rtol=1e-5
  )


def test_a_loss_that_sends_something_is_run_by_all_or_none():
  def synchronized(params, batch):
    # a function within
    everywhere = jax.checkpoint(lambda x: lax.pmean(x, "data"))
    return loss_fn(params, batch) + 0 * everywhere(jnp.sum(batch["mask"]))

  mesh, tx, counted = make_mesh(4), optax.sgd(0.1), [0, 2, 4, 5, 15]
  params, batch = init_params(np.float32), make_batch(16, counted, np.float32)

  def numbered(params, batch):  # which sends nothing
    return loss_fn(params, batch) + 0 * lax.axis_index("data").astype(
      jnp.float32
    )

  def mapped(fun):
    split = microbatch_value_and_grad(
      fun, num_microbatches=2, skip_empty=True, **COUNT
    )

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def on_device(params, batch):
      out = split(lax.pcast(params, "data", to="varying"), batch)
      return jax.tree.map(lambda x: x[None], out)

    return jax.eval_shape(on_device, params, batch)

  mapped(numbered)
  with pytest.raises(
    ValueError, match=r"sends something to other devices, .*: give axis_name"
  ):
    mapped(synchronized)
  step = make_train_step(
    synchronized,
    tx,
    num_microbatches=2,
    skip_empty=True,
    mesh=mesh,
    donate=False,
    **COUNT,
  )
  np.testing.assert_allclose(
    step(params, tx.init(params), batch)[2]["loss"],
    whole(params, batch)[0],
    rtol=1e-5,
  )


def test_a_mesh_within_the_loss_is_of_no_concern():
  """Every device takes part in it, because all agree on what is empty. Sums over axes are, too."""
  mesh, x = make_mesh(2), np.arange(16.0, dtype=np.float32).reshape(8, 2)

  def fun(params, x):
    total = jax.shard_map(
      lambda x: lax.psum(jnp.sum(jax.nn.log_softmax(x), axis=(0, 1)), "data"),
      mesh=mesh,
      in_specs=P("data"),
      out_specs=P(),
    )(x)
    return params * total / x.shape[0]

  split = microbatch_value_and_grad(
    fun,
    num_microbatches=2,
    weight_fn=lambda x: jnp.sum(x[:, 1] > 0),
    skip_empty=True,
  )
  expected = microbatch_value_and_grad(
    fun, num_microbatches=2, weight_fn=lambda x: jnp.sum(x[:, 1] > 0)
  )
  arguments = jnp.float32(1), jax.device_put(x, jax.NamedSharding(mesh, P()))
  trees.assert_close(
    jax.jit(split)(*arguments), jax.jit(expected)(*arguments), 1e-6
  )


def test_a_line_search_skips_too():
  with jax.enable_x64(True):
    params, batch = init_params(), make_batch(8, [0, 1, 4])
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    moved = []
    for options in ({}, {"skip_empty": True}):
      step = make_train_step(
        loss_fn, tx, num_microbatches=4, donate=False, **COUNT, **options
      )
      moved.append(step(params, jax.jit(tx.init)(params), batch)[0])
    trees.assert_close(*moved, 1e-12)


def test_it_needs_weights():
  with pytest.raises(
    ValueError, match=r"skip_empty=True .* weight_fn=None: give weight_fn"
  ):
    microbatch_value_and_grad(loss_fn, num_microbatches=2, skip_empty=True)
