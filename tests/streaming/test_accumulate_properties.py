"""Any sequence of gradients, weights, skips and flushes, against the semantics in NumPy."""

import functools

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.optimizers import mini_step
from support.samples import more

from optax_accum import accumulate

PERIOD = 3  # the schedule of k: 1, 2, 3, 1, 2, 3, ...


def model(calls, every_k, reduction):
  """``(parameter, mini_step, gradient_step, has_updated)`` after each call, by plain SGD."""
  param, mini_step, steps, total, weights = 0.0, 0, 0, 0.0, 0.0
  for grad, weight, skip, flush in calls:
    if mini_step == 0:
      total, weights = 0.0, 0.0
    skip = skip and weight != 0
    if not skip:
      mini_step += 1
      if weight:
        total, weights = total + weight * grad, weights + weight
    full = not skip and mini_step >= every_k(steps)
    done = full or (flush and mini_step > 0)
    emit = done and weights > 0
    if emit:
      param -= total / weights if reduction == "mean" else total
      steps += 1
    if done:
      mini_step = 0
    yield param, mini_step, steps, emit


@functools.cache
def build(every_k, reduction, form):
  schedule = every_k or (lambda step: 1 + step % PERIOD)
  # An inf is what skip_fn skips; a NaN is not skipped, and comes with a weight of zero.
  tx = accumulate(
    optax.sgd(1.0),
    schedule,
    reduction=reduction,
    skip_fn=lambda updates, *_: (jnp.any(jnp.isinf(updates)), ()),
    differentiable=form == "differentiable",
  )

  step = mini_step(tx, "apply" if form == "apply" else "update")

  def body(held, call):
    grad, weight, flush = call
    param, state = step(*held, grad, weight=weight, flush=flush)
    return (param, state), (param, state.mini_step, state.gradient_step, state.has_updated)

  @jax.jit
  def after_each(calls):
    param = jnp.zeros(())
    return jax.lax.scan(body, (param, tx.init(param)), calls)[1]

  return after_each


MOST = 14  # calls
CALLS = st.lists(
  st.tuples(
    st.integers(-8, 8).map(float), st.integers(0, 3), st.booleans(), st.sampled_from([0, 0, 0, 1])
  ),
  max_size=MOST,
)


# Each number of calls with each form.
@pytest.mark.parametrize(("every_k", "reduction", "form"), [
  (None, "mean", "update"),
  more(None, "sum", "apply"),
  (None, "mean", "differentiable"),
  more(1, "sum", "update"),
  (1, "mean", "apply"),
  more(1, "sum", "differentiable"),
  (2, "sum", "update"),
  more(2, "mean", "apply"),
  (2, "sum", "differentiable"),
  more(3, "mean", "update"),
  (3, "sum", "apply"),
  more(3, "mean", "differentiable"),
])  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=CALLS)
def test_any_sequence_of_calls_is_what_numpy_says(every_k, reduction, form, calls):
  k = (lambda _: every_k) if every_k else (lambda step: 1 + step % PERIOD)
  # what follows the calls is looked at by nobody
  given = np.zeros((3, MOST), np.float32)
  for i, (grad, weight, skip, flush) in enumerate(calls):
    given[:, i] = (float("inf") if skip else grad if weight else float("nan"), weight, flush)
  grads, weights, flushes = given
  after = jax.device_get(build(every_k, reduction, form)((grads, weights, flushes != 0)))
  for i, expected in enumerate(model(calls, k, reduction)):
    param, *counters = (x[i] for x in after)
    assert tuple(counters) == expected[1:]
    np.testing.assert_allclose(param, expected[0], rtol=1e-5, atol=1e-5)
