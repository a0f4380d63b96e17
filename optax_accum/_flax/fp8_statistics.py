"""What flax keeps next to the parameters, to be overwritten by its "gradients" and not stepped."""

from collections.abc import Mapping
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic.trees import Tree
from optax_accum._streaming.calls import ValueOfOneCall


def variables_of(params) -> dict[str, Tree]:
  """What a model is applied to, of what a state has for its parameters."""
  if isinstance(params, Mapping) and OVERWRITTEN in params:
    return dict(params)
  return {"params": params}


def beside_overwritten(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """`tx`, for parameters that have it beside them."""

  def init(params):
    return tx.init(params["params"])

  def update(grads, state, params=None, **extra_args):
    own = grads["params"]
    overwritten = params[OVERWRITTEN]
    value_of_all: Any = extra_args.get("value_fn")

    def value_fn(params):
      return value_of_all({"params": params, OVERWRITTEN: overwritten})

    # In the place of those that are given: some have been left out, which `tx` refuses.
    instead = {"grad": own, "value_fn": ValueOfOneCall(value_fn)}
    extra_args = {name: instead.get(name, x) for name, x in extra_args.items()}
    updates, state = tx.update(own, state, params["params"], **extra_args)
    # A "gradient" is the new value. An update is added to the old one.
    changes = jax.tree.map(jnp.subtract, grads[OVERWRITTEN], overwritten)
    return {"params": updates, OVERWRITTEN: changes}, state

  return optax.GradientTransformationExtraArgs(init, update)
