"""The reductions of a function's outputs over microbatches and devices: one object for each."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  hoisting,
  weighted_mean,
)
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.trees import Tree
from optax_accum._arithmetic.weighted_mean import Weight

Leaf: TypeAlias = jax.ShapeDtypeStruct
MergeFn: TypeAlias = Callable[
  [Any, Any], Any
]  # makes one of two values of an output, or a tree
Held: TypeAlias = (
  Any  # what a scan carries of one output from one microbatch to the next
)


@dataclasses.dataclass(eq=False, repr=False)
class Reduction:
  """Combines the values that one output has in all microbatches.

  A scan calls `start`, `add` with every microbatch, `join`, `over_devices` if rows are sharded over
  an axis, and `finish`.
  """

  name = ""
  ordered = False  # whether it matters which microbatch comes last
  collected = (
    False  # whether the scan keeps every value, for `join`, and holds nothing
  )
  axis = 0  # of the output, along which what is collected is joined
  # What all devices hold together, from what is held, the axis, and whether this device had a
  # microbatch that counts.
  over_devices: Callable[..., Held] = dataclasses.field(
    default=lambda held, *_: held, kw_only=True
  )
  # Whether nobody asked for it, so that it may be wrong for values per row.
  default: bool = dataclasses.field(default=False, kw_only=True)

  def __repr__(self) -> str:
    return repr(self.name)

  def check(
    self, name: str, leaf: Leaf, rows: int, dtype: DTypeLike | None
  ) -> None:
    """Checks that outputs like `leaf`, of `rows` rows, can be reduced, in `dtype` if given."""

  def start(self, leaf: Leaf, dtype: DTypeLike | None) -> Held:
    """What is held before the first microbatch."""
    return None if self.collected else across_devices.full_like(leaf, 0)

  def unhoisted(self, held: Held, shapes: hoisting.Shapes) -> Held:
    """What is held, such that XLA reduces arrays of these shapes over devices in the loop."""
    return hoisting.unhoisted(held, shapes)

  def add(self, held: Held, value: jax.Array, weight: Weight) -> Held:
    """What is held after one more microbatch. A weight of zero changes nothing."""
    return held

  def join(self, held: Held, collected: Any, tail: Any) -> Held:
    """What is held in the end; `tail` is what was collected of the smaller last one, or None."""
    return held

  def finish(self, held: Held, weight: Weight, like: Leaf) -> jax.Array:
    """The reduced value, in the dtype of `like`; `weight` is the total over devices."""
    return held

  def only(self, value: jax.Array) -> jax.Array:
    """The reduced value where there is one microbatch, which counts."""
    return value

  def scattered(
    self, spec: PartitionSpec, automatic: PartitionSpec
  ) -> "Reduction":
    """The same, but each device keeps only its part, as `spec` says."""

    def own_part(*args):
      return across_devices.own_part(self.over_devices(*args), spec)

    return dataclasses.replace(self, over_devices=own_part)


@dataclasses.dataclass(eq=False, repr=False)
class Sum(Reduction):
  """The plain sum. Sums over devices come before the division, as weights do."""

  name = "sum"
  over_devices: Callable[..., Held] = lambda held, axis_name, _: lax.psum(
    held, axis_name
  )
  reduce_term: Callable[..., jax.Array] | None = (
    None  # over devices, in every microbatch
  )
  wide: bool = (
    False  # whether in float32 or better, whatever `accumulator_dtype` is
  )
  is_weighed: bool = (
    False  # whether values were weighed before, and none is to be left out
  )

  def check(
    self, name: str, leaf: Leaf, rows: int, dtype: DTypeLike | None
  ) -> None:
    dtypes.check_holds(name, leaf.dtype, dtype)

  def start(self, leaf: Leaf, dtype: DTypeLike | None) -> Held:
    dtype = dtypes.accumulator_dtype(leaf.dtype, None if self.wide else dtype)
    zeros = across_devices.full_like(leaf, 0, dtype)
    if self.reduce_term is None:
      return zeros
    reduced = jax.make_jaxpr(self.reduce_term, return_shape=True)(zeros)
    return across_devices.full_like(across_devices.types(reduced), 0)

  def term(
    self, value: jax.Array, weight: Weight, dtype: DTypeLike
  ) -> jax.Array:
    """What one microbatch adds if it counts."""
    return value.astype(dtype)

  def add(self, held: Held, value: jax.Array, weight: Weight) -> Held:
    if self.is_weighed:
      weight = 1.0
    term = self.term(value, weight, held.dtype)
    if self.reduce_term is None:
      # XLA for GPU keeps a second gradient where the term is selected and not the sum.
      total = held + term
      return weighted_mean.select(weighted_mean.counts(weight), total, held)
    term = weighted_mean.select(
      weighted_mean.counts(weight), term, jnp.zeros_like(term)
    )
    # Without the barrier XLA for TPU adds up full values and reduces after the loop.
    return held + lax.optimization_barrier(self.reduce_term(term))

  def finish(self, held: Held, weight: Weight, like: Leaf) -> jax.Array:
    return (
      held.astype(like.dtype)
      if jnp.issubdtype(like.dtype, jnp.inexact)
      else held
    )

  def only(self, value: jax.Array) -> jax.Array:
    inexact = jnp.issubdtype(value.dtype, jnp.inexact)
    return (
      value if inexact else value.astype(dtypes.accumulator_dtype(value.dtype))
    )

  def scattered(
    self, spec: PartitionSpec, automatic: PartitionSpec
  ) -> Reduction:
    scatter = functools.partial(
      across_devices.sum_scattered, spec=spec, automatic=automatic
    )
    return dataclasses.replace(self, over_devices=scatter)

  def in_loop(self, axis_name: AxisName) -> "Sum":
    """The same, but devices are reduced over in every microbatch."""
    reduced = lambda term: self.over_devices(term, axis_name, True)  # noqa: E731
    return dataclasses.replace(
      self, over_devices=lambda held, *_: held, reduce_term=reduced
    )


class Mean(Sum):
  """The weighted mean."""

  name = "mean"

  def check(
    self, name: str, leaf: Leaf, rows: int, dtype: DTypeLike | None
  ) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise TypeError(
        f'{name} has dtype {leaf.dtype}, which "mean" cannot keep: cast it to a float in the'
        ' function, or reduce it with "sum", "max", "min", "last" or "stack".'
      )
    super().check(name, leaf, rows, dtype)

  def term(
    self, value: jax.Array, weight: Weight, dtype: DTypeLike
  ) -> jax.Array:
    return weighted_mean.product(value, weight, dtype)

  def finish(self, held: Held, weight: Weight, like: Leaf) -> jax.Array:
    return weighted_mean.mean(held, weight, like.dtype)


@dataclasses.dataclass(eq=False, repr=False)
class Extreme(Reduction):
  """The largest value, or the smallest, element by element."""

  choose: Callable[..., jax.Array]
  limit: str  # what `jnp.finfo` and `jnp.iinfo` call the value that all others replace
  name: str

  def check(
    self, name: str, leaf: Leaf, rows: int, dtype: DTypeLike | None
  ) -> None:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
      raise TypeError(
        f'{name} has dtype {leaf.dtype}, which has no {self!r}: use "mean" or "sum".'
      )

  def start(self, leaf: Leaf, dtype: DTypeLike | None) -> Held:
    limit: float = jnp.inf if self.limit == "max" else -jnp.inf
    if leaf.dtype == jnp.bool_:
      limit = self.limit == "max"
    elif jnp.issubdtype(leaf.dtype, jnp.integer):
      limit = int(getattr(jnp.iinfo(leaf.dtype), self.limit))
    elif dtypes.is_float8(leaf.dtype):  # some have no infinity
      limit = float(getattr(jnp.finfo(leaf.dtype), self.limit))
    return across_devices.full_like(leaf, limit)

  def add(self, held: Held, value: jax.Array, weight: Weight) -> Held:
    return weighted_mean.select(
      weighted_mean.counts(weight), self.choose(held, value), held
    )


class Last(Reduction):
  """The value of the last microbatch that counts."""

  name = "last"
  ordered = True

  def add(self, held: Held, value: jax.Array, weight: Weight) -> Held:
    return weighted_mean.select(weighted_mean.counts(weight), value, held)


class Stack(Reduction):
  """Every microbatch's value, on a new leading axis."""

  name = "stack"
  collected = True

  def join(self, held: Held, collected: Any, tail: Any) -> Held:
    return (
      collected if tail is None else jnp.concatenate([collected, tail[None]])
    )

  def only(self, value: jax.Array) -> jax.Array:
    return value[None]


class Concat(Stack):
  """Every row's value, in the order of the batch, on the first axis of the output."""

  name = "concat"

  def check(
    self, name: str, leaf: Leaf, rows: int, dtype: DTypeLike | None
  ) -> None:
    if leaf.shape[:1] != (rows,):
      raise ValueError(
        f'{name} has shape {leaf.shape}; "concat" needs the {rows} rows of a microbatch as its'
        ' leading axis: move them there by jnp.moveaxis, or use "stack" for one value per'
        " microbatch."
      )

  def join(self, held: Held, collected: Any, tail: Any) -> Held:
    # Microbatch i has rows i, i + N, ... of the batch, so the index is the fast axis.
    rows = lax.collapse(jnp.moveaxis(collected, 0, 1), 0, 2)
    return rows if tail is None else jnp.concatenate([rows, tail])

  def only(self, value: jax.Array) -> jax.Array:
    return value


class Merge(Reduction):
  """A function of the user that makes one value of two. A value may be a tree of arrays.

  What is held is a value, and whether there is one yet: before, it is zeros, which do not count.
  """

  ordered = True

  def __init__(self, fun: MergeFn) -> None:
    super().__init__(over_devices=self._of_devices)
    self.fun, self.name = fun, getattr(fun, "__qualname__", repr(fun))

  def check(
    self, name: str, leaf: Tree, rows: int, dtype: DTypeLike | None
  ) -> None:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), leaf)
    try:
      merged = jax.eval_shape(self._of_both, like, like)
    except Exception as error:
      error.add_note(
        f"{name} is reduced by {self.name}(a, b), which was given two of {like}."
      )
      raise
    _validate.check_alike(
      f"what {self.name}(a, b) returned", name, merged, like
    )

  def start(self, leaf: Tree, dtype: DTypeLike | None) -> Held:
    zeros = jax.tree.map(lambda x: across_devices.full_like(x, 0), leaf)
    return zeros, across_devices.vary_like(
      jnp.asarray(False), jax.tree.leaves(zeros)[0]
    )

  def add(self, held: Held, value: Tree, weight: Weight) -> Held:
    value = jax.tree.map(_refusing_derivatives, value)
    return self._of_two(held, (value, weighted_mean.counts(weight)))

  def _of_both(self, a: Tree, b: Tree) -> Tree:
    """One value of two. The function gets containers of its own, which it may change."""
    return self.fun(*jax.tree.map(lambda x: x, (a, b)))

  def _of_two(self, first: Held, second: Held) -> Held:
    """What is held of two, of which there may be none yet."""
    (a, has_a), (b, has_b) = first, second
    either = _where(has_b, b, a)
    # A branch, as the gradient of what `fun` closes over is NaN by zeros, or the NaN of padding,
    # although they are not selected. Where `vmap` runs both, one value is merged with itself.
    merged = lax.cond(
      has_a & has_b,
      self._of_both,
      lambda a, b: either,
      _where(has_a, a, either),
      either,
    )
    return merged, has_a | has_b

  def _of_devices(
    self, held: Held, axis_name: AxisName, counted: object
  ) -> Held:
    # What all devices hold, on a new first axis, in the order of the mesh.
    own = jnp.arange(
      lax.axis_size(axis_name), dtype=jnp.int32
    ) == lax.axis_index(axis_name)
    places = lambda x: own.reshape(-1, *[1] * x.ndim)  # noqa: E731
    each = jax.tree.map(
      lambda x: across_devices.of_one(x[None], axis_name, places(x)), held
    )
    first, others = (
      jax.tree.map(lambda x: x[0], each),
      jax.tree.map(lambda x: x[1:], each),
    )
    return lax.scan(
      lambda held, other: (self._of_two(held, other), None), first, others
    )[0]

  def finish(self, held: Held, weight: Weight, like: Leaf) -> Tree:
    return held[0]


def _where(flag: bool | jax.Array, value: Tree, other: Tree) -> Tree:
  return jax.tree.map(
    functools.partial(weighted_mean.select, flag), value, other
  )


_refusing_derivatives = jax.custom_jvp(
  lambda x: x
)  # of what a function of the user reduces


@functools.partial(_refusing_derivatives.defjvp, symbolic_zeros=True)
def _refused(primals: Any, tangents: Any) -> Any:
  if not isinstance(tangents[0], SymbolicZero):
    raise NotImplementedError(
      "An output that is reduced by a function of your own, merge(a, b), depends on what you"
      " differentiate: return jax.lax.stop_gradient of it, or reduce it by a word."
    )
  return *primals, *tangents


REDUCTIONS: dict[str, Reduction] = {
  "mean": Mean(),
  "sum": Sum(),
  "max": Extreme(
    jnp.maximum, "min", "max", over_devices=across_devices.largest
  ),
  "min": Extreme(
    jnp.minimum, "max", "min", over_devices=across_devices.smallest
  ),
  "last": Last(over_devices=across_devices.of_last),
  "stack": Stack(),
  "concat": Concat(),
}
