"""`plan_microbatches` compares ways to shard: `args` is then a function of the choice."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from support import devices
from support.devices import make_mesh
from support.planned import (
  candidate,
  compiled_once,
  mlp_args,
  shape,
  written_down,
)

from optax_accum import make_train_step, plan_microbatches
from optax_accum._plan.report import MicrobatchPlan

pytestmark = pytest.mark.usefixtures("usual_promotion")  # as users compile

AXES = ("replica", "fsdp")
BOTH = P(AXES)
LAYERS, WIDTH, ROWS = 8, 64, 16
WAYS = {
  "whole": (P(), AXES),
  "once": (P(None, None, AXES), AXES),
  "layers": (P(None, None, "fsdp"), "replica"),
}
TX = optax.adam(1e-3)


def loss_fn(params, batch):
  layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
  layer = jax.checkpoint(layer, prevent_cse=False)
  return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


def args_of(shard):
  mesh = make_mesh(2, 4, axes=AXES)

  def over(tree):
    return jax.tree.map(lambda x: WAYS[shard][0] if x.ndim else P(), tree)

  params = shape(LAYERS, WIDTH, WIDTH)
  state = jax.eval_shape(TX.init, params)
  held = (devices.abstract(x, mesh, over(x)) for x in (params, state))
  return *held, devices.abstract(shape(ROWS, WIDTH), mesh, BOTH)


def build_way(num_microbatches, shard):
  mesh = make_mesh(2, 4, axes=AXES)
  options = {
    "mesh": mesh,
    "data_axis": WAYS[shard][1],
    "num_microbatches": num_microbatches,
  }
  return make_train_step(loss_fn, TX, **options)


def test_the_memory_of_the_compiled_programs_decides_between_ways_to_shard():
  build = compiled_once(build_way, args_of)
  choices = {"shard": [*WAYS]}
  plan = functools.partial(
    plan_microbatches, build, args_of, batch_size=ROWS, choices=choices
  )
  everything = plan(memory_limit="1GiB")
  found = {
    (c.choice["shard"], c.num_microbatches): c for c in everything.candidates
  }
  # 8 devices have rows
  assert {*found} == {(way, n) for way in WAYS for n in (1, 2)}
  for (way, n), c in found.items():
    memory = build(n, shard=way).lower().compile().memory_analysis()
    given = memory.argument_size_in_bytes + memory.generated_code_size_in_bytes
    out = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert c.peak_bytes == given + out + memory.temp_size_in_bytes
  least = {way: min(found[way, n].peak_bytes for n in (1, 2)) for way in WAYS}
  assert least["layers"] < least["once"] < least["whole"]
  size = 4 * LAYERS * WIDTH * WIDTH
  # Sums of all gradients, or their parts and all parameters, go 7/8 of the way around the ring.
  for way in ("whole", "once"):
    assert found[way, 2].wire_bytes == pytest.approx(2 * size * 7 / 8, rel=0.01)
  layers = found["layers", 1].wire_bytes, found["layers", 2].wire_bytes
  assert found["whole", 1].wire_bytes < layers[0] < layers[1]
  # The work is the same, so the way that sends least is planned, as long as it fits.
  assert everything.choice == {"shard": "whole"}
  assert plan(memory_limit=least["whole"] - 1).choice == {"shard": "once"}
  only = plan(memory_limit=(least["layers"] + least["once"]) // 2)
  assert {c.choice["shard"] for c in only.candidates if c.fits} == {"layers"}
  assert only.choice == {"shard": "layers"}
  assert only.peak_bytes <= only.limit_bytes
  head, first = str(only).splitlines()[1:3]
  assert head.split()[:6] == [
    "fits",
    "microbatches",
    "rows",
    "shard",
    "peak_bytes",
    "wire_bytes",
  ]
  assert f"{layers[only.num_microbatches - 1] / 1024:.1f} KiB" in first


def planned(*found):
  """The choice that is planned, of (rows, FLOPs, bytes sent) each, or None if it does not fit."""
  made = []
  for i, (rows, flops, sent, *fits) in enumerate(found):
    numbers = {"flops": flops, "wire_bytes": sent, "fits": not fits}
    made.append([candidate(rows, choice={"i": i}, **numbers)])
  return MicrobatchPlan.of(made, 16, 1).choice["i"]


def test_first_the_work_then_what_is_sent_and_then_the_number_of_microbatches():
  assert planned((8, 1000, 0), (1, 900, 9000)) == 1  # the work
  assert planned((8, 1000, 500), (1, 1005, 400)) == 1  # then what is sent
  assert planned((8, 1000, 400), (16, 1000, 500)) == 0
  # and then the microbatch
  assert planned((8, 1000, 500), (16, 1005, 503)) == 1
  assert planned((8, 1000, 500), (16, 1000, 500)) == 1
  assert planned((8, 1000, 0), (16, 1000, 0)) == 1  # as on one device
  # What does not fit, and what is more work, is no measure of the others.
  assert planned((1, 1000, 100, "no"), (8, 1000, 500), (16, 1000, 504)) == 2
  assert planned((1, 2000, 100), (8, 1000, 500), (16, 1000, 504)) == 2


def test_there_is_a_column_of_bytes_sent_where_there_are_collectives():
  def head(**numbers):
    return str(
      MicrobatchPlan.of([[candidate(16, **numbers)]], 16, 1)
    ).splitlines()[1:3]

  assert "wire_bytes" not in head()[0]
  names, values = head(collectives=3, collective_bytes=2048, wire_bytes=3584)
  assert names.split()[3:5] == ["peak_bytes", "wire_bytes"]
  assert values.split()[5:7] == ["3.5", "KiB"]


def test_arguments_may_depend_on_the_choice():
  asked = []

  def args(dtype):
    asked.append(dtype)
    return [shape(8, dtype=dtype)]

  choices = {"dtype": [jnp.float32, jnp.bfloat16]}
  build_step = written_down(lambda n, dtype: 8 // n)
  plan = functools.partial(
    plan_microbatches, build_step, batch_size=8, memory_limit="1GiB"
  )
  assert plan(args, choices=choices).num_microbatches == 1
  assert asked == choices["dtype"]
  without = plan_microbatches(
    written_down(lambda n: 8 // n),
    lambda: (shape(8),),
    batch_size=8,
    memory_limit="1GiB",
  )
  assert without.num_microbatches == 1


@pytest.mark.parametrize(
  ("args", "error", "message"),
  [
    (
      lambda shard: None,
      TypeError,
      r"args\(shard='a'\) must be a tuple, all that a step is called with: None",
    ),
    (
      lambda: (shape(8),),
      TypeError,
      r"args\(shard='a'\): got an unexpected keyword argument 'shard'\. A function must take the",
    ),
    (
      lambda shard, remat: (shape(8),),
      TypeError,
      r"args\(shard='a'\): missing a required argument: 'remat'\. A function must take the options",
    ),
    (
      lambda shard: (shape(8 if shard == "a" else 12),),
      ValueError,
      r"batch_size=8, and no array in args\(shard='b'\) has so many rows: give the rows of the",
    ),
  ],
)
def test_functions_that_return_no_arguments_are_refused(args, error, message):
  asked = []
  build_step = written_down(lambda n, shard: 8 // n, asked)
  choices = {"shard": ["a", "b"]}
  with pytest.raises(error, match=message):
    plan_microbatches(
      build_step, args, batch_size=8, memory_limit="1GiB", choices=choices
    )
  assert not asked  # nothing is compiled before all choices are looked at


def test_batches_that_differ_between_choices_are_refused():
  def args(rows):
    return mlp_args(rows=rows)

  def build_step(num_microbatches, rows):
    return make_train_step(loss_fn, TX, num_microbatches=num_microbatches)

  message = r"batch_size=8, and the batch in args\(rows=24\) has 24 rows: give 24, as in every choi"
  with pytest.raises(ValueError, match=message):
    plan_microbatches(
      build_step,
      args,
      batch_size=8,
      memory_limit="1GiB",
      choices={"rows": [8, 24]},
    )


def sizes_that_fit_nothing(loss, args, rows, **options):
  """All microbatches that the planner can try: nothing fits, so it looks down to the smallest."""
  asked = []

  def build_step(microbatch_size):
    asked.append(microbatch_size)
    return make_train_step(loss, TX, microbatch_size=microbatch_size, **options)

  with pytest.raises(ValueError, match="Nothing fits: microbatches of"):
    plan_microbatches(build_step, args, batch_size=rows, memory_limit=100)
  return {*asked}


@pytest.mark.more
def test_sizes_are_those_that_all_devices_with_rows_divide():
  mesh = make_mesh(2, 4, axes=AXES)
  square = lambda w, batch: jnp.mean((batch @ w) ** 2)  # noqa: E731

  def args(rows, spec, of_params=devices.EVERYWHERE, width=8):
    w = devices.abstract(shape(width, width), mesh, of_params)
    return (
      w,
      jax.eval_shape(TX.init, w),
      devices.abstract(shape(rows, width), mesh, spec),
    )

  replicas = {"mesh": mesh, "data_axis": "replica"}
  # Without a data axis at all, too.
  for options in (replicas, {}):
    assert (
      min(sizes_that_fit_nothing(square, args(16, BOTH), 16, **options)) == 8
    )
  # Parameters of as many columns as there are rows are not taken for rows.
  same = args(16, P("replica"), of_params=P(None, AXES), width=16)
  assert min(sizes_that_fit_nothing(square, same, 16, **replicas)) == 2
