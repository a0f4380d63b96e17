"""Rows over further axes that cannot be, and what is to be written instead."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.devices import AUTO, EXPLICIT
from support.layered import (
  BOTH,
  init_params,
  loss_fn,
  make_batch,
  optimizer,
  over_fsdp,
  valid,
  whole_batch,
  WORDS,
)

from optax_accum import accumulate, count_collectives, make_train_step

AXES = ("replica", "fsdp")
TIMES = {"num_microbatches": 4, "weight_fn": valid}


def refused(match, *, kind=AUTO, spec=BOTH, **options):
  mesh = devices.make_mesh(2, 4, axes=AXES, kind=kind)
  step = make_train_step(
    loss_fn, optimizer(), mesh=mesh, data_axis="replica", **options
  )
  params = init_params()
  batch = devices.put(make_batch(), mesh, spec)
  with pytest.raises(ValueError, match=match):
    step(params, optimizer().init(params), batch)


def test_rows_that_the_further_axis_does_not_divide_are_refused():
  fit = r"num_microbatches= one of \[1, 2, 4\], or microbatch_size=, a multiple of 8"
  refused(
    rf"Microbatches of 4 rows are not divided by the 8 devices .*{fit}",
    num_microbatches=8,
  )
  refused(
    rf"Microbatches of 12 rows \(the last 8\) are not.*{fit}",
    microbatch_size=12,
  )
  refused(r"\(the last 12\)", microbatch_size=20)


def test_axes_that_rows_cannot_be_over_are_refused():
  first = r"rows sharded over .*: shard them over data_axis='replica' first"
  refused(f"words'.*{first}|mask'.*{first}", spec=P("fsdp"), num_microbatches=4)
  refused(first, spec=P(("fsdp", "replica")), num_microbatches=4)
  match = (
    r"rows sharded over \('replica', 'fsdp'\), and further axes than data_axis='replica' must be"
    r" automatic: .*AxisType.Auto.*or name it in data_axis.*rows over data_axis alone.*reshard"
  )
  refused(match, kind=EXPLICIT, num_microbatches=4)


def gathering(params, batch):
  """The loss as explicit axes want it: it spreads its rows, and gathers each layer for its use."""
  whole = lambda x: jax.reshard(x, P(*[None] * x.ndim))  # noqa: E731
  batch = jax.tree.map(lambda x: jax.reshard(x, P("fsdp")), batch)
  h = (
    whole(params["table"])
    .at[batch["words"][:, :-1]]
    .get(out_sharding=P("fsdp"))
  )

  @jax.checkpoint
  def layer(h, at):
    at = jax.tree.map(whole, at)
    return h + jnp.tanh(h @ at["w"] + at["b"][None, None]), None

  h, _ = jax.lax.scan(layer, h, params["layers"])
  labels = jax.nn.one_hot(batch["words"][:, 1:], WORDS, dtype=h.dtype)
  losses = optax.softmax_cross_entropy(h @ whole(params["head"]), labels)
  return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


@pytest.mark.parametrize(
  ("kinds", "sizes"),
  [
    ((EXPLICIT, EXPLICIT), {"num_microbatches": 4}),
    ((AUTO, EXPLICIT), {"microbatch_size": 24}),
  ],
  ids=["explicit", "automatic and explicit"],
)
def test_a_loss_that_gathers_over_an_explicit_axis_gets_a_note(kinds, sizes):
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES, axis_types=kinds)
  with jax.enable_x64(True):
    tx, params = optimizer(), init_params()
    step = make_train_step(
      gathering,
      tx,
      mesh=mesh,
      data_axis="replica",
      weight_fn=valid,
      donate=False,
      **sizes,
    )
    params = devices.put(params, mesh, over_fsdp(params, mesh))
    batch = devices.put(make_batch(), mesh, P("replica"))
    start = args = params, trees.strong(tx.init(params)), batch
    for _ in range(3):
      args = *step(*args)[:2], batch
    trees.assert_close(jax.device_get(args[0]), whole_batch()[0], 1e-10)
    assert jax.tree.map(lambda x: x.sharding, args[0]) == jax.tree.map(
      lambda x: x.sharding, params
    )
    found = count_collectives(step.lower(*start).compile()).operations
  layer = params["layers"]["w"].nbytes // 3
  assert any(
    c.kind == "all-gather" and c.bytes == layer and c.loop for c in found
  )
  replicas = [c for c in found if c.groups == ((0, 4), (1, 5), (2, 6), (3, 7))]
  assert [c.loop for c in replicas if c.bytes > 64] == [None]


def test_a_loss_that_does_not_gather_is_told_where_by_jax():
  with jax.enable_x64(True):
    mesh = devices.make_mesh(2, 4, axes=AXES, kind=EXPLICIT)
    step = make_train_step(
      loss_fn, optimizer(), mesh=mesh, data_axis="replica", **TIMES
    )
    params = devices.put(init_params(), mesh, over_fsdp(init_params(), mesh))
    with pytest.raises(Exception, match="out_sharding"):
      step(
        params,
        optimizer().init(params),
        devices.put(make_batch(), mesh, P("replica")),
      )


def test_axes_and_meshes_that_are_not_these_are_refused():
  mesh, other = (
    devices.make_mesh(2, 4, axes=axes) for axes in (AXES, ("replica", "model"))
  )
  make = functools.partial(
    make_train_step, loss_fn, optimizer(), num_microbatches=4
  )
  with pytest.raises(
    ValueError,
    match=r"'data' is no axis of the mesh, which has \('replica', 'fs",
  ):
    make(mesh=mesh)
  with pytest.raises(
    ValueError,
    match=r"axis_name='fsdp' is for .* inside .*: give one of the two",
  ):
    make(mesh=mesh, data_axis="replica", axis_name="fsdp")
  batch = devices.put(make_batch(), other, P(("replica", "model")))
  params = init_params()
  with pytest.raises(
    ValueError,
    match=r"on another mesh .* axes \{.*'model': 4.*mesh= has .*'fsdp': 4\}: pass the",
  ):
    make(mesh=mesh, data_axis="replica")(
      params, optimizer().init(params), batch
    )


@pytest.mark.parametrize("axis_name", AXES)
def test_an_optimizer_that_reduces_by_itself_is_refused(axis_name):
  tx = accumulate(optimizer(), 2, axis_name=axis_name)
  mesh = devices.make_mesh(2, 4, axes=AXES)
  step = make_train_step(loss_fn, tx, mesh=mesh, data_axis="replica", **TIMES)
  match = (
    rf"axis_name='{axis_name}' is not bound here: .* or leave axis_name out"
  )
  with jax.enable_x64(True):
    params, batch = init_params(), devices.put(make_batch(), mesh, BOTH)
    with pytest.raises(ValueError, match=match):
      step(params, tx.init(params), batch)
