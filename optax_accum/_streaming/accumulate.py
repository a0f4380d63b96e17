"""`accumulate`: microbatches arrive one per call, and the k-th call steps."""

from typing import Literal

from jax.typing import DTypeLike
import optax

from optax_accum import _spellings, _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.devices import devices_of
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._arithmetic.skip import SkipFn
from optax_accum._streaming.accumulation import (
  AccumulateTransformation,
  Accumulation,
)
from optax_accum._streaming.cycle import (
  Cycle,
  MeanOfOne,
  Schedule,
  SeveralCalls,
)


@_spellings.hinted()
def accumulate(
  inner: optax.GradientTransformation,
  every_k: int | Schedule,
  *,
  reduction: Literal["mean", "sum"] = "mean",
  skip_fn: SkipFn | None = None,
  axis_name: AxisName | None = None,
  accumulator_dtype: DTypeLike | None = None,
  differentiable: bool = False,
) -> AccumulateTransformation:
  """Makes `inner` step once every `every_k` calls, with the mean of their gradients.

  The call that ends a cycle runs `inner` on ``sum(w * g) / sum(w)``, over its gradients ``g`` and
  weights ``w``. Other calls return zero updates, so schedules and moments count optimizer steps.

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

  Args:
    inner: Any optax transformation. Put what must see the mean into it: ``chain(clip, adam)``.
    every_k: The calls in a cycle: an int of at least 1, or a schedule from the int32 gradient step
      to an integer, evaluated under jit. With 1 every call is a step, without an accumulator.
    reduction: ``"mean"``, or ``"sum"`` for the weighted sum ``sum(w * g)``.
    skip_fn: ``skip_fn(updates, gradient_step, params) -> (should_skip, info)``, such as
      `optax.skip_not_finite`. True leaves out this call's gradients. The state keeps ``info``.
    axis_name: The axis (or axes) of `jax.pmap` or `jax.shard_map` that rows are sharded over. Each
      device accumulates its own gradients until the cycle ends. If one skips or flushes, all do.
      The state needs `accumulate_specs`. Every device needs whole parameters: for shards (FSDP) use
      ``make_train_step(mesh=...)``. Here they are an error, but with ``check_vma=False`` they raise
      none, and the steps are wrong. Without `axis_name` reduce gradients yourself: else each device
      takes steps of its own.
    accumulator_dtype: The dtype to add up in. Default: each parameter's, promoted with float32.
    differentiable: Whether to allow reverse-mode differentiation, which costs copies on GPUs.

  Returns:
    An `AccumulateTransformation`, which works wherever an optax transformation does.

  Raises:
    TypeError: An argument or gradient has the wrong type, or ``weight`` or ``flush`` is misspelled.
    ValueError: An argument is out of range; gradients differ from parameters in tree or shape;
      `inner` changes tree or shapes of its state; `axis_name` is unbound; ``value`` is no real
      scalar; the state belongs to other options or another model. With ``check_vma=True`` also:
      gradients were already summed over `axis_name`, or parameters are sharded over it.
    NotImplementedError: `inner` calls the ``value_fn`` of a `make_train_step`.

  Calls:
    ``params, state = tx.apply(grads, state, params)`` is ``update`` and `optax.apply_updates`, but
    inside a cycle it neither reads nor writes parameters and inner state. Donate both to the jitted
    function around it, and return them first and in the same order, or JAX copies them. Leaves that
    are no floating or complex numbers stay as they are; their gradients are None. Two scalars may
    be traced:

    - ``weight``: how much the microbatch counts, such as its valid tokens. Default: 1. Give 0, or
      1e-30 to 1e30 such that its product with the gradients is in the range of the accumulators.
      Give it in every call of a cycle, or in none. The step is NaN if a traced weight is below 0,
      or the total below 1e-30 or above 1e36. The derivative by a weight of 0 is 0.
    - ``flush``: a bool. True ends the cycle with this call, such as the last of an epoch, and the
      mean is over what was accumulated. With gradients of zero and ``weight=0.0`` it adds nothing.

    All other arguments of the call that ends the cycle go to `inner`, with these as the cycle's:

    - ``value``: the loss, a real scalar. `inner` gets the cycle's, reduced as the gradients are, of
      the calls that have one. With `axis_name` give that of the device's rows.
    - ``grad``: `inner` gets the reduced `updates`, so put what changes gradients into `inner`. With
      ``every_k=1`` and ``"mean"``, and no `axis_name`, this and ``value`` stay as they are.
    - ``value_fn``: as it is, so let it be the loss of all rows of the cycle. That of
      `make_train_step` is of one call, so an `inner` that calls it is an error unless
      ``every_k=1``: take the step on all rows in one call.

  Edge cases:
    ==========================================  ========  =============  ==========  ===========
    call                                        updates   gradient_step  mini_step   has_updated
    ==========================================  ========  =============  ==========  ===========
    inside a cycle                              zeros     same           up by 1     False
    the last of a cycle, ``flush``              a step    up by 1        0           True
    the same, the cycle's total weight is zero  zeros     same           0           False
    ``weight=0``: adds nothing, not even NaN    as usual  as usual       as usual    as usual
    `skip_fn` says skip: it never happened      zeros     same           same        False
    ``flush`` and skip, something accumulated   a step    up by 1        0           True
    ``every_k=1``, skip or ``weight=0``         zeros     same           0           False
    ==========================================  ========  =============  ==========  ===========

    Where updates are zeros, `inner` does not run. An inf or NaN that is not skipped cannot reach
    the next cycle. The mean of fp8 statistics is silently wrong: see "Sharp edges".
  """
  if isinstance(every_k, optax.GradientTransformation):
    raise TypeError(
      "The optimizer comes before the number: accumulate(inner, every_k)."
    )
  _validate.transformation(inner)
  if skip_fn is not None and not callable(skip_fn):
    raise TypeError(
      f"skip_fn={skip_fn!r} must be a function, as optax.skip_not_finite, or None."
    )
  if not callable(every_k):
    every_k = _validate.positive_int("every_k", every_k)
  kind = REDUCTIONS[_validate.one_of("reduction", reduction, ("mean", "sum"))]
  dtype = dtypes.check_accumulator_dtype(accumulator_dtype)
  devices = devices_of(axis_name)
  cycle: type[Cycle] = SeveralCalls
  if every_k == 1:
    cycle = Cycle
    if reduction == "mean" and axis_name is None:
      cycle = MeanOfOne
  accumulation = Accumulation(
    optax.with_extra_args_support(inner),
    cycle(every_k, kind, dtype, devices),
    skip_fn,
    devices,
    differentiable,
  )
  return AccumulateTransformation(accumulation.init, accumulation)
