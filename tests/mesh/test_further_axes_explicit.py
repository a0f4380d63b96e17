"""Losses that gather over a further axis of their own, which is explicit."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.compiled import groups_of
from support.devices import AUTO, EXPLICIT
from support.layered import init_params, make_batch, over_fsdp, valid, whole_batch, WORDS
from support.optimizers import clipped_adamw
from support.samples import more

from optax_accum import count_collectives, make_train_step

AXES = ("replica", "fsdp")


def gathering(params, batch):
  """The loss as explicit axes want it: it spreads its rows, and gathers each layer for its use."""
  whole = lambda x: jax.reshard(x, P(*[None] * x.ndim))  # noqa: E731
  batch = jax.tree.map(lambda x: jax.reshard(x, P("fsdp")), batch)
  h = whole(params["table"]).at[batch["words"][:, :-1]].get(out_sharding=P("fsdp"))

  @jax.checkpoint
  def layer(h, at):
    at = jax.tree.map(whole, at)
    return h + jnp.tanh(h @ at["w"] + at["b"][None, None]), None

  h, _ = jax.lax.scan(layer, h, params["layers"])
  labels = jax.nn.one_hot(batch["words"][:, 1:], WORDS, dtype=h.dtype)
  losses = optax.softmax_cross_entropy(h @ whole(params["head"]), labels)
  return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


@pytest.mark.more
@pytest.mark.parametrize(("kinds", "sizes"), [
  more((EXPLICIT, EXPLICIT), {"num_microbatches": 4}),
  ((AUTO, EXPLICIT), {"microbatch_size": 24}),
], ids=["explicit", "automatic and explicit"])  # fmt: skip
def test_a_loss_may_gather_over_an_explicit_axis(kinds, sizes):
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES, axis_types=kinds)
  with jax.enable_x64(True):
    tx, params = clipped_adamw(), init_params()
    step = make_train_step(
      gathering, tx, mesh=mesh, data_axis="replica", weight_fn=valid, donate=False, **sizes
    )
    params = devices.put(params, mesh, over_fsdp(params, mesh))
    batch = devices.put(make_batch(), mesh, P("replica"))
    start = args = params, trees.strong(tx.init(params)), batch
    for _ in range(3):
      args = *step(*args)[:2], batch
    trees.assert_close(jax.device_get(args[0]), whole_batch()[0], 1e-10)
    assert jax.tree.map(lambda x: x.sharding, args[0]) == jax.tree.map(lambda x: x.sharding, params)
    found = count_collectives(step.lower(*start).compile()).operations
  layer = params["layers"]["w"].nbytes // 3
  assert any(c.kind == "all-gather" and c.bytes == layer and c.loop for c in found)
  pairs = (0, 4), (1, 5), (2, 6), (3, 7)
  replicas = [c for c in found if groups_of(c) == pairs]
  assert [c.loop for c in replicas if c.bytes > 64] == [None]
