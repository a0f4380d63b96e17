"""`value_fn`: the loss of a batch at other parameters, for line searches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic.dtypes import accumulator_dtype


def loss_elsewhere(
  loss: Any, weights: Any, args: Any, kwargs: Any, params: Any, weight: Any = None
) -> jax.Array:
  """The loss of this batch at other parameters, of the microbatches that counted at the present.

  Its derivative is the gradient in microbatches: JAX's own would keep what each of them
  computed, and is NaN where a microbatch that has no weight is 0/0.
  """
  del weight  # optax's line searches refuse an extra argument that this lacks

  @jax.custom_jvp
  def value(params: Any, held: Any) -> jax.Array:
    weights, args, kwargs = held
    return loss.value(weights, params, *args, **kwargs)

  @functools.partial(value.defjvp, symbolic_zeros=True)
  def value_and_tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (params, held), (params_moved, held_moved) = primals, tangents
    weights, args, kwargs = held
    out = loss.value_and_grad(weights, params, *args, **kwargs).outputs
    tangent = jnp.zeros_like(out.loss)
    if _moves(params_moved):
      both = map(loss.derivatives, (out.grads, _instantiated(params_moved)))
      terms = jax.tree.map(_real_product, *both)
      tangent = jnp.asarray(sum(jax.tree.leaves(terms)), out.loss.dtype)
    if _moves(held_moved):  # a user differentiates the step itself, e.g. by its batch
      by_held = functools.partial(value.fun, params)
      tangent += jax.jvp(by_held, (held,), (_instantiated(held_moved),))[1]
    return out.loss, tangent

  return value(params, (weights, args, kwargs))


def _moves(tangents: Any) -> bool:
  """Whether any of the tangents is not known to be zero."""
  zero = jax.custom_derivatives.SymbolicZero
  return not all(isinstance(x, zero) for x in jax.tree.leaves(tangents))


def _instantiated(tangents: Any) -> Any:
  """The tangents as arrays."""
  zero = jax.custom_derivatives.SymbolicZero

  def array(x: Any) -> Any:
    if not isinstance(x, zero):
      return x
    empty = x.dtype == jax.dtypes.float0
    return np.zeros(x.shape, x.dtype) if empty else jnp.zeros(x.shape, x.dtype)

  return jax.tree.map(array, tangents)


def _real_product(grad: jax.Array, tangent: jax.Array) -> jax.Array:
  """What a tangent changes, by the gradient of a real function, in float32 or better."""
  wide = accumulator_dtype(grad.dtype)
  return jnp.sum(jnp.real(grad.astype(wide) * tangent.astype(wide)))
