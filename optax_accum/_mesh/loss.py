"""The loss of a step: over a mesh, or where its arrays are. Both have the same methods.

`place` puts the arguments of a call where they belong. It returns the loss as it is compiled for
them, which knows how the gradients come out, and how the optimizer's step is taken beside them.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.trees import Args, Kwargs, OptState, Params, Tree
from optax_accum._mesh import virtual
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.on_devices import OnEachDevice, place_arguments
from optax_accum._mesh.placement import (
  out_shardings,
  place,
  place_state,
  sharding_of,
)
from optax_accum._mesh.shards import in_loop, Shards
from optax_accum._mesh.specs import over, spec_of
from optax_accum._mesh.state_of_parameters import specs_of_states
from optax_accum._microbatches import cut
from optax_accum._microbatches.loop import Progress, Reduced
from optax_accum._microbatches.loss import Accumulated, LocalLoss, Outputs
from optax_accum._microbatches.options import Slot, Split
from optax_accum._microbatches.roles import by_slot

ParamsAndState: TypeAlias = tuple[Params, OptState]
Update: TypeAlias = Callable[[ParamsAndState], ParamsAndState]


class LossWithoutMesh(NamedTuple):
  """A loss where its arrays are: on one device, or as the compiler spreads it."""

  local: LocalLoss
  parallel: None = None
  # Of what a step returns first: left to the compiler.
  out_shardings: None = None

  def place(self, args, kwargs) -> tuple["LossWithoutMesh", Args, Kwargs]:
    """The loss that a step with such arguments runs, and the arguments as it takes them."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and self.local.split.axis_name is None:
      raise ValueError(
        f"The step is called inside pmap or shard_map over {axes} without axis_name, so each device"
        " would step with its own gradient: pass axis_name=, or call it outside, with mesh=."
      )
    virtual.check_arrays(self.local.split, (args, kwargs), on_mesh=False)
    return self, args, kwargs

  def beside(self, params, opt_state) -> "LossWithoutMesh":
    """The loss whose gradients are sharded as a step with this state needs them."""
    return self

  @property
  def held_shardings(self) -> None:
    """Of what a cycle holds between calls: left to the compiler."""
    return None

  def in_parts(self) -> "LossWithoutMesh":
    """The loss of microbatches that arrive in several calls."""
    axis_name = self.local.split.axis_name
    if axis_name is not None:
      raise ValueError(
        f"begin, add and finish are called outside pmap and shard_map, and axis_name={axis_name!r}"
        " is for a step that is called inside: make the step with mesh=."
      )
    return self._replace(local=self.local.in_parts())

  def place_state(
    self, params, opt_state, others, carries: int
  ) -> tuple["LossWithoutMesh", Args]:
    """As `place`, of what is updated: of `others` the first are so many carries."""
    updated = params, opt_state, others
    virtual.check_arrays(self.local.split, updated, on_mesh=False)
    return self, updated

  def place_held(self, held: Accumulated) -> Accumulated:
    """What a cycle holds, where it belongs."""
    split = self.local.split
    virtual.check_arrays(split, held, on_mesh=False)
    count = split.virtual_devices
    _check_devices(held, () if count is None else (count,))
    return held

  @property
  def begin(self) -> Callable[..., Accumulated]:
    """What a cycle holds before the first call."""
    return self.local.begin

  @property
  def add(self) -> Callable[..., Accumulated]:
    """What a cycle holds after a call."""
    return self.local.add

  @property
  def finish(self) -> Callable[..., Reduced]:
    """The loss and its gradients, of all calls."""
    return self.local.finish

  @property
  def value(self) -> Callable[..., jax.Array]:
    """The loss alone."""
    return self.local.value

  @property
  def value_and_grad(self) -> Callable[..., Reduced]:
    """The loss and its gradients."""
    return self.local.value_and_grad

  def step_beside(self, update: Update, params, opt_state) -> ParamsAndState:
    """What `update` makes of parameters that are sharded as the gradients meanwhile."""
    return update((params, opt_state))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeshLoss:
  """A loss over the data axis of a mesh."""

  local: LocalLoss
  parallel: DataParallel

  def __post_init__(self) -> None:
    split = self.local.split
    if split.in_place and self.parallel.reduce_in_loop:
      raise ValueError(
        "in_place=True keeps the full sum of the gradients on each device until the cycle ends, and"
        ' reduce_gradients="per_microbatch" keeps shards: pass in_place=False, or "per_cycle".'
      )
    virtual.check_mesh(split, self.parallel)

  def place(self, args, kwargs) -> tuple["PlacedLoss", Args, Kwargs]:
    """Puts a step's arguments on the mesh: the batch by its rows, the rest as it came or copied."""
    local = self.local
    parallel = self.parallel
    virtual.check_arrays(local.split, (args, kwargs), on_mesh=True)
    given = args, kwargs
    args, kwargs = virtual.on_automatic(local.split, parallel.mesh, given)
    params, opt_state, *rest = args
    of_loss = (params, *rest)
    roles = local.roles_of(of_loss, kwargs)
    of_loss, named = place_arguments(
      parallel, local.split, roles, of_loss, kwargs
    )
    params, *rest = of_loss
    placed = by_slot(of_loss, named)
    opt_state = place_state(parallel.mesh, "opt_state", params, opt_state)
    carry = [placed[slot] for slot in roles.carry]
    loss = self._placed(params, opt_state, *carry)
    return loss, (params, opt_state, *rest), named

  def in_parts(self) -> "MeshLoss":
    """The loss of microbatches that arrive in several calls."""
    return dataclasses.replace(self, local=self.local.in_parts())

  def place_state(
    self, params, opt_state, others, carries: int
  ) -> tuple["PlacedLoss", Args]:
    """As `place`, of what is updated: of `others` the first are so many carries."""
    mesh = self.parallel.mesh
    updated = params, opt_state, others
    virtual.check_arrays(self.local.split, updated, on_mesh=True)
    updated = virtual.on_automatic(self.local.split, mesh, updated)
    params, opt_state, others = updated
    params = place(mesh, "params", params)
    opt_state = place_state(mesh, "opt_state", params, opt_state)
    others = place(mesh, "carry", others)
    loss = self._placed(params, opt_state, *others[:carries])
    return loss, (params, opt_state, others)

  def _placed(self, *updated) -> "PlacedLoss":
    """The loss where what is updated is sharded as these are."""
    leaves, treedef = jax.tree.flatten(updated)
    shardings = tuple(map(sharding_of, leaves))
    return PlacedLoss(self.local, self.parallel, treedef, shardings)


class PlacedLoss(NamedTuple):
  """A loss over a mesh, for one way to shard the arguments of a step."""

  local: LocalLoss
  parallel: DataParallel
  treedef: Any  # of the parameters, the optimizer state and the carry, if any
  shardings: tuple[Any, ...]  # of their leaves
  # The `PartitionSpec` of each gradient, or None: as its parameter.
  wanted: Any = None

  @property
  def out_shardings(self):
    """As parameters, state and carry came; left to choose, XLA may shard them otherwise."""
    return self.treedef.unflatten(out_shardings(self.shardings))

  @property
  def _is_virtual(self) -> bool:
    return self.local.split.virtual_devices is not None

  def _of_parameters(self, fun: Callable[[PartitionSpec], Any]):
    """A function of the sharding of each parameter."""
    each = [fun(spec_of(sharding)) for sharding in self.shardings]
    return self.treedef.unflatten(each)[0]

  @property
  def _shards(self) -> Shards:
    over_data = self.parallel.over_data
    parameters = self._of_parameters(over_data)
    automatic = self._of_parameters(self.parallel.over_automatic)

    def of_gradient(own, to):
      return over_data(own if to is None else to)

    gradients = jax.tree.map(of_gradient, parameters, self.wanted)
    return Shards(parameters, gradients, automatic)

  def beside(self, params, opt_state) -> "PlacedLoss":
    """The loss whose gradients come sharded as the state, where that follows the parameters."""
    if self._is_virtual:
      whole = jax.tree.map(lambda _: PartitionSpec(), params)
      unknown = (None,) * len(self.shardings)
      return self._replace(shardings=unknown, wanted=whole)
    specs = list(map(spec_of, self.shardings))
    of_states = specs_of_states(params, opt_state, specs)
    wanted: list[Any] = []
    # Without `strict`: the parameters are the first.
    each = zip(self.shardings, specs, of_states, strict=False)
    for sharding, own, of_state in each:
      to = None
      if sharding is not None and of_state is not None:
        to = self.parallel.gradient_spec(own, of_state)
      wanted.append(to)
    tree = jax.tree.structure(params)
    return self._replace(wanted=jax.tree.unflatten(tree, wanted))

  def step_beside(self, update: Update, params, opt_state) -> ParamsAndState:
    """`update` of parameters sharded as the gradients; the new ones are gathered where needed."""
    move = self.parallel.move
    if self._is_virtual:
      # The optimizer sees whole arrays: over shards the compiler would sum in an order of its own.
      # It is pinned on both sides, so that nothing between is sharded.
      def whole(tree):
        return jax.tree.map(lambda x: move(x, PartitionSpec()), tree)

      return whole(update(whole((params, opt_state))))

    def part(x, to):
      return x if to is None else move(x, to)

    def gather(new, x, own, to):
      if to is None:
        return new
      # Tied to `x`, which it takes the place of if donated. Otherwise XLA for TPU copies `x` as
      # soon as the program starts, and keeps both.
      return jax.lax.optimization_barrier((move(new, own), x))[0]

    parts = jax.tree.map(part, params, self.wanted)
    new, new_state = update((parts, opt_state))
    own = self._of_parameters(lambda spec: spec)
    return jax.tree.map(gather, new, params, own, self.wanted), new_state

  def value(self, weights, /, *args, **kwargs) -> jax.Array:
    """The loss alone."""
    same = PartitionSpec()
    run = self._on_each_device(LocalLoss.value, args, kwargs)
    return run(same, weights, args, kwargs)

  def value_and_grad(self, weights, /, *args, **kwargs) -> Reduced:
    """The loss and its gradients, which are sharded as the parameters, or as `wanted` says."""
    run = self._on_each_device(LocalLoss.value_and_grad, args, kwargs)
    specs = self._reduced_specs
    # In this frame, so that few stand between a call and the loss.
    out = run(specs, weights, args, kwargs)
    return self._to_place(out, args[0])

  def begin(self, /, *args, **kwargs) -> Accumulated:
    """What the devices hold before the first call of a cycle, on a first axis of devices."""

    def begin(local, _, *args, **kwargs):
      return _stored(local, local.begin(*args, **kwargs))

    run = self._on_each_device(begin, args, kwargs)
    return run(self._each, None, args, kwargs)

  def add(self, held: Accumulated, /, *args, **kwargs) -> Accumulated:
    """What the devices hold after a call, of what they held before."""

    def add(local, held, *args, **kwargs):
      added = local.add(_own(local, held), *args, **kwargs)
      return _stored(local, added)

    run = self._on_each_device(add, args, kwargs)
    return run(self._each, held, args, kwargs)

  def finish(self, held: Accumulated, start, params) -> Reduced:
    """The loss and its gradients, of all calls. They began with the carry `start`."""
    split = self.parallel.on_device(self.local.split)
    added = self
    if self.parallel.reduce_in_loop:
      # As `add` had them, which knows no state.
      added = self.beside(params, ())
    local, _ = added._on_device(split)
    like = jax.eval_shape(lambda: params)

    def finish(held, start, _):
      return local.finish(_own(local, held), start, like)

    specs = added._reduced_specs
    run = OnEachDevice(self.parallel, {}, {}, finish)
    reduced = run(specs, held, start, {})
    return self._to_place(reduced, params)

  def place_held(self, held: Accumulated) -> Accumulated:
    """What a cycle holds, where it belongs."""
    split = self.local.split
    mesh = self.parallel.mesh
    virtual.check_arrays(split, held, on_mesh=True)
    held = virtual.on_automatic(split, mesh, held)
    _check_devices(held, (split.virtual_devices or self.parallel.devices,))

    def specs_of(_):
      each = jax.tree.broadcast(self.held_shardings, held)
      return list(map(spec_of, jax.tree.leaves(each)))

    return place(mesh, "cycle", held, specs_of)

  @property
  def held_shardings(self) -> Accumulated:
    """Of what a cycle holds between calls, as a prefix tree.

    All has an axis of devices in front, and each device has what is its own. A gradient stays
    sharded over other axes as its parameter.
    """
    mesh = self.parallel.mesh
    each: Any = NamedSharding(mesh, self._each)

    def of_gradient(spec):
      others = over(spec, self.parallel.others)
      return NamedSharding(mesh, PartitionSpec(*self._each, *others))

    grads = self._of_parameters(of_gradient)
    outputs = Outputs(each, each, grads, each, each)
    progress = Progress(each, outputs, each, each, each)
    return Accumulated(each, progress, each)

  @property
  def _each(self) -> PartitionSpec:
    """Of what every device has for itself, with an axis of devices in front."""
    return PartitionSpec(self.parallel.axes)

  @property
  def _reduced_specs(self) -> Reduced:
    """Of the loss and its gradients."""
    same: Any = PartitionSpec()
    local = self.local
    kinds = local.aux_reduction, local.metrics.reductions
    aux, metrics = jax.tree.map(self.parallel.output_spec, kinds)
    grads = self._shards.gradients
    return Reduced(same, Outputs(same, aux, grads, metrics, self._each), same)

  def _to_place(self, reduced: Reduced, params) -> Reduced:
    """The same, with gradients sharded as the parameters, or as `wanted` says."""

    def to_place(g, x, to):
      if to is None:
        return across_devices.sharded_like(g, x)
      return self.parallel.move(g, to)

    outputs = reduced.outputs
    grads = jax.tree.map(to_place, outputs.grads, params, self.wanted)
    return reduced._replace(outputs=outputs._replace(grads=grads))

  def _on_device(self, split: Split) -> tuple[LocalLoss, Callable[..., Params]]:
    """The loss of one device's rows, and what gathers parameters before its loop."""
    replace = functools.partial(dataclasses.replace, self.local, split=split)
    if self.parallel.devices == 1:
      return replace(), _unchanged
    shards = self._shards
    kinds = shards.scattered(self.local.grad_reduction)
    if not self.parallel.reduce_in_loop:
      return replace(grad_reduction=kinds), shards.gather
    # Parameters are gathered, and gradients scattered, in every microbatch.
    in_every = functools.partial(in_loop, devices=split.devices)
    local = replace(
      grad_reduction=jax.tree.map(in_every, kinds),
      gather_in_loop=shards.gather_in_loop,
    )
    return local, _unchanged

  def _on_each_device(
    self, method: Callable[..., Any], args, kwargs
  ) -> OnEachDevice:
    """What runs a method of the loss of one device on each."""
    axes = self.local.roles_of(args, kwargs).batch
    rows = cut.batch_rows(self.local.split, axes, by_slot(args, kwargs))
    split = self.parallel.local_split(self.local.split, rows)
    local, gather = self._on_device(split)

    def run(own, args, kwargs):
      params, *others = args
      return method(local, own, gather(params), *others, **kwargs)

    sharded: dict[Slot, Tree] = {0: self._shards.parameters}
    return OnEachDevice(self.parallel, axes, sharded, run)


def _unchanged(params):
  return params


def _check_devices(held: Accumulated, wanted: tuple[int, ...]) -> None:
  """Checks that a cycle was begun on as many devices."""
  found = jnp.shape(held.number)
  if found != wanted:
    raise ValueError(
      f"cycle.number has shape {found}, not {wanted}: with mesh= a cycle has sums of each of its"
      " devices, on a first axis, and without mesh= no such axis. Go on with it on as many devices"
      " as it began on, or begin another."
    )


def _stored(local: LocalLoss, tree):
  """What a device has for itself, as the program returns it. Lanes are on a first axis already."""
  if local.split.virtual_devices is not None:
    return tree
  return jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def _own(local: LocalLoss, tree):
  """What a device has for itself, of what is `_stored`."""
  if local.split.virtual_devices is not None:
    return tree
  return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


Loss: TypeAlias = LossWithoutMesh | MeshLoss
# What a call with given shardings steps by.
Placed: TypeAlias = LossWithoutMesh | PlacedLoss
