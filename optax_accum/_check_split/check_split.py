"""`check_split`: whether a loss can be split, and if not, why."""

from collections.abc import Callable
import inspect

from optax_accum._arithmetic.trees import Tree
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.step_check import check_step
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

_SIGNATURE = inspect.signature(microbatch_value_and_grad)


def check_split(
  loss_fn: Callable[..., Tree], /, *args: Tree, **options: object
) -> SplitReport:
  """Tests whether a loss is the same in microbatches; if not, says why and how to fix it.

  Use it in a test or a notebook, with a small batch. `TrainStep.check` tests the loss of a step.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   each = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6), "mask": jnp.ones(6)}
    >>> report = optax_accum.check_split(loss_fn, jnp.array([1.0, -1.0]), batch)
    >>> report.ok, report.verdict, report.fix.splitlines()[0]
    (False, 'weighted', "weight_fn=lambda batch: jnp.sum(batch['mask'])")

  Args:
    loss_fn: As in `microbatch_value_and_grad`.
    *args: The arguments of `loss_fn`: arrays of 2 rows or more, better 8 or more.
    **options: Those of `microbatch_value_and_grad`, except `axis_name`. Without `num_microbatches`
      and `microbatch_size`, or with one microbatch, the rows are those of two calls of `add`,
      unless the loss itself calls `microbatch`.

  Returns:
    A `SplitReport`, which prints as a table. Its ``verdict`` is one of these words.

    ===============  ======================================================================
    ``ok``           everything agrees, on all batches that were tried
    ``sum``          the loss, or an aux, is a sum: ``reduction="sum"``
    ``weighted``     the loss is a mean over other things than rows: `has_weight`, or a `weight_fn`
    ``coupled``      rows depend on each other, or terms have several denominators
    ``random``       equal arguments give unequal losses, or microbatches share noise
    ``unsplit``      an argument with the rows of the batch is not split; if it is, all agree
    ``unknown``      results differ for another reason: an aux, an option, the number of devices
    ===============  ======================================================================

  Raises:
    ValueError: The batch has no arrays or one row.
    TypeError: There is no such option, or arguments are traced, abstract or not differentiable.
    Exception: What the step raises on this batch, but for a key that no option names: "random".

  Calls:
    It compares loss, gradients and aux of all rows at once with those of the step: up to 16 rows of
    a microbatch, in parts about 2 to 1, on the given batch and on altered ones: other parameters
    and floats, a part of a mask turned over, a whole microbatch masked, smaller integers, integers
    that the loss compares with. One on which the loss does not run is left out. Options in a fix
    have been tried. Differences up to 1e-4 of a leaf's largest number, or 1e-6 of the largest
    leaf's (1e-9 and 1e-11 in float64), pass for rounding, and in gradients 8 units of the last
    place of their parameters' dtype (1/16 in bfloat16) of the largest. (Where such parameters fit
    the very rows that are compared, gradients cancel, and rounding looks "coupled".) If the loss
    computes in 16 bits, which the reason then says, it is 1/64 of the loss and 1/8 of the largest
    gradient, and a fix names no weight, because it cannot tell those that differ by less. The new
    carry is not compared, nor an aux under "stack", "last" or a function, nor what ``not_checked``
    lists. It does not find a threshold on a statistic of the batch that all microbatches are on one
    side of.
  """
  asked = _SIGNATURE.bind(loss_fn, **options)
  asked.apply_defaults()
  given = asked.arguments
  if given["num_microbatches"] is None and given["microbatch_size"] is None:
    given["num_microbatches"] = 1
  split = Split.of(given, default_argnum=1)
  local = LocalLoss.of(
    loss_fn, given["argnums"], given["has_aux"], split, given
  )
  return check_step(local, args, {})
