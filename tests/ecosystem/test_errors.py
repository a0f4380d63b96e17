"""docs/reference/errors.md is true: each message on it is raised, by what the page says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.pages import DOCS

import optax_accum

PAGE = (DOCS / "reference" / "errors.md").read_text()
MESSAGES = re.findall(r"^- \*\*`(.+)`\*\*$", PAGE, re.MULTILINE)

ROWS = 64
PARAMS = {"w": np.ones((8, 3), np.float32) / 8}
BATCH = {"x": np.ones((ROWS, 8), np.float32), "y": np.zeros(ROWS, np.int32)}
TX = optax.adam(1e-3)
MESH = jax.make_mesh((8,), ("data",))

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


def losses(params, batch):
  logits = batch["x"] @ params["w"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def mean_loss(params, batch):
  return losses(params, batch).mean()


def build(loss_fn=mean_loss, tx=TX, **options):
  if "microbatch_size" not in options:
    options = {"num_microbatches": 4, **options}
  return optax_accum.make_train_step(loss_fn, tx, donate=False, **options)


def call(step, *further, params=None, batch=BATCH):
  params = PARAMS if params is None else params
  return step(params, TX.init(params), batch, *further)


def half_loss(params, batch):
  return losses(params, batch).astype(jnp.bfloat16).mean()


def noisy_loss(params, batch, key):
  return mean_loss(params, batch) * jax.random.uniform(key)


def counted_loss(params, batch, carry):
  return mean_loss(params, batch), ({"right": carry["right"] + 1}, None)


def used_again():
  step = optax_accum.make_train_step(mean_loss, TX, num_microbatches=4)
  params = jax.tree.map(jnp.array, PARAMS)
  step(params, TX.init(params), BATCH)
  step(params, TX.init(PARAMS), BATCH)


def within_shard_map():
  specs = {"in_specs": (), "out_specs": jax.P(), "check_vma": False}
  jax.shard_map(lambda: call(build())[2]["loss"], mesh=MESH, **specs)()


def state_of_another():
  tx = optax_accum.accumulate(TX, every_k=4)
  tx.update(PARAMS, optax.MultiSteps(TX, 4).init(PARAMS), PARAMS)


def nothing_fits():
  optax_accum.plan_microbatches(
    lambda num_microbatches: build(num_microbatches=num_microbatches),
    (PARAMS, jax.eval_shape(TX.init, PARAMS), BATCH),
    batch_size=ROWS,
    memory_limit="1KiB",
  )


# In the order of the page.
CAUSES = {
  "uneven": lambda: call(build(num_microbatches=3)),
  "other rows": lambda: call(build(), batch={**BATCH, "y": BATCH["y"][:32]}),
  "labels apart": lambda: call(
    build(lambda params, x, y: mean_loss(params, {"x": x, "y": y})), BATCH["y"], batch=BATCH["x"]
  ),
  "empty cycle": lambda: build().finish(PARAMS, TX.init(PARAMS), build().begin(PARAMS)),
  "loss of each row": lambda: call(build(losses)),
  "loss in halves": lambda: call(build(half_loss, weight_fn=lambda b: jnp.float32(len(b["y"])))),
  "aux of each row": lambda: call(
    build(lambda *args: (mean_loss(*args), losses(*args)), has_aux=True)
  ),
  "key unnamed": lambda: call(build(noisy_loss), jax.random.key(0)),
  "used again": used_again,
  "accumulates already": lambda: build(tx=optax.MultiSteps(TX, 4)),
  "rows left over": lambda: call(
    build(num_microbatches=1, mesh=MESH), batch=jax.tree.map(lambda x: x[:60], BATCH)
  ),
  "within shard_map": within_shard_map,
  "right ones counted": lambda: call(
    build(counted_loss, carry_argnum=2, mesh=MESH), {"right": np.int32(0)}
  ),
  "state of another": state_of_another,
  "nothing fits": nothing_fits,
}


def pattern(message):
  """`...` stands for values, and for the rest."""
  return ".*".join(map(re.escape, message.split("...")))


@pytest.mark.parametrize(
  ("message", "cause"), list(zip(MESSAGES, CAUSES.values(), strict=True)), ids=CAUSES
)
def test_a_message_is_raised(message, cause):
  errors = (ValueError, TypeError, RuntimeError)
  with pytest.raises(errors) as caught:
    cause()
  assert re.match(pattern(message), str(caught.value), re.DOTALL)
