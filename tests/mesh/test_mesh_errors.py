"""What cannot be over a mesh: the error names it, and what to write instead."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import EXPLICIT, make_mesh

from optax_accum import make_train_step, microbatch

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


def mapped(mesh, batch, fun=jnp.sum, **options):
  """That `microbatch` is called."""

  def call():
    each = {"num_microbatches": 2, **options}
    microbatch(fun, reduction="sum", mesh=mesh, **each)(batch)

  return call


ONES = np.ones(64, np.float32)
# A call, the error, and what it says.
REFUSED = [
  (made(make_mesh(8), data_axis="rows"), ValueError, r"data_axis='rows' is no axis of the mesh.*'data'"),
  (made(make_mesh(2, 4, **TWO), data_axis=("data", "model")), ValueError,
    r"data_axis='model' is no axis of the mesh.*'data', 'fsdp'"),
  (made(make_mesh(2, 4, axes=("replica", "fsdp"))), ValueError,
    r"'data' is no axis of the mesh, which has \('replica', 'fs"),
  (made(make_mesh(8), axis_name="data"), TypeError, "axis_name"),
  (called(make_mesh(8), ONES[:60], num_microbatches=4), ValueError,
    "60 rows, which the 8 devices .* use 32 or 64 rows"),
  (called(make_mesh(4, 2, **TWO), ONES[:28], data_axis=TWO["axes"], num_microbatches=2), ValueError,
    r"28 rows, which the 8 devices of axes \('data', 'fsdp'\) do not divide: use 16 or 32"),
  (called(make_mesh(8), ONES, num_microbatches=3), ValueError, r"8 rows of argument [01] on each device: use one of \[1, 2, 4, 8\], .* times the number"),
  (called(make_mesh(8), ONES, microbatch_size=12), ValueError, "microbatch_size=12 .* use 8 or 16"),
  *(
    (
      called(mesh, {"x": ONES, "t": number}, num_microbatches=2),
      ValueError,
      r"argument 1\['t'\] has shape \(\), without rows",
    )
    for mesh in (None, make_mesh(8), make_mesh(8, kind=EXPLICIT))
    for number in (1.0, np.float32(1))
  ),
  (called(make_mesh(2), np.ones(8, np.complex64), np.complex64(1), num_microbatches=2, accumulator_dtype=jnp.float32),
    TypeError, "imaginary part of grads"),
  (
    mapped(make_mesh(8), ONES[:60]),
    ValueError,
    "argument 0 has 60 rows, which the 8 devices .* use 48 or 64 rows, or fill up with rows that"
    r" weight_fn, or the weight that a loss returns \(has_weight\), counts as 0",
  ),
  (mapped(make_mesh(8), ONES, num_microbatches=3), ValueError, r"8 rows of argument [01] on each device: use one of \[1, 2, 4, 8\], .* times the number"),
  (mapped(make_mesh(8), ONES, axis_name="data"), ValueError,
    "axis_name='data' is for .* inside .*: give one of the two"),
  (mapped(make_mesh(8), ONES, data_axis="rows"), ValueError, "data_axis='rows' is no axis of the mesh"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_an_error_names_what_cannot_be_over_a_mesh(call, error, match):
  with pytest.raises(error, match=match):
    call()
