"""Calls that do not fit a signature: what the error says to write instead."""

import functools
import inspect

from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import optax
import pytest

from optax_accum import (
  accumulate,
  check_split,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
  plan_microbatches,
)
from optax_accum.flax import linen_train_step, nnx_train_step

SGD = optax.sgd(0.1)
BATCH = {"x": jnp.ones((4, 2))}


def linen_loss(variables, batch, rngs):
  return jnp.mean((batch["x"] @ variables["params"]["w"]) ** 2)


def nnx_loss(model, batch):
  return jnp.mean(model(batch["x"]) ** 2)


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    (
      {"every_k_schedule": 4},
      "every_k_schedule= of optax.MultiSteps is every_k= here",
    ),
    (
      {"every_k": 4, "use_grad_mean": False},
      r'^accumulate: got an unexpected keyword argument .*is reduction="sum" here, and True the',
    ),
    (
      {"every_k": 4, "should_skip_update_fn": None},
      "should_skip_update_fn= is skip_fn= here",
    ),
    (
      {"every_k_schedule": 4, "use_grad_mean": True},
      r"is every_k= here\. use_grad_mean=False",
    ),
    (
      {"gradient_accumulation_steps": 4},
      "gradient_accumulation_steps= is every_k= here",
    ),
    ({"num_microbatches": 4}, "num_microbatches= is every_k= here"),
    (
      {"every_k": 4, "skip_nonfinite": True},
      "is skip_fn=optax.skip_not_finite here",
    ),
    ({"every_k": 4, "weight_fn": None}, "is weight= of update and apply here"),
    ({"every_k": 4, "weight": 2}, "is an argument of update and apply"),
    ({"every_k": 4, "flush": True}, "is an argument of update and apply"),
  ],
)
def test_names_of_multisteps_get_our_names(arguments, match):
  with pytest.raises(TypeError, match=match) as caught:
    accumulate(SGD, **arguments)
  assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize(
  ("name", "match"),
  [
    (
      "steps",
      r"It takes inner, every_k, reduction, skip_fn, .*, differentiable\.$",
    ),
    ("skipfn", r"Did you mean skip_fn=\?$"),
    ("accum_dtype", r"Did you mean accumulator_dtype=\?$"),
  ],
)
def test_other_names_get_one_that_is_alike_or_all(name, match):
  with pytest.raises(
    TypeError, match=rf"^accumulate: got an unexpected .* '{name}'\. {match}"
  ):
    accumulate(SGD, 4, **{name: 3})


def test_the_optimizer_comes_first():
  with pytest.raises(TypeError, match=r"inner=8 is not an optax\.Grad"):
    accumulate(8, SGD)


def test_an_error_within_a_call_that_fits_is_left_as_it_is():
  with pytest.raises(TypeError, match=r"^every_k=2\.5 must be an int"):
    accumulate(SGD, 2.5)


def elsewhere(params, batch):
  return jnp.mean(batch @ params)


elsewhere.__module__ = "optax_losses"


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (
      lambda: make_train_step(jnp.mean, SGD, 8),
      r"make_train_step: too many positional arguments\. Options go by name: .*num_microbatches=8",
    ),
    (
      lambda: make_train_step(jnp.mean, SGD, every_k=8),
      "every_k= is num_microbatches= here, because a call gets the whole batch",
    ),
    (
      lambda: make_train_step(jnp.mean, SGD, gradient_accumulation_steps=8),
      "unexpected keyword.*gradient_accumulation_steps= is num_microbatches= here",
    ),
    (
      lambda: make_train_step(SGD, jnp.mean, num_microbatches=8),
      r"tx=<function mean .* is not an optax\.GradientTransformation",
    ),
    (
      lambda: make_train_step(elsewhere, optax.adam, num_microbatches=8),
      r"call it first, as in adam\(",
    ),
    *(
      (
        lambda make=make, value=value: make(value),
        f"The loss is of type {name}.*: give the function itself, not its value, an optimizer or a",
      )
      for make in (
        lambda value: make_train_step(value, SGD, num_microbatches=8),
        lambda value: microbatch_value_and_grad(value, num_microbatches=8),
        lambda value: linen_train_step(value, num_microbatches=8),
        lambda value: nnx_train_step(value, num_microbatches=8),
      )
      for value, name in (
        (8, "int"),
        (jnp.zeros(()), "ArrayImpl"),
        (SGD, "GradientTransform"),
      )
    ),
    *(
      (
        lambda name=name: make_train_step(
          jnp.mean, SGD, num_microbatches=8, **{name: 1}
        ),
        f"unexpected keyword argument '{name}'. {name}= is {ours}",
      )
      for name, ours in {
        "accum_steps": "num_microbatches= here",
        "accumulate_grad_batches": "num_microbatches= here",
        "num_micro_batches": "num_microbatches= here",
        "num_minibatches": "num_microbatches= here",
        "rngs": "rng_argnums= here",
        "mutable": "carry_argnum= here",
        "grad_accum_steps": "num_microbatches= here",
        "accumulate_steps": "num_microbatches= here",
        "donate_argnums": "donate= of make_train_step",
      }.items()
    ),
    *(
      (
        lambda make=make, name=name: make(name),
        f"{kind}_train_step has no option '{name}': {why}",
      )
      for kind, make, names in (
        (
          "linen",
          lambda name: linen_train_step(
            linen_loss, num_microbatches=2, **{name: 1}
          ),
          {
            "mutables": r"Did you mean mutable=\?",
            "hasaux": r"Did you mean has_aux=\?",
            "wrt": "All of state.params is",
            "optimizer": "It is the state's",
            "rngs": "Pass keys to the step, as rngs",
            "accum_steps": "accum_steps= is num_microbatches= here",
          },
        ),
        (
          "nnx",
          lambda name: nnx_train_step(
            nnx_loss, num_microbatches=2, **{name: 1}
          ),
          {
            "wrts": r"Did you mean wrt=\?",
            "optimizer": r"It goes into the call: step\(model, optimizer, batch\)",
            "mutable": "What the loss changes in the model is carried",
            "argnums": "wrt selects what is differentiated",
          },
        ),
      )
      for name, why in names.items()
    ),
    *(
      (
        lambda name=name: microbatch(
          jnp.mean, reduction="sum", num_microbatches=2, **{name: 1}
        ),
        f"'{name}'. {name}= of optax.microbatching is {ours}= here",
      )
      for name, ours in {
        "argnums": "batch_argnums",
        "argnames": "batch_argnums",
        "accumulator": "reduction",
      }.items()
    ),
    (
      lambda: make_train_step(jnp.mean, SGD, num_microbatches=2, xyz=1),
      r"'xyz'\. Options go by name: .*See help\(make_train_step\)\.$",
    ),
    (
      lambda: make_train_step(jnp.mean, SGD, num_microbatches=2, flush=True),
      r"unexpected keyword argument 'flush'\. There is nothing to flush: every call runs its whole",
    ),
    (
      lambda: make_train_step(
        jnp.mean, SGD, num_microbatches=2, weight=jnp.sum
      ),
      r"'weight'\. weight= of optax_accum\.accumulate is weight_fn= here, a function of the batch",
    ),
    (
      lambda: linen_train_step(linen_loss, num_microbatch=2),
      r"linen_train_step has no option 'num_microbatch': Did you mean num_microbatches=\?",
    ),
    (
      lambda: make_train_step(jnp.mean, SGD, num_microbatch=2),
      r"unexpected keyword argument 'num_microbatch'\. Did you mean num_microbatches=\?$",
    ),
    (
      lambda: nnx_train_step(nnx_loss, every_k=2),
      r"nnx_train_step has no option 'every_k': every_k= is num_microbatches= here",
    ),
    (
      lambda: nnx_train_step(nnx_loss, xyz=2),
      r"no option 'xyz': It takes wrt, has_aux, num_microbatches, ",
    ),
    (
      lambda: linen_train_step(linen_loss, SGD, num_microbatches=2),
      "The optimizer is the state's",
    ),
    (
      lambda: nnx_train_step(nnx_loss, SGD, num_microbatches=2),
      "step\\(model, optimizer, batch\\)",
    ),
    (
      lambda: linen_train_step(
        lambda variables, batch: 0.0, num_microbatches=2
      ),
      r"loss_fn takes \(variables, batch\), and linen_train_step calls loss_fn\(variables, batch,"
      r" rngs\): too many positional arguments. Let it take",
    ),
    (
      lambda: linen_train_step(
        functools.partial(linen_loss, batch=BATCH), num_microbatches=2
      ),
      r"have what functools\.partial fixes by name come last, or write a lambda",
    ),
    (
      lambda: nnx_train_step(lambda model: 0.0, num_microbatches=2),
      r"loss_fn takes \(model\), and nnx_train_step calls loss_fn\(model, batch\)",
    ),
  ],
)
def test_each_wrong_call_of_a_step_gets_the_right_one(make, match):
  with pytest.raises(TypeError, match=match):
    make()


def mean_loss(params, batch):
  return jnp.mean((batch["x"] @ params["w"]) ** 2)


PARAMS = {"w": jnp.ones((2, 1))}


def test_a_number_of_microbatches_by_position_gets_its_name():
  # argnums and has_aux, as in jax.value_and_grad
  for positional in (
    (4,),
    (0, 4),
  ):
    with pytest.raises(
      ValueError, match=r"num_microbatches=None and .* exactly one .* by name"
    ):
      microbatch_value_and_grad(mean_loss, *positional)


@pytest.mark.parametrize(
  ("call", "match"),
  [
    (
      lambda: microbatch_value_and_grad(mean_loss, 0, False, 4),
      r"microbatch_value_and_grad: too many positional arguments\. Options go by name: .*=8\)",
    ),
    (
      lambda: plan_microbatches(lambda n: None, PARAMS, (), BATCH),
      r"plan_microbatches: too many .* are one tuple: .*\(params, opt_state, batch\), batch_size=",
    ),
    (
      lambda: check_split(
        make_train_step(mean_loss, SGD, num_microbatches=2), PARAMS, BATCH
      ),
      r"check_split takes a loss, and this is a step: write step\.check\(params, opt_state",
    ),
    (
      lambda: microbatch(mean_loss, 4),
      r'microbatch: too many .*by name, .* no default: microbatch\(fun, reduction="mean", num_mic',
    ),
    (
      lambda: microbatch(mean_loss, num_microbatches=4),
      r"missing .*'reduction'\. Options go by",
    ),
    (
      lambda: check_split(mean_loss, PARAMS, BATCH, every_k=2),
      r"check_split: .*'every_k'\. every_k= is num_microbatches= here",
    ),
  ],
)
def test_each_wrong_call_of_a_function_gets_the_right_one(call, match):
  with pytest.raises(TypeError, match=match):
    call()


def test_functions_of_the_user_that_do_not_fit_are_named():
  step = make_train_step(
    mean_loss, SGD, num_microbatches=2, weight_fn=lambda params, batch: 1.0
  )
  with pytest.raises(
    TypeError,
    match=r"weight_fn gets only the arg.* that are split",
  ):
    step(PARAMS, SGD.init(PARAMS), BATCH)
  step = make_train_step(jax.value_and_grad(mean_loss), SGD, num_microbatches=2)
  with pytest.raises(
    TypeError, match=r"if it is jax\.value_and_grad of a loss, give that"
  ):
    step(PARAMS, SGD.init(PARAMS), BATCH)


def test_a_batch_of_strings_or_lists_gets_what_to_write():
  step = make_train_step(mean_loss, SGD, num_microbatches=2)
  with pytest.raises(
    TypeError,
    match=r"batch\['name'\] is the string 'name' and no array: leave it out",
  ):
    step(PARAMS, SGD.init(PARAMS), {**BATCH, "name": "name"})
  with pytest.raises(
    ValueError,
    match=r"has shape \(\), .* array",
  ):
    step(PARAMS, SGD.init(PARAMS), {"x": [[1.0, 2.0]] * 4})


@pytest.mark.parametrize(
  "decorate", [lambda f: f, jax.jit], ids=["plain", "jit"]
)
def test_a_decorated_loss_has_its_own_errors(decorate):
  @functools.wraps(mean_loss)
  def weighed(params, batch, weight=1.0):
    return weight * mean_loss(params, batch)

  step = make_train_step(
    decorate(weighed), SGD, num_microbatches=2, donate=False
  )
  assert step(PARAMS, SGD.init(PARAMS), BATCH, weight=2.0)[-1]["loss"] == 8
  with pytest.raises(KeyError, match="'x'"):
    step(PARAMS, SGD.init(PARAMS), {"y": BATCH["x"]}, weight=2.0)


def test_a_loss_may_have_an_argument_that_accumulate_has():
  def with_flush(params, batch, flush):
    return jnp.where(flush, 2.0, 1.0) * mean_loss(params, batch)

  step = make_train_step(with_flush, SGD, num_microbatches=2, donate=False)
  metrics = step(PARAMS, SGD.init(PARAMS), BATCH, flush=True)[-1]
  assert metrics["loss"] == 8


METHODS = ("__call__", "check", "lower", "trace")


def test_each_wrong_call_of_a_step_of_flax_gets_the_right_one():
  state = TrainState.create(
    apply_fn=None, params={"w": jnp.ones((2, 1))}, tx=SGD
  )
  step = linen_train_step(linen_loss, num_microbatches=2)
  with pytest.raises(
    TypeError, match=r"^step: .*'train'\. .*Fix a setting in the loss"
  ):
    step(state, BATCH, train=True)
  for name in METHODS:
    with pytest.raises(TypeError, match=r"^step: .*There is nothing to flush"):
      getattr(step, name)(state, BATCH, flush=True)
  key = jax.random.key(0)
  for args, named, match in (
    ((), {"rng": key}, r"argument 'rng'\. Did you mean rngs=\?$"),
    (
      (),
      {"dropout": key},
      r"step\(state, batch, rngs\)\. .* keys into rngs, which is \{\"dropout\": key\} or None\. F",
    ),
    (
      (),
      {"mutable": "batch_stats"},
      r"'mutable'\. It goes into linen_train_step",
    ),
    (
      (None, key),
      {},
      r"too many positional .* loss_fn\(variables, batch, rngs, teacher\)\.$",
    ),
  ):
    with pytest.raises(TypeError, match=match):
      step(state, BATCH, *args, **named)
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
  step = nnx_train_step(nnx_loss, num_microbatches=2)
  with pytest.raises(
    TypeError,
    match=r"^step: too many .*, batch, teacher\) and loss_fn\(model, batch, teacher\)\.$",
  ):
    step(model, optimizer, BATCH, jnp.ones(4))
  with pytest.raises(
    TypeError, match=r"'rngs'\. Random streams are in the model\.$"
  ):
    step(model, optimizer, BATCH, rngs=key)
  for name in METHODS:
    with pytest.raises(
      TypeError, match=r"^step: .*weight= .* is weight_fn= here"
    ):
      getattr(step, name)(model, optimizer, BATCH, weight=3)


def test_losses_that_fit_or_cannot_be_asked_get_no_hint():
  def with_default(variables, batch, rngs=None, train=False):
    return linen_loss(variables, batch, rngs)

  class Loss:
    def __call__(self, *args):
      return linen_loss(*args)

  def trained(loss_fn):
    @functools.wraps(loss_fn)
    def wrapper(variables, batch, rngs):
      return loss_fn(variables, batch, rngs, train=True)

    return wrapper

  @trained
  def decorated(variables, batch, rngs, train):
    return linen_loss(variables, batch, rngs)

  partial = functools.partial(lambda train, *args: linen_loss(*args), True)
  state = TrainState.create(
    apply_fn=None, params={"w": jnp.ones((2, 1))}, tx=SGD
  )
  losses = []
  jitted = jax.jit(linen_loss), jax.jit(decorated), jax.checkpoint(decorated)
  for loss_fn in (
    linen_loss,
    with_default,
    Loss(),
    partial,
    decorated,
    *jitted,
  ):
    step = linen_train_step(loss_fn, num_microbatches=2, donate=False)
    losses.append(float(step(state, BATCH)[1]["loss"]))
  assert losses == [4.0] * 8


def test_signatures_are_those_of_the_functions():
  assert list(inspect.signature(accumulate).parameters)[:2] == [
    "inner",
    "every_k",
  ]
  assert list(inspect.signature(linen_train_step).parameters)[:2] == [
    "loss_fn",
    "mutable",
  ]
  linen = linen_train_step(linen_loss, num_microbatches=2)
  nnx_step = nnx_train_step(nnx_loss, num_microbatches=2)
  names = [list(inspect.signature(x).parameters) for x in (linen, nnx_step)]
  assert names == [
    ["state", "batch", "rngs", "args", "kwargs"],
    ["model", "optimizer", "batch", "args", "kwargs"],
  ]
  assert accumulate.__name__ == "accumulate"
  assert accumulate.__module__ == "optax_accum._streaming.accumulate"
