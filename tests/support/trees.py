"""Trees of arrays: whether two are the same, and parts of their rows."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(actual, expected, tolerance, least=0.0):
  """Same structure, shapes and dtypes, and values within `tolerance` of a leaf's largest one.

  `least` is for what is zero but for rounding, as the gradient of a bias before a normalisation:
  leaves are compared as if their largest value were at least this.
  """
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
  ):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (path, a.shape, b.shape, a.dtype, b.dtype)
    if np.issubdtype(a.dtype, np.inexact) or a.dtype == jnp.bfloat16:
      wide = np.complex128 if np.iscomplexobj(a) else np.float64
      a, b = a.astype(wide), b.astype(wide)
      scale = np.max(np.abs(b), initial=least)
      np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=str(path))
    else:
      np.testing.assert_array_equal(a, b, err_msg=str(path))


def largest_difference(a, b):
  """The largest absolute difference between two trees, in float64."""
  differences = jax.tree.map(
    lambda x, y: np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))), a, b
  )
  return max(jax.tree.leaves(differences))


def index(tree, rows):
  """Every leaf at the same index, or slice, of its first axis."""
  return jax.tree.map(lambda x: x[rows], tree)


def stack(trees):
  """Trees of one structure as one tree, along a new first axis."""
  return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def strided(batch, n):
  """The rows as the library splits them: part i of n has the rows i, i + n, ..."""
  return [index(batch, slice(i, None, n)) for i in range(n)]


def blocks(batch, n):
  """The rows as people split them: one array of n contiguous parts, as a new first axis."""
  return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch)


def strong(tree):
  """The arrays without weak types.

  Optimizer states have some when they are made and none after a step, so that the second step is
  compiled anew, which takes longer than all steps of a test.
  """
  return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), tree)
