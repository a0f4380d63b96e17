"""Data parallelism: how the batch is spread over a mesh, and what goes where with the gradients."""

from collections.abc import Sequence, Set
import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum import _validate
from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.across_devices import names_of
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Batch, Grads, Leaf, Tree
from optax_accum._mesh.placement import place, sharding_of
from optax_accum._mesh.state_of_parameters import Dims
from optax_accum._microbatches.options import Split

Sharding: TypeAlias = NamedSharding | None  # None where it is not known


class GradientSharding(NamedTuple):
  """Where a gradient goes that is not sharded as its parameter."""

  spec: PartitionSpec  # over the data axes: what each device keeps when gradients are summed
  dims: Dims  # over explicit axes, on which sharding is part of the type


@dataclasses.dataclass(eq=False, repr=False)
class DataParallel:
  """A mesh, the axes of it that rows are spread over, and when gradients are reduced."""

  mesh: Mesh
  axes: Any  # one name or several; a tuple of them once checked
  reduce_in_loop: bool

  def __post_init__(self) -> None:
    if not isinstance(self.mesh, Mesh):
      raise TypeError(f"mesh={self.mesh!r} must be a jax.sharding.Mesh, as of jax.make_mesh.")
    given, known = self.axes, self.mesh.axis_names
    self.axes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not self.axes or len(set(self.axes)) < len(self.axes):
      raise ValueError(f"data_axis={given!r} must name one axis or more, each once.")
    for name in self.axes:
      if name not in known:
        raise ValueError(
          f"data_axis={name!r} is no axis of the mesh, which has {known}: name the axis that the"
          " rows are sharded over, or a tuple of several."
        )
    if manual := self._of_kind(AxisType.Manual):
      raise ValueError(
        f"The mesh axes {manual} are manual, i.e. this is inside shard_map or pmap: pass axis_name="
        " there, or the mesh outside."
      )

  def _of_kind(self, kind: AxisType) -> list[str]:
    """The axes of the mesh that are of this kind."""
    types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
    return [name for name, type_ in types if type_ == kind]

  @property
  def devices(self) -> int:
    """How many the rows are spread over."""
    return math.prod(self.mesh.shape[name] for name in self.axes)

  def __str__(self) -> str:
    word = "axis" if len(self.axes) == 1 else "axes"
    return f"the {self.devices} devices of {word} {_shown(self.axes)}"

  def local_split(self, split: Split, rows: int) -> Split:
    """The split of one device's part of a global batch of `rows` rows."""
    count, size, devices = split.num_microbatches, split.microbatch_size, self.devices
    self.check_rows(rows, count)
    if count is not None and (rows // devices) % count:
      fit = [n for n in range(1, rows // devices + 1) if (rows // devices) % n == 0]
      raise ValueError(
        f"num_microbatches={count} does not divide the {rows // devices} rows that each of {self}"
        f" has: use one of {fit}, or microbatch_size=, a multiple of {devices}."
      )
    if size is not None and size % devices:
      raise ValueError(
        f"microbatch_size={size} counts the rows on all devices together, and {self} do not"
        f" divide it: use {f'{size - size % devices} or ' * (size > devices)}"
        f"{size + devices - size % devices}."
      )
    return dataclasses.replace(
      split,
      axis_name=None if devices == 1 else self.axes,
      microbatch_size=None if size is None else size // devices,
      rows=rows,
    )

  def check_rows(self, rows: int, microbatches: int | None = None) -> None:
    """Checks that the devices divide the rows of the global batch."""
    if rows % self.devices:
      each = self.devices * (microbatches or 1)
      fewer = rows - rows % each
      fit = " or ".join(str(n) for n in (fewer, fewer + each) if n)
      raise ValueError(
        f"The batch has {rows} rows, which {self} do not divide: use {fit} rows, or fill up with"
        " rows that weight_fn counts as 0. (Otherwise each device would have to compute all rows.)"
      )

  def shard_spec(self, sharding: Sharding) -> PartitionSpec:
    """How a parameter is sharded over the data axes only.

    A dimension that is sharded over other axes too does not count: it is gathered for the step.
    """
    return self._spec_over_data(self.dims(sharding, 0))

  def _spec_over_data(self, dims: Dims) -> PartitionSpec:
    """The data axes alone."""
    ours = [names if set(names) <= set(self.axes) else () for names in dims]
    while ours and not ours[-1]:
      ours.pop()
    return PartitionSpec(*ours)

  def dims(self, sharding: Sharding, ndim: int) -> Dims:
    """The axes that each dimension of an array of this sharding is spread over."""
    named = [names_of(names) for names in getattr(sharding, "spec", ())]
    return (*named, *[()] * (ndim - len(named)))

  def gradient_sharding(self, own: Dims, state: Dims) -> GradientSharding | None:
    """Where the gradient goes of a parameter that is spread so, and its state so."""
    spec, own_spec = (self._spec_over_data(dims) for dims in (state, own))
    explicit = set(self._of_kind(AxisType.Explicit))
    ours, others = _only(own, explicit), _only(state, explicit)
    # Of two such arrays JAX adds none where a dimension is over other axes in each, nor where an
    # axis is on other dimensions.
    clash = any(a and b and a != b for a, b in zip(ours, others, strict=True))
    clash |= any(_where(others).get(name, dim) != dim for name, dim in _where(ours).items())
    if not clash and (not spec or spec == own_spec):
      return None
    taken = {*self.axes, *(name for names in state for name in names)}
    kept = _only(own, set(self.mesh.axis_names) - taken)
    return GradientSharding(spec, tuple(b or a for a, b in zip(kept, state, strict=True)))

  def automatic_spec(self, sharding: Sharding) -> PartitionSpec:
    """How an array of this sharding is spread over automatic axes that are no data axes."""
    auto = set(self._of_kind(AxisType.Auto)) - set(self.axes)
    return PartitionSpec(*_only(self.dims(sharding, 0), auto))

  def batch_spec(self, x: Leaf, batch_axis: int) -> PartitionSpec:
    """The `PartitionSpec` of a batch leaf over the data axes alone."""
    return self._spec_at(batch_axis % jnp.ndim(x))

  def output_spec(self, reduction: Reduction) -> PartitionSpec:
    """The `PartitionSpec` of a reduced output; one that collects has the devices' parts in turn."""
    return self._spec_at(0) if reduction.collected else PartitionSpec()

  def _spec_at(self, dimension: int) -> PartitionSpec:
    return PartitionSpec(*[None] * dimension, self.axes)

  def like(self, grads: Grads, shardings: Tree, wanted: Tree) -> Grads:
    """Gradients sharded as `spread` has their parameters. `shardings` are None where not known."""

    def reshard(g: Leaf, sharding: Sharding, wanted: GradientSharding | None) -> Leaf:
      if wanted is not None:
        return self._reshard(g, wanted.dims)
      return g if sharding is None else self._reshard(g, self.dims(sharding, g.ndim))

    return jax.tree.map(reshard, grads, shardings, wanted)

  def spread(self, x: Leaf, wanted: GradientSharding | None) -> Leaf:
    """An array of which each device takes its part over the data axes; with None, all as it is."""
    if wanted is None:
      return x
    ours = [names_of(names) or None for names in wanted.spec]
    return self._constrain(self._reshard(x, wanted.dims), [*ours, *[None] * (x.ndim - len(ours))])

  def gather(self, new: Leaf, x: Leaf, sharding: Sharding, wanted: GradientSharding | None) -> Leaf:
    """What became of the parts that `spread` made of `x`, sharded as `x` was."""
    if wanted is None:
      return new
    new = across_devices.sharded_like(new, x)
    new = self._constrain(new, self.dims(sharding, x.ndim))
    # Tied to `x`, which it takes the place of if donated. Otherwise XLA for TPU copies `x` as soon
    # as the program starts, and keeps both.
    return jax.lax.optimization_barrier((new, x))[0]

  def _constrain(self, x: Leaf, dims: Sequence[tuple[str, ...] | None]) -> Leaf:
    """Has XLA shard an array so, if data axes are automatic. A None among `dims` is left to it."""
    auto = self._of_kind(AxisType.Auto)
    if set(self.axes).isdisjoint(auto):
      return x
    free = PartitionSpec.UNCONSTRAINED
    spec = [free if d is None else tuple(name for name in d if name in auto) for d in dims]
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

  def reshard_over_data(self, x: Leaf, spec: PartitionSpec) -> Leaf:
    """Moves an array of explicit sharding to `spec` over the data axes, and leaves other axes."""
    now = self.dims(jax.typeof(x).sharding, x.ndim)
    kept = _only(now, set(self.mesh.axis_names) - set(self.axes))
    ours = [*map(names_of, spec), *[()] * (len(kept) - len(spec))]
    return self._reshard(x, [a + b for a, b in zip(kept, ours, strict=True)])

  def _reshard(self, x: Leaf, dims: Sequence[tuple[str, ...]]) -> Leaf:
    """Moves an array to a sharding over the explicit axes; over the others XLA does."""
    explicit = self._of_kind(AxisType.Explicit)
    if not explicit:
      return x
    spec = PartitionSpec(*_only(dims, set(explicit)))
    return jax.reshard(x, NamedSharding(self.mesh, spec))

  def place_batch(self, name: str, tree: Batch, batch_axis: int) -> Batch:
    """A batch on this mesh, sharded by its rows."""
    tree = place(self.mesh, name, tree, lambda x: self.batch_spec(x, batch_axis))
    for leaf, x in _validate.named_leaves(name, tree):
      sharding, rows = sharding_of(x), batch_axis % x.ndim
      names = names_of(sharding.spec[rows]) if sharding and rows < len(sharding.spec) else ()
      if not set(names) <= set(self.axes):
        raise ValueError(
          f"{leaf} has its rows sharded over {_shown(names)}: shard them over"
          f" data_axis={_shown(self.axes)} or not at all."
        )
    return tree


def _only(dims: Sequence[tuple[str, ...]], axes: Set[str]) -> list[tuple[str, ...]]:
  """The same dimensions, over no further axes than these."""
  return [tuple(name for name in names if name in axes) for names in dims]


def _where(dims: Sequence[tuple[str, ...]]) -> dict[str, int]:
  """The dimension that each axis is on."""
  return {name: dim for dim, names in enumerate(dims) for name in names}


def _shown(names: tuple[str, ...]) -> str:
  return repr(names[0] if len(names) == 1 else names)
