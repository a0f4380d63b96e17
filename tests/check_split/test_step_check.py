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
from support.devices import make_mesh
from support.samples import more
from support.zoo import ZOO

from optax_accum import _versions, check_split, make_train_step, microbatch
from optax_accum.flax import linen_train_step, nnx_train_step

TX = optax.sgd(0.1)
ROWS, WIDTH = 12, 3
rng = np.random.default_rng(0)
BATCH = {"x": rng.normal(size=(ROWS, WIDTH)), "y": rng.normal(size=ROWS)}
BATCH |= {"mask": (np.arange(ROWS) % 4 > 0).astype(float)}
W = rng.normal(size=WIDTH)
WEIGHT = (
  "weight_fn=lambda batch: jnp.sum(batch['mask'])\nOr let the loss return (total, weight), the sum of"
  " its losses and what it divides that by, with has_weight=True."
)


def masked(errors, batch):
  return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


def loss_fn(params, batch):
  return masked((batch["x"] @ params - batch["y"]) ** 2, batch)


def with_weight(params, batch):
  weight = jnp.sum(batch["mask"])
  return loss_fn(params, batch) * weight, weight


def check(
  loss=loss_fn, params=W, batch=BATCH, *further, num_microbatches=3, **options
):
  step = make_train_step(loss, TX, num_microbatches=num_microbatches, **options)
  return step.check(params, TX.init(params), batch, *further)


def mesh_of(count=4, axes=("data",), kind=AxisType.Auto):
  shape = (count,) if len(axes) == 1 else (count // 2, 2)
  return jax.make_mesh(
    shape, axes, (kind,) * len(axes), devices=jax.devices()[:count]
  )


# All others of the zoo have the same report too, but asking twice for each takes a minute.
@pytest.mark.parametrize(
  "name", [more("regularised sum"), "dropout, key shared", "labels apart"]
)
def test_the_report_is_that_of_check_split(name):
  specimen = ZOO[name]
  options = {**specimen.options, "num_microbatches": 2}
  options.pop("microbatch_size", None)
  params, *further = specimen.call()
  step = make_train_step(specimen.fun, TX, **options)
  report = step.check(params, TX.init(params), *further)
  same = check_split(specimen.fun, params, *further, **specimen.options)
  assert (report.verdict, report.reason, report.fix) == (
    same.verdict,
    same.reason,
    same.fix,
  )


def test_a_masked_loss_gets_a_weight_fn_with_which_it_is_right():
  report = check()
  assert (report.verdict, report.fix) == ("weighted", WEIGHT)
  assert report.not_checked == (f"more than 4 of the {ROWS} rows at a time",)
  options = {"in_place": _versions.ADDS_TO_REFERENCES}
  report = check(weight_fn=lambda batch: jnp.sum(batch["mask"]), **options)
  assert report.ok, report
  report = check(with_weight, has_weight=True, mesh=mesh_of())
  assert report.ok, report
  params, step = (
    jnp.asarray(W),
    make_train_step(loss_fn, TX, num_microbatches=3),
  )
  step.check(params, TX.init(params), BATCH)
  step(params, TX.init(params), BATCH)
  assert params.is_deleted()  # a check keeps no view of what is donated


def test_arguments_may_come_by_name():
  def loss(params, scale, *, batch, key):
    noise = jax.random.uniform(key, batch["y"].shape)
    return scale * masked(
      (batch["x"] @ params - batch["y"] * noise) ** 2, batch
    )

  weighed = lambda batch: jnp.sum(batch["mask"])  # noqa: E731
  for weight_fn in (None, weighed):
    names = {"batch_argnums": "batch", "rng_argnums": "key"}
    step = make_train_step(
      loss, TX, num_microbatches=3, weight_fn=weight_fn, **names
    )
    report = step.check(W, TX.init(W), 2.0, key=jax.random.key(0), batch=BATCH)
    assert report.verdict == ("ok" if weight_fn else "weighted"), report


def test_a_fix_names_by_keyword_what_came_by_keyword():
  def loss(params, x, *, y, key, other):
    noise = sum(jax.random.normal(k, y.shape) for k in (key, other))
    return jnp.mean((x @ params - y + noise) ** 2)

  both = ("key", "other")
  given = {
    "y": BATCH["y"],
    **dict(zip(both, jax.random.split(jax.random.key(0)), strict=True)),
  }
  batches = {"batch_argnums": (1, "y")}
  for options, fix in [
    ({"rng_argnums": both}, 'batch_argnums=(1, "y")\nor, if argument y has'),
    (batches, 'rng_argnums=("key", "other")'),
    ({**batches, "rng_argnums": "key"}, 'rng_argnums=("key", "other")'),
  ]:
    step = make_train_step(loss, TX, num_microbatches=3, **options)
    report = step.check(W, TX.init(W), BATCH["x"], **given)
    assert report.fix.startswith(fix), report
    assert "argnums=2" not in report.reason + report.fix


def test_a_weight_that_fits_by_chance_is_no_fix():
  # of which y < 0 says where the largest is, in the first 4 rows
  draw = np.random.default_rng(31)
  batch = {"x": draw.normal(size=(16, WIDTH)), "y": draw.normal(size=16)}

  def largest(params, batch):
    return jnp.max((batch["x"] @ params - batch["y"]) ** 2)

  report = check(largest, np.ones(WIDTH), batch, num_microbatches=2)
  assert report.verdict == "coupled", report


def test_an_argument_of_the_size_of_what_is_checked_at_a_time_is_not_taken_for_rows():
  def largest(params, batch, scale):
    return jnp.max(batch["x"] @ params) + jnp.sum(scale)

  step = make_train_step(largest, TX, num_microbatches=3, batch_argnums=1)
  # not "unsplit"
  assert step.check(W, TX.init(W), BATCH, np.ones(4)).verdict == "coupled"


@pytest.mark.parametrize(("aux_reduction", "aux"), [(None, 2), ("stack", 1)])
def test_aux_of_the_size_of_the_microbatches_of_the_check_are_not_taken_for_rows(
  aux_reduction, aux
):
  def loss(params, batch):
    each = (batch["x"] @ params - batch["y"]) ** 2
    return jnp.mean(each), jnp.broadcast_to(jnp.mean(each), aux)

  report = check(loss, has_aux=True, aux_reduction=aux_reduction)
  assert report.ok
  # and not all, after an error
  assert "rows at a time" in report.not_checked[0]


def test_where_a_few_rows_tell_nothing_more_are_looked_at():
  # none of the first 4
  few_count = {
    **BATCH,
    "mask": (np.arange(ROWS) > 8).astype(float),
  }
  assert check(batch=few_count).fix == WEIGHT
  groups = lambda params, batch: jnp.mean(  # noqa: E731
    jnp.sum((batch["x"] @ params).reshape(-1, 6, 1), 1, keepdims=True) ** 2
  )
  report = check(groups, num_microbatches=2)  # 4 rows are no groups of 6
  assert not report.not_checked

  def inside(params, batch):  # 4 rows, but not 2
    run = microbatch(
      lambda w, x: x @ w,
      batch_argnums=1,
      num_microbatches=4,
      reduction="concat",
    )
    return jnp.mean(run(params, batch["x"]))

  assert check(inside).ok
  constant = np.arange(ROWS, dtype=float)
  with pytest.raises(TypeError, match="incompatible shapes") as raised:
    check(lambda params, batch: jnp.mean(batch["x"] @ params * constant))
  assert "on 4 of 12 rows. On all it ran" in "".join(raised.value.__notes__)


def test_what_the_loss_splits_itself_is_left_to_it():
  def loss(params, batch):
    encode = microbatch(
      lambda p, x: x @ p,
      batch_argnums=1,
      num_microbatches=2,
      reduction="concat",
    )
    return jnp.std(encode(params, batch["x"]))

  assert check(loss, num_microbatches=1).ok
  assert check(loss, num_microbatches=2).verdict == "coupled"


@pytest.mark.parametrize("kind", [AxisType.Auto, more(AxisType.Explicit)])
def test_over_a_mesh_a_weight_is_missed_and_nothing_is_donated(kind):
  mesh = mesh_of(8, ("data", "model"), kind)

  def loss(params, batch):  # a constraint may name the other axes
    spec = PartitionSpec(None, "model")
    hidden = batch["x"] @ params["a"]
    if kind is AxisType.Auto:
      hidden = jax.lax.with_sharding_constraint(hidden, spec)
      return masked((jnp.sum(hidden, 1) - batch["y"]) ** 2, batch)
    return masked((jnp.sum(jnp.tanh(hidden), 1) - batch["y"]) ** 2, batch)

  params = {"a": rng.normal(size=(WIDTH, 4))}
  for weight_fn in (weigh,) if kind is AxisType.Explicit else (None, weigh):
    step = make_train_step(
      loss, TX, num_microbatches=1, mesh=mesh, weight_fn=weight_fn
    )
    placed, opt_state, _ = step(params, TX.init(params), BATCH)
    report = step.check(placed, opt_state, BATCH)
    assert report.verdict == ("ok" if weight_fn else "weighted"), report
    assert not any("device" in x for x in report.not_checked)
    step(placed, opt_state, BATCH)  # nothing was donated


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


def state_of(model, kind=TrainState, **fields):
  variables = jax.jit(model.init)(
    {"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCH["x"]
  )
  fields |= {name: x for name, x in variables.items() if name != "params"}
  return kind.create(
    apply_fn=model.apply, params=variables["params"], tx=TX, **fields
  )


@pytest.mark.more
def test_a_step_of_linen_is_checked_with_its_rngs():
  model = Model()

  def loss(variables, batch, rngs):
    return masked(
      (model.apply(variables, batch["x"], rngs=rngs) - batch["y"]) ** 2, batch
    )

  def without_rngs(variables, batch, rngs):
    return loss(variables, batch, {"dropout": jax.random.key(2)})

  rngs = {"dropout": jax.random.key(3)}
  state = state_of(model)
  step = linen_train_step(loss, num_microbatches=3)
  assert step.check(state, BATCH, rngs).fix == WEIGHT
  weighed = {"weight_fn": lambda batch: jnp.sum(batch["mask"])}
  step = linen_train_step(loss, num_microbatches=3, **weighed)
  assert step.check(state, BATCH, rngs=rngs).ok
  report = linen_train_step(without_rngs, num_microbatches=3, **weighed).check(
    state, BATCH
  )
  assert report.verdict == "random"
  assert "step(state, batch, rngs=" in report.fix
  step(state, BATCH, rngs)
  with pytest.raises(RuntimeError, match="has been deleted"):
    step.check(state, BATCH, rngs)


def test_a_step_of_linen_with_statistics_of_the_batch_is_coupled():
  model = Model(normalizes=True)

  def loss(variables, batch, rngs):
    out, updates = model.apply(
      variables, batch["x"], rngs=rngs, mutable=["batch_stats"]
    )
    return jnp.mean((out - batch["y"]) ** 2), updates

  step = linen_train_step(loss, mutable=["batch_stats"], num_microbatches=3)
  report = step.check(
    state_of(model, State), BATCH, {"dropout": jax.random.key(3)}
  )
  assert report.verdict == "coupled", report
  assert "mutable" in report.fix
  assert "argnum" not in report.fix


@pytest.mark.more
@pytest.mark.parametrize("axis", ["data", more(None)])
def test_batch_normalization_over_devices_is_right_by_the_rows_of_all(axis):
  """Without `axis`, a device normalizes by its own rows."""
  norm = nn.BatchNorm(use_running_average=False, axis_name=axis)

  def loss(variables, batch, rngs):
    out, updates = norm.apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out[:, 0] - batch["y"]) ** 2), updates

  of_linen = linen_train_step(
    loss, num_microbatches=1, mutable=["batch_stats"], mesh=mesh_of()
  )
  model = nnx.BatchNorm(WIDTH, axis_name=axis, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

  def mean(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

  of_nnx = nnx_train_step(mean, num_microbatches=1, mesh=mesh_of())
  reports = [of_nnx.check(model, optimizer, BATCH)]
  if axis:
    reports.append(of_linen.check(state_of(norm, State), BATCH))
  for report in reports:
    assert report.verdict == ("ok" if axis else "coupled"), report
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

  model = Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  options = {"carry_reduction": "max", "mesh": mesh_of()} if over_mesh else {}
  if not over_mesh:
    step = nnx_train_step(loss, num_microbatches=3)
    assert step.check(model, optimizer, BATCH).fix == WEIGHT
  options["weight_fn"] = lambda batch: jnp.sum(batch["mask"])
  step = nnx_train_step(loss, num_microbatches=3, **options)
  before = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
  report = step.check(model, optimizer, BATCH)
  after = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
  assert all(x is y for x, y in zip(before, after, strict=True))
  assert report.ok, report
  assert model.calls[...] == 0
  step(model, optimizer, BATCH)
  if over_mesh:  # a step does move all to the mesh
    assert {len(x.devices()) for x in jax.tree.leaves(nnx.state(model))} == {4}


def test_arguments_that_cannot_be_checked_are_refused():
  step = make_train_step(loss_fn, TX, num_microbatches=3)
  params = jnp.asarray(W)
  state = TX.init(params)
  with pytest.raises(
    TypeError, match=r"params is traced: check outside jax\.jit, with arrays"
  ):
    jax.jit(lambda params: step.check(params, state, BATCH).ok)(params)
  with pytest.raises(TypeError, match=r"check outside jax\.jit"):
    jax.jit(lambda x: x * step.check(params, state, BATCH).ok)(1.0)
  with pytest.raises(
    ValueError, match=r"1 splits nothing, .* that does: give 2 or more"
  ):
    check(num_microbatches=1)
  shapes = jax.eval_shape(lambda x: x, BATCH)
  with pytest.raises(
    TypeError, match=r"batch\['mask'\] is a ShapeDtypeStruct: check outside"
  ):
    step.check(params, state, shapes)
  with pytest.raises(ValueError, match="num_microbatches=3 does not divide"):
    step.check(params, state, {k: x[:8] for k, x in BATCH.items()})
  one = {k: x[:1] for k, x in BATCH.items()}
  with pytest.raises(
    ValueError, match=r"The batch \(argument 1\) has 1 row, which cannot"
  ):
    make_train_step(loss_fn, TX, microbatch_size=3).check(params, state, one)
  step(params, state, BATCH)
  with pytest.raises(RuntimeError, match="has been deleted"):
    step.check(params, state, BATCH)


# Losses that exchange something.

ITEMS = {**BATCH, "z": rng.normal(size=(ROWS, WIDTH))}
PAIR = {name: rng.normal(size=(WIDTH, 4)) for name in ("a", "b")}
weigh = lambda batch: jnp.sum(batch["mask"])  # noqa: E731


def own_mean(errors, batch):
  return jnp.sum(errors * batch["mask"]) / jnp.maximum(
    jnp.sum(batch["mask"]), 1
  )


def contrastive(params, batch, axes="data"):
  """Among the rows of all devices; without `axes`, of this one."""
  query, keys = batch["x"] @ params["a"], batch["z"] @ params["b"]
  own = jnp.arange(len(query))
  if axes:
    keys = jax.lax.all_gather(keys, axes, tiled=True)
    own += jax.lax.axis_index(axes) * len(query)
  return optax.softmax_cross_entropy_with_integer_labels(query @ keys.T, own)


def gathered(params, batch):
  return jnp.mean(contrastive(params, batch))


def not_gathered(params, batch):
  return jnp.mean(contrastive(params, batch, None))


def normalized(params, batch, axes="data"):
  """By the statistics of all devices."""
  hidden = batch["x"] @ params["a"]
  count = jax.lax.psum(len(hidden), axes)
  mean = jax.lax.psum(jnp.sum(hidden, 0, keepdims=True), axes) / count
  var = (
    jax.lax.psum(jnp.sum((hidden - mean) ** 2, 0, keepdims=True), axes) / count
  )
  return jnp.sum((hidden - mean) / jnp.sqrt(var + 0.1) @ params["b"].T, -1) ** 2


def normalized_mean(params, batch):
  return own_mean(normalized(params, batch), batch)


def check_pair(loss, num_microbatches=1, params=PAIR, further=(), **options):
  options = {"mesh": mesh_of()} | options
  step = make_train_step(loss, TX, num_microbatches=num_microbatches, **options)
  return step.check(params, TX.init(params), ITEMS, *further)


@pytest.mark.more
def test_what_devices_gather_is_right_in_one_microbatch():
  report = check_pair(gathered)
  assert report.ok, report
  assert report.where == "as given; microbatches of 4 rows, of 4, over the mesh"
  assert report.not_checked == (f"more than 4 of the {ROWS} rows at a time",)
  # The negatives are those of a microbatch, of a device.
  report = check_pair(gathered, 3)
  assert report.verdict == "coupled", report
  assert "Devices exchange something" in report.reason
  report = check_pair(not_gathered)
  assert report.verdict == "coupled", report
  assert "Devices exchange something" not in report.reason


def normalized_sum(params, batch):
  return jnp.sum(normalized(params, batch))


@pytest.mark.parametrize(
  ("loss", "number", "kind", "weight_fn", "verdict", "fix"),
  [
    (normalized_mean, 1, AxisType.Explicit, weigh, "ok", ""),
    (normalized_mean, 1, AxisType.Auto, None, "weighted", WEIGHT),
    (normalized_mean, 3, AxisType.Auto, weigh, "coupled", ""),
    more(normalized_sum, 1, AxisType.Explicit, None, "sum", 'reduction="sum"'),
  ],
)
def test_statistics_of_all_devices_are_right_in_one_microbatch(
  loss, number, kind, weight_fn, verdict, fix
):
  report = check_pair(
    loss, number, mesh=mesh_of(kind=kind), weight_fn=weight_fn
  )
  assert report.verdict == verdict, report
  assert not fix or report.fix == fix


@pytest.mark.more
@pytest.mark.parametrize("kind", [AxisType.Auto, more(AxisType.Explicit)])
def test_statistics_are_right_over_all_axes_of_the_rows(kind):
  mesh, wide = (
    mesh_of(4, ("data", "fsdp"), kind),
    {name: np.ones((4, 4)) for name in PAIR},
  )
  wide = jax.tree.map(lambda x: x + np.arange(16.0).reshape(4, 4) / 9, wide)
  wide = jax.device_put(wide, jax.NamedSharding(mesh, PartitionSpec("fsdp")))

  def loss(params, batch, axes):
    params = jax.tree.map(lambda w: w[:WIDTH], params)
    return jnp.mean(normalized(params, batch, axes))

  over = lambda axes: functools.partial(loss, axes=axes)  # noqa: E731
  both = {"mesh": mesh, "data_axis": ("data", "fsdp")}
  if kind is AxisType.Explicit:
    assert check_pair(over(("data", "fsdp")), params=wide, **both).ok
  else:  # explicitly sharded parameters would be for the loss to gather
    assert check_pair(over("data"), params=wide, **both).verdict == "coupled"
    assert check_pair(over("data"), params=wide, mesh=mesh).ok


def of_neighbor(params, batch):
  """Written for 4 devices."""
  hidden = batch["x"] @ params["a"]
  others = jax.lax.ppermute(hidden, "data", [(0, 1), (1, 2), (2, 3), (3, 0)])
  return own_mean(jnp.sum(hidden * others, -1) ** 2, batch)


@pytest.mark.more
def test_a_loss_that_does_not_run_on_one_device_is_compared_over_the_mesh():
  report = check_pair(of_neighbor, 3, weight_fn=weigh)
  assert report.ok, report
  assert any("does not run on one" in x for x in report.not_checked)
  assert not check_pair(of_neighbor, 3).ok
  with pytest.raises(
    ValueError, match="must be unique"
  ) as raised:  # nothing to compare with
    check_pair(of_neighbor)
  assert "on one device, where its axes have size 1" in "".join(
    raised.value.__notes__
  )


@pytest.mark.more
def test_a_loss_that_depends_on_the_number_of_devices_is_told_so():
  """Of which no traced equation tells, where it is one of Python."""

  def each(params, batch):
    return (batch["x"] @ params["a"][:, 0] - batch["y"]) ** 2

  divided = lambda params, batch: (  # noqa: E731
    jnp.sum(each(params, batch)) / jax.lax.psum(len(batch["x"]), "data")
  )
  report = check_pair(divided, 3)
  assert report.verdict == "unknown", report
  assert "the loss depends on the number of devices" in report.reason
  assert "l.sum() / count" in report.fix
  assert check_pair(
    divided, mesh=mesh_of(1), num_microbatches=3
  ).ok  # there it does not
  shifted = lambda params, batch: (  # noqa: E731
    jnp.mean(each(params, batch))
    * (1 + jax.lax.axis_index("data").astype(float))
  )
  assert not check_pair(shifted).ok
  centred = lambda params, batch: (  # noqa: E731
    jnp.sum(normalized(params, batch)) / jax.lax.psum(len(batch["x"]), "data")
  )
  report = check_pair(centred)
  assert report.verdict == "sum"
  assert "may also depend on their number" in report.reason


@pytest.mark.more
def test_rows_that_do_not_count_on_some_device_are_no_evidence():
  # 0/0 on a device without valid rows, as in the first 4
  def loss(params, batch):
    return jnp.sum(normalized(params, batch) * batch["mask"]) / jnp.sum(
      batch["mask"]
    )

  report = check_pair(loss, weight_fn=weigh)
  assert report.ok, report
  penalized = lambda params, batch: (  # noqa: E731
    normalized_mean(params, batch) + 0.1 * jnp.sum(params["a"] ** 2)
  )
  assert check_pair(penalized, weight_fn=weigh).ok


@pytest.mark.more
def test_noise_and_a_carry_of_several_devices_are_compared():
  def loss(params, batch, key, carry):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape).astype(float)
    hidden = (batch["x"] * keep) @ params["a"]
    mean = jax.lax.pmean(jnp.mean(hidden, 0, keepdims=True), "data")
    noise = jax.random.uniform(carry["key"])
    new = {
      "key": jax.random.split(carry["key"])[0],
      "mean": 0.9 * carry["mean"] + 0.1 * mean,
    }
    each = jnp.sum((hidden - mean) @ params["b"].T, -1) ** 2 * noise
    return jnp.mean(each), (new, {"each": each, "largest": jnp.max(each)})

  carry = {"key": jax.random.key(1), "mean": jnp.zeros((1, 4))}
  options = {"has_aux": True, "carry_argnum": 3, "rng_argnums": 2}
  words = {"each": "concat", "largest": "max"}
  further = (jax.random.key(0), carry)
  report = check_pair(loss, further=further, aux_reduction=words, **options)
  assert report.ok, report
  assert {leaf.name for leaf in report.leaves} >= {
    "aux['each']",
    "aux['largest']",
  }
  report = check_pair(
    loss, further=further, aux_reduction={**words, "largest": "min"}, **options
  )
  assert report.fix == 'aux_reduction={"each": "concat", "largest": "max"}'
  options |= {"rng_argnums": (), "aux_reduction": words}
  assert check_pair(loss, further=further, **options).verdict == "random"


@pytest.mark.parametrize("over_mesh", [False, True])
def test_a_key_that_is_shared_on_purpose_beside_a_carry_is_no_error(over_mesh):
  def loss(params, batch, count, key):
    del key
    error = batch["x"] @ params - batch["y"]
    return jnp.mean(error**2), (count + 1.0, None)

  options = {"carry_argnum": 2, "rng_argnums": ()}
  options["mesh"] = mesh_of() if over_mesh else None
  key = jax.random.key(0)
  assert check(loss, W, BATCH, jnp.zeros(()), key, **options).ok


@pytest.mark.parametrize("over_mesh", [False, True])
def test_a_carry_that_is_read_couples(over_mesh):
  def loss(params, batch, carry):
    # a tiny move
    teacher = carry["teacher"] + 1e-5 * (params - carry["teacher"])
    error = (
      batch["x"] @ (params - carry["teacher" if reads else "same"]) - batch["y"]
    )
    new = {**carry, "teacher": teacher, "count": carry["count"] + 1}
    return jnp.mean(error**2) + 0.0 * carry["count"].astype(float), (new, None)

  carry = {"teacher": W, "same": W, "count": jnp.zeros((), jnp.int32)}
  words = {"teacher": "mean", "same": "mean", "count": "max"}
  options = {"carry_argnum": 2, "carry_reduction": words}
  options["mesh"] = mesh_of() if over_mesh else None
  reads = True
  report = check(loss, W, BATCH, carry, **options)
  assert report.verdict == "coupled", report
  assert "with another carry['teacher']" in report.reason
  assert "an argument that is not split" in report.fix
  if not over_mesh:
    reads = False  # it reads what does not change, and a counter
    assert check(loss, W, BATCH, carry, **options).ok


def test_a_weight_below_zero_in_later_rows_is_no_fix():
  # The first rows, which are looked at in all changes, have none.
  mask = np.where(
    np.arange(ROWS) < 8, 1.0 + np.arange(ROWS), [-1, -1, 3, 3] * 3
  )
  report = check(batch={**BATCH, "mask": mask})
  assert report.verdict == "coupled", report


def test_a_carry_that_linen_and_nnx_read_couples():
  class Centered(nn.Module):
    @nn.compact
    def __call__(self, x):
      center = self.variable("batch_stats", "center", jnp.zeros, WIDTH)
      old = center.value
      center.value = 0.9 * old + 0.1 * x.mean(0)
      return nn.Dense(1)(x - old[None])[:, 0]

  def loss(variables, batch, rngs):
    out, updates = model.apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), updates

  model = Centered()
  state = state_of(model, State)
  step = linen_train_step(loss, mutable=["batch_stats"], num_microbatches=3)
  of_linen = step.check(state, BATCH)

  class CenteredNet(nnx.Module):
    def __init__(self):
      self.center = nnx.BatchStat(jnp.zeros(WIDTH))
      self.out = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
      old = self.center[...]
      self.center[...] = 0.9 * old + 0.1 * x.mean(0)
      return self.out(x - old[None])[:, 0]

  net = CenteredNet()
  mean = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
  optimizer = nnx.Optimizer(net, TX, wrt=nnx.Param)
  of_nnx = nnx_train_step(mean, num_microbatches=3).check(net, optimizer, BATCH)
  for report in (of_linen, of_nnx):
    assert report.verdict == "coupled", report
    assert "center" in report.reason
    assert "after the step" in report.fix
    assert "group or layer norm" not in report.fix


def reduced_mean(params, batch):
  errors = (batch["x"] @ params - batch["y"]) ** 2
  return jax.lax.pmean(jnp.mean(errors), "data")


def reduced_ratio(params, batch):
  errors = (batch["x"] @ params - batch["y"]) ** 2 * batch["mask"]
  totals = jnp.sum(errors), jnp.sum(batch["mask"])
  total, count = jax.lax.psum(totals, "data")
  return total / count


def divided_by_all(params, batch):
  """The mistake: a device's sum by the count of all."""
  errors = (batch["x"] @ params - batch["y"]) ** 2 * batch["mask"]
  return jnp.sum(errors) / jax.lax.psum(jnp.sum(batch["mask"]), "data")


@pytest.mark.parametrize(
  ("loss", "weight_fn", "ok"),
  [
    (reduced_mean, None, True),
    (reduced_ratio, weigh, True),
    (divided_by_all, weigh, False),
  ],
)
def test_a_loss_that_devices_reduced_is_right_and_one_they_divided_is_not(
  loss, weight_fn, ok
):
  report = check(loss, mesh=mesh_of(), weight_fn=weight_fn)
  assert report.ok == ok, report


def test_over_a_mesh_a_key_that_is_not_named_gets_what_to_write():
  key = jax.random.key(0)

  def drawn(params, batch, key):
    return loss_fn(params, batch) * jax.random.uniform(key)

  def drawn_by_rate(params, batch, noise):
    return drawn(params, batch, noise["key"]) * noise["rate"]

  assert check(drawn, W, BATCH, key, mesh=mesh_of()).fix == "rng_argnums=2"
  noise = {"key": key, "rate": 0.1}
  report = check(drawn_by_rate, W, BATCH, noise, mesh=mesh_of())
  assert "a key that is an argument of the loss" in report.fix


def test_an_error_of_a_loss_that_closes_over_a_mesh_says_where_it_ran():
  mesh = mesh_of(kind=AxisType.Explicit)
  scale = jax.device_put(jnp.ones(()), jax.NamedSharding(mesh, PartitionSpec()))
  with (
    jax.set_mesh(mesh),
    pytest.raises(ValueError, match="context mesh") as raised,
  ):
    check(lambda params, batch: loss_fn(params * scale, batch))
  assert "on one device" in "".join(raised.value.__notes__)


def test_an_error_for_want_of_memory_says_where_it_ran():
  def loss(params, batch):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    check(loss)
  assert "on one device" in "".join(raised.value.__notes__)


def test_check_split_names_the_options_of_a_step():
  text = (
    r"argument 'mesh'. The check runs .*: leave it out, .*step\.check\(params"
  )
  with pytest.raises(TypeError, match=text):
    check_split(loss_fn, W, BATCH, mesh=None)


def test_rows_that_are_paired_by_halves_are_coupled():
  def preferred(params, batch):  # the first half is chosen, the second rejected
    scores = batch["x"] @ params
    half = len(scores) // 2
    return -jnp.mean(jax.nn.log_sigmoid(scores[:half] - scores[half:]))

  rng = np.random.default_rng(0)
  params, batch = (
    jnp.ones(3),
    {"x": jnp.asarray(rng.normal(size=(16, 3)), jnp.float32)},
  )
  tx = optax.sgd(0.1)
  step = make_train_step(preferred, tx, num_microbatches=2, mesh=make_mesh(2))
  assert step.check(params, tx.init(params), batch).verdict == "coupled"


def test_a_weight_may_be_a_difference():
  def loss_fn(params, batch):  # of each row all words but the first
    counted = (jnp.arange(6)[None] < batch["n"][:, None] - 1).astype(
      jnp.float32
    )
    words = jnp.sum(batch["n"] - 1).astype(jnp.float32)
    return jnp.sum((batch["x"] @ params) ** 2 * counted) / words

  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(16, 6, 3)), jnp.float32)
  params, batch = (
    jnp.ones(3),
    {"x": x, "n": jnp.asarray(rng.integers(2, 7, 16), jnp.int32)},
  )
  tx, weigh = optax.sgd(0.1), lambda batch: jnp.sum(batch["n"] - 1)
  step = make_train_step(loss_fn, tx, num_microbatches=4, weight_fn=weigh)
  report = step.check(params, tx.init(params), batch)
  assert report.ok, report
