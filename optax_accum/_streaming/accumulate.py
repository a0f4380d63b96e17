"""`accumulate`: microbatches arrive one per call, and the k-th call steps."""

from typing import Any, Literal, Protocol, TYPE_CHECKING

import jax
from jax.typing import ArrayLike, DTypeLike
import numpy as np
import optax

from optax_accum import _call_hints, _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._arithmetic.skip import SkipFn
from optax_accum._streaming.cycle import Cycle, Schedule
from optax_accum._streaming.emit import Accumulation, Params
from optax_accum._streaming.state import AccumulateState

# What `optax.MultiSteps` calls the arguments.
_PEERS = {
  "every_k_schedule": "every_k_schedule= of optax.MultiSteps is every_k= here.",
  "use_grad_mean": 'use_grad_mean=False is reduction="sum" here, and True the default.',
  "should_skip_update_fn": "should_skip_update_fn= is skip_fn= here.",
}


class ApplyFn(Protocol):
  """The type of `AccumulateTransformation.apply`."""

  def __call__(
    self,
    updates: Any,
    state: AccumulateState,
    params: Params,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[Params, AccumulateState]:
    """Adds gradients up, and steps the parameters when the cycle ends; see `accumulate`."""


_NO_ATTRIBUTES = {
  "apply": "the `update` of this transformation was replaced, so use optax.apply_updates",
  "has_updated": "write optax_accum.has_updated(opt_state), a function of the state",
  "gradient_transformation": "pass it as it is",
}


class AccumulateTransformation(optax.GradientTransformationExtraArgs):
  """An `optax.GradientTransformationExtraArgs`, the pair ``(init, update)``, with `apply`.

  Attributes:
    init: ``init(params) -> AccumulateState``.
    update: ``update(updates, state, params, *, weight=1.0, flush=False, **extra_args)``, which
      returns ``(updates, state)``: zeros, until a cycle ends.
  """

  @property
  def apply(self) -> ApplyFn:
    """``apply(updates, state, params, **kwargs) -> (params, state)``, see `accumulate`."""
    # It belongs to `update`, and is looked up there. So a copy of this transformation has it too,
    # and one whose `update` was replaced does not offer an `apply` that ignores that.
    owner = getattr(self.update, "__self__", None)
    if not isinstance(owner, Accumulation):
      raise AttributeError  # Python then asks __getattr__
    return owner.apply

  if not TYPE_CHECKING:  # to which every name would be one that there is

    def __getattr__(self, name: str) -> Any:
      """Says what to write for a name of `optax.MultiSteps`, or of before `update` changed."""
      reason = _NO_ATTRIBUTES.get(name)
      kind = type(self).__name__
      raise AttributeError(f"This {kind} has no {name!r}{': ' * bool(reason)}{reason or ''}.")


@_call_hints.hinted(names=_PEERS)
def accumulate(
  inner: optax.GradientTransformation,
  every_k: int | Schedule,
  *,
  reduction: Literal["mean", "sum"] = "mean",
  accumulator_dtype: DTypeLike | None = None,
  skip_fn: SkipFn | None = None,
  axis_name: AxisName | None = None,
  differentiable: bool = False,
) -> AccumulateTransformation:
  """Steps `inner` once every `every_k` calls, with the mean of their gradients.

  The call that ends a cycle emits ``inner(sum(w * g) / sum(w))``, over the cycle's gradients ``g``
  and weights ``w``, and the calls before it emit zeros. It is the step that the whole batch would
  have taken: `inner` sees one gradient per cycle, in a microbatch's dtype. Its moments, schedules,
  clipping and weight decay count gradient steps.

  ``params, state = tx.apply(grads, state, params)`` is ``update`` followed by
  `optax.apply_updates`, and mostly faster: until the cycle ends, parameters and inner state are
  neither read nor written. Donate ``params`` and ``state`` to the jitted function around it. Let it
  return the two in the order in which it takes them, and nothing is copied: parameters first,
  state first, a dict and flax's ``TrainState`` are all right. (JAX pairs donated inputs with
  outputs by shape, in order. With ``jax.jit(tx.apply, donate_argnums=(1, 2))``, which takes the
  state first and returns it second, the parameters take the buffers of arrays in the state, and
  everything is copied. So it is with a result of the parameters' shapes, such as the gradients,
  that is returned before them: return it after them.)

  ``update`` and ``apply`` take two more arguments. They pass all others (``value=``,
  ``value_fn=`` ...) to `inner`, which gets those of the call that emits. A misspelt one of the two
  (``weights=``) is an error.

  - ``weight``: real scalar, 0 or more, may be traced. How much the microbatch counts in the mean:
    its rows, or its valid tokens. Default 1. Weights other than 0 are from 1e-30 to 1e30. Their
    products with the gradients must be normal numbers of the accumulators' dtype. Where the total
    of traced weights is below 1e-30 or above 1e36, or one of them is below 0, the step is NaN. The
    derivative with respect to a weight of exactly 0 is 0: let learned weights start above it, and
    pass `differentiable` for reverse mode.
  - ``flush``: bool scalar, may be traced. True ends the cycle with this call, e.g. on the last
    batch of an epoch. The mean is over what was accumulated.

  What a call does besides adding its gradients:

  ==========================================  ========  =============  ==========  ===========
  call                                        emits     gradient_step  mini_step   has_updated
  ==========================================  ========  =============  ==========  ===========
  inside a cycle                              zeros     same           up by 1     False
  the last of a cycle                         a step    up by 1        0           True
  the last, the cycle's total weight is zero  zeros     same           0           False
  ``weight=0``: adds nothing, not even NaN    as usual  as usual       as usual    as usual
  `skip_fn` says skip: it never happened      zeros     same           same        False
  ``flush``                                   a step    up by 1        0           True
  ``flush``, but the total weight is zero     zeros     same           0           False
  ``flush`` and skip, something accumulated   a step    up by 1        0           True
  ``flush`` and skip, nothing accumulated     zeros     same           0           False
  ``every_k=1``, counted, weight not zero     a step    up by 1        0           True
  ``every_k=1``, skip or ``weight=0``         zeros     same           0           False
  an inf or NaN that is not skipped           as usual  as usual       as usual    as usual
  ==========================================  ========  =============  ==========  ===========

  Where no step is emitted, `inner` does not run and its state stays as it is. (So a cycle that
  weighs nothing is no mini step of an `accumulate` in `inner`.) An inf or NaN that is not
  skipped reaches `inner` in the mean of its cycle. It never reaches the next cycle.

  The state of `inner` has the dtypes that `inner` gives it, or wider ones where an update gives
  it narrower ones. Where float32 gradients widen moments of bfloat16 parameters, the first call
  does. Where the state must keep its type from the start, as the carry of a `lax.scan` over calls
  must, begin with one that is wide: ``tx.init`` of parameters of the gradients' dtype,
  ``jax.tree.map(lambda p: p.astype(jnp.float32), params)``.

  What stands outside, as in ``chain(clip, accumulate(adam, k))``, runs on every call: each
  microbatch is clipped by itself, and what keeps moments sees zeros between the steps. The whole
  batch's step is ``accumulate(chain(clip, adam), k)``.

  Args:
    inner: Any optax transformation, also a whole `optax.chain`: all that shall see the mean.
    every_k: Mini steps in a cycle: an int of at least 1, or a schedule, evaluated under jit, from
      the int32 gradient step to an integer. With 1 there is no accumulator. Without `skip_fn` or
      traced weights there is no branch either: the step is `inner`'s.
    reduction: ``"mean"``, or ``"sum"`` for the weighted sum ``sum(w * g)``. Keep parameters
      that are overwritten with their "gradient" out, such as the amax of fp8 layers,
      whose mean is silently wrong: ``optax.partition({"trained": accumulate(optimizer, every_k),
      "overwritten": overwrite}, labels)``, with ``overwrite = optax.stateless(lambda grads, params:
      jax.tree.map(jnp.subtract, grads, params))``, overwrites them in every call. (A cycle's
      microbatches see what those before wrote. In `make_train_step` see `grad_reduction`.)
    accumulator_dtype: What to add up in. Default: each parameter's dtype promoted with
      float32. So bfloat16 is added up in float32; float64 and complex64 in themselves.
    skip_fn: ``skip_fn(updates, gradient_step, params) -> (should_skip, info)``, such as
      `optax.skip_not_finite` (any `optax.ShouldSkipUpdateFunction`). True leaves the gradients of
      this call out. ``info`` is kept in the state's ``skip_state``.
    axis_name: The axis (or axes) that the microbatches are spread over, inside `jax.pmap` or
      `jax.shard_map`. Each device accumulates its own gradients. They are summed over the axis
      once, when the cycle emits. ``apply`` does that in the accumulators: on GPUs and TPUs it needs
      no memory and no copies, as on one device. ``update`` needs a buffer as large as the updates
      where `shard_map` checks types: they are the same on all devices, and accumulators are not. So
      prefer ``apply``. With `skip_fn` or a traced ``weight`` or ``flush`` every call
      exchanges up to three numbers: any device that skips or flushes does so for all. `shard_map`
      needs specs for the state: `accumulate_specs`. A checkpoint in mid-cycle holds the state of
      all devices (see `AccumulateState`): flax's ``unreplicate`` drops all gradients but one
      device's. Without `axis_name`, reduce the gradients yourself. Otherwise every device takes a
      step of its own, unnoticed: JAX cannot tell in `pmap`, nor with ``check_vma=False``.
    differentiable: Whether reverse-mode differentiation can pass through a call. It costs copies
      on GPUs.

  Returns:
    An `AccumulateTransformation`, which goes wherever an optax transformation does.

  Raises:
    TypeError: `inner` is not a transformation, `every_k` is not an int, or an argument or
      gradient has the wrong dtype. An extra argument is nearly ``weight`` or ``flush``.
    ValueError: `every_k` is less than 1, `reduction` is unknown, gradients differ from the
      parameters in tree or shape, `inner` changes the tree or a shape of its state, ``weight`` is
      negative or out of range, `axis_name` is not bound, or the state is not an `AccumulateState`,
      or not of these options, or of another model (a checkpoint: see `AccumulateState` for what can
      be restored into what). With ``check_vma=True`` also: a gradient was summed over `axis_name`
      already.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx = optax_accum.accumulate(optax.sgd(1.0), every_k=2)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> for grads, tokens in [(jnp.array([4.0, 0.0]), 1), (jnp.array([0.0, 4.0]), 3)]:
    ...   params, state = tx.apply(grads, state, params, weight=tokens)
    ...   print(params)
    [0. 0.]
    [-1. -3.]

  References:
    `optax.MultiSteps`, which this replaces. It keeps an inf for ever, and runs `inner` every time.
  """
  _validate.transformation(inner)
  if skip_fn is not None and not callable(skip_fn):
    raise TypeError(f"skip_fn={skip_fn!r} must be a function, as optax.skip_not_finite, or None.")
  if isinstance(every_k, (jax.Array, np.ndarray)):
    raise TypeError(
      f"every_k={every_k!r} is an array: give a Python int, or a schedule such as"
      " `lambda gradient_step: k`, which may return an array."
    )
  every_k = every_k if callable(every_k) else _validate.positive_int("every_k", every_k)
  kind = REDUCTIONS[_validate.one_of("reduction", reduction, ("mean", "sum"))]
  dtype = dtypes.check_accumulator_dtype(accumulator_dtype)
  cycle = Cycle(every_k, kind, dtype, skip_fn, axis_name)
  accumulation = Accumulation(optax.with_extra_args_support(inner), cycle, differentiable)
  return AccumulateTransformation(accumulation.init, accumulation.update)
