"""Programs that hold references, which JAX's transformations cannot transform.

`jax.vmap` fails. Reverse mode is silently wrong, or fails, where the body of a loop holds
references (JAX 0.10 to 0.12). So the derivative comes from another program.
"""

from collections.abc import Callable
import functools
import itertools
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from optax_accum._arithmetic.trees import Args, Kwargs, Leaves, Tree


class Program:
  """A function that is traced once: `held` can be replaced, and so can arrays in its arguments."""

  def __init__(self, fun: Callable[..., Tree], *args: Tree, **kwargs: Tree):
    treedef: Any
    leaves, treedef = jax.tree.flatten((args, kwargs))

    def of_arrays(*arrays: jax.Array) -> Tree:
      new = iter(arrays)
      leaves_with = [next(new) if isinstance(x, jax.Array) else x for x in leaves]
      args, kwargs = treedef.unflatten(leaves_with)
      return fun(*args, **kwargs)

    closed, like = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays_of(leaves))
    self.jaxpr, self.held = closed.jaxpr, closed.consts
    self.out_tree: Any = jax.tree.structure(like)

  def __call__(self, held: Leaves, *args: Tree, **kwargs: Tree) -> Tree:
    return self.out_tree.unflatten(_evaluate(self.jaxpr, held, arrays_of((args, kwargs))))


def arrays_of(tree: Tree) -> list[jax.Array]:
  """The leaves that are arrays."""
  return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def traced_once(fun: Callable[..., Tree]) -> Callable[..., Tree]:
  """`fun`, traced once for each type of its arrays; all else is the same in every call."""
  programs: dict[tuple[Any, ...], Program] = {}

  @functools.wraps(fun)
  def call(*args: Any, **kwargs: Any) -> Tree:
    types = tuple(map(jax.typeof, arrays_of((args, kwargs))))
    if types not in programs:
      programs[types] = Program(fun, *args, **kwargs)
    return programs[types](programs[types].held, *args, **kwargs)

  return call


def differentiated_as(other: Callable[..., Tree], run: Callable[..., Tree], *args: Tree) -> Tree:
  """``run(*args)`` with the derivatives of ``other(*args)``, which is run if it has effects."""
  plain = Program(other, *args)
  if any(type(e).__name__ != "NamedAxisEffect" for e in plain.jaxpr.effects):  # of a mesh axis
    return plain(plain.held, *args)
  added = Program(run, *args)
  inputs = *plain.held, *added.held, *arrays_of(args)
  leaves = _in_place().bind(*inputs, plain=plain.jaxpr, added=added.jaxpr)
  return added.out_tree.unflatten(leaves)


def _evaluate(jaxpr: Any, held: Leaves, arrays: Leaves) -> Leaves:
  from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # longer to import than this package

  return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, held))(*arrays))


@functools.cache
def _in_place() -> Any:
  """A primitive of our own: it has effects within, which JAX cannot have in a custom_jvp."""
  from jax.extend.core import Primitive  # longer to import than this package

  def run(*inputs: Any, plain: Any, added: Any) -> Leaves:
    start, stop = len(plain.constvars), len(plain.constvars) + len(added.constvars)
    return _evaluate(added, [*inputs[start:stop]], [*inputs[stop:]])

  def derivative(inputs: Args, tangents: Args, *, plain: Any, added: Any) -> tuple[Leaves, Leaves]:
    moves = [not isinstance(t, ad.Zero) for t in tangents]

    def of_moving(*moving: jax.Array) -> Leaves:
      new = iter(moving)
      both = zip(moves, inputs, strict=True)
      values = [next(new) if moved else x for moved, x in both]
      count = len(plain.constvars)
      return _evaluate(plain, values[:count], values[count + len(added.constvars) :])

    moving, along = ([*itertools.compress(xs, moves)] for xs in (inputs, tangents))
    return jax.jvp(of_moving, moving, along)

  def refuse(*args: Args, **params: Kwargs) -> None:
    raise NotImplementedError(
      "in_place=True adds gradients to references, which jax.vmap cannot give a further axis: pass"
      " in_place=False, or take jax.lax.map (without its batch_size, which is a vmap)."
    )

  primitive = Primitive("in_place")
  primitive.multiple_results = True
  primitive.def_impl(run)
  primitive.def_abstract_eval(lambda *inputs, plain, added: [x.aval for x in added.outvars])
  mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
  ad.primitive_jvps[primitive] = derivative
  batching.primitive_batchers[primitive] = refuse
  return primitive
