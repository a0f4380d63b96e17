"""What differs between the versions of JAX that are allowed. Nothing else asks for one."""

from typing import Any

import jax

# Whether XLA for TPU and GPU moves an all-reduce out of a loop wrongly (XLA issue 49143).
HOISTS_ALL_REDUCES = jax.__version_info__ < (0, 12)

# Whether a backward pass can add gradients to references within a `jax.checkpoint` in a scan.
ADDS_TO_REFERENCES = jax.__version_info__ >= (0, 10)

# Whether it then adds nothing for an index before the array, which reads nothing.
GATHERS_RIGHTLY = jax.__version_info__ < (0, 11)

# Whether the types of what a program returned say which memory it is in, over a mesh too.
TYPES_SAY_MEMORY = jax.__version_info__ >= (0, 10)


def scan_inputs(eqn) -> tuple[int, int]:
  """How many inputs of a scan are constants, and how many are carried."""
  params = eqn.params
  if "num_consts" in params:
    return params["num_consts"], params["num_carry"]
  consts, carried, _ = map(len, params["ft_in"].unpack())  # JAX 0.12
  return consts, carried


def primitive_name(eqn) -> str:
  """What an equation calls: in a backward pass JAX 0.12 calls some by another name."""
  name: str = eqn.primitive.name
  if name.startswith("vjp_node["):
    name = name.removeprefix("vjp_node[").removesuffix("]")
  return name


def inner_jaxprs(eqn) -> list[Any]:
  """The jaxprs within an equation, such as a scan's body and a conditional's branches."""
  leaves = jax.tree.leaves(list(eqn.params.values()))
  found = [getattr(x, "jaxpr", x) for x in leaves]
  return [x for x in found if hasattr(x, "eqns")]
