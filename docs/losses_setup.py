"""What the page of losses compares: small models, real data, and the gradients of steps."""

from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from optax_accum import make_train_step

ROWS, LENGTH = 32, 24
mesh = jax.make_mesh((8,), ("data",))
rng = np.random.default_rng(0)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def split(loss, *unsplit, **options):
  """A function of parameters and batch: the gradient that a step with these options takes."""
  unit = optax.sgd(1.0)  # its step is the gradient
  step = make_train_step(
    loss, unit, **{"num_microbatches": 4, **options}, donate=False
  )

  def gradient(params, batch):
    new, _, _ = step(params, unit.init(params), batch, *unsplit)
    return optax.tree.sub(params, jax.device_get(new))

  return gradient


def compare(data, loss, *unsplit, mistake, whole=None, sharded=None, **options):
  """Asserts that steps with these options take the gradient of the whole batch, in float64.

  `data` are parameters and a batch. `whole(params, batch)` is the loss of the whole batch, where
  that is written in another way, and `sharded` the loss on several devices, where it differs.
  """
  params, batch = data
  whole = whole or (lambda params, batch: loss(params, batch, *unsplit))
  expected = jax.device_get(jax.jit(jax.grad(whole))(params, batch))
  over = {"mesh": mesh, "num_microbatches": 2, **options}
  off = []
  for way in (
    split(loss, *unsplit, **options),
    split(sharded or loss, *unsplit, **over),
    mistake,
  ):
    difference = optax.tree.sub(way(params, batch), expected)
    off.append(float(optax.tree.norm(difference) / optax.tree.norm(expected)))
  print(
    f"off by {off[0]:.0e} on 1 device, {off[1]:.0e} on 8; the mistake by {off[2]:.1%}"
  )
  assert max(off[:2]) < 1e-12 < 1e-3 < off[2]


def compare_after(
  statistic, data, loss, compare=compare, split=split, **options
):
  """Compares a loss of a statistic that is computed before the step, on the whole batch.

  The mistake is that of a loss which computes it.
  """

  def own(params, batch):
    found = jax.lax.stop_gradient(statistic(params, batch))
    return loss(params, batch, found)

  found = jax.jit(statistic)(*data)
  options_of_mean = {k: x for k, x in options.items() if k != "reduction"}
  mistake = split(own, **options_of_mean)
  compare(data, loss, found, whole=own, mistake=mistake, **options)


def weights(**shapes):
  return {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}


# Text. The model sees a token and the one before.


def hidden(params, batch):
  now, then = jnp.asarray(params["now"]), jnp.asarray(params["then"])
  return jnp.tanh(now[batch["token"]] + then[batch["before"]])


def nats(params, batch):
  """The cross-entropy of each token: float64[rows, LENGTH]."""
  return cross_entropy(hidden(params, batch) @ params["out"], batch["next"])


def rows_of(documents):
  """A batch with one or more documents, of type bytes, in each row."""
  batch = {
    k: np.zeros((len(documents), LENGTH), int)
    for k in ("token", "before", "next")
  }
  batch |= {k: np.zeros((len(documents), LENGTH)) for k in ("mask", "share")}
  for row, of_row in enumerate(documents):
    start = 0
    for text in map(list, of_row):
      size = len(text) - 1
      at = row, slice(start, start + size)
      batch["token"][at], batch["next"][at] = text[:-1], text[1:]
      batch["before"][at] = [0, *text[:-2]]
      batch["mask"][at], batch["share"][at] = 1, 1 / size
      start += size
  return batch


source = topics.topics["assignment"].encode("ascii", "replace")
documents = []  # of each row one, and a second where it has space
for row in range(ROWS):
  size, start = rng.integers(3, LENGTH), 2 * LENGTH * row
  of_row = (
    source[start : start + size + 1],
    source[start + size : start + LENGTH],
  )
  documents.append([text for text in of_row if len(text) > 1])
shapes = {"now": (128, 8), "then": (128, 8), "out": (8, 128)}
text = weights(**shapes), rows_of([of_row[:1] for of_row in documents])
packed = text[0], rows_of(documents)
unpacked = rows_of([[text] for of_row in documents for text in of_row])
teacher = weights(**shapes)
pairs = {
  "chosen": text[1],
  "rejected": rows_of([[of_row[0][::-1]] for of_row in documents]),
}
# of each answer
reward = (np.isin(text[1]["next"], [*b"aeiou"]) * text[1]["mask"]).mean(axis=1)
routed = {**text[0], **weights(router=(8, 4))}, text[1]

# Images: handwritten digits of 8 by 8 pixels.


def model(params, x):
  return jnp.tanh(x @ params["up"]) @ params["out"]


def layers(features, outputs):
  return weights(up=(features, 16), out=(16, outputs))


digits = load_digits()
pixels, label = digits.data[:ROWS] / 16, digits.target[:ROWS]
images, of_pixels = (layers(64, 10), {"x": pixels, "y": label}), layers(64, 64)
# the black squares of a chessboard
odd = np.indices((8, 8)).sum(axis=0).ravel() % 2 == 1
views = {"odd": np.where(odd, pixels, 0), "even": np.where(odd, 0, pixels)}
towers = {"odd": layers(64, 8), "even": layers(64, 8), "scale": 1.0}, views
near = [rng.choice(np.flatnonzero(digits.target == y)) for y in label]
far = [rng.choice(np.flatnonzero(digits.target != y)) for y in label]
triplet = {
  "anchor": pixels,
  "near": digits.data[near] / 16,
  "far": digits.data[far] / 16,
}
triplets = layers(64, 8), triplet
noisy = {"x": pixels, "noise": rng.normal(size=(ROWS, 4))}
vaes = {"encoder": layers(64, 8), "decoder": layers(4, 64)}, noisy
generator, discriminator = layers(4, 64), layers(64, 1)
points = layers(1, 1), {"t": (t := np.linspace(0, 3, ROWS)), "known": t < 0.5}
