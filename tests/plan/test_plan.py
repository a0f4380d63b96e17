"""`plan_microbatches`: the answer that compiling everything gives, by compiling little."""

import dataclasses
import functools
import re
import runpy
import sys

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
  candidate,
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

from optax_accum import make_train_step, plan_microbatches
from optax_accum._plan.candidate import PlanCandidate
from optax_accum._plan.report import does_not_fit, MicrobatchPlan
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
    plan = plan_microbatches(
      steps.build_step, args, batch_size=ROWS, memory_limit=limit
    )
    assert plan.num_microbatches == expected, (limit, memory)
    assert plan.peak_bytes == memory[expected] <= plan.limit_bytes == limit
    # A third, for what people ask; the boundaries are hard to guess.
    assert (
      len(steps.asked) == len(set(steps.asked)) <= len(COUNTS) // 3 + (i >= 3)
    )
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
  for limit in [memory[ROWS] / part for part in (2, 4, 10)] + [
    *range(10, 2200, 10)
  ]:

    def compiled(size, limit=limit):
      total = int(2**20 * memory[size])
      fits = memory[size] <= limit
      return PlanCandidate(
        ROWS // size, size, {}, 2**23, temp_bytes=total - 2**23, fits=fits
      )

    found = search(rows, ROWS, int(2**20 * limit), compiled)
    expected = [size for size in rows if memory[size] <= limit]
    fitting = [each.microbatch_size for each in found if each.fits]
    assert max(fitting, default=0) == max(expected, default=0), limit
    assert len(found) <= len(rows) // 3


def test_the_cheapest_choice_that_fits_is_planned():
  args, rows = arguments(shape(8, 64, 64), shape(ROWS * 8, 64)), ROWS * 8

  def build_step(num_microbatches, layers_kept):
    layer = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)  # noqa: E731
    layer = layer if layers_kept else jax.checkpoint(layer)

    def loss_fn(params, batch):
      return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

    return make_train_step(loss_fn, TX, num_microbatches=num_microbatches)

  choices = {"layers_kept": [False, True]}
  whole = plan_microbatches(
    build_step, args, batch_size=rows, memory_limit="1 GB", choices=choices
  )
  assert (whole.num_microbatches, whole.choice) == (1, {"layers_kept": True})
  again = [c for c in whole.candidates if not c.choice["layers_kept"]]
  assert max(c.flops for c in again) > 1.2 * whole.candidates[0].flops
  # Where only the layers that are computed again fit, they are what is planned.
  # no smaller than two microbatches
  pair = arguments(shape(8, 64, 64), shape(2, ROWS * 8, 64))
  build_once = compiled_once(build_step, pair)
  least = {
    kept: min(
      c.peak_bytes
      for c in plan_microbatches(
        build_once,
        pair,
        batch_size=2,
        memory_limit="1 GB",
        choices={"layers_kept": [kept]},
      ).candidates
    )
    for kept in (False, True)
  }
  assert least[False] < least[True]
  plan = plan_microbatches(
    build_once,
    pair,
    batch_size=2,
    memory_limit=least[True] - 1,
    choices=choices,
  )
  assert plan.choice == {"layers_kept": False}
  assert [c.fits for c in plan.candidates] == sorted(
    c.fits for c in plan.candidates
  )[::-1]


def test_it_prints_as_a_table():
  plan = plan_microbatches(
    build_mlp,
    mlp_args(),
    batch_size=ROWS * 8,
    memory_limit="1MiB",
    choices={"remat": [False]},
  )
  lines = str(plan).splitlines()
  assert lines[0] == "a batch of 768 rows, within 1.0 MiB on each device"
  head = "fits  microbatches  rows  remat  peak_bytes  temp_bytes  matrix FLOPs"
  assert re.sub(" {2,}", "  ", lines[1]).strip() == head
  assert max(map(len, lines)) <= 85
  first = lines[2].split()
  assert first[:4] == [
    "yes",
    str(plan.num_microbatches),
    str(plan.microbatch_size),
    "False",
  ]
  assert [line.split()[0] for line in lines[2:-1]] == [
    "yes" if c.fits else "no" for c in plan.candidates
  ]
  assert lines[-1] == (
    f"best: num_microbatches={plan.num_microbatches} (of {plan.microbatch_size} rows), remat=False"
  )


def head_of(choice, **numbers):
  """The columns of a table, which fits a page."""
  plan = MicrobatchPlan.of(
    [[candidate(16, 2**29, choice=choice, **numbers)]], 16, 2**30
  )
  table = str(plan).splitlines()[1:3]
  assert max(map(len, table)) <= 85
  return re.split(" {2,}", table[0].strip())


def test_columns_that_a_page_has_no_room_for_are_left_out_from_the_right():
  kept = ["fits", "microbatches", "rows"]
  numbers = ["peak_bytes", "wire_bytes", "temp_bytes", "matrix FLOPs"]
  large = {
    "argument_bytes": 2**29,
    "flops": 10**15,
    "collectives": 99,
    "wire_bytes": 2**29,
  }
  assert head_of({}, **large) == kept + numbers
  assert head_of({"remat": False}, **large) == [*kept, "remat", *numbers]
  two = {"remat": False, "saved": "of_layers"}
  assert head_of(two, **large) == [*kept, *two, *numbers[:3]]
  four = {f"option_{i}": True for i in range(4)}
  assert head_of(four, **large) == [*kept, *four, "peak_bytes"]
  words = {"policy": "a value of many words " * 9}
  assert head_of(words) == [
    *kept,
    "policy",
    "peak_bytes",
    "temp_bytes",
    "matrix FLOPs",
  ]


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_over_a_mesh_the_rows_of_one_device_are_split(kind):
  mesh = make_mesh(8, kind=kind)
  params, state, _ = mlp_args()
  batch = shape(32, 256, 64)
  args = (
    *devices.abstract((params, state), mesh),
    devices.abstract(batch, mesh, jax.P("data")),
  )
  build_step = functools.partial(build_mlp, mesh=mesh)
  plan = functools.partial(
    plan_microbatches, compiled_once(build_step, args), args, batch_size=32
  )
  whole = plan(memory_limit="1GiB")
  assert (whole.num_microbatches, whole.microbatch_size) == (1, 32)
  assert whole.candidates[0].collectives >= 1
  assert f"{whole.candidates[0].wire_bytes / 1024:.1f} KiB" in str(whole)
  least = min(whole.candidates, key=lambda c: c.peak_bytes)
  split = plan(memory_limit=least.peak_bytes)
  assert split.num_microbatches in (2, 4)
  assert split.microbatch_size * split.num_microbatches == 32
  gradients = sum(4 * x.size for x in jax.tree.leaves(params))
  for c in split.candidates:
    assert gradients <= c.collective_bytes < gradients + 1024


@pytest.mark.more
def test_arrays_that_are_not_on_the_mesh_yet_are_put_there():
  mesh, args = make_mesh(8), mlp_args(rows=32)
  build_step = functools.partial(build_mlp, mesh=mesh)
  placed = (
    *devices.abstract(args[:2], mesh),
    devices.abstract(args[2], mesh, jax.P("data")),
  )
  expected = plan_microbatches(
    build_step, placed, batch_size=32, memory_limit="1GiB"
  )
  # And a choice may change what is split.
  plan = plan_microbatches(
    lambda n, on_mesh: build_mlp(n, mesh=mesh if on_mesh else None),
    args,
    batch_size=32,
    memory_limit="1GiB",
    choices={"on_mesh": [False, True]},
  )
  peaks = {
    (c.choice["on_mesh"], c.num_microbatches): c.peak_bytes
    for c in plan.candidates
  }
  assert {on_mesh for on_mesh, _ in peaks} == {False, True}
  assert peaks[True, 1] == expected.peak_bytes
  with pytest.raises(ValueError, match=r"Most of it is arguments: "):
    plan_microbatches(build_step, args, batch_size=32, memory_limit="10KiB")
  odd = *args[:2], shape(500, 64)
  with pytest.raises(
    ValueError, match="The batch has 500 rows, which the 8 devices"
  ):
    plan_microbatches(build_step, odd, batch_size=500, memory_limit="1GiB")


@pytest.mark.more
def test_chips_need_not_be_there():
  one = SingleDeviceSharding(devices.tpu_topology().devices[0])
  args = arguments([shape(128, 128)] * 3, shape(4096, 128))
  args = jax.tree.map(lambda x: x.update(sharding=one), args)
  with pytest.raises(
    ValueError, match=r"TPU.* reports none: give memory_limit, such as"
  ):
    plan_microbatches(build_mlp, args, batch_size=2)
  steps = Compilations(mlp_loss, args)
  counts = [2, 1]
  memory = {n: steps.memory(n) for n in counts}
  for limit in (memory[1] - 1, memory[2]):
    steps.asked.clear()
    plan = plan_microbatches(
      steps.build_step, args, batch_size=2, memory_limit=limit
    )
    assert plan.num_microbatches == min(n for n in counts if memory[n] <= limit)
    assert plan.candidates[0].code_bytes > 0


def test_steps_of_flax_are_planned_too():
  model = linen.Dense(8)
  params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8)))[
    "params"
  ]

  def loss_fn(variables, batch, rngs):
    return jnp.mean(model.apply(variables, batch) ** 2)

  state = jax.eval_shape(
    lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=TX), params
  )
  for mesh, most in ((None, 32), (make_mesh(4), 8)):
    asked = []

    def build_step(num_microbatches, mesh=mesh, asked=asked):
      asked.append(num_microbatches)
      return linen_train_step(
        loss_fn, num_microbatches=num_microbatches, mesh=mesh
      )

    plan = plan_microbatches(
      build_step, (state, shape(32, 8)), batch_size=32, memory_limit="1GiB"
    )
    assert plan.num_microbatches == 1
    assert max(asked) <= most

  def nnx_objects():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

  def build_nnx(num_microbatches):
    return nnx_train_step(
      lambda model, batch: jnp.mean(model(batch) ** 2),
      num_microbatches=num_microbatches,
    )

  objects = nnx.eval_shape(nnx_objects)
  plan = plan_microbatches(
    build_nnx, (*objects, shape(32, 8)), batch_size=32, memory_limit="1GiB"
  )
  assert plan.num_microbatches == 1
  for build, held in ((build_step, (state,)), (build_nnx, objects)):
    with pytest.raises(
      ValueError, match=r"batch_size=16, and the batch in args has 32 rows"
    ):
      plan_microbatches(
        build, (*held, shape(32, 8)), batch_size=16, memory_limit="1GiB"
      )


def test_where_nothing_fits_the_least_need_is_named():
  with pytest.raises(ValueError, match="Nothing fits") as caught:
    plan_microbatches(
      build_mlp, mlp_args(rows=64), batch_size=64, memory_limit="10KiB"
    )
  text = str(caught.value)
  assert text.startswith("Nothing fits: microbatches of ")
  assert "on each device, and the limit is 10.0 KiB. Most of it is " in text
  for part in (
    "112.0 KiB  arguments: parameters, optimizer state, batch",
    "accumulators",
  ):
    assert part in text


ADVICE = (
  "Give a larger memory_limit, shard parameters or optimizer state over more devices, use"
  " donate=True, in_place=True or rematerialization, or use a smaller model."
)


def test_where_nothing_fits_the_words_say_what_takes_the_memory():
  def words(*found):
    plan = MicrobatchPlan.of([found], 16, 2**10)
    return does_not_fit(plan).removesuffix(f"\n{plan}")

  sizes = {"argument_bytes": 768, "output_bytes": 300, "code_bytes": 20}
  scans = [candidate(size, 2**14 + 2**10 * size, **sizes) for size in (1, 2, 4)]
  assert words(*scans, candidate(16, 2**20, **sizes)) == (
    "Nothing fits: microbatches of 1 row need 18.1 KiB on each device, and the limit is 1.0 KiB."
    " Most of it is temporary buffers: activations, gradients, accumulators:\n"
    "       768 B  arguments: parameters, optimizer state, batch\n"
    "       300 B  outputs without a donated argument\n"
    "        20 B  code\n"
    "    17.0 KiB  temporary buffers: activations, gradients, accumulators\n"
    + ADVICE
  )
  assert words(candidate(2, 100, argument_bytes=2000)) == (
    "Nothing fits: microbatches of 2 rows need 2.1 KiB on each device, and the limit is 1.0 KiB."
    " Most of it is arguments: parameters, optimizer state, batch:\n"
    "     2.0 KiB  arguments: parameters, optimizer state, batch\n"
    "       100 B  temporary buffers: activations, gradients, accumulators\n"
    + ADVICE
  )
  # What was too large to be compiled.
  assert words(candidate(2, analysed=False), candidate(1, analysed=False)) == (
    "Nothing fits into the memory of the chip: "
    + ADVICE.removeprefix("Give a larger memory_limit, ")
  )


@pytest.mark.parametrize(
  "limit",
  [0, -1, 0.5, "0GiB", "GiB", "16 giga", "", "1e3GiB", True, [1], "16GiB 1"],
)
def test_limits_that_are_no_size_are_refused(limit):
  match = rf"memory_limit={re.escape(repr(limit))} is not a size: give bytes, .*\"16GiB\""
  with pytest.raises(ValueError, match=match):
    plan_microbatches(build_mlp, mlp_args(), batch_size=768, memory_limit=limit)


def test_sizes_are_read_with_their_units():
  def limit(size):
    build_step = written_down(lambda n: 0)
    return plan_microbatches(
      build_step, (shape(1),), batch_size=1, memory_limit=size
    ).limit_bytes

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


def test_bad_input_is_refused():
  plan = functools.partial(
    plan_microbatches, args=mlp_args(), batch_size=768, memory_limit="1GiB"
  )
  with pytest.raises(
    ValueError, match=r"memory_limit=None uses the memory .*give memory_limit"
  ):
    plan(build_mlp, memory_limit=None)
  with pytest.raises(
    TypeError,
    match=r"build_step\(1\) returned .*which has no lower\(\): return",
  ):
    plan(lambda num_microbatches: mlp_loss)
  with pytest.raises(
    ValueError,
    match=r"build_step\(\d+\) and build_step\(\d+\) made the same program",
  ):
    plan(lambda num_microbatches: build_mlp(4))
  always_two = functools.partial(written_down(lambda n: 0), 2)
  with pytest.raises(
    ValueError,
    match=r"build_step\(1\) and build_step\(2\) made the same program",
  ):
    plan(lambda n: always_two(), args=(shape(2),), batch_size=2)
  with pytest.raises(
    TypeError, match=r"build_mlp\(\) got an unexpected keyword .* 'rematt'"
  ):
    plan(build_mlp, choices={"rematt": [True]})
  for choices in ({"remat": True}, {"remat": []}, {"remat": "yes"}, ["remat"]):
    match = re.escape(
      f"choices={choices!r} must be a dict from options of build_step to lists"
    )
    with pytest.raises(TypeError, match=match):
      plan(build_mlp, choices=choices)
  with pytest.raises(
    TypeError, match=r"build_step=.* is a step; give a function build_step\(num"
  ):
    plan(build_mlp(4))
  with pytest.raises(TypeError, match=r"args must be a tuple"):
    plan(build_mlp, args=mlp_args()[0][0])
  with pytest.raises(ValueError, match=r"batch_size=0 must be at least 1"):
    plan(build_mlp, batch_size=0)
  with pytest.raises(
    ValueError,
    match=r"batch_size=384, and the batch in args has 768 rows: give",
  ):
    plan(build_mlp, batch_size=384)
  with pytest.raises(
    ValueError, match=r"batch_size=500, and no array in args has so many rows"
  ):
    plan(lambda n: jax.jit(lambda *args: args), batch_size=500)
  # What does not compile is an error of its own, which says which step it was.
  with pytest.raises(ValueError, match="does not divide") as caught:
    plan(lambda n: build_mlp(5 * n))
  note = r"This is build_step\(\d+\), lowered and compiled with args."
  assert any(re.match(note, x) for x in caught.value.__notes__), (
    caught.value.__notes__
  )


FILE = """
import jax, jax.numpy as jnp, optax
import optax_accum
from job_sizes import ROWS

def loss_fn(params, batch):
  return jnp.mean(jnp.tanh(batch @ params) ** 2)

def build():
  def build_step(num_microbatches, remat=False, word="x"):
    assert isinstance(remat, bool) and isinstance(word, str)
    loss = jax.checkpoint(loss_fn) if remat else loss_fn
    return optax_accum.make_train_step(loss, optax.sgd(0.1), num_microbatches=num_microbatches)

  params = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  batch = jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)
  return build_step, (params, optax.sgd(0.1).init(params), batch), ROWS

def by_choice():
  build_step, args, rows = build()
  return build_step, lambda remat: args, rows

def two():
  return 1, 2

def wrong():
  return optax_accum.make_train_step(loss_fn, optax.sgd(0.1), num_microbatches=-3)
"""


@pytest.fixture
def command(tmp_path, capsys):
  """Runs the command line in this process, which saves the imports."""
  (tmp_path / "job.py").write_text(FILE)
  (tmp_path / "job_sizes.py").write_text("ROWS = 6")  # which the first imports

  def run(target, *options):
    from optax_accum._plan.command import main

    status = main(["plan", str(tmp_path / target), *options])
    return status, *capsys.readouterr()

  path, modules = [*sys.path], {*sys.modules}
  yield run
  sys.path[:] = path
  for name in {"planned_job", "job_sizes"} & ({*sys.modules} - modules):
    del sys.modules[name]


def test_the_command_prints_the_table(command):
  status, out, _ = command(
    "job.py:build",
    *(
      "--memory",
      str(2**30),
      "--choice",
      "remat=False",
      "--choice",
      "word=per_cycle",
    ),
    *("--choice", "remat=true"),
  )
  assert status == 0
  assert (
    out.splitlines()[0] == "a batch of 6 rows, within 1.0 GiB on each device"
  )
  assert (
    "best: num_microbatches=1 (of 6 rows), remat=False, word='per_cycle'" in out
  )
  # The arguments may be a function of the choice.
  status, out, _ = command(
    "job.py:by_choice", "--memory", "1GiB", "--choice", "remat=true"
  )
  assert (status, out.splitlines()[-1]) == (
    0,
    "best: num_microbatches=1 (of 6 rows), remat=True",
  )


@pytest.mark.parametrize(
  ("call", "message"),
  [
    ("jop.py:build", r"There is no file .*jop.py\."),
    ("job.py:bild", r".*job.py has no function 'bild'; it has .*\bbuild\b.*"),
    ("job.py", r".*job.py: give FILE.py:NAME, such as train.py:build\."),
    (
      "job.py:two",
      r".* returned \(1, 2\); it must return \(build_step, args, .*",
    ),
    (
      "job.py:loss_fn",
      r"loss_fn\(\) missing 2 required positional arguments: .*",
    ),
    ("job.py:wrong", r"num_microbatches=-3 must be at least 1\."),
    (
      "job.py:build --memory 1GB --choice rows=2",
      r".* unexpected keyword argument 'rows'",
    ),
    ("job.py:build --memory lots", r"memory_limit='lots' is not a size: .*"),
  ],
)
def test_a_mistake_in_a_call_of_the_command_is_one_line(command, call, message):
  status, out, err = command(*call.split())
  assert (status, out) == (1, "")
  assert re.fullmatch(message + "\n", err)


def test_an_error_of_the_file_says_where_it_was_raised(command):
  with pytest.raises(AssertionError) as caught:
    command("job.py:build", "--memory", "1GiB", "--choice", "remat=3")
  assert caught.traceback[-1].path.name == "job.py"


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      ["--choice", "remat=true,"],
      r"remat=true,: give NAME=VALUE,\.\.\., such as remat=false,true",
    ),
    (["--choice", "remat"], r"remat: give NAME=VALUE"),
    (["--choice", "remat=no"], r"remat=no: write true or false"),
  ],
)
def test_options_of_the_command_that_do_not_parse_are_named(
  command, capsys, options, message
):
  with pytest.raises(SystemExit) as caught:
    command("job.py:build", *options)
  assert caught.value.code == 2
  assert re.search(message, capsys.readouterr().err)


def test_where_nothing_fits_the_command_prints_what_takes_the_memory(command):
  status, out, err = command("job.py:build", "--memory", "1KiB")
  assert (status, out) == (1, "")
  *compiled, message = err.partition("Nothing fits: ")[::2]
  assert message.startswith("microbatches of 1 row need")
  # Each program is named when its compilation begins.
  named = re.findall(r"compiling build_step\((\d)\)\n", *compiled)
  assert len(named) > 1
  assert len(set(named)) == len(named) == err.count("compiling")


def test_outputs_may_grow_with_the_microbatch():
  """What does not depend on rows is not the same in all programs."""

  def build_step(num_microbatches):
    size = 64 // num_microbatches
    grown = Memory(
      0, output_size_in_bytes=4 * (size * 128 + size), alias_size_in_bytes=0
    )
    return lowers_to(num_microbatches, lambda: grown)

  plan = functools.partial(
    plan_microbatches, build_step, (shape(64, 16),), batch_size=64
  )
  for size in (1, 2, 4, 8, 16, 32, 64):
    found = plan(memory_limit=1000 + 4 * (size * 128 + size))
    assert found.microbatch_size == size
    assert len(found.candidates) <= 4


def choice_of(*found):
  """Which of the choices, of (rows of a microbatch, FLOPs, fits) each, is planned, and its rows."""
  made = [
    [
      candidate(size, choice={"i": i}, flops=flops, fits=fits)
      for size, flops, fits in each
    ]
    for i, each in enumerate(found)
  ]
  made = [
    [dataclasses.replace(c, choice=each[0].choice) for c in each]
    for each in made
  ]
  plan = MicrobatchPlan.of(made, 16, 1)
  return plan.choice["i"], plan.microbatch_size


def test_where_the_work_differs_by_less_than_a_hundredth_the_larger_microbatch_is_taken():
  small = [(1, 100_000, True), (2, 100_000, True)]
  assert choice_of(small, [(1, 101_000, True), (8, 101_000, True)]) == (1, 8)
  assert choice_of(small, [(1, 101_001, True), (8, 101_001, True)]) == (0, 2)
  assert choice_of(small, [(8, 101_000, True)], [(16, 1, False)]) == (1, 8)
  assert choice_of(small, small) == (0, 2)


def test_one_row_on_a_device_is_not_taken_for_less_work():
  """XLA writes products of one row as sums, which are not counted."""
  only_one_fits = [(1, 700, True), (8, 1000, False)]
  assert choice_of(only_one_fits, [(1, 700, True), (8, 1000, True)]) == (1, 8)
  assert choice_of(only_one_fits, [(1, 700, True), (8, 990, True)]) == (1, 8)
  assert choice_of(
    [(1, 700, True), (8, 900, False)], [(8, 1000, True), (1, 700, True)]
  ) == (0, 1)


def test_a_step_that_needs_two_microbatches_gets_them():
  def build_step(num_microbatches):
    return make_train_step(
      mlp_loss, TX, num_microbatches=num_microbatches, noise_scale=True
    )

  plan = plan_microbatches(
    build_step, mlp_args(rows=4), batch_size=4, memory_limit="1GiB"
  )
  assert plan.num_microbatches == 2


def by_size(temp, asked=None):
  """The same as `written_down`, for `temp` of the rows of a microbatch."""

  def build_step(microbatch_size):
    return written_down(lambda _: temp(microbatch_size), asked)(microbatch_size)

  return build_step


@pytest.mark.parametrize("rows", [1, 7, 96, 241])
def test_sizes_need_not_divide_the_batch(rows):
  # Of two sizes that make as many microbatches, the smaller one.
  possible = sorted({-(-rows // n) for n in range(1, rows + 1)})
  for limit in range(1, rows + 1, 3):
    asked = []
    plan = plan_microbatches(
      by_size(lambda size: size, asked),
      (shape(rows),),
      batch_size=rows,
      memory_limit=FIXED + limit,
    )
    assert plan.microbatch_size == max(
      size for size in possible if size <= limit
    )
    assert plan.num_microbatches == -(-rows // plan.microbatch_size)
    assert len(asked) == len(set(asked)) <= 10


def test_sizes_that_divide_are_looked_at_first():
  """Where the last microbatch takes more than it saves, the plan is that of sizes that divide."""
  plan = functools.partial(plan_microbatches, args=(shape(96),), batch_size=96)
  uneven = plan(
    by_size(lambda size: size + 50 * (96 % size > 0)), memory_limit=FIXED + 50
  )
  even = plan(written_down(lambda n: 96 // n), memory_limit=FIXED + 50)
  assert uneven.microbatch_size == even.microbatch_size == 48


def test_a_step_that_needs_a_number_gets_one():
  def build_step(num_microbatches, microbatch_size=None):
    assert microbatch_size is None
    return written_down(lambda n: 96 // n)(num_microbatches)

  plan = plan_microbatches(
    build_step, (shape(96),), batch_size=96, memory_limit=FIXED + 48
  )
  assert plan.microbatch_size == 48


@pytest.mark.more
def test_a_step_of_a_size_has_a_smaller_last_microbatch():
  made = []

  def build_step(microbatch_size, mesh=None, **options):
    made.append(microbatch_size)
    return make_train_step(
      mlp_loss, TX, microbatch_size=microbatch_size, mesh=mesh, **options
    )

  rows = 29 * 64
  args = mlp_args(rows=rows)
  whole = plan_microbatches(
    build_step, args, batch_size=rows, memory_limit="1GiB"
  ).candidates[0]
  assert (whole.num_microbatches, whole.microbatch_size) == (1, rows)
  memory = build_step(619).lower(*args).compile().memory_analysis()
  # 464 and 928 rows divide it
  limit = whole.fixed_bytes + memory.temp_size_in_bytes + 4096
  plan = plan_microbatches(
    build_step, args, batch_size=rows, memory_limit=limit
  )
  assert plan.microbatch_size == 619
  assert plan.peak_bytes <= limit
  last = rows - (plan.num_microbatches - 1) * plan.microbatch_size
  assert 0 < last < plan.microbatch_size
  assert str(plan).splitlines()[-1] == (
    f"best: microbatch_size={plan.microbatch_size} ({plan.num_microbatches} microbatches, the last"
    f" of {last} rows)"
  )
  # Over a mesh, sizes are multiples of the devices.
  made.clear()
  mesh = make_mesh(8)
  on_mesh = functools.partial(build_step, mesh=mesh)
  plan = plan_microbatches(
    on_mesh, args, batch_size=rows, memory_limit="1GiB"
  ).candidates[0]
  limit = plan.fixed_bytes + plan.temp_bytes // 2
  plan = plan_microbatches(on_mesh, args, batch_size=rows, memory_limit=limit)
  assert all(size % 8 == 0 for size in made)
  assert any(rows % size for size in made)
  # The noise scale needs two microbatches, and they may be uneven.
  noisy = functools.partial(build_step, noise_scale=True)
  plan = plan_microbatches(
    noisy, mlp_args(rows=5), batch_size=5, memory_limit="1GiB"
  )
  assert (plan.num_microbatches, plan.microbatch_size) == (2, 3)


def test_a_size_that_is_a_choice_is_the_users():
  def build_step(num_microbatches, microbatch_size):
    return written_down(lambda n: microbatch_size)(num_microbatches)

  plan = plan_microbatches(
    build_step,
    (shape(8),),
    batch_size=8,
    memory_limit="1GiB",
    choices={"microbatch_size": [3]},
  )
  assert (plan.num_microbatches, plan.choice) == (1, {"microbatch_size": 3})
  match = r"build_step\(microbatch_size=\d+\) and build_step\(microbatch_size=\d+\) made the same"
  with pytest.raises(ValueError, match=match):
    plan_microbatches(
      lambda microbatch_size: build_mlp(4),
      mlp_args(),
      batch_size=768,
      memory_limit="1GiB",
    )


def test_the_whole_batch_may_fit_where_half_of_it_does_not():
  """It has no accumulators, which here take 1000 bytes."""
  asked = []

  def temp(n):
    return 16 * (row - 4) if n == 1 else 1000 + row * (16 // n)

  plan = functools.partial(
    plan_microbatches, written_down(temp, asked), (shape(16),)
  )
  row = 4
  assert plan(batch_size=16, memory_limit=FIXED + 1000).num_microbatches == 1
  asked.clear()
  row = 100  # more than that in activations: it is not compiled
  with pytest.raises(ValueError, match="Nothing fits"):
    plan(batch_size=16, memory_limit=FIXED + 1000)
  assert 1 not in asked


def test_one_row_does_not_tell_what_the_whole_batch_needs():
  """With bfloat16 parameters scans need float32 accumulators, and XLA writes one row otherwise."""
  params, rows = [shape(256, 256, dtype=jnp.bfloat16)] * 4, 96
  args = arguments(params, shape(rows, 256, dtype=jnp.bfloat16))
  steps = Compilations(mlp_loss, args)
  whole, scan = steps.memory(1), min(steps.memory(rows), steps.memory(2))
  assert whole < scan
  for limit in (whole, (whole + scan) // 2, scan):
    plan = plan_microbatches(
      steps.build_step, args, batch_size=rows, memory_limit=limit
    )
    assert (plan.num_microbatches, plan.peak_bytes) == (1, whole)


def test_two_rows_may_fit_where_one_nearly_does():
  """A layout of one row may need more than that of two: bisecting tries two before one."""
  temp = {16: 1040, 8: 990, 4: 3000, 2: 5000, 1: 9000}
  build_step = written_down(lambda n: temp[n])
  plan = functools.partial(
    plan_microbatches, build_step, (shape(16),), batch_size=16
  )
  assert plan(memory_limit=FIXED + 1000).num_microbatches == 8


def test_arguments_that_a_step_deleted_are_named():
  shapes = mlp_args(rows=2)
  params, state, batch = jax.tree.map(
    lambda x: jnp.ones(x.shape, x.dtype), shapes
  )
  build_mlp(2)(params, state, batch)
  with pytest.raises(
    RuntimeError, match="has been deleted: an earlier step updated parameters"
  ):
    plan_microbatches(
      build_mlp, (params, state, batch), batch_size=2, memory_limit="1GiB"
    )


def test_values_of_choices_may_be_of_any_kind():
  plan = plan_microbatches(
    written_down(lambda n, microbatch, scale: 8 // n),
    (shape(8),),
    batch_size=8,
    memory_limit="1GiB",
    choices={"microbatch": [jnp.sin, jnp.cos], "scale": [np.ones(2), [1.0]]},
  )
  assert len(plan.candidates) == 4 * len(
    {c.num_microbatches for c in plan.candidates}
  )
  assert plan.choice["microbatch"] is jnp.sin
  assert "microbatch=sin, scale=array([1., 1.])" in str(plan)


def test_help_has_an_example(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["optax_accum", "plan", "--help"])
  with pytest.raises(SystemExit) as caught:
    runpy.run_module("optax_accum", run_name="__main__", alter_sys=True)
  assert caught.value.code == 0
  printed = capsys.readouterr().out
  assert (
    "python -m optax_accum plan train.py:build --memory 16GiB --choice"
    in printed
  )
