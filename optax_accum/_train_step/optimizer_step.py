"""One step of an optimizer by the gradients of a batch, of which nothing may have counted."""

from collections.abc import Callable, Iterator
import contextlib
import inspect
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.conditional import Flag, update_if
from optax_accum._streaming.cycle import sending
from optax_accum._streaming.inner_state import same_types, updated, widened
from optax_accum._streaming.state import has_updated, is_state, states_in

Held: TypeAlias = tuple[Any, Any]  # parameters and optimizer state


def optimizer_step(
  tx: optax.GradientTransformationExtraArgs,
  grads: Any,
  extra_args: dict[str, Any],
  counted: Flag,
  held: Held,
) -> Held:
  """A step of `tx`. Where nothing was counted, no parameter moves."""

  def update(held: Held) -> Held:
    params, opt_state = held
    accepted = _accepted(tx.update, extra_args)
    sent = () if isinstance(extra_args["weight"], float) else extra_args.keys()

    def step() -> Held:
      with sending(sent), _explicit_axes_named(held):
        updates, new_state = tx.update(grads, opt_state, params, **accepted)
        return optax.apply_updates(params, updates), new_state

    new, new_state = updated("opt_state", tx.init, params, opt_state, step)
    if counted is True:
      return _sharded_as(held, (new, new_state))
    return same_types("params", new, params), same_types("opt_state", new_state, opt_state)

  if counted is True or not states_in(held[1]):
    if counted is not True:  # traced once, for types and for the conditional
      update = jax.jit(update, inline=True)
      held = widened(update, held)
    return update_if(counted, update, held)
  # To `accumulate` a batch of padding is a mini step, which adds nothing and ends no cycle.
  extra_args = {**extra_args, "_may_end": counted}
  new = update(held)
  counted = counted | has_updated(new[1])  # from a jitted `update` that was traced before
  return new if is_state(held[1]) else _all_but_mini_steps(counted, new, held)


def _sharded_as(old: Held, new: Held) -> Held:
  """`new` with the explicit shardings of `old`: JAX gives a sum that of either term."""

  def sharded(x: Any, before: Any) -> Any:
    return across_devices.sharded_like(x, before) if jnp.shape(x) == jnp.shape(before) else x

  trees: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
  if trees[0] != trees[1]:
    return new  # a state that grows
  return jax.tree.map(sharded, new, old)


@contextlib.contextmanager
def _explicit_axes_named(held: Held) -> Iterator[None]:
  """Says of an error about shardings what it comes from: not all optimizers know of such types."""
  try:
    yield
  except Exception as error:
    if type(error).__name__ == "ShardingTypeError":  # JAX has no public name for it
      meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(held)}
      axes = {name for mesh in meshes for name in mesh.explicit_axes}
      error.add_note(
        f"The optimizer computes on parameters and a state that are sharded over {sorted(axes)},"
        " explicit axes of the mesh, where JAX leaves no sharding to the compiler. Over automatic"
        " axes it works: jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,))."
      )
    raise


def _all_but_mini_steps(counted: Flag, new: Held, old: Held) -> Held:
  """`new` where something was counted, and else `old`, but for the states of `accumulate`."""

  def choose(x: Any, before: Any) -> Any:
    if is_state(x):
      return x
    return weighted_mean.select(counted, x, dtypes.in_dtype_of(before, x))

  return jax.tree.map(choose, new, old, is_leaf=is_state)


def _accepted(update: Callable[..., Any], extra_args: dict[str, Any]) -> dict[str, Any]:
  """The extra arguments that `update` takes: some transformations refuse those they do not."""
  parameters = inspect.signature(update).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return extra_args
  return {name: x for name, x in extra_args.items() if name in parameters}
