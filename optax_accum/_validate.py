"""The checks that more than one room needs, and their wording.

Every message gives the value, the requirement and the fix, with the path of the leaf.
"""

from collections.abc import Sequence
import operator
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax


def leaf_name(root: str, path: tuple[Any, ...]) -> str:
  """How messages name a leaf: ``batch['tokens']``."""
  return (root + jax.tree_util.keystr(path)).lstrip(".")


def positive_int(name: str, value: Any) -> int:
  """`value` as an int of at least 1; bools, floats and traced values are errors."""
  if isinstance(value, jax.core.Tracer):
    raise TypeError(
      f"{name} is a traced value ({value}), but shapes depend on it: pass a Python int, e.g. by"
      " marking it static in jax.jit."
    )
  try:
    if isinstance(value, bool):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise TypeError(f"{name}={value!r} must be an int of at least 1.") from None
  if number < 1:
    raise ValueError(f"{name}={value!r} must be at least 1.")
  return number


def exactly_one_size(num_microbatches: Any, microbatch_size: Any) -> tuple[int | None, int | None]:
  """Checks that one of the two is given, and returns both as int or None."""
  if (num_microbatches is None) == (microbatch_size is None):
    raise ValueError(
      f"Got num_microbatches={num_microbatches!r} and microbatch_size={microbatch_size!r}: give"
      " exactly one of the two (num_microbatches=1 is the whole batch at once)."
    )
  if num_microbatches is not None:
    return positive_int("num_microbatches", num_microbatches), None
  return None, positive_int("microbatch_size", microbatch_size)


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
  """Checks that `value` is one of the `allowed` words."""
  if value not in allowed:
    raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}.")
  return value


def accumulator_dtype(value: Any) -> jnp.dtype | None:
  """Checks that accumulators of this dtype can hold a mean."""
  if value is not None and not jnp.issubdtype(value, jnp.inexact):
    raise TypeError(
      f"accumulator_dtype={jnp.dtype(value)} cannot hold a mean: give a floating or complex dtype,"
      " or None for the gradient's dtype promoted with float32."
    )
  return None if value is None else jnp.dtype(value)


def holds_dtype(leaf: str, dtype: chex.ArrayDType, accumulator: chex.ArrayDType | None) -> None:
  """Checks that accumulating `dtype` in `accumulator` does not lose an imaginary part."""
  if accumulator is None or not jnp.issubdtype(dtype, jnp.complexfloating):
    return
  if not jnp.issubdtype(accumulator, jnp.complexfloating):
    raise TypeError(
      f"accumulator_dtype={jnp.dtype(accumulator)} would lose the imaginary part of {leaf}, which"
      f" is {jnp.dtype(dtype)}: give a complex dtype, or None."
    )


def weight(source: str, value: Any) -> None:
  """Checks a microbatch's weight: a real scalar, not negative where that can be seen."""
  shape: tuple[int, ...] = ()
  dtype = jnp.dtype(object)
  if hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex)):
    shape, dtype = jnp.shape(value), jnp.result_type(value)
  if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
    raise TypeError(f"{source} gave the weight {value!r}; it must be a real scalar, a number.")
  if shape != () or jnp.issubdtype(dtype, jnp.complexfloating):
    raise ValueError(
      f"{source} gave a weight of shape {shape} and dtype {dtype}; it must be a real scalar, such"
      " as jnp.sum(mask)."
    )
  if not isinstance(value, jax.core.Tracer) and not 0 <= float(value) < np.inf:
    raise ValueError(f"{source} gave the weight {value}; it must be 0 or more, and finite.")


def key(name: str, value: Any) -> None:
  """Checks that `value` is a typed key or a raw uint32 key, or an array of them."""
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and shape):
    return
  raise TypeError(
    f"{name} has shape {shape} and dtype {dtype}; it must be a key, of jax.random.key(seed) or"
    " jax.random.PRNGKey(seed)."
  )


def loss(out: Any, has_aux: bool, carries: bool) -> None:
  """Checks what a loss function returned: a real scalar, with the aux that was announced."""
  wanted = "(loss, (new_carry, aux))" if carries else "(loss, aux)" if has_aux else "loss"

  def is_pair(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2

  if has_aux and not (is_pair(out) and (not carries or is_pair(out[1]))):
    raise TypeError(
      f"The function returned {_describe(out)}; with"
      f" {'carry_argnum' if carries else 'has_aux=True'} it must return {wanted}."
    )
  value = out[0] if has_aux else out
  if isinstance(value, (tuple, list, dict)):
    raise TypeError(
      f"The function returned {_describe(value)} as its loss; the loss must be a real scalar. If"
      " the rest is auxiliary, return (loss, aux) and pass has_aux=True."
    )
  if value is None:
    raise TypeError(f"The function returned None; it must return {wanted}.")
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if shape != ():
    raise TypeError(
      f"The loss has shape {shape}; it must be a scalar: take its mean or sum over the rows."
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"The loss has dtype {dtype}; it must be real, i.e. of a floating dtype.")


def _describe(x: Any) -> str:
  if isinstance(x, (tuple, list, dict)):
    return f"a {type(x).__name__} of length {len(x)}"
  return "a single value"


def inexact_leaves(what: str, tree: chex.ArrayTree) -> None:
  """Checks that every leaf can be differentiated."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    try:
      kind = f"dtype {jnp.result_type(leaf)}"
      if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        continue
    except TypeError:
      kind = f"type {type(leaf).__name__}"
    raise TypeError(
      f"{leaf_name(what, path)} has {kind} and cannot be differentiated: keep all but floating and"
      " complex arrays out of the differentiated argument, e.g. close over them or pass them as"
      " another argument (in Equinox: eqx.partition(model, eqx.is_inexact_array))."
    )


def transformation(value: Any, name: str = "inner") -> None:
  """Checks that `value` is an optax transformation, and says what to write if it is not."""
  if isinstance(value, optax.MultiSteps):
    raise TypeError(
      f"{name} is an optax.MultiSteps object, which accumulates already: give the optimizer that"
      " it wraps, as in optax_accum.accumulate(optimizer, every_k)."
    )
  if isinstance(value, optax.GradientTransformation):
    return
  if callable(value):
    raise TypeError(
      f"{name}={value!r} is not an optax.GradientTransformation but something that may make one:"
      f" call it first, as in {getattr(value, '__name__', 'optimizer')}(...)."
    )
  raise TypeError(
    f"{name}={value!r} is not an optax.GradientTransformation: give an optax optimizer such as"
    " optax.adamw(1e-3), or build one with optax.GradientTransformation(init_fn, update_fn)."
  )


def cycle_length(value: Any) -> jax.Array:
  """Checks what a schedule of k returned."""
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if shape != () or not jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
      f"The schedule every_k returned a value of shape {shape} and dtype {dtype}; it must return"
      " an integer scalar: cast it, e.g."
      " `lambda step: jnp.asarray(schedule(step)).astype(jnp.int32)`."
    )
  if not isinstance(value, jax.core.Tracer) and value < 1:
    raise ValueError(f"The schedule every_k returned {value}; it must return 1 or more.")
  return jnp.asarray(value).astype(jnp.int32)


def flush(value: Any) -> bool | jax.Array:
  """Checks a flag that may be traced; a Python bool stays one."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  is_array = isinstance(value, (jax.Array, np.ndarray))
  if not is_array or (value.shape, value.dtype) != ((), jnp.bool_):
    raise TypeError(
      f"flush={value!r} must be a bool, or a bool scalar array, e.g. `step == last_step`."
    )
  return jnp.asarray(value)


def skip(result: Any) -> tuple[jax.Array, chex.ArrayTree]:
  """Checks what a skip_fn returned."""
  if not isinstance(result, tuple) or len(result) != 2:
    raise TypeError(
      f"skip_fn returned {result!r}; it must return the pair (should_skip, info), e.g."
      " `return should_skip, ()`."
    )
  should_skip, info = result
  shape, dtype = jnp.shape(should_skip), jnp.result_type(should_skip)
  if shape != () or dtype != jnp.bool_:
    raise TypeError(
      f"skip_fn returned a should_skip of shape {shape} and dtype {dtype}; it must be a bool"
      " scalar, e.g. jnp.any(...)."
    )
  return jnp.asarray(should_skip), info


def bound_axis(axis_name: Any) -> None:
  """Checks that a collective over `axis_name` can run here."""
  if not is_bound(axis_name):
    raise ValueError(
      f"axis_name={axis_name!r} is not bound here: call this inside jax.pmap, jax.shard_map or"
      " jax.vmap with that axis name, or leave axis_name out (under plain jax.jit a sharded batch"
      " needs none)."
    )


def is_bound(axis_name: Any) -> bool:
  """Whether a collective over `axis_name` can run here."""
  try:
    lax.axis_size(axis_name)
  except NameError:
    return False
  return True


def no_manual_axes() -> None:
  """Checks that a step is not taken by every device of a mapped axis for itself."""
  axes = jax.sharding.get_abstract_mesh().manual_axes
  if axes:
    raise ValueError(
      f"The step is called inside pmap or shard_map over {axes} without axis_name, where every"
      " device would step by its own gradient: pass axis_name= to make_train_step, or call it"
      " outside, with mesh=."
    )


def same_structure(tree: Any, like: Any) -> bool:
  """Whether two pytrees have the same structure, whatever their leaves."""
  structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(like)]
  return structures[0] == structures[1]


def same_tree(what: str, tree: Any, like: Any, origin: str) -> None:
  """Checks that `tree` has the structure and the shapes of `like`, and names the first leaf."""
  leaves = {leaf_name(what, p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
  wanted = {leaf_name(what, p): x for p, x in jax.tree_util.tree_leaves_with_path(like)}
  fix = f"{what} must have the tree and the shapes of {origin}."
  for name in wanted:
    if name not in leaves:
      raise ValueError(f"{name} is missing: {fix}")
  for name, leaf in leaves.items():
    if name not in wanted:
      raise ValueError(f"{name} is not expected: {fix}")
    if jnp.shape(leaf) != wanted[name].shape:
      raise ValueError(f"{name} has shape {jnp.shape(leaf)}, not {wanted[name].shape}: {fix}")
  if not same_structure(tree, like):
    raise ValueError(
      f"{what} is a {jax.tree.structure(tree)} and not a {jax.tree.structure(like)}: {fix}"
    )


def accumulates(
  name: str, dtype: Any, accumulator: chex.ArrayDType, requested: chex.ArrayDType | None
) -> None:
  """Checks that gradients of `dtype` can be added to an accumulator without a surprise."""
  if not jnp.issubdtype(dtype, jnp.inexact):
    raise TypeError(
      f"{name} has dtype {jnp.dtype(dtype)}; gradients are floating or complex: leave integer"
      " parameters out with optax.masked(accumulate(...), mask)."
    )
  if jnp.issubdtype(dtype, jnp.complexfloating) > jnp.issubdtype(accumulator, jnp.complexfloating):
    raise TypeError(
      f"{name} has dtype {jnp.dtype(dtype)} and its accumulator {jnp.dtype(accumulator)}, which"
      " would lose the imaginary part: give init complex parameters, or give"
      " accumulator_dtype=jnp.complex64."
    )
  if requested is None and jnp.finfo(dtype).bits > jnp.finfo(accumulator).bits:
    raise TypeError(
      f"{name} has dtype {jnp.dtype(dtype)} and its accumulator {jnp.dtype(accumulator)}, which"
      " would round it: give init parameters of that dtype, pass accumulator_dtype, or cast the"
      " gradients."
    )
