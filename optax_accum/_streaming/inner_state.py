"""An optimizer's state in an update: it is as `init` makes it, and its types stay, or an error.

The error names the first leaf that differs. JAX's own names neither leaf nor state.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes
from optax_accum._arithmetic.trees import Leaf, OptState, Params, Tree
from optax_accum._streaming.state import is_state, states_in

Held = TypeVar("Held")
Shapes: TypeAlias = dict[str, tuple[int, ...]]

FIX = (
  "it is not as init makes it for these parameters. Restore parameters and state from a checkpoint"
  " of this model and optimizer, or begin with what init(params) returns."
)


def same_types(name: str, new: Tree, old: Tree) -> Tree:
  """`new` in the shardings of `old`, and in dtypes that hold both, as a conditional needs it."""
  if different := _validate.difference(name, new, old):
    raise ValueError(
      f"After an update {different}: the optimizer's init and update must return states of one tree"
      " and the same shapes. (Those of optax.monitor do not, and those of optax.snapshot do.)"
    )
  return jax.tree_util.tree_map_with_path(
    lambda path, x, before: _cast(_validate.leaf_name(name, path), x, before), new, old
  )


def _cast(name: str, new: Leaf, old: Leaf) -> Leaf:
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


def widened(update: Callable[[Held], Held], held: Held) -> Held:
  """`held` in the dtypes in which `update` gives it back, as `same_types`, in every step.

  Moments of bfloat16 parameters become float32 by the first float32 gradients. What goes into a
  conditional is cast before it: rounding what comes out would lose something in each step.
  """
  while True:
    new = jax.eval_shape(update, held)
    wide = jax.tree.map(dtypes.in_dtype_of, held, new)
    if all(x is y for x, y in zip(*map(jax.tree.leaves, (held, wide)), strict=True)):
      return held
    held = wide  # which the next update may make wider: dtypes end at the widest


def updated(
  name: str,
  init: Callable[[Params], OptState],
  params: Params,
  state: OptState,
  update: Callable[[], tuple[Params, OptState]],
) -> tuple[Params, OptState]:
  """What `update` returns: new parameters or their updates, and a state.

  It is an error if it broadcast moments of other parameters to the shapes of these. An error of its
  own says so too if `state` is not as `init` makes it. A state that grows by itself passes.
  """
  try:
    new, new_state = update()
  except Exception as error:
    different = _from_init(name, init, params, state)[0]
    if different and isinstance(error, (TypeError, ValueError, AttributeError)):
      raise ValueError(f"{different}: {FIX}") from error
    if different:  # an optimizer's own error, by which its state may not have to do with it
      error.add_note(f"{different}: {FIX}")
    raise
  moved = _shapes(name, new) != _shapes(name, params)
  before, after = _shapes(name, state), _shapes(name, new_state)
  if moved or before != after:
    different, made = _from_init(name, init, params, state)
    became_as_made = any(
      before.get(leaf, shape) != shape == after.get(leaf) for leaf, shape in made.items()
    )
    if different and (moved or became_as_made):
      raise ValueError(f"{different}: {FIX}")
  return new, new_state


def _from_init(
  name: str, init: Callable[[Params], OptState], params: Params, state: OptState
) -> tuple[str, Shapes]:
  """Where `state` differs from what `init` makes, and the shapes of that."""
  try:
    made = jax.eval_shape(init, params)
  except Exception:  # it fails by itself, or wants values: nothing to compare with
    return "", {}
  if len(states_in(made)) > len(states_in(state)):
    return "", {}  # `accumulate` checks its own
  return _validate.difference(name, _without_own(state), _without_own(made)), _shapes(name, made)


def _shapes(name: str, tree: Tree) -> Shapes:
  return {leaf: jnp.shape(x) for leaf, x in _validate.named_leaves(name, _without_own(tree))}


def _without_own(state: OptState) -> OptState:
  """A state without those of `accumulate` in it."""
  return jax.tree.map(lambda x: None if is_state(x) else x, state, is_leaf=is_state)
