"""Data parallelism: how a batch is spread over a mesh, and where an array goes over its axes."""

from collections.abc import Callable, Collection, Iterable
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum import _validate
from optax_accum._arithmetic.across_devices import names_of
from optax_accum._arithmetic.trees import Batch, Leaf
from optax_accum._mesh.placement import place, sharding_of
from optax_accum._microbatches import cut
from optax_accum._microbatches.options import Split


@dataclasses.dataclass(eq=False, repr=False)
class DataParallel:
  """A mesh, the axes of it that rows are spread over, and when gradients are reduced."""

  mesh: Mesh
  axes: Any  # one name or several; a tuple of them once checked
  reduce_in_loop: bool

  def __post_init__(self) -> None:
    if not isinstance(self.mesh, Mesh):
      raise TypeError(
        f"mesh={self.mesh!r} must be a jax.sharding.Mesh, as of jax.make_mesh."
      )
    given, known = self.axes, self.mesh.axis_names
    self.axes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not self.axes or len(set(self.axes)) < len(self.axes):
      raise ValueError(
        f"data_axis={given!r} must name one axis or more, each once."
      )
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
    count, size, devices = (
      split.num_microbatches,
      split.microbatch_size,
      self.devices,
    )
    self.check_rows(rows, count)
    if count is not None and (rows // devices) % count:
      fit = [
        n for n in range(1, rows // devices + 1) if (rows // devices) % n == 0
      ]
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

  def check_rows(
    self, rows: int, microbatches: int | None = None, of: str = "The batch"
  ) -> None:
    """Checks that the devices divide the rows of the global batch."""
    if rows % self.devices:
      each = self.devices * (microbatches or 1)
      fewer = rows - rows % each
      fit = " or ".join(str(n) for n in (fewer, fewer + each) if n)
      raise ValueError(
        f"{of} has {rows} rows, which {self} do not divide: use {fit} rows, or fill up with"
        " rows that weight_fn counts as 0. (Otherwise each device would have to compute all rows.)"
      )

  def over_data(self, spec: PartitionSpec) -> PartitionSpec:
    """A sharding over the data axes only.

    A dimension that is sharded over other axes too does not count: it is gathered for the step.
    """
    dims = [names_of(names) for names in spec]
    return normal(
      names if set(names) <= set(self.axes) else () for names in dims
    )

  def over_automatic(self, spec: PartitionSpec) -> PartitionSpec:
    """A sharding over the automatic axes only that are no data axes."""
    return over(spec, set(self._of_kind(AxisType.Auto)) - set(self.axes))

  def gradient_spec(
    self, own: PartitionSpec, state: PartitionSpec
  ) -> PartitionSpec | None:
    """The sharding of a gradient, by that of its parameter and of its state. None: as the former.

    It goes to its state if that is spread in another way over the data axes, or over explicit ones,
    where JAX refuses to add the two. A dimension that the state does not shard stays spread as in
    the parameter, over axes that nothing else has.
    """
    explicit = self._of_kind(AxisType.Explicit)

    def differ(part: Callable[[PartitionSpec], PartitionSpec]) -> bool:
      return part(state) not in (PartitionSpec(), part(own))

    if not differ(self.over_data) and not differ(
      lambda spec: over(spec, explicit)
    ):
      return None
    taken = {*self.axes, *(name for names in state for name in names_of(names))}
    kept = over(own, set(self.mesh.axis_names) - taken)
    return normal(b or a for a, b in itertools.zip_longest(kept, state))

  def batch_spec(self, x: Leaf, batch_axis: int) -> PartitionSpec:
    """The `PartitionSpec` of a batch leaf over the data axes alone."""
    return PartitionSpec(*[None] * (batch_axis % jnp.ndim(x)), self.axes)

  def move(self, x: Leaf, spec: PartitionSpec) -> Leaf:
    """An array, sharded so: its type over explicit axes, and by a constraint over automatic ones.

    Where no data axis is automatic, automatic axes are left to the compiler.
    """
    explicit, automatic = map(self._of_kind, (AxisType.Explicit, AxisType.Auto))
    if explicit:
      x = jax.reshard(x, NamedSharding(self.mesh, over(spec, explicit)))
    if set(self.axes).isdisjoint(automatic):
      return x
    return jax.lax.with_sharding_constraint(
      x, NamedSharding(self.mesh, over(spec, automatic))
    )

  def move_over_data(self, x: Leaf, spec: PartitionSpec) -> Leaf:
    """An array of explicit sharding, sharded over the data axes as `spec`, else as before."""
    explicit = self._of_kind(AxisType.Explicit)
    if not explicit:
      return x
    others = over(
      jax.typeof(x).sharding.spec, set(self.mesh.axis_names) - set(self.axes)
    )
    dims = itertools.zip_longest(others, over(spec, explicit))
    both = PartitionSpec(*(names_of(a) + names_of(b) for a, b in dims))
    return jax.reshard(x, NamedSharding(self.mesh, both))

  def place_batch(
    self, name: str, tree: Batch, batch_axis: int, split: Split
  ) -> Batch:
    """A batch on this mesh, sharded by its rows."""
    spec = functools.partial(self.batch_spec, batch_axis=batch_axis)
    tree = place(self.mesh, name, tree, lambda leaves: list(map(spec, leaves)))
    for leaf, x in _validate.named_leaves(name, tree):
      axis = batch_axis % x.ndim
      over_rows = names_of([*spec_of(sharding_of(x)), *[None] * x.ndim][axis])
      explicit = self._of_kind(
        AxisType.Explicit
      )  # in a type, even over one device
      names = tuple(
        name
        for name in over_rows
        if self.mesh.shape[name] > 1 or name in explicit
      )
      if not set(names) <= set(self.axes):
        self._check_further(
          f"{leaf} has its rows sharded over {_shown(names)}", names
        )
        self._check_divides(names, x.shape[axis], split)
    return tree

  def _check_further(self, what: str, names: tuple[str, ...]) -> None:
    """Checks axes of rows of which some are no data axes: these are left to the compiler."""
    first, over_rows = (
      [n for n in x if self.mesh.shape[n] > 1] for x in (self.axes, names)
    )
    if set(over_rows[: len(first)]) != set(first):
      raise ValueError(
        f"{what}: shard them over data_axis={_shown(self.axes)} first, and then over further axes,"
        " or not at all."
      )
    if (
      explicit := set(names)
      .difference(self.axes)
      .intersection(self._of_kind(AxisType.Explicit))
    ):
      raise ValueError(
        f"{what}, and further axes than data_axis={_shown(self.axes)} must be automatic: make the"
        f" mesh with jax.sharding.AxisType.Auto for {_shown(tuple(explicit))}, or name it in"
        " data_axis. Or shard rows over data_axis alone, and let the loss jax.reshard its rows, and"
        " parameters where used."
      )

  def _check_divides(
    self, names: tuple[str, ...], rows: int, split: Split
  ) -> None:
    """Checks that the devices of these axes divide the rows of each microbatch."""
    local, each = self.local_split(split, rows), rows // self.devices
    size = cut.microbatch_rows(
      each, local.num_microbatches, local.microbatch_size
    )
    devices = math.prod(self.mesh.shape[name] for name in {*names, *self.axes})
    found = size * self.devices, each % size * self.devices
    if any(n % devices for n in found):
      fit = [
        n for n in range(1, rows // devices + 1) if rows % (n * devices) == 0
      ]
      last = f" (the last {found[1]})" if found[1] else ""
      raise ValueError(
        f"Microbatches of {found[0]} rows{last} are not divided by the {devices} devices of"
        f" {_shown(names)}, over which rows are sharded, so the compiler would move rows in each of"
        f" them: use num_microbatches= one of {fit}, or microbatch_size=, a multiple of {devices}."
      )


def spec_of(sharding: NamedSharding | None) -> PartitionSpec:
  """The `PartitionSpec` of a sharding; where that is not known, of an array that is everywhere."""
  return normal(() if sharding is None else sharding.spec)


def over(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
  """A sharding, over no further axes than these."""
  return normal(
    tuple(name for name in names_of(names) if name in axes) for names in spec
  )


def normal(dims: Iterable[Any]) -> PartitionSpec:
  """The `PartitionSpec` of these dimensions that equals all others that say the same."""
  named = [names_of(names) for names in dims]
  while named and not named[-1]:
    named.pop()
  return PartitionSpec(*named)


def _shown(names: tuple[str, ...]) -> str:
  return repr(names[0] if len(names) == 1 else names)
