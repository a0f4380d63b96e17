"""A state in the host's memory, compiled for TPUs. Run as test_forgotten_sums.py.

Of a GPU that is not there JAX knows no kinds of memory.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import optax
import pytest
from support.optimizers import relaxed
from test_forgotten_sums import mesh

from optax_accum import accumulate, make_train_step, state_on_host

LEAVES, SIZE = 16, 512
P = LEAVES * SIZE * SIZE * 4  # bytes of the parameters


def loss_fn(params, x):
  for w in params.values():
    x = jnp.tanh(x @ w)
  return jnp.mean(x**2)


def compiled(form, tx, memory):
  """The compiled program of a step, with the moments in such memory."""
  # Of other shardings of shapes JAX forgets the kind of memory.
  one_device = Mesh(mesh("tpu").devices[:1], ("data",), axis_types=(AxisType.Auto,))
  one = NamedSharding(one_device, PartitionSpec())
  leaf = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=one)
  params = {f"w{i:02}": leaf for i in range(LEAVES)}
  rows = jax.ShapeDtypeStruct((16, SIZE), jnp.float32, sharding=one)

  def placed(path, x):
    name = jax.tree_util.keystr(path)
    kind = "device"
    if ".mu" in name or ".nu" in name:
      kind = memory
    return x.update(sharding=one.with_memory_kind(kind))

  def state_of(tx):
    return jax.tree.map_with_path(placed, jax.eval_shape(tx.init, params))

  if form == "make_train_step":
    step = make_train_step(
      loss_fn, tx, num_microbatches=2, weight_fn=lambda x: jnp.sum(x[:, 0] > 0)
    )
    lowered = step.lower(params, state_of(tx), rows)
  else:
    tx = accumulate(tx, 2)

    def step(params, state, grads):
      return tx.apply(grads, state, params)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    lowered = jitted.lower(params, state_of(tx), params)
  return lowered.compile().memory_analysis()


@pytest.mark.parametrize("form", ["make_train_step", "accumulate"])
def test_moments_stay_in_the_hosts_memory(form):
  adam = relaxed(optax.adam(1e-3))
  on_device = compiled(form, adam, "device")
  on_host = compiled(form, state_on_host(adam), "pinned_host")
  assert on_device.host_argument_size_in_bytes == 0
  assert on_host.host_argument_size_in_bytes == 2 * P
  assert on_host.host_alias_size_in_bytes == 2 * P
  assert on_host.host_temp_size_in_bytes == 0
  saved = on_device.argument_size_in_bytes - on_host.argument_size_in_bytes
  assert saved == 2 * P
