"""JAX's attention kernels in a loss over a mesh, compiled for TPUs. Run as test_forgotten_sums.py.

In interpret mode, on CPU devices, test_losses_over_a_mesh.py runs a kernel.
"""

import jax
from jax.experimental.pallas.ops.tpu import flash_attention, splash_attention
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from support import devices

from optax_accum import count_collectives, make_train_step

HEADS, LENGTH, WIDTH = 2, 256, 128


def flash(q, k, v):
  return flash_attention.flash_attention(q, k, v, causal=True)


def splash(q, k, v):
  masks = [splash_attention.CausalMask((LENGTH, LENGTH)) for _ in range(HEADS)]
  mask = splash_attention.MultiHeadMask(masks)
  run = splash_attention.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)
  return jax.vmap(run)(q, k, v)


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("attention", [flash, splash])
def test_a_fused_attention_compiles_for_eight_chips(attention, weighs):
  def loss_fn(params, batch):
    q, k, v = jnp.einsum("btd,dchk->cbhtk", batch["x"], params["w"])
    each = jnp.mean(attention(q, k, v) ** 2, axis=(1, 2, 3))
    return jnp.sum(each * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)

  mesh, tx = devices.make_mesh(8, platform="tpu"), optax.sgd(0.1)
  params = {"w": jax.ShapeDtypeStruct((WIDTH, 3, HEADS, WIDTH), jnp.float32)}
  batch = {"x": jax.ShapeDtypeStruct((32, LENGTH, WIDTH), jnp.float32)}
  batch["mask"] = jax.ShapeDtypeStruct((32,), jnp.float32)
  args = devices.abstract((params, tx.init(params), batch), mesh, (P(), P(), P("data")))
  valid = (lambda batch: jnp.sum(batch["mask"])) if weighs else None
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh, weight_fn=valid)
  compiled = step.lower(*args).compile()
  # forward and backward
  assert compiled.as_text().count("tpu_custom_call") >= 2
  count_collectives(compiled).assert_once_per_cycle()
