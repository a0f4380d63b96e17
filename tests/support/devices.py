"""Meshes of CPU devices, and of TPUs that nobody has, and arrays on them."""

import functools
import math
import os

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EVERYWHERE = P()  # in whole on every device


@functools.cache
def tpu_topology(chips=8):
  """8 or 64 chips of a TPU v5e, to compile for: `jax.jit(...).lower(...).compile()` works."""
  # Read when the compiler is loaded, which the first call does. It would ask the network which
  # TPU this is, and no two processes at once may load it (pytest-xdist has several).
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )
  return topologies.get_topology_desc({8: "v5e:2x4", 64: "v5e:8x8"}[chips], platform="tpu")


@functools.cache
def make_mesh(*shape, axes=("data", "model"), kind=AUTO, platform="cpu"):
  """A mesh of the first devices (all chips of a TPU), with as many of the `axes` as it has."""
  axes = axes[: len(shape)]
  if platform == "tpu":
    devices = topologies.make_mesh(tpu_topology(math.prod(shape)), shape, axes).devices
  else:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
  return Mesh(devices, axes, axis_types=(kind,) * len(axes))


def shardings(tree, mesh, specs):
  """A sharding for every leaf; `specs` is one `PartitionSpec`, or a prefix tree of them."""
  specs = jax.tree.broadcast(specs, tree)
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def put(tree, mesh, specs=EVERYWHERE):
  """The arrays on a mesh, without `specs` in whole on every device."""
  return jax.device_put(tree, shardings(tree, mesh, specs))


def abstract(tree, mesh, specs=EVERYWHERE):
  """The shapes and dtypes of such arrays, to lower with."""
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    tree,
    shardings(tree, mesh, specs),
  )
