"""Checks of a call of `update` or `apply`: of its arguments, and of its state."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.trees import masked_like, OptState, Params
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._streaming.state import AccumulateState


def gradients(updates):
  """The gradients of a call as JAX arrays."""

  def array(path, x):
    if not dtypes.is_inexact(x):
      raise TypeError(
        f"{_validate.leaf_name('updates', path)} is {jax.typeof(x)}; gradients are floating or"
        " complex. Give init, jax.grad and this call the floating parameters alone, and let the"
        " loss put in the others, as in loss({**others, **params}), or by eqx.combine."
      )
    return jnp.asarray(x)

  return jax.tree.map_with_path(array, updates)


def with_gradients(updates, params):
  """The parameters, with None for each that has no gradient, such as a function in a model."""
  try:
    return masked_like(updates, params)
  except ValueError:
    # No parameters, or another tree, which `check_accumulators` refuses in words.
    return params


def check_is_state(state) -> None:
  """Checks that a state is one of `accumulate`."""
  if not isinstance(state, AccumulateState):
    raise ValueError(
      f"state is a {type(state).__name__} and not an AccumulateState: pass what init or update of"
      " this transformation (or of the chain that it is in) returned, and restore a checkpoint into"
      " the tree that init returns, e.g. by flax.serialization.from_state_dict(tx.init(params),"
      " state). Of an optax.MultiStepsState, at the end of a cycle, put inner_opt_state and"
      " gradient_step into that: tx.init(params)._replace(...)."
    )


def check_accumulators(kept, acc_grads) -> None:
  """Checks that a state has the accumulators of what is `kept` of such gradients."""
  different = _validate.difference("updates", kept, acc_grads)
  if different:
    raise ValueError(
      f"{different}: updates must have the tree and the shapes of the parameters that init was"
      " given, or that a state was restored of: begin anew with tx.init(params), if they changed."
      " With every_k=1 there are no accumulators: from or to that, end the cycle with flush=True,"
      " and replace acc_grads by that of a new init."
    )


def check_made(
  init: Callable[[Params], OptState], params, state, error: Exception
) -> None:
  """Checks that `state` is as the optimizer's `init` makes it, where its update raised an error."""
  try:
    made = jax.eval_shape(init, params)
  except Exception:  # init itself fails, or needs arrays and not shapes
    return
  different = _validate.difference("inner_opt_state", state, made)
  if different:
    raise ValueError(
      f"{different}: the state is not as init makes it for these parameters. Restore both from a"
      " checkpoint of this model and optimizer, or begin with what init(params) returns."
    ) from error


def check_not_reduced(updates, devices: Devices) -> None:
  """Checks that no gradient was reduced over the devices yet, where the types say so."""
  # Types say which axes a value varies over in shard_map with check_vma=True, and nowhere else.
  # A gradient of zero is no exception: it varies as its parameter does.
  varying = devices.varying(jnp.zeros(()))
  axes = across_devices.varying_axes(varying)
  for name, leaf in _validate.named_leaves("updates", updates):
    missing = axes - across_devices.varying_axes(leaf)
    if missing:
      raise ValueError(
        f"{name} is the same on all devices of the axes {sorted(missing)}, so it was reduced in"
        " this microbatch (by JAX, if the parameters are the same on all devices), and accumulate"
        " would reduce it again: differentiate with respect to"
        f' jax.lax.pcast(params, {devices.axis_name!r}, to="varying"), and leave lax.pmean out.'
      )


def check_whole(params, devices: Devices) -> None:
  """Checks that every device has the whole parameters, where the types say otherwise."""
  axes = across_devices.names_of(devices.axis_name)
  for name, leaf in _validate.named_leaves("params", params):
    sharded = across_devices.varying_axes(leaf).intersection(axes)
    if sharded:
      raise ValueError(
        f"{name} differs between the devices of the axes {sorted(sharded)}, so it is sharded over"
        " them, and its gradients come summed and scattered: accumulate(axis_name=...) would sum"
        " them again. Use optax_accum.make_train_step(mesh=...), or, where jax.lax.pcast cast them,"
        " pass the parameters from before the cast."
      )


def checked_weight(value: ArrayLike, dtype: DTypeLike) -> Weight:
  """A weight in `dtype`; but a Python number other than 0 is a float, so that tracing knows it."""
  weighted_mean.check_weight("The caller of update", value)
  # A 0 becomes an array, so a weight that tracing knows is never 0.
  if isinstance(value, (int, float)) and value != 0:
    return float(value)
  return weighted_mean.as_weight(value).astype(dtype)


def checked_value(value) -> jax.Array | None:
  """The loss of a call as a float, if it was given."""
  if value is None:
    return None
  loss = jnp.asarray(value)
  if not jnp.issubdtype(loss.dtype, jnp.floating):
    loss = loss.astype(float)
  return loss


def checked_info(info, skip_state):
  """The info of `skip_fn`, in the tree and the types of the last call's."""
  different = _validate.difference("skip_state", info, skip_state)
  if different:
    raise ValueError(
      f"Of what skip_fn returned, {different}: the state was made with another skip_fn, or with or"
      " without one. Go on with state._replace(skip_state=tx.init(params).skip_state)."
    )
  return jax.tree.map(lambda x, old: x.astype(old.dtype), info, skip_state)
