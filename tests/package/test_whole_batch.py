"""Runs that are drawn at random are the whole batch's steps; and the net that says so holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cycles, draws, plain
from support.draws import CHOICES, Draw, drawn, parsed, shrunk
from support.samples import more
import whole_batch

# Of 150 seeds, the one whose first draws have the most pairs of choices.
SEED, SAMPLE, DRAWS = 60, 14, 60


# CI runs on several versions of JAX: half of the draws on one, half on another.
@pytest.mark.parametrize(
  "index",
  [
    index if index < SAMPLE else more(index)
    for index in range(jax.__version_info__[1] // 2 % 2, DRAWS, 2)
  ],
)
def test_three_cycles_are_the_steps_of_the_whole_batch(index):
  draw = drawn(SEED, index)
  found = whole_batch.problems(draw)
  assert not found, f'python tests/whole_batch.py --draw "{draw}"\n' + "\n".join(found)


# What is planted in the whole batch's gradient must be told from it.


def mean_over(*columns):
  """A wrong gradient: the mean of the gradients of parts, each as much as any other."""

  def gradient(draw, params, batch):
    where = batch["where"][:, list(columns)]
    parts = [np.all(where == part, axis=1) for part in np.unique(where, axis=0)]
    each = [plain.gradient(draw, params, {k: x[p] for k, x in batch.items()}) for p in parts]
    return jax.tree.map(lambda *g: sum(g) / len(g), *each)

  return gradient


def padding_counted(draw, params, batch):
  """A wrong gradient: padding is in the number that the mean is divided by."""
  right = plain.gradient(draw, params, batch)
  return jax.tree.map(lambda g: g * np.mean(batch["mask"] != 0), right)


WRONG = {
  "microbatches": mean_over(0, 1, 2),
  "devices": mean_over(1),
  "calls": mean_over(0),
  "padding": padding_counted,
}


# Where a line says bfloat16: what its tolerance tells, a thousand times that of float32, tells too.
@pytest.mark.parametrize(("wrong", "line"), [
  ("microbatches", "weights=counts size=3"),
  more("microbatches", "place=pmap devices=4 entry=gradient weights=counts dtype=bfloat16"),
  more("devices", "place=mesh devices=4 weights=counts dtype=bfloat16"),
  ("microbatches", "weights=counts size=3 arrives=merged"),
  ("devices", "place=mesh devices=4 weights=floats arrives=merged"),
  ("microbatches",
    "place=mesh devices=2 mesh=auto+model params=data+model placed=True weights=counts tail=True size=2 spread=True"),
  more("devices",
    "entry=linen place=mesh devices=4 mesh=explicit+auto_model params=model placed=True weights=counts spread=True"),
  more("devices", "entry=apply place=shard_map devices=4 weights=counts"),
  ("calls", "entry=update weights=floats size=3 dtype=bfloat16"),
  ("calls", "entry=step+accumulate weights=floats microbatches=1 seed=1"),
  ("padding", "entry=gradient weights=counts dtype=bfloat16"),
])  # fmt: skip
def test_a_wrong_mean_is_told_from_the_right_one(wrong, line):
  draw = parsed(line)
  assert not whole_batch.problems(draw)
  assert any("params" in problem for problem in whole_batch.problems(draw, WRONG[wrong]))


@pytest.mark.parametrize("line", ["", "weights=fractions reduction=sum", "dtype=complex64 key=raw"])
def test_the_gradient_that_is_written_out_is_that_of_the_loss(line):
  draw = parsed(line)
  (call,), *_ = cycles.cycles_of(draw)
  batch = plain.rows_of(draw, call, cycles.initial_carry(draw), lambda m: True)
  with jax.enable_x64(True):
    params, batch = plain.wide((cycles.initial_params(draw), batch))
    actual = plain.gradient(draw, params, batch)
    of_loss = jax.jit(jax.grad(lambda params: plain.loss_of(draw, params, batch, jnp)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      expected = of_loss(jax.tree.map(jnp.asarray, params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), actual, expected)


# What draws are made of.


def test_draws_have_every_choice(monkeypatch):
  monkeypatch.setattr(draws, "KNOWN", {})
  many = [drawn(1, index) for index in range(1000)]
  for name, of in CHOICES.items():
    assert {getattr(draw, name) for draw in many} == set(of), name
  assert drawn(1, 7) == many[7] != drawn(2, 7)


def test_a_draw_is_a_line_that_can_be_read_back():
  assert str(Draw()) == ""
  for index in range(200):
    assert parsed(str(drawn(3, index))) == drawn(3, index)


def test_a_failing_draw_is_shrunk_to_what_makes_it_fail():
  def fails(draw):
    return draw.place == "mesh" and draw.weights == "floats"

  draw = next(draw for draw in (drawn(4, i) for i in range(200)) if fails(draw))
  assert len(str(draw).split()) > 5
  assert str(shrunk(draw, fails)) == "place=mesh weights=floats"
