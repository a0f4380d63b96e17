"""What a `TrainState` holds, as a step takes it and as a model is applied to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, TypeAlias

from flax import linen as nn
from flax.core import FrozenDict, unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
from flax.training import dynamic_scale, train_state
import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Grads, Leaf, OptState, Params, Tree
from optax_accum._streaming.cycle import ValueOfOneCall

Collections: TypeAlias = dict[str, Tree]

_OWN = {field.name for field in dataclasses.fields(train_state.TrainState)}


def check_mutable(mutable: Sequence[str]) -> tuple[str, ...]:
  """The names in `mutable`, of fields that a step may thread through microbatches."""
  names = (mutable,) if isinstance(mutable, str) else mutable
  is_list = isinstance(names, (tuple, list)) and all(
    isinstance(name, str) for name in names
  )
  if not is_list or not _OWN.isdisjoint(names):
    raise TypeError(
      f"mutable={mutable!r} must name collections, fields of the state that are not flax's own, as"
      ' in ("batch_stats",).'
    )
  return tuple(dict.fromkeys(names))


def fields_of(
  state: train_state.TrainState, mutable: tuple[str, ...]
) -> tuple[Collections, Collections, dict[str, Tree]]:
  """The fields that are not flax's own: mutable collections, constant ones, and all others."""
  added = (
    field for field in dataclasses.fields(state) if field.name not in _OWN
  )
  nodes = [
    field.name for field in added if field.metadata.get("pytree_node", True)
  ]
  others = {name: getattr(state, name) for name in nodes}
  for name, x in others.items():
    if isinstance(x, dynamic_scale.DynamicScale):
      raise ValueError(
        f"state.{name} is a DynamicScale, which linen_train_step does not use: take the step by"
        " hand, with scale.value_and_grad(optax_accum.microbatch(loss_fn, ...)), as the guide Half"
        " precision does."
      )
  constant = {
    n: others.pop(n) for n in nodes if isinstance(others[n], (dict, FrozenDict))
  }
  if missing := [name for name in mutable if name not in constant]:
    raise ValueError(
      f"mutable names {missing[0]!r}, and {type(state).__name__} has no such collection: declare"
      f" the field, `class TrainState(train_state.TrainState): {missing[0]}: Any`, and pass"
      f" {missing[0]}=variables[{missing[0]!r}] to create, of model.init. What the state is not to"
      " keep, return as aux."
    )
  return {name: constant.pop(name) for name in mutable}, constant, others


def variables_of(params: Params) -> Collections:
  """What a model is applied to: flax keeps what is overwritten next to the parameters."""
  is_split = isinstance(params, Mapping) and OVERWRITTEN in params
  return dict(params) if is_split else {"params": params}


def as_held(updates: Collections, held: Collections) -> Collections:
  """What a loss returned, in the trees of the state: flax takes a `FrozenDict` and gives a dict."""
  new, old = (
    unfreeze(_map_boxes(lambda box: box.value, tree))
    for tree in (updates, held)
  )
  if different := _validate.difference(
    "updates", new, old, "type", _validate.type_of
  ):
    raise ValueError(
      f"In what the loss returned, {different}: return the updates that model.apply(...,"
      f" mutable={list(held)!r}) gives, and give create what model.init of the same model gives."
    )
  return jax.tree.unflatten(jax.tree.structure(held), jax.tree.leaves(new))


def counted(step: Leaf) -> Leaf:
  """The step count as an array that is not weakly typed. An int would compile the program twice."""
  dtype, shape = jax.dtypes.result_type(step), jnp.shape(step)
  if shape or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
      f"state.step has shape {shape} and dtype {dtype}; it must be one integer, which counts steps."
      " Of a state that is replicated for pmap pass that of one device,"
      " flax.jax_utils.unreplicate(state), and mesh= to linen_train_step."
    )
  if isinstance(step, jax.ShapeDtypeStruct):
    return step.update(weak_type=False)
  return jnp.asarray(step, getattr(step, "dtype", jnp.int32))


def beside_overwritten(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """`tx`, for parameters next to which flax keeps what is overwritten and not stepped."""

  def update(
    grads: Grads, state: OptState, params: Params = None, **extra_args: Any
  ) -> Any:
    elsewhere: Any = extra_args.get(
      "value_fn"
    )  # left out if a transformation in `tx` refuses it
    overwritten, own = params[OVERWRITTEN], grads["params"]

    def whole(params):
      return elsewhere({"params": params, OVERWRITTEN: overwritten})

    of_own = {"grad": own, "value_fn": ValueOfOneCall(whole)}
    extra_args = {name: of_own.get(name, x) for name, x in extra_args.items()}
    updates, state = tx.update(own, state, params["params"], **extra_args)
    changes = jax.tree.map(jnp.subtract, grads[OVERWRITTEN], overwritten)
    return {"params": updates, OVERWRITTEN: changes}, state

  return optax.GradientTransformationExtraArgs(
    lambda params: tx.init(params["params"]), update
  )


@contextlib.contextmanager
def constraining_automatic_axes(
  variables: Collections,
) -> Iterator[Collections]:
  """Makes logical axes constrain only automatic axes, and yields boxes that constrain nothing.

  JAX refuses a constraint over the data axis, which `jax.shard_map` has made manual.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.manual_axes:
    yield variables
    return

  def automatic(axes: Any) -> Any:
    """Those of the axes of one dimension that are left to the compiler here."""
    if not isinstance(axes, (str, tuple)):  # None, or what is not constrained
      return axes
    named = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in named if name in mesh.auto_axes) or None

  rules = [(name, automatic(to)) for name, to in nn.get_logical_axis_rules()]
  with nn.logical_axis_rules(rules), nn.intercept_methods(_without_boxes):
    yield _map_boxes(
      lambda x: nn.LogicallyPartitioned(x.value, x.names, rules=()), variables
    )


def _without_boxes(
  method: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
  """Calls a module's method. Its initializers, whose shapes flax compares, make no boxes there.

  `nn.DenseGeneral` would constrain a kernel as its box says before the kernel has its shape.
  """

  def opened(init: Callable[..., Tree], *args: Any, **kwargs: Any) -> Tree:
    return _map_boxes(lambda box: box.value, init(*args, **kwargs))

  for name, init in vars(context.module).items():
    if name.endswith("_init") and callable(init):
      object.__setattr__(context.module, name, functools.partial(opened, init))
  return method(*args, **kwargs)


def _map_boxes(fun: Callable[[Any], Leaf], tree: Tree) -> Tree:
  is_box = lambda x: isinstance(x, nn.Partitioned)  # noqa: E731
  return jax.tree.map(
    lambda x: fun(x) if is_box(x) else x, tree, is_leaf=is_box
  )
