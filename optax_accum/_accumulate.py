"""Streaming accumulation: microbatches arrive one per call."""

from collections.abc import Callable
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from optax_accum import _validate
from optax_accum._cycle import AccumulateState as AccumulateState
from optax_accum._cycle import Accumulation


class AccumulateTransformation(optax.GradientTransformationExtraArgs):
  """An `optax.GradientTransformationExtraArgs`, the pair ``(init, update)``, with `apply`."""

  @property
  def apply(self) -> Callable[..., tuple[optax.Params, AccumulateState]]:
    """``apply(updates, state, params, **kwargs) -> (params, state)``, see `accumulate`."""
    # Found through `update`, so that copies keep it, a pytree of transformations does, and a
    # transformation whose `update` was replaced does not offer one that ignores that.
    owner = getattr(self.update, "__self__", None)
    if not isinstance(owner, Accumulation):
      raise AttributeError(
        "The `update` of this transformation was replaced, so it has no `apply`: use"
        " optax.apply_updates."
      )
    return owner.apply


def has_updated(opt_state: optax.OptState) -> jax.Array:
  """Whether the last call emitted: the `has_updated` flag, wherever it is nested.

  Args:
    opt_state: the state of `accumulate`, or any pytree that holds one: the state of a
      `chain` or `partition` around it, or a whole train state.

  Returns:
    A bool scalar. With several accumulations side by side, whether any of them emitted.

  Raises:
    ValueError: there is no `AccumulateState` in `opt_state`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx = optax.chain(optax_accum.accumulate(optax.sgd(0.1), every_k=2), optax.scale(1.0))
    >>> state = tx.init(jnp.ones(3))
    >>> for _ in range(3):
    ...   updates, state = tx.update(jnp.ones(3), state)
    ...   print(optax_accum.has_updated(state))
    False
    True
    False
  """
  states = _states("has_updated", opt_state)
  return functools.reduce(jnp.logical_or, [jnp.asarray(state.has_updated) for state in states])


def accumulate_specs(opt_state: optax.OptState, axis_name: Any) -> Any:
  """The `jax.shard_map` specs of an optimizer state that `accumulate` made.

  What each device accumulates is its own, ``PartitionSpec(axis_name)``: the leaves of
  ``acc_grads`` and ``skip_state``, which have an axis of devices in front. All else is the same
  on all devices, ``PartitionSpec()``. Use them wherever the state goes in or comes out, from
  ``init`` on, which makes the part of one device. Axes that `shard_map` leaves to the
  partitioner (tensor parallel, with its ``axis_names``) are not in them.

  Differentiate each device's own loss, without `lax.pmean`, and with respect to parameters cast
  to varying, as below: else JAX sums the gradients in every microbatch, or scales them down.

  Args:
    opt_state: ``jax.eval_shape(tx.init, params)``, with `tx` an `accumulate` with `axis_name` or
      a `chain` around one; or any pytree that holds such a state, e.g. a whole train state.
    axis_name: the `axis_name` of `accumulate`: a mesh axis, or a tuple of several.

  Returns:
    A pytree like `opt_state` with a `jax.sharding.PartitionSpec` for each leaf, for ``in_specs``
    and ``out_specs``, with ``check_vma=True`` or ``False``.

  Raises:
    ValueError: there is no `AccumulateState` in `opt_state`, or one that was made without
      `axis_name`.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_accum
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    >>> tx = optax_accum.accumulate(optax.sgd(1.0), every_k=2, axis_name="data")
    >>> params, rows = jnp.zeros(2), jnp.ones((len(jax.devices()), 2))
    >>> specs = optax_accum.accumulate_specs(jax.eval_shape(tx.init, params), "data")
    >>> state = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)(params)
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    ... def step(params, state, rows):
    ...   local = jax.lax.pcast(params, "data", to="varying")
    ...   grads = jax.grad(lambda params: jnp.mean((params - rows) ** 2))(local)
    ...   return tx.apply(grads, state, params)
    >>> for _ in range(2):
    ...   params, state = step(params, state, rows)
    ...   print(params)
    [0. 0.]
    [1. 1.]
  """
  local = PartitionSpec(tuple(axis_name) if isinstance(axis_name, list) else axis_name)

  def specs(x: Any) -> Any:
    if not _is_state(x):
      return PartitionSpec()
    own = (x.acc_grads, x.skip_state)
    shapes = [leaf.shape for leaf in jax.tree.leaves(own) if leaf.shape[:1] != (1,)]
    if shapes:
      raise ValueError(
        f"accumulate_specs got an AccumulateState whose accumulators have shapes {shapes}, without"
        " an axis of length 1 in front: pass accumulate(..., axis_name=), and here what"
        " jax.eval_shape(tx.init, params) returns."
      )
    acc_grads, skip_state = jax.tree.map(lambda _: local, own)
    whole = jax.tree.map(lambda _: PartitionSpec(), x)
    return whole._replace(acc_grads=acc_grads, skip_state=skip_state)

  _states("accumulate_specs", opt_state)
  return jax.tree.map(specs, opt_state, is_leaf=_is_state)


def _is_state(x: Any) -> bool:
  return isinstance(x, AccumulateState)


def _states(name: str, opt_state: optax.OptState) -> list[AccumulateState]:
  """Every outermost `AccumulateState` in `opt_state`; at least one."""
  states = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(x)]
  if not states:
    raise ValueError(
      f"{name} got a {type(opt_state).__name__} without an AccumulateState in it: pass the"
      " optimizer state that a transformation built with `accumulate` returned."
    )
  return states


def accumulate(
  inner: optax.GradientTransformation,
  every_k: int | Callable[[jax.Array], chex.Numeric],
  *,
  reduction: str = "mean",
  accumulator_dtype: chex.ArrayDType | None = None,
  skip_fn: optax.ShouldSkipUpdateFunction | None = None,
  axis_name: Any = None,
  differentiable: bool = False,
) -> AccumulateTransformation:
  r"""Steps `inner` once every `every_k` calls, by the mean of the gradients in between.

  .. math::
    \text{updates} = \text{inner}\left(\frac{\sum_i w_i g_i}{\sum_i w_i}\right)

  on the call that ends a cycle, and zeros on the calls before it. The step is the step that
  the whole batch would have taken: `inner` sees one gradient per cycle, of the same dtype as
  a microbatch's, so its moments, schedules, clipping and weight decay count gradient steps.

  The transformation has a third function beside ``init`` and ``update``:
  ``params, state = tx.apply(grads, state, params)`` is ``update`` followed by
  `optax.apply_updates`, but leaves parameters and inner state unread and unwritten until the
  cycle's end. Donate ``params`` and ``state`` to the jitted step, which takes and returns
  them in this order, parameters first, and nothing is copied. (JAX pairs donated inputs with
  outputs by shape, in order: after ``jax.jit(tx.apply, donate_argnums=(1, 2))`` parameters
  would take the accumulator's buffers and everything would be copied.)

  ``update`` and ``apply`` take two more arguments, and pass all others (``value=``,
  ``value_fn=`` ...) to `inner`, which sees those of the call that emits:

  - ``weight``: real scalar, 0 or more, may be traced; what the microbatch counts in the mean:
    its rows, or its valid tokens. Default 1.
  - ``flush``: bool scalar, may be traced; end the cycle with this call, e.g. on the last batch
    of an epoch. The mean is over what was accumulated.

  What a call does, beside adding its gradients:

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

  On a call that emits no step `inner` does not run, and its state stays as it is. An inf or
  NaN that is not skipped reaches `inner` with its cycle's mean, and never the next cycle.

  Args:
    inner: any optax transformation, also a whole `optax.chain`.
    every_k: mini steps in a cycle, an int of at least 1, or a schedule from the int32
      gradient step to an integer, evaluated under jit. With the int 1 there is no accumulator,
      and by default no branch either: the step is `inner`'s.
    reduction: ``"mean"``, or ``"sum"`` for :math:`\sum_i w_i g_i`.
    accumulator_dtype: what to add up in. Default: each parameter's dtype promoted with
      float32, so bfloat16 is added in float32 and float64 and complex64 in themselves.
    skip_fn: ``skip_fn(updates, gradient_step, params) -> (should_skip, info)``, an
      `optax.ShouldSkipUpdateFunction` such as `optax.skip_not_finite`. ``True`` leaves the
      call's gradients out. ``info`` is kept in the state's ``skip_state``.
    axis_name: inside `jax.pmap` or `jax.shard_map`, the axis (or axes) over which the
      microbatches are spread. Each device accumulates its own gradients, which are summed over
      the axis once, when the cycle emits. Calls before that exchange nothing without `skip_fn`
      and traced ``weight`` or ``flush``, and otherwise up to three numbers: any device that
      skips or flushes does so for all. `accumulate_specs` has what `shard_map` needs to know.
      Without `axis_name` every device there takes a step of its own, unless the gradients were
      reduced before: JAX cannot tell us in `pmap`, nor with ``check_vma=False``.
    differentiable: use a conditional that reverse-mode differentiation can pass, at the cost
      of copies on GPUs.

  Returns:
    An `AccumulateTransformation`, which goes wherever an optax transformation does.

  Raises:
    TypeError: `inner` is no transformation, `every_k` no int, an argument or gradient has the
      wrong dtype.
    ValueError: `every_k` is less than 1, `reduction` is unknown, gradients differ from the
      parameters in tree or shape, ``weight`` is negative, or `axis_name` is not bound; with
      ``check_vma=True``, if the gradients were summed over `axis_name` already.

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
    `optax.MultiSteps`, whose place this takes. Its accumulator keeps an inf for ever, and
    `inner` runs on every mini step.
  """
  _validate.transformation(inner)
  if skip_fn is not None and not callable(skip_fn):
    raise TypeError(f"skip_fn={skip_fn!r} must be a function, as optax.skip_not_finite, or None.")
  accumulation = Accumulation(
    inner=optax.with_extra_args_support(inner),
    every_k=_check_every_k(every_k),
    reduction=_validate.one_of("reduction", reduction, ("mean", "sum")),
    accumulator_dtype=_validate.accumulator_dtype(accumulator_dtype),
    skip_fn=skip_fn,
    axis_name=axis_name,
    differentiable=differentiable,
  )
  return AccumulateTransformation(accumulation.init, accumulation.update)


def _check_every_k(value: Any) -> Any:
  """Checks a number of mini steps, or leaves a schedule as it is."""
  if callable(value):
    return value
  if isinstance(value, (jax.Array, np.ndarray)):
    raise TypeError(
      f"every_k={value!r} is an array: give a Python int, or a schedule such as"
      " `lambda gradient_step: k`, which may return an array."
    )
  return _validate.positive_int("every_k", value)
