"""An optimizer's state in an update: it is as `init` makes it, and its types stay, or an error.

The error names the first leaf that differs. JAX's own names neither leaf nor state.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes
from optax_accum._streaming.state import is_state, states_in

Carry = TypeVar("Carry")
Init: TypeAlias = Callable[[Any], Any]

FIX = (
  "it is the state of other parameters, or of another optimizer. Restore parameters and state"
  " from a checkpoint of this model and optimizer, or begin with what init(params) returns."
)
FAILED = object()
# What JAX, Optax and Python say where a state lacks a leaf, or has one of another shape.
OF_SHAPES_AND_TREES = (TypeError, ValueError, AttributeError)


def difference(
  name: str, got: Any, wanted: Any, *, missing: str, shape: str, new: str, tree: str
) -> str:
  """In these words, with ``{leaf}``, ``{got}``, ``{wanted}``: where trees first differ, or ""."""
  gots, wanteds = (dict(_validate.named_leaves(name, x)) for x in (got, wanted))
  for leaf, x in wanteds.items():
    shapes = {"got": jnp.shape(gots.get(leaf, x)), "wanted": jnp.shape(x)}
    if leaf not in gots:
      return missing.format(leaf=leaf, **shapes)
    if shapes["got"] != shapes["wanted"]:
      return shape.format(leaf=leaf, **shapes)
  for leaf in gots:
    if leaf not in wanteds:
      return new.format(leaf=leaf)
  trees: list[Any] = [jax.tree.structure(x) for x in (got, wanted)]
  return "" if trees[0] == trees[1] else tree.format(leaf=name, got=trees[0], wanted=trees[1])


def same_types(name: str, new: Any, old: Any) -> Any:
  """`new` in the shardings of `old`, and in dtypes that hold both, as a conditional needs it."""
  fix = "the optimizer's init and update must return states of one tree and the same shapes."
  if different := difference(
    name,
    new,
    old,
    missing=f"{{leaf}} is missing after an update: {fix}",
    shape=f"{{leaf}} has shape {{wanted}}, and {{got}} after an update: {fix}",
    new=f"{{leaf}} is new after an update: {fix} (That of optax.monitor does not: optax.snapshot"
    " keeps what it measures from the start.)",
    tree=f"{{leaf}} is a {{wanted}}, and a {{got}} after an update: {fix}",
  ):
    raise ValueError(different)
  return jax.tree_util.tree_map_with_path(
    lambda path, x, before: _cast(_validate.leaf_name(name, path), x, before), new, old
  )


def _cast(name: str, new: Any, old: Any) -> Any:
  """One leaf in the sharding that it had, and a dtype that holds it before and after."""
  before, after = jnp.result_type(old), jnp.result_type(new)
  if before == after:
    return across_devices.sharded_like(new, old)
  if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in (before, after)):
    raise TypeError(
      f"{name} has dtype {before}, and {after} after an update: have the optimizer's init return"
      f" {after} there."
    )
  to = dtypes.promote(before, after)
  return across_devices.sharded_like(jnp.asarray(new).astype(to), old)


def widened(update: Callable[[Carry], Carry], carry: Carry) -> Carry:
  """`carry` in the dtypes in which `update` gives it back, as `same_types`, in every step.

  Moments of bfloat16 parameters become float32 by the first float32 gradients. What goes into a
  conditional is cast before it: rounding what comes out would lose something in each step.
  """
  while True:
    new = jax.eval_shape(update, carry)
    wide = jax.tree.map(dtypes.in_dtype_of, carry, new)
    if all(x is y for x, y in zip(*map(jax.tree.leaves, (carry, wide)), strict=True)):
      return carry
    carry = wide  # which the next update may make wider: dtypes end at the widest


@contextlib.contextmanager
def explained(name: str, init: Init, params: optax.Params, state: optax.OptState) -> Iterator[None]:
  """Says of an error that `state` is not as `init` makes it for these parameters, if it is not."""
  try:
    yield
  except Exception as error:
    different = _from_init(name, _made(init, params), state)
    if different and isinstance(error, OF_SHAPES_AND_TREES):
      raise ValueError(f"{different}: {FIX}") from error
    if different:  # an optimizer's own error, by which its state may not have to do with it
      error.add_note(f"{different}. If it was restored: {FIX}")
    raise


def check_kept(
  name: str,
  init: Init,
  params: optax.Params,
  state: optax.OptState,
  new_params: optax.Params,
  new_state: optax.OptState,
) -> None:
  """Checks that an update did not broadcast moments of other parameters to the shapes of these.

  A state that grows by itself passes: it does not become what `init` makes.
  """
  if _shapes((new_params, new_state)) == _shapes((params, state)):
    return
  made = _made(init, params)
  if made is FAILED:
    return
  wanted, before, after = (
    dict(_validate.named_leaves(name, _without_own(x))) for x in (made, state, new_state)
  )
  moved = _shapes(new_params) != _shapes(params)
  became_as_made = any(
    jnp.shape(before[leaf]) != jnp.shape(after[leaf]) == x.shape
    for leaf, x in wanted.items()
    if leaf in before and leaf in after
  )
  different = _from_init(name, made, state)
  if different and (moved or became_as_made):
    raise ValueError(f"{different}. If it was restored: {FIX}")


def _shapes(tree: Any) -> Any:
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [jnp.shape(x) for x in leaves]


def _made(init: Init, params: optax.Params) -> Any:
  """The types of what `init` makes."""
  try:
    return jax.eval_shape(init, params)
  except Exception:  # it fails by itself, or wants values: nothing to compare with
    return FAILED


def _from_init(name: str, made: Any, state: optax.OptState) -> str:
  """Where `state` differs from what was made. `accumulate` checks its own."""
  if made is FAILED or len(states_in(made)) > len(states_in(state)):
    return ""
  return difference(
    name,
    _without_own(state),
    _without_own(made),
    missing="{leaf} is missing, and init makes it, of shape {wanted}",
    shape="{leaf} has shape {got}, and init makes it of shape {wanted}",
    new="{leaf} is there, and init makes no such leaf",
    tree="{leaf} is a {got}, and init makes a {wanted}",
  )


def _without_own(state: optax.OptState) -> Any:
  """A state without those of `accumulate` in it."""
  return jax.tree.map(lambda x: None if is_state(x) else x, state, is_leaf=is_state)
