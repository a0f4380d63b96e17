"""optax's own tests of `optax.MultiSteps`, run on `accumulate` behind its constructor."""

import unittest

import jax
import optax
from optax.transforms import _accumulation, _accumulation_test
import pytest

from optax_accum import accumulate, has_updated

pytestmark = pytest.mark.usefixtures("usual_promotion")

CASES = [x for x in dir(_accumulation_test.AccumulationTest) if x.startswith("test_multi_steps")]
assert len(CASES) >= 8  # of none pytest would say that they are skipped


class MultiSteps:
  """`optax.MultiSteps`, as far as its tests go, made of `accumulate`."""

  def __init__(
    self,
    opt,
    every_k_schedule,
    use_grad_mean=True,
    should_skip_update_fn=None,
    accumulator_dtype=None,
  ):
    self._tx = accumulate(
      opt,
      every_k_schedule,
      reduction="mean" if use_grad_mean else "sum",
      skip_fn=should_skip_update_fn,
      accumulator_dtype=accumulator_dtype,
    )

  def gradient_transformation(self):
    # for time
    return optax.GradientTransformation(self._tx.init, jax.jit(self._tx.update))

  def has_updated(self, state):
    return has_updated(state)


@pytest.mark.parametrize("name", CASES)
def test_optaxs_own_tests_of_multi_steps_hold_of_accumulate(name, monkeypatch):
  monkeypatch.setattr(_accumulation, "MultiSteps", MultiSteps)
  result = unittest.TestResult()
  _accumulation_test.AccumulationTest(name).run(result)
  problems = [text for _, text in result.errors + result.failures + result.skipped]
  assert not problems, "\n".join(problems)
  assert result.testsRun == 1
