"""What a check runs of a loss: all rows of a batch, microbatches of it, and a step."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import weighted_mean
from optax_accum._arithmetic.across_devices import axes_sent_over
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.reductions import Mean, REDUCTIONS
from optax_accum._arithmetic.trees import Leaf
from optax_accum._check_split.call import Call
from optax_accum._check_split.devices import Devices, on, Run
from optax_accum._check_split.facts import Facts, facts_of
from optax_accum._check_split.outcome import Outcome, without_keys
from optax_accum._check_split.probes import probes_of
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.whole import whole_batches

_ONE = Devices()


class _InPlaceOfLoss(NamedTuple):
  """In the place of a `LossFunction`, which weighs nothing."""

  fun: Callable[..., Any]

  def __call__(self, /, *args, **kwargs):
    return self.fun(*args, **kwargs)

  def weighed(self, weight, /, *args, **kwargs):
    loss, others = self.fun(*args, **kwargs)
    return loss, (loss, *others)


# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Programs:
  """A loss and its calls, and what runs it, each compiled once.

  Of the rows of `batch`, the first `rows` are checked, and as many others at a time. `sizes` are
  those of a microbatch in each split, and `size` is that of the step, on all devices.
  """

  local: LocalLoss
  batch: Call
  rows: int
  sizes: Sequence[int]
  size: int
  devices: Devices = _ONE

  @functools.cached_property
  def samples(self) -> list[Call]:
    """The call with its first rows, and with others: these refute what is a weight by chance."""
    starts = np.linspace(0, self.batch.rows - self.rows, 8).astype(int)
    first, *others = [
      self.batch.take(np.arange(i, i + self.rows), f"rows from {i} on")
      for i in np.unique(starts)
    ]
    return [first._replace(name=self.batch.name), *others]

  @property
  def call(self) -> Call:
    """The given one, with the rows that are checked."""
    return self.samples[0]

  @functools.cached_property
  def calls(self) -> list[Call]:
    """The batches to run, the given one first."""
    facts = self.facts
    return [*self.samples, *probes_of(self.call, facts.integers, facts.floats)]

  @functools.cached_property
  def cuts(self) -> list[tuple[int, list[np.ndarray]]]:
    """Of each split the size of a microbatch, and the rows of all.

    Without a smaller one, also parts of neighbors, in the same program: pairs of a first and a
    second half (chosen, rejected) are together in the others.
    """
    rows = self.rows
    cuts = []
    for size in self.sizes:
      # As `microbatch_value_and_grad` cuts them.
      full = rows - rows % size
      strided = np.arange(full).reshape(size, -1).T.ravel()
      order = np.array([*strided, *range(full, rows)])
      cuts.append((size, np.split(order, range(size, rows, size))))
    size = self.sizes[0]
    is_even = size < rows and rows % size == 0
    if is_even and len(cuts) == 1 and not self.devices.sends:
      cuts.append((size, np.split(np.arange(rows), range(size, rows, size))))
    return cuts

  @functools.cached_property
  def given(self) -> Outcome:
    return self.whole(self.call)

  def whole(self, call: Call) -> Outcome:
    """All rows at once, where the loss does not split by itself."""
    with whole_batches():
      whole = self._outcome(self._run, call)
      nudged = self._outcome(self._run, call.nudged())
    # What parameters change that differ in their last bits alone may be rounding too.
    allowed = {
      leaf.name: max(leaf.tolerance, _MANY_UNITS * leaf.difference)
      for leaf in whole.compare(nudged.arrays)
    }
    return whole._replace(allowed=allowed)

  def parts(self, call: Call, rows: Sequence[np.ndarray]) -> list[Outcome]:
    """What each microbatch gives, or each device in each of them, if they exchange something."""
    if not self.devices.sends:
      return [self._outcome(self._run, call.take(x)) for x in rows]
    parts = []
    for x in rows:
      count = self.devices.few.loss.parallel.devices
      for index, own in enumerate(np.split(x, count)):
        part = self._outcome(self._each[index], call.take(x))
        parts.append(part._replace(call=call.take(own)))
    return parts

  def as_called(self, call: Call) -> Outcome:
    """What a step gives with these options, over its mesh if it has one."""
    return self._outcome(self._step, call)

  def weight(self, call: Call) -> float:
    """How much a microbatch counts."""
    split = self.local.split
    if split.weight_fn is None and not split.has_weight:
      return call.rows
    return float(self._count(call.values))

  def new_carry(self, call: Call) -> dict[str, Leaf]:
    """The carry that the loss returns, by the names of the arrays that it gets."""
    (argument,) = {x.argument for x in call.arrays if x.role == "carry"}
    _, carry = self._run(call.values)
    named = _validate.named_leaves(argument, *without_keys(carry))
    return dict(named)

  @functools.cached_property
  def facts(self) -> Facts:
    """What the jaxpr of the loss tells."""
    twice = self.call.take(np.arange(2 * self.rows) % self.rows)
    with whole_batches():
      closed = self._trace(self.call)
      try:
        twin = self._trace(twice)
      except Exception:  # it runs on certain numbers of rows
        twin = closed
    return facts_of(closed, twin, self.call)

  def fingerprint(self) -> tuple[str, list[bytes]]:
    """What two jaxprs of it share, unless NumPy drew numbers while it was traced."""
    closed = self._trace(self.call)
    consts = [np.asarray(x).tobytes() for x in closed.consts if not is_key(x)]
    return re.sub(r"0x[0-9a-f]+", "", str(closed)), consts

  def _trace(self, call: Call):
    devices = self._alone
    loss = self._alone.loss_of(self._whole)

    def run(values):  # a new function: JAX remembers the jaxpr of one it knows
      return call.called(functools.partial(loss.value, None), values)

    with on(devices.mesh):
      return jax.make_jaxpr(devices.mapped(run))(call.values)

  def sends(self) -> bool:
    """Whether devices exchange something in the loss; also if it runs on no single one."""
    try:
      closed = self._trace(self.call)
    except Exception:
      return True
    return not axes_sent_over(closed.jaxpr).isdisjoint(self.devices.axes)

  def _outcome(self, program: Run, call: Call) -> Outcome:
    try:
      outputs, _ = program(call.values)
    except Exception as error:
      where = f"{self.devices.where}, on {call.rows} of {self.rows} rows."
      if call.rows < self.rows:
        where += " On all it ran."
      error.add_note(f"The check ran it on {where}")
      raise
    return Outcome.of(call, outputs, self.facts.is_single)

  # What is compiled.

  @property
  def _alone(self) -> Devices:
    """Where all rows are run at once."""
    return self.devices.first if self.devices.is_alone else self.devices

  @functools.cached_property
  def _run(self) -> Run:
    return self._compiled(self._alone, self._whole)

  @functools.cached_property
  def _each(self) -> list[Run]:
    """One microbatch over few devices, of which one alone counts: a program for each."""
    few = self.devices.few
    each = range(few.loss.parallel.devices)
    return [self._compiled(few, self._of_one_device(i)) for i in each]

  @functools.cached_property
  def _step(self) -> Run:
    """As a step runs it. A carry is an argument like others, and the new one is left."""
    local = self.local

    @functools.wraps(local.fun)
    def with_aux(*args, **kwargs):
      loss, (weight, _, aux) = local.function(*args, **kwargs)
      if weight is not None:
        loss = loss, weight
      return loss, aux

    split = dataclasses.replace(
      local.split,
      num_microbatches=None,
      microbatch_size=self.size,
      carry_argnum=None,
      carry_reduction=None,
      rng_argnums=self.local.split.rng_argnums or (),
      of_step=(*self.local.split.of_step, *self.batch.roles.carry),
    )
    loss = LocalLoss.of(with_aux, local.argnums, True, split, local.asked)
    return self._compiled(self.devices, loss)

  @functools.cached_property
  def _count(self) -> Run:
    """The `weight_fn`, or the weight of the loss, traced, as in microbatches."""
    split = self.local.split
    roles = self.batch.roles

    def weigh(*args, **kwargs):
      if split.has_weight:
        _, (weight, *_) = self.local.function(*args, **kwargs)
        return weight
      call = Microbatches(split, roles, args, kwargs)
      return call.weight(0, call.batch, call.rows)

    run = functools.partial(self.call.called, weigh)
    return self.devices.first.compiled(run)

  def _compiled(self, devices: Devices, local: LocalLoss) -> Run:
    """What it gives for arrays."""
    loss = devices.loss_of(local)

    def run(values):
      reduced = self.call.called(loss.value_and_grad, values)
      return reduced.outputs, reduced.carry

    return devices.compiled(run)

  @property
  def _whole(self) -> LocalLoss:
    """What runs all rows at once: on one device it is `jax.value_and_grad`."""
    return self._unreduced() if self.devices.is_alone else self.local

  def _unreduced(self) -> LocalLoss:
    split = dataclasses.replace(
      self.local.split,
      weight_fn=None,
      has_weight=False,
      skip_nonfinite=False,
      in_place=False,
    )
    mean_loss: Any = _InPlaceOfLoss(self._mean)
    return dataclasses.replace(
      self.local,
      function=mean_loss,
      split=split,
      reduction=REDUCTIONS["mean"],
      grad_reduction=Mean(weighed=True, of_gradients=True),
      aux_reduction=REDUCTIONS["last"],
    )

  def _of_one_device(self, index: int) -> LocalLoss:
    """The mean where the rows of one device alone count, by its index."""
    unreduced = self._unreduced()
    axes = self.devices.axes

    def of_one(*args, **kwargs):
      loss, (_, *others) = self._mean(*args, **kwargs)
      weight = (jax.lax.axis_index(axes) == index).astype(loss.dtype)
      total = weighted_mean.weigh(loss, weight, loss.dtype)
      return total, (weight, *others)

    function: Any = _InPlaceOfLoss(of_one)
    return dataclasses.replace(
      unreduced,
      function=function,
      split=dataclasses.replace(unreduced.split, has_weight=True),
      reduction=Mean(weighed=True),
    )

  def _mean(self, /, *args, **kwargs):
    """The loss function, which returns the mean where it returned a total and its weight."""
    loss, (weight, *others) = self.local.function(*args, **kwargs)
    if weight is not None:
      loss = weighted_mean.mean(loss, weight, loss.dtype)
    return loss, (None, *others)
