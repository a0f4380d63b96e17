"""`accumulate`: microbatches arrive one per call, and the k-th call steps."""

from typing import Literal

from jax.typing import DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.devices import devices_of
from optax_accum._streaming.accumulation import (
  AccumulateTransformation,
  Accumulation,
)
from optax_accum._streaming.calls import Calls, Schedule


def accumulate(
  inner: optax.GradientTransformation,
  every_k: int | Schedule,
  *,
  reduction: Literal["mean", "sum"] = "mean",
  skip_fn: optax.ShouldSkipUpdateFunction | None = None,
  axis_name: AxisName | None = None,
  accumulator_dtype: DTypeLike | None = None,
  differentiable: bool = False,
) -> AccumulateTransformation:
  """Makes `inner` step once every `every_k` calls, with the mean of their gradients.

  These calls are a cycle. Its last one runs `inner` on ``sum(w * g) / sum(w)``, over the gradients
  ``g`` and weights ``w`` of all. Other calls return zero updates, so schedules and moments count
  optimizer steps. Call ``update`` and ``apply`` under `jax.jit`: outside, each call compiles a
  program of its own.

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
    inner: Any optax transformation. It sees the mean of a cycle, and what stands outside of
      `accumulate` sees every microbatch. So clip inside: ``accumulate(chain(clip, adam), k)``.

    every_k: The calls in a cycle: an int of at least 1, or a schedule from the int32 gradient step
      to an integer, evaluated under jit. With 1 every call is a step, without an accumulator.

    reduction: ``"mean"``, or ``"sum"`` for the weighted sum ``sum(w * g)``.

    skip_fn: ``skip_fn(updates, gradient_step, params) -> (should_skip, info)``, such as
      `optax.skip_not_finite`. True leaves out this call's gradients. The state keeps ``info``.

    axis_name: The axis (or axes) of `jax.pmap` or `jax.shard_map` that rows are sharded over. Each
      device accumulates its own gradients until the cycle ends. They are then summed over the axis,
      once. If one device skips or flushes, all do. `accumulate_specs` gives the specs of the state.

      Every device needs whole parameters: for shards (FSDP) use ``make_train_step(mesh=...)``. Here
      they are an error, but with ``check_vma=False`` they raise none, and the steps are wrong.

      Without `axis_name` reduce gradients yourself: else each device takes steps of its own.

    accumulator_dtype: The dtype to add up in. Default: each parameter's, promoted with float32.

    differentiable: Whether to allow reverse-mode differentiation, which costs copies on GPUs.

  Returns:
    An `AccumulateTransformation`, which works wherever an optax transformation does.

  Raises:
    TypeError: An argument or gradient has the wrong type, such as `optax.MultiSteps` for `inner`.
    ValueError: An argument is out of range; ``weight`` is no scalar; gradients differ from
      parameters in tree or shape (but with ``every_k=1``); `inner` changes tree or shapes of its
      state; `axis_name` is unbound; the state belongs to other options or another model. With
      ``check_vma=True`` also: gradients were already summed over `axis_name`, or parameters are
      sharded over it.
    NotImplementedError: `inner` calls the ``value_fn`` of a `make_train_step`.

  Calls:
    There are two ways to call it, of the same result:

    - ``updates, state = tx.update(grads, state, params)``, as of any optax transformation. Updates
      are zeros until the cycle ends.
    - ``params, state = tx.apply(grads, state, params)``, which is ``update`` and
      `optax.apply_updates`. Inside a cycle it neither reads nor writes parameters and the state of
      `inner`. Donate both to the jitted function around it, and return them first and in the same
      order, or JAX copies them.

    Leaves that are no floating or complex numbers stay as they are; their gradients are None.

    Two further scalars may be traced:

    - ``weight``: how much the microbatch counts, such as its valid tokens. Default: 1. Give it in
      every call of a cycle, or in none.

      Give 0, or a number above 0 such that its product with the gradients is in the range of the
      accumulators. The step is NaN if a traced weight is below 0. The derivative by a weight of 0
      is 0.
    - ``flush``: a bool. True ends the cycle with this call, such as the last of an epoch, and the
      mean is over what was accumulated. With gradients of zero and ``weight=0.0`` it adds nothing.

    All other arguments of the call that ends the cycle go to `inner`. Of these:

    - ``value`` is the loss, a real scalar. `inner` gets that of the cycle, reduced as the gradients
      are, over the calls that have one. With `axis_name` give that of the device's rows.
    - ``grad``: `inner` gets the reduced `updates`, so put what changes gradients into `inner`.
    - ``value_fn`` is passed on, so give the loss of all rows of the cycle. The one that
      `make_train_step` gives is the loss of one call. An `inner` that calls it raises an error,
      unless ``every_k=1``: take the step on all rows in one call.

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

    The last three columns are fields of the state. Where updates are zeros, `inner` does not run.
    An inf or NaN that is not skipped cannot reach the next cycle. The mean of fp8 statistics is
    silently wrong: see "Sharp edges".

  This differs from `optax.MultiSteps` (as of Optax 0.2.8) in:

  1. Weights. There each call of a cycle counts the same. Here each has its ``weight``, and a cycle
     in which nothing counts takes no step.
  2. One division. There a running mean is rounded in every call. Here a sum is divided at the end.
  3. Dtypes. Here sums are in float32 or wider, as the parameters are: float64 and complex ones too.
     There all are in its `accumulator_dtype`, by default float32 (before Optax 0.2.8, in the dtype
     of the gradients).
  4. Flush. Here a cycle that is cut short, as by the end of an epoch, can take its step.
  5. When `inner` runs. There in every call that is not skipped, and most results are thrown away.
     Here in those that end a cycle. Other calls neither read nor write its state.
  6. Parameters. There updates of zero are added to them. ``apply`` leaves them alone.
  7. inf and NaN. There zeros are made by multiplication, so that what is not finite stays in the
     accumulators forever. Here they are selected, and the next cycle is clean.
  8. Skipping. Both leave out the gradients. Here `has_updated` is then False, and there it is what
     it was before that call.
  9. Schedules. Both ask `every_k` with the gradient step. Here it must return an integer scalar, an
     int may be one of NumPy or JAX, and with ``every_k=1`` there are no accumulators.
  10. Devices. With `axis_name` gradients are summed over devices once a cycle. There, in each call.
  11. Arguments for `inner`. Here they arrive through an outer `optax.chain`, and ``value`` is that
      of the cycle. There a chain refuses them, and ``value`` is that of the last call.
  12. Types of the state of `inner`. If an update widens them (by float32 gradients of bfloat16
      parameters), they stay wide, as in plain optax. There they are rounded back.
  13. The state. The first five fields have the names of `optax.MultiStepsState`, but ``acc_grads``
      has a weighted sum, where that has a mean. At the end of a cycle a state of `optax.MultiSteps`
      goes on as ``tx.init(params)._replace(inner_opt_state=old.inner_opt_state,
      gradient_step=old.gradient_step)``. To drop a cycle that has begun:
      ``optax.tree.set(state, mini_step=0, acc_weight=0.0)``.
  14. The form. This is a transformation, without a ``gradient_transformation()``, and `has_updated`
      is a function, of any state that holds one of `accumulate`.
  """
  _validate.transformation(inner)
  if not callable(every_k):
    every_k = _validate.positive_int("every_k", every_k)
  _validate.one_of("reduction", reduction, ("mean", "sum"))
  accumulation = Accumulation(
    optax.with_extra_args_support(inner),
    Calls(every_k, dtypes.requested_dtype(accumulator_dtype)),
    reduction,
    skip_fn,
    devices_of(axis_name),
    differentiable,
  )
  return AccumulateTransformation(accumulation.init, accumulation)
