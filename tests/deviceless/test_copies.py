"""Copies in programs for TPUs and GPUs that nobody has. Run as test_forgotten_sums.py."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax
import pytest
from support import devices
from support.compiled import copies_of
from test_forgotten_sums import mesh, PLATFORMS

from optax_accum import accumulate


@pytest.mark.parametrize("platform", PLATFORMS)
def test_updates_that_accumulators_cannot_hold_have_buffers_of_their_own(platform):
  one = Mesh(mesh(platform).devices[:1], ("data",))
  params = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in "abcd"}
  tx = accumulate(optax.sgd(0.1), 8, accumulator_dtype=jnp.bfloat16)
  args = devices.abstract((params, jax.eval_shape(tx.init, params)), one)
  program = jax.jit(tx.update, donate_argnums=(0, 1)).lower(*args).compile()
  # as of one array of zeros for all
  assert copies_of(program.as_text(), 512 * 512) == 0
