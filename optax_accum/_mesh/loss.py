"""A loss over a mesh: each device runs its own rows in microbatches; then results are reduced."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.reductions import Sum
from optax_accum._arithmetic.trees import (
  Args,
  Kwargs,
  Leaf,
  OptState,
  Params,
  Tree,
)
from optax_accum._mesh.data_parallel import DataParallel, spec_of
from optax_accum._mesh.placement import (
  out_shardings,
  place,
  place_state,
  sharding_of,
)
from optax_accum._mesh.refused import explained, TRACED
from optax_accum._mesh.shards import Shards
from optax_accum._mesh.state_of_parameters import specs_of_states
from optax_accum._microbatches import cut
from optax_accum._microbatches.loop import Reduced
from optax_accum._microbatches.loss import LocalLoss, Outputs
from optax_accum._microbatches.options import Slot

Held: TypeAlias = tuple[Params, OptState]
Update: TypeAlias = Callable[[Held], Held]


@dataclasses.dataclass(eq=False, repr=False)
class MeshLoss:
  """A loss over the data axis of a mesh."""

  local: LocalLoss
  parallel: DataParallel

  def __post_init__(self) -> None:
    if (axis := self.local.split.axis_name) is not None:
      raise ValueError(
        f"axis_name={axis!r} is for a step that is called inside pmap or shard_map, and mesh= for"
        " one that is called outside: give one of the two."
      )
    if self.local.split.in_place and self.parallel.reduce_in_loop:
      raise ValueError(
        "in_place=True keeps the full sum of the gradients on each device until the cycle ends, and"
        ' reduce_gradients="per_microbatch" keeps shards: pass in_place=False, or "per_cycle".'
      )

  def place(
    self, args: Args, kwargs: Kwargs
  ) -> tuple["PlacedLoss", Args, Kwargs]:
    """Puts a step's arguments on the mesh: the batch by its rows, the rest as it came or copied."""
    parallel = self.parallel
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
      raise ValueError(
        f"The step is called inside pmap or shard_map over {axes} with mesh=, and would spread the"
        " batch over devices a second time: pass axis_name= to make_train_step instead, or call"
        " it outside."
      )
    params, opt_state, *others = args
    given: dict[Slot, Tree] = dict(
      [*enumerate((params, *others)), *kwargs.items()]
    )
    split = self.local.split
    roles = split.roles(self.local.fun, (params, *others), kwargs, (0,))
    axes = roles.batch
    split.refuse_key(roles, given)
    rows, of = cut.batch_rows(split, axes, given), split.name(*axes)
    parallel.check_rows(rows, split.num_microbatches, of)

    def put(slot: Slot, x: Tree) -> Tree:
      if slot in axes:
        return parallel.place_batch(split.name(slot), x, axes[slot], split)
      return place(parallel.mesh, split.name(slot) if slot else "params", x)

    placed = {slot: put(slot, x) for slot, x in given.items()}
    opt_state = place_state(parallel.mesh, "opt_state", placed[0], opt_state)
    held = placed[0], opt_state, *(placed[slot] for slot in roles.carry)
    leaves, treedef = jax.tree.flatten(held)
    shardings = tuple(map(sharding_of, leaves))
    loss = PlacedLoss(
      self.local, parallel, tuple(axes.items()), treedef, shardings
    )
    named: Kwargs = {name: placed.pop(name) for name in kwargs}
    return loss, (placed.pop(0), opt_state, *placed.values()), named


class PlacedLoss(NamedTuple):
  """A loss over a mesh, for one way to shard the arguments of a step and to pass the batch."""

  local: LocalLoss
  parallel: DataParallel
  batch: tuple[
    tuple[Slot, int], ...
  ]  # the batch arguments, and the axis of the rows of each
  treedef: Any  # of the parameters, the optimizer state and the carry, if any
  shardings: tuple[Any, ...]  # of their leaves
  wanted: Any = (
    None  # the `PartitionSpec` of each gradient, or None: as its parameter
  )

  @property
  def out_shardings(self) -> Any:
    """As parameters, state and carry came; left to choose, XLA may shard them otherwise."""
    return self.treedef.unflatten(out_shardings(self.shardings))

  def _of_parameters(self, fun: Callable[[PartitionSpec], Any]) -> Any:
    """A function of the sharding of each parameter."""
    return self.treedef.unflatten(
      [fun(spec_of(sharding)) for sharding in self.shardings]
    )[0]

  @property
  def _shards(self) -> Shards:
    parallel = self.parallel
    held, automatic = map(
      self._of_parameters, (parallel.over_data, parallel.over_automatic)
    )
    gradients = jax.tree.map(
      lambda own, to: parallel.over_data(to or own), held, self.wanted
    )
    return Shards(held, gradients, automatic)

  def beside(self, params: Params, opt_state: OptState) -> "PlacedLoss":
    """The loss whose gradients come sharded as the state, where that follows the parameters."""
    specs = list(map(spec_of, self.shardings))
    of_states = specs_of_states(params, opt_state, specs)
    # Without `strict`: the parameters are the first.
    wanted = [
      None
      if sharding is None or state is None
      else self.parallel.gradient_spec(own, state)
      for sharding, own, state in zip(
        self.shardings, specs, of_states, strict=False
      )
    ]
    return self._replace(
      wanted=jax.tree.unflatten(jax.tree.structure(params), wanted)
    )

  def stepped(
    self, update: Update, params: Params, opt_state: OptState
  ) -> Held:
    """`update` of parameters sharded as the gradients; the new ones are gathered where needed."""

    def gather(
      new: Leaf, x: Leaf, own: PartitionSpec, to: PartitionSpec | None
    ) -> Leaf:
      if to is None:
        return new
      # Tied to `x`, which it takes the place of if donated. Otherwise XLA for TPU copies `x` as
      # soon as the program starts, and keeps both.
      return jax.lax.optimization_barrier((self.parallel.move(new, own), x))[0]

    part = lambda x, to: x if to is None else self.parallel.move(x, to)  # noqa: E731
    parts = jax.tree.map(part, params, self.wanted)
    new, new_state = update((parts, opt_state))
    own = self._of_parameters(lambda spec: spec)
    return jax.tree.map(gather, new, params, own, self.wanted), new_state

  def value(self, weights: Tree, /, *args: Tree, **kwargs: Tree) -> jax.Array:
    """The loss alone."""
    return self._on_each_device(
      LocalLoss.value, PartitionSpec(), weights, args, kwargs
    )

  def value_and_grad(
    self, weights: Tree, /, *args: Tree, **kwargs: Tree
  ) -> Reduced:
    """The loss and its gradients, which are sharded as the parameters, or as `wanted` says."""
    same: Any = PartitionSpec()
    each = PartitionSpec(self.parallel.axes)
    kinds = (
      self.local.aux_reduction
    )  # one that collects has the parts of the devices in turn
    aux = jax.tree.map(lambda kind: each if kind.collected else same, kinds)
    specs = Reduced(
      same, Outputs(same, aux, self._shards.gradients, same, each), same
    )
    out = self._on_each_device(
      LocalLoss.value_and_grad, specs, weights, args, kwargs
    )

    def to_place(g: Leaf, x: Leaf, to: PartitionSpec | None) -> Leaf:
      return (
        across_devices.sharded_like(g, x)
        if to is None
        else self.parallel.move(g, to)
      )

    grads = jax.tree.map(to_place, out.outputs.grads, args[0], self.wanted)

    return out._replace(outputs=out.outputs._replace(grads=grads))

  def _on_each_device(
    self,
    method: Callable[..., Any],
    out_specs: Tree,
    weights: Tree,
    args: Args,
    kwargs: Kwargs,
  ) -> Any:
    """A method of the loss of one device, given that device's part of the batch."""
    axes, shards = dict(self.batch), self._shards
    rows = cut.batch_rows(
      self.local.split, axes, dict([*enumerate(args), *kwargs.items()])
    )
    split = self.parallel.local_split(self.local.split, rows)
    local = dataclasses.replace(self.local, split=split)
    several, in_loop = self.parallel.devices > 1, self.parallel.reduce_in_loop
    if several:
      local.grad_reduction = shards.scattered(self.local.grad_reduction)
      if in_loop:

        def each(r):
          return r.in_loop(self.parallel.axes) if isinstance(r, Sum) else r

        local.grad_reduction = jax.tree.map(each, local.grad_reduction)
        local.gather_in_loop = shards.gather_in_loop

    def spec(slot: Slot, tree: Tree) -> Tree:
      if slot == 0:
        return shards.held
      if slot in axes:
        return jax.tree.map(
          lambda x: self.parallel.batch_spec(x, axes[slot]), tree
        )
      return jax.tree.map(lambda _: PartitionSpec(), tree)

    named = {name: spec(name, x) for name, x in kwargs.items()}
    in_specs = tuple(spec(i, x) for i, x in enumerate(args)), named

    def on_device(weights: Tree, args: Args, kwargs: Kwargs) -> Any:
      params = shards.gather(args[0]) if several and not in_loop else args[0]
      return method(local, weights, params, *args[1:], **kwargs)

    mapped = jax.shard_map(
      on_device,
      mesh=self.parallel.mesh,
      in_specs=(PartitionSpec(self.parallel.axes), *in_specs),
      out_specs=out_specs,
      axis_names=set(
        self.parallel.axes
      ),  # other axes of the mesh are left to the compiler
      # Types of what varies refuse every loop, branch or derivative rule of a loss that starts from
      # a constant, and all Pallas kernels. `collectives` looks at what they would protect.
      check_vma=False,
    )
    placed = jax.tree.map(
      self.parallel.move_over_data, (args, kwargs), in_specs
    )
    with explained(TRACED, self.parallel):
      return mapped(weights, *placed)
