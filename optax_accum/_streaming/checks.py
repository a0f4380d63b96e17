"""Checks of a call of `update` or `apply`: of its arguments, and of its state."""

from collections.abc import Callable, Collection, Iterable
import contextvars
import difflib
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np
import optax

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._streaming.state import AccumulateState, states_in

Result = TypeVar("Result")

# For an error only: where a transformation in between drops extra arguments, `accumulate` sees its
# defaults. Each call would count the same, and one that counts nothing would end a cycle.
_sent: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar(
  "sent", default=()
)


def sending(names: Collection[str], step: Callable[[], Result]) -> Result:
  """What `step` returns, which gives these extra arguments to a transformation."""
  context = contextvars.copy_context()
  context.run(_sent.set, names)
  return context.run(step)


def check_arrived(**arrived: bool) -> None:
  """Checks that no transformation around this one dropped what was sent to it."""
  sent = _sent.get()
  if any(name in sent and not there for name, there in arrived.items()):
    raise ValueError(
      "accumulate did not get all that was passed to the optimizer: a transformation around it"
      " drops extra arguments, such as the weight. Let the update of that one take **extra_args and"
      " pass them all on, or put accumulate around it. If it passes weight=1.0, so that every call"
      " counts the same, let it pass weight=jnp.asarray(1.0)."
    )


def check_arguments(
  name: str,
  updates,
  state,
  params,
  extra_args: Iterable[str],
) -> None:
  """Checks that the arguments of a call are in order, and correctly spelled."""
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
  # A misspelled one would go to `inner`, which ignores it.
  for extra in extra_args:
    for word in ("weight", "flush"):
      if _is_near(extra.lower(), word):
        raise TypeError(
          f"{name} got the argument {extra!r}: did you mean {word}=?"
        )


def _is_near(extra: str, word: str) -> bool:
  """Whether `extra` is a misspelled `word`: ``weights``, ``wieght``, ``flush_now``."""
  if extra[:1] != word[0]:
    return False  # `height`, and what is a weight of something: `kl_weight`
  if extra.startswith(("flush", "weight_fn")):
    return True
  likeness = difflib.SequenceMatcher(a=extra, b=word).ratio()
  return extra.rstrip("_").isalpha() and likeness > 0.82


def gradients(updates):
  """The gradients of a call as JAX arrays."""

  def array(path, x):
    if not dtypes.is_inexact(x):
      raise TypeError(
        f"{_validate.leaf_name('updates', path)} is {_kind(x)}; gradients are floating or"
        " complex. Give init, jax.grad and this call the floating parameters alone, and let the"
        " loss put in the others, as in loss({**others, **params}) or, for Equinox, eqx.partition"
        " and eqx.combine: Optax cannot add the float0 gradient of an integer."
      )
    return jnp.asarray(x)

  return jax.tree.map_with_path(array, updates)


def with_gradients(updates, params, arrays_too: bool = False):
  """The parameters, with None for each that has no gradient, such as a function in a model.

  If `arrays_too`, arrays without a gradient stay.
  """

  def kept(g, x):
    if g is None and not (arrays_too and hasattr(x, "dtype")):
      return None
    return x

  try:
    return jax.tree.map(kept, updates, params, is_leaf=lambda x: x is None)
  except ValueError:  # another tree, which the accumulators refuse in words
    return params


def check_state(
  state,
  updates,
  kept,
  every_k: object,
  skips: bool,
) -> None:
  """Checks that `state` is of an accumulation with such an `every_k`, and a `skip_fn` or none.

  `kept` is what such a state keeps of `updates`.
  """
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
  if jax.tree.leaves(state.skip_state) and not skips:
    raise ValueError(
      "state was made with a skip_fn, and this accumulate has none: pass skip_fn, or"
      " state._replace(skip_state=())."
    )
  has = "lacks"
  of = "of"
  accumulated = bool(jax.tree.leaves(state.acc_grads))
  if accumulated:
    has = "has"
    of = "above"
  if jax.tree.leaves(updates) and accumulated != bool(jax.tree.leaves(kept)):
    raise ValueError(
      f"every_k={every_k!r}, and the state {has} an accumulator, because it was made with every_k"
      f" {of} 1: end the cycle with the old every_k and flush=True, and replace acc_grads by that"
      " of a new init."
    )


def check_not_reduced(updates, devices: Devices) -> None:
  """Checks that no gradient was reduced over the devices yet, where the types say so."""
  # Types say which axes a value varies over in shard_map with check_vma=True, and nowhere else.
  # A gradient of zero is no exception: it varies as its parameter does.
  axes = across_devices.varying_axes(devices.varying(jnp.zeros(())))
  for name, leaf in _validate.named_leaves("updates", updates):
    missing = axes - across_devices.varying_axes(leaf)
    if missing:
      raise ValueError(
        f"{name} is the same on all devices of the axes {sorted(missing)}, so it was reduced in"
        " this microbatch (by JAX, if the parameters are the same on all devices), and accumulate"
        " would reduce it again: differentiate with respect to"
        f' jax.lax.pcast(params, {devices.axis_name!r}, to="varying"), and leave lax.pmean out.'
        " Cast gradients that you made yourself, such as zeros, likewise."
      )


def check_whole(params, devices: Devices) -> None:
  """Checks that every device has the whole parameters, where the types say otherwise."""
  axes = across_devices.names_of(devices.axis_name)
  for name, leaf in _validate.named_leaves("params", params):
    if not hasattr(leaf, "dtype"):  # a function in an Equinox model
      continue
    sharded = across_devices.varying_axes(leaf).intersection(axes)
    if sharded:
      raise ValueError(
        f"{name} differs between the devices of the axes {sorted(sharded)}, so it is sharded over"
        " them, and its gradients come summed and scattered: accumulate(axis_name=...) would sum"
        " them again. Take a step of optax_accum.make_train_step(mesh=...), which accumulates"
        " gradients of sharded parameters. If it was cast by jax.lax.pcast to be differentiated,"
        " pass the parameters from before the cast."
      )


def checked_weight(value: ArrayLike, dtype: DTypeLike) -> Weight:
  """A weight in `dtype`. One that is known, and so not zero, is a float."""
  weighted_mean.check_weight("The caller of update", value)
  if isinstance(value, (int, float)) and value != 0:
    return float(value)
  return weighted_mean.as_weight(value).astype(dtype)


def checked_flush(value) -> Flag:
  """A flag that may be traced; a Python bool stays one."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  if getattr(value, "dtype", None) != jnp.bool_ or value.shape != ():
    raise TypeError(
      f"flush={value!r} must be a bool, or a bool scalar array, e.g. `step == last_step`."
    )
  return jnp.asarray(value)


def checked_value(value) -> jax.Array | None:
  """The loss of a call as a float, if it was given."""
  if value is None:
    return None
  dtype = getattr(value, "dtype", type(value))
  is_number = jnp.issubdtype(dtype, jnp.number)
  if np.shape(value) != () or not is_number or jnp.iscomplexobj(value):
    raise ValueError(
      f"value is {_kind(value)}; it must be a real scalar, the loss of this call: accumulate"
      " reduces it as it does the gradients."
    )
  loss = jnp.asarray(value)
  if not jnp.issubdtype(loss.dtype, jnp.floating):
    loss = loss.astype(float)
  return loss


def _kind(x) -> str:
  """What a leaf is: ``int32[3]``, or ``a list``."""
  if hasattr(x, "dtype"):
    return str(jax.typeof(x))
  return f"a {type(x).__name__}"


def checked_info(info, skip_state):
  """The info of `skip_fn`, in the tree and the types of the last call's."""
  different = _validate.difference("skip_state", info, skip_state)
  if different:
    raise ValueError(
      f"skip_fn returned an info in which {different}, because the state was made without skip_fn"
      " or with another one: go on with state._replace(skip_state=tx.init(params).skip_state)."
    )
  return jax.tree.map(lambda x, old: x.astype(old.dtype), info, skip_state)


def check_gradients(updates, acc_grads, requested: DTypeLike | None) -> None:
  """Checks that gradients can be added to the accumulators without a surprise."""
  different = _validate.difference("updates", updates, acc_grads)
  if different:
    raise ValueError(
      f"{different}: updates must have the tree and the shapes of the parameters that init was"
      " given, or that a state was restored of: begin anew with tx.init(params), if they changed."
    )
  named = _validate.named_leaves("updates", updates)
  for (name, leaf), acc in zip(named, jax.tree.leaves(acc_grads), strict=True):
    fault = f"{name} has dtype {leaf.dtype} and its accumulator {acc.dtype}, which would"
    if jnp.iscomplexobj(leaf) and not jnp.iscomplexobj(acc):
      raise TypeError(
        f"{fault} lose the imaginary part: give init complex parameters, or give"
        " accumulator_dtype=jnp.complex64."
      )
    if requested is None and dtypes.promote(leaf.dtype, acc.dtype) != acc.dtype:
      raise TypeError(
        f"{fault} round it: init with such parameters, pass accumulator_dtype, or cast gradients."
        " In a state that was converted or restored, cast the accumulators:"
        " state._replace(acc_grads=optax.tree.cast(state.acc_grads,"
        f" jnp.{dtypes.promote(leaf.dtype, jnp.float32)}))."
      )


def checked_k(value) -> jax.Array:
  """What a schedule of k returned, as an int32 scalar."""
  shape = jnp.shape(value)
  dtype = jnp.result_type(value)
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
