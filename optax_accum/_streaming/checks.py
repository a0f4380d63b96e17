"""Checks of a call of `update` or `apply`: its arguments in order, their names, and its state."""

from collections.abc import Iterable
import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _validate
from optax_accum._streaming.state import AccumulateState, states_in

RESTORE = (
  "restore a checkpoint into the tree that init returns, e.g. with"
  " flax.serialization.from_state_dict(tx.init(params), restored), or with that tree as the target"
  " of orbax's StandardRestore."
)


def checked(name: str, updates: Any, state: Any, params: Any, extra_args: Iterable[str]) -> Any:
  """The gradients of a call, as arrays, if its arguments are in order and well spelt."""
  _check_order(name, updates, state, params)
  _check_keywords(name, extra_args)
  return _as_arrays(updates)


def _check_order(name: str, updates: Any, state: Any, params: Any) -> None:
  """Checks that the state is the second argument of ``name(updates, state, params)``."""
  for argument, value in (("updates", updates), ("params", params)):
    if isinstance(value, AccumulateState):
      raise ValueError(
        f"{name} got an AccumulateState as {argument}, and a {type(state).__name__} as state: the"
        f" order is {name}(updates, state, params)."
      )


def _check_keywords(name: str, extra_args: Iterable[str]) -> None:
  """Checks that no argument for `inner` is a misspelt one of ours, which would be ignored."""
  for extra in extra_args:
    words = [word for word in ("weight", "flush") if _is_near(extra.lower(), word)]
    if words:
      raise TypeError(f"{name} got the argument {extra!r}: did you mean {words[0]}=?")


def _is_near(extra: str, word: str) -> bool:
  """Whether `extra` is `word` with a slip or an ending: ``weights``, ``wieght``, ``flush_now``."""
  if extra[:1] != word[0]:
    return False  # `height`, and what is a weight of something: `kl_weight`
  if extra.startswith(("flush", "weight_fn")):
    return True
  return extra.rstrip("_").isalpha() and difflib.SequenceMatcher(a=extra, b=word).ratio() > 0.82


def _as_arrays(updates: optax.Updates) -> optax.Updates:
  """Gradients as JAX arrays, of which Python and NumPy numbers become some."""

  def converted(x: Any) -> Any:
    # Gradients of integers have a dtype that only NumPy has.
    keep = isinstance(x, jax.Array) or getattr(x, "dtype", None) == jax.dtypes.float0
    return x if keep else jnp.asarray(x)

  for name, leaf in _validate.named_leaves("updates", updates):
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
      raise TypeError(f"{name} is a {type(leaf).__name__}: gradients are arrays, or numbers.")
  return jax.tree.map(converted, updates)


def check_state(state: Any, skips: bool) -> None:
  """Checks that `state` is that of an accumulation, with a `skip_fn` or without."""
  if not isinstance(state, AccumulateState):
    raise ValueError(f"state is a {type(state).__name__} and not an AccumulateState: {_fix(state)}")
  if not skips and jax.tree.leaves(state.skip_state):
    raise ValueError(
      "state has a skip_state, because it was made with a skip_fn, and this accumulate has none:"
      " pass skip_fn, or drop it with state._replace(skip_state=())."
    )


def check_device_axis(state: AccumulateState, updates: optax.Updates) -> None:
  """Checks that what is each device's own has an axis of devices, of which a device has one."""
  acc_grads, skip_state = (
    _validate.named_leaves(name, getattr(state, name)) for name in ("acc_grads", "skip_state")
  )
  # An accumulator whose own first axis is 1 long may have lost the devices' too.
  gone = [
    name
    for (name, acc), g in zip(acc_grads, jax.tree.leaves(updates), strict=False)
    if jnp.ndim(acc) <= jnp.ndim(g)
  ]
  for name, leaf in acc_grads + skip_state:
    if name in gone or jnp.shape(leaf)[:1] != (1,):
      raise ValueError(
        f"{name} has shape {jnp.shape(leaf)} on a device; with axis_name it starts with an axis of"
        " devices, of length 1 on each, as init makes it. In jax.shard_map, run init and update"
        " with the specs of optax_accum.accumulate_specs. Restore a state on as many devices as it"
        " was saved from (for others see AccumulateState), and save it whole, e.g. by"
        " jax.device_get(state): flax's unreplicate drops that axis, and the gradients of all"
        " devices but one."
      )


def check_info(info: Any, skip_state: Any) -> None:
  """Checks that what `skip_fn` returned as its info goes where the last call's is."""
  trees: list[Any] = [jax.tree.structure(info), jax.tree.structure(skip_state)]
  if trees[0] != trees[1]:
    raise ValueError(
      f"skip_fn returned an info of {trees[0]}, and the state's skip_state is {trees[1]}, because"
      " it was made without skip_fn or with another: go on with"
      " state._replace(skip_state=tx.init(params).skip_state), with axis_name from an init in"
      " shard_map."
    )


def _fix(state: Any) -> str:
  """What to do about a state that is no `AccumulateState`."""
  if isinstance(state, optax.MultiStepsState):
    return (
      "convert it with optax_accum.from_multi_steps(state, weight=rows), the rows of each"
      " microbatch so far, or weight=1 where the calls that follow have no weights."
    )
  if states_in(state):
    return (
      "there is one in it. Call the transformation that the whole belongs to, such as the chain"
      " around this accumulate."
    )
  fields = AccumulateState._fields
  needed = set(fields).difference(AccumulateState._field_defaults)  # an older one lacks the others
  restored = isinstance(state, dict) and needed <= set(state)
  if isinstance(state, str):  # a chain took one key of the dict that it was given
    restored = True
  if restored or (type(state) in (list, tuple) and len(needed) <= len(state) <= len(fields)):
    return "it looks like one that was saved and restored without its types; " + RESTORE
  return "pass what init of this transformation returned, or its last update."
