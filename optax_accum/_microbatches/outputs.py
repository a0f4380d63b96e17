"""The outputs of a function on all microbatches, each reduced in its way."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import hoisting, reduction_words
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.reductions import Concat, Sum
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import refusals
from optax_accum._microbatches.call import Microbatches


class Reductions:
  """The reductions of all outputs: a tree of them, like the outputs of a microbatch.

  `words` is a prefix tree of these, and a `Merge` in it stands for all outputs below its node.
  `like` has the types of what a microbatch of full size gives.
  """

  def __init__(self, words, like, dtype: DTypeLike | None) -> None:
    self._each = reduction_words.match("reduction", words, like)
    self._like = like
    self._dtype = dtype
    self._kinds = jax.tree.leaves(self._each)

  def check(self, root: str, call: Microbatches, tail) -> None:
    """Checks that the outputs of a call can be reduced, which messages call `root`.

    `tail` has the types of what the smaller last microbatch gives, or is like the others.
    """

    def check(path, kind, like, of_tail):
      name = _validate.leaf_name(root, path)
      if kind.is_default and (call.count > 1 or call.split.in_parts):
        axes = call.roles.batch.values()
        refusals.refuse_aux_rows(axes, name, like, call.size)
      kind.check(name, like, call.size, self._dtype)
      shapes = _shapes(like)
      smaller = _shapes(of_tail)
      if shapes != smaller and not isinstance(kind, Concat):
        raise ValueError(
          f"{name} has shape {shapes} for a full microbatch and {smaller} for the"
          f' smaller last one, so {kind!r} cannot reduce it: use "concat" for values per row,'
          " or a microbatch size that divides the batch."
        )

    tail = self._in_same_nodes(tail)
    jax.tree_util.tree_map_with_path(check, self._each, self._like, tail)

  @property
  def are_ordered(self) -> bool:
    """Whether it matters to one of them which microbatch comes last."""
    return any(kind.ordered for kind in self._kinds)

  @property
  def communicate(self) -> bool:
    """Whether one of them reduces over devices in every microbatch."""
    sums = [kind for kind in self._kinds if isinstance(kind, Sum)]
    return any(kind.reduce_term is not None for kind in sums)

  def _map(self, fun: Callable[..., Any], *trees):
    """`fun` of each reduction, and of what trees of outputs have for it."""
    return jax.tree.map(fun, self._each, *trees)

  def _in_same_nodes(self, outputs):
    """Outputs in the nodes of `like`: what a node says of itself may be new in every trace."""
    named = jax.tree_util.tree_leaves_with_path(outputs)
    of_like = jax.tree_util.tree_leaves_with_path(self._like)
    if [path for path, _ in named] != [path for path, _ in of_like]:
      return outputs  # another tree, which JAX refuses
    nodes: Any = jax.tree.structure(self._like)
    return nodes.unflatten([x for _, x in named])

  def start(self):
    """What is held before the first microbatch."""
    return self._map(lambda kind, x: kind.start(x, self._dtype), self._like)

  def resumed(self, held):
    """What the loop begins with, of what is held after the microbatches before."""
    return self._map(lambda kind, x: kind.resumed(x), held)

  def unhoisted(self, held, shapes: hoisting.Shapes):
    """What is held, such that XLA reduces arrays of these shapes over devices in the loop."""
    return self._map(lambda kind, x: kind.unhoisted(x, shapes), held)

  def add(self, held, outputs, weight: Weight):
    """What is held after one more microbatch."""
    outputs = self._in_same_nodes(outputs)
    return self._map(
      lambda kind, x, value: kind.add(x, value, weight), held, outputs
    )

  def apart(self, held):
    """What is held of outputs, and what was collected of others; None for each in the other."""

    def of(is_collected):
      return self._map(
        lambda kind, x: x if kind.collected is is_collected else None, held
      )

    return of(False), of(True)

  def again(self, held, collected):
    """What is held of outputs, and what was collected, of both of which `apart` makes."""
    return self._map(
      lambda kind, x, y: y if kind.collected else x, held, collected
    )

  def both(self, first, second, counted: bool | jax.Array):
    """What is held of two lanes; `counted`: whether a microbatch of the second counts."""
    return self._map(lambda kind, a, b: kind.both(a, b, counted), first, second)

  def collected(self, outputs):
    """What the loop keeps of the outputs of every microbatch; None for others."""
    outputs = self._in_same_nodes(outputs)
    return self._map(lambda kind, x: x if kind.collected else None, outputs)

  def join(self, held, collected, tail):
    """What is held in the end, with what was collected; `tail`: of a smaller last one, or None."""

    def join(kind, *values):
      return kind.join(*values)

    if tail is None:
      return self._map(join, held, collected)
    return self._map(join, held, collected, tail)

  def over_devices(self, held, devices: Devices, counted: bool | jax.Array):
    """What all devices hold together; `counted`: whether a microbatch of this one counts."""
    return self._map(lambda kind, x: devices.reduced(kind, x, counted), held)

  def finish(self, held, weight: Weight):
    """The reduced outputs; `weight` is the total over devices."""
    return self._map(
      lambda kind, x, like: kind.finish(x, weight, like), held, self._like
    )

  def only(self, outputs):
    """The reduced outputs of a microbatch that is the whole batch."""
    return self._map(lambda kind, x: kind.only(x), outputs)


def _shapes(output):
  return jax.tree.map(lambda x: x.shape, output)
