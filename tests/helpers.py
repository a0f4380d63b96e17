"""What several test files need."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def assert_trees_equal_to(actual, expected, tolerance):
  """Same structure, shapes and dtypes, and values within `tolerance` of the largest one."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
  ):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (path, a.shape, b.shape, a.dtype, b.dtype)
    if np.issubdtype(a.dtype, np.inexact) or a.dtype == jnp.bfloat16:
      wide = np.complex128 if np.iscomplexobj(a) else np.float64
      a, b = a.astype(wide), b.astype(wide)
      scale = max(1.0, np.max(np.abs(b), initial=0.0))
      np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=str(path))
    else:
      np.testing.assert_array_equal(a, b, err_msg=str(path))


def largest_difference(a, b):
  """The largest absolute difference between two trees, in float64."""
  differences = jax.tree.map(
    lambda x, y: np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))), a, b
  )
  return max(jax.tree.leaves(differences))


def temp_bytes(jitted, *args, **kwargs):
  """Bytes of temporary buffers of a jitted function, as the compiler counts them."""
  return jitted.lower(*args, **kwargs).compile().memory_analysis().temp_size_in_bytes


def relaxed(tx):
  """`tx` with JAX's usual promotion: optax's own code promotes (Adam's bias correction does)."""

  def update(updates, state, params=None, **extra_args):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def loss_elsewhere():
  """A transformation that steps by nothing; its state is the loss at twice the parameters."""

  def update(updates, state, params, *, value_fn, **extra_args):
    value = value_fn(jax.tree.map(lambda x: x + x, params))
    return jax.tree.map(jnp.zeros_like, updates), value

  return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
