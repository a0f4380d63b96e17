"""The pairs of docs/migrating.md: a loop, and the same loop here, on three sorts of batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from support import trees
from support.pages import Page

PAGE = Page("migrating.md")
K = 4


def batches(rows, count=12):
  """Microbatches of the page's data, of which each counts as many rows as `rows` says, in turn."""
  made = PAGE.run()
  x, y = made["x"], made["y"]
  masks = [(np.arange(16) < rows[i % len(rows)]).astype(np.float32) for i in range(count)]
  cuts = [slice(16 * i, 16 * i + 16) for i in range(count)]
  return [{"x": x[c], "y": y[c], "mask": m} for c, m in zip(cuts, masks, strict=True)]


EVEN = batches([16])
UNEVEN = batches([16, 1, 7, 2, 5])
CUT_SHORT = batches([16], count=14)


class Pair:
  """A section: code that both loops need, the loop before, and the loop after.

  `trained` takes what a loop defined to its parameters, a list of arrays. The model as the whole
  batch's training has it: `logits_fn` of such a list, and the optimizer `tx`. `after` is the second
  loop, where the section has none of its own.
  """

  def __init__(self, section, trained, logits_fn, tx, shared=(), after=None):
    blocks = PAGE.blocks(section)
    if after is not None:
      blocks.append(after)
    *own, self._before, self._after = blocks
    self._shared = [*shared, *own]
    self.section, self.trained, self.logits_fn, self.tx = section, trained, logits_fn, tx

  def before(self, batches):
    return self._run(batches, self._before)

  def after(self, batches):
    return self._run(batches, self._after)

  def _run(self, batches, loop):
    return self.trained(PAGE.run(*self._shared, loop, batches=batches))

  def whole_batch(self, batches):
    """Where the parameters start, and where training by whole batches ends, in float64."""
    start = self._run([], "")
    with jax.enable_x64(True):
      params = [jnp.asarray(p, np.float64) for p in start]
      state = self.tx.init(params)
      for i in range(0, len(batches), K):
        cycle = jax.tree.map(lambda *parts: np.concatenate(parts), *batches[i : i + K])
        grads = jax.grad(self._loss)(params, cycle)
        updates, state = self.tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
      return start, jax.device_get(params)

  def _loss(self, params, batch):
    chances = jax.nn.log_softmax(self.logits_fn(params, batch["x"].astype(np.float64)))
    losses = -chances[np.arange(len(batch["y"])), batch["y"]]
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def assert_a_pair(pair, *columns):
  """The loops agree; and where the first is wrong, the page says by how much."""
  trees.assert_close(pair.after(EVEN), pair.before(EVEN), 1e-5)
  measured = {"uneven": "", "cut short": ""}
  for column in columns:
    batches = {"uneven": UNEVEN, "cut short": CUT_SHORT}[column]
    start, expected = pair.whole_batch(batches)
    assert away(pair.after(batches), expected, start) < 1e-4
    measured[column] = f"{away(pair.before(batches), expected, start):.2f}"
  assert told_errors(pair.section) == measured


def told_errors(section):
  """What the page's table says of a section, by column."""
  row = re.search(rf"^\| {re.escape(section)} \|(.*)\|(.*)\|$", PAGE.opening, re.MULTILINE)
  return {"uneven": row[1].strip(), "cut short": row[2].strip()}


def away(params, expected, start):
  """A distance from where training ends, in parts of the way there."""
  wide = lambda tree: [np.asarray(x, np.float64) for x in tree]  # noqa: E731
  params, expected, start = map(wide, (params, expected, start))

  def norm(a, b):
    return np.sqrt(sum(np.sum((x - y) ** 2) for x, y in zip(a, b, strict=True)))

  return norm(params, expected) / norm(expected, start)
