"""`plan_microbatches`: the answer that compiling everything gives, by compiling little."""

import functools
import re

from flax import linen, nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest
from support import devices
from support.devices import AUTO, EXPLICIT, make_mesh
from support.planned import (
  arguments,
  build_mlp,
  Compilations,
  compiled_once,
  COUNTS,
  FIXED,
  lowers_to,
  Made,
  Memory,
  mlp_args,
  mlp_loss,
  ROWS,
  shape,
  TX,
  written_down,
)
from support.samples import more

from optax_accum import make_train_step, plan_microbatches
from optax_accum._plan.programs import PlanCandidate
from optax_accum._plan.search import search
from optax_accum.flax import linen_train_step, nnx_train_step

pytestmark = pytest.mark.usefixtures("usual_promotion")  # as users compile


@pytest.mark.more
def test_the_answer_is_that_of_exhaustive_compilation():
  args = arguments([shape(64, 64)] * 4, shape(ROWS, 16, 64))
  steps = Compilations(mlp_loss, args)
  memory = {n: steps.memory(n) for n in COUNTS}
  # The three, and every boundary: exactly what one microbatch needs, and a byte less.
  limits = [memory[1] // part for part in (2, 4, 10)]
  limits += [memory[n] + by for n in COUNTS for by in (0, -1)]
  found = 0
  for i, limit in enumerate(limits):
    steps.asked.clear()
    expected = min((n for n in COUNTS if memory[n] <= limit), default=None)
    if expected is None:
      continue
    plan = plan_microbatches(steps.build_step, args, batch_size=ROWS, memory_limit=limit)
    assert plan.num_microbatches == expected, (limit, memory)
    assert plan.peak_bytes == memory[expected] <= plan.limit_bytes == limit
    # A third, for what people ask; the boundaries are hard to guess.
    assert len(steps.asked) == len(set(steps.asked)) <= len(COUNTS) // 3 + (i >= 3)
    assert expected in steps.asked
    found += i < 3
  assert found >= 2


# MiB of a step by rows of a microbatch, as XLA for a TPU v5e and an H100 said of larger models: a
# Transformer of width 256, and convolutions of 64 x 64 pixels. On TPUs the line has steps.
RECORDED = {
  "v5e, convolutional": [
    *(15.446, 16.761, 17.836, 18.541, 20.362, 18.498),
    *(21.894, 21.901, 22.843, 30.528, 95.338, 171.415),
  ],
  "v5e, transformer": [
    *(26.655, 27.786, 28.443, 36.958, 69.156, 114.382),
    *(207.793, 293.093, 470.974, 662.131, 989.781, 2105.386),
  ],
  "H100, convolutional": [
    *(14.57, 17.21, 20.007, 22.429, 27.304, 32.148),
    *(40.712, 50.43, 69.828, 89.211, 127.977, 240.443),
  ],
  "H100, transformer": [
    *(63.405, 94.185, 117.944, 147.241, 206.8, 266.358),
    *(376.475, 492.593, 724.826, 957.061, 1421.623, 2808.37),
  ],
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_third_is_enough_for_what_was_recorded(name):
  rows = [ROWS // n for n in reversed(COUNTS)]
  memory = dict(zip(rows, RECORDED[name], strict=True))
  for limit in [memory[ROWS] / part for part in (2, 4, 10)] + [*range(10, 2200, 10)]:

    def compiled(size, limit=limit):
      total = int(2**20 * memory[size])
      fits = memory[size] <= limit
      return PlanCandidate(
        ROWS // size, size, {}, argument_bytes=2**23, temp_bytes=total - 2**23, fits=fits
      )

    found = search(rows, ROWS, int(2**20 * limit), compiled)
    expected = [size for size in rows if memory[size] <= limit]
    fitting = [each.microbatch_size for each in found if each.fits]
    assert max(fitting, default=0) == max(expected, default=0), limit
    assert len(found) <= len(rows) // 3


def layers_step(num_microbatches, layers_kept):
  layer = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)  # noqa: E731
  layer = layer if layers_kept else jax.checkpoint(layer)

  def loss_fn(params, batch):
    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

  return make_train_step(loss_fn, TX, num_microbatches=num_microbatches)


def test_the_first_choice_that_fits_is_planned():
  # no smaller than two microbatches
  pair = arguments(shape(8, 64, 64), shape(2, ROWS * 8, 64))
  plan = functools.partial(plan_microbatches, compiled_once(layers_step, pair), pair, batch_size=2)

  def peaks(kept):
    found = plan(memory_limit="1 GB", choices={"layers_kept": [kept]})
    assert found.choice == {"layers_kept": kept}
    assert found.num_microbatches == 1
    return layers_step(2, kept).lower(*pair).compile().memory_analysis()

  kept, again = map(peaks, (True, False))
  least = kept.temp_size_in_bytes, again.temp_size_in_bytes
  assert least[1] < least[0]
  for order in ([True, False], [False, True]):
    choices = {"layers_kept": order}
    ample = plan(memory_limit="1 GB", choices=choices)
    assert ample.choice == {"layers_kept": order[0]}
    # Nothing else is compiled.
    assert {c.choice["layers_kept"] for c in ample.candidates} == {order[0]}
    # Where only the layers that are computed again fit, they are what is planned.
    fixed = ample.candidates[0].fixed_bytes
    tight = plan(memory_limit=fixed + sum(least) // 2, choices=choices)
    assert tight.choice == {"layers_kept": False}
    fits = [c.fits for c in tight.candidates]
    assert fits == sorted(fits, reverse=True)


def test_of_several_options_the_last_changes_first():
  tried = []

  def build_step(num_microbatches, a, b):
    tried.append((a, b))
    return written_down(lambda n: 0 if (a, b) == (2, 1) else 10**6)(num_microbatches)

  plan = plan_microbatches(
    build_step, (shape(1),), batch_size=1, memory_limit=FIXED, choices={"a": [1, 2], "b": [1, 2]}
  )
  assert plan.choice == {"a": 2, "b": 1}
  assert list(dict.fromkeys(tried)) == [(1, 1), (1, 2), (2, 1)]


def test_it_prints_as_a_table_after_a_line_for_each_program(capsys):
  plan = plan_microbatches(
    build_mlp, mlp_args(), batch_size=ROWS * 8, memory_limit="1MiB", choices={"remat": [False]}
  )
  first, head, *rows, last = str(plan).splitlines()
  assert first == "a batch of 768 rows, within 1.0 MiB on each device"
  assert head.split() == [
    *("fits", "microbatches", "rows", "remat"),
    *("peak_bytes", "argument_bytes", "output_bytes", "temp_bytes"),
  ]
  assert max(map(len, [head, *rows])) <= 100
  told = [
    (str(c.fits), str(c.num_microbatches), str(c.microbatch_size), "False") for c in plan.candidates
  ]
  assert [tuple(row.split()[:4]) for row in rows] == told
  best = plan.candidates[0]
  assert last == (
    f"best: num_microbatches={best.num_microbatches} (of {best.microbatch_size} rows), remat=False"
  )
  assert told[0][1:3] == (str(plan.num_microbatches), str(plan.microbatch_size))
  assert (plan.peak_bytes, plan.choice) == (best.peak_bytes, {"remat": False})
  assert best.fits
  assert plan.peak_bytes <= plan.limit_bytes == 2**20
  # Not only where somebody looks on.
  lines = capsys.readouterr().err.splitlines()
  assert sorted(lines) == sorted(
    f"compiling build_step({c.num_microbatches}, remat=False)" for c in plan.candidates
  )


def test_where_nothing_fits_the_error_has_the_table():
  match = r"(?s)^Nothing fits: give a larger memory_limit, .*\na batch of 64 rows, within 10\.0 KiB"
  with pytest.raises(ValueError, match=match) as caught:
    plan_microbatches(build_mlp, mlp_args(rows=64), batch_size=64, memory_limit="10KiB")
  assert re.search(r"False +64 +1 .* 112\.0 KiB", str(caught.value))


def test_what_is_larger_than_the_chip_is_not_compiled():
  def build_step(num_microbatches):
    def refuse():
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    step = written_down(lambda n: 64 // n)(num_microbatches)
    if num_microbatches < 4:
      return Made(lower=lambda *args: Made(compile=refuse))
    return step

  plan = plan_microbatches(build_step, (shape(64),), batch_size=64, memory_limit="1GiB")
  assert plan.num_microbatches == 4
  assert "too large to compile" in str(plan)


@pytest.mark.parametrize(("change", "error", "message"), [
  ({"memory_limit": None}, ValueError, "memory_limit=None uses the memory .*give memory_limit"),
  ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
  ({"batch_size": 384}, ValueError, "batch_size=384, and no array of the batch has so many rows"),
  ({"choices": {"rematt": [True]}}, TypeError, r"build_mlp\(\) got an unexpected .* 'rematt'"),
  ({"build_step": lambda n: build_mlp(5 * n)}, ValueError, "does not divide"),
])  # fmt: skip
def test_bad_input_is_refused(change, error, message):
  call = {"build_step": build_mlp, "args": mlp_args(), "batch_size": 768, "memory_limit": "1GiB"}
  with pytest.raises(error, match=message):
    plan_microbatches(**call | change)


@pytest.mark.parametrize("kind", [AUTO, more(EXPLICIT)])
def test_over_a_mesh_the_rows_of_one_device_are_split(kind):
  mesh = make_mesh(8, kind=kind)
  params, state, _ = mlp_args()
  batch = shape(32, 256, 64)
  args = (*devices.abstract((params, state), mesh), devices.abstract(batch, mesh, jax.P("data")))
  build_step = functools.partial(build_mlp, mesh=mesh)
  plan = functools.partial(plan_microbatches, compiled_once(build_step, args), args, batch_size=32)
  whole = plan(memory_limit="1GiB")
  assert (whole.num_microbatches, whole.microbatch_size) == (1, 32)
  least = min(whole.candidates, key=lambda c: c.peak_bytes)
  split = plan(memory_limit=least.peak_bytes)
  assert split.num_microbatches in (2, 4)
  assert split.microbatch_size * split.num_microbatches == 32


@pytest.mark.more
def test_arrays_that_are_not_on_the_mesh_yet_are_put_there():
  mesh, args = make_mesh(8), mlp_args(rows=32)
  build_step = functools.partial(build_mlp, mesh=mesh)
  placed = (*devices.abstract(args[:2], mesh), devices.abstract(args[2], mesh, jax.P("data")))
  expected = plan_microbatches(build_step, placed, batch_size=32, memory_limit="1GiB")
  plan = plan_microbatches(build_step, args, batch_size=32, memory_limit="1GiB")
  assert plan.peak_bytes == expected.peak_bytes
  odd = *args[:2], shape(500, 64)
  with pytest.raises(ValueError, match="has 500 rows, which the 8 devices"):
    plan_microbatches(build_step, odd, batch_size=500, memory_limit="1GiB")


@pytest.mark.more
def test_chips_need_not_be_there():
  one = SingleDeviceSharding(devices.tpu_topology().devices[0])
  args = arguments([shape(128, 128)] * 3, shape(4096, 128))
  args = jax.tree.map(lambda x: x.update(sharding=one), args)
  with pytest.raises(ValueError, match=r"TPU.* reports none: give memory_limit, such as"):
    plan_microbatches(build_mlp, args, batch_size=2)
  steps = Compilations(mlp_loss, args)
  counts = [2, 1]
  memory = {n: steps.memory(n) for n in counts}
  for limit in (memory[1] - 1, memory[2]):
    steps.asked.clear()
    plan = plan_microbatches(steps.build_step, args, batch_size=2, memory_limit=limit)
    assert plan.num_microbatches == min(n for n in counts if memory[n] <= limit)
    assert plan.candidates[0].code_bytes > 0


def test_steps_of_flax_are_planned_too():
  model = linen.Dense(8)
  params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8)))["params"]

  def loss_fn(variables, batch, rngs):
    return jnp.mean(model.apply(variables, batch) ** 2)

  state = jax.eval_shape(lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=TX), params)
  for mesh, most in ((None, 32), (make_mesh(4), 8)):
    asked = []

    def build_step(num_microbatches, mesh=mesh, asked=asked):
      asked.append(num_microbatches)
      return linen_train_step(loss_fn, num_microbatches=num_microbatches, mesh=mesh)

    plan = plan_microbatches(build_step, (state, shape(32, 8)), batch_size=32, memory_limit="1GiB")
    assert plan.num_microbatches == 1
    assert max(asked) <= most

  def nnx_objects():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

  def build_nnx(num_microbatches):
    return nnx_train_step(
      lambda model, batch: jnp.mean(model(batch) ** 2), num_microbatches=num_microbatches
    )

  objects = nnx.eval_shape(nnx_objects)
  plan = plan_microbatches(build_nnx, (*objects, shape(32, 8)), batch_size=32, memory_limit="1GiB")
  assert plan.num_microbatches == 1
  for build, held in ((build_step, (state,)), (build_nnx, objects)):
    with pytest.raises(ValueError, match=r"batch_size=16, and no array of the batch has so many"):
      plan_microbatches(build, (*held, shape(32, 8)), batch_size=16, memory_limit="1GiB")


@pytest.mark.parametrize(
  "limit", [0, -1, 0.5, "0GiB", "GiB", "16 giga", "", "1e3GiB", True, [1], "16GiB 1"]
)
def test_limits_that_are_no_size_are_refused(limit):
  match = rf"memory_limit={re.escape(repr(limit))} is not a size: give bytes, .*\"16GiB\""
  with pytest.raises(ValueError, match=match):
    plan_microbatches(build_mlp, mlp_args(), batch_size=768, memory_limit=limit)


def test_sizes_are_read_with_their_units():
  def limit(size):
    build_step = written_down(lambda n: 0)
    return plan_microbatches(build_step, (shape(1),), batch_size=1, memory_limit=size).limit_bytes

  sizes = {
    "1.5GiB": 3 * 2**29,
    "80 GB": 80 * 10**9,
    "900000KB": 9 * 10**8,
    2**30: 2**30,
    "4096": 4096,
  }
  assert {size: limit(size) for size in sizes} == sizes


def test_a_twentieth_of_a_devices_memory_is_left_free():
  def device(number, limit):
    return Made(id=number, memory_stats=lambda: {"bytes_limit": limit})

  on = {device(1, 3000), device(0, 1000)}
  sharding = Made(device_set=on, shard_shape=lambda shape: shape)
  array = Made(shape=(1,), dtype=np.dtype("f4"), sharding=sharding)
  plan = functools.partial(plan_microbatches, args=(array,), batch_size=1)
  assert plan(written_down(lambda n: 950 - FIXED)).limit_bytes == 950


def test_outputs_may_grow_with_the_microbatch():
  """What does not depend on rows is not the same in all programs."""

  def build_step(num_microbatches):
    size = 64 // num_microbatches
    grown = Memory(0, output_size_in_bytes=4 * (size * 128 + size), alias_size_in_bytes=0)
    return lowers_to(lambda: grown)

  plan = functools.partial(plan_microbatches, build_step, (shape(64, 16),), batch_size=64)
  for size in (1, 2, 4, 8, 16, 32, 64):
    found = plan(memory_limit=1000 + 4 * (size * 128 + size))
    assert found.microbatch_size == size
    assert len(found.candidates) <= 4


def test_a_step_that_needs_two_microbatches_gets_them():
  def build_step(num_microbatches):
    return make_train_step(mlp_loss, TX, num_microbatches=num_microbatches, noise_scale=True)

  plan = plan_microbatches(build_step, mlp_args(rows=4), batch_size=4, memory_limit="1GiB")
  assert plan.num_microbatches == 2


def test_the_whole_batch_may_fit_where_half_of_it_does_not():
  """It has no accumulators, which here take 1000 bytes."""
  asked = []

  def temp(n):
    return 16 * (row - 4) if n == 1 else 1000 + row * (16 // n)

  plan = functools.partial(plan_microbatches, written_down(temp, asked), (shape(16),))
  row = 4
  assert plan(batch_size=16, memory_limit=FIXED + 1000).num_microbatches == 1
  asked.clear()
  row = 100  # more than that in activations: it is not compiled
  with pytest.raises(ValueError, match="Nothing fits"):
    plan(batch_size=16, memory_limit=FIXED + 1000)
  assert 1 not in asked


@pytest.mark.more
def test_one_row_does_not_tell_what_the_whole_batch_needs():
  """With bfloat16 parameters scans need float32 accumulators, and XLA writes one row otherwise."""
  params, rows = [shape(256, 256, dtype=jnp.bfloat16)] * 4, 96
  args = arguments(params, shape(rows, 256, dtype=jnp.bfloat16))
  steps = Compilations(mlp_loss, args)
  whole, scan = steps.memory(1), min(steps.memory(rows), steps.memory(2))
  assert whole < scan
  for limit in (whole, (whole + scan) // 2, scan):
    plan = plan_microbatches(steps.build_step, args, batch_size=rows, memory_limit=limit)
    assert (plan.num_microbatches, plan.peak_bytes) == (1, whole)


def test_two_rows_may_fit_where_one_nearly_does():
  """A layout of one row may need more than that of two: bisecting tries two before one."""
  temp = {16: 1040, 8: 990, 4: 3000, 2: 5000, 1: 9000}
  build_step = written_down(lambda n: temp[n])
  plan = functools.partial(plan_microbatches, build_step, (shape(16),), batch_size=16)
  assert plan(memory_limit=FIXED + 1000).num_microbatches == 8


def test_arguments_that_a_step_deleted_are_named():
  shapes = mlp_args(rows=2)
  params, state, batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
  build_mlp(2)(params, state, batch)
  with pytest.raises(RuntimeError, match="has been deleted: an earlier step updated parameters"):
    plan_microbatches(build_mlp, (params, state, batch), batch_size=2, memory_limit="1GiB")


def test_values_of_choices_may_be_of_any_kind():
  plan = plan_microbatches(
    written_down(lambda n, microbatch, scale: 8 // n),
    (shape(8),),
    batch_size=8,
    memory_limit="1GiB",
    choices={"microbatch": [jnp.sin, jnp.cos], "scale": [np.ones(2), [1.0]]},
  )
  assert plan.choice["microbatch"] is jnp.sin
  assert "(of 8 rows), microbatch=sin, scale=array([1., 1.])" in str(plan)
