"""How large a batch is useful: the noise scale, from the gradients of a step's microbatches."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.reductions import Mean, Sum
from optax_accum._arithmetic.trees import Leaf
from optax_accum._arithmetic.weighted_mean import Weight


class NoiseScaleTerms(NamedTuple):
  """The two parts of the noise scale, as one step with ``noise_scale=True`` estimates them.

  Scalars in float32 (float64 with x64), unbiased but very noisy: average them over steps with
  `gradient_noise_scale`. Both are 0 if fewer than two microbatches counted.

  Attributes:
    squared_norm: An estimate of ``|G|^2``, where G is the gradient of all data. May be negative.
    trace: An estimate of the trace of the covariance of the gradients of single rows; with a
      `weight_fn`, of single units of weight, which must be independent (tokens are, importance
      weights are not). Rounding of half precision gradients adds to it.
  """

  squared_norm: jax.Array
  trace: jax.Array


class GradientNoiseScale(NamedTuple):
  """The pair of functions that `gradient_noise_scale` returns.

  Attributes:
    init: ``init() -> state``.
    update: ``update(terms, state) -> (noise_scale, state)``.
  """

  init: Callable[[], optax.EmaState]
  update: Callable[
    [NoiseScaleTerms, optax.EmaState], tuple[jax.Array, optax.EmaState]
  ]


def gradient_noise_scale(decay: float = 0.9) -> GradientNoiseScale:
  """Estimates the simple noise scale: about how many rows a batch should have.

  It is ``trace / |G|^2``, both averaged over steps. At this many independent rows (or this total
  weight) a batch's gradient is half noise: see the guide "Choosing the batch".

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_accum
    >>> def loss_fn(params, x):
    ...   return jnp.mean((params - x) ** 2)
    >>> batch, tx = 1 + 2 * jax.random.normal(jax.random.key(0), (64, 2)), optax.sgd(0.01)
    >>> step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=8, noise_scale=True)
    >>> estimate, params = optax_accum.gradient_noise_scale(), jnp.zeros((1, 2))
    >>> opt_state, noise_state = tx.init(params), estimate.init()
    >>> for _ in range(10):
    ...   params, opt_state, metrics = step(params, opt_state, batch)
    ...   noise_scale, noise_state = estimate.update(metrics["noise_scale"], noise_state)
    >>> bool(1 < noise_scale < 64)
    True

  Args:
    decay: The decay of the moving averages, which cover about ``1 / (1 - decay)`` steps. The noise
      scale grows in training, and they lag: where it was 120, 0.9 gave 103 and 0.99 gave 43.

  Returns:
    A `GradientNoiseScale`, whose two functions work under `jax.jit`. The noise scale is a scalar,
    and inf unless the averaged ``|G|^2`` is above 0. Terms that are both 0, or not finite, do not
    change the state.

  References:
    McCandlish et al. 2018, arXiv:1812.06162, section 2 and appendix A.1 (for SGD).
  """
  # The averages of both terms have the same bias, which the division cancels.
  average = optax.ema(decay, debias=False)

  def init():
    zero = jnp.zeros((), jnp.result_type(float))
    return average.init(NoiseScaleTerms(zero, zero))

  def as_float(x):
    return jnp.asarray(x, jnp.result_type(float))

  def update(terms, state):
    terms = jax.tree.map(as_float, terms)
    # Whether the terms tell anything. Both are 0 if fewer than two microbatches counted.
    tells = jnp.isfinite(terms.squared_norm) & jnp.isfinite(terms.trace)
    tells &= (terms.squared_norm != 0) | (terms.trace != 0)
    # `optax.ema` returns the averages and its new state, which has them as `ema`.
    _, new = average.update(terms, state)
    new = jax.tree.map(functools.partial(jnp.where, tells), new, state)
    averages = new.ema
    is_positive = averages.squared_norm > 0
    # A trace is never below 0, but an estimate may be, by rounding. The 1 only avoids 0 / 0.
    trace = jnp.maximum(averages.trace, 0)
    divisor = jnp.where(is_positive, averages.squared_norm, 1)
    noise_scale = jnp.where(is_positive, trace / divisor, jnp.inf)
    return noise_scale, new

  return GradientNoiseScale(init, update)


class Noise(NamedTuple):
  """The values of each microbatch that the scan reduces."""

  squared_norm: Leaf  # of the gradient; reduced to the weighted mean
  count: Leaf  # 1; reduced to the number of microbatches that counted


NOISE = Noise(Mean(wide=True), Sum(wide=True))  # how they are reduced


def noise_of(grads, weight: Weight) -> Noise:
  """The values of one microbatch, from its gradient times its weight."""

  def mean(g):
    dtype = dtypes.accumulator_dtype(g.dtype)
    return weighted_mean.mean(g, weight, dtype)

  means = jax.tree.map(mean, grads)
  squared = squared_norm(means)
  # The count has the dtype of the norm, so that devices reduce both together.
  return Noise(squared, jnp.ones_like(squared))


def squared_norm(grads) -> jax.Array:
  """The square of the global norm of gradients, in float32 or better."""

  def wide(x):
    return x.astype(dtypes.accumulator_dtype(x.dtype))

  return optax.tree.norm(jax.tree.map(wide, grads), squared=True)


def noise_terms(
  noise: Noise, of_mean: jax.Array, total_weight: jax.Array
) -> NoiseScaleTerms:
  """The estimates of one step, from the squared norms of its microbatches and of their mean.

  Let the weights ``w`` of n microbatches sum to S, and their gradients ``g`` have the expectation
  G and the covariance ``C / w``. Then ``E sum(w |g|^2) = S |G|^2 + n tr C`` over microbatches, and
  ``E S |mean|^2 = S |G|^2 + tr C`` of their mean.
  """
  dtype = jnp.result_type(float)
  # The weighted mean of the microbatches' squared norms, and the squared norm of their mean.
  each = noise.squared_norm.astype(dtype)
  of_mean = of_mean.astype(dtype)
  total = total_weight.astype(dtype)
  others = noise.count.astype(dtype) - 1
  # Otherwise nothing can be compared, and both terms are 0. The 1s only avoid 0 / 0.
  tells = (others > 0) & (total != 0)
  # The two equations differ by (n - 1) tr C.
  trace = total * (each - of_mean) / jnp.where(tells, others, 1)
  # The second equation, divided by S and solved for |G|^2.
  norm_squared = of_mean - trace / jnp.where(tells, total, 1)
  return NoiseScaleTerms(
    jnp.where(tells, norm_squared, 0), jnp.where(tells, trace, 0)
  )
