"""The page of losses is true: each equals the whole batch, and `step.check` tells the mistakes."""

import functools
import operator

import jax
import jax.numpy as jnp
import optax
import pytest
from support import trees
from support.pages import code_of, DOCS, Page

import optax_accum

PAGE = Page("losses.md")
LOSSES = [
  (title, block)
  for text in PAGE.sections.values()
  for title, _, body in (part.partition("\n") for part in text.split("### ")[1:])
  for block in code_of(body)
]
# Further ones, by the comment above each, in a file that the page links to.
MORE = (DOCS / "losses_more.py").read_text().split("\n\n# ")
FURTHER = [tuple(part.split("\n", 1)) for part in MORE[1:]]
# A packed row taken for a sequence is another loss, and is split as it should be. The other mistake
# is in the training loop.
UNSEEN = ["Packed sequences", "GAN: two optimizers"]

SGD = optax.sgd(1.0)

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def page():
  """The names of the page before its comparisons, in float64."""
  x64, names = jax.config.read("jax_enable_x64"), {}
  usual = (jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"))
  with pytest.MonkeyPatch.context() as patch, usual[0], usual[1]:
    patch.syspath_prepend(DOCS)
    for block in [*code_of(PAGE.opening), *(block for _, block in LOSSES)]:
      exec(compile(block.partition("\ncompare")[0], "page", "exec"), names)
    yield names
  jax.config.update("jax_enable_x64", x64)


class Watched:
  """`split` and `compare` of the page, which also ask `step.check`."""

  def __init__(self, page):
    self.page, self.losses, self.mistakes = page, [], []

  def split(self, loss, *unsplit, **options):
    step = optax_accum.make_train_step(loss, SGD, **{"num_microbatches": 4, **options})
    gradient = self.page["split"](loss, *unsplit, **options)

    def mistaken(params, batch):
      self.mistakes.append(step.check(params, SGD.init(params), batch, *unsplit).ok)
      return gradient(params, batch)

    return mistaken

  def compare(self, data, loss, *unsplit, mistake, whole=None, sharded=None, **options):
    step = optax_accum.make_train_step(loss, SGD, **{"num_microbatches": 4, **options})
    params, batch = data
    self.losses.append(step.check(params, SGD.init(params), batch, *unsplit).ok)
    self.page["compare"](
      data, loss, *unsplit, mistake=mistake, whole=whole, sharded=sharded, **options
    )


@pytest.mark.parametrize(
  ("title", "block"), LOSSES + FURTHER, ids=[title for title, _ in LOSSES + FURTHER]
)
def test_a_loss_is_exact_and_its_mistake_is_found(title, block, page):
  watched = Watched(page)
  own = {"split": watched.split, "compare": watched.compare}
  after = functools.partial(page["compare_after"], **own)
  exec(compile(block, title, "exec"), {**page, **own, "compare_after": after})
  compared = block.count("\ncompare")
  assert compared >= 1
  assert watched.losses == [True] * compared
  if title not in UNSEEN:
    assert watched.mistakes == [False] * compared


def test_a_comparison_can_fail(page):
  compare, loss, data = page["compare"], page["token_mean"], page["text"]
  with pytest.raises(AssertionError):  # the mistake, taken for the loss
    compare(data, loss, mistake=page["split"](loss))
  right = page["split"](loss, weight_fn=page["tokens"])
  with pytest.raises(AssertionError):  # a mistake that is none
    compare(data, loss, weight_fn=page["tokens"], mistake=right)


def test_a_gan_trains_as_on_whole_batches(page):
  g, d, batch = (page[name] for name in ("generator", "discriminator", "noisy"))
  batches = [jax.tree.map(operator.itemgetter(slice(rows)), batch) for rows in (24, 32)]
  g_tx, d_tx = optax.adam(1e-2), optax.rmsprop(1e-2)
  found = page["train"](*jax.tree.map(jnp.array, (g, d)), batches, g_tx, d_tx)
  g_state, d_state = g_tx.init(g), d_tx.init(d)
  for batch in batches:
    updates, d_state = d_tx.update(jax.grad(page["d_loss"])(d, batch, g), d_state, d)
    d = optax.apply_updates(d, updates)
    updates, g_state = g_tx.update(jax.grad(page["g_loss"])(g, batch, d), g_state, g)
    g = optax.apply_updates(g, updates)
  trees.assert_close(found, (g, d), 1e-10)
