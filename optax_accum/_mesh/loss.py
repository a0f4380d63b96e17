"""The loss of a step over a mesh, with the methods of `LocalLoss`.

Each of these is one `jax.shard_map` of the same method on one device.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.devices import with_axis, without_axis
from optax_accum._arithmetic.trees import Args, Kwargs, OptState, Params
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.on_devices import on_each_device, place_arguments
from optax_accum._mesh.placement import (
  out_shardings,
  place,
  place_state,
  sharding_of,
)
from optax_accum._mesh.shards import Shards
from optax_accum._mesh.specs import over, spec_of
from optax_accum._mesh.state_of_parameters import specs_of_states
from optax_accum._microbatches.accumulator import Accumulated, Reduced
from optax_accum._microbatches.loss import (
  check_devices,
  CycleState,
  LocalLoss,
  Outputs,
)
from optax_accum._microbatches.roles import by_slot


@dataclasses.dataclass(frozen=True)
class OverMesh:
  """A loss over the data axes of a mesh.

  `place` returns it for one way to shard what a step updates, which is compiled.
  """

  local: LocalLoss
  parallel: DataParallel
  # The tree of (parameters, optimizer state, carry if any), and the shardings of its leaves.
  treedef: Any = None
  shardings: tuple[Any, ...] = ()
  # For each gradient its `PartitionSpec`, or None: as its parameter. `with_state` sets it.
  gradient_specs: Any = None

  def in_parts(self) -> "OverMesh":
    """The loss of microbatches that arrive in several calls."""
    return dataclasses.replace(self, local=self.local.in_parts())

  def place(self, args, kwargs) -> tuple["OverMesh", Args, Kwargs]:
    """Puts a step's arguments on the mesh: the batch by its rows, the rest as it came or copied."""
    local = self.local
    parallel = self.parallel
    params, opt_state, *rest = args
    # The loss does not take the optimizer state, so roles are found without it.
    given = (params, *rest)
    roles = local.roles_of(given, kwargs)
    given, kwargs = place_arguments(parallel, local.split, roles, given, kwargs)
    params, *rest = given
    opt_state = place_state(parallel.mesh, params, opt_state)
    arguments = by_slot(given, kwargs)
    # The step updates the carry, too: its sharding is noted. There is one at most.
    carry = [arguments[slot] for slot in roles.carry]
    loss = self._sharded_as(params, opt_state, *carry)
    return loss, (params, opt_state, *rest), kwargs

  def place_updated(
    self, params, opt_state, carry: Args, others: Args
  ) -> tuple["OverMesh", Args]:
    """As the method `place`, for the last call of a cycle. `others` are not updated by it."""
    mesh = self.parallel.mesh
    params = place(mesh, params)
    opt_state = place_state(mesh, params, opt_state)
    carry, others = place(mesh, (carry, others))
    loss = self._sharded_as(params, opt_state, *carry)
    return loss, (params, opt_state, *carry, *others)

  def place_cycle(self, state: CycleState) -> CycleState:
    """What a cycle has, on the mesh: what is not there yet goes where `cycle_shardings` says."""
    # A cycle's count has one number for each device: this is its shape.
    check_devices(state, (self.parallel.devices,))

    def specs_of(_):
      # `_` is the leaves of `state`; their shardings come from the prefix tree, one for each.
      each = jax.tree.broadcast(self.cycle_shardings, state)
      return list(map(spec_of, jax.tree.leaves(each)))

    return place(self.parallel.mesh, state, specs_of)

  def _sharded_as(self, *updated) -> "OverMesh":
    """The loss where what is updated is sharded as these are."""
    leaves, treedef = jax.tree.flatten(updated)
    shardings = tuple(map(sharding_of, leaves))
    return dataclasses.replace(self, treedef=treedef, shardings=shardings)

  @property
  def out_shardings(self):
    """As parameters, state and carry came; left to choose, XLA may shard them otherwise."""
    return self.treedef.unflatten(out_shardings(self.shardings))

  @property
  def cycle_shardings(self) -> CycleState:
    """Of what a cycle has between calls, as a prefix tree.

    All has an axis of devices in front, and each device has what is its own. A gradient stays
    sharded over other axes as its parameter.
    """
    mesh = self.parallel.mesh
    each: Any = NamedSharding(mesh, self._each)

    def of_gradient(spec):
      others = over(spec, self.parallel.others)
      return NamedSharding(mesh, PartitionSpec(*self._each, *others))

    grads = self._of_parameters(of_gradient)
    # The fields are loss, aux, grads, noise and kept.
    outputs = Outputs(each, each, grads, each, each)
    # These are number, accumulated (carry, outputs, weight, skipped) and results.
    return CycleState(each, Accumulated(each, outputs, each, each), each)

  @property
  def _each(self) -> PartitionSpec:
    """Of what every device has for itself, with an axis of devices in front."""
    return PartitionSpec(self.parallel.axes)

  def _of_parameters(self, fun: Callable[[PartitionSpec], Any]):
    """A function of the sharding of each parameter."""
    each = [fun(spec_of(sharding)) for sharding in self.shardings]
    params, *_ = self.treedef.unflatten(each)
    return params

  @property
  def _shards(self) -> Shards:
    """How parameters and gradients are sharded, for what runs on each device."""
    over_data = self.parallel.over_data
    parameters = self._of_parameters(over_data)
    automatic = self._of_parameters(self.parallel.over_automatic)

    def of_gradient(own, to):
      if to is None:  # it goes where its parameter is
        return own
      return over_data(to)

    gradients = jax.tree.map(of_gradient, parameters, self.gradient_specs)
    return Shards(parameters, gradients, automatic)

  def with_state(self, params, opt_state) -> "OverMesh":
    """The loss whose gradients come sharded as the state, where that follows the parameters."""
    specs = list(map(spec_of, self.shardings))
    of_states = specs_of_states(params, opt_state, specs)
    wanted: list[Any] = []
    # Without `strict`: the parameters are the first.
    each = zip(self.shardings, specs, of_states, strict=False)
    for sharding, own, of_state in each:
      to = None
      # A sharding is None if it is not known, and a spec if its state has no single one.
      if sharding is not None and of_state is not None:
        to = self.parallel.gradient_spec(own, of_state)
      wanted.append(to)
    tree = jax.tree.structure(params)
    specs_of_gradients = jax.tree.unflatten(tree, wanted)
    return dataclasses.replace(self, gradient_specs=specs_of_gradients)

  def update(
    self, update: Callable[..., Any], params, opt_state
  ) -> tuple[Params, OptState]:
    """`update` of parameters sharded as the gradients; the new ones are gathered where needed."""
    move = self.parallel.move

    # A spec of None says that a gradient goes where its parameter is.
    def part(x, to):
      if to is None:
        return x
      return move(x, to)

    def gather(new, x, own, to):
      if to is None:
        return new
      # Tied to `x`, which it takes the place of if donated. Otherwise XLA for TPU copies `x` as
      # soon as the program starts, and keeps both.
      new, _ = jax.lax.optimization_barrier((move(new, own), x))
      return new

    parts = jax.tree.map(part, params, self.gradient_specs)
    new, new_state = update((parts, opt_state))
    specs = self._of_parameters(lambda spec: spec)
    new = jax.tree.map(gather, new, params, specs, self.gradient_specs)
    return new, new_state

  def value(self, kept, /, *args, **kwargs) -> jax.Array:
    """The loss alone, of the microbatches that are `kept`; of all, if that is None."""
    same = PartitionSpec()
    # Each device gets the part of `kept` that is about its own microbatches.
    run = self._on_devices(LocalLoss.value, (kept,), args, kwargs, same)
    return run()

  def value_and_grad(self, /, *args, **kwargs) -> Reduced:
    """The loss and its gradients, sharded as the parameters, or as `gradient_specs` says."""
    method = LocalLoss.value_and_grad
    # Nothing is of one device alone: ().
    run = self._on_devices(method, (), args, kwargs, self._reduced_specs)
    # Called in this frame, so that a traceback has few frames between a call and the loss.
    reduced = run()
    return self._to_place(reduced, args[0])

  def begin(self, /, *args, **kwargs) -> CycleState:
    """What the devices have before the first call of a cycle, on a first axis of devices."""

    def begin(local, *args, **kwargs):
      return with_axis(local.begin(*args, **kwargs))

    # No device has anything for itself yet: ().
    run = self._on_devices(begin, (), args, kwargs, self._each)
    return run()

  def add(self, state: CycleState, /, *args, **kwargs) -> CycleState:
    """What the devices have after a call, of what they had before."""

    def add(local, state, *args, **kwargs):
      state = without_axis(state)
      return with_axis(local.add(state, *args, **kwargs))

    run = self._on_devices(add, (state,), args, kwargs, self._each)
    return run()

  def merge(self, first: CycleState, second: CycleState, start) -> CycleState:
    """What the devices have of two cycles that began with the carry `start`."""
    # Only `finish` sums over devices, so gradients need no reduction to shards here.
    split = self.parallel.on_device(self.local.split)
    local = dataclasses.replace(self.local, split=split)

    # `_` is the keyword arguments, of which there are none.
    def merge(states, args, _):
      first, second = without_axis(states)
      (start,) = args
      return with_axis(local.merge(first, second, start))

    both = first, second
    run = on_each_device(self.parallel, merge, both, (start,), {}, self._each)
    return run()

  def finish(self, state: CycleState, start, params) -> Reduced:
    """The loss and its gradients, of all calls. They began with the carry `start`."""
    local = self._on_device()
    # Sums are checked against these types, and cast to them.
    like = jax.eval_shape(lambda: params)

    # `_` is the keyword arguments, of which there are none.
    def finish(state, args, _):
      (start,) = args
      return local.finish(without_axis(state), start, like)

    run = on_each_device(
      self.parallel, finish, state, (start,), {}, self._reduced_specs
    )
    return self._to_place(run(), params)

  @property
  def _reduced_specs(self) -> Reduced:
    """Of the loss and its gradients."""
    same: Any = PartitionSpec()
    aux = jax.tree.map(self.parallel.output_spec, self.local.aux_reduction)
    grads = self._shards.gradients
    # The fields are carry, outputs (loss, aux, grads, noise, kept) and stats.
    return Reduced(same, Outputs(same, aux, grads, same, self._each), same)

  def _to_place(self, reduced: Reduced, params) -> Reduced:
    """The same, with gradients sharded as the parameters, or as `gradient_specs` says."""

    def to_place(g, x, to):
      if to is None:
        # It goes where its parameter is. Explicit axes are in the type of that; others are XLA's.
        return across_devices.sharded_like(g, x)
      return self.parallel.move(g, to)

    outputs = reduced.outputs
    grads = jax.tree.map(to_place, outputs.grads, params, self.gradient_specs)
    return reduced._replace(outputs=outputs._replace(grads=grads))

  def _on_device(self) -> LocalLoss:
    """The loss of one device's rows."""
    local = self.local
    split = self.parallel.on_device(local.split)
    grads = self._shards.scattered(local.grad_reduction)
    return dataclasses.replace(local, split=split, grad_reduction=grads)

  def _on_devices(
    self, method: Callable[..., Any], own: Args, args, kwargs, out_specs
  ) -> Callable[[], Any]:
    """A function that calls ``method(local, *own, *args, **kwargs)`` on each device's rows.

    `own` is a tuple of what each device has for itself.
    """
    batch = self.local.roles_of(args, kwargs).batch
    local = self._on_device()
    shards = self._shards

    def run(own, args, kwargs):
      params, *others = args
      params = shards.gather(params)
      return method(local, *own, params, *others, **kwargs)

    # The parameters, argument 0, come in shards, which `run` gathers.
    sharded: Any = {0: shards.parameters}
    return on_each_device(
      self.parallel, run, own, args, kwargs, out_specs, batch, sharded
    )


Loss: TypeAlias = LocalLoss | OverMesh
