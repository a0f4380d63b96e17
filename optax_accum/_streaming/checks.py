"""Checks of a call of `update` or `apply`: the order and names of its arguments, and its state."""

from collections.abc import Iterable
import difflib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.trees import (
  Grads,
  Kwargs,
  Leaf,
  OptState,
  Params,
  Path,
  Tree,
)
from optax_accum._streaming.state import AccumulateState, states_in


def checked(
  name: str,
  updates: Grads,
  state: OptState,
  params: Params,
  extra_args: Iterable[str],
) -> tuple[Grads, Params]:
  """What a call is given, if its arguments are in order and correctly spelled.

  The gradients are JAX arrays. Parameters without one, as functions in an Equinox model, are None;
  `update` lets `inner` see arrays.
  """
  if updates is None:
    raise ValueError(
      f"{name} got updates=None. To end a cycle without further gradients, give zeros that do not"
      " count: optax.tree.zeros_like(params), with weight=0.0 and flush=True."
    )
  for argument, value in (("updates", updates), ("params", params)):
    if isinstance(value, AccumulateState):
      raise ValueError(
        f"{name} got an AccumulateState as {argument}, and a {type(state).__name__} as state: the"
        f" order is {name}(updates, state, params)."
      )
  for (
    extra
  ) in extra_args:  # a misspelled one would go to `inner`, which ignores it
    for word in ("weight", "flush"):
      if _is_near(extra.lower(), word):
        raise TypeError(
          f"{name} got the argument {extra!r}: did you mean {word}=?"
        )

  def array(path: Path, x: Leaf) -> jax.Array:
    if not dtypes.is_inexact(x):
      kind = jax.typeof(x) if hasattr(x, "dtype") else f"a {type(x).__name__}"
      raise TypeError(
        f"{_validate.leaf_name('updates', path)} is {kind}; gradients are floating or"
        " complex. Give init, jax.grad and this call the floating parameters alone, and let the"
        " loss put in the others, as in loss({**others, **params}) or, for Equinox, eqx.partition"
        " and eqx.combine: Optax cannot add the float0 gradient of an integer."
      )
    return jnp.asarray(x)

  seen = with_gradients(updates, params, arrays_too=name == "update")
  return jax.tree.map_with_path(array, updates), seen


def with_gradients(
  updates: Grads, params: Params, arrays_too: bool = False
) -> Params:
  """Parameters with None for those without a gradient, or without one that are no arrays."""

  def kept(g: Leaf, x: Leaf) -> Leaf:
    is_kept = g is not None or (arrays_too and hasattr(x, "dtype"))
    return x if is_kept else None

  if params is None:
    return None
  try:
    return jax.tree.map(kept, updates, params, is_leaf=lambda x: x is None)
  except ValueError:  # another tree, which the accumulators refuse in words
    return params


def _is_near(extra: str, word: str) -> bool:
  """Whether `extra` is a misspelled `word`: ``weights``, ``wieght``, ``flush_now``."""
  if extra[:1] != word[0]:
    return False  # `height`, and what is a weight of something: `kl_weight`
  if extra.startswith(("flush", "weight_fn")):
    return True
  return (
    extra.rstrip("_").isalpha()
    and difflib.SequenceMatcher(a=extra, b=word).ratio() > 0.82
  )


def check_state(
  state: OptState, updates: Grads, every_k: object, skips: bool
) -> None:
  """Checks that `state` is of an accumulation with such an `every_k`, and a `skip_fn` or none."""
  if not isinstance(state, AccumulateState):
    fix = (
      "pass what init or update of this transformation returned, and restore a checkpoint into the"
      " tree that init returns, e.g. by flax.serialization.from_state_dict(tx.init(params), state)."
    )
    if states_in(state):
      fix = "there is one in it. Call the transformation of the whole state, such as a chain."
    if isinstance(state, optax.MultiStepsState):
      fix = "convert it with optax_accum.from_multi_steps(state, weight=rows)."
    raise ValueError(
      f"state is a {type(state).__name__} and not an AccumulateState: {fix}"
    )
  if not skips and jax.tree.leaves(state.skip_state):
    raise ValueError(
      "state was made with a skip_fn, and this accumulate has none: pass skip_fn, or"
      " state._replace(skip_state=())."
    )
  has = bool(jax.tree.leaves(state.acc_grads))
  if jax.tree.leaves(updates) and has != (every_k != 1):
    raise ValueError(
      f"every_k={every_k!r}, and the state {'has' if has else 'lacks'} an accumulator, because it"
      f" was made with every_k {'above' if has else 'of'} 1: end the cycle with the old every_k and"
      " flush=True, and replace acc_grads by that of a new init."
    )


def check_not_reduced(updates: Grads, axis_name: AxisName) -> None:
  """Checks that no gradient was reduced over the devices yet, where the types say so."""
  across_devices.check_bound(axis_name)
  # Types say which axes a value varies over in shard_map with check_vma=True, and nowhere else.
  # A gradient of zero is no exception: it varies as its parameter does.
  known = across_devices.varying_axes(
    across_devices.varying(jnp.zeros(()), axis_name)
  )
  for name, leaf in _validate.named_leaves("updates", updates):
    if missing := known.difference(across_devices.varying_axes(leaf)):
      raise ValueError(
        f"{name} is the same on all devices of the axes {sorted(missing)}, so it was reduced in"
        " this microbatch (by JAX, if the parameters are the same on all devices), and accumulate"
        " would reduce it again: differentiate with respect to"
        f' jax.lax.pcast(params, {axis_name!r}, to="varying"), and leave lax.pmean out. Cast'
        " gradients that you made yourself, such as zeros, likewise."
      )


def check_whole(params: Params, axis_name: AxisName) -> None:
  """Checks that every device has the whole parameters, where the types say otherwise."""
  axes = set(across_devices.names_of(axis_name))
  for name, leaf in _validate.named_leaves("params", params):
    if not hasattr(leaf, "dtype"):  # a function in an Equinox model
      continue
    differ = axes.intersection(across_devices.varying_axes(leaf))
    if differ:
      raise ValueError(
        f"{name} differs between the devices of the axes {sorted(differ)}, so it is sharded over"
        " them, and its gradients come summed and scattered: accumulate(axis_name=...) would sum"
        " them again. Take a step of optax_accum.make_train_step(mesh=...), which accumulates"
        " gradients of sharded parameters. If it was cast by jax.lax.pcast to be differentiated,"
        " pass the parameters from before the cast."
      )


def checked_value(extra_args: Kwargs) -> jax.Array | None:
  """The loss of a call as a float, if it was given."""
  if extra_args.get("value") is None:
    return None
  given = extra_args["value"]
  kind = getattr(given, "dtype", type(given))
  is_real = jnp.issubdtype(kind, jnp.number) and not jnp.issubdtype(
    kind, jnp.complexfloating
  )
  if np.shape(given) != () or not is_real:
    what = (
      jax.typeof(given) if hasattr(given, "dtype") else f"a {kind.__name__}"
    )
    raise ValueError(
      f"value is {what}; it must be a real scalar, the loss of this call: accumulate reduces it as"
      " it does the gradients."
    )
  value = jnp.asarray(given)
  return (
    value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)
  )


def check_info(info: Tree, skip_state: Tree) -> None:
  """Checks that the info of `skip_fn` has the tree and the shapes of the last call's."""
  if different := _validate.difference("skip_state", info, skip_state):
    raise ValueError(
      f"skip_fn returned an info in which {different}, because the state was made without skip_fn"
      " or with another one: go on with state._replace(skip_state=tx.init(params).skip_state)."
    )


def check_gradients(
  updates: Grads, acc_grads: Grads, requested: DTypeLike | None
) -> None:
  """Checks that gradients can be added to the accumulators without a surprise."""
  if different := _validate.difference("updates", updates, acc_grads):
    raise ValueError(
      f"{different}: updates must have the tree and the shapes of the parameters that init was"
      " given, or that a state was restored of: begin anew with tx.init(params), if they changed."
    )
  accs = jax.tree.leaves(acc_grads)
  for (name, leaf), acc in zip(
    _validate.named_leaves("updates", updates), accs, strict=True
  ):
    fault = f"{name} has dtype {leaf.dtype} and its accumulator {acc.dtype}, which would"
    if jnp.iscomplexobj(leaf) and not jnp.iscomplexobj(acc):
      raise TypeError(
        f"{fault} lose the imaginary part: give init complex parameters, or give"
        " accumulator_dtype=jnp.complex64."
      )
    wide = dtypes.promote(leaf.dtype, jnp.float32)
    if requested is None and dtypes.promote(leaf.dtype, acc.dtype) != acc.dtype:
      raise TypeError(
        f"{fault} round it: init with such parameters, pass accumulator_dtype, or cast gradients."
        " In a state that was converted or restored, cast the accumulators:"
        f" state._replace(acc_grads=optax.tree.cast(state.acc_grads, jnp.{wide}))."
      )


def checked_k(value: Leaf) -> jax.Array:
  """What a schedule of k returned, as an int32 scalar."""
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if shape != () or not jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
      f"The schedule every_k returned a value of shape {shape} and dtype {dtype}; it must be an"
      " integer scalar: cast it, e.g. `lambda step: jnp.asarray(schedule(step)).astype(jnp.int32)`."
    )
  if not isinstance(value, jax.core.Tracer) and value < 1:
    raise ValueError(
      f"The schedule every_k returned {value}; it must return 1 or more."
    )
  return jnp.asarray(value).astype(jnp.int32)


def checked_flush(value: Leaf) -> Flag:
  """A flag that may be traced; a Python bool stays one."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  if getattr(value, "dtype", None) != jnp.bool_ or value.shape != ():
    raise TypeError(
      f"flush={value!r} must be a bool, or a bool scalar array, e.g. `step == last_step`."
    )
  return jnp.asarray(value)
