"""A program that holds references, for JAX's transformations, which would fail within it.

`jax.vmap` cannot give a reference a further axis. Reverse mode is wrong without a word, or fails,
where a loop's body holds references (JAX 0.10 to 0.12). So a derivative is another program's.
"""

from collections.abc import Callable
import functools
from typing import Any, TYPE_CHECKING

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching, mlir

if TYPE_CHECKING:
  from jax.extend.core import ClosedJaxpr

_ARRAY = object()  # in the place of one


class Program:
  """A function that is traced once. What it closes over is `held`, and may be given anew."""

  def __init__(self, fun: Callable[..., Any], *args: Any):
    closed, like = jax.make_jaxpr(fun, return_shape=True)(*args)
    self.jaxpr, self.held = closed.jaxpr, closed.consts
    self._out_tree: Any = jax.tree.structure(like)

  def __call__(self, held: list[Any], *args: Any) -> Any:
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # longer to import than this package

    leaves = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, held))(*jax.tree.leaves(args))
    return self._out_tree.unflatten(leaves)


class Traced:
  """A function that is traced once for each type of its arguments, with what it closes over.

  Its arguments that are no arrays are the same in every call.
  """

  def __init__(self, fun: Callable[..., Any]):
    self._fun = fun
    self._programs: dict[Any, Program] = {}
    self._instead: dict[int, Any] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    treedef: Any
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = _arrays(leaves)
    types = tuple((x.shape, x.dtype) for x in arrays)
    if types not in self._programs:

      def fun(*arrays: jax.Array) -> Any:
        args, kwargs = treedef.unflatten(_put(leaves, arrays))
        return self._fun(*args, **kwargs)

      self._programs[types] = Program(fun, *arrays)
    program = self._programs[types]
    return program([self._instead.get(id(x), x) for x in program.held], *arrays)

  @property
  def has_effects(self) -> bool:
    """Whether it prints, calls back, checks, or has references from outside."""
    effects = {e for program in self._programs.values() for e in program.jaxpr.effects}
    return any(type(e).__name__ != "NamedAxisEffect" for e in effects)  # which is a mesh axis

  def tracers(self) -> dict[int, jax.core.Tracer]:
    """The tracers that it closes over, by their ids."""
    consts = (x for program in self._programs.values() for x in program.held)
    return {id(x): x for x in consts if isinstance(x, jax.core.Tracer)}

  def closing_over(self, instead: dict[int, Any]) -> "Traced":
    """The function with other values in the place of these tracers."""
    other = Traced(self._fun)
    other._programs, other._instead = self._programs, instead
    return other


def differentiated_as(
  other: Callable[..., Any], run: Callable[..., Any], parts: list[Traced], tree: Any
) -> Any:
  """``run(parts, tree)``, whose derivatives are those of ``other(parts, tree)``.

  The other is traced where it is differentiated, which may be when the call is long over, and JAX
  then knows the tangents of what it is given alone. So `parts` are all that has tracers of its own.
  Where one of them has effects, which neither JAX nor this can order, the other is run.
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  args = _arrays(leaves)
  leaves = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]  # JAX keeps the rule below
  program = Traced(lambda *args: run(parts, treedef.unflatten(_put(leaves, args))))
  jax.make_jaxpr(program)(*args)
  if any(part.has_effects for part in parts):
    return other(parts, tree)
  held = {key: x for part in (program, *parts) for key, x in part.tracers().items()}
  count, keys = len(args), list(held)

  @jax.custom_jvp
  def call(*both: Any) -> Any:
    def flat(*both: Any) -> Any:
      args, values = _halves(both)
      return program.closing_over(values)(*args)

    closed, like = jax.make_jaxpr(flat, return_shape=True)(*both)
    like_tree: Any = jax.tree.structure(like)
    return like_tree.unflatten(_in_place().bind(*both, program=closed))

  def _halves(both: Any) -> tuple[Any, dict[int, Any]]:
    return both[:count], dict(zip(keys, both[count:], strict=True))

  def derivative(both: Any, tangents: Any) -> Any:
    moves = [not isinstance(t, SymbolicZero) for t in tangents]

    def of_moving(*moving: Any) -> Any:
      new = iter(moving)
      args, values = _halves([next(new) if m else x for m, x in zip(moves, both, strict=True)])
      others = [part.closing_over(values) for part in parts]
      return other(others, treedef.unflatten(_put(leaves, args)))

    moved = lambda xs: [x for m, x in zip(moves, xs, strict=True) if m]  # noqa: E731
    return jax.jvp(of_moving, moved(both), moved(tangents))

  call.defjvp(derivative, symbolic_zeros=True)
  return call(*args, *held.values())


def _arrays(leaves: list[Any]) -> list[jax.Array]:
  return [x for x in leaves if isinstance(x, jax.Array)]


def _put(leaves: list[Any], arrays: Any) -> list[Any]:
  """`leaves` with others of their arrays."""
  new = iter(arrays)
  return [next(new) if x is _ARRAY or isinstance(x, jax.Array) else x for x in leaves]


def _refuse(*args: Any, **kwargs: Any) -> Any:
  raise NotImplementedError(
    "in_place=True adds gradients to references, which jax.vmap cannot give a further axis: pass"
    " in_place=False, or take jax.lax.map (without its batch_size, which is a vmap)."
  )


@functools.cache
def _in_place() -> Any:
  """A primitive of our own: it has effects within, which JAX cannot have in a custom_jvp."""
  from jax.extend.core import jaxpr_as_fun, Primitive  # longer to import than this package

  def run(*args: Any, program: "ClosedJaxpr") -> list[Any]:
    return list(jaxpr_as_fun(program)(*args))

  primitive = Primitive("in_place")
  primitive.multiple_results = True
  primitive.def_impl(run)
  primitive.def_abstract_eval(lambda *args, program: program.out_avals)
  mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
  batching.primitive_batchers[primitive] = _refuse
  return primitive
