"""From a state of `optax.MultiSteps` to one of `accumulate`."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_accum import _spellings, _validate
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._streaming.state import AccumulateState, SUMS


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
  _check_is_one(state)
  names = ("mini_step", "gradient_step", "acc_grads")
  own = {name: getattr(state, name) for name in names}
  state = state._replace(**jax.tree.map(jnp.asarray, own))
  [mini_step] = jax.tree.leaves(state.mini_step)
  [gradient_step] = jax.tree.leaves(state.gradient_step)
  if weight is None:
    traced = isinstance(mini_step, jax.core.Tracer)
    if traced or jnp.any(mini_step):
      count = "traced" if traced else mini_step
      raise ValueError(
        f"state.mini_step is {count}, so from_multi_steps must know how much each mini step of the"
        " cycle counts: pass weight=rows, the rows (or tokens) of each, if those that follow are"
        " weighed so, and weight=1 if they have no weights."
      )
    weight = 1.0  # of none
  weighted_mean.check_weight("The caller of from_multi_steps", weight)
  each = weighted_mean.as_weight(weight)
  total = mini_step.astype(each.dtype) * each
  counted = total  # of a mean
  if not use_grad_mean:
    counted = each

  def summed(x):
    dtype = dtypes.accumulator_dtype(x.dtype)
    return weighted_mean.weigh(x, counted, dtype)

  acc_grads = jax.tree.map(summed, state.acc_grads)
  scalars = {name: jnp.zeros((), float) for name in SUMS}
  scalars["acc_weight"] = total
  scalars["has_updated"] = (mini_step == 0) & (gradient_step > 0)
  # The leaves may be boxed, in an nnx.Variable for one: so is what stands beside them.
  box = jax.tree.structure(state.mini_step)
  scalars = {name: jax.tree.unflatten(box, [x]) for name, x in scalars.items()}
  return AccumulateState(
    **state._replace(acc_grads=acc_grads)._asdict(), **scalars
  )


def _check_is_one(state) -> None:
  """Checks that it is a state of `optax.MultiSteps`, and says where there is one if it is not."""

  def is_one(x):
    return isinstance(x, optax.MultiStepsState)

  if is_one(state):
    return
  fix = "Restore a checkpoint into the tree that optax.MultiSteps(...).init(params) returns."
  for name, x in reversed(_validate.named_leaves("state", state, is_one)):
    if is_one(x):
      fix = f"That is {name}: convert it, and put the result in its place."
  raise TypeError(
    f"from_multi_steps got a {type(state).__name__}; it takes the optax.MultiStepsState itself."
    f" {fix}"
  )
