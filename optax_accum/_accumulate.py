"""`accumulate`: microbatches arrive one per call, and the k-th call steps."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np
import optax

from optax_accum import _check_call, _inplace, _skip, _validate
from optax_accum._accumulate_state import AccumulateState, states_in
from optax_accum._accumulators import Cycle, EveryCall, gradients_like, MiniStep, Schedule
from optax_accum._across_devices import AxisName
from optax_accum._device_state import stored, with_device_axis, without_device_axis
from optax_accum._mini_step import MiniSteps, weight_is_sent
from optax_accum._other_state import check_kept, explained
from optax_accum._reductions import REDUCTIONS
from optax_accum._same_types import same_types
from optax_accum._transformation import AccumulateTransformation, Params
from optax_accum._weighted_mean import as_weight

Held = TypeVar("Held")


def accumulate(
  inner: optax.GradientTransformation,
  every_k: int | Schedule,
  *,
  reduction: Literal["mean", "sum"] = "mean",
  accumulator_dtype: DTypeLike | None = None,
  skip_fn: _skip.SkipFn | None = None,
  axis_name: AxisName | None = None,
  differentiable: bool = False,
) -> AccumulateTransformation:
  r"""Steps `inner` once every `every_k` calls, with the mean of their gradients.

  The call that ends a cycle emits

  .. math::
    \text{updates} = \text{inner}\left(\frac{\sum_i w_i g_i}{\sum_i w_i}\right)

  and the calls before it emit zeros. It is the step that the whole batch would have taken:
  `inner` sees one gradient per cycle, in a microbatch's dtype. Its moments, schedules, clipping
  and weight decay count gradient steps.

  ``params, state = tx.apply(grads, state, params)`` is ``update`` followed by
  `optax.apply_updates`, and faster: until the cycle ends, parameters and inner state are neither
  read nor written. Donate ``params`` and ``state`` to the jitted function around it. Let it
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
  inside a cycle                              zeros     same           + 1         False
  the last of a cycle                         a step    + 1            0           True
  the last, the cycle's total weight is zero  zeros     same           0           False
  ``weight=0``: adds nothing, not even NaN    as above  as above       as above    as above
  `skip_fn` says skip: it never happened      zeros     same           same        False
  ``flush``                                   a step    + 1            0           True
  ``flush``, but the total weight is zero     zeros     same           0           False
  ``flush`` and skip, something accumulated   a step    + 1            0           True
  ``flush`` and skip, nothing accumulated     zeros     same           0           False
  ``every_k=1``, counted, weight not zero     a step    + 1            0           True
  ``every_k=1``, skip or ``weight=0``         zeros     same           0           False
  an inf or NaN that is not skipped           as above  as above       as above    as above
  ==========================================  ========  =============  ==========  ===========

  Where no step is emitted, `inner` does not run and its state stays as it is. (So a cycle that
  weighs nothing is no mini step of an `accumulate` in `inner`.) An inf or NaN that is not
  skipped reaches `inner` in the mean of its cycle. It never reaches the next cycle.

  What stands outside, as in ``chain(clip, accumulate(adam, k))``, runs on every call: each
  microbatch is clipped by itself, and what keeps moments sees zeros between the steps. The whole
  batch's step is ``accumulate(chain(clip, adam), k)``.

  Args:
    inner: Any optax transformation, also a whole `optax.chain`: all that shall see the mean.
    every_k: Mini steps in a cycle: an int of at least 1, or a schedule, evaluated under jit, from
      the int32 gradient step to an integer. With 1 there is no accumulator. Without `skip_fn` or
      traced weights there is no branch either: the step is `inner`'s.
    reduction: ``"mean"``, or ``"sum"`` for the weighted sum :math:`\sum_i w_i g_i`. Keep
      parameters that are overwritten with their "gradient" out, such as the amax of fp8 layers,
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
      once, when the cycle emits. With `skip_fn` or a traced ``weight`` or ``flush`` every call
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
      gradient has the wrong dtype. `inner` changes a dtype of its state so that keeping the old
      one would lose something. An extra argument is nearly ``weight`` or ``flush``.
    ValueError: `every_k` is less than 1, `reduction` is unknown, gradients differ from the
      parameters in tree or shape, ``weight`` is negative or out of range, `axis_name` is not
      bound, or the state is not an `AccumulateState`, or not of these options, or of another
      model (a checkpoint: see `AccumulateState` for what can be restored into what). With
      ``check_vma=True`` also: a gradient was summed over `axis_name` already.

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
  dtype = _validate.accumulator_dtype(accumulator_dtype)
  cycle = EveryCall(reduction, dtype, axis_name) if every_k == 1 else Cycle(every_k, dtype)
  accumulation = _Accumulation(
    inner=optax.with_extra_args_support(inner),
    cycle=cycle,
    reduction=kind,
    skip_fn=skip_fn,
    axis_name=axis_name,
    differentiable=differentiable,
  )
  return AccumulateTransformation(accumulation.init, accumulation.update)


@dataclasses.dataclass(eq=False, repr=False)
class _Accumulation(MiniSteps):
  """The functions that `accumulate` returns: they add up, and run `inner` when a cycle ends."""

  inner: optax.GradientTransformationExtraArgs
  reduction: Any  # over the cycle's microbatches and the devices
  differentiable: bool

  def init(self, params: optax.Params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    # One array a field: a state in which one zero stands twice cannot be donated.
    gradient_step = jnp.zeros((), jnp.int32)
    skip_state: Any = ()
    if self.skip_fn is not None:
      asked = functools.partial(_skip.asked, self.skip_fn)
      info = jax.eval_shape(asked, gradients_like(params), gradient_step, params)[1]
      skip_state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)
    state = AccumulateState(
      mini_step=jnp.zeros((), jnp.int32),
      gradient_step=gradient_step,
      inner_opt_state=self.inner.init(params),
      acc_grads=self.cycle.init(params),
      skip_state=skip_state,
      acc_weight=jnp.zeros((), jnp.result_type(float)),
      has_updated=jnp.zeros((), jnp.bool_),
      weight_rest=jnp.zeros((), jnp.result_type(float)),
    )
    return stored(state, self.axis_name)

  def update(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    updates = _check_call.checked("update", updates, state, params, extra_args)
    step = self.add(updates, state, params, weight, flush)
    run = functools.partial(self._run_inner, step, updates, extra_args, params)
    if step.emit is True:
      updates, total, inner_state = run(step.total, state.inner_opt_state)
      return updates, self._next(step, total, inner_state)

    # `inner` is traced once, for the types of its updates and for the conditional.
    traced = jax.jit(run, inline=True)
    like = jax.eval_shape(traced, step.total, state.inner_opt_state)[0]
    # Where they can, sums go in and updates come out in the same buffers.
    shared = _inplace.OutputBuffers(step.total, like)

    def emitted(total: Any, held: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
      new, total, inner_state = traced(total, held[1])
      total, spare = shared.filled(new, total)
      return total, (spare, inner_state)

    held = (shared.spare, state.inner_opt_state)
    total, (spare, inner_state) = self._if_it_emits(step, emitted, held)
    return shared.updates(total, spare, step.emit), self._next(step, total, inner_state)

  def apply(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: Params,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[Params, AccumulateState]:
    """`update` and `optax.apply_updates`, with both inside the conditional."""
    if params is None:
      raise ValueError("apply(updates, state, params) got params=None; it needs the parameters.")
    updates = _check_call.checked("apply", updates, state, params, extra_args)
    step = self.add(updates, state, params, weight, flush)

    def emitted(total: Any, held: tuple[Params, Any]) -> tuple[Any, tuple[Params, Any]]:
      run = functools.partial(self._run_inner, step, updates, extra_args)
      new, total, inner_state = run(held[0], total, held[1])
      return total, (same_types("params", optax.apply_updates(held[0], new), params), inner_state)

    held = (params, state.inner_opt_state)
    total, (params, inner_state) = self._if_it_emits(step, emitted, held)
    return params, self._next(step, total, inner_state)

  def _if_it_emits(
    self, step: MiniStep, fun: Callable[[Any, Held], tuple[Any, Held]], held: Held
  ) -> tuple[Any, Held]:
    """``fun(step.total, held)`` where the cycle emits, and else the two, in the same buffers."""

    def run(operand: tuple[Any, Held]) -> tuple[Any, Held]:
      total, held = fun(without_device_axis(operand[0], self.axis_name), operand[1])
      return with_device_axis(total, self.axis_name), held

    # In the shape that they are stored in: XLA for CPU copies what is reshaped after a loop.
    operand = (with_device_axis(step.total, self.axis_name), held)
    total, held = _inplace.update_if(step.emit, run, operand, self.differentiable)
    return without_device_axis(total, self.axis_name), held

  def _run_inner(
    self, step: MiniStep, updates: Any, extra_args: Any, params: Any, total: Any, inner_state: Any
  ) -> tuple[optax.Updates, optax.Updates, optax.OptState]:
    """One step of `inner` on the cycle's gradient, in the dtypes of one microbatch's.

    Sums over devices are given out in place of `total`, which nothing reads again: the next mini
    step overwrites it. So they are made in its buffers.
    """
    kind, axis_name, weight = self.reduction, self.axis_name, step.divisor
    with jax.named_scope("optimizer"):
      if axis_name is not None:
        total = jax.tree.map(lambda x: kind.across_devices(x, axis_name, True), total)
      reduced = jax.tree.map(
        lambda x, g: kind.finish(x, weight, g.dtype).astype(g.dtype), total, updates
      )
      # An accumulation in `inner` counts this cycle as what it weighs. A sum has no weight.
      sends = kind.name == "mean" and bool(states_in(inner_state))
      if sends:
        extra_args = {**extra_args, "weight": as_weight(step.cycle_weight)}
      like = updates if params is None else params
      restored = ("inner_opt_state", self.inner.init, like, inner_state)
      with explained(*restored), weight_is_sent(sends):
        new, new_state = self.inner.update(reduced, inner_state, params, **extra_args)
      check_kept(*restored, new, new_state)
    return new, total, same_types("inner_opt_state", new_state, inner_state)

  def _next(self, step: MiniStep, total: Any, inner_state: optax.OptState) -> AccumulateState:
    state = step.state._replace(acc_grads=self.cycle.kept(total), inner_opt_state=inner_state)
    return stored(state, self.axis_name)
