"""The program that a step of a `TrainState` runs, and what is stepped in it and counted."""

from collections.abc import Callable, Mapping
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate
from optax_accum._flax.state_fields import variables_of
from optax_accum._microbatches import parameters
from optax_accum._streaming.state import AccumulateState
from optax_accum._train_step.program import StepProgram


class StateProgram(StepProgram):
  """A `StepProgram` of the parts of a `TrainState`.

  Its arguments are the parameters, the optimizer state, the batch, collections that are constant,
  keys, the mutable collections if there are any, and how many steps the optimizer took. It returns
  the first two anew, the mutable collections, the number of steps, and the metrics.
  """

  def function(self, loss: Any) -> Callable[..., Any]:
    """What is compiled."""
    run = super().function(loss)

    def linen_train_step(params: Any, opt_state: Any, /, *args: Any) -> tuple[Any, ...]:
      *others, count = args
      *new, metrics = run(params, opt_state, *others)
      stepped = (metrics["total_weight"] != 0) & has_stepped(opt_state, new[1])
      return *new, count + stepped.astype(count.dtype), metrics

    return linen_train_step

  def check(self, *args: Any) -> None:
    """Checks arguments that are not what the last call returned."""
    parameters.check_differentiable("state.params", args[0])

  def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, by the names that messages have for them."""
    params, opt_state, batch, constant, rngs, *mutable, count = args
    named = {"params": params, "opt_state": opt_state, "step": count, **constant}
    for collections in mutable:
      named.update(collections)
    return {f"state.{name}": x for name, x in named.items()} | {"batch": batch, "rngs": rngs}


def has_stepped(before: Any, after: Any) -> jax.Array:
  """Whether the optimizer took a step, which one that accumulates does once a cycle."""
  states = (AccumulateState, optax.MultiStepsState)

  def counts(opt_state: Any) -> list[Any]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, states))
    return [x.gradient_step for x in leaves if isinstance(x, states)]

  moved = [a != b for a, b in zip(counts(before), counts(after), strict=True)]
  return jnp.any(jnp.stack(moved)) if moved else jnp.bool_(True)


def of_parameters(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`tx`, for parameters beside which flax may keep what is overwritten and not stepped."""
  _validate.transformation(tx, "state.tx")
  tx = optax.with_extra_args_support(tx)

  def init(params: Any) -> Any:
    return tx.init(variables_of(params)["params"])

  def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    stepped, own = variables_of(params)["params"], variables_of(grads)["params"]
    if stepped is params:
      return tx.update(grads, state, params, **extra_args)
    value_fn, overwritten = extra_args["value_fn"], params[OVERWRITTEN]
    extra_args |= {
      "grad": own,
      "value_fn": lambda params: value_fn({"params": params, OVERWRITTEN: overwritten}),
    }
    updates, state = tx.update(own, state, stepped, **extra_args)
    changes = jax.tree.map(jnp.subtract, grads[OVERWRITTEN], overwritten)
    return {"params": updates, OVERWRITTEN: changes}, state

  return optax.GradientTransformationExtraArgs(init, update)
