"""Bad input is an error that names the value, the requirement and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum

PARAMS = {"w": jnp.ones(3)}
BATCH = {"x": jnp.ones((6, 3)), "y": jnp.ones(6)}


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def with_aux(params, batch):
  return loss_fn(params, batch), {"count": jnp.asarray(6), "ok": jnp.asarray(True), "mean": 1.0}


def raises(error, match, fun=loss_fn, args=(PARAMS, BATCH), **options):
  options = {"num_microbatches": 2, **options}
  for build in (optax_accum.microbatch_value_and_grad, _train_step):
    with pytest.raises(error, match=match):
      build(fun, **options)(*args)


def _train_step(fun, **options):
  if "argnums" in options:  # a step differentiates its first argument
    return optax_accum.microbatch_value_and_grad(fun, **options)
  step = optax_accum.make_train_step(fun, optax.sgd(0.1), donate=False, **options)
  return lambda params, *args, **kwargs: step(params, (), *args, **kwargs)


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"num_microbatches": None}, ValueError, "exactly one of the two"),
    ({"microbatch_size": 2}, ValueError, "num_microbatches=2 and microbatch_size=2: give exactly"),
    ({"num_microbatches": 0}, ValueError, "num_microbatches=0 must be at least 1"),
    ({"num_microbatches": -2}, ValueError, "num_microbatches=-2 must be at least 1"),
    ({"num_microbatches": 2.0}, TypeError, "num_microbatches=2.0 must be an int"),
    ({"num_microbatches": True}, TypeError, "num_microbatches=True must be an int"),
    ({"num_microbatches": None, "microbatch_size": "2"}, TypeError, "microbatch_size='2' must"),
    ({"num_microbatches": 7}, ValueError, "7 does not divide the batch's 6 rows: use one of"),
    (
      {"num_microbatches": 4},
      ValueError,
      r"does not divide the batch's 6 rows: use one of \[1, 2, 3, 6\], or microbatch_size=2",
    ),
    ({"batch_argnums": 3}, ValueError, "batch_argnums names argument 3"),
    ({"batch_argnums": -3}, ValueError, "batch_argnums names argument -3"),
    ({"batch_argnums": 1.0}, TypeError, "batch_argnums=1.0 must hold positions"),
    ({"batch_argnums": "batch"}, TypeError, "batch_argnums='batch' must hold positions"),
    ({"batch_argnames": "mask"}, ValueError, "batch_argnames names argument 'mask'"),
    ({"batch_argnames": 1}, TypeError, "batch_argnames=1 must hold names"),
    ({"batch_argnums": ()}, ValueError, "both empty: name what is split"),
    ({"rng_argnums": 2}, ValueError, "rng_argnums names argument 2"),
    ({"rng_argnames": "key"}, ValueError, "rng_argnames names argument 'key'"),
    ({"carry_argnum": 2}, ValueError, "carry_argnum names argument 2"),
    ({"batch_argnums": 0}, ValueError, "Argument 0 is both differentiated and split"),
    ({"batch_argnums": -2}, ValueError, "Argument 0 is both differentiated and split"),
    ({"rng_argnums": 1}, ValueError, "Argument 1 is both split and a random key"),
    ({"carry_argnum": 1}, ValueError, "Argument 1 is both split and carried"),
    ({"batch_axis": 1}, ValueError, r"batch argument 1\['y'\] has shape \(6,\), without an axis 1"),
    (
      {"batch_axis": -3},
      ValueError,
      r"batch argument 1\['x'\] has shape \(6, 3\), without an axis",
    ),
    ({"batch_axis": 0.0}, TypeError, "batch_axis=0.0 must be an int"),
    ({"reduction": "max"}, ValueError, "reduction='max' must be one of 'mean', 'sum'"),
    ({"aux_reduction": "average"}, ValueError, "aux_reduction='average' must be one of"),
    ({"aux_reduction": {"a": ["mean", "no"]}}, ValueError, r"aux_reduction\['a'\]\[1\]='no' must"),
    ({"accumulator_dtype": jnp.int32}, TypeError, "accumulator_dtype=int32 cannot hold a mean"),
    ({"axis_name": "data"}, ValueError, "axis_name='data' is not bound here"),
    ({"weight_fn": lambda b: b["y"]}, ValueError, r"weight of shape \(3,\) .* real scalar"),
    ({"weight_fn": lambda b: -1.0}, ValueError, "weight -1.0; it must be 0, or from"),
    ({"weight_fn": lambda b: np.nan}, ValueError, "weight nan; it must be 0, or from"),
    ({"weight_fn": lambda b: np.inf}, ValueError, "weight inf; it must be 0, or from"),
    ({"weight_fn": lambda b: None}, TypeError, "weight None; it must be a real scalar"),
    ({"weight_fn": 3}, TypeError, "weight_fn=3 must be a function of the batch"),
    ({"carry_argnum": 1.5}, TypeError, "carry_argnum=1.5 must be an int"),
    ({"carry_argnum": (2,)}, TypeError, r"carry_argnum=\(2,\) must be an int"),
    ({"weight_fn": lambda b: 1j}, TypeError, "weight 1j; it must be a real scalar"),
    (
      {"has_aux": True},
      TypeError,
      r"a single value; with has_aux=True it must return \(loss, aux\)",
    ),
  ],
)
def test_options(options, error, match):
  raises(error, match, **options)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_what_is_no_bool(value):
  options = ["has_aux", "skip_nonfinite", "skip_empty", "in_place", "noise_scale", "donate"]
  for name in options:
    with pytest.raises(TypeError, match=rf"^{name}={value!r} must be True or False\.$"):
      optax_accum.make_train_step(loss_fn, optax.sgd(0.1), num_microbatches=2, **{name: value})


def test_argnums_out_of_range():
  with pytest.raises(ValueError, match=r"argnums names argument 2.*2 positional arguments"):
    optax_accum.microbatch_value_and_grad(loss_fn, argnums=2, num_microbatches=2)(PARAMS, BATCH)
  cycle = optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=2)
  with pytest.raises(ValueError, match=r"argnums names argument 0.*0 positional arguments"):
    cycle(params=PARAMS, batch=BATCH)


@pytest.mark.parametrize("argnums", [1, -1, (0, -1)])
def test_argnums_that_are_the_batch(argnums):
  raises(ValueError, "Argument 1 is both differentiated and split", argnums=argnums)


def test_batch_argnames_of_a_positional_only_parameter():
  def positional_only(params, batch, /):
    return loss_fn(params, batch)

  raises(
    ValueError,
    "batch_argnames names argument 'batch', which this call does not have: it has 2 positional",
    positional_only,
    batch_argnums=(),
    batch_argnames="batch",
  )


@pytest.mark.parametrize("argnums", [(), (0, 0)])
def test_argnums_that_name_nothing_or_twice(argnums):
  with pytest.raises(ValueError, match=r"argnums=.* must name one or more arguments, each once"):
    optax_accum.microbatch_value_and_grad(loss_fn, argnums=argnums, num_microbatches=2)


def test_traced_counts():
  @jax.jit
  def step(n):
    return optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=n)(PARAMS, BATCH)

  with pytest.raises(TypeError, match="num_microbatches is a traced value"):
    step(2)


@pytest.mark.parametrize(
  ("batch", "match"),
  [
    ({"x": jnp.ones((6, 3)), "y": jnp.ones(5)}, r"1\['x'\]: 6, batch argument 1\['y'\]: 5"),
    ({"x": jnp.ones((6, 3)), "y": jnp.ones(())}, r"1\['y'\] has shape \(\), without an axis 0"),
    ({"x": jnp.ones((6, 3)), "y": 1.0}, r"1\['y'\] has shape \(\), without an axis 0"),
    ({"x": jnp.ones((0, 3)), "y": jnp.ones(0)}, "The batch is empty"),
    ({}, "no arrays: give one to split"),
  ],
)
def test_batches(batch, match):
  raises(ValueError, match, args=(PARAMS, batch))


@pytest.mark.parametrize(
  ("fun", "match"),
  [
    (lambda p, b: b["x"] @ p["w"], r"loss has shape \(\d,\) .* it must be a real scalar"),
    (
      lambda p, b: jnp.sum(p["w"].astype(jnp.complex64)),
      "loss has shape .* dtype complex64; it must be a real scalar",
    ),
    (lambda p, b: jnp.sum(b["y"] > 0), "loss has .* dtype int32; it must be a real scalar"),
    (lambda p, b: (loss_fn(p, b), {}), r"The loss is a tuple; it must be .* pass has_aux=True"),
    (lambda p, b: None, "The loss is a NoneType; it must be a real scalar"),
  ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_losses(fun, match, num_microbatches):
  raises(TypeError, match, fun, num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
  ("reduction", "error", "match"),
  [
    ("mean", TypeError, r"aux\['count'\] has dtype int32, which \"mean\" cannot keep: cast it"),
    ({"count": "sum", "ok": "mean", "mean": "mean"}, TypeError, r"aux\['ok'\] has dtype bool"),
    (
      {"count": "sum", "mean": "mean"},
      ValueError,
      r"(?sm)aux_reduction=\{'count': 'sum', 'mean': 'mean'\} is not a prefix tree of the outputs:"
      r" give one name for all, or a tree with a name for each.*aux_reduction\n.*^    ok$",
    ),
    (
      {"count": {"a": "sum"}, "ok": "max", "mean": "mean", "median": "mean"},
      ValueError,
      r"(?sm)is not a prefix tree of the outputs: .*\n    median$",
    ),
    (["sum", "max"], ValueError, r"=\['sum', 'max'\] is not a prefix tree .* error: diff"),
    ("concat", ValueError, r"aux\['count'\] has shape \(\); \"concat\" needs the \d rows"),
  ],
)
def test_aux(reduction, error, match, num_microbatches):
  raises(
    error,
    match,
    with_aux,
    has_aux=True,
    aux_reduction=reduction,
    num_microbatches=num_microbatches,
  )


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_complex_values_have_no_order(kind, num_microbatches):
  match = rf"dtype complex64, which has no '{kind}': use \"mean\" or \"sum\""
  z = jnp.ones(6, jnp.complex64)
  run = optax_accum.microbatch(
    lambda z: {"z": jnp.sum(z)}, reduction=kind, num_microbatches=num_microbatches
  )
  with pytest.raises(TypeError, match=r"output\['z'\] has " + match):
    run(z)
  raises(
    TypeError,
    r"aux\['z'\] has " + match,
    lambda p, b: (loss_fn(p, b), {"z": jnp.sum(z)}),
    has_aux=True,
    aux_reduction=kind,
    num_microbatches=num_microbatches,
  )


def test_values_per_row_that_a_smaller_last_microbatch_cannot_reduce():
  run = optax_accum.microbatch(lambda x: {"rows": x}, reduction="stack", microbatch_size=4)
  with pytest.raises(ValueError, match=r"output\['rows'\] has shape \(4,\).*\(2,\).*\"concat\""):
    run(jnp.ones(6))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
  ("new_carry", "match"),
  [
    (
      {"mean": jnp.zeros(2)},
      r"new_carry .* carry\['mean'\] has type float32\[2\], not float32\[\]",
    ),
    ({"mean": jnp.zeros((), jnp.int32)}, r"carry\['mean'\] has type int32\[\], not float32\[\]: "),
    ({"other": jnp.zeros(())}, r"new_carry .* carry\['mean'\] is missing: .* same structure"),
  ],
)
def test_carries(new_carry, match, num_microbatches):
  raises(
    ValueError,
    match,
    lambda p, b, c: (loss_fn(p, b), (new_carry, None)),
    (PARAMS, BATCH, {"mean": jnp.zeros(())}),
    carry_argnum=2,
    num_microbatches=num_microbatches,
  )


def test_carry_that_is_not_returned():
  raises(
    TypeError,
    r"with carry_argnum it must return \(loss, \(new_carry, aux\)\)",
    lambda p, b, c: (loss_fn(p, b), c),
    (PARAMS, BATCH, jnp.zeros(())),
    carry_argnum=2,
  )


def test_integer_parameters():
  params = {"w": jnp.ones(3), "step": jnp.asarray(0)}
  raises(
    TypeError, r"argument 0\['step'\] has dtype int32 .* as another argument", args=(params, BATCH)
  )


def test_leaves_that_are_no_arrays():
  match = r"argument 0\['name'\] has type str and cannot be differentiated"
  with pytest.raises(TypeError, match=match):
    optax_accum.microbatch_value_and_grad(loss_fn, num_microbatches=2)(
      {"w": jnp.ones(3), "name": "w"}, BATCH
    )


def test_keys_that_are_none():
  raises(
    TypeError,
    r"random argument 2\['key'\] is float32\[\]: give a key, such as jax.random.key\(0\)",
    lambda p, b, k: loss_fn(p, b),
    (PARAMS, BATCH, {"key": jnp.ones(())}),
    rng_argnums=2,
  )


def test_accumulators_that_would_lose_the_imaginary_part():
  raises(
    TypeError,
    r"lose the imaginary part of grads\['w'\], which is complex64",
    lambda p, b: jnp.sum(jnp.abs(p["w"])),
    ({"w": jnp.ones(3, jnp.complex64)}, BATCH),
    accumulator_dtype=jnp.float32,
  )


def test_transformations_that_are_none():
  for tx, match in [
    (optax.adam, "not an optax.GradientTransformation but .* call it first, as in adam"),
    (optax.MultiSteps(optax.sgd(0.1), 2), "tx is an optax.MultiSteps object"),
    (0.1, "tx=0.1 is not an optax.GradientTransformation: give an optax optimizer"),
  ]:
    with pytest.raises(TypeError, match=match):
      optax_accum.make_train_step(loss_fn, tx, num_microbatches=2)


def test_options_that_do_not_exist():
  with pytest.raises(TypeError, match=r"unexpected keyword argument 'microbatches'"):
    optax_accum.make_train_step(loss_fn, optax.sgd(0.1), microbatches=2)


def test_an_argument_is_differentiated_once():
  raises(ValueError, "Argument 0 is both differentiated and differentiated", argnums=(0, -2))
