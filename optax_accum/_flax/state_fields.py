"""The fields of a `TrainState`, as a step takes them."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import TypeAlias

from flax.core import FrozenDict, unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
from flax.training import dynamic_scale, train_state
import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic.trees import Tree
from optax_accum._flax.boxes import without_boxes

Collections: TypeAlias = dict[str, Tree]

_OWN = {field.name for field in dataclasses.fields(train_state.TrainState)}


def check_mutable(mutable: Sequence[str]) -> tuple[str, ...]:
  """The names in `mutable`, of fields that a step may thread through microbatches."""
  names = mutable
  if isinstance(mutable, str):
    names = (mutable,)
  is_list = isinstance(names, (tuple, list))
  if not (is_list and all(isinstance(x, str) and x not in _OWN for x in names)):
    raise TypeError(
      f"mutable={mutable!r} must name collections, fields of the state that are not flax's own, as"
      ' in ("batch_stats",).'
    )
  return tuple(dict.fromkeys(names))


def fields_of(
  state: train_state.TrainState, mutable: tuple[str, ...]
) -> tuple[Collections, Collections, dict[str, Tree]]:
  """The fields that are not flax's own: mutable collections, constant ones, and all others."""
  collections: Collections = {}
  others: Collections = {}
  for field in dataclasses.fields(state):
    name = field.name
    if name in _OWN or not field.metadata.get("pytree_node", True):
      continue
    x = getattr(state, name)
    if isinstance(x, dynamic_scale.DynamicScale):
      raise ValueError(
        f"state.{name} is a DynamicScale, which linen_train_step does not use: take the step by"
        " hand, with scale.value_and_grad(optax_accum.microbatch(loss_fn, ...)), as the guide Half"
        " precision does."
      )
    if isinstance(x, (dict, FrozenDict)):
      collections[name] = x
    else:
      others[name] = x
  for name in mutable:
    if name not in collections:
      raise ValueError(
        f"mutable names {name!r}, and {type(state).__name__} has no such collection: declare"
        f" the field, `class TrainState(train_state.TrainState): {name}: Any`, and pass"
        f" {name}=variables[{name!r}] to create, of model.init. What the state is not to keep,"
        " return as aux."
      )
  carried = {name: collections.pop(name) for name in mutable}
  return carried, collections, others


def as_held(updates, held):
  """What a loss returned, in the trees of the state: flax takes a `FrozenDict` and gives a dict."""
  new = unfreeze(without_boxes(updates))
  old = unfreeze(without_boxes(held))
  different = _validate.difference(
    "updates", new, old, "type", _validate.type_of
  )
  if different:
    raise ValueError(
      f"In what the loss returned, {different}: return the updates that model.apply(...,"
      f" mutable={list(held)!r}) gives, and give create what model.init of the same model gives."
    )
  return jax.tree.unflatten(jax.tree.structure(held), jax.tree.leaves(new))


def counted(step):
  """The step count as an array that is not weakly typed. An int would compile the program twice."""
  dtype = jax.dtypes.result_type(step)
  shape = jnp.shape(step)
  if shape or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
      f"state.step has shape {shape} and dtype {dtype}; it must be one integer, which counts steps."
      " Of a state that is replicated for pmap pass that of one device,"
      " flax.jax_utils.unreplicate(state), and mesh= to linen_train_step."
    )
  if isinstance(step, jax.ShapeDtypeStruct):
    return step.update(weak_type=False)
  return jnp.asarray(step, getattr(step, "dtype", jnp.int32))


def refuse_fp8(params) -> None:
  """Refuses fp8 statistics beside the parameters: a step would average them."""
  if isinstance(params, Mapping) and OVERWRITTEN in params:
    raise TypeError(
      f"state.params has {OVERWRITTEN!r}, fp8 statistics, whose gradients are new values and have"
      " no mean over microbatches: take the step of the whole batch, or train in bfloat16."
    )
