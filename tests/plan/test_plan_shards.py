"""`plan_microbatches` compares ways to shard: `args` is then a function of the choice."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from support import devices
from support.devices import make_mesh
from support.planned import compiled_once, shape, written_down

from optax_accum import make_train_step, plan_microbatches

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
  options = {"mesh": mesh, "data_axis": WAYS[shard][1], "num_microbatches": num_microbatches}
  return make_train_step(loss_fn, TX, **options)


def test_the_memory_of_the_compiled_programs_decides_between_ways_to_shard():
  build = compiled_once(build_way, args_of)
  choices = {"shard": [*WAYS]}
  plan = functools.partial(plan_microbatches, build, args_of, batch_size=ROWS, choices=choices)
  peak = {}
  for way in WAYS:
    for n in (1, 2):  # 8 devices have rows
      memory = build(n, shard=way).lower().compile().memory_analysis()
      given = memory.argument_size_in_bytes + memory.generated_code_size_in_bytes
      out = memory.output_size_in_bytes - memory.alias_size_in_bytes
      peak[way, n] = given + out + memory.temp_size_in_bytes
  least = {way: min(peak[way, n] for n in (1, 2)) for way in WAYS}
  assert least["layers"] < least["once"] < least["whole"]
  # The first that fits is planned.
  assert plan(memory_limit="1GiB").choice == {"shard": "whole"}
  assert plan(memory_limit=least["whole"] - 1).choice == {"shard": "once"}
  only = plan(memory_limit=(least["layers"] + least["once"]) // 2)
  assert {c.choice["shard"] for c in only.candidates if c.fits} == {"layers"}
  assert {c.choice["shard"] for c in only.candidates} == {*WAYS}
  for c in only.candidates:
    assert c.peak_bytes == peak[c.choice["shard"], c.num_microbatches]
  assert only.choice == {"shard": "layers"}
  assert only.peak_bytes <= only.limit_bytes


def test_arguments_may_depend_on_the_choice():
  asked = []

  def args(dtype):
    asked.append(dtype)
    return [shape(8, dtype=dtype)]

  choices = {"dtype": [jnp.float32, jnp.bfloat16]}
  build_step = written_down(lambda n, dtype: 8 // n)
  plan = functools.partial(plan_microbatches, build_step, batch_size=8, memory_limit="1GiB")
  assert plan(args, choices=choices).num_microbatches == 1
  assert asked == choices["dtype"][:1]
  without = plan_microbatches(
    written_down(lambda n: 8 // n), lambda: (shape(8),), batch_size=8, memory_limit="1GiB"
  )
  assert without.num_microbatches == 1


def sizes_that_fit_nothing(loss, args, rows, **options):
  """All microbatches that the planner can try: nothing fits, so it looks down to the smallest."""
  asked = []

  def build_step(num_microbatches):
    asked.append(rows // num_microbatches)
    return make_train_step(loss, TX, num_microbatches=num_microbatches, **options)

  with pytest.raises(ValueError, match="Nothing fits"):
    plan_microbatches(build_step, args, batch_size=rows, memory_limit=100)
  return {*asked}


@pytest.mark.more
def test_sizes_are_those_that_all_devices_with_rows_divide():
  mesh = make_mesh(2, 4, axes=AXES)
  square = lambda w, batch: jnp.mean((batch @ w) ** 2)  # noqa: E731

  def args(rows, spec, of_params=devices.EVERYWHERE, width=8):
    w = devices.abstract(shape(width, width), mesh, of_params)
    return w, jax.eval_shape(TX.init, w), devices.abstract(shape(rows, width), mesh, spec)

  replicas = {"mesh": mesh, "data_axis": "replica"}
  # Without a data axis at all, too.
  for options in (replicas, {}):
    assert min(sizes_that_fit_nothing(square, args(16, BOTH), 16, **options)) == 8
  # Parameters of as many columns as there are rows are not taken for rows.
  same = args(16, P("replica"), of_params=P(None, AXES), width=16)
  assert min(sizes_that_fit_nothing(square, same, 16, **replicas)) == 2
