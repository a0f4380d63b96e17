"""Where a check runs a loss: on one device, and over the mesh of a step."""

from collections.abc import Callable
import contextlib
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from optax_accum._arithmetic.trees import Tree
from optax_accum._microbatches.loss import LocalLoss

Run: TypeAlias = Callable[..., Tree]


class Devices(NamedTuple):
  """The devices of a step."""

  axes: tuple[Any, ...] = ()  # which the loss may name
  loss: Any = None  # that of the step, over its mesh
  sends: bool = False  # whether devices exchange something in it
  is_alone: bool = True  # whether the whole batch runs on one device

  @property
  def mesh(self):
    return self.loss and self.loss.parallel.mesh

  @property
  def where(self) -> str:
    """Where the whole batch runs, in words."""
    if not self.is_alone:
      return "its mesh"
    if self.axes:
      return "one device, where its axes have size 1"
    return "one device, without named axes"

  @property
  def first(self) -> "Devices":
    """The first device, where the axes have size one."""
    return self._replace(loss=None)

  @property
  def few(self) -> "Devices":
    """As few as divide those of each axis of the mesh, unless the loss asks for all."""
    mesh = self.mesh
    some = []
    for name, size in mesh.shape.items():
      count = 1
      if name in self.axes:
        divisors = [
          n for n in range(2, size) if size % n == 0 and self.is_alone
        ]
        count = min(divisors, default=size)
      some.append(slice(count))
    mesh = Mesh(
      mesh.devices[tuple(some)], mesh.axis_names, axis_types=mesh.axis_types
    )
    parallel = dataclasses.replace(self.loss.parallel, mesh=mesh)
    loss = dataclasses.replace(self.loss, parallel=parallel)
    return self._replace(loss=loss)

  def loss_of(self, local: LocalLoss):
    """A loss, over the mesh if there is one."""
    if self.loss:
      return dataclasses.replace(self.loss, local=local)
    return local

  def mapped(self, run: Run) -> Run:
    """`run`, in which a loss may name the axes: over a mesh it may anyway."""
    if self.loss or not self.axes:
      return run
    return jax.shard_map(
      run,
      in_specs=PartitionSpec(),
      out_specs=PartitionSpec(),
      axis_names=set(self.axes),
      check_vma=False,
    )

  def compiled(self, run: Run) -> Run:
    """A program of it, compiled fast: it runs some hundred times on few rows."""
    options = {}
    if jax.default_backend() == "cpu":
      options = {"xla_backend_optimization_level": 0}
    program = jax.jit(self.mapped(run), compiler_options=options)

    if not self.loss:
      return program

    def over_mesh(*args):
      with on(self.mesh):  # where keys are not yet
        placed = NamedSharding(self.mesh, PartitionSpec())
        return program(*jax.device_put(args, placed))

    return over_mesh


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
  """Sets a mesh, if there is one."""
  return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


def one_device(mesh: Mesh | None, axes: tuple[Any, ...]) -> Mesh | None:
  """A mesh of one device with the axes of a mesh or these, which the loss may name."""
  mesh = mesh or jax.sharding.get_mesh()
  names = mesh.axis_names or axes
  if not names:
    return None
  devices = jax.local_devices() if mesh.empty else mesh.local_devices
  first = np.reshape(devices[:1], (1,) * len(names))
  return Mesh(first, names, axis_types=mesh.axis_types or None)
