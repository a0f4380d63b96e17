"""Where a check runs a loss: on one device, and over the mesh of a step."""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from optax_accum._arithmetic.trees import (
  Grads,
  Kwargs,
  Leaf,
  Leaves,
  Params,
  Tree,
)
from optax_accum._check_split.probes import Array, Call
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

Run: TypeAlias = Callable[..., Tree]
OfArrays: TypeAlias = Callable[[Leaves], Tree]
EVERY = PartitionSpec()  # of what every device has in whole


class Devices(NamedTuple):
  """The devices of a step."""

  axes: tuple[Any, ...] = ()  # which the loss may name
  loss: Any = None  # the `PlacedLoss` of the step, over its mesh
  sends: bool = False  # whether devices exchange something in it
  size: int = 0  # the rows of one of its microbatches, on all devices
  is_alone: bool = True  # whether the whole batch runs on one device

  @property
  def mesh(self) -> Any:
    return self.loss and self.loss.parallel.mesh

  def on_one(self, run: Run) -> Run:
    """`run` on the first device, where the axes have size one."""
    return self._mapped(run, EVERY, EVERY) if self.axes else run

  def _mapped(self, run: Run, in_specs: Tree, out_specs: Tree) -> Run:
    """`run` on each device of the mesh that is set."""
    return jax.shard_map(
      run,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=set(self.axes),
      check_vma=False,
    )

  def step(self, call: Call, options: Kwargs) -> OfArrays:
    """What a step of these options computes, over its mesh if it has one."""
    run: Run = microbatch_value_and_grad(**options)
    if self.loss is None:
      return self.on_one(functools.partial(call.called, run))
    split = Split.of(dict(options), default_argnum=1)
    loss = self.loss._replace(
      local=LocalLoss.of(options["fun"], 0, True, split, options)
    )

    def value_and_grad(*args: Tree, **kwargs: Tree) -> tuple[Tree, Grads]:
      out = loss.value_and_grad(None, *args, **kwargs).outputs
      return (out.loss, out.aux), out.grads

    return functools.partial(call.called, value_and_grad)

  @property
  def few(self) -> Mesh:
    """As few devices as divide those of each axis of the mesh, unless the loss asks for all."""

    def number(name: str, n: int) -> int:
      divisors = (k for k in range(2, n) if n % k == 0 and self.is_alone)
      return next(divisors, n) if name in self.axes else 1

    some = tuple(slice(number(*axis)) for axis in self.mesh.shape.items())
    return Mesh(
      self.mesh.devices[some],
      self.mesh.axis_names,
      axis_types=self.mesh.axis_types,
    )

  def of_each(self, fun: Run, call: Call) -> OfArrays:
    """``(loss, aux), gradients`` of each of few devices, one after another."""
    parallel = dataclasses.replace(self.loss.parallel, mesh=self.few)

    def own(
      params: Params, /, *args: Tree, **kwargs: Tree
    ) -> tuple[Tree, Grads]:
      run = lambda params: fun(params, *args, **kwargs)  # noqa: E731
      loss, back, aux = jax.vjp(run, params, has_aux=True)
      index = lax.axis_index(self.axes)

      def of_one(
        i: Leaf,
      ) -> Grads:  # some of it is what others made of what it sent
        return lax.psum(back((index == i).astype(loss.dtype))[0], self.axes)

      grads = lax.map(of_one, jnp.arange(parallel.devices))
      return jax.tree.map(lambda x: jnp.asarray(x)[None], (loss, aux)), grads

    def spec(x: Array) -> PartitionSpec:
      return (
        parallel.batch_spec(x.value, x.axis) if x.role == "batch" else EVERY
      )

    specs = list(map(spec, call.arrays))
    out_specs = PartitionSpec(self.axes), EVERY
    mapped = self._mapped(
      functools.partial(call.called, own), (specs,), out_specs
    )
    return lambda values: mapped(
      list(map(parallel.move_over_data, values, specs))
    )


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
  return Mesh(
    np.reshape(devices[:1], (1,) * len(names)),
    names,
    axis_types=mesh.axis_types or None,
  )
