"""A loss run in microbatches: its value, or value and gradient, on one device."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words, weighted_mean
from optax_accum._arithmetic.reductions import (
  Mean,
  Ratio,
  Reduction,
  REDUCTIONS,
  Sum,
)
from optax_accum._arithmetic.skip import is_finite, leave_out
from optax_accum._arithmetic.trees import (
  Carry,
  Grads,
  Kwargs,
  Leaf,
  Params,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import in_place, noise_scale, parameters
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.grad_metrics import GradMetrics
from optax_accum._microbatches.loop import (
  Ending,
  Loop,
  Progress,
  Reduced,
  refuse_cycle,
  Run,
  run_in_microbatches,
  runner,
)
from optax_accum._microbatches.loss_function import LossFunction
from optax_accum._microbatches.options import names_or_positions, Split
from optax_accum._microbatches.outputs import Reductions
from optax_accum._microbatches.roles import RolesOf
from optax_accum._microbatches.traced_loss import TracedLoss

_ASKED = ("reduction", "grad_reduction", "aux_reduction")


class Outputs(NamedTuple):
  """What the scan reduces. Messages call it by these names."""

  loss: Leaf
  aux: Tree = None
  grads: Grads = None
  # What is asked for of the gradients, by name.
  metrics: Tree = None
  # The weights of each microbatch of a device, where some may be left out.
  weights: Tree = None


class Accumulated(NamedTuple):
  """What a device holds of a cycle whose microbatches arrive in several calls."""

  number: jax.Array  # int32 scalar, of microbatches so far, on all devices
  progress: Progress
  results: Outputs  # a zero in the dtype of each result, but for gradients


class Part(NamedTuple):
  """What a call runs of a cycle; by default all of it."""

  # How many microbatches were in calls before, on all devices, where there may have been any.
  before: jax.Array | None = None
  # What is made of the loop over the microbatches of the call.
  use: Callable[[Loop], Any] = Loop.reduced


_WHOLE = Part()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LocalLoss:
  """A loss on one device, or on each of the devices of an `axis_name`."""

  function: LossFunction
  argnums: int | Sequence[int]
  split: Split
  asked: Kwargs  # the reductions as they were given
  metrics: GradMetrics
  roles_of: RolesOf
  reduction: Reduction  # of losses
  # Prefix trees of reductions.
  grad_reduction: Tree
  aux_reduction: Tree
  # Gathers the parameters in a microbatch. Its other arguments tie this to the loop.
  gather_in_loop: Callable[..., Params] = lambda params, *others: params
  part: Part = _WHOLE
  # Is told whether devices exchange something, once traced.
  tell: Callable[[bool], object] = bool

  @classmethod
  def of(
    cls,
    fun: Callable[..., Tree],
    argnums: int | Sequence[int],
    has_aux: bool,
    split: Split,
    options,
  ) -> "LocalLoss":
    """The loss of a function, with the reductions and metrics that `options` has. Checked."""
    _validate.function(fun)
    _validate.booleans(has_aux=has_aux)
    positions = names_or_positions("argnums", argnums, int)
    if not positions or len(set(positions)) < len(positions):
      raise ValueError(
        f"argnums={argnums!r} must name one or more arguments, each once."
      )
    asked = {name: options[name] for name in _ASKED}
    word, grads, aux = asked.values()
    reduction = REDUCTIONS[_validate.one_of("reduction", word, ("mean", "sum"))]
    metrics = GradMetrics.of(options)
    in_place.check_options(split, grads, metrics.funs)
    grads = reduction_words.named_of_gradients(grads, reduction)
    if split.has_weight:
      if word != "mean":
        raise ValueError(
          f'has_weight=True divides by the weights, and reduction="{word}" does not: leave one of'
          " them out."
        )
      reduction, grads = jax.tree.map(_of_totals, (reduction, grads))
    roles_of = RolesOf(fun, split, positions)
    return cls(
      LossFunction(fun, split, roles_of, has_aux),
      argnums,
      split,
      asked,
      metrics,
      roles_of,
      reduction,
      grads,
      reduction_words.named("aux_reduction", aux, Mean(is_default=True)),
    )

  @property
  def fun(self) -> Callable[..., Tree]:
    """The user's function."""
    return self.function.fun

  @property
  def has_aux(self) -> bool:
    """Whether it returns aux too."""
    return self.function.has_aux

  def value(self, weights, /, *args, **kwargs) -> jax.Array:
    """The loss alone. `weights` are those of the microbatches, if they are known."""
    roles = self.roles_of(args, kwargs)
    call = Microbatches(self.split, roles, args, kwargs, weights)

    def evaluate(_, *inputs):
      args, kwargs = call.arguments(inputs)
      params = self.gather_in_loop(*args)
      loss, (weight, carry, _) = self.function(params, *args[1:], **kwargs)
      return carry, weight, Outputs(loss)

    run = runner(call, evaluate)
    return run_in_microbatches(call, run, Outputs(self.reduction)).outputs.loss

  def value_and_grad(self, weights, /, *args, **kwargs) -> Reduced:
    """The loss and its gradients. A device that has shards of parameters gets shards of these."""
    before, use = self.part
    roles = self.roles_of(args, kwargs)
    given = list(args)
    for i in roles.differentiated:
      parameters.check_differentiable(self.split.name(i), args[i])
      arrays = jax.tree.map(jnp.asarray, args[i])
      given[i] = self.split.devices.varying(arrays)
    call = Microbatches(self.split, roles, given, kwargs, weights, before)
    traced = None
    if self.split.axis_name is not None:
      is_mean = self.reduction.name == "mean"
      gather = self.gather_in_loop
      traced = TracedLoss(self.function, call, gather, is_mean)
    gradients = _Gradients(self, call, given, traced)
    words = gradients.reductions
    return run_in_microbatches(call, gradients.run, words, "", use)

  @property
  def described(self) -> tuple[str, ...]:
    """How it weighs and combines, in words that are the same in every process."""
    split = self.split
    shown = {
      "reduction": self.reduction,
      "grad_reduction": self.grad_reduction,
      "aux_reduction": self.aux_reduction,
      "weight_fn": split.weight_fn is not None,
      "has_weight": split.has_weight,
      "skip_nonfinite": split.skip_nonfinite,
      "virtual_devices": split.virtual_devices,
    }
    return tuple(f"{name}={value!r}" for name, value in shown.items())

  def in_parts(self) -> "LocalLoss":
    """The same loss, of microbatches that arrive in several calls."""
    asked = {
      "aux_reduction": self.aux_reduction,
      "grad_metrics_reduction": self.metrics.reductions.get("grad_metrics"),
    }
    for option, tree in asked.items():
      for name, kind in _validate.named_leaves(option, tree):
        if kind.collected:
          raise ValueError(
            f"{name} is {kind!r}, which needs all microbatches at once, and they arrive call by"
            ' call: reduce it by another word, such as "mean", or by a function merge(a, b).'
          )
    split = dataclasses.replace(self.split, in_parts=True)
    return dataclasses.replace(self, split=split)

  def begin(self, /, *args, **kwargs) -> Accumulated:
    """What a device holds before the first call, which has arguments of these types."""
    none = jnp.zeros((), jnp.int32)

    def zero(x):
      return jnp.zeros((), x.dtype)

    def begin(loop):
      results = loop.full.outputs._replace(grads=None)
      results = jax.tree.map(zero, results)

      def of_lane(lane, _):
        return Accumulated(none, loop.begin(lane), results)

      return self.split.devices.in_lanes(of_lane)

    first: Any = dataclasses.replace(self, part=Part(none, begin))
    return first.value_and_grad(None, *args, **kwargs)

  def add(self, held: Accumulated, /, *args, **kwargs) -> Accumulated:
    """What a device holds after a call, of what it held before."""

    def add(loop):
      def of_lane(lane, held):
        number = held.number + loop.call.count
        progress = loop.add(held.progress, lane)
        return held._replace(number=number, progress=progress)

      return self.split.devices.in_lanes(of_lane, held)

    number = self.split.devices.of_lane(held.number, 0)
    part: Any = dataclasses.replace(self, part=Part(number, add))
    return part.value_and_grad(None, *args, **kwargs)

  def finish(self, held: Accumulated, start, params) -> Reduced:
    """What `value_and_grad` gives, of all calls. They began with the carry `start`."""
    devices = self.split.devices
    words = Outputs(
      self.reduction,
      self.aux_reduction,
      self.grad_reduction,
      self.metrics.reductions,
    )
    first = devices.of_lane(held, 0)
    self._check_finishes(first, params)
    like = first.results._replace(grads=params)
    reductions = Reductions(words, like, self.split.accumulator_dtype)

    def of_lane(lane):
      return devices.of_lane(held, lane).progress

    return Ending(self.split, reductions, start).of_all(of_lane)

  def _check_finishes(self, held: Accumulated, params) -> None:
    """Checks that a cycle has gradients of these parameters, and the metrics of this loss."""
    types = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
    )
    dtype = self.split.accumulator_dtype
    reductions = Reductions(self.grad_reduction, types, dtype)

    def asked(grads, metrics):
      return Outputs(None, grads=grads, metrics=dict.fromkeys(metrics, 0))

    grads = held.progress.outputs.grads
    got = asked(grads, held.results.metrics)
    wanted = asked(jax.eval_shape(reductions.start), self.metrics.funs)
    refuse_cycle(_validate.difference("cycle", got, wanted))

  def derivatives(self, grads):
    """`grads`, with None for those that are no derivatives of the loss, because of a reduction."""

    def kept(kind, g):
      return g if kind.name == self.reduction.name else None

    words = self.grad_reduction
    each = reduction_words.match("grad_reduction", words, grads)
    return jax.tree.map(kept, each, grads)


class _Gradients:
  """The gradients of a loss on each microbatch of one call, and how they are reduced."""

  def __init__(
    self,
    loss: LocalLoss,
    call: Microbatches,
    args,
    traced: TracedLoss | None,
  ) -> None:
    self._loss = loss
    self.call = call
    self._traced = traced
    split = call.split
    self._sends_back = False
    if traced is not None:
      self._sends_back = traced.sends_back
      loss.tell(traced.sends)
    grads = loss.grad_reduction
    # What differentiates a loss that is weighed before: one whose gradients are added in place, or
    # cross devices. Of others, the gradients are weighed where they are added up.
    self._weigh_first = self._of_weighed_loss
    is_in_place = split.in_place and not call.is_whole
    if is_in_place:
      accumulators = in_place.Accumulators(
        args, loss.argnums, grads, split.accumulator_dtype
      )
      self._weigh_first = accumulators.value_and_grad
      grads = accumulators.reductions
    if self._sends_back:
      grads = jax.tree.map(self._weighed_before, grads)
    self._skips = split.skip_nonfinite and call.weights is None
    if "noise_scale" in loss.metrics.funs and not split.in_parts:
      noise_scale.check_count(call.count)
    self.reductions = Outputs(
      loss.reduction, loss.aux_reduction, grads, loss.metrics.reductions
    )
    # For `value_fn`, which is of one call.
    self._keeps_weights = self._skips and not split.in_parts
    if self._keeps_weights:
      weights = REDUCTIONS["stack"]
      self.reductions = self.reductions._replace(weights=weights)
    weighs_loss = is_in_place or self._sends_back
    self.run: Run = runner(call, self._take, self._settle, weighs_loss)

  def _take(self, factor, /, *inputs) -> tuple[Carry, Leaf, Outputs]:
    """One microbatch's new carry, weight if the loss tells, loss, aux and gradients.

    `factor` is what the loss is multiplied by before it is differentiated, or None.
    """
    loss = self._loss
    args, kwargs = self.call.arguments(inputs)
    params = loss.gather_in_loop(*args)
    run: Callable[..., Tree] = loss.function
    if self._traced is not None:
      run = self._traced.of(inputs)
    value_and_grad = jax.value_and_grad(run, loss.argnums, has_aux=True)
    if factor is not None:
      if loss.reduction.name != "mean":
        # A sum has no weights, but what does not count is left out.
        factor = weighted_mean.counts(factor) * 1.0
      elif self.call.split.has_weight:
        factor = 1.0  # a total was weighed
      value_and_grad = functools.partial(self._weigh_first, run, factor)
    (value, others), grads = value_and_grad(params, *args[1:], **kwargs)
    weight, carry, aux = others
    reduction_words.match("aux_reduction", loss.aux_reduction, aux)
    reduction_words.match(
      "grad_reduction", loss.grad_reduction, grads, "gradients"
    )
    # Metrics are of the gradient of the microbatch's mean, not of what was weighed.
    own = loss.derivatives(grads)
    weighed_by = factor if weight is None else weight
    if weighed_by is not None and loss.metrics.funs:
      own = jax.tree.map(
        lambda g: weighted_mean.mean(g, weighed_by, g.dtype), own
      )
    outputs = Outputs(value, aux, grads, loss.metrics.values(own))
    return carry, weight, outputs

  def _of_weighed_loss(
    self,
    run: Callable[..., Tree],
    factor: Weight,
    /,
    *args,
    **kwargs,
  ):
    """As `jax.value_and_grad`, with the gradients of the factor times the loss."""

    def weighed(*args, **kwargs):
      loss, others = run(*args, **kwargs)
      if isinstance(factor, jax.Array) and jnp.finfo(loss.dtype).bits < 32:
        raise TypeError(
          f"The loss has dtype {loss.dtype}, to which its weight would be rounded: it sends"
          " something to other devices, and so is weighed before it is differentiated. Return it"
          " in float32."
        )
      return loss * jnp.asarray(factor, loss.dtype), (loss, others)

    fun = jax.value_and_grad(weighed, self._loss.argnums, has_aux=True)
    (_, out), grads = fun(*args, **kwargs)
    return out, grads

  def _settle(self, outputs: Outputs, weight) -> tuple[Outputs, Leaf, Leaf]:
    """What is left of a microbatch that has run, its weight, and 1 if it was left out."""
    devices = self.call.devices
    skipped = None
    if self._skips:
      finite = is_finite((outputs.loss, outputs.grads))
      if self._sends_back:
        finite = devices.all(finite)
      weight, skipped = leave_out(weight, finite)
    if self._keeps_weights:
      outputs = outputs._replace(weights=weight)
    if not self._sends_back or weight is None:
      return outputs, weight, skipped
    # These gradients were weighed, and are added as they are. Where the microbatch counts on no
    # device they may be NaN, which times a weight of 0 is NaN.
    counted = devices.any(weighted_mean.counts(weight))

    def kept(g):
      return weighted_mean.select(counted, g, jnp.zeros_like(g))

    grads = jax.tree.map(kept, outputs.grads)
    return outputs._replace(grads=grads), weight, skipped

  def _weighed_before(self, kind: Reduction) -> Reduction:
    """The reduction of gradients of a loss that was weighed before it was differentiated."""
    if not isinstance(kind, Sum):
      return kind
    word = self._loss.reduction.name
    if kind.name != word:
      raise ValueError(
        f'grad_reduction="{kind.name}" with reduction="{word}", of a loss that sends'
        " something to other devices: what crosses devices is weighed as losses are. Leave it out."
      )
    return dataclasses.replace(kind, is_weighed=True)


def _of_totals(kind: Reduction) -> Reduction:
  """The reduction of totals, and of their gradients."""
  if isinstance(kind, Mean):
    return Ratio()
  return kind
