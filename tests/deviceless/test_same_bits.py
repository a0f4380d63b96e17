"""`virtual_devices` in programs for TPUs and GPUs. Run as test_forgotten_sums.py."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import devices
from test_forgotten_sums import mesh, PLATFORMS

from optax_accum import count_collectives, make_train_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

SIZE = 1024


def loss_fn(params, batch):
  return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_as_many_devices_need_and_send_what_they_did(platform):
  all_devices = mesh(platform)
  count = all_devices.size
  params = {"w": jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)}
  tx = optax.adam(1e-3)
  state = jax.eval_shape(tx.init, params)
  batch = jax.ShapeDtypeStruct((8 * count, SIZE), jnp.float32)
  args = devices.abstract((params, state, batch), all_devices)

  def needs(virtual):
    step = make_train_step(
      loss_fn, tx, num_microbatches=4, mesh=all_devices, virtual_devices=virtual
    )
    program = step.lower(*args).compile()
    sent = count_collectives(program).at_least(SIZE).operations
    found = {c.kind: c.bytes for c in sent if not c.loop}
    return program.memory_analysis().temp_size_in_bytes, found

  size = 4 * SIZE**2
  plain, reduced = needs(None)
  temp, sent = needs(count)
  assert reduced["all-reduce"] in (size, size + 4)
  assert sent.keys() == {"all-to-all", "all-gather"}
  for bytes_sent in sent.values():
    assert size <= bytes_sent < size + 100  # and scalars, in one
  assert temp < plain + size / 20
  # A sum more for each halving.
  assert needs(2 * count)[0] < plain + 1.05 * size
