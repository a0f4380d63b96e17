"""Checks that an optimizer's state is as `init` makes it, and that an update keeps its types.

The error names the first leaf that differs. JAX's own names neither leaf nor state.
"""

from collections.abc import Callable
import operator
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes
from optax_accum._arithmetic.trees import OptState, Params
from optax_accum._streaming.state import is_state, states_in

_EXPLICIT = (
  "The optimizer cannot compute over explicit axes of a mesh. Over automatic axes it works:"
  " jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)."
)
_ON_HOST = (
  "The optimizer's state is in the host's memory, and the optimizer computes on the device: wrap"
  " that, optax_accum.state_on_host(tx), or put the state there, jax.device_put(opt_state,"
  " jax.memory.Space.Device)."
)


def same_types(name: str, new, old):
  """`new` in the shardings of `old`, and in dtypes that hold both, as a conditional needs it."""
  different = _validate.difference(name, new, old)
  if different:
    raise ValueError(
      f"After an update {different}: the optimizer's init and update must return states of one tree"
      " and the same shapes. (optax.monitor's do not: use optax.snapshot.)"
    )

  def cast(path, x, before):
    was = jnp.result_type(before)
    now = jnp.result_type(x)
    if was != now:
      extended = jax.dtypes.extended
      if jnp.issubdtype(was, extended) or jnp.issubdtype(now, extended):
        raise TypeError(
          f"{_validate.leaf_name(name, path)} has dtype {was}, and {now} after an update: have the"
          " optimizer's init return that there."
        )
      x = jnp.asarray(x).astype(dtypes.promote(was, now))
    return across_devices.sharded_like(x, before)

  return jax.tree.map_with_path(cast, new, old)


def widened(update: Callable[..., Any], operand):
  """`operand` in the dtypes in which `update` returns it, such as float32 moments of bfloat16."""
  # Cast before the conditional: rounding its results would lose bits in each step.
  like = jax.eval_shape(update, operand)
  wide = jax.tree.map(dtypes.in_dtype_of, operand, like)
  if jax.tree.all(jax.tree.map(operator.is_, operand, wide)):
    return operand
  # What the next update makes may be wider: the widest ends it.
  return widened(update, wide)


def updated(
  name: str,
  init: Callable[[Params], OptState],
  params,
  state,
  update: Callable[[], tuple[Params, OptState]],
  may_grow: bool = False,
) -> tuple[Params, OptState]:
  """What `update` returns: new parameters or their updates, and a state of the same types.

  If it `may_grow`, a state that an update fills, as that of optax.monitor, is returned as it is.
  Raises if moments of other parameters were broadcast to the shapes of these. If `update` raises,
  and `state` is not as `init` makes it, the error says so.
  """

  def check_made(error=None):
    """Checks that `state` is as `init` makes it, where that may have caused an `error`."""
    try:
      made = jax.eval_shape(init, params)
    except Exception:  # it fails by itself, or wants values
      return
    different = _difference(name, state, made)
    if different and len(states_in(made)) <= len(states_in(state)):
      raise ValueError(
        f"{different}: the state is not as init makes it for these parameters. Restore both from a"
        " checkpoint of this model and optimizer, or begin with what init(params) returns."
      ) from error

  try:
    new, new_state = update()
  except Exception as error:
    note = ""
    # JAX has no public name for it.
    if type(error).__name__ == "ShardingTypeError":
      note = _EXPLICIT
    elif "memory_space" in str(error) and _is_on_host(state):
      note = _ON_HOST
    else:
      check_made(error)
    if note and note not in getattr(error, "__notes__", ()):
      error.add_note(note)
    raise
  if _difference(name, new, params) or _difference(name, new_state, state):
    check_made()
  if may_grow and _validate.difference(name, new_state, state):
    return new, new_state
  return new, same_types(name, new_state, state)


def _is_on_host(tree) -> bool:
  """Whether some of a tree is in the host's memory."""
  host = jax.memory.Space.Host
  return any(jax.typeof(x).memory_space == host for x in jax.tree.leaves(tree))


def _difference(name: str, got, wanted) -> str:
  """Where trees differ, without the states of `accumulate` in them, which checks its own."""

  def without(x):
    if is_state(x):
      return None
    return x

  got = jax.tree.map(without, got, is_leaf=is_state)
  wanted = jax.tree.map(without, wanted, is_leaf=is_state)
  return _validate.difference(name, got, wanted)
