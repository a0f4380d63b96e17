"""A loss over a mesh: each device runs its own rows in microbatches; then results are reduced."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from optax_accum._arithmetic.trees import Args, Grads, Kwargs, OptState, Params, Tree
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.placement import place, place_state, sharding_of
from optax_accum._mesh.shards import Sharded
from optax_accum._mesh.state_of_parameters import spread_as_parameters
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
    self._roles: dict[tuple[Slot, ...], tuple[dict[Slot, int], tuple[Slot, ...]]] = {}
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

  def place(self, args: Args, kwargs: Kwargs) -> tuple["PlacedLoss", Args, Kwargs]:
    """Puts a step's arguments on the mesh: the batch by its rows, the rest as it came or copied."""
    parallel = self.parallel
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
      raise ValueError(
        f"The step is called inside pmap or shard_map over {axes} with mesh=, and would spread the"
        " batch over devices a second time: pass axis_name= to make_train_step instead, or call"
        " it outside."
      )
    params, opt_state, *others = args
    axes, carried, arguments = self._batch(params, others, kwargs)
    rows = cut.batch_rows(axes, arguments)
    parallel.check_rows(rows, self.local.split.num_microbatches)

    def put(slot: Slot, x: Tree) -> Tree:
      if slot in axes:
        return parallel.place_batch(f"batch argument {slot!r}", x, axes[slot])
      return place(parallel.mesh, f"argument {slot!r}", x)

    params = place(parallel.mesh, "params", params)
    held = params, place_state(parallel.mesh, "opt_state", params, opt_state)
    others = [put(i, x) for i, x in enumerate(others, 1)]
    named: Kwargs = {name: put(name, x) for name, x in kwargs.items()}
    placed: dict[Slot, Tree] = dict(enumerate(others, 1))
    placed.update(named)

    def sharded(tree: Tree) -> tuple[Any, tuple[Any, ...]]:
      leaves, treedef = jax.tree.flatten(tree)
      return treedef, tuple(map(sharding_of, leaves))

    carry = [placed[slot] for slot in carried]
    loss = PlacedLoss(self.local, parallel, tuple(axes.items()), *sharded(held), sharded(carry))
    return loss, (*held, *others), named

  def _batch(
    self, params: Params, others: Sequence[Tree], kwargs: Kwargs
  ) -> tuple[dict[Slot, int], tuple[Slot, ...], dict[Slot, Tree]]:
    """The axis of rows of each batch argument; what is carried; all, by where the loss has them."""
    arguments: dict[Slot, Tree] = dict(enumerate((params, *others)))
    arguments.update(kwargs)
    slots = tuple(arguments)
    if slots not in self._roles:
      roles = self.local.split.roles(self.local.fun, (params, *others), kwargs, (0,))
      self._roles[slots] = roles.batch, roles.carry
    return *self._roles[slots], arguments


class PlacedLoss(NamedTuple):
  """A loss over a mesh, for one way to shard the arguments of a step and to pass the batch."""

  local: LocalLoss
  parallel: DataParallel
  batch: tuple[tuple[Slot, int], ...]  # the batch arguments, and the axis of the rows of each
  treedef: Any  # of (params, opt_state)
  shardings: tuple[Any, ...]  # of their leaves
  threaded: tuple[Any, tuple[Any, ...]]  # the structure of the carry, if any, and its shardings
  wanted: Any = None  # a `GradientSharding` for each gradient, or None: as its parameter

  @property
  def out_shardings(self) -> Any:
    """As parameters, state and carry came; left to choose, XLA may shard them otherwise."""

    def known(sharding: Any) -> Any:
      # A tracer's, over an abstract mesh, does not tell about automatic axes.
      return sharding if isinstance(getattr(sharding, "mesh", None), Mesh) else None

    structure, carry = self.threaded
    held = self.treedef.unflatten(map(known, self.shardings))
    return *held, *structure.unflatten(map(known, carry))

  @property
  def _specs(self) -> list[PartitionSpec]:
    return list(map(self.parallel.shard_spec, self.shardings))

  @property
  def _shards(self) -> Sharded:
    specs = self.treedef.unflatten(self._specs)[0]
    of_gradients = jax.tree.map(lambda own, to: (to and to.spec) or own, specs, self.wanted)
    automatic = self.treedef.unflatten(map(self.parallel.automatic_spec, self.shardings))[0]
    axes, in_loop = self.parallel.axes, self.parallel.reduce_in_loop
    return Sharded(specs, of_gradients, automatic, axes, in_loop)

  def beside(self, params: Params, opt_state: OptState) -> "PlacedLoss":
    """The loss whose gradients come sharded as the state, where that follows the parameters."""
    leaves = jax.tree.leaves((params, opt_state))
    dims = [self.parallel.dims(s, jnp.ndim(x)) for s, x in zip(self.shardings, leaves, strict=True)]
    of_state = spread_as_parameters(params, opt_state, dims)
    # Without `strict`: those of the state come after.
    wanted = [
      None if sharding is None or state is None else self.parallel.gradient_sharding(own, state)
      for sharding, own, state in zip(self.shardings, dims, of_state, strict=False)
    ]
    return self._replace(wanted=jax.tree.unflatten(jax.tree.structure(params), wanted))

  def stepped(self, update: Update, params: Params, opt_state: OptState) -> Held:
    """`update` of parameters sharded as the gradients; the new ones are gathered where needed."""
    parts = jax.tree.map(self.parallel.spread, params, self.wanted)
    new, new_state = update((parts, opt_state))
    shardings = self.treedef.unflatten(self.shardings)[0]
    return jax.tree.map(self.parallel.gather, new, params, shardings, self.wanted), new_state

  def derivatives(self, grads: Grads) -> Grads:
    """As that of the loss of one device."""
    return self.local.derivatives(grads)

  def value(self, weights: Tree, /, *args: Tree, **kwargs: Tree) -> jax.Array:
    """The loss alone."""
    return self._on_each_device(LocalLoss.value, PartitionSpec(), weights, args, kwargs)

  def value_and_grad(self, weights: Tree, /, *args: Tree, **kwargs: Tree) -> Reduced:
    """The loss and its gradients, which are sharded as the parameters, or as `wanted` says."""
    same: Any = PartitionSpec()
    aux = jax.tree.map(self.parallel.output_spec, self.local.aux_reduction)
    devices_own = PartitionSpec(self.parallel.axes)
    specs = Reduced(same, Outputs(same, aux, self._shards.gradient_specs, same), same, devices_own)
    out = self._on_each_device(LocalLoss.value_and_grad, specs, weights, args, kwargs)
    shardings = self.treedef.unflatten(self.shardings)[0]
    grads = self.parallel.like(out.outputs.grads, shardings, self.wanted)
    kinds = self.local.aux_reduction
    aux = jax.tree.map(lambda r, tree: jax.tree.map(r.rows_back, tree), kinds, out.outputs.aux)
    return out._replace(outputs=out.outputs._replace(aux=aux, grads=grads))

  def _on_each_device(
    self, method: Callable[..., Any], out_specs: Tree, weights: Tree, args: Args, kwargs: Kwargs
  ) -> Any:
    """A method of the loss of one device, given that device's part of the batch."""
    arguments: dict[Slot, Tree] = dict(enumerate(args))
    arguments.update(kwargs)
    axes, shards = dict(self.batch), self._shards
    rows = cut.batch_rows(axes, arguments)
    split = self.parallel.local_split(self.local.split, rows)
    aux_reduction = jax.tree.map(lambda r: r.rows_first(), self.local.aux_reduction)
    local = dataclasses.replace(self.local, split=split, aux_reduction=aux_reduction)
    several = self.parallel.devices > 1
    if several:
      local.grad_reduction = shards.gradients(self.local.grad_reduction)
      local.gather_in_loop = shards.gather_in_loop

    def spec(slot: Slot, tree: Tree) -> Tree:
      if slot == 0:
        return shards.specs
      if slot in axes:
        return jax.tree.map(lambda x: self.parallel.batch_spec(x, axes[slot]), tree)
      return jax.tree.map(lambda _: PartitionSpec(), tree)

    named = {name: spec(name, x) for name, x in kwargs.items()}
    in_specs = tuple(spec(i, x) for i, x in enumerate(args)), named

    def on_device(weights: Tree, args: Args, kwargs: Kwargs) -> Any:
      params = shards.gather_before_loop(args[0]) if several else args[0]
      return method(local, weights, params, *args[1:], **kwargs)

    mapped = jax.shard_map(
      on_device,
      mesh=self.parallel.mesh,
      in_specs=(PartitionSpec(self.parallel.axes), *in_specs),
      out_specs=out_specs,
      axis_names=set(self.parallel.axes),  # other axes of the mesh are left to the compiler
      # Over one device nothing is reduced, and so types would say that devices differ.
      check_vma=several,
    )
    return mapped(weights, *jax.tree.map(self.parallel.reshard_over_data, (args, kwargs), in_specs))
