"""`step.check`: `check_split` with the step's own loss and options, for the arguments of a call."""

import functools

from flax import nnx
import flax.linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import optax
import pytest
from support.devices import AUTO, EXPLICIT, make_mesh
from support.samples import alone_and_over_a_mesh, more

from optax_accum import _versions, make_train_step, microbatch
from optax_accum.flax import linen_train_step, nnx_train_step

TX = optax.sgd(0.1)
ROWS, WIDTH = 24, 3
rng = np.random.default_rng(0)
BATCH = {name: rng.normal(size=(ROWS, WIDTH)) for name in ("x", "z")}
BATCH |= {"y": rng.normal(size=ROWS), "mask": (np.arange(ROWS) % 4 > 0) * 1.0}
PARAMS = {name: rng.normal(size=(WIDTH, 4)) for name in ("a", "b")}
PARAMS["w"] = rng.normal(size=WIDTH)
WEIGHT = "weight_fn=lambda batch: jnp.sum(batch['mask']) Or: Let the loss return (total, weight)"


def check(loss, batch=BATCH, *further, params=PARAMS, **options):
  step = make_train_step(loss, TX, **{"num_microbatches": 3, **options})
  return step.check(params, TX.init(params), batch, *further)


def assert_says(report, verdict, fix=""):
  """The verdict, where it is not any but "ok", and a part of the fix."""
  assert report.ok == (verdict == "ok"), report
  assert verdict in ("", report.verdict), report
  assert fix in " ".join(report.fix.split()), report


def weigh(batch):
  return jnp.sum(batch["mask"])


def masked(each, batch):
  return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])


def each_of(params, batch):
  return (batch["x"] @ params["w"] - batch["y"]) ** 2


def mean(params, batch):
  return jnp.mean(each_of(params, batch))


def of_masked(params, batch):
  return masked(each_of(params, batch), batch)


def total_and_weight(params, batch):
  return jnp.sum(each_of(params, batch) * batch["mask"]), jnp.sum(batch["mask"])


def largest(params, batch):
  return jnp.max(each_of(params, batch))


def preferred(params, batch):
  """The first half is chosen, the second rejected."""
  chosen, rejected = jnp.split(batch["x"] @ params["w"], 2)
  return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


# Sequences: of 64 rows more than the 16 of a microbatch that are looked at.
TIMES = 5
LENGTHS = rng.integers(1, TIMES + 1, 64)
VALID = (np.arange(TIMES) < LENGTHS[:, None]) * 1.0
MANY = {"x": rng.normal(size=(64, TIMES, WIDTH)), "mask": VALID, "n": LENGTHS}
FULL = MANY | {"mask": np.ones((64, TIMES))}


def squares(params, batch):
  return (batch["x"] @ params["w"] - 1) ** 2


def of_tokens(params, batch, least=0):
  total = jnp.sum(squares(params, batch) * batch["mask"])
  return total, jnp.maximum(jnp.sum(batch["mask"]), least)


def of_sequences(params, batch):
  """The mean over sequences that are not empty of the mean over their tokens."""
  n = batch["mask"].sum(-1)
  each = jnp.sum(squares(params, batch) * batch["mask"], -1)
  return jnp.sum(each / jnp.maximum(n, 1)), jnp.sum(n > 0).astype(float)


def masked_inside(params, batch):
  valid = batch["x"][:, 0, 0] > 0
  total = jnp.sum(jnp.sum(squares(params, batch), 1), where=valid)
  return total / jnp.maximum(jnp.sum(valid), 1).astype(total.dtype)


IN_PLACE = {"in_place": _versions.ADDS_TO_REFERENCES}
ONE, TWO, FOUR = ({"num_microbatches": n} for n in (1, 2, 4))
HAS_WEIGHT = {"has_weight": True}
LATE = BATCH | {"mask": (np.arange(ROWS) > 16) * 1.0}  # none of the first rows
# Of which y < 0 says, by chance, where the largest error is.
draw = np.random.default_rng(31)
CHANCE = {"x": draw.normal(size=(16, WIDTH)) / PARAMS["w"]}
CHANCE["y"] = draw.normal(size=16)
TABLE = [
  (of_masked, BATCH, {}, "weighted", WEIGHT),
  (of_masked, BATCH, {"weight_fn": weigh, **IN_PLACE}, "ok", ""),
  (total_and_weight, BATCH, HAS_WEIGHT, "ok", ""),
  (of_masked, LATE, {}, "weighted", WEIGHT),
  (preferred, FULL | {"x": FULL["x"][:, 0]}, TWO, "coupled", "in halves of the batch"),
  # One microbatch is checked in parts of unequal rows.
  (mean, BATCH, ONE, "ok", ""),
  (of_masked, BATCH, ONE, "weighted", ""),
  (lambda p, b: mean(p, b) ** 2, BATCH, ONE, "coupled", ""),
  (lambda p, b: (mean(p, b), 1.0), BATCH, ONE | HAS_WEIGHT, "", "(total, weight)"),
  (lambda p, b: (jnp.sum(each_of(p, b)) / 8, 1.0), BATCH, ONE | HAS_WEIGHT, "sum", ""),
  (mean, BATCH, ONE | {"weight_fn": lambda b: 1.0}, "weighted", ""),
  # What only altered batches, or many rows, show.
  (of_tokens, MANY, FOUR | HAS_WEIGHT, "ok", ""),
  (of_sequences, MANY, FOUR | HAS_WEIGHT, "ok", ""),
  (lambda p, b: of_tokens(p, b, least=1), FULL, FOUR | HAS_WEIGHT, "weighted", "jnp.maximum(count, 1)"),
  (lambda p, b: jnp.mean(jnp.sort(squares(p, b)[:, 0])[-8:]), MANY, FOUR, "coupled", "totals of the whole batch"),
  (masked_inside, MANY, FOUR, "weighted", "has_weight=True"),
  (lambda p, batch: of_tokens(p, batch)[0] / jnp.sum(batch["n"]).astype(float), MANY, FOUR, "weighted", "jnp.sum(batch['n'])"),
  (lambda p, b: jnp.mean(squares(p, b)), MANY, FOUR, "ok", ""),
]  # fmt: skip


@pytest.mark.parametrize(
  ("loss", "batch", "options", "verdict", "fix", "over_mesh"),
  [*alone_and_over_a_mesh(TABLE, lambda case: case[3:])],
)
def test_a_step_gets_its_verdict(loss, batch, options, verdict, fix, over_mesh):
  mesh = make_mesh(8) if over_mesh else None
  assert_says(check(loss, batch, mesh=mesh, **options), verdict, fix)


def test_arguments_may_come_by_name():
  def loss(params, scale, *, batch, key):
    noise = jax.random.uniform(key, batch["y"].shape)
    return scale * of_masked(params, {**batch, "y": batch["y"] * noise})

  names = {"batch_argnums": "batch", "rng_argnums": "key"}
  for weight_fn in (None, weigh):
    step = make_train_step(loss, TX, num_microbatches=3, weight_fn=weight_fn, **names)  # fmt: skip
    report = step.check(PARAMS, (), 2.0, key=jax.random.key(0), batch=BATCH)
    assert_says(report, "ok" if weight_fn else "weighted")


BOTH = ("key", "other")
SPLIT = {"batch_argnums": (1, "y")}
BOTH_KEYS = 'rng_argnums=("key", "other")'


@pytest.mark.parametrize(
  ("options", "fix"),
  [
    ({"rng_argnums": BOTH}, 'batch_argnums=(1, "y")'),
    (SPLIT, BOTH_KEYS),
    (SPLIT | {"rng_argnums": "key"}, BOTH_KEYS),
  ],
)
def test_a_fix_names_by_keyword_what_came_by_keyword(options, fix):
  def loss(params, x, *, y, key, other):
    noise = sum(jax.random.normal(k, y.shape) for k in (key, other))
    return mean(params, {"x": x, "y": y + noise})

  step = make_train_step(loss, TX, num_microbatches=3, **options)
  keys = dict(zip(BOTH, jax.random.split(jax.random.key(0)), strict=True))
  report = step.check(PARAMS, (), BATCH["x"], y=BATCH["y"], **keys)
  assert report.fix.startswith(fix), report


@pytest.mark.parametrize("over_mesh", [False, True])
def test_a_key_that_is_not_named_gets_what_to_write(over_mesh):
  def drawn(params, batch, key):
    return of_masked(params, batch) * jax.random.uniform(key)

  def drawn_by_rate(params, batch, noise):
    return drawn(params, batch, noise["key"]) * noise["rate"]

  mesh = make_mesh(8) if over_mesh else None
  key = jax.random.key(0)
  assert check(drawn, BATCH, key, mesh=mesh).fix == "rng_argnums=2"
  report = check(drawn_by_rate, BATCH, {"key": key, "rate": 0.1}, mesh=mesh)
  assert_says(report, "random", "a key that is an argument of the loss")


@pytest.mark.parametrize("over_mesh", [False, True])
def test_a_key_that_is_shared_on_purpose_beside_a_carry_is_no_error(over_mesh):
  def loss(params, batch, count, key):
    del key
    return mean(params, batch), (count + 1.0, None)

  mesh = make_mesh(8) if over_mesh else None
  options = {"carry_argnum": 2, "rng_argnums": (), "mesh": mesh}
  assert check(loss, BATCH, jnp.zeros(()), jax.random.key(0), **options).ok


def test_what_fits_by_chance_is_not_taken_for_rows_or_a_weight():
  def largest_and(params, batch, scale):
    return largest(params, batch) + jnp.sum(scale)

  def with_aux(size):
    def loss(params, batch):
      return mean(params, batch), jnp.broadcast_to(mean(params, batch), size)

    return loss

  assert_says(check(largest, CHANCE, num_microbatches=2), "coupled")
  for size in (8, 16):  # not "unsplit"
    assert_says(check(largest_and, BATCH, np.ones(size), batch_argnums=1), "coupled")  # fmt: skip
  assert check(with_aux(2), has_aux=True).ok
  assert check(with_aux(1), has_aux=True, aux_reduction="stack").ok


def test_where_a_few_rows_tell_nothing_more_are_looked_at():
  def encoded(params, batch, number):  # which the loss splits by itself
    split = {"batch_argnums": 1, "num_microbatches": number}
    run = microbatch(lambda p, x: x @ p["w"], reduction="concat", **split)
    return run(params, batch["x"])

  def in_groups_of_six(params, batch):
    return jnp.mean(jnp.sum(each_of(params, batch).reshape(-1, 6), 1) ** 2)

  def for_all_rows(params, batch):
    return jnp.mean(each_of(params, batch) * np.arange(ROWS, dtype=float))

  def spread(params, batch):
    return jnp.std(encoded(params, batch, 2))

  assert_says(check(in_groups_of_six, num_microbatches=4), "coupled")
  assert check(lambda p, b: jnp.mean(encoded(p, b, 8) ** 2)).ok
  assert check(spread, num_microbatches=1).ok
  assert_says(check(spread, num_microbatches=2), "coupled")
  with pytest.raises(TypeError, match="incompatible shapes"):
    check(for_all_rows)


@pytest.mark.parametrize("kind", [AUTO, more(EXPLICIT)])
def test_over_a_mesh_a_weight_is_missed_and_nothing_is_donated(kind):
  mesh = make_mesh(4, 2, kind=kind)

  def loss(params, batch):  # a constraint may name the other axes
    hidden = batch["x"] @ params["a"]
    if kind is AxisType.Auto:
      spec = PartitionSpec(None, "model")
      hidden = jax.lax.with_sharding_constraint(hidden, spec)
    return masked((jnp.sum(jnp.tanh(hidden), 1) - batch["y"]) ** 2, batch)

  for weight_fn in (None, weigh):
    step = make_train_step(loss, TX, num_microbatches=1, mesh=mesh, weight_fn=weight_fn)  # fmt: skip
    placed, opt_state, _ = step(PARAMS, TX.init(PARAMS), BATCH)
    report = step.check(placed, opt_state, BATCH)
    assert_says(report, "ok" if weight_fn else "weighted")
    step(placed, opt_state, BATCH)  # nothing was donated


def test_arguments_that_cannot_be_checked_are_refused():
  step = make_train_step(of_masked, TX, num_microbatches=3)
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = TX.init(params)
  with pytest.raises(TypeError, match=r"[Tt]race"):
    jax.jit(lambda params: step.check(params, state, BATCH).ok)(params)
  with pytest.raises((TypeError, ValueError), match="jit"):
    jax.jit(lambda x: x * step.check(params, state, BATCH).ok)(1.0)
  shapes = jax.eval_shape(lambda x: x, BATCH)
  with pytest.raises(TypeError, match="ShapeDtypeStruct"):
    step.check(params, state, shapes)
  with pytest.raises(ValueError, match="num_microbatches=3 does not divide"):
    step.check(params, state, {k: x[:8] for k, x in BATCH.items()})
  assert not step.check(params, state, BATCH).ok
  step(params, state, BATCH)  # the check has no view of what is donated
  with pytest.raises(RuntimeError, match="has been deleted"):
    step.check(params, state, BATCH)


# Steps of Flax.


class Model(nn.Module):
  normalizes: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4)(x)
    if self.normalizes:
      x = nn.BatchNorm(use_running_average=False)(x)
    return nn.Dense(1)(nn.Dropout(0.5, deterministic=False)(x))[..., 0]


class State(TrainState):
  batch_stats: dict


def state_of(model, kind=TrainState):
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = jax.jit(model.init)(keys, BATCH["x"])
  return kind.create(apply_fn=model.apply, tx=TX, **variables)


@pytest.mark.more
def test_a_step_of_linen_is_checked_with_its_rngs():
  model = Model()

  def loss(variables, batch, rngs):
    out = model.apply(variables, batch["x"], rngs=rngs)
    return masked((out - batch["y"]) ** 2, batch)

  def without_rngs(variables, batch, rngs):
    return loss(variables, batch, {"dropout": jax.random.key(2)})

  rngs = {"dropout": jax.random.key(3)}
  state = state_of(model)
  make = functools.partial(linen_train_step, num_microbatches=3)
  assert_says(make(loss).check(state, BATCH, rngs), "weighted", WEIGHT)
  assert make(loss, weight_fn=weigh).check(state, BATCH, rngs=rngs).ok
  report = make(without_rngs, weight_fn=weigh).check(state, BATCH)
  assert_says(report, "random", "step(state, batch, rngs=")
  step = make(loss)
  step(state, BATCH, rngs)
  with pytest.raises(RuntimeError, match="has been deleted"):
    step.check(state, BATCH, rngs)


def test_a_step_of_linen_with_statistics_of_the_batch_is_coupled():
  model = Model(normalizes=True)

  def loss(variables, batch, rngs):
    out, updates = model.apply(variables, batch["x"], rngs=rngs, mutable=["batch_stats"])  # fmt: skip
    return jnp.mean((out - batch["y"]) ** 2), updates

  step = linen_train_step(loss, mutable=["batch_stats"], num_microbatches=3)
  rngs = {"dropout": jax.random.key(3)}
  report = step.check(state_of(model, State), BATCH, rngs)
  assert_says(report, "coupled", "Batch normalization")
  assert "argnum" not in report.fix


@pytest.mark.more
@pytest.mark.parametrize("axis", ["data", None])
def test_batch_normalization_over_devices_is_right_by_the_rows_of_all(axis):
  """Without `axis`, a device normalizes by its own rows."""
  over = {"num_microbatches": 1, "mesh": make_mesh(8)}
  norm = nn.BatchNorm(use_running_average=False, axis_name=axis)

  def of_variables(variables, batch, rngs):
    out, updates = norm.apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out[:, 0] - batch["y"]) ** 2), updates

  def of_model(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

  model = nnx.BatchNorm(WIDTH, axis_name=axis, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  reports = [nnx_train_step(of_model, **over).check(model, optimizer, BATCH)]
  if axis:
    step = linen_train_step(of_variables, mutable=["batch_stats"], **over)
    reports.append(step.check(state_of(norm, State), BATCH))
  for report in reports:
    assert_says(report, "ok" if axis else "coupled")
  assert not np.any(model.mean[...])


class Net(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(WIDTH, 4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.out = nnx.Linear(4, 1, rngs=rngs)
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    self.calls[...] = self.calls[...] + 1
    return self.out(self.dropout(self.linear(x)))[..., 0]


@pytest.mark.parametrize("over_mesh", [False, more(True)])
def test_a_step_of_nnx_is_checked_and_the_model_stays_as_it_was(over_mesh):
  def loss(model, batch):
    return masked((model(batch["x"]) - batch["y"]) ** 2, batch)

  mesh = make_mesh(8) if over_mesh else None
  options = {"num_microbatches": 3, "carry_reduction": "max", "mesh": mesh}
  model = Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  before = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
  report = nnx_train_step(loss, **options).check(model, optimizer, BATCH)
  assert_says(report, "weighted", WEIGHT)
  step = nnx_train_step(loss, weight_fn=weigh, **options)
  report = step.check(model, optimizer, BATCH)
  assert report.ok, report
  after = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
  assert all(x is y for x, y in zip(before, after, strict=True))
  assert model.calls[...] == 0
  step(model, optimizer, BATCH)
  if over_mesh:  # a step does move all to the mesh
    assert {len(x.devices()) for x in jax.tree.leaves(nnx.state(model))} == {8}


# Losses that exchange something: the rows of all devices are right in one microbatch.


def contrastive(axes):
  """Among the rows of all devices; without `axes`, of this one."""

  def loss(params, batch):
    query, keys = batch["x"] @ params["a"], batch["z"] @ params["b"]
    own = jnp.arange(len(query))
    if axes:
      keys = jax.lax.all_gather(keys, axes, tiled=True)
      own += jax.lax.axis_index(axes) * len(query)
    each = optax.softmax_cross_entropy_with_integer_labels(query @ keys.T, own)
    return jnp.mean(each)

  return loss


def normalized(params, batch, axes="data"):
  """By the statistics of all devices."""
  hidden = batch["x"] @ params["a"]
  mean = jax.lax.pmean(jnp.mean(hidden, 0, keepdims=True), axes)
  var = jax.lax.pmean(jnp.mean((hidden - mean) ** 2, 0, keepdims=True), axes)
  return jnp.sum((hidden - mean) / jnp.sqrt(var + 0.1) @ params["b"].T, -1) ** 2


def own_mean(params, batch):
  """Of the rows that count on a device, which may be none."""
  total = jnp.sum(normalized(params, batch) * batch["mask"])
  return total / jnp.maximum(jnp.sum(batch["mask"]), 1)


def reduced_ratio(params, batch):
  total, count = jax.lax.psum(total_and_weight(params, batch), "data")
  return total / count


def divided_by_all(params, batch):
  """The mistake: a device's sum by the count of all."""
  total, count = total_and_weight(params, batch)
  return total / jax.lax.psum(count, "data")


def number_of_rows(batch):
  """On all devices: a Python number, of which no traced equation tells."""
  return jax.lax.psum(len(batch["y"]), "data")


BY_MASK = {"weight_fn": weigh}


@pytest.mark.parametrize("kind", [AUTO, more(EXPLICIT)])
@pytest.mark.parametrize(
  ("loss", "number", "options", "verdict"),
  [
    more(contrastive("data"), 1, {}, "ok"),
    (contrastive("data"), 3, {}, "coupled"),  # the negatives of a microbatch
    more(contrastive(None), 1, {}, "coupled"),
    (own_mean, 1, BY_MASK, "ok"),
    (own_mean, 1, {}, "coupled"),  # what devices exchange hides that it is a weight
    more(own_mean, 3, BY_MASK, "coupled"),
    more(lambda p, b: jnp.sum(normalized(p, b)), 1, {}, "coupled"),
    more(lambda p, b: masked(normalized(p, b), b), 1, BY_MASK, "ok"),
    more(lambda p, b: own_mean(p, b) + 0.1 * jnp.sum(p["a"] ** 2), 1, BY_MASK, "ok"),
    (lambda p, b: jax.lax.pmean(mean(p, b), "data"), 3, {}, "ok"),
    (reduced_ratio, 3, BY_MASK, "ok"),
    (divided_by_all, 3, BY_MASK, ""),
    more(lambda p, b: jnp.sum(each_of(p, b)) / number_of_rows(b), 3, {}, ""),
    more(lambda p, b: jnp.sum(normalized(p, b)) / number_of_rows(b), 1, {}, ""),
    more(lambda p, b: mean(p, b) * (1 + jax.lax.axis_index("data")).astype(float), 1, {}, ""),
  ],
)  # fmt: skip
def test_what_devices_exchange_is_compared_with_one_device(loss, number, options, verdict, kind):  # fmt: skip
  mesh = make_mesh(8, kind=kind)
  report = check(loss, num_microbatches=number, mesh=mesh, **options)
  assert_says(report, verdict)


@pytest.mark.more
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_statistics_are_right_over_all_axes_of_the_rows(kind):
  mesh = make_mesh(4, 2, axes=("data", "fsdp"), kind=kind)
  wide = {name: rng.normal(size=(4, 4)) for name in ("a", "b")}
  sharding = jax.NamedSharding(mesh, PartitionSpec("fsdp"))
  wide = jax.device_put(wide, sharding)
  both = ("data", "fsdp")

  def over(axes):
    def loss(params, batch):
      params = jax.tree.map(lambda w: w[:WIDTH], params)
      return jnp.mean(normalized(params, batch, axes))

    return loss

  ask = functools.partial(check, params=wide, num_microbatches=1, mesh=mesh)
  if kind is EXPLICIT:
    assert ask(over(both), data_axis=both).ok
  else:  # explicitly sharded parameters would be for the loss to gather
    assert_says(ask(over("data"), data_axis=both), "coupled")
    assert ask(over("data")).ok


@pytest.mark.more
def test_noise_and_a_carry_of_several_devices_are_compared():
  def loss(params, batch, key, carry):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape).astype(float)
    hidden = (batch["x"] * keep) @ params["a"]
    mean = jax.lax.pmean(jnp.mean(hidden, 0, keepdims=True), "data")
    noise = jax.random.uniform(carry["key"])
    new = {"key": jax.random.split(carry["key"])[0]}
    new["mean"] = 0.9 * carry["mean"] + 0.1 * mean
    each = jnp.sum((hidden - mean) @ params["b"].T, -1) ** 2 * noise
    return jnp.mean(each), (new, {"each": each, "largest": jnp.max(each)})

  carry = {"key": jax.random.key(1), "mean": jnp.zeros((1, 4))}
  words = {"each": "concat", "largest": "max"}
  for keys, aux, verdict in [
    (2, words, "ok"),
    (2, {**words, "largest": "min"}, "unknown"),
    ((), words, "random"),
  ]:
    options = {"has_aux": True, "carry_argnum": 3, "rng_argnums": keys, "aux_reduction": aux}  # fmt: skip
    options |= {"num_microbatches": 1, "mesh": make_mesh(8)}
    report = check(loss, BATCH, jax.random.key(0), carry, **options)
    assert_says(report, verdict)
