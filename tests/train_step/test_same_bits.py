"""`virtual_devices`: a step is the same to the bit on 1, 2, 4 or 8 devices."""

import dataclasses
import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest
from support import compiled, same_bits
from support.devices import make_mesh
from support.same_bits import different, Draw, trained
from support.samples import more

import optax_accum
from optax_accum import count_collectives
from optax_accum._arithmetic import in_order
from optax_accum._train_step import program

pytestmark = pytest.mark.usefixtures("usual_promotion")

ALL = Draw(
  layers=("attention",),
  microbatches=2,
  optimizer="clip+adamw",
  weights="weight_fn",
  carry=True,
  noise_scale=True,
)
DRAWS = [
  ALL,
  more(
    dataclasses.replace(
      ALL, weights="has_weight", skips="nonfinite", state="FSDP", microbatches=3
    )
  ),
  more(
    dataclasses.replace(
      ALL, weights="none", state="ZeRO-1", microbatches=1, dtype="bfloat16"
    )
  ),
  more(dataclasses.replace(ALL, arrives=True, skips="empty", key="rbg")),
]


@pytest.fixture
def optimized(monkeypatch):
  """Programs as users compile them. Those of other tests are not optimised (conftest.py)."""
  options = program._SAME_BITS | {"xla_backend_optimization_level": 3}
  if jax.__version_info__ < (0, 11):
    options["xla_cpu_use_fusion_emitters"] = True
  monkeypatch.setattr(program, "_SAME_BITS", options)


@functools.cache
def after_two_steps(draw, count, virtual=8):
  return trained(draw, count, virtual, steps=2)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_all_that_a_step_returns_is_equal_to_the_bit(draw):
  alone = after_two_steps(draw, 0)
  for count in (2, 8):
    assert not different(alone, after_two_steps(draw, count)), count


@pytest.mark.usefixtures("optimized")
def test_a_sum_in_the_order_of_the_compiler_is_found(monkeypatch):
  monkeypatch.setattr(in_order, "sum_over", lambda axis, x: lax.psum(x, axis))
  assert different(after_two_steps(ALL, 0), trained(ALL, 8, steps=2))


@pytest.mark.more
@pytest.mark.usefixtures("optimized")
def test_rows_and_noise_are_those_of_as_many_devices():
  """The plain step on 8 devices has the same microbatches, of the same keys; that on 2 has not."""
  alone = after_two_steps(ALL, 0)
  plain = after_two_steps(ALL, 8, None)
  assert different(alone, plain)  # in their last bits
  for a, b in zip(*map(jax.tree.leaves, (alone, plain)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
  other = after_two_steps(ALL, 2, None)
  assert abs(other[3]["loss"] - alone[3]["loss"]) > 1e-3


def loss_fn(params, batch):
  return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)


def arguments(width=64, rows=64):
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(width, width)), jnp.float32)}
  return params, jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)


def make(virtual=8, count=8, **options):
  mesh = make_mesh(count, axes=("data",)) if count else None
  options = {"num_microbatches": 2, "donate": False, **options}
  return optax_accum.make_train_step(
    loss_fn, optax.adam(1e-3), mesh=mesh, virtual_devices=virtual, **options
  )


def test_memory_grows_by_a_sum_for_each_halving_of_the_devices():
  """In programs for a TPU and an H100 there is no copy (tests/deviceless)."""
  params, batch = arguments(width=256)
  state = optax.adam(1e-3).init(params)
  size = params["w"].nbytes

  def needs(virtual, count):
    step = make(virtual, count, donate=True).lower(params, state, batch)
    step = step.compile()
    sent = count_collectives(step).at_least(1024)
    found = {c.kind: c.bytes for c in sent.operations}
    return step.memory_analysis().temp_size_in_bytes, found

  plain, reduced = needs(None, 8)
  temp, sent = needs(8, 8)
  assert reduced == {"all-reduce": size + 4}  # and the loss
  # What an all-reduce is made of.
  assert sent == {"all-to-all": size, "all-gather": size}
  a_copy = size  # of the parameters, as XLA for CPU does without some passes
  assert temp < plain + a_copy + size / 4
  for lanes in (2, 8):
    sums = np.log2(lanes) * size
    assert needs(8, 8 // lanes)[0] < plain + a_copy + sums + size / 2, lanes


def test_a_cycle_goes_on_on_other_devices():
  params, batch = arguments()
  state = optax.adam(1e-3).init(params)
  explicit = make_mesh(8, axes=("data",), kind=AxisType.Explicit)
  by_lane = NamedSharding(explicit, PartitionSpec("data"))
  moves = jax.device_get, lambda cycle: jax.device_put(cycle, by_lane)
  ends = []
  for counts, move in zip(((8, 2, 0), (8, 8, 8)), moves, strict=True):
    first, second, last = (make(count=count) for count in counts)
    cycle = first.add(first.begin(params), params, batch)
    with pytest.raises(ValueError, match="an array on 8 devices, and the"):
      make(count=0).finish(params, state, cycle)
    with pytest.raises(ValueError, match=r"called inside jax\.jit"):
      jax.jit(functools.partial(last.finish, params, state))(cycle)
    like = last.add.eval_shape(last.begin(params), params, batch)
    # Where a checkpoint is restored to.
    places = {len(x.sharding.device_set) for x in jax.tree.leaves(like)}
    assert places == {max(1, counts[-1])}
    cycle = second.add(move(cycle), params, batch[::-1] / 2)
    ends.append(last.finish(params, state, jax.device_get(cycle)))
  assert not different(*ends)
  whole = jnp.concatenate([batch, batch[::-1] / 2])
  exact = make(None, 0, num_microbatches=1)(params, state, whole)
  np.testing.assert_allclose(ends[0][0]["w"], exact[0]["w"], rtol=1e-4)


def test_a_line_search_sees_whole_parameters():
  """So that the compiler sums nothing of what it computes over their shards."""
  params, batch = arguments()

  def update(grads, state, params, *, value_fn, **_):
    moved = optax.apply_updates(params, grads)
    slope = jax.grad(value_fn)(moved)
    size = optax.tree.vdot(slope, moved)
    return jax.tree.map(lambda g: -size * g, grads), state

  tx = optax.GradientTransformationExtraArgs(lambda _: (), update)
  ends = []
  for count in (0, 8):
    options = {"virtual_devices": 8, "donate": False, "num_microbatches": 2}
    mesh = None
    if count:
      mesh = make_mesh(count, axes=("data",))
      params = same_bits.sharded(mesh, params)
    step = optax_accum.make_train_step(loss_fn, tx, mesh=mesh, **options)
    ends.append(step(params, (), batch))
  assert not different(*ends)


def test_whatever_is_read_can_be_compiled_apart():
  for largest in (
    jax.random.split(jax.random.key(0)),
    jnp.ones(3, jnp.int4),
    jnp.ones(3, jnp.float8_e4m3fn),
    jnp.ones((2, 2), jnp.complex64),
  ):
    doubled = jax.jit(in_order.apart, static_argnums=0)
    assert doubled(lambda _, x: 2 * x, largest, 3.0) == 6.0


def test_one_microbatch_on_each_device_is_compiled_apart(optimized):
  """XLA unrolls a loop of one, and fuses the statistics of a carry with what is around it."""
  rng = np.random.default_rng(0)
  batch = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
  params = {"w": jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)}
  carry = {"mean": jnp.zeros(64), "variance": jnp.ones(64)}
  tx = optax.adam(0.1)

  def normalized(params, batch, carry):
    found = {"mean": batch.mean(0), "variance": batch.var(0)}
    rows = (batch - found["mean"]) / jnp.sqrt(found["variance"] + 1e-5)
    carry = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, carry, found)
    return jnp.mean(jnp.tanh(rows @ params["w"]) ** 2), (carry, ())

  ends = []
  for count in (0, 8):
    mesh = make_mesh(count, axes=("data",)) if count else None
    step = optax_accum.make_train_step(
      normalized,
      tx,
      num_microbatches=1,
      carry_argnum=2,
      mesh=mesh,
      virtual_devices=8,
      donate=False,
    )
    ends.append(step(params, tx.init(params), batch, carry))
  assert not different(*ends)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"virtual": 6}, "no power of two"),
    ({"virtual": 4}, "no multiple of the 8 devices of axis 'data'"),
    ({"virtual": 0}, "at least 1"),
    ({"in_place": True}, "in_place=True has one that all"),
    ({"reduce_gradients": "per_microbatch"}, 'use "per_cycle"'),
    ({"reduce_gradients": "per_microbatch", "count": 0}, 'use "per_cycle"'),
    ({"count": 0, "axis_name": "data"}, "outside pmap and shard_map"),
    (
      {"num_microbatches": None, "microbatch_size": 12},
      "microbatch_size=12 counts the rows on all virtual_devices=8 together",
    ),
  ],
)
def test_what_cannot_be_had_is_refused_when_a_step_is_made(options, words):
  with pytest.raises(ValueError, match=words):
    make(**options)


def test_what_the_compiler_would_sum_is_refused():
  params, batch = arguments()
  state = optax.adam(1e-3).init(params)
  args = params, state, batch
  with pytest.raises(
    ValueError, match=re.escape("further axes, {'model': 2}, over")
  ):
    optax_accum.make_train_step(
      loss_fn,
      optax.sgd(1.0),
      num_microbatches=1,
      mesh=make_mesh(4, 2),
      virtual_devices=4,
    )
  with pytest.raises(
    ValueError, match="use a number that divides 8, or a multiple of 24 rows"
  ):
    make(count=0, num_microbatches=3)(*args)
  with pytest.raises(ValueError, match=r"called inside jax\.jit"):
    jax.jit(make())(*args)
  by_rows = NamedSharding(make_mesh(8, axes=("data",)), PartitionSpec("data"))
  alone = make(count=0)
  with pytest.raises(
    ValueError, match="an array on 8 devices, and the step has"
  ):
    alone(params, state, jax.device_put(batch, by_rows))

  def relative(params, batch):
    return loss_fn(params, batch) / lax.pmax(jnp.max(batch), "data")

  def by_index(params, batch):
    return loss_fn(params, batch) * lax.axis_index("data")

  for count, loss in ((8, relative), (8, by_index), (1, by_index)):
    step = optax_accum.make_train_step(
      loss,
      optax.adam(1e-3),
      num_microbatches=2,
      mesh=make_mesh(count, axes=("data",)),
      virtual_devices=8,
    )
    with pytest.raises(
      ValueError, match="virtual_devices=8 would find the real ones"
    ):
      step(*args)


def test_a_check_looks_at_the_microbatches_of_the_virtual_devices():
  params, batch = arguments(width=4, rows=16)
  state = optax.adam(1e-3).init(params)

  def coupled(params, batch):
    return loss_fn(params, batch - batch.mean(0, keepdims=True))

  step = optax_accum.make_train_step(
    coupled, optax.adam(1e-3), num_microbatches=1, virtual_devices=8
  )
  assert step.check(params, state, batch).verdict == "coupled"


def test_one_program_is_compiled():
  params, batch = arguments()
  state = optax.adam(1e-3).init(params)
  step = make(count=0)
  step(params, state, batch)
  with compiled.compilations() as names:
    step(params, state, batch)
  assert not names
