"""What cannot be over a mesh: the error names it, and what to write instead."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import optax
import pytest
from support import devices, layered
from support.devices import AUTO, EXPLICIT, make_mesh

from optax_accum import (
  accumulate,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
)

P = jax.P
SGD = optax.sgd(0.1)
TWO = {"axes": ("data", "fsdp")}


def mean_square(w, batch):
  return jnp.mean(jnp.abs(batch * w) ** 2)


def made(mesh, **options):
  """That a step is made."""

  def call():
    make_train_step(mean_square, SGD, num_microbatches=4, mesh=mesh, **options)

  return call


def called(mesh, batch, w=1.0, **options):
  """That a step is called."""

  def call():
    step = make_train_step(mean_square, SGD, mesh=mesh, **options)
    step(np.asarray(w), SGD.init(w), batch)

  return call


def rows_apart(size):
  """That rows of an explicit mesh are cut by a size which their sharding cannot follow."""

  def call():
    mesh = make_mesh(8, kind=EXPLICIT)
    x = devices.put(np.ones(48, np.float32), mesh, P("data"))
    cycle = microbatch_value_and_grad(mean_square, microbatch_size=size)
    jax.jit(cycle)(jnp.asarray(1.0), x)

  return call


def mapped(mesh, batch, fun=jnp.sum, **options):
  """That `microbatch` is called."""

  def call():
    each = {"num_microbatches": 2, **options}
    microbatch(fun, reduction="sum", mesh=mesh, **each)(batch)

  return call


def within_a_step():
  """That it is called in the loss of a step over the mesh."""
  mesh = make_mesh(8)
  run = microbatch(jnp.sum, reduction="sum", num_microbatches=2, mesh=mesh)
  step = make_train_step(
    lambda w, x: w * run(x), SGD, num_microbatches=1, mesh=mesh
  )
  step(jnp.ones(()), SGD.init(jnp.ones(())), ONES)


def closing_over_the_mesh():
  mesh = make_mesh(8, kind=EXPLICIT)
  table = devices.put(ONES, mesh, P("data"))
  mapped(mesh, ONES, lambda x: jnp.sum(x) * jnp.sum(table))()


FURTHER = ("replica", "fsdp")


def further(
  rows=layered.BOTH, kind=AUTO, tx=layered.optimizer, sizes=(2, 4), **options
):
  """That a step is called whose rows are over a further axis of the mesh."""

  def call():
    mesh = make_mesh(*sizes, axes=FURTHER, kind=kind)
    step = make_train_step(
      layered.loss_fn, tx(), mesh=mesh, data_axis="replica", **options
    )
    params = layered.init_params()
    with jax.enable_x64(True):
      state = tx().init(params)
      step(params, state, devices.put(layered.make_batch(), mesh, rows))

  return call


def on_another_mesh():
  mesh, other = (
    make_mesh(2, 4, axes=axes) for axes in (FURTHER, ("replica", "model"))
  )
  batch = devices.put(np.ones(32, np.float32), other, P(("replica", "model")))
  called(mesh, batch, data_axis="replica", num_microbatches=4)()


def reducing(axis_name):
  return lambda: accumulate(layered.optimizer(), 2, axis_name=axis_name)


ONES = np.ones(64, np.float32)
FIT = (
  r"num_microbatches= one of \[1, 2, 4\], or microbatch_size=, a multiple of 8"
)
FIRST = r"rows sharded over .*: shard them over data_axis='replica' first"
ONE_OF_TWO = "give one of the two"
# A call, the error, and what it says.
REFUSED = [
  (
    made(make_mesh(8), data_axis="rows"),
    ValueError,
    r"data_axis='rows' is no axis of the mesh.*'data'",
  ),
  (
    made(make_mesh(2, 4, **TWO), data_axis=("data", "model")),
    ValueError,
    r"data_axis='model' is no axis of the mesh.*'data', 'fsdp'",
  ),
  (
    made(make_mesh(2, 4, axes=FURTHER)),
    ValueError,
    r"'data' is no axis of the mesh, which has \('replica', 'fs",
  ),
  *(
    (
      made(make_mesh(2, 4, **TWO), data_axis=axes),
      ValueError,
      "must name one axis or more, each once",
    )
    for axes in ((), ("data", "data"))
  ),
  (made(8), TypeError, "mesh=8 must be a jax.sharding.Mesh"),
  (
    made(make_mesh(8, kind=AxisType.Manual)),
    ValueError,
    r"axes \['data'\] are manual",
  ),
  (
    made(make_mesh(8), reduce_gradients="always"),
    ValueError,
    "reduce_gradients='always' must be one of 'per_cycle'",
  ),
  (
    made(make_mesh(8), axis_name="data"),
    ValueError,
    r"axis_name='data' is for .* inside .* mesh= .* outside",
  ),
  (
    made(make_mesh(2, 4, axes=FURTHER), data_axis="replica", axis_name="fsdp"),
    ValueError,
    f"axis_name='fsdp' is for .* inside .*: {ONE_OF_TWO}",
  ),
  (
    called(make_mesh(8), ONES[:60], num_microbatches=4),
    ValueError,
    "60 rows, which the 8 devices .* use 32 or 64 rows",
  ),
  (
    called(
      make_mesh(4, 2, **TWO),
      ONES[:28],
      data_axis=TWO["axes"],
      num_microbatches=2,
    ),
    ValueError,
    r"28 rows, which the 8 devices of axes \('data', 'fsdp'\) do not divide: use 16 or 32",
  ),
  (
    called(make_mesh(8), ONES, num_microbatches=3),
    ValueError,
    r"does not divide the 8 rows .* one of \[1, 2, 4, 8\]",
  ),
  (
    called(make_mesh(8), ONES, microbatch_size=12),
    ValueError,
    "microbatch_size=12 .* use 8 or 16",
  ),
  *(
    (
      called(mesh, {"x": ONES, "t": number}, num_microbatches=2),
      ValueError,
      r"argument 1\['t'\] has shape \(\), without an axis",
    )
    for mesh in (None, make_mesh(8), make_mesh(8, kind=EXPLICIT))
    for number in (1.0, np.float32(1))
  ),
  *(  # no multiple of 8, no divisor of 48
    (
      rows_apart(size),
      ValueError,
      rf"48 rows are sharded over 8 devices.* of {size} rows cannot.* use microbatches of",
    )
    for size in (12, 20, 32)
  ),
  *(
    (
      called(
        make_mesh(2),
        np.ones(8, np.complex64),
        np.complex64(1),
        num_microbatches=2,
        accumulator_dtype=jnp.float32,
        reduce_gradients=when,
      ),
      TypeError,
      "imaginary part of grads",
    )
    for when in ("per_cycle", "per_microbatch")
  ),
  (
    further(num_microbatches=8),
    ValueError,
    rf"Microbatches of 4 rows are not divided by the 8 devices .*{FIT}",
  ),
  (
    further(microbatch_size=12),
    ValueError,
    rf"Microbatches of 12 rows \(the last 8\) are not.*{FIT}",
  ),
  (further(microbatch_size=20), ValueError, r"\(the last 12\)"),
  (
    further(P("fsdp"), num_microbatches=4),
    ValueError,
    f"words'.*{FIRST}|mask'.*{FIRST}",
  ),
  (further(P(("fsdp", "replica")), num_microbatches=4), ValueError, FIRST),
  *(  # also over one device, because it is in the type
    (
      further(kind=EXPLICIT, num_microbatches=4, sizes=sizes),
      ValueError,
      r"rows sharded over \('replica', 'fsdp'\), and further axes than data_axis='replica' must be"
      r" automatic: .*AxisType.Auto.*or name it in data_axis.*rows over data_axis alone.*reshard",
    )
    for sizes in ((2, 4), (8, 1))
  ),
  (
    on_another_mesh,
    ValueError,
    r"on another mesh .* axes \{.*'model': 4.*mesh= has .*'fsdp': 4\}: pass the",
  ),
  *(
    (
      further(tx=reducing(name), num_microbatches=4, weight_fn=layered.valid),
      ValueError,
      rf"axis_name='{name}' is not bound here: .* or leave axis_name out",
    )
    for name in FURTHER
  ),
  (
    mapped(make_mesh(8), ONES[:60]),
    ValueError,
    "argument 0 has 60 rows, which the 8 devices .* use 48 or 64 rows, or fill up with rows that"
    r" weight_fn, or the weight that a loss returns \(has_weight\), counts as 0",
  ),
  (
    mapped(make_mesh(8), ONES, num_microbatches=3),
    ValueError,
    r"does not divide the 8 rows .* one of \[1, 2, 4, 8\]",
  ),
  (
    mapped(make_mesh(8), ONES, axis_name="data"),
    ValueError,
    f"axis_name='data' is for .* inside .*: {ONE_OF_TWO}",
  ),
  (
    mapped(make_mesh(8), ONES, data_axis="rows"),
    ValueError,
    "data_axis='rows' is no axis of the mesh",
  ),
  (
    mapped(make_mesh(8), ONES, skip_empty=True),
    ValueError,
    "skip_empty=True needs weights",
  ),
  (
    within_a_step,
    ValueError,
    r"inside pmap or shard_map over .*'data'.* with mesh=.* pass axis_name=",
  ),
  (
    closing_over_the_mesh,
    ValueError,
    "The function closes over an array .*: pass an array as a further argument",
  ),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_an_error_names_what_cannot_be_over_a_mesh(call, error, match):
  with pytest.raises(error, match=match):
    call()
