"""One step of an optimizer by the gradients of a batch, and `value_fn`, for its line search."""

from collections.abc import Callable
import functools
import inspect
import re
import traceback
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _scopes
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.conditional import Flag, update_if
from optax_accum._arithmetic.trees import (
  Args,
  Grads,
  Kwargs,
  Leaf,
  OptState,
  Params,
  Tree,
)
from optax_accum._streaming.cycle import sending
from optax_accum._streaming.inner_state import same_types, updated, widened
from optax_accum._streaming.state import (
  AccumulateState,
  has_updated,
  is_state,
  states_in,
)
from optax_accum._validate import named_leaves

Held: TypeAlias = tuple[Params, OptState]  # parameters and optimizer state
_OVERWRITTEN = (
  "_overwrite_with_gradient"  # flax's collection of what no optimizer steps
)
_Zero = jax.custom_derivatives.SymbolicZero


@jax.named_scope(_scopes.WHOLE_CYCLE)
def optimizer_step(
  tx: optax.GradientTransformationExtraArgs,
  grads: Grads,
  extra_args: Kwargs,
  counted: Flag,
  held: Held,
) -> tuple[Params, tuple[OptState, jax.Array]]:
  """A step of `tx`, and whether it took one. Where nothing was counted, no parameter moves."""

  def update(held: Held, **more: Flag) -> Held:
    params, (opt_state, _) = held
    given = {**extra_args, **more}
    # A weight that is a float says that there are none, so nothing is lost where it is dropped.
    sent = () if isinstance(extra_args["weight"], float) else set(given)

    step = functools.partial(
      _updated, tx.update, (grads, opt_state, params), given
    )
    run = functools.partial(sending, sent, step)
    # The branches of a conditional have the same types, so only without one may a state grow.
    updates, new_state = updated(
      "opt_state", tx.init, params, opt_state, run, may_grow=counted is True
    )
    new = same_types("params", optax.apply_updates(params, updates), params)
    return new, (new_state, _has_stepped(opt_state, new_state, updates))

  accumulates = is_state(held[1])
  held = held[0], (held[1], jnp.zeros((), jnp.bool_))
  if counted is True or not states_in(held[1]):
    if counted is not True:  # traced once, for types and for the conditional
      update = jax.jit(update, inline=True)
      held = widened(update, held)
    return update_if(counted, update, held, _scopes.END_OF_CYCLE)
  # To `accumulate` a batch of padding is a mini step, which adds nothing and ends no cycle.
  new = update(held, _may_end=counted)
  counted = counted | has_updated(
    new[1]
  )  # from a jitted `update` that was traced before
  return new if accumulates else _all_but_mini_steps(counted, new, held)


def _all_but_mini_steps(counted: Flag, new: Held, old: Held) -> Held:
  """`new` where something was counted, and else `old`, but for the states of `accumulate`."""

  def choose(x: Leaf, before: Leaf) -> Leaf:
    if is_state(x):
      return x
    return weighted_mean.select(counted, x, dtypes.in_dtype_of(before, x))

  return jax.tree.map(choose, new, old, is_leaf=is_state)


def _updated(
  update: Callable[..., Held], args: Args, extra_args: Kwargs
) -> Held:
  """What `update` returns, without the extra arguments that it, or what it wraps, refuses."""
  parameters = inspect.signature(update).parameters
  if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return update(
      *args, **{name: x for name, x in extra_args.items() if name in parameters}
    )
  extra_args = dict(extra_args)
  while True:
    try:
      return update(*args, **extra_args)
    except TypeError as error:  # a signature does not tell what a chain wraps: its own takes all
      refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
      *_, (caller, _) = traceback.walk_tb(error.__traceback__)
      is_wrapper = caller.f_globals["__name__"].startswith(
        ("optax.", "optax_accum.")
      )
      if refused is None or refused[1] not in extra_args or not is_wrapper:
        raise
      del extra_args[refused[1]]


# What may leave all as it is: the states of wrappers, each with that of what it wraps.
_GATES = AccumulateState, optax.MultiStepsState, optax.ApplyIfFiniteState


def _has_stepped(
  before: OptState, after: OptState, updates: Grads
) -> jax.Array:
  """Whether the optimizer took a step, which one that accumulates does once a cycle."""
  stepped = _have_stepped(before, after)
  rejects = lambda x: isinstance(x, optax.ApplyIfFiniteState)  # noqa: E731
  if any(map(rejects, jax.tree.leaves(after, is_leaf=rejects))):
    # Its state does not tell whether it gave up, and applied what is not finite, nor whether the
    # optimizer of other parameters took a step.
    moved = [
      jnp.any(x != 0)
      for name, x in named_leaves("", updates)
      if _OVERWRITTEN not in name
    ]
    stepped = functools.reduce(jnp.logical_or, moved, stepped)
  return stepped


def _have_stepped(before: OptState, after: OptState) -> jax.Array:
  """Whether one of these wrappers let a step pass, or there is none."""
  is_gate = lambda x: isinstance(x, _GATES)  # noqa: E731
  states = (
    filter(is_gate, jax.tree.leaves(x, is_leaf=is_gate))
    for x in (before, after)
  )
  passed = list(map(_has_passed, *states))
  return jnp.any(jnp.stack(passed)) if passed else jnp.bool_(True)


def _has_passed(before: OptState, after: OptState) -> jax.Array:
  """Whether such a wrapper, and those within it, let a step pass."""
  if isinstance(after, optax.ApplyIfFiniteState):
    return after.last_finite & _have_stepped(
      before.inner_state, after.inner_state
    )
  has_leaves = getattr(
    after, "has_updated", bool(jax.tree.leaves(after.acc_grads))
  )
  counted = (after.gradient_step != before.gradient_step) & has_leaves
  return counted & _have_stepped(before.inner_opt_state, after.inner_opt_state)


def loss_elsewhere(
  loss: Any,
  weights: Tree,
  args: Args,
  kwargs: Kwargs,
  params: Params,
  weight: Leaf = None,
) -> jax.Array:
  """The loss of this batch at other parameters, over the microbatches that counted at the present.

  Its derivative is computed in microbatches. JAX's own would keep the intermediate values of all,
  and is NaN where a microbatch of weight 0 is 0/0.
  """
  del weight  # optax's line searches refuse an extra argument that this lacks

  @jax.custom_jvp
  def value(params: Params, held: Tree) -> jax.Array:
    weights, args, kwargs = held
    return loss.value(weights, params, *args, **kwargs)

  @functools.partial(value.defjvp, symbolic_zeros=True)
  def value_and_tangent(
    primals: Args, tangents: Args
  ) -> tuple[jax.Array, jax.Array]:
    (params, held), (params_moved, held_moved) = primals, tangents
    weights, args, kwargs = held
    out = loss.value_and_grad(weights, params, *args, **kwargs).outputs
    tangent = jnp.zeros_like(out.loss)
    if moves := _instantiated(params_moved):
      terms = jax.tree.map(
        _real_product, *map(loss.local.derivatives, (out.grads, *moves))
      )
      tangent = jnp.asarray(sum(jax.tree.leaves(terms)), out.loss.dtype)
    if moves := _instantiated(
      held_moved
    ):  # of the step itself, which a user differentiates
      tangent += jax.jvp(functools.partial(value.fun, params), (held,), moves)[
        1
      ]
    return out.loss, tangent

  return value(params, (weights, args, kwargs))


def _instantiated(tangents: Tree) -> Args:
  """The tangents as arrays, in a tuple that is empty where all are known to be zero."""

  def array(x: Leaf) -> Leaf:
    if not isinstance(x, _Zero):
      return x
    return (np if x.dtype == jax.dtypes.float0 else jnp).zeros(x.shape, x.dtype)

  known = all(isinstance(x, _Zero) for x in jax.tree.leaves(tangents))
  return () if known else (jax.tree.map(array, tangents),)


def _real_product(grad: jax.Array, tangent: jax.Array) -> jax.Array:
  """What a tangent changes, by the gradient of a real function, in float32 or better."""
  wide = dtypes.accumulator_dtype(grad.dtype)
  return jnp.sum(jnp.real(grad.astype(wide) * tangent.astype(wide)))
