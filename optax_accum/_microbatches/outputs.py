"""The outputs of a function on all microbatches, each reduced in its way."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import hoisting, reduction_words
from optax_accum._arithmetic.devices import Devices
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

  def check(self, root: str, call: Microbatches) -> None:
    """Checks that the outputs of a call can be reduced, which messages call `root`."""

    def check(path, kind, like):
      name = _validate.leaf_name(root, path)
      # A lone microbatch is averaged with no other, so its rows stay apart.
      if kind.is_default and (call.count > 1 or call.split.in_parts):
        refusals.refuse_aux_rows(name, like, call.size)
      # `like` is one output, or for a `Merge` all outputs below its node.
      kind.check(name, like, call.size, self._dtype)

    jax.tree_util.tree_map_with_path(check, self._each, self._like)

  @property
  def are_ordered(self) -> bool:
    """Whether it matters to one of them which microbatch comes last."""
    return any(kind.ordered for kind in jax.tree.leaves(self._each))

  def _map(self, fun: Callable[..., Any], *trees):
    """`fun` of each reduction, and of what trees of outputs have for it."""
    return jax.tree.map(fun, self._each, *trees)

  def start(self):
    """The states before the first microbatch."""
    return self._map(lambda kind, x: kind.start(x, self._dtype), self._like)

  def resumed(self, states):
    """The states that the loop begins with, after microbatches of other calls."""
    return self._map(lambda kind, x: kind.resumed(x), states)

  def unhoisted(self, states, shapes: hoisting.Shapes):
    """The states, such that XLA reduces arrays of these shapes over devices in the loop."""
    return self._map(lambda kind, x: kind.unhoisted(x, shapes), states)

  def add(self, states, outputs, weight: Weight, finite):
    """The states after one more microbatch."""

    def add(kind, state, value):
      return kind.add(state, value, weight, finite)

    return self._map(add, states, outputs)

  def collected(self, outputs):
    """What the loop keeps of the outputs of every microbatch; None for others."""

    def collected(kind, output):
      if kind.collected:
        return output
      return None

    return self._map(collected, outputs)

  def join(self, states, *collected):
    """The states in the end, with what was collected, also of a smaller last one if there is."""

    def join(kind, *values):
      return kind.join(*values)

    return self._map(join, states, *collected)

  def merge(self, first, second):
    """The states of the microbatches of two."""
    return self._map(lambda kind, a, b: kind.merge(a, b), first, second)

  def over_devices(self, states, devices: Devices):
    """The states of the microbatches of all devices."""
    return self._map(devices.reduced, states)

  def finish(self, states, weight: Weight):
    """The reduced outputs; `weight` is the total over devices."""

    def finish(kind, state, like):
      return kind.finish(state, weight, like)

    return self._map(finish, states, self._like)

  def only(self, outputs):
    """The reduced outputs of a microbatch that is the whole batch."""
    return self._map(lambda kind, x: kind.only(x), outputs)
