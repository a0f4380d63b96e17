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


def uneven():
  call(build(num_microbatches=3))


def other_rows():
  call(build(), batch={**BATCH, "y": BATCH["y"][:32]})


def labels_apart():
  step = build(lambda params, x, y: mean_loss(params, {"x": x, "y": y}))
  call(step, BATCH["y"], batch=BATCH["x"])


def empty_cycle():
  step = build()
  step.finish(PARAMS, TX.init(PARAMS), step.begin(PARAMS))


def loss_of_each_row():
  call(build(losses))


def loss_in_halves():
  def half(params, batch):
    return losses(params, batch).astype(jnp.bfloat16).mean()

  call(build(half, weight_fn=lambda batch: jnp.float32(len(batch["y"]))))


def aux_of_each_row():
  def loss_fn(params, batch):
    return mean_loss(params, batch), losses(params, batch)

  call(build(loss_fn, has_aux=True))


def key_unnamed():
  def noisy(params, batch, key):
    return mean_loss(params, batch) * jax.random.uniform(key)

  call(build(noisy), jax.random.key(0))


def used_again():
  step = optax_accum.make_train_step(mean_loss, TX, num_microbatches=4)
  params = jax.tree.map(jnp.array, PARAMS)
  step(params, TX.init(params), BATCH)
  step(params, TX.init(PARAMS), BATCH)


def accumulates_already():
  build(tx=optax.MultiSteps(TX, 4))


def rows_left_over():
  batch = jax.tree.map(lambda x: x[:60], BATCH)
  call(build(num_microbatches=1, mesh=MESH), batch=batch)


def within_shard_map():
  specs = {"in_specs": (), "out_specs": jax.P(), "check_vma": False}
  jax.shard_map(lambda: call(build())[2]["loss"], mesh=MESH, **specs)()


def right_ones_counted():
  def counted(params, batch, carry):
    return mean_loss(params, batch), ({"right": carry["right"] + 1}, None)

  step = build(counted, carry_argnum=2, mesh=MESH)
  call(step, {"right": np.int32(0)})


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


CAUSES = [
  uneven,
  other_rows,
  labels_apart,
  empty_cycle,
  loss_of_each_row,
  loss_in_halves,
  aux_of_each_row,
  key_unnamed,
  used_again,
  accumulates_already,
  rows_left_over,
  within_shard_map,
  right_ones_counted,
  state_of_another,
  nothing_fits,
]


def pattern(message):
  """`...` stands for values, and for the rest."""
  return ".*".join(map(re.escape, message.split("...")))


@pytest.mark.parametrize(
  ("message", "cause"),
  list(zip(MESSAGES, CAUSES, strict=True)),
  ids=[cause.__name__ for cause in CAUSES],
)
def test_a_message_is_raised(message, cause):
  errors = (ValueError, TypeError, RuntimeError)
  with pytest.raises(errors) as caught:
    cause()
  assert re.match(pattern(message), str(caught.value), re.DOTALL)
