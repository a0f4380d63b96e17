"""What of an `AccumulateState` is each device's own: stored with an axis of devices in front."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._streaming.state import AccumulateState, is_state, required


def accumulate_specs(opt_state: optax.OptState, axis_name: AxisName) -> Any:
  """The `jax.shard_map` specs of an optimizer state that `accumulate` made.

  What each device accumulates is its own: ``acc_grads`` and ``skip_state`` have an axis of devices
  in front, and the spec ``PartitionSpec(axis_name)``. All else is the same on all devices:
  ``PartitionSpec()``. Use them wherever the state enters or leaves `shard_map`, ``init`` included.
  Axes that `shard_map` leaves to the partitioner are not in them.

  Differentiate each device's own loss, without `lax.pmean`, and with respect to parameters cast
  to varying, as below. Otherwise JAX sums the gradients in every microbatch, or scales them down.

  Args:
    opt_state: ``jax.eval_shape(tx.init, params)`` where `tx` is an `accumulate` with `axis_name`,
      or any pytree that holds such a state: of a `chain`, a train state.
    axis_name: the `axis_name` of `accumulate`: a mesh axis, or a tuple of several.

  Returns:
    A pytree like `opt_state` with a `jax.sharding.PartitionSpec` for each leaf, for ``in_specs``
    and ``out_specs``, with ``check_vma=True`` or ``False``.

  Raises:
    ValueError: there is no `AccumulateState` in `opt_state`, or one that was made without
      `axis_name`.

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
    >>> for _ in range(2):
    ...   params, state = step(params, state, rows)
    ...   print(params)
    [0. 0.]
    [1. 1.]
  """
  axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name

  def specs(x: Any) -> Any:
    if not is_state(x):
      return PartitionSpec()
    local = jax.tree.leaves((x.acc_grads, x.skip_state))
    if shapes := [leaf.shape for leaf in local if leaf.shape[:1] != (1,)]:
      raise ValueError(
        f"accumulate_specs got an AccumulateState whose accumulators have shapes {shapes}, without"
        " an axis of length 1 in front: pass accumulate(..., axis_name=), and here what"
        " jax.eval_shape(tx.init, params) returns."
      )
    same = jax.tree.map(lambda _: PartitionSpec(), x)
    return _map_local(lambda _: PartitionSpec(axis_name), same)

  required("accumulate_specs", opt_state)
  return jax.tree.map(specs, opt_state, is_leaf=is_state)


def stored(state: AccumulateState, axis_name: AxisName | None) -> AccumulateState:
  """A device's state as it is kept between calls: an axis of devices before what is its own."""
  state = _map_local(lambda x: with_device_axis(x, axis_name), state)
  if axis_name is None or not across_devices.is_bound(axis_name):
    return state
  return _map_local(lambda x: across_devices.varying(x, axis_name), state)


def loaded(state: AccumulateState, axis_name: AxisName | None) -> AccumulateState:
  """The state of a device, from the one that was stored."""
  return _map_local(lambda x: without_device_axis(x, axis_name), state)


def with_device_axis(tree: Any, axis_name: AxisName | None) -> Any:
  """What is a device's own, as it is stored."""
  return tree if axis_name is None else jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def without_device_axis(tree: Any, axis_name: AxisName | None) -> Any:
  """What is a device's own, from what was stored."""
  return tree if axis_name is None else jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


def _map_local(fun: Callable[[Any], Any], state: AccumulateState) -> AccumulateState:
  """`state`, with `fun` applied to what `axis_name` leaves to each device."""
  acc_grads, skip_state = jax.tree.map(fun, (state.acc_grads, state.skip_state))
  return state._replace(acc_grads=acc_grads, skip_state=skip_state)
