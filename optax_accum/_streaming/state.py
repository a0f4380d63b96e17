"""`AccumulateState`, what is done with one, and what of it is each device's own."""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
import numpy as np
import optax

from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.trees import Grads, OptState, Tree

State = TypeVar("State")


class AccumulateState(NamedTuple):
  """State of `accumulate`; the first five fields have the names of `optax.MultiStepsState`'s.

  Their contents differ: `from_multi_steps` converts such a state. The site's page on checkpoints
  has what to do where `every_k`, `skip_fn`, `accumulator_dtype` or the devices are others.

  With `axis_name`, `acc_grads` and `skip_state` are each device's own. They have an axis in front:
  of length 1 on a device, and of all devices outside `jax.shard_map`. Save such a state whole, e.g.
  ``jax.device_get(state)``: ``flax.jax_utils.unreplicate`` keeps one device's gradients alone.

  Attributes:
    mini_step: int32 scalar, the mini steps so far in this cycle; 0 when it has ended.
    gradient_step: int32 scalar, the steps that `inner` has taken. Never reset.
    inner_opt_state: the state of `inner`. Changes only when a cycle emits.
    acc_grads: pytree like the parameters, in the accumulators' dtypes: the weighted sum of the
      cycle's gradients so far. Never read while `mini_step` is 0. ``()`` if ``every_k=1``.
    skip_state: the ``info`` that `skip_fn` returned on the last call; ``()`` without it.
    acc_weight: float32 scalar (float64 where x64 is enabled), the sum of the cycle's weights
      so far, over all devices. 0 after the last mini step of a cycle.
    has_updated: bool scalar, whether the last call emitted.
    weight_rest: float scalar, what rounding took from `acc_weight`: with it, counts are exact.
  """

  mini_step: jax.Array
  gradient_step: jax.Array
  inner_opt_state: optax.OptState
  acc_grads: Grads
  skip_state: Tree
  acc_weight: jax.Array
  has_updated: jax.Array
  weight_rest: jax.Array | np.ndarray = np.zeros((), np.float32)


def has_updated(opt_state: optax.OptState) -> jax.Array:
  """Whether the last call ended a cycle with a step: the flag `has_updated`, found in any state.

  Args:
    opt_state: the state of `accumulate`, or any pytree that holds one: of a `chain`, a train state.

  Returns:
    A bool scalar. With several accumulations side by side, whether any of them emitted.

  Raises:
    ValueError: there is no `AccumulateState` in `opt_state`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx = optax.chain(optax_accum.accumulate(optax.sgd(0.1), every_k=2), optax.scale(1.0))
    >>> state = tx.init(jnp.ones(3))
    >>> for _ in range(3):
    ...   updates, state = tx.update(jnp.ones(3), state)
    ...   print(optax_accum.has_updated(state))
    False
    True
    False
  """
  flags = [jnp.asarray(state.has_updated) for state in required("has_updated", opt_state)]
  return functools.reduce(jnp.logical_or, flags)


def discard_cycle(opt_state: State) -> State:
  """The state with its present cycle begun anew: what was accumulated is dropped.

  Args:
    opt_state: as `has_updated` takes it. May be traced.

  Returns:
    `opt_state`, in which ``mini_step`` and the cycle's weight are 0. Nothing else changes: what an
    `accumulate` within ``inner_opt_state`` has added up stays. ``acc_grads`` is not read again, so
    those of a new init may stand in its place.

  Raises:
    ValueError: there is no `AccumulateState` in `opt_state`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx, params = optax_accum.accumulate(optax.sgd(1.0), every_k=2), jnp.zeros(2)
    >>> _, state = tx.update(jnp.full(2, 100.0), tx.init(params))
    >>> state = optax_accum.discard_cycle(state)
    >>> for _ in range(2):
    ...   params, state = tx.apply(jnp.ones(2), state, params)
    >>> print(params)
    [-1. -1.]
  """

  def begun_anew(x: Any) -> Any:
    if not is_state(x):
      return x
    names = ("mini_step", "acc_weight", "weight_rest")
    return x._replace(**{name: jax.tree.map(jnp.zeros_like, getattr(x, name)) for name in names})

  required("discard_cycle", opt_state)
  return jax.tree.map(begun_anew, opt_state, is_leaf=is_state)


def from_multi_steps(
  state: optax.MultiStepsState, *, use_grad_mean: bool = True, weight: ArrayLike | None = None
) -> AccumulateState:
  """The state of `accumulate` that goes on where `optax.MultiSteps` stopped, in mid-cycle too.

  Each mini step before has the same `weight`. If those microbatches were uneven, their mean is
  wrong already: use `discard_cycle`, and the last ``state.mini_step`` microbatches once more. Build
  ``accumulate`` around the same `inner` and `skip_fn`. The result shares arrays with `state`, which
  are gone when it is donated. See the site's page on coming from `optax.MultiSteps`.

  Args:
    state: what `optax.MultiSteps` returned, or the ``opt_state`` of an `nnx.Optimizer` around it.
      May be traced.
    use_grad_mean: as it was given to `optax.MultiSteps`. With False, `state` holds a sum, which
      ``accumulate(..., reduction="sum")`` goes on with.
    weight: how much each of the mini steps before counts: a real scalar, may be traced. Where the
      loop goes on with rows or tokens as weights, those of each microbatch before; else 1. Needed
      unless ``state.mini_step`` is known to be 0.

  Returns:
    An `AccumulateState`, with ``acc_grads`` in float32 or better. (For those of float64 parameters,
    which optax 0.2.8 holds in float32, ``state._replace(acc_grads=optax.tree.cast(state.acc_grads,
    jnp.float64))``.) ``has_updated`` is True where a cycle has just ended. With ``every_k=1``
    replace ``acc_grads`` by ``()``. With `axis_name` take over the end of a cycle alone: a new
    init, with ``gradient_step`` and ``inner_opt_state`` replaced.

  Raises:
    TypeError: `state` is not an `optax.MultiStepsState`, or `weight` no number.
    ValueError: `weight` is negative, out of range or no real scalar, or is missing in mid-cycle.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> old, new = optax.MultiSteps(optax.sgd(1.0), 2), optax_accum.accumulate(optax.sgd(1.0), 2)
    >>> params = jnp.zeros(2)
    >>> _, state = old.update(jnp.array([4.0, 0.0]), old.init(params), params)  # of 16 rows
    >>> state = optax_accum.from_multi_steps(state, weight=16)
    >>> params, state = new.apply(jnp.array([0.0, 4.0]), state, params, weight=48)
    >>> print(params)
    [-1. -3.]
  """
  if not isinstance(state, optax.MultiStepsState):
    raise TypeError(
      f"from_multi_steps got a {type(state).__name__}; it takes the optax.MultiStepsState itself,"
      " also where that is part of a larger state. Restore a checkpoint into the tree that"
      " optax.MultiSteps(...).init(params) returns."
    )
  # The leaves may be boxed, in an nnx.Variable for one: so is what stands in their place.
  own = ("mini_step", "gradient_step", "acc_grads")
  state = state._replace(**{x: jax.tree.map(jnp.asarray, getattr(state, x)) for x in own})
  [mini_step], [gradient_step] = map(jax.tree.leaves, (state.mini_step, state.gradient_step))
  boxed = functools.partial(jax.tree.unflatten, jax.tree.structure(state.mini_step))
  if weight is None:
    traced = isinstance(mini_step, jax.core.Tracer)
    if traced or jnp.any(mini_step != 0):
      where = "is traced" if traced else f"is {mini_step}"
      raise ValueError(
        f"state.mini_step {where}, so from_multi_steps must know how much each mini step of the"
        " cycle counts: pass weight=rows, the rows (or tokens) of each, if those that follow are"
        " weighed so, and weight=1 if they have no weights."
      )
    weight = 1.0  # of none
  weighted_mean.check_weight("The caller of from_multi_steps", weight)
  each = weighted_mean.as_weight(weight)
  total = mini_step.astype(each.dtype) * each
  counted = total if use_grad_mean else each

  def summed(x: jax.Array) -> jax.Array:
    return weighted_mean.weigh(x, counted, dtypes.accumulator_dtype(x.dtype))

  return AccumulateState(
    **state._replace(acc_grads=jax.tree.map(summed, state.acc_grads))._asdict(),
    acc_weight=boxed([total]),
    has_updated=boxed([(mini_step == 0) & (gradient_step > 0)]),
    weight_rest=boxed([jnp.zeros((), jnp.result_type(float))]),
  )


def accumulate_specs(opt_state: optax.OptState, axis_name: AxisName) -> Tree:
  """The `jax.shard_map` specs of an optimizer state that `accumulate` made.

  Use them wherever the state enters or leaves `shard_map`, ``init`` included: ``acc_grads`` and
  ``skip_state`` are each device's own. Differentiate each device's own loss with respect to
  parameters cast to varying, as below: else JAX sums the gradients in every microbatch.

  Args:
    opt_state: ``jax.eval_shape(tx.init, params)``, of an `accumulate` with `axis_name` or of what
      holds one.
    axis_name: the `axis_name` of `accumulate`: a mesh axis, or a tuple of several.

  Returns:
    A pytree like `opt_state` with a `jax.sharding.PartitionSpec` for each leaf, for ``in_specs``
    and ``out_specs``. Axes that `shard_map` leaves to the partitioner are not in them.

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
  spec = PartitionSpec(tuple(axis_name) if isinstance(axis_name, list) else axis_name)

  def specs(x: Any) -> Any:
    if not is_state(x):
      return PartitionSpec()
    local = {"acc_grads": x.acc_grads, "skip_state": x.skip_state}
    if shapes := [leaf.shape for leaf in jax.tree.leaves(local) if leaf.shape[:1] != (1,)]:
      raise ValueError(
        f"accumulate_specs got an AccumulateState whose accumulators have shapes {shapes}, without"
        " an axis of length 1 in front: pass jax.eval_shape(tx.init, params) of an accumulate with"
        " axis_name."
      )
    own = jax.tree.map(lambda _: spec, local)
    return jax.tree.map(lambda _: PartitionSpec(), x)._replace(**own)

  required("accumulate_specs", opt_state)
  return jax.tree.map(specs, opt_state, is_leaf=is_state)


def stored(state: AccumulateState, axis_name: AxisName | None) -> AccumulateState:
  """A device's state as it is kept between calls: an axis of devices before what is its own."""
  own = with_device_axis((state.acc_grads, state.skip_state), axis_name)
  if axis_name is not None and across_devices.is_bound(axis_name):
    own = across_devices.varying(own, axis_name)
  return state._replace(acc_grads=own[0], skip_state=own[1])


def with_device_axis(tree: Tree, axis_name: AxisName | None) -> Tree:
  """What is a device's own, as it is stored."""
  return tree if axis_name is None else jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def without_device_axis(tree: Tree, axis_name: AxisName | None) -> Tree:
  """What is a device's own, from what was stored."""
  return tree if axis_name is None else jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


def states_in(opt_state: OptState) -> list[AccumulateState]:
  """Every outermost `AccumulateState` in `opt_state`."""
  return [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]


def required(name: str, opt_state: OptState) -> list[AccumulateState]:
  """As `states_in`, and at least one."""
  states = states_in(opt_state)
  if not states:
    raise ValueError(
      f"{name} got a {type(opt_state).__name__} without an AccumulateState in it: pass the"
      " optimizer state that a transformation built with `accumulate` returned."
    )
  return states


def is_state(x: object) -> bool:
  """Whether `x` is a state of `accumulate`."""
  return isinstance(x, AccumulateState)
