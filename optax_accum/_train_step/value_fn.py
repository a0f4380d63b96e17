"""`value_fn`, which a step gives to its optimizer: the loss at other parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic import dtypes

_Zero = jax.custom_derivatives.SymbolicZero


def loss_elsewhere(
  loss,
  weights,
  args,
  kwargs,
  params,
  weight=None,
) -> jax.Array:
  """The loss of this batch at other parameters, over the microbatches that counted at the present.

  Its derivative is computed in microbatches. JAX's own would keep the intermediate values of all,
  and is NaN where a microbatch of weight 0 is 0/0.
  """
  del weight  # optax's line searches refuse an extra argument that this lacks

  @jax.custom_jvp
  def value(params, given):
    weights, args, kwargs = given
    return loss.value(weights, params, *args, **kwargs)

  @functools.partial(value.defjvp, symbolic_zeros=True)
  def value_and_tangent(primals, tangents):
    (params, given) = primals
    (params_moved, given_moved) = tangents
    weights, args, kwargs = given
    out = loss.value_and_grad(weights, params, *args, **kwargs).outputs
    tangent = jnp.zeros_like(out.loss)
    moved = _instantiated(params_moved)
    if moved is not None:
      own = map(loss.local.derivatives, (out.grads, moved))
      terms = jax.tree.leaves(jax.tree.map(_real_product, *own))
      tangent = jnp.asarray(sum(terms), out.loss.dtype)
    moved = _instantiated(given_moved)
    if moved is not None:  # in the step itself, which a user differentiates
      at_params = functools.partial(value.fun, params)
      tangent += jax.jvp(at_params, (given,), (moved,))[1]
    return out.loss, tangent

  return value(params, (weights, args, kwargs))


def _instantiated(tangents):
  """The tangents as arrays; None where all are known to be zero."""
  if all(isinstance(x, _Zero) for x in jax.tree.leaves(tangents)):
    return None

  def array(x):
    if not isinstance(x, _Zero):
      return x
    if x.dtype == jax.dtypes.float0:
      return np.zeros(x.shape, x.dtype)
    return jnp.zeros(x.shape, x.dtype)

  return jax.tree.map(array, tangents)


def _real_product(grad: jax.Array, tangent: jax.Array) -> jax.Array:
  """What a tangent changes, by the gradient of a real function, in float32 or better."""
  wide = dtypes.accumulator_dtype(grad.dtype)
  return jnp.sum(jnp.real(grad.astype(wide) * tangent.astype(wide)))
