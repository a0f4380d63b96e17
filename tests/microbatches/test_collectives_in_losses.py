"""Collectives in a loss: the gradient of the weighted mean over devices, or an error."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import mesh_draws
import numpy as np
import pytest
from support import collective_losses as losses
from support.collective_losses import (
  DIVIDED,
  EITHER,
  REDUCED,
  RIGHT,
  TABLE,
  WITHIN,
)
from support.samples import first_of_each, more

from optax_accum import _versions

DEVICES, TOLERANCE = 4, 1e-11
# Parts of the messages of losses that are refused.
MESSAGES = {
  REDUCED: "The loss is the same on all devices",
  DIVIDED: "The loss depends on the number of devices",
  WITHIN: "The loss takes a gradient of what was reduced",
}
# Valid rows on each device.
EQUAL, UNEVEN, EMPTY = (8, 8, 8, 8), (8, 3, 5, 1), (8, 0, 5, 0)
FOUR, WHOLE, RAGGED = (
  {"num_microbatches": 4},
  {"num_microbatches": 1},
  {"microbatch_size": 5},
)
WHOLE_UNWEIGHED = {**WHOLE, "weighs": False}


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def named(verdict):
  return [name for name, row in TABLE.items() if row.verdict == verdict]


@functools.cache
def expected(name, valid, **options):
  row, batch = TABLE[name], losses.make_batch(valid)
  return losses.expected(
    row.fun, losses.make_params(), batch, DEVICES, alone=row.alone, **options
  )


def assert_right(name, entry, valids, **options):
  split = {
    k: v
    for k, v in options.items()
    if k in ("num_microbatches", "microbatch_size", "weighs")
  }
  run = losses.gradient_function(TABLE[name].fun, entry, DEVICES, **options)
  for valid in valids:
    actual = run(losses.make_params(), losses.make_batch(valid))
    assert (
      losses.error_of(actual, expected(name, valid, **split)) < TOLERANCE
    ), valid


# By its first word, which is most often the collective.
@pytest.mark.parametrize(
  "name", list(first_of_each(named(RIGHT), lambda name: name.split()[0]))
)
def test_the_gradient_is_that_of_the_weighted_mean_over_devices(name):
  """On one device, by `jax.vmap`. Weights differ between devices and between microbatches."""
  assert_right(name, "mesh", (EQUAL, UNEVEN, EMPTY), **FOUR)


@pytest.mark.parametrize("name", named(EITHER))
def test_what_may_be_refused_is_right_where_it_is_not(name):
  try:
    assert_right(name, "mesh", (EQUAL, UNEVEN, EMPTY), **FOUR)
  except ValueError as error:
    pattern = "|".join(MESSAGES.values())
    with pytest.raises(ValueError, match=pattern):
      raise error


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


def test_weights_that_are_ignored_show():
  for valid in (UNEVEN, EMPTY):
    for name in (
      "psum: batch norm",
      "own + pmean(aux)",
      "ppermute: features of the neighbour",
    ):
      wrong = expected(name, valid, weighs=False, **FOUR)
      assert losses.error_of(wrong, expected(name, valid, **FOUR)) > 1e-2


@pytest.mark.parametrize(
  ("name", "entry", "options"),
  [
    more("psum: batch norm", "mesh", RAGGED),
    more("own + pmean(aux)", "mesh", RAGGED),
    ("all_gather: contrastive", "shard_map, untyped", RAGGED),
    more("sum / pmean(count)", "shard_map, untyped", RAGGED),
    ("psum: batch norm", "mesh", WHOLE),
    more("sum / pmean(count)", "mesh", WHOLE),
    ("all_gather: contrastive", "shard_map, typed", WHOLE_UNWEIGHED),
    more("own + pmean(aux)", "shard_map, typed", WHOLE_UNWEIGHED),
    ("psum: batch norm", "mesh", {**RAGGED, "has_weight": True}),
    more(
      "all_gather: contrastive",
      "shard_map, typed",
      {**FOUR, "has_weight": True},
    ),
  ],
)
def test_one_microbatch_and_a_smaller_last_one_count_as_they_should(
  name, entry, options
):
  valids = (UNEVEN, EMPTY) if options.get("weighs", True) else (UNEVEN,)
  assert_right(name, entry, valids, **options)


@pytest.mark.parametrize(
  ("name", "entry"),
  [
    ("no collective", "mesh"),
    ("no collective", "shard_map, typed"),
    ("psum: batch norm", "mesh"),
    ("psum: batch norm", "shard_map, untyped"),
    ("ppermute: features of the neighbour", "shard_map, typed"),
  ],
)
def test_a_nan_leaves_out_the_microbatch_on_all_devices(name, entry):
  """Unless the loss sends nothing: then on its device alone."""
  # All devices count in the second microbatch, and that of the second device has the NaN, which
  # reaches the gradients of all but the last.
  row, batch = TABLE[name], losses.make_batch((8, 3, 5, 6))
  batch["x"][losses.ROWS + 1] = np.nan
  params = losses.make_params()
  run = losses.gradient_function(
    row.fun, entry, DEVICES, skip_nonfinite=True, **FOUR
  )
  wanted = losses.expected(
    row.fun, params, batch, DEVICES, alone=row.alone, **FOUR
  )
  assert losses.error_of(run(params, batch), wanted) < TOLERANCE
  other = losses.expected(
    row.fun, params, batch, DEVICES, alone=not row.alone, **FOUR
  )
  assert losses.error_of(other, wanted) > 1e-3


if _versions.ADDS_TO_REFERENCES:

  @pytest.mark.parametrize("name", ["psum: batch norm", "own + pmean(aux)"])
  def test_in_place_the_gradient_is_the_same(name):
    assert_right(name, "mesh", (UNEVEN, EMPTY), in_place=True, **FOUR)


REFUSED = [(name, word) for word in MESSAGES for name in named(word)]


@pytest.mark.parametrize(("name", "word"), REFUSED)
def test_a_loss_of_all_devices_is_refused(name, word):
  params, batch = losses.make_params(), losses.make_batch(UNEVEN)
  for entry in [
    entry
    for entry in losses.ENTRIES
    if TABLE[name].typed or entry != "shard_map, typed"
  ]:
    run = losses.gradient_function(TABLE[name].fun, entry, DEVICES, **FOUR)
    with pytest.raises(ValueError, match=MESSAGES[word]):
      run(params, batch)


def by_branch(fun, params, batch):
  """Sends on devices whose first row is positive, and nothing on others."""
  flag = batch["x"][0, 0] > 0
  return lax.cond(flag, fun, losses.plain, params, batch)


def by_count(fun, params, batch):
  """Sends as often as the device has valid rows."""
  steps = jnp.sum(batch["mask"]).astype(jnp.int32)
  add = lambda _, total: total + fun(lax.stop_gradient(params), batch)  # noqa: E731
  return losses.plain(params, batch) + lax.fori_loop(
    0, steps, add, jnp.zeros(())
  )


def until_large(fun, params, batch):
  """Sends until its own sum is large, which begins with a constant."""
  own = jnp.mean(jnp.abs(lax.stop_gradient(batch["x"])))

  def add(held):
    return (
      held[0] + own,
      held[1] + fun(lax.stop_gradient(params), batch),
    )

  held = lax.while_loop(
    lambda held: held[0] < 3, add, (jnp.zeros(()), jnp.zeros(()))
  )
  return losses.plain(params, batch) + held[1]


def until_above_all(fun, params, batch):
  """Sends in the condition, which compares what is sent with what the device has."""
  own = jnp.mean(jnp.abs(lax.stop_gradient(batch["x"])))
  total = lax.while_loop(
    lambda total: total < fun(lax.stop_gradient(params), batch),
    lambda total: total + own,
    jnp.zeros(()),
  )
  return losses.plain(params, batch) + total


WAITS = (by_branch, by_count, until_large, until_above_all)


@pytest.mark.parametrize("sends", WAITS)
def test_what_devices_would_wait_for_is_refused(sends):
  loss = functools.partial(sends, TABLE["psum: batch norm"].fun)
  run = losses.gradient_function(loss, "mesh", DEVICES, **FOUR)
  with pytest.raises(
    ValueError, match="whose condition differs between the devices"
  ):
    run(losses.make_params(), losses.make_batch(UNEVEN))


def test_a_condition_may_differ_where_nothing_is_sent():
  def loss(params, batch):
    return sum(sends(losses.plain, params, batch) for sends in WAITS)

  run = losses.gradient_function(loss, "mesh", DEVICES, **FOUR)
  run(losses.make_params(), losses.make_batch(UNEVEN))


def test_a_weight_would_be_rounded_to_a_narrow_loss():
  def half(params, batch):
    return TABLE["psum: batch norm"].fun(params, batch).astype(jnp.bfloat16)

  run = losses.gradient_function(half, "mesh", DEVICES, **FOUR)
  with pytest.raises(
    TypeError, match="bfloat16, to which its weight would be rounded"
  ):
    run(losses.make_params(), losses.make_batch(UNEVEN))


@pytest.mark.parametrize("seed", [0, 1, *map(more, range(2, 6))])
def test_draws_of_losses_and_loops_are_the_weighted_mean(seed):
  """`python tests/mesh_draws.py 500` has more."""
  draw = mesh_draws.drawn(seed)
  assert mesh_draws.error_of(draw) < mesh_draws.TOLERANCE, draw
