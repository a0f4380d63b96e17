"""How an array is sharded, written in one way: the algebra of `PartitionSpec`."""

from collections.abc import Collection, Iterable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from optax_accum._arithmetic.across_devices import names_of


def spec_of(sharding: NamedSharding | None) -> PartitionSpec:
  """The spec of a sharding; where that is not known, of an array that is whole on each device."""
  if sharding is None:
    return PartitionSpec()
  return normal(sharding.spec)


def normal(dims: Iterable[Any]) -> PartitionSpec:
  """The spec of these dimensions that equals all others that say the same."""
  named = [names_of(names) for names in dims]
  # Dimensions at the end that are not sharded are left out.
  while named and not named[-1]:
    named.pop()
  return PartitionSpec(*named)


def over(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
  """A spec over no further axes than these."""
  named = map(names_of, spec)
  return normal([name for name in names if name in axes] for names in named)


def sharded_dims(spec: PartitionSpec) -> dict[int, Any]:
  """The dimensions that are sharded, each with its axes."""
  # A `PartitionSpec` turns the () of `normal` into None.
  return {dim: names for dim, names in enumerate(spec) if names is not None}


def shown(names: tuple[str, ...]) -> str:
  """Axes as messages have them: one is no tuple."""
  if len(names) == 1:
    return repr(names[0])
  return repr(names)
