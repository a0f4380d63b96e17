"""What a loss gives for a call, in NumPy, and how much of a difference may be rounding."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Aux, Grads
from optax_accum._check_split.call import Call
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.loss import Outputs

# By name: "loss", "grads['w']", "aux['count']". None where there is no such array.
Arrays: TypeAlias = Mapping[str, np.ndarray | None]

_WIDE = dict.fromkeys("iub", np.int64) | {"c": np.complex128}


class Outcome(NamedTuple):
  """What a loss gave for a call."""

  call: Call
  arrays: dict[str, np.ndarray]
  allowed: dict[str, float]  # how much of a difference may be rounding
  names: tuple[Grads, Aux]  # with the names of the arrays in their place

  @classmethod
  def of(cls, call: Call, out: Outputs, is_single: bool) -> "Outcome":
    """Of what ran; `is_single`: whether some of it is computed in float32."""
    loss, aux, grads, *_ = jax.device_get(without_keys(out))
    names = _names("grads", grads), _names("aux", aux)
    leaves = map(_wide, jax.tree.leaves((loss, grads, aux)))
    arrays = dict(zip(jax.tree.leaves(("loss", names)), leaves, strict=True))
    sizes = {name: _largest(x) for name, x in arrays.items()}
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    main = jax.tree.leaves(("loss", names[0]))
    least = 1e-2 * max(sizes[name] for name in main)
    sizes |= {name: max(sizes[name], least) for name in main}
    eps = max(jnp.finfo(x.dtype).eps for x in jax.tree.leaves((loss, grads)))
    tolerance = 1e-9 if eps < 1e-12 and not is_single else 1e-4
    allowed = {name: tolerance * size for name, size in sizes.items()}
    return cls(call, arrays, allowed, names)

  @property
  def main(self) -> dict[str, np.ndarray]:
    """The loss and the gradients."""
    return {name: x for name, x in self.arrays.items() if name[:3] != "aux"}

  def times(self, factor: float) -> "Outcome":
    """The same with another loss and gradients: these, times a number."""
    arrays = {name: factor * x for name, x in self.main.items()}
    allowed = {name: factor * self.allowed[name] for name in arrays}
    return self._replace(
      arrays=self.arrays | arrays, allowed=self.allowed | allowed
    )

  @property
  def is_finite(self) -> bool:
    return all(np.isfinite(x).all() for x in self.main.values())

  def in_times_of(self, sizes: Mapping[str, float]) -> np.ndarray:
    """Loss and gradients as one vector, in times of these numbers."""
    return np.concatenate(
      [
        np.ravel(x).view(float) / max(sizes[name], 1e-100)
        for name, x in self.main.items()
      ]
    )

  def compare(self, arrays: Arrays) -> list[LeafComparison]:
    """These arrays beside others."""
    return [
      LeafComparison(
        name, _largest(x), _difference(x, arrays[name]), self.allowed[name]
      )
      for name, x in self.arrays.items()
    ]

  def fits(self, arrays: Arrays) -> bool:
    """Whether loss and gradients are these, but for rounding."""
    return all(x.agrees for x in self.compare(arrays) if x.name[:3] != "aux")


def without_keys(tree):
  """A tree with the words of random keys in their place."""
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if is_key(x) else x, tree
  )


def _names(root: str, tree):
  return jax.tree_util.tree_map_with_path(
    lambda path, _: _validate.leaf_name(root, path), tree
  )


def _wide(x) -> np.ndarray:
  x = np.asarray(x)
  return x.astype(_WIDE.get(x.dtype.kind, np.float64))


def _largest(x: np.ndarray) -> float:
  return float(np.max(np.abs(x), initial=0.0))


def _difference(x: np.ndarray, y: np.ndarray | None) -> float:
  if y is None or x.shape != y.shape:
    return float("inf")
  return _largest(x - y)
