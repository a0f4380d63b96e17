"""`AccumulateState`, the functions of one, and which parts of it each device has for itself."""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
import numpy as np
import optax

from optax_accum import _spellings, _validate
from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.trees import Grads, OptState, Tree

State = TypeVar("State")


class AccumulateState(NamedTuple):
  """The state of `accumulate`. The guide "Checkpoints and resuming" says how to change options.

  `optax.MultiStepsState` has fields of the first five names, with other contents: see
  `from_multi_steps`. With `axis_name`, `acc_grads` and `skip_state` differ between devices, with a
  further first axis: of length 1 on a device, of all devices outside `jax.shard_map`. Save all.

  Attributes:
    mini_step: int32 scalar, the calls so far in this cycle; 0 when it has ended.
    gradient_step: int32 scalar, the steps that `inner` has taken. Never reset.
    inner_opt_state: the state of `inner`. Changes only when a cycle ends with a step.
    acc_grads: pytree like the parameters, in the accumulators' dtypes: the weighted sum of the
      cycle's gradients. Not read while `mini_step` is 0. ``()`` if ``every_k=1``.
    skip_state: the ``info`` that `skip_fn` returned on the last call; ``()`` without it.
    acc_weight: float32 scalar (float64 with x64), the sum of the cycle's weights on all devices.
    has_updated: bool scalar, whether the last call took a step. Always False without parameters.
    weight_rest: float scalar, the rounding error of `acc_weight`, which makes counts exact.
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
  weight_rest: jax.Array | np.ndarray = np.zeros((), np.float32)
  acc_value: jax.Array | np.ndarray = np.zeros((), np.float32)
  value_weight: jax.Array | np.ndarray = np.zeros((), np.float32)


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
    ValueError: `opt_state` holds no `AccumulateState`.
  """
  flags = [
    jnp.asarray(state.has_updated)
    for state in required("has_updated", opt_state)
  ]
  return functools.reduce(jnp.logical_or, flags)


def discard_cycle(opt_state: State) -> State:
  """Drops the gradients that the present cycle has accumulated, so that the cycle starts again.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx, params = optax_accum.accumulate(optax.sgd(1.0), every_k=2), jnp.zeros(2)
    >>> _, state = tx.update(jnp.full(2, 100.0), tx.init(params))
    >>> state = optax_accum.discard_cycle(state)
    >>> int(state.mini_step), float(state.acc_weight)
    (0, 0.0)

  Args:
    opt_state: As in `has_updated`. May be traced.

  Returns:
    `opt_state` with ``mini_step`` and weight 0. Nothing else changes; an `accumulate` in
    ``inner_opt_state`` goes on. ``acc_grads`` is not read again, and may be replaced.

  Raises:
    ValueError: `opt_state` holds no `AccumulateState`.
  """

  def begun_anew(x: Any) -> Any:
    if not is_state(x):
      return x
    names = ("mini_step", "acc_weight", "weight_rest")
    return x._replace(
      **{name: jax.tree.map(jnp.zeros_like, getattr(x, name)) for name in names}
    )

  required("discard_cycle", opt_state)
  return jax.tree.map(begun_anew, opt_state, is_leaf=is_state)


@_spellings.hinted(
  "The weight of a mini step goes by name: from_multi_steps(state, weight=8)."
)
def from_multi_steps(
  state: optax.MultiStepsState,
  *,
  use_grad_mean: bool = True,
  weight: ArrayLike | None = None,
) -> AccumulateState:
  """Converts a state of `optax.MultiSteps` to one of `accumulate`, also in the middle of a cycle.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> old, new = optax.MultiSteps(optax.sgd(1.0), 2), optax_accum.accumulate(optax.sgd(1.0), 2)
    >>> params = jnp.zeros(2)
    >>> _, state = old.update(jnp.array([4.0, 0.0]), old.init(params), params)  # of 16 rows
    >>> state = optax_accum.from_multi_steps(state, weight=16)
    >>> params, state = new.apply(jnp.array([0.0, 4.0]), state, params, weight=48)
    >>> print(params)
    [-1. -3.]

  Args:
    state: What `optax.MultiSteps` returned, or the ``opt_state`` of an `nnx.Optimizer` around it.
      May be traced. The result shares its arrays, so donating one deletes those of the other.
    use_grad_mean: As in `optax.MultiSteps`. False needs an ``accumulate(..., reduction="sum")``.
    weight: How much each earlier call of the cycle counts: a real scalar, possibly traced. Give the
      rows (or tokens) of one if later calls have such weights, else 1. Needed unless it is known
      that there were none. If their rows differed, repeat them, after `discard_cycle`.

  Returns:
    An `AccumulateState` for an `accumulate` of the same `inner` and `skip_fn`, with ``acc_grads``
    in float32 or wider (optax 0.2.8 holds those of float64 parameters in float32: cast them by
    `optax.tree.cast`). ``has_updated`` is True if a cycle has just ended. `optax.MultiSteps` keeps
    no ``value=``, so at the end of a cycle that began there `inner` gets that of the rest. With
    ``every_k=1`` replace ``acc_grads`` by ``()``. With `axis_name`, at the end of a cycle, make a
    new state by init, and copy ``gradient_step`` and ``inner_opt_state`` into it.

  Raises:
    TypeError: `state` is not an `optax.MultiStepsState`, or `weight` is not a number.
    ValueError: `weight` is out of range, not a real scalar, or missing in the middle of a cycle.
  """
  if not isinstance(state, optax.MultiStepsState):
    is_one = lambda x: isinstance(x, optax.MultiStepsState)  # noqa: E731
    within = [
      name
      for name, x in _validate.named_leaves("state", state, is_one)
      if is_one(x)
    ]
    fix = "Restore a checkpoint into the tree that optax.MultiSteps(...).init(params) returns."
    if within:
      fix = f"That is {within[0]}: convert it, and put the result in its place."
    raise TypeError(
      f"from_multi_steps got a {type(state).__name__}; it takes the optax.MultiStepsState itself."
      f" {fix}"
    )
  # The leaves may be boxed, in an nnx.Variable for one: so is what stands in their place.
  own = ("mini_step", "gradient_step", "acc_grads")
  state = state._replace(
    **{x: jax.tree.map(jnp.asarray, getattr(state, x)) for x in own}
  )
  [mini_step], [gradient_step] = map(
    jax.tree.leaves, (state.mini_step, state.gradient_step)
  )
  boxed = functools.partial(
    jax.tree.unflatten, jax.tree.structure(state.mini_step)
  )
  if weight is None:
    traced = isinstance(mini_step, jax.core.Tracer)
    if traced or jnp.any(mini_step != 0):
      raise ValueError(
        f"state.mini_step is {'traced' if traced else mini_step}, so from_multi_steps must know how"
        " much each mini step of the cycle counts: pass weight=rows, the rows (or tokens) of each,"
        " if those that follow are weighed so, and weight=1 if they have no weights."
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
    acc_value=boxed([jnp.zeros((), jnp.result_type(float))]),
    value_weight=boxed([jnp.zeros((), jnp.result_type(float))]),
  )


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

  Raises:
    ValueError: `opt_state` holds no `AccumulateState`, or one that was made without `axis_name`.
  """
  spec = PartitionSpec(
    tuple(axis_name) if isinstance(axis_name, list) else axis_name
  )

  def specs(x: Any) -> Any:
    if not is_state(x):
      return PartitionSpec()
    local = {"acc_grads": x.acc_grads, "skip_state": x.skip_state}
    if shapes := [
      leaf.shape for leaf in jax.tree.leaves(local) if leaf.shape[:1] != (1,)
    ]:
      raise ValueError(
        f"accumulate_specs got accumulators of shapes {shapes}, without an axis of length 1 in"
        " front: pass jax.eval_shape(tx.init, params) of an accumulate with axis_name."
      )
    own = jax.tree.map(lambda _: spec, local)
    return jax.tree.map(lambda _: PartitionSpec(), x)._replace(**own)

  required("accumulate_specs", opt_state)
  return jax.tree.map(specs, opt_state, is_leaf=is_state)


def stored(
  state: AccumulateState, axis_name: AxisName | None
) -> AccumulateState:
  """A device's state as it is kept between calls: an axis of devices before what is its own."""
  acc_grads, skip_state = with_device_axis(
    (state.acc_grads, state.skip_state), axis_name
  )
  if axis_name is not None and across_devices.is_bound(axis_name):
    acc_grads, skip_state = across_devices.varying(
      (acc_grads, skip_state), axis_name
    )
  return state._replace(acc_grads=acc_grads, skip_state=skip_state)


def with_device_axis(tree: Tree, axis_name: AxisName | None) -> Tree:
  """What is a device's own, as it is stored."""
  return (
    tree
    if axis_name is None
    else jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)
  )


def without_device_axis(
  tree: Tree, axis_name: AxisName | None, name: str = "acc_grads"
) -> Tree:
  """What is a device's own, from what was stored."""
  if axis_name is None:
    return tree
  for leaf, x in _validate.named_leaves(name, tree):
    if jnp.shape(x)[:1] != (1,):
      raise ValueError(
        f"{leaf} has shape {jnp.shape(x)} on a device; with axis_name it starts with an axis of"
        " devices, of length 1 on each. In jax.shard_map, run init and update with the specs of"
        " optax_accum.accumulate_specs. Save a state whole, by jax.device_get(state) and not by"
        " flax's unreplicate, and restore it on as many devices."
      )
  return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


def states_in(opt_state: OptState) -> list[AccumulateState]:
  """Every outermost `AccumulateState` in `opt_state`."""
  return [
    x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)
  ]


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
