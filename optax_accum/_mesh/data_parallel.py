"""Data parallelism: the axes of a mesh that rows are spread over, and what goes over which axes."""

from collections.abc import Callable
import dataclasses
import itertools
import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum._arithmetic.across_devices import names_of
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._mesh.specs import normal, over, shown
from optax_accum._microbatches.options import Split


@dataclasses.dataclass(frozen=True)
class DataParallel:
  """A mesh, and the axes of it that rows are spread over."""

  mesh: Mesh
  axes: tuple[str, ...]

  @classmethod
  def of(cls, mesh: Mesh, data_axis) -> "DataParallel":
    """What was asked for. Checked."""
    axes = names_of(data_axis)
    for name in axes:
      if name not in mesh.axis_names:
        raise ValueError(
          f"data_axis={name!r} is no axis of the mesh, which has {mesh.axis_names}: name the axis"
          " that the rows are sharded over, or a tuple of several."
        )
    return cls(mesh, axes)

  def _of_kind(self, kind: AxisType) -> list[str]:
    """The axes of the mesh that are of this kind."""
    types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
    return [name for name, type_ in types if type_ == kind]

  @property
  def explicit(self) -> list[str]:
    """The axes that are parts of the types of arrays."""
    return self._of_kind(AxisType.Explicit)

  @property
  def automatic(self) -> list[str]:
    """The axes that are left to the compiler, where they are not mapped."""
    return self._of_kind(AxisType.Auto)

  @property
  def others(self) -> set[str]:
    """The axes that are no data axes."""
    return set(self.mesh.axis_names) - set(self.axes)

  @property
  def devices(self) -> int:
    """How many the rows are spread over."""
    return math.prod(self.mesh.shape[name] for name in self.axes)

  def __str__(self) -> str:
    word = "axis" if len(self.axes) == 1 else "axes"
    return f"the {self.devices} devices of {word} {shown(self.axes)}"

  def on_device(self, split: Split) -> Split:
    """The split of one of the devices. Checked."""
    # None stands for one device, where nothing is summed over devices.
    axis_name = None if self.devices == 1 else self.axes
    size = split.microbatch_size
    devices = self.devices
    if size is not None and size % devices:
      # The message offers the nearest sizes that divide; a size of 0 is none.
      below = size - size % devices
      fits = f"{below} or {below + devices}" if below else f"{devices}"
      raise ValueError(
        f"microbatch_size={size} counts the rows on all devices together, and {self} do not"
        f" divide it: use {fits}."
      )
    # A size of None stays None: then `num_microbatches` splits the rows.
    return dataclasses.replace(
      split, axis_name=axis_name, microbatch_size=size and size // devices
    )

  def check_rows(
    self, rows: int, microbatches: int | None = None, of: str = "The batch"
  ) -> None:
    """Checks that the devices divide the rows of the global batch."""
    if rows % self.devices:
      # The rows that the message offers also split evenly on each device, if a count is given.
      each = self.devices * (microbatches or 1)
      fewer = rows - rows % each
      fit = f"{fewer} or {fewer + each}" if fewer else f"{each}"
      raise ValueError(
        f"{of} has {rows} rows, which {self} do not divide: use {fit} rows, or fill up with"
        " rows that weight_fn, or the weight that a loss returns (has_weight), counts as 0."
        " (Otherwise each device would have to compute all rows.)"
      )

  def over_data(self, spec: PartitionSpec) -> PartitionSpec:
    """A sharding over the data axes only.

    A dimension that is sharded over other axes too does not count: it is gathered for the step.
    """

    def kept(names):
      if set(names) <= set(self.axes):
        return names
      return ()  # not sharded

    dims = map(names_of, spec)
    return normal(map(kept, dims))

  def over_automatic(self, spec: PartitionSpec) -> PartitionSpec:
    """A sharding over the automatic axes only that are no data axes."""
    return over(spec, self.others.intersection(self.automatic))

  def gradient_spec(
    self, own: PartitionSpec, state: PartitionSpec
  ) -> PartitionSpec | None:
    """The sharding of a gradient, by that of its parameter and of its state. None: as the former.

    It goes to its state if that is spread in another way over the data axes, or over explicit ones,
    where JAX refuses to add the two. A dimension that the state does not shard stays spread as in
    the parameter, over axes that nothing else has.
    """

    def differ(part: Callable[[PartitionSpec], PartitionSpec]) -> bool:
      # A state that these axes do not shard asks for nothing.
      return part(state) not in (PartitionSpec(), part(own))

    if not differ(self.over_data) and not differ(
      lambda spec: over(spec, self.explicit)
    ):
      return None
    # The state needs these axes, so the parameter cannot keep them.
    taken = {name for names in state for name in names_of(names)}
    kept = over(own, self.others - taken)
    # The state decides on a dimension; where it names no axes, the parameter keeps its own.
    pairs = itertools.zip_longest(kept, state)
    return normal(of_state or of_own for of_own, of_state in pairs)

  def output_spec(self, kind: Reduction) -> PartitionSpec:
    """The `PartitionSpec` of an output that is so reduced."""
    if kind.collected:
      # A "stack" or "concat" has the parts of the devices in turn, on its first axis.
      return PartitionSpec(self.axes)
    # The others were combined over the devices, and all have the same.
    return PartitionSpec()

  def move(self, x, spec: PartitionSpec):
    """An array, sharded so: its type over explicit axes, and by a constraint over automatic ones.

    Where no data axis is automatic, automatic axes are left to the compiler.
    """
    explicit = self.explicit
    automatic = self.automatic
    if explicit:
      typed = NamedSharding(self.mesh, over(spec, explicit))
      x = jax.reshard(x, typed)
    if set(self.axes).isdisjoint(automatic):
      return x
    wanted = NamedSharding(self.mesh, over(spec, automatic))
    return jax.lax.with_sharding_constraint(x, wanted)

  def move_over_data(self, x, spec: PartitionSpec):
    """An array of explicit sharding, sharded over the data axes as `spec`, else as before."""
    explicit = self.explicit
    if not explicit:
      return x
    # This is how axes that are no data axes shard it now; that stays.
    others = over(jax.typeof(x).sharding.spec, self.others)
    # The shorter spec is filled up with None, of which `names_of` makes ().
    dims = itertools.zip_longest(others, over(spec, explicit))
    both = PartitionSpec(*(names_of(a) + names_of(b) for a, b in dims))
    return jax.reshard(x, NamedSharding(self.mesh, both))
