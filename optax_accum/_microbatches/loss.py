"""A loss on one device: its value, its gradient, and what a cycle of several calls adds up."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.reductions import (
  Mean,
  Reduction,
  REDUCTIONS,
  Sum,
)
from optax_accum._arithmetic.skip import is_finite
from optax_accum._arithmetic.trees import (
  Args,
  Carry,
  Grads,
  Kwargs,
  Leaf,
  OptState,
  Params,
  Tree,
)
from optax_accum._microbatches import in_place, noise_scale, parameters
from optax_accum._microbatches.accumulator import (
  Accumulated,
  Accumulator,
  Reduced,
  refuse_cycle,
)
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.loop import (
  Loop,
  reduced,
  Run,
  runner,
)
from optax_accum._microbatches.loss_function import LossFunction
from optax_accum._microbatches.options import slots_of, Split
from optax_accum._microbatches.outputs import Reductions
from optax_accum._microbatches.recompute import Recomputed, recomputed
from optax_accum._microbatches.roles import RolesOf


class Outputs(NamedTuple):
  """What the scan reduces. Messages call it by these names."""

  loss: Leaf
  aux: Tree = None
  grads: Grads = None
  noise: Tree = None  # of the gradients, for `noise_scale`
  kept: Tree = None  # which microbatches were not skipped, where some may be


class CycleState(NamedTuple):
  """What a device has of a cycle whose microbatches arrive in several calls."""

  number: jax.Array  # int32 scalar, of microbatches so far, on all devices
  accumulated: Accumulated
  results: Outputs  # a zero in the dtype of each result, but for gradients


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LocalLoss:
  """A loss on one device, or on each of the devices of an `axis_name`."""

  function: LossFunction
  argnums: int | Sequence[int]
  split: Split
  asked: Kwargs  # the reductions as they were given
  roles_of: RolesOf
  reduction: Reduction  # of losses
  grad_reduction: Tree  # a prefix tree over gradients
  aux_reduction: Tree
  noise_scale: bool

  @classmethod
  def of(
    cls,
    fun: Callable[..., Tree],
    argnums: int | Sequence[int],
    has_aux: bool,
    split: Split,
    options,
  ) -> "LocalLoss":
    """The loss of a function, with the reductions that `options` has. Checked."""
    _validate.function(fun)
    word = options["reduction"]
    aux = options["aux_reduction"]
    asked = {"reduction": word, "aux_reduction": aux}
    # Only some callers have this option.
    with_noise = options.get("noise_scale", False)
    positions = slots_of(argnums)
    _validate.one_of("reduction", word, ("mean", "sum"))
    in_place.check_options(split, with_noise)
    if with_noise and word != "mean":
      raise ValueError(
        "noise_scale=True compares the mean gradients of microbatches, and a step with"
        f' reduction={word!r} has none: it needs reduction="mean".'
      )
    if split.has_weight and word != "mean":
      raise ValueError(
        f'has_weight=True divides by the weights, and reduction="{word}" does not: leave one of'
        " them out."
      )
    # The loss times its weight is differentiated, so gradients come weighed, as totals do.
    grads: Reduction = Sum(of_gradients=True)
    if word == "mean":
      grads = Mean(weighed=True, of_gradients=True)
    reduction = REDUCTIONS[word]
    # A loss with a weight is a total, which the user has weighed already.
    if split.has_weight:
      reduction = Mean(weighed=True)
    roles_of = RolesOf(fun, split, positions)
    # Aux for which there is no word gets a mean, marked so that aux like rows is refused.
    return cls(
      LossFunction(fun, split, roles_of, has_aux, word == "mean"),
      argnums,
      split,
      asked,
      roles_of,
      reduction,
      grads,
      reduction_words.named("aux_reduction", aux, Mean(is_default=True)),
      with_noise,
    )

  @property
  def fun(self) -> Callable[..., Tree]:
    """The user's function."""
    return self.function.fun

  @property
  def has_aux(self) -> bool:
    """Whether it returns aux too."""
    return self.function.has_aux

  def value(self, kept, /, *args, **kwargs) -> jax.Array:
    """The loss alone, of the microbatches that are `kept`; of all, if that is None."""
    roles = self.roles_of(args, kwargs)
    call = Microbatches(self.split, roles, args, kwargs, kept=kept)
    # `guards`: a microbatch of weight zero adds no gradient, even where that is NaN.
    fun = Recomputed(call, self.function, guards=True)

    def evaluate(weight, *inputs):
      loss, (own_weight, carry, _) = fun(weight, *inputs)
      # `finite` is None, as only `kept` leaves out microbatches here. Aux is dropped.
      return carry, own_weight, None, Outputs(loss)

    run = recomputed(call, runner(call, evaluate))
    results = reduced(call, run, Outputs(self.reduction))
    return results.outputs.loss

  def value_and_grad(self, /, *args, **kwargs) -> Reduced:
    """The loss and its gradients. A device that has shards of parameters gets shards of these."""
    call, run, words = self._gradients(args, kwargs)
    if not call.is_whole:
      # Called in this frame, so that a traceback has few frames between a call and the loss.
      return Loop(call, run, words, "").reduced()
    return reduced(call, run, words, "")

  def begin(self, /, *args, **kwargs) -> CycleState:
    """What a device has before the first call, which has arguments of these types."""
    call, run, words = self._gradients(args, kwargs)
    loop = Loop(call, run, words, "")
    # Sums may be wider than what is summed: `finish` casts them back to these dtypes. It has those
    # of gradients from the parameters.
    results = loop.full.outputs._replace(grads=None)
    zeros = jax.tree.map(lambda x: jnp.zeros((), x.dtype), results)
    number = jnp.zeros((), jnp.int32)
    return CycleState(number, loop.begin(), zeros)

  def add(self, state: CycleState, /, *args, **kwargs) -> CycleState:
    """What a device has after a call, of what it had before."""
    # Random keys depend on the number of a microbatch, which goes on from the calls before.
    call, run, words = self._gradients(args, kwargs, state.number)
    # The "" is the root of names in messages, where the fields of `Outputs` are names enough.
    loop = Loop(call, run, words, "")
    accumulated = loop.resume(state.accumulated)
    number = state.number + call.count
    return state._replace(number=number, accumulated=accumulated)

  def merge(self, first: CycleState, second: CycleState, start) -> CycleState:
    """What a device has of two cycles that began with the carry `start`."""
    # Sums are merged as they are, so the sums of gradients stand for the types of gradients.
    grads = first.accumulated.outputs.grads
    accumulator = self._accumulator(first, start, grads)
    accumulated = accumulator.merge(first.accumulated, second.accumulated)
    number = first.number + second.number
    return first._replace(number=number, accumulated=accumulated)

  def finish(self, state: CycleState, start, params) -> Reduced:
    """What `value_and_grad` gives, of all calls. They began with the carry `start`."""
    grads = state.accumulated.outputs.grads
    refuse_cycle(_validate.difference("cycle.grads", grads, params))
    # Gradients have the types of their parameters.
    accumulator = self._accumulator(state, start, params)
    return accumulator.finish(state.accumulated)

  def in_parts(self) -> "LocalLoss":
    """The same loss, of microbatches that arrive in several calls."""
    named = _validate.named_leaves("aux_reduction", self.aux_reduction)
    for name, kind in named:
      if kind.collected:
        raise ValueError(
          f"{name} is {kind!r}, which needs all microbatches at once, and they arrive call by"
          ' call: reduce it by another word, such as "mean", or by a function merge(a, b).'
        )
    split = dataclasses.replace(self.split, in_parts=True)
    return dataclasses.replace(self, split=split)

  # What a step asks of `OverMesh` too: without a mesh, arrays stay where they are.

  @property
  def local(self) -> "LocalLoss":
    """The loss on one device."""
    return self

  parallel = None
  # The shardings of a step's updated arguments, and of a cycle: left to the compiler.
  out_shardings = None
  cycle_shardings = None

  def place(self, args, kwargs) -> tuple["LocalLoss", Args, Kwargs]:
    """The loss that a step with such arguments runs, and the arguments as it takes them."""
    return self, args, kwargs

  def place_updated(
    self, params, opt_state, carry: Args, others: Args
  ) -> tuple["LocalLoss", Args]:
    """As the method `place`, for the last call of a cycle. `others` are not updated by it."""
    return self, (params, opt_state, *carry, *others)

  def place_cycle(self, state: CycleState) -> CycleState:
    """What a cycle has, where it belongs."""
    # A cycle's count is a scalar, without an axis of devices: this is its shape.
    check_devices(state, ())
    return state

  def with_state(self, params, opt_state) -> "LocalLoss":
    """The loss whose gradients are sharded as a step with this state needs them."""
    return self

  def update(
    self, update: Callable[..., Any], params, opt_state
  ) -> tuple[Params, OptState]:
    """What `update` makes of parameters that are sharded as the gradients meanwhile."""
    return update((params, opt_state))

  # What runs on each microbatch.

  @property
  def _words(self) -> Outputs:
    """How each output is reduced: in its place a reduction, or a prefix tree of these."""
    noise: Tree = None
    if self.noise_scale:
      noise = noise_scale.NOISE
    return Outputs(
      self.reduction, self.aux_reduction, self.grad_reduction, noise
    )

  def _accumulator(self, state: CycleState, start, grads) -> Accumulator:
    """That of a cycle, of gradients of these types."""
    like = state.results._replace(grads=grads)
    dtype = self.split.accumulator_dtype
    reductions = Reductions(self._words, like, dtype)
    return Accumulator(self.split, reductions, start)

  def _gradients(
    self, args, kwargs, before=0
  ) -> tuple[Microbatches, Run, Outputs]:
    """The microbatches of a call, what runs one of them, and how its results are reduced.

    The cycle had `before` microbatches in earlier calls.
    """
    roles = self.roles_of(args, kwargs)
    # The parameters become arrays. JAX is not to sum their gradients over devices by itself.
    given = list(args)
    for i in roles.differentiated:
      parameters.check_differentiable(self.split.name(i), args[i])
      arrays = jax.tree.map(jnp.asarray, args[i])
      given[i] = self.split.devices.varying(arrays)
    call = Microbatches(self.split, roles, given, kwargs, before)
    words = self._words
    differentiate: Callable[..., Any] = functools.partial(
      jax.value_and_grad, argnums=self.argnums, has_aux=True
    )
    # With one whole batch there is nothing to add its gradients to.
    if self.split.in_place and not call.is_whole:
      accumulators = in_place.Accumulators(
        given,
        self.argnums,
        self.grad_reduction,
        self.split.accumulator_dtype,
      )
      differentiate = accumulators.value_and_grad
      words = words._replace(grads=accumulators.reductions)
    if self._tells_kept:
      # A flag for each microbatch.
      words = words._replace(kept=REDUCTIONS["stack"])
    run_fn = functools.partial(self._run, call, differentiate)
    return call, runner(call, run_fn), words

  @property
  def _tells_kept(self) -> bool:
    """Whether a call says which microbatches it kept, for the `value_fn` of its step."""
    return self.split.skip_nonfinite and not self.split.in_parts

  def _run(
    self,
    call: Microbatches,
    differentiate: Callable[..., Any],
    weight: Any,
    /,
    *inputs,
  ) -> tuple[Carry, Leaf, Leaf, Outputs]:
    """One microbatch's new carry, weight, whether it is finite, and results.

    The weight is None where the loss does not tell it, and `finite` where nobody looks.
    """
    args, kwargs = call.arguments(inputs)
    weighed = functools.partial(self.function.weighed, weight)
    value_and_grad = differentiate(weighed)
    # The value `_` is the weighed loss, which is there to be differentiated; `loss` is reduced.
    (_, (loss, own_weight, carry, aux)), grads = value_and_grad(*args, **kwargs)
    # An error where the reductions do not fit the aux, with the name of the option.
    reduction_words.match("aux_reduction", self.aux_reduction, aux)
    # Where the loss tells its weight, the given one is None.
    if own_weight is not None:
      weight = own_weight
    noise = None
    finite = None
    kept = None
    if self.noise_scale:
      noise = noise_scale.noise_of(grads, weight)
    if self.split.skip_nonfinite:
      # What has a weight of NaN or infinity is left out, too.
      finite = is_finite((loss, grads, weight))
    if self._tells_kept:
      kept = finite
    return carry, own_weight, finite, Outputs(loss, aux, grads, noise, kept)


def check_devices(state: CycleState, wanted: tuple[int, ...]) -> None:
  """Checks that a cycle was begun on as many devices."""
  # A mesh has a number for each device, shape (devices,); without a mesh it is a scalar, ().
  found = jnp.shape(state.number)
  if found != wanted:
    raise ValueError(
      f"The cycle has sums of {found} devices, and the step of {wanted}: with mesh= each device has"
      " sums of its own, on a first axis. Go on with a cycle on as many devices as it began on, or"
      " begin another."
    )
