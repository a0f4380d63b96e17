"""Gradients of embeddings over automatic axes, compiled for TPUs and GPUs that nobody has.

XLA could move an all-reduce out of the loop of microbatches and leave behind, in the loop, that
every device but the first adds to zeros (XLA issue 49143). Nothing runs here: it is in the text.
Run by name, with the compilers that go with the JAX that is installed: `.ci/run` installs them.
"""

import functools
import os
import pathlib

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices
from support.compiled import groups_of

from optax_accum import (
  _versions,
  count_collectives,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
)

# JAX 0.10.1 was the first to bring such an XLA. Before 0.9 none compiles for absent GPUs.
FORGETS = (0, 10, 1) <= jax.__version_info__ < (0, 12)
PLATFORMS = ["tpu", "gpu"] if jax.__version_info__ >= (0, 9) else ["tpu"]
WORDS, WIDTH, ROWS = 3360, 256, 64
TABLE = WORDS * WIDTH
SUMS = "all-reduce", "reduce-scatter"


def gpu_topology():
  names = {"SKIP_MDS_QUERY": "1", "ACCELERATOR_TYPE": "h100-8", "WORKER_HOSTNAMES": "localhost"}
  os.environ.update({f"GPU_{name}": value for name, value in names.items()})
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # it would look for a driver
  target = pathlib.Path(__file__).with_name("h100.txtpb").read_text()
  return topologies.get_topology_desc(
    platform="cuda", topology_name="", topology="1x1x8", target_config=target
  )


@functools.cache
def mesh(platform, shape=(8,), axes=("data",)):
  topology = devices.tpu_topology() if platform == "tpu" else gpu_topology()
  of_devices = np.array(topology.devices).reshape(shape)
  return Mesh(of_devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def loss_fn(table, ids):
  return jnp.mean(jnp.tanh(table[ids]) ** 2)


def counting(table, ids, counts=None):
  """A loss that counts words, in aux or in a carry."""
  ones = jnp.zeros((WORDS, WIDTH), jnp.int32) if counts is None else counts
  ones = ones.at[ids].add(1)
  return jnp.sum(table) * 0 + jnp.mean(ids), ones if counts is None else (ones, None)


def step_of(loss_fn=loss_fn, outer=False, **options):
  def lower(table, ids):
    tx = optax.sgd(0.1)
    sizes = {} if "microbatch_size" in options else {"num_microbatches": 4}
    step = make_train_step(loss_fn, tx, **sizes, **options)
    carry = (table.update(dtype=jnp.int32),) if "carry_argnum" in options else ()
    step = jax.jit(step) if outer else step
    return step.lower(table, jax.eval_shape(tx.init, table), ids, *carry)

  return lower


def gradient(**options):
  fun = microbatch_value_and_grad(loss_fn, num_microbatches=4, **options)
  return lambda table, ids: jax.jit(lambda *args: fun(*args)).lower(table, ids)


def encoder(fun):
  def lower(table, ids):
    rows = microbatch(fun, reduction="concat", batch_argnums=1, num_microbatches=4)
    return jax.jit(jax.grad(lambda *args: jnp.mean(jnp.tanh(rows(*args)) ** 2))).lower(table, ids)

  return lower


@jax.custom_vjp
def product(table, ids):
  """An embedding that scatters on its way back alone."""
  return jax.nn.one_hot(ids, WORDS) @ table


product.defvjp(
  lambda table, ids: (product(table, ids), ids),
  lambda ids, g: (jnp.zeros((WORDS, WIDTH)).at[ids].add(g), None),
)


WAYS = {
  "step": step_of(),
  "a sum": step_of(reduction="sum"),
  "under jit": step_of(outer=True),
  "the gradient": gradient(),
  "an encoder": encoder(lambda table, ids: table[ids]),
  "an encoder with a backward pass of its own": encoder(product),
  "a smaller last one": step_of(microbatch_size=24),
  "counts in aux": step_of(counting, has_aux=True, aux_reduction="sum"),
  "counts in a carry": step_of(counting, carry_argnum=2),
}
if _versions.ADDS_TO_REFERENCES:
  WAYS["in place"] = step_of(in_place=True)
  WAYS["the gradient in place"] = gradient(in_place=True)


def forgets(lowered):
  """Whether a device adds to zeros in the loop, and sums are taken of that behind it."""
  compiled = lowered.compile()
  *loops, _ = compiled.as_text().split("\nENTRY ")
  inside = [op for op in count_collectives(compiled).operations if op.loop is not None]
  summed = any(op.kind == "all-reduce" and op.bytes >= 4 * TABLE for op in inside)
  return "partition-id" in loops[0] and not summed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_device_forgets_its_sum(platform, way, monkeypatch):
  table = devices.abstract(jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32), mesh(platform))
  ids = devices.abstract(jax.ShapeDtypeStruct((ROWS, 8), jnp.int32), mesh(platform), P("data"))
  assert not forgets(WAYS[way](table, ids))
  if FORGETS:
    monkeypatch.setattr(_versions, "HOISTS_ALL_REDUCES", False)
    assert forgets(WAYS[way](table, ids))


FURTHER = [
  (P(), {}),
  (P("fsdp"), {}),
  (P(None, "fsdp"), {}),
  (P(), {"microbatch_size": 24}),
  (P("fsdp"), {"skip_nonfinite": True}),
  (P(None, "fsdp"), {"in_place": _versions.ADDS_TO_REFERENCES}),
]


@pytest.mark.parametrize(("spec", "options"), FURTHER, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_only_replicas_sum_behind_the_loop(platform, spec, options):
  """Rows over a further axis than `data_axis`: what XLA sums over that, it sums in the loop."""
  further = mesh(platform, (2, 4), ("replica", "fsdp"))
  shape = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
  table = devices.abstract(shape, further, spec)
  ids = jax.ShapeDtypeStruct((ROWS, 8), jnp.int32)
  ids = devices.abstract(ids, further, P(("replica", "fsdp")))
  lowered = step_of(mesh=further, data_axis="replica", **options)(table, ids)
  found = count_collectives(lowered.compile()).operations
  # Of a quarter of the table or more: what a microbatch looks up is far less.
  large = {(groups_of(op), op.loop) for op in found if op.bytes >= TABLE and op.kind in SUMS}
  assert large == {(((0, 4), (1, 5), (2, 6), (3, 7)), None)}


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_sharded_table_is_never_summed_whole(platform, spec):
  table = devices.abstract(jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32), mesh(platform), spec)
  ids = devices.abstract(jax.ShapeDtypeStruct((ROWS, 8), jnp.int32), mesh(platform), P("data"))
  found = count_collectives(step_of()(table, ids).compile()).operations
  assert not [op for op in found if op.bytes >= TABLE // 2 and op.kind in SUMS]


def test_one_device_has_no_barrier():
  one = Mesh(mesh("tpu").devices[:1], ("data",))
  table = devices.abstract(jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32), one)
  ids = devices.abstract(jax.ShapeDtypeStruct((ROWS, 8), jnp.int32), one)
  assert "optimization_barrier" not in gradient()(table, ids).as_text()
