"""The loss of a step: over a mesh, or where its arrays are. Both have the same methods.

`place` puts the arguments of a call where they belong. It returns the loss as it is compiled for
them, which knows how the gradients come out, and how the optimizer's step is taken beside them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.trees import Args, Kwargs, OptState, Params
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.on_devices import on_each_device, place_arguments
from optax_accum._mesh.placement import (
  out_shardings,
  place_state,
  sharding_of,
)
from optax_accum._mesh.shards import in_loop, Shards
from optax_accum._mesh.specs import spec_of
from optax_accum._mesh.state_of_parameters import specs_of_states
from optax_accum._microbatches import cut
from optax_accum._microbatches.loop import Reduced
from optax_accum._microbatches.loss import LocalLoss, Outputs
from optax_accum._microbatches.options import Slot
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
    return self, args, kwargs

  def beside(self, params, opt_state) -> "LossWithoutMesh":
    """The loss whose gradients are sharded as a step with this state needs them."""
    return self

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

  def place(self, args, kwargs) -> tuple["PlacedLoss", Args, Kwargs]:
    """Puts a step's arguments on the mesh: the batch by its rows, the rest as it came or copied."""
    local = self.local
    parallel = self.parallel
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
    leaves, treedef = jax.tree.flatten((params, opt_state, *carry))
    shardings = tuple(map(sharding_of, leaves))
    loss = PlacedLoss(local, parallel, treedef, shardings)
    return loss, (params, opt_state, *rest), named


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

  def _of_parameters(self, fun: Callable[[PartitionSpec], Any]):
    """A function of the sharding of each parameter."""
    each = [fun(spec_of(sharding)) for sharding in self.shardings]
    return self.treedef.unflatten(each)[0]

  @property
  def _shards(self) -> Shards:
    over_data = self.parallel.over_data
    held = self._of_parameters(over_data)
    automatic = self._of_parameters(self.parallel.over_automatic)

    def of_gradient(own, to):
      return over_data(to or own)

    gradients = jax.tree.map(of_gradient, held, self.wanted)
    return Shards(held, gradients, automatic)

  def beside(self, params, opt_state) -> "PlacedLoss":
    """The loss whose gradients come sharded as the state, where that follows the parameters."""
    specs = list(map(spec_of, self.shardings))
    of_states = specs_of_states(params, opt_state, specs)
    wanted: list[Any] = []
    # Without `strict`: the parameters are the first.
    for sharding, own, state in zip(
      self.shardings, specs, of_states, strict=False
    ):
      to = None
      if sharding is not None and state is not None:
        to = self.parallel.gradient_spec(own, state)
      wanted.append(to)
    tree = jax.tree.structure(params)
    return self._replace(wanted=jax.tree.unflatten(tree, wanted))

  def step_beside(self, update: Update, params, opt_state) -> ParamsAndState:
    """`update` of parameters sharded as the gradients; the new ones are gathered where needed."""
    move = self.parallel.move

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
    return self._on_each_device(LocalLoss.value, same, weights, args, kwargs)

  def value_and_grad(self, weights, /, *args, **kwargs) -> Reduced:
    """The loss and its gradients, which are sharded as the parameters, or as `wanted` says."""
    same: Any = PartitionSpec()
    each = PartitionSpec(self.parallel.axes)
    local = self.local
    kinds = local.aux_reduction, local.metrics.reductions
    aux, metrics = jax.tree.map(self.parallel.output_spec, kinds)
    outputs = Outputs(same, aux, self._shards.gradients, metrics, each)
    specs = Reduced(same, outputs, same)
    method = LocalLoss.value_and_grad
    out = self._on_each_device(method, specs, weights, args, kwargs)

    def to_place(g, x, to):
      if to is None:
        return across_devices.sharded_like(g, x)
      return self.parallel.move(g, to)

    grads = jax.tree.map(to_place, out.outputs.grads, args[0], self.wanted)
    return out._replace(outputs=out.outputs._replace(grads=grads))

  def _on_device(self, rows: int) -> tuple[LocalLoss, Callable[..., Params]]:
    """The loss of one device's rows, and what gathers parameters before its loop."""
    split = self.parallel.local_split(self.local.split, rows)
    local = dataclasses.replace(self.local, split=split)
    if self.parallel.devices == 1:
      return local, lambda params: params
    shards = self._shards
    kinds = shards.scattered(local.grad_reduction)
    if not self.parallel.reduce_in_loop:
      return dataclasses.replace(local, grad_reduction=kinds), shards.gather
    axes = self.parallel.axes
    local = dataclasses.replace(
      local,
      grad_reduction=jax.tree.map(lambda kind: in_loop(kind, axes), kinds),
      gather_in_loop=shards.gather_in_loop,
    )
    return local, lambda params: params

  def _on_each_device(
    self,
    method: Callable[..., Any],
    out_specs,
    weights,
    args,
    kwargs,
  ):
    """A method of the loss of one device, given that device's part of the batch."""
    axes = self.local.roles_of(args, kwargs).batch
    rows = cut.batch_rows(self.local.split, axes, by_slot(args, kwargs))
    local, gather = self._on_device(rows)

    def run(weights, args, kwargs):
      params, *others = args
      return method(local, weights, gather(params), *others, **kwargs)

    held: dict[Slot, Params] = {0: self._shards.held}
    return on_each_device(
      self.parallel, axes, held, run, out_specs, weights, args, kwargs
    )
