"""Names for the pytrees that are passed around. To a type checker each of them is anything."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Tree: TypeAlias = Any  # whatever pytree
Params: TypeAlias = Any  # what is differentiated and updated
Grads: TypeAlias = Any  # of the parameters, leaf by leaf
OptState: TypeAlias = Any  # of an optax transformation
Batch: TypeAlias = Any  # arrays with an axis of rows
Carry: TypeAlias = Any  # what each microbatch hands to the next
Aux: TypeAlias = Any  # what a loss returns in addition to its value

Leaf: TypeAlias = Any  # an array, a shape, a tracer or a number
Leaves: TypeAlias = list[Any]
Path: TypeAlias = tuple[Any, ...]  # of a leaf, as jax.tree_util has it
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
