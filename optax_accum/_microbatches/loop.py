"""The loop: runs a function on each microbatch in a scan, and combines the outputs."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  hoisting,
  reduction_words,
  weighted_mean,
)
from optax_accum._arithmetic.conditional import update_if
from optax_accum._arithmetic.reductions import Concat, Reduction, Sum
from optax_accum._arithmetic.skip import is_finite, leave_out
from optax_accum._arithmetic.trees import Args, Carry, Leaf, Leaves, Tree
from optax_accum._arithmetic.weighted_mean import (
  in_first_units,
  Weight,
  WeightSum,
)
from optax_accum._microbatches import keys_and_carry
from optax_accum._microbatches.collectives import axes_sent_over
from optax_accum._microbatches.cut import Microbatches, Take
from optax_accum._microbatches.options import refuse_aux_rows


class MicrobatchStats(NamedTuple):
  """Counts over the microbatches of one batch.

  Attributes:
    total_weight: float32 scalar (float64 with x64), the sum of the weights; exact for whole counts.
    skipped_microbatches: int32 scalar, how many were left out because they were not finite.
  """

  total_weight: jax.Array
  skipped_microbatches: jax.Array


class Reduced(NamedTuple):
  """The combined results of all microbatches."""

  carry: tuple[
    Carry, ...
  ]  # the carried argument at the end; empty where there is none
  outputs: Tree
  stats: Tree  # a MicrobatchStats, or the specs of one


class Microbatch(NamedTuple):
  """The results of one microbatch."""

  carry: tuple[Carry, ...]
  outputs: Tree
  weight: Leaf  # None where it is known when tracing
  skipped: Leaf  # 1 if it was left out, None where none can be


class _Held(NamedTuple):
  """What the scan carries from one microbatch to the next."""

  carry: tuple[Carry, ...]
  outputs: Leaves  # what the reductions hold
  weights: WeightSum | None  # None where weights are known when tracing
  unit: Leaf  # what the weights of the outputs are counted in
  skipped: Leaf  # how many were left out, or None


Run: TypeAlias = Callable[..., Microbatch]  # what `runner` makes


def runner(
  call: Microbatches,
  run_fn: Callable[..., tuple[Carry, Tree]],
  sends: bool = False,
) -> Run:
  """Makes the function that runs one microbatch, from ``run_fn(call, factor, *inputs)``.

  That returns ``(new_carry, outputs)``. The factor of gradients is None if they are weighed later.
  If the function `sends` something to other devices, they skip a microbatch together.
  """
  split = call.split
  one: Callable[..., tuple[Carry, Tree]] = functools.partial(run_fn, call)
  if not call.is_whole:  # a factor that is known when tracing is a constant
    traced = split.weighs and (
      split.in_place or sends
    )  # the factor is the microbatch's weight
    one = jax.jit(one, inline=True, static_argnums=() if traced else 0)

  def run(
    index: ArrayLike, carry: Args, take: Take, rows: int, unit: Leaf = 1.0
  ) -> Microbatch:
    batch = take()
    weight: Leaf = call.weight(index, batch, rows) if split.weighs else None
    factor: Weight | None = None
    if split.in_place or sends:
      factor = (
        rows / call.size if weight is None else in_first_units(unit, weight)[1]
      )
    new_carry, outputs = one(factor, *call.inputs(index, batch, carry))
    new_carry = (new_carry,) if call.carry else ()
    new_carry, outputs = jax.tree.map(jnp.asarray, (new_carry, outputs))
    # What depends on no argument that varies is the same on all devices, also in its type.
    new_carry, outputs = across_devices.varying(
      (new_carry, outputs), split.axis_name
    )
    keys_and_carry.check(split.name(*call.roles.carry), carry, new_carry)
    skipped: Leaf = None
    if split.skip_nonfinite and call.weights is None:
      finite = is_finite((outputs.loss, outputs.grads))
      if sends:
        finite = across_devices.of_all(finite, split.axis_name)
      weight, skipped = leave_out(weight, finite)
      outputs = outputs._replace(weights=weight)
    if sends and weight is not None:
      outputs = outputs._replace(
        grads=_unless_empty(outputs.grads, weight, split.axis_name)
      )
    return Microbatch(new_carry, outputs, weight, skipped)

  return run


def _unless_empty(grads: Tree, weight: jax.Array, axis_name: Any) -> Tree:
  """Gradients that were weighed; zeros where the microbatch counts on no device, even for NaN."""
  counted = across_devices.of_any(weighted_mean.counts(weight), axis_name)
  return jax.tree.map(
    lambda g: weighted_mean.select(counted, g, jnp.zeros_like(g)), grads
  )


def run_in_microbatches(
  call: Microbatches, run: Run, reductions: Tree, root: str = "output"
) -> Reduced:
  """Runs each microbatch and combines the outputs, which messages call `root`."""
  if call.is_whole:
    whole = run(0, call.carry, lambda: call.batch, call.rows)
    each, structures = _matched(reductions, [whole.outputs], root, call)
    only = jax.tree.map(
      lambda r, x: r.only(x), each, _values(structures, whole.outputs)
    )
    outputs = jax.tree.unflatten(
      jax.tree.structure(whole.outputs), jax.tree.leaves(only)
    )
    return Reduced(whole.carry, outputs, _stats(call.rows, None))

  start = keys_and_carry.on_device(call.carry, call.split.axis_name)
  take, tail = call.cut
  parts = {call.size: lambda: take(0), call.tail_rows: lambda: tail}
  traced = []
  for rows in filter(None, parts):
    one = functools.partial(run, 0, start, parts[rows], rows)
    traced.append(jax.make_jaxpr(one, return_shape=True)())
  like = tuple(map(across_devices.types, traced))
  matched = _matched(reductions, [x.outputs for x in like], root, call)
  loop = _Loop(call, run, start, *matched, like, traced[0][0].jaxpr)
  return loop.reduced(loop.all())


@dataclasses.dataclass(eq=False, repr=False)
class _Loop:
  """The loop over a call's microbatches. Outputs are lists: nodes may be new in every trace."""

  call: Microbatches
  run: Run
  start: tuple[Carry, ...]  # the carry of the first
  reductions: list[Reduction]
  structures: Sequence[
    Any
  ]  # of what each reduces: a leaf, or a tree that a function merges
  like: Sequence[
    Microbatch
  ]  # the types of what a full one gives, and a smaller last one
  jaxpr: Any  # of a full one

  def all(self) -> _Held:
    """What is held after all microbatches."""
    call, held, (take, tail) = self.call, self._empty(), self.call.cut
    add = self._add
    if call.split.skip_empty or (call.split.in_place and call.split.weighs):
      add = functools.partial(self._add_unless_empty, self._communicates())
    # The smaller microbatch goes first where the order does not matter: its backward pass then
    # needs no memory on top of that of a sum of gradients.
    tail_first = not jax.tree.leaves(call.carry) and not any(
      r.ordered for r in self.reductions
    )
    tails: Leaves = [None] * len(self.reductions)
    with jax.named_scope("microbatches"):
      if call.tail_rows and tail_first:
        held, tails = add(held, call.full, lambda: tail, call.tail_rows)
      held, collected = lax.scan(
        lambda held, index: add(held, index, lambda: take(index), call.size),
        held,
        jnp.arange(call.full, dtype=jnp.int32),
      )
      if call.tail_rows and not tail_first:
        held, tails = add(held, call.full, lambda: tail, call.tail_rows)
    joined = self._each(
      lambda r, h, c, t: r.join(h, c, t), held.outputs, collected, tails
    )
    return held._replace(outputs=joined)

  def _each(self, fun: Callable[..., Tree], *values: Leaves) -> Leaves:
    """`fun` of each reduction, and of the values that are its output's."""
    return jax.tree.map(fun, self.reductions, *values)

  def _empty(self) -> _Held:
    """What is held before the first microbatch."""
    like, split = self.like[0], self.call.split
    unit = (
      0 if split.axis_name is None else 1
    )  # devices that are added up share theirs
    return _Held(
      self.start,
      self._each(
        lambda r, x: r.start(x, split.accumulator_dtype),
        _values(self.structures, like.outputs),
      ),
      None
      if like.weight is None
      else WeightSum(*_zeros((like.weight, like.weight))),
      None
      if like.weight is None
      else across_devices.full_like(like.weight, unit),
      _zeros(like.skipped),
    )

  def _add(
    self, held: _Held, index: ArrayLike, take: Take, rows: int
  ) -> tuple[_Held, Leaves]:
    """What is held after one more microbatch, and what is collected of this one."""
    gathered = hoisting.shapes_in(self.jaxpr)
    held = held._replace(
      outputs=self._each(lambda r, h: r.unhoisted(h, gathered), held.outputs),
      carry=hoisting.unhoisted(held.carry, gathered),
    )
    new = self.run(index, held.carry, take, rows, held.unit)
    outputs = _values(self.structures, new.outputs)
    with jax.named_scope("accumulate"):
      weights = held.weights and held.weights.add(new.weight)
      weight: Weight = rows / self.call.size  # in full microbatches, if known
      unit = held.unit
      if new.weight is not None:
        unit, weight = in_first_units(unit, new.weight)
      reduced = self._each(
        lambda r, h, x: r.add(h, x, weight), held.outputs, outputs
      )
      keep = functools.partial(
        weighted_mean.select, weighted_mean.counts(weight)
      )
      carry = jax.tree.map(keep, new.carry, held.carry)
      skipped = jax.tree.map(jnp.add, held.skipped, new.skipped)
    return _Held(carry, reduced, weights, unit, skipped), self._collected(
      outputs
    )

  def _collected(self, outputs: Leaves) -> Leaves:
    return self._each(lambda r, x: x if r.collected else None, outputs)

  def _add_unless_empty(
    self, agree: bool, held: _Held, index: ArrayLike, take: Take, rows: int
  ) -> tuple[_Held, Leaves]:
    """What `_add` gives, which does not run where the weight is zero (on all, if they `agree`)."""
    here = counted = weighted_mean.counts(self.call.weight(index, take(), rows))
    if agree:
      counted = across_devices.of_any(counted, self.call.split.axis_name)
    like = self.like[0 if rows == self.call.size else 1]
    zeros = _zeros(self._collected(_values(self.structures, like.outputs)))
    add = lambda both: self._add(both[0], index, take, rows)  # noqa: E731
    held, collected = update_if(counted, add, (held, zeros), "skip_empty")
    # A device that ran it only because others count collects zeros.
    keep = functools.partial(weighted_mean.select, here if agree else True)
    return held, jax.tree.map(keep, collected, zeros)

  def _communicates(self) -> bool:
    """Whether a microbatch sends anything to other devices, for which all of them must run it."""
    split = self.call.split
    if split.axis_name is not None and across_devices.shares_mesh():
      return (
        True  # what the compiler sends may wait for devices that do not run it
      )
    if not axes_sent_over(self.jaxpr):
      return any(
        isinstance(r, Sum) and r.reduce_term is not None
        for r in self.reductions
      )
    if split.axis_name is None:
      raise ValueError(
        "Microbatches of weight zero are not run, because of skip_empty=True, or of in_place=True"
        " with weight_fn, and the function sends something to other devices, which would wait for"
        " it: give axis_name, so that all devices run it or none."
      )
    return True

  def reduced(self, held: _Held) -> Reduced:
    """What is held, of all devices together."""
    call, axis_name = self.call, self.call.split.axis_name
    carry, outputs, weights, unit, skipped = held
    weight: Weight = call.rows / call.size if weights is None else weights.total
    total: Weight = call.rows if weights is None else weight
    if axis_name is not None:
      counted, local = weighted_mean.counts(weight), weight
      if weights is None:
        weight, total = (x * lax.axis_size(axis_name) for x in (weight, total))
      else:
        weight = total = weights.over_devices(axis_name)
        skipped = jax.tree.map(lambda x: lax.psum(x, axis_name), skipped)
      name, words = (
        call.split.name(*call.roles.carry),
        call.split.carry_reduction,
      )
      carry = tuple(
        keys_and_carry.over_devices(
          name, words, x, start, local, weight, axis_name
        )
        for x, start in zip(carry, call.carry, strict=True)
      )
      outputs = self._each(
        lambda r, h: r.over_devices(h, axis_name, counted), outputs
      )
    elif weights is not None:
      weight = weighted_mean.in_units(weights.total, unit)
    like = self.like[0].outputs
    finished = self._each(
      lambda r, h, x: r.finish(h, weight, x),
      outputs,
      _values(self.structures, like),
    )
    outputs = jax.tree.unflatten(
      jax.tree.structure(like), jax.tree.leaves(finished)
    )
    return Reduced(carry, outputs, _stats(total, skipped))


def _matched(
  reductions: Tree, like: list[Tree], root: str, call: Microbatches
) -> tuple[list[Reduction], list[Any]]:
  """The reductions of the outputs of a microbatch, and the structure of what each of them reduces.

  `like` has these outputs, and those of a smaller last one.
  """
  tree = reduction_words.match("reduction", reductions, like[0])
  named = jax.tree_util.tree_leaves_with_path(tree)
  structures = jax.tree.leaves(
    jax.tree.map(lambda _, x: jax.tree.structure(x), tree, like[0])
  )
  shapes = functools.partial(jax.tree.map, lambda x: x.shape)
  for (path, reduction), value, *smaller in zip(
    named, *(_values(structures, x) for x in like), strict=True
  ):
    name = _validate.leaf_name(root, path)
    if reduction.default and call.count > 1:
      refuse_aux_rows(call.roles, name, value, call.size)
    reduction.check(name, value, call.size, call.split.accumulator_dtype)
    for tail in smaller:
      if shapes(value) != shapes(tail) and not isinstance(reduction, Concat):
        raise ValueError(
          f"{name} has shape {shapes(value)} for a full microbatch and {shapes(tail)} for the"
          f' smaller last one, so {reduction!r} cannot reduce it: use "concat" for values per row,'
          " or a microbatch size that divides the batch."
        )
  return [reduction for _, reduction in named], structures


def _values(structures: Sequence[Any], outputs: Tree) -> Leaves:
  """The outputs of a microbatch as a list: for each reduction a leaf, or a tree that it merges."""
  leaves = iter(jax.tree.leaves(outputs))
  return [
    kind.unflatten(itertools.islice(leaves, kind.num_leaves))
    for kind in structures
  ]


def _zeros(like: Tree) -> Tree:
  return jax.tree.map(lambda x: across_devices.full_like(x, 0), like)


def _stats(weight: Weight, skipped: Leaf) -> MicrobatchStats:
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(0 if skipped is None else skipped, jnp.int32),
  )
