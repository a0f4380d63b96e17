"""What is traced leaves no tracer behind. In a large process, such as that of the suite, it takes seconds."""

import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np
import pytest

from optax_accum import _versions, microbatch_value_and_grad

WAYS = [{}, {"in_place": True}] if _versions.ADDS_TO_REFERENCES else [{}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_loss_with_effects_leaks_no_tracer(options):
  def loss_fn(params, x):
    jax.debug.callback(print, x[0, 0], ordered=True)
    checkify.debug_check(jnp.all(x < 10), "too large")
    return jnp.mean((x @ params) ** 2)

  run = microbatch_value_and_grad(loss_fn, num_microbatches=3, **options)
  args = np.ones(2), np.arange(12.0).reshape(6, 2)
  with jax.enable_x64(True), jax.checking_leaks():
    jax.make_jaxpr(checkify.checkify(jax.jit(run)))(*args)
