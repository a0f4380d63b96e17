"""Further arguments of the steps of linen and nnx: not split, as those of `make_train_step`."""

from flax import nnx
import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.compiled import compilations
from support.devices import AUTO, make_mesh
from support.linen import CLASSES, make_batch, make_state, Model, ROWS, WIDTH

from optax_accum.flax import linen_train_step, nnx_train_step

TEACHER = {"w": np.random.default_rng(1).normal(size=(WIDTH, CLASSES))}
SGD = optax.sgd(0.1)

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


def distance(logits, batch, teacher, scale=1.0):
  return scale * jnp.mean((logits - batch["x"] @ teacher["w"]) ** 2)


def linen_loss(variables, batch, rngs, teacher, scale=1.0):
  logits = Model().apply(variables, batch["x"])
  return distance(logits, batch, teacher, scale)


def nnx_loss(model, batch, teacher, scale=1.0):
  return distance(model(batch["x"]), batch, teacher, scale)


def linear(seed=0, **kinds):
  dtype = jnp.result_type(float)
  rngs = nnx.Rngs(seed)
  layer = nnx.Linear(WIDTH, CLASSES, param_dtype=dtype, rngs=rngs)
  return nnx.Sequential(layer, *(kind(rngs) for kind in kinds.values()))


def call_of(kind, loss_fn=None, model=None, **options):
  """A step, what a call of it begins with, and the parameters after it."""
  options = {"num_microbatches": 2, **options}
  if kind == "linen":
    step = linen_train_step(loss_fn or linen_loss, **options)
    state = make_state(Model(), make_batch(jnp.result_type(float)), SGD)

    def run(*args, **kwargs):
      new, metrics = step(state, *args, **kwargs)
      return new.params, metrics

    return step, (state,), (None,), run
  step = nnx_train_step(loss_fn or nnx_loss, **options)
  model = model or linear()
  optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)

  def run(*args, **kwargs):
    metrics = step(model, optimizer, *args, **kwargs)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), metrics

  return step, (model, optimizer), (), run


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_teacher_reaches_every_microbatch_in_full(kind):
  with jax.enable_x64(True):
    batch = make_batch()
    _, _, between, run = call_of(kind, num_microbatches=1)
    expected = jax.device_get(run(batch, *between, TEACHER, scale=2.0))
    for mesh in (None, make_mesh(8)):
      _, _, _, run = call_of(kind, num_microbatches=3, mesh=mesh)
      found = jax.device_get(run(batch, *between, scale=2.0, teacher=TEACHER))
      trees.assert_close(found, expected, 1e-10)
    # Of the default of scale.
    _, _, _, run = call_of(kind)
    _, metrics = run(batch, *between, TEACHER)
    trees.assert_close(2 * metrics["loss"], expected[1]["loss"], 1e-10)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_every_method_takes_further_arguments(kind):
  batch = make_batch(np.float32)
  teacher = jax.tree.map(np.float32, TEACHER)
  step, first, between, run = call_of(kind, donate=False)
  given = *first, batch, *between
  assert step.check(*given, teacher, scale=2.0).ok
  assert step.check(*given, teacher=teacher).ok
  assert step.lower(*given, teacher).as_text()
  assert step.trace(*given, teacher, scale=2.0).jaxpr
  shapes = step.eval_shape(*given, teacher)
  metrics = shapes if kind == "nnx" else shapes[1]
  assert metrics["loss"].shape == ()
  with compilations() as compiled:
    for i in range(3):
      run(batch, *between, teacher, scale=np.float32(i))
  assert sum(f"{kind}_train_step" in line for line in compiled) == 1


KEYED = {"w": TEACHER["w"], "key": jax.random.key(0)}
KEY = r" is a random key, .* Draw from"


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
@pytest.mark.parametrize(("args", "kwargs", "error", "match"), [
  ((KEYED,), {}, ValueError, r"^args\[0\]\['key'\]" + KEY),
  ((TEACHER,), {"scale": KEYED}, ValueError, r"^kwargs\['scale'\]\['key'\]"),
  ((TEACHER, "train"), {}, TypeError, r"^args\[1\] is the string 'train' and no array: .* fix it in the loss"),
  ((TEACHER, 1.0, 2.0), {}, TypeError, "positional arguments but . were given"),
  ((), {}, TypeError, "missing 1 required positional argument: 'teacher'"),
  ((TEACHER,), {"scal": 2.0}, TypeError, "unexpected keyword .* 'scal'"),
])  # fmt: skip
def test_what_a_plain_step_refuses_is_refused(kind, mesh, args, kwargs, error, match):
  batch = make_batch(np.float32)
  step, first, between, run = call_of(kind, mesh=mesh)
  with pytest.raises(error, match=match):
    run(batch, *between, *args, **kwargs)
  if error is ValueError:
    with pytest.raises(error, match=match):
      step.check(*first, batch, *between, *args, **kwargs)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_as_many_rows_by_chance_are_not_split(kind):
  def loss_fn(model, batch, *others):
    return jnp.sum(others[-1]) * jnp.mean(batch["x"])

  batch = make_batch(np.float32)
  _, _, between, run = call_of(kind, loss_fn)
  _, metrics = run(batch, *between, np.ones(ROWS, np.float32))
  assert metrics["loss"] == pytest.approx(ROWS * batch["x"].mean(), rel=1e-4)


def test_a_teacher_may_be_the_state_itself_or_be_sharded():
  """It is copied, where the step would delete it, and stays where it is."""
  batch = make_batch(np.float32)
  mesh = make_mesh(2, 4, kind=AUTO)
  _, _, _, run = call_of("linen")
  expected = run(batch, None, TEACHER)[1]["loss"]
  wide = jax.device_put(
    np.float32(np.pad(TEACHER["w"], ((0, 0), (0, 1)))),
    jax.NamedSharding(mesh, jax.P(None, "model")),
  )

  def loss_fn(variables, batch, rngs, teacher):
    return linen_loss(variables, batch, rngs, {"w": teacher[:, :CLASSES]})

  _, _, _, run = call_of("linen", loss_fn, mesh=mesh)
  trees.assert_close(run(batch, None, wide)[1]["loss"], expected, 1e-5)

  def near(variables, batch, rngs, teacher):
    old = Model().apply({"params": teacher}, batch["x"])
    new = Model().apply(variables, batch["x"])
    return jnp.mean((new - old) ** 2) + jnp.mean(new)

  for where in (None, mesh):
    step = linen_train_step(near, num_microbatches=2, mesh=where)
    state = make_state(Model(), batch, SGD)
    kept = state.params
    for _ in range(2):
      state, metrics = step(state, batch, None, kept)
    assert metrics["stepped"]


@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
def test_an_nnx_model_may_be_a_teacher(mesh):
  batch = make_batch(np.float32)

  def loss_fn(model, batch, teacher):
    return jnp.mean((model(batch["x"]) - teacher(batch["x"])) ** 2)

  def norm(rngs):
    return nnx.BatchNorm(CLASSES, rngs=rngs)

  def dropout(rngs):
    return nnx.Dropout(0.5, rngs=rngs)

  student = linear()
  teacher = linear(1, norm=norm)
  _, _, _, run = call_of("nnx", loss_fn, student, mesh=mesh)
  # Its statistics would change, and nothing carries them.
  with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate"):
    run(batch, teacher)
  teacher.eval()
  expected = nnx.jit(loss_fn)(student, batch, teacher)
  before = jax.device_get(nnx.state(teacher))
  _, metrics = run(batch, teacher)
  trees.assert_close(metrics["loss"], expected, 1e-5)
  trees.assert_close(jax.device_get(nnx.state(teacher)), before, 0)
  # In eval() dropout draws nothing from the key that it has.
  noisy = linear(1, dropout=dropout)
  student = linear()
  _, _, _, run = call_of("nnx", loss_fn, student, mesh=mesh)
  with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate"):
    run(batch, noisy)
  noisy.eval()
  expected = nnx.jit(loss_fn)(student, batch, noisy)
  trees.assert_close(run(batch, noisy)[1]["loss"], expected, 1e-5)
