"""Collectives in a loss: the gradient is that of the weighted mean over devices."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import mesh_draws
import numpy as np
import pytest
from support import collective_losses as losses
from support.collective_losses import TABLE
from support.samples import more

from optax_accum import _versions

DEVICES, TOLERANCE = 4, 1e-11
# Valid rows on each device.
EQUAL, UNEVEN, EMPTY = (8, 8, 8, 8), (8, 3, 5, 1), (8, 0, 5, 0)
FOUR, WHOLE, RAGGED = ({"num_microbatches": 4}, {"num_microbatches": 1}, {"microbatch_size": 5})
WHOLE_UNWEIGHED = {**WHOLE, "weighs": False}


pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def expected(name, valid, **options):
  row, batch = TABLE[name], losses.make_batch(valid)
  return losses.expected(row.fun, losses.make_params(), batch, DEVICES, alone=row.alone, **options)


def assert_right(name, entry, valids, **options):
  split = {
    k: v for k, v in options.items() if k in ("num_microbatches", "microbatch_size", "weighs")
  }
  run = losses.gradient_function(TABLE[name].fun, entry, DEVICES, **options)
  for valid in valids:
    actual = run(losses.make_params(), losses.make_batch(valid))
    assert losses.error_of(actual, expected(name, valid, **split)) < TOLERANCE, valid


SAMPLE = (
  *(
    "no collective",
    "psum: batch norm",
    "all_gather: contrastive",
    "psum_scatter: sums of features",
  ),
  *("ppermute: features of the neighbour", "psum(sum) / psum(count)", "own + pmean(aux)"),
  *("sum / psum(count)", "an inner step by mean gradients"),
)


@pytest.mark.parametrize("name", [name if name in SAMPLE else more(name) for name in TABLE])
def test_the_gradient_is_that_of_the_weighted_mean_over_devices(name):
  """On one device, by `jax.vmap`. Weights differ between devices and between microbatches."""
  assert_right(name, "mesh", (EQUAL, UNEVEN, EMPTY), **FOUR)


def test_what_groups_of_devices_reduce_differs_between_groups():
  def of_pair(params, batch):
    own = losses.plain(params, batch)
    return lax.pmean(own, losses.AXIS, axis_index_groups=[[0, 1], [2, 3]])

  def gathered(params, batch):  # `jax.vmap` has no groups
    own = losses.plain(params, batch)
    pairs = lax.all_gather(own, losses.AXIS).reshape(2, 2)
    return jnp.mean(pairs[lax.axis_index(losses.AXIS) // 2])

  params, batch = losses.make_params(), losses.make_batch(UNEVEN)
  wanted = losses.expected(gathered, params, batch, DEVICES, **FOUR)
  run = losses.gradient_function(of_pair, "mesh", DEVICES, **FOUR)
  assert losses.error_of(run(params, batch), wanted) < TOLERANCE


MEAN, RATIO = "pmean, last", "psum(sum) / psum(count)"


@pytest.mark.parametrize("entry", losses.ENTRIES)
@pytest.mark.parametrize(("name", "valid", "options"), [
  more(MEAN, EQUAL, {**FOUR, "weighs": False}),
  (RATIO, UNEVEN, FOUR),
  more(RATIO, EMPTY, {**FOUR, "has_weight": True}),
  more(RATIO, UNEVEN, RAGGED),
])  # fmt: skip
def test_a_loss_that_devices_reduced_is_that_of_the_whole_batch(name, entry, valid, options):
  params, batch = losses.make_params(), losses.make_batch(valid)
  run = losses.gradient_function(TABLE[name].fun, entry, DEVICES, **options)
  loss, grads = jax.value_and_grad(losses.plain)(params, batch)
  assert losses.error_of(run(params, batch), (grads, loss)) < TOLERANCE


@pytest.mark.parametrize("entry", losses.ENTRIES)
def test_a_sum_that_is_divided_by_the_count_of_all_trains_with_a_part(entry):
  """The mistake that `step.check` finds: a gradient of 1/n, for n devices."""
  params, batch = losses.make_params(), losses.make_batch(UNEVEN)
  fun = TABLE["sum / psum(count)"].fun
  run = losses.gradient_function(fun, entry, DEVICES, weighs=False, **WHOLE)
  part = jax.tree.map(lambda x: x / DEVICES, jax.value_and_grad(losses.plain)(params, batch)[::-1])
  assert losses.error_of(run(params, batch), part) < TOLERANCE


def test_weights_that_are_ignored_show():
  for valid in (UNEVEN, EMPTY):
    for name in ("psum: batch norm", "own + pmean(aux)", "ppermute: features of the neighbour"):
      wrong = expected(name, valid, weighs=False, **FOUR)
      assert losses.error_of(wrong, expected(name, valid, **FOUR)) > 1e-2


@pytest.mark.parametrize(("name", "entry", "options"), [
  more("all_gather: contrastive", "shard_map, untyped", RAGGED),
  more("psum: batch norm", "mesh", WHOLE),
  ("all_gather: contrastive", "shard_map, typed", WHOLE_UNWEIGHED),
  ("psum: batch norm", "mesh", {**RAGGED, "has_weight": True}),
  ("own + pmean(aux)", "mesh", {**FOUR, "skip_nonfinite": True}),
])  # fmt: skip
def test_one_microbatch_and_a_smaller_last_one_count_as_they_should(name, entry, options):
  valids = (UNEVEN, EMPTY) if options.get("weighs", True) else (UNEVEN,)
  assert_right(name, entry, valids, **options)


@pytest.mark.parametrize(("name", "entry"), [
  more("no collective", "mesh"),
  ("no collective", "shard_map, typed"),
  ("psum: batch norm", "mesh"),
  more("psum: batch norm", "shard_map, untyped"),
])  # fmt: skip
def test_a_nan_leaves_out_the_microbatch_on_all_devices(name, entry):
  """Where the loss sends it to all of them. If it sends nothing, on its device alone."""
  # All devices count in the second microbatch, and that of the second device has the NaN.
  row, batch = TABLE[name], losses.make_batch((8, 3, 5, 6))
  batch["x"][losses.ROWS + 1] = np.nan
  params = losses.make_params()
  run = losses.gradient_function(row.fun, entry, DEVICES, skip_nonfinite=True, **FOUR)
  wanted = losses.expected(row.fun, params, batch, DEVICES, alone=row.alone, **FOUR)
  assert losses.error_of(run(params, batch), wanted) < TOLERANCE
  other = losses.expected(row.fun, params, batch, DEVICES, alone=not row.alone, **FOUR)
  assert losses.error_of(other, wanted) > 1e-3


if _versions.ADDS_TO_REFERENCES:

  @pytest.mark.parametrize("name", [more("psum: batch norm"), "own + pmean(aux)"])
  def test_in_place_the_gradient_is_the_same(name):
    assert_right(name, "mesh", (UNEVEN, EMPTY), in_place=True, **FOUR)


@pytest.mark.parametrize("seed", [0, 1, *map(more, range(2, 6))])
def test_draws_of_losses_and_loops_are_the_weighted_mean(seed):
  """`python tests/mesh_draws.py 500` has more."""
  draw = mesh_draws.drawn(seed)
  assert mesh_draws.error_of(draw) < mesh_draws.TOLERANCE, draw
