"""Bad input is an error that names the value, the requirement and the fix."""

from flax.training.train_state import TrainState
import jax
from jax.experimental import sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh

import optax_accum
from optax_accum.flax import linen_train_step

PARAMS = {"w": jnp.ones(3)}
BATCH = {"x": jnp.ones((6, 3)), "y": jnp.ones(6)}


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def with_aux(params, batch):
  aux = {"count": jnp.asarray(6), "ok": jnp.asarray(True), "mean": 1.0}
  return loss_fn(params, batch), aux


def raises(error, match, fun=loss_fn, args=(PARAMS, BATCH), **options):
  options = {"num_microbatches": 2, **options}
  for build in (optax_accum.microbatch_value_and_grad, _train_step):
    with pytest.raises(error, match=match):
      build(fun, **options)(*args)


def _train_step(fun, **options):
  if {"argnums", "axis_name"} & options.keys():  # of no step
    return optax_accum.microbatch_value_and_grad(fun, **options)
  step = optax_accum.make_train_step(fun, optax.sgd(0.1), donate=False, **options)
  return lambda params, *args, **kwargs: step(params, (), *args, **kwargs)


# Of the options of a loss without aux: options, the error, and what it says.
OPTIONS = [
  ({"num_microbatches": None}, ValueError, "exactly one of the two"),
  ({"microbatch_size": 2}, ValueError, "num_microbatches=2 and microbatch_size=2: give exactly"),
  ({"num_microbatches": 0}, ValueError, "num_microbatches=0 must be at least 1"),
  ({"num_microbatches": 2.0}, TypeError, "num_microbatches=2.0 must be an int"),
  ({"num_microbatches": True}, TypeError, "num_microbatches=True must be an int"),
  ({"num_microbatches": None, "microbatch_size": "2"}, TypeError, "microbatch_size='2' must"),
  ({"num_microbatches": 4}, ValueError,
    r"does not divide the 6 rows of argument 1: use one of \[1, 2, 3, 6\], or microbatch_size=2"),
  ({"batch_argnums": 3}, ValueError, "batch_argnums names argument 3"),
  ({"batch_argnums": "batch"}, ValueError, "batch_argnums names argument 'batch' .*keyword"),
  ({"rng_argnums": 2}, ValueError, "rng_argnums names argument 2"),
  ({"rng_argnums": "key"}, ValueError, "rng_argnums names argument 'key'"),
  ({"carry_argnum": 2}, ValueError, "carry_argnum names argument 2"),
  ({"batch_argnums": 0}, ValueError, "Argument 0 has two roles"),
  ({"batch_argnums": -2}, ValueError, "Argument 0 has two roles"),
  ({"rng_argnums": 1}, ValueError, "Argument 1 has two roles"),
  ({"carry_argnum": 1}, ValueError, "Argument 1 has two roles"),
  ({"reduction": "max"}, ValueError, "reduction='max' must be one of 'mean', 'sum'"),
  ({"aux_reduction": "average"}, ValueError, "aux_reduction='average' must be one of"),
  ({"aux_reduction": {"a": ["mean", "no"]}}, ValueError, r"aux_reduction\['a'\]\[1\]='no' must"),
  ({"axis_name": "data"}, NameError, "unbound axis name: data"),
  ({"weight_fn": lambda b: b["y"]}, ValueError, r"weight of shape \(3,\) .* real scalar"),
  ({"weight_fn": lambda b: -1.0}, ValueError, "weight -1.0; it must be 0 or"),
  ({"weight_fn": lambda b: None}, TypeError, "weight None; it must be a real scalar"),
  ({"has_weight": True}, TypeError, r"a single value; with has_weight=True it must return \(total, weight\)"),
  ({"has_weight": True, "has_aux": True}, TypeError, r"a single value; with has_aux=True it must return \(loss, aux\)"),
  ({"has_weight": True, "weight_fn": len}, ValueError,
    "has_weight=True .*, and weight_fn counts it a second time: leave one"),
  ({"has_weight": True, "reduction": "sum"}, ValueError, 'has_weight=True .*, and reduction="sum" does not: leave one'),
  ({"has_aux": True}, TypeError, r"a single value; with has_aux=True it must return \(loss, aux\)"),
]  # fmt: skip
OPTIONS += [
  ({"argnums": argnums}, ValueError, "Argument 1 has two roles") for argnums in (1, (0, -1))
]
# A batch, and what is said of it.
BATCHES = [
  ({"x": jnp.ones((6, 3)), "y": jnp.ones(5)}, r"1\['x'\]: 6, argument 1\['y'\]: 5\. Move rows"),
  ({"x": jnp.ones((6, 3)), "y": jnp.ones(())}, r"1\['y'\] has shape \(\), without rows"),
  ({"x": jnp.ones((6, 3)), "y": 1.0}, r"1\['y'\] has shape \(\), without rows"),
  ({"x": jnp.ones((0, 3)), "y": jnp.ones(0)}, r"The batch \(argument 1\) is empty"),
  ({}, r"\(argument 1\) has no arrays: give one to split"),
]
# What is no loss.
LOSSES = [
  (lambda p, b: b["x"] @ p["w"], r"loss has shape \(\d,\) .* it must be a real scalar"),
  (lambda p, b: jnp.sum(p["w"].astype(jnp.complex64)), "loss has shape .* dtype complex64; it must be a real scalar"),
  (lambda p, b: jnp.sum(b["y"] > 0), "loss has .* dtype int32; it must be a real scalar"),
  (lambda p, b: (loss_fn(p, b), {}), r"The loss is a tuple; it must be .* pass has_aux=True; .* with has_weight=True"),
  (lambda p, b: None, "The loss is a NoneType; it must be a real scalar"),
]  # fmt: skip
# What is no weight, in the place of that of a loss.
WEIGHTS = [
  (lambda p, b: b["y"], ValueError, r"loss gave a weight of shape \(3,\) and dtype float32; it must be a real scalar"),
  (lambda p, b: b["y"] > 0, ValueError, r"loss gave a weight of shape \(3,\) and dtype bool; it must be a real scalar"),
  (lambda p, b: jnp.sum(b["y"]).astype(jnp.complex64), TypeError, "loss gave .* complex64; it must be a real scalar"),
  (lambda p, b: None, TypeError, "loss gave the weight None; it must"),
  (lambda p, b: -1, ValueError, "loss gave the weight -1; it must be 0 or"),
  (loss_fn, TypeError, r"weight .* depends on .*: return \(total, weight\) in this order, or, .*stop_gradient of it"),
]  # fmt: skip
# Reductions of the aux of `with_aux`.
AUX = [
  ("mean", TypeError,
    r"aux\['count'\] has dtype int32, which \"mean\" cannot keep: cast it.*, \"stack\" or \"concat\", in"),
  ({"count": "sum", "ok": "mean", "mean": "mean"}, TypeError, r"aux\['ok'\] has dtype bool"),
  (
    {"count": "sum", "mean": "mean"},
    ValueError,
    r"(?sm)aux_reduction=\{'count': 'sum', 'mean': 'mean'\} is not a prefix tree of the outputs:"
    r" give one name for all, or a tree with a name for each.*aux_reduction\n.*\bok\b",
  ),
  ({"count": {"a": "sum"}, "ok": "max", "mean": "mean", "median": "mean"}, ValueError,
    r"(?sm)is not a prefix tree of the outputs: .*\bmedian\b"),
  (["sum", "max"], ValueError, r"=\['sum', 'max'\] is not a prefix tree .* error: diff"),
  ("concat", ValueError, r"aux\['count'\] has shape \(\); \"concat\" needs the \d rows"),
]  # fmt: skip
# What a loss returns in the place of a carry of ``{"mean": float}``.
CARRIES = [
  ({"mean": jnp.zeros(2)}, r"new_carry .* argument 2\['mean'\] has type float32\[2\], not float32\[\]"),
  ({"mean": jnp.zeros((), jnp.int32)}, r"argument 2\['mean'\] has type int32\[\], not float32\[\]: "),
  ({"other": jnp.zeros(())}, r"new_carry .* argument 2\['mean'\] is missing: .* same structure"),
]  # fmt: skip


def weighing(weight):
  return lambda params, batch: (loss_fn(params, batch), weight(params, batch))


def returning(new_carry):
  return lambda params, batch, _: (loss_fn(params, batch), (new_carry, None))


USUAL = (PARAMS, BATCH)
MEAN = (PARAMS, BATCH, {"mean": jnp.zeros(())})
# A loss, its arguments, options, the error, and what it says.
REFUSED = [
  *((loss_fn, USUAL, *row) for row in OPTIONS),
  *((loss_fn, (PARAMS, batch), {}, ValueError, match) for batch, match in BATCHES),
  *((fun, USUAL, {"num_microbatches": 1 + i % 2}, TypeError, match) for i, (fun, match) in enumerate(LOSSES)),
  *((weighing(weight), USUAL, {"has_weight": True}, error, match) for weight, error, match in WEIGHTS),
  (lambda p, b: (jnp.sum(b["y"] > 0), loss_fn(p, b)), USUAL, {"has_weight": True}, TypeError,
    r"The loss has .* dtype int32; .* return \(total, weight\), in this order"),
  (lambda p, b: (b["y"] * 1.0, 4.0), USUAL, {"has_weight": True}, TypeError,
    "must be a real scalar: with has_weight=True, sum over the rows, and take no"),
  *(
    (with_aux, USUAL, {"has_aux": True, "aux_reduction": words, "num_microbatches": 1 + i % 2}, error, match)
    for i, (words, error, match) in enumerate(AUX)
  ),
  *(
    (returning(new_carry), MEAN, {"carry_argnum": 2, "num_microbatches": 1 + i % 2}, ValueError, match)
    for i, (new_carry, match) in enumerate(CARRIES)
  ),
  (lambda params, batch, carry: (loss_fn(params, batch), carry), (PARAMS, BATCH, jnp.zeros(())), {"carry_argnum": 2},
    TypeError, r"with carry_argnum it must return \(loss, \(new_carry, aux\)\)"),
  (loss_fn, ({"w": jnp.ones(3), "step": jnp.asarray(0)}, BATCH), {}, TypeError,
    r"argument 0\['step'\] has dtype int32 .* as another argument"),
  (lambda params, batch: jnp.sum(jnp.abs(params["w"])), ({"w": jnp.ones(3, jnp.complex64)}, BATCH),
    {"accumulator_dtype": jnp.float32}, TypeError, r"lose the imaginary part of grads\['w'\], which is complex64"),
]  # fmt: skip


@pytest.mark.parametrize(("fun", "args", "options", "error", "match"), REFUSED)
def test_an_error_names_the_value_the_requirement_and_the_fix(fun, args, options, error, match):
  raises(error, match, fun, args, **options)


@pytest.mark.parametrize(("argnums", "args", "kwargs", "match"), [
  (2, USUAL, {}, r"argnums names argument 2.*2 positional arguments"),
  (0, (), {"params": PARAMS, "batch": BATCH}, "0.*0 positional and the key"),
])  # fmt: skip
def test_argnums_that_name_nothing_are_refused(argnums, args, kwargs, match):
  with pytest.raises(ValueError, match=match):
    optax_accum.microbatch_value_and_grad(loss_fn, argnums=argnums, num_microbatches=2)(
      *args, **kwargs
    )


def noisy_loss(params, key, data):
  return jnp.mean((data + jax.random.normal(key, data.shape)) * params)


@pytest.mark.parametrize("mesh", [{}, {"mesh": make_mesh(2)}], ids=["alone", "mesh"])
def test_a_key_in_the_place_of_the_batch_is_refused(mesh):
  w, key, x = jnp.float32(1), jax.random.key(0), jnp.ones((8, 3))
  tx = optax.sgd(0.1)

  def run(**options):
    options |= {"num_microbatches": 2, "donate": False, **mesh}
    step = optax_accum.make_train_step(noisy_loss, tx, **options)
    return step(w, tx.init(w), key, x)

  with pytest.raises(
    ValueError, match=r"^argument 1 is a random key: .*rng_argnums.*batch_argnums"
  ):
    run()
  with pytest.raises(ValueError, match="Argument 1 has two roles"):
    run(rng_argnums=1)
  assert float(run(batch_argnums=2, rng_argnums=1)[2]["total_weight"]) == 8


# A loss or a weight below float32, and where its dtype has to hold how much a microbatch counts.
def narrow(params, batch):
  return jnp.mean(batch["x"] @ params["w"]).astype(jnp.bfloat16)


def of_rows(rows):
  return PARAMS, {"x": jnp.ones((rows, 3))}


ROWS_OF = {"weight_fn": lambda batch: jnp.sum(batch["x"][:, 0])}
HALF_ROWS = {"weight_fn": lambda b: jnp.sum(b["x"][:, 0]).astype(jnp.bfloat16)}
WIDE = lambda p, b: jnp.mean(b["x"] @ p["w"])  # noqa: E731
PAIR = {"has_weight": True}
RAGGED = {"num_microbatches": None, "microbatch_size": 257}


@pytest.mark.parametrize(("fun", "rows", "options"), [
  (narrow, 6, ROWS_OF),
  (lambda p, b: (narrow(p, b), jnp.float32(1)), 6, PAIR),
  (lambda p, b: (WIDE(p, b), jnp.bfloat16(1)), 6, PAIR),
  (WIDE, 6, HALF_ROWS),
  (narrow, 300, RAGGED),
])  # fmt: skip
def test_a_narrow_loss_that_is_weighed_is_refused(fun, rows, options):
  """bfloat16 has no 257, and a weight that is traced may be any number."""
  raises(TypeError, "bfloat16.*float32", fun, of_rows(rows), **options)


def test_a_narrow_loss_is_weighed_by_numbers_that_it_holds():
  for rows, options in (
    (514, {"num_microbatches": 2}),  # equal parts are not weighed
    (300, {"microbatch_size": 176}),
    (300, {"microbatch_size": 256, "skip_nonfinite": True}),
  ):
    run = optax_accum.microbatch_value_and_grad(narrow, **options)
    loss, grads, *_ = jax.jit(run)(*of_rows(rows))
    np.testing.assert_allclose([loss, *grads["w"]], [3, 1, 1, 1], rtol=1e-6)


def test_a_narrow_loss_of_many_rows_is_refused_as_they_arrive():
  tx = optax.sgd(0.1)
  step = optax_accum.make_train_step(narrow, tx, num_microbatches=1)
  cycle = step.add(step.begin(PARAMS), *of_rows(256))
  with pytest.raises(TypeError, match=r"bfloat16.*float32"):
    step.add(cycle, *of_rows(257))


def sparse_of(dense, n_batch=0):
  """All entries, in numbers for the whole or for each row; as `fromdense`, without compiling."""
  rows, columns = dense.shape
  data, indices = dense.ravel(), np.indices(dense.shape).reshape(2, -1).T
  if n_batch:
    data, indices = dense, np.tile(np.arange(columns)[:, None], (rows, 1, 1))
  return sparse.BCOO((data, np.int32(indices)), shape=dense.shape)


def test_sparse_rows_that_are_not_split_are_refused():
  dense = np.eye(8, 5, dtype=np.float32)
  loss = lambda p, y, rows: jnp.mean((rows @ p - y) ** 2)  # noqa: E731
  run = _train_step(loss, num_microbatches=8)
  with pytest.raises(ValueError, match=r"argument 2 has 8 rows, as many as the batch"):
    run(jnp.ones(5), jnp.ones(8), sparse_of(dense))


def test_a_key_among_the_rows_is_refused():
  run = optax_accum.microbatch_value_and_grad(lambda w, b: w * jnp.mean(b["x"]), num_microbatches=2)
  with pytest.raises(ValueError, match=r"1\['key'\] is a random key: .*rng_argnums.*split\(key"):
    run(1.0, {"x": jnp.ones(4), "key": jax.random.key(0)})


def sparse_loss(params, batch):
  return jnp.mean((batch["rows"] @ params) ** 2)


@pytest.mark.parametrize(
  ("n_batch", "mesh"), [(0, {}), (1, {"mesh": make_mesh(2)})], ids=["alone", "mesh"]
)
def test_sparse_rows_are_refused_with_what_to_pass(n_batch, mesh):
  dense = np.arange(48, dtype=np.float32).reshape(8, 6) % 3
  batch = {"rows": sparse_of(dense, n_batch)}
  params, tx = jnp.arange(6.0), optax.sgd(0.1)
  options = {"num_microbatches": 2, "donate": False, **mesh}
  step = optax_accum.make_train_step(sparse_loss, tx, **options)
  linen_step = linen_train_step(lambda variables, batch, rngs: 0.0, **options)
  state = TrainState.create(apply_fn=None, params={"w": params}, tx=tx)
  match = r"(argument 1|batch)\['rows'\] is a sparse BCOO, whose arrays have no rows to split: "
  for call in (
    lambda: step(params, tx.init(params), batch),
    lambda: linen_step(state, batch),
    lambda: optax_accum.check_split(sparse_loss, params, batch),
  ):
    with pytest.raises(TypeError, match=match):
      call()

  # What the error says to write.
  def packed_loss(params, batch):
    data, indices = batch
    rows = sparse.BCOO((data, indices), shape=(len(data), 6))
    return sparse_loss(params, {"rows": rows})

  x = sparse_of(dense, n_batch=1)
  step = optax_accum.make_train_step(packed_loss, tx, **options)
  _, _, metrics = step(params, tx.init(params), (x.data, x.indices))
  np.testing.assert_allclose(metrics["loss"], np.mean((dense @ np.arange(6.0)) ** 2), rtol=1e-6)
