"""`AccumulateState`, the functions of one, and which parts of it each device has for itself."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.trees import Grads, Tree

# In states that are made without such fields.
_ZERO: Any = np.zeros((), np.float32)


class AccumulateState(NamedTuple):
  """The state of `accumulate`. The guide "Checkpoints and resuming" says how to change options.

  `optax.MultiStepsState` has fields of the first five names; its `acc_grads` is a mean. With
  `axis_name`, `acc_grads` and `skip_state` differ between devices, with a further first axis: of
  length 1 on a device, of all devices outside `jax.shard_map`. Save all.

  Attributes:
    mini_step: int32 scalar, the calls so far in this cycle; 0 when it has ended.
    gradient_step: int32 scalar, the steps that `inner` has taken. Never reset.
    inner_opt_state: the state of `inner`. Changes only when a cycle ends with a step.
    acc_grads: pytree like the parameters, in the accumulators' dtypes: the weighted sum of the
      cycle's gradients. Not read while `mini_step` is 0. ``()`` if ``every_k=1``.
    skip_state: the ``info`` that `skip_fn` returned on the last call; ``()`` without it.
    acc_weight: float32 scalar (float64 with x64), the sum of the cycle's weights on all devices.
    has_updated: bool scalar, whether the last call took a step. Always False without parameters.
    acc_value: float scalar like `acc_weight`, the weighted sum of the cycle's ``value=`` on all
      devices; 0 if ``every_k=1`` or none is given.
    value_weight: float scalar like `acc_weight`, the sum of the weights of the calls with a value.
  """

  mini_step: jax.Array
  gradient_step: jax.Array
  inner_opt_state: optax.OptState
  acc_grads: Grads
  skip_state: Tree
  acc_weight: jax.Array
  has_updated: jax.Array
  acc_value: jax.Array = _ZERO
  value_weight: jax.Array = _ZERO


# The float scalars, which are zero between cycles.
SUMS = ("acc_weight", "acc_value", "value_weight")


def has_updated(opt_state: optax.OptState) -> jax.Array:
  """Whether the last call of an `accumulate` took a step: the flag of that name in its state.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx = optax.chain(optax_accum.accumulate(optax.sgd(0.1), every_k=2), optax.scale(1.0))
    >>> _, once = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    >>> _, twice = tx.update(jnp.ones(3), once)
    >>> bool(optax_accum.has_updated(once)), bool(optax_accum.has_updated(twice))
    (False, True)

  Args:
    opt_state: A pytree that holds states of `accumulate`, such as that of an `optax.chain`.

  Returns:
    A bool scalar. If there are several states, it says whether any with parameters took a step.

  Raises:
    TypeError: `opt_state` holds no `AccumulateState`.
  """
  flags = [jnp.asarray(state.has_updated) for state in states_in(opt_state)]
  # Without a flag, `reduce` raises the TypeError.
  return functools.reduce(jnp.logical_or, flags)


def accumulate_specs(opt_state: optax.OptState, axis_name: AxisName) -> Tree:
  """The `jax.shard_map` specs of an optimizer state that `accumulate` made.

  They go wherever the state enters or leaves `shard_map`, also for ``init``. Differentiate by
  parameters that are cast to varying, as here: else JAX sums gradients in every microbatch.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_accum
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    >>> tx = optax_accum.accumulate(optax.sgd(1.0), every_k=2, axis_name="data")
    >>> params, rows = jnp.zeros(2), jnp.ones((len(jax.devices()), 2))
    >>> specs = optax_accum.accumulate_specs(jax.eval_shape(tx.init, params), "data")
    >>> state = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)(params)
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    ... def step(params, state, rows):
    ...   local = jax.lax.pcast(params, "data", to="varying")
    ...   grads = jax.grad(lambda params: jnp.mean((params - rows) ** 2))(local)
    ...   return tx.apply(grads, state, params)
    >>> params, state = step(*step(params, state, rows), rows)
    >>> print(params)
    [1. 1.]

  Args:
    opt_state: ``jax.eval_shape(tx.init, params)``, where ``tx`` is or holds an `accumulate`.
    axis_name: The `axis_name` of `accumulate`: a mesh axis, or a tuple of several.

  Returns:
    A pytree like `opt_state` with a `jax.sharding.PartitionSpec` for each leaf.
  """
  over_devices = PartitionSpec(across_devices.names_of(axis_name))

  def specs(x):
    if not is_state(x):
      return PartitionSpec()
    of_device = jax.tree.map(lambda _: over_devices, _of_device(x))
    # All else is the same on all devices.
    same = jax.tree.map(lambda _: PartitionSpec(), x)
    return same._replace(**of_device)

  return jax.tree.map(specs, opt_state, is_leaf=is_state)


def _of_device(state: AccumulateState) -> dict[str, Tree]:
  """What each device has for itself."""
  return {"acc_grads": state.acc_grads, "skip_state": state.skip_state}


def stored(state: AccumulateState, devices: Devices) -> AccumulateState:
  """A device's state as it is kept between calls."""
  return state._replace(**devices.stored(_of_device(state)))


def own(state: AccumulateState, devices: Devices) -> AccumulateState:
  """A device's state, of what is kept between calls."""
  return state._replace(**devices.own(_of_device(state)))


def states_in(opt_state) -> list[AccumulateState]:
  """Every outermost `AccumulateState` in `opt_state`."""
  states = jax.tree.leaves(opt_state, is_leaf=is_state)
  return list(filter(is_state, states))


def is_state(x: object) -> bool:
  """Whether `x` is a state of `accumulate`."""
  return isinstance(x, AccumulateState)
