"""What a `TrainState` holds, as a step takes it and as a model is applied to it."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
from typing import Any, TypeAlias

from flax import linen as nn
from flax.core import FrozenDict, unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from optax_accum import _validate

Collections: TypeAlias = dict[str, Any]

_OWN = {field.name for field in dataclasses.fields(train_state.TrainState)}


def check_mutable(mutable: Any) -> tuple[str, ...]:
  """The names in `mutable`, of fields that a step may thread through microbatches."""
  names = (mutable,) if isinstance(mutable, str) else mutable
  if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
    raise TypeError(
      f'mutable={mutable!r} must name collections, fields of the state, as in ("batch_stats",).'
    )
  if own := sorted(_OWN.intersection(names)):
    raise ValueError(
      f"mutable={mutable!r} names {own[0]!r}, which the optimizer's step updates: name collections"
      ' alone, such as "batch_stats".'
    )
  return tuple(dict.fromkeys(names))


def fields_of(
  state: train_state.TrainState, mutable: tuple[str, ...]
) -> tuple[Collections, Collections, dict[str, Any]]:
  """The fields that are not flax's own: mutable collections, constant ones, and all others."""
  kind: Any = type(state)
  for name in mutable:
    if not hasattr(state, name):
      raise ValueError(
        f"mutable names {name!r}, and {kind.__name__} has no such field: declare it, `class"
        f" TrainState(train_state.TrainState): {name}: Any`, and pass {name}= to create. What the"
        " state is not to keep, return as aux."
      )
    if not isinstance(getattr(state, name), (dict, FrozenDict)):
      raise ValueError(
        f"mutable names {name!r}, and state.{name} is {getattr(state, name)!r}, no collection: pass"
        f" {name}=variables[{name!r}] to {kind.__name__}.create, with the variables of model.init."
      )
  rest = {name: getattr(state, name) for name in _added(kind) if name not in mutable}
  constant = {name: x for name, x in rest.items() if isinstance(x, (dict, FrozenDict))}
  others = {name: x for name, x in rest.items() if name not in constant}
  return {name: getattr(state, name) for name in mutable}, constant, others


@functools.cache
def _added(kind: Any) -> tuple[str, ...]:
  fields = dataclasses.fields(kind)
  nodes = [field.name for field in fields if field.metadata.get("pytree_node", True)]
  return tuple(name for name in nodes if name not in _OWN)


def variables_of(params: Any) -> Collections:
  """What a model is applied to: flax keeps what is overwritten beside the parameters."""
  is_split = isinstance(params, Mapping) and OVERWRITTEN in params
  return dict(params) if is_split else {"params": params}


def holds_keys(collection: Any) -> bool:
  """Whether there is a typed key in it."""
  leaves = jax.tree.leaves(collection)
  return any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in leaves)


def check_updates(updates: Any, held: Collections) -> Collections:
  """The collections that a loss returned: those that the state holds, in the same trees."""
  names = tuple(held)
  fix = f"return what model.apply(..., mutable={list(names)!r}) gives"
  if not isinstance(updates, Mapping):
    raise TypeError(
      f"The loss returned a {type(updates).__name__} as the updates of mutable={names!r}: {fix},"
      " as (loss, updates), or with has_aux=True as (loss, (updates, aux))."
    )
  if set(updates) != set(names):
    raise ValueError(
      f"The loss returned the collections {sorted(updates)}, and mutable={names!r}: {fix}. A"
      " collection that the state keeps is named in mutable, and one that it does not is aux."
    )
  return {name: _like(name, updates[name], held[name]) for name in names}


def _like(name: str, new: Any, old: Any) -> Any:
  """A collection in the tree that it had: flax takes a `FrozenDict` and gives a dict."""
  bare = [unfreeze(_map_boxes(lambda box: box.value, x)) for x in (new, old)]
  got, had = (dict(_validate.named_leaves(name, x)) for x in bare)
  for leaf in {**got, **had}:
    if leaf not in had:
      how = f"returned {leaf}, which the state lacks"
    elif leaf not in got:
      how = f"did not return {leaf}, which the state has"
    else:
      kinds = [(jnp.shape(x), jnp.result_type(x)) for x in (got[leaf], had[leaf])]
      if kinds[0] == kinds[1]:
        continue
      after, before = (f"shape {shape} and dtype {dtype}" for shape, dtype in kinds)
      how = f"returned {leaf} of {after}, and the state has it of {before}"
    raise ValueError(
      f"The loss {how}: give create {name}=variables[{name!r}], of the model.init of the model that"
      " the loss applies, in the shapes and dtypes that it is updated in."
    )
  return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(unfreeze(new)))


def counted(step: Any) -> Any:
  """How many steps a state has taken: an array that is not weakly typed, as a step returns it.

  What flax's ``create`` gives, an int, would have the program made twice.
  """
  if not jnp.issubdtype(getattr(step, "dtype", type(step)), jnp.integer):
    raise TypeError(f"state.step is {_called(step)}; it must be an integer: it counts steps.")
  if shape := getattr(step, "shape", ()):
    raise ValueError(
      f"state.step has shape {shape}, as of a state that is replicated for pmap: pass the state of"
      " one device, flax.jax_utils.unreplicate(state), and mesh= to linen_train_step."
    )
  if not getattr(step, "weak_type", True):
    return step
  if isinstance(step, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((), step.dtype, sharding=step.sharding)
  if isinstance(step, int):
    return jnp.asarray(step, jnp.int32)
  return jnp.asarray(step, step.dtype) if isinstance(step, jax.Array) else jnp.asarray(step)


def check_rngs(rngs: Any) -> None:
  """Checks that keys come by name, one for each."""
  fix = 'pass a dict of keys by name, as in rngs={"dropout": jax.random.key(0)}'
  if not isinstance(rngs, Mapping | None):
    raise TypeError(f"rngs is {_called(rngs)}: {fix}.")
  for name, key in (rngs or {}).items():
    if not _is_one_key(key):
      raise TypeError(
        f"rngs[{name!r}] is {_called(key)}, and must be one key, of jax.random.key(seed) or"
        f" jax.random.PRNGKey(seed): {fix}. The step folds it for each microbatch and device."
      )


def _called(x: Any) -> str:
  """A value, as messages call it."""
  if hasattr(x, "dtype") and hasattr(x, "shape"):
    return f"an array of shape {x.shape} and dtype {x.dtype}"
  word = type(x).__name__
  return f"{word} {x!r}" if isinstance(x, (bool, int, float, str)) else f"a {word}"


def _is_one_key(x: Any) -> bool:
  dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
  if dtype is None or shape is None:
    return False
  typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
  return shape == () if typed else dtype == jnp.uint32 and len(shape) == 1


def beside_overwritten(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """`tx`, for parameters beside which flax keeps what is overwritten and not stepped."""

  def init(params: Any) -> Any:
    return tx.init(params["params"])

  def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    value_fn, overwritten, own = extra_args["value_fn"], params[OVERWRITTEN], grads["params"]
    extra_args |= {
      "grad": own,
      "value_fn": lambda params: value_fn({"params": params, OVERWRITTEN: overwritten}),
    }
    updates, state = tx.update(own, state, params["params"], **extra_args)
    changes = jax.tree.map(jnp.subtract, grads[OVERWRITTEN], overwritten)
    return {"params": updates, OVERWRITTEN: changes}, state

  return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def opened_on_device(variables: Collections) -> Iterator[Collections]:
  """Has boxes, in the variables that it yields, and logical axes mean automatic axes alone.

  `jax.shard_map` has made the data axis manual: JAX refuses a constraint that names it, and has
  nothing left to do for it. Boxes keep all of their names, which transforms of layers need.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    yield variables
    return

  def on_device(box: Any) -> Any:
    kind: Any = type(box)
    return _kind_on_device(kind)(**vars(box))

  with nn.logical_axis_rules([(name, _automatic(to)) for name, to in nn.get_logical_axis_rules()]):
    yield _map_boxes(on_device, variables)


@functools.cache
def _kind_on_device(kind: Any) -> Any:
  class OnDevice(kind):
    def unbox(self, apply_constraint: bool = True) -> Any:
      if not apply_constraint or not jax.sharding.get_abstract_mesh().auto_axes:
        return self.value
      logical = isinstance(self, nn.LogicallyPartitioned)
      names: Any = nn.logical_to_mesh_axes(self.names, self.rules) if logical else self.names
      spec = PartitionSpec(*map(_automatic, names))
      return jax.lax.with_sharding_constraint(self.value, spec)

  return OnDevice


def _automatic(axes: Any) -> Any:
  """Those of the axes of one dimension that are left to the compiler here."""
  if not isinstance(axes, (str, tuple)):
    return axes  # None, or what is not constrained
  mesh = jax.sharding.get_abstract_mesh()
  named = (axes,) if isinstance(axes, str) else axes
  taken = {*mesh.manual_axes, *mesh.explicit_axes}
  return tuple(name for name in named if name not in taken) or None


def _map_boxes(fun: Any, tree: Any) -> Any:
  is_box = lambda x: isinstance(x, nn.Partitioned)  # noqa: E731
  return jax.tree.map(lambda x: fun(x) if is_box(x) else x, tree, is_leaf=is_box)
