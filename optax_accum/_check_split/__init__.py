"""`check_split`: whether a loss can be split into microbatches, and if not, why."""

from collections.abc import Callable
from typing import Any

from optax_accum._check_split.call import Call
from optax_accum._check_split.report import SplitReport


def check_split(loss_fn: Callable[..., Any], /, *args: Any, **options: Any) -> SplitReport:
  """Says whether splitting leaves this loss as it is, and if not, why and what to write.

  Runs ``loss_fn(*args)`` and its gradients on the whole batch and in microbatches, as
  `microbatch_value_and_grad` does with these options. Compares loss, gradients and aux leaf by
  leaf, in float32 (float64 where x64 is enabled). For a test, or a notebook, with a small batch::

    assert optax_accum.check_split(loss_fn, params, batch).ok

  A batch may hide a defect: a mean over a mask of ones is the plain mean. So the same programs run
  on more than the given batch:

  - Row 0 is changed. Masks are inverted, integers doubled, floats halved. Labels and floats become
    0, -1, or a number that the loss compares data with, NaN included. Masks, labels and floats are
    changed so in row 0 and the last row too, which no split keeps together.
  - A row is empty; rows are drawn again; all floats differ; the parameters are others.

  A batch on which the loss is not finite is left out, and so is one on which it is zero with all
  its gradients. Nothing is random: the same call gives the same report.

  A difference up to 1e-4 of a leaf's largest number, or 1e-6 of the largest leaf's, is taken for
  rounding (1e-9 and 1e-11 in float64), and more where the last bits of the parameters change as
  much. So a small term of a loss that does split badly, such as a z-loss, may not be seen.

  ===============  ================================================================
  verdict          what it means
  ===============  ================================================================
  ``ok``           all agree, on all of these batches
  ``sum``          the loss, or an aux, is a sum: ``reduction="sum"``
  ``weighted``     a mean over something else than rows: a `weight_fn`
  ``coupled``      rows meet each other beyond what one weight explains: contrastive
                   losses, batch statistics, several denominators
  ``random``       the loss is no function of its arguments, or microbatches share noise
  ``overwritten``  a leaf's gradient is no gradient but what to overwrite the leaf with, as the
                   scales of layers in 8 bits
  ``unsplit``      an argument that has the batch's rows is not split
  ``unknown``      they differ, and none of these explains it
  ===============  ================================================================

  A mend that is options was run: loss and gradients agree with it. What an aux still needs stands
  on a line of its own. Where the report has no table, the defaults refused the call and nothing was
  run: check again with the mend. That of ``unsplit`` has two ways out, because an argument may
  merely have as many rows as the batch. An odd number of rows makes that unlikely.

  - Noise is not compared. Keys that are named in `rng_argnums`, or threaded, draw the same
    everywhere. A loss that then agrees runs again with draws that belong to rows. Rows may meet in
    a drawn mask that the loss divides by, or in a permutation. Where it raises on as many rows as
    that takes, the verdict is ``unknown``.
  - A loss that agrees may take a maximum or an absolute value of one number of the whole batch,
    which may be on one side of its threshold in all of these batches. It runs again with a curved
    function in that place.
  - A loss that calls `microbatch` does not split there when it runs on the whole batch. With
    ``num_microbatches=1`` that is all that is compared.
  - A carry is not threaded: each microbatch gets the given one. What becomes of it is not compared,
    and nor is an aux under "stack" or "last".
  - Check a loss that computes in bfloat16 in float32. Layers in 8 bits round cotangents, which are
    larger in a mean over fewer rows: gradients differ with the number of microbatches unless the
    loss is a sum, divided by the rows of the whole batch.

  What stays hidden: what a loss does where a microbatch holds nothing that counts; a label that
  says so by a number which neither the batch nor a comparison in the loss has; a missing label that
  makes the gradients NaN; a threshold of several means at once (an array of them); a count of what
  is drawn, in a loss that takes no other number of rows, or flattens rows before it draws; and, in
  a batch whose rows are all alike, what only rows that differ much would show, as the balance of a
  router.

  Args:
    loss_fn: As in `microbatch_value_and_grad`.
    *args: What it is called with: arrays of 2 rows or more, and better 8 or more.
    **options: Those of `microbatch_value_and_grad`. `num_microbatches` defaults to the smallest
      number above 1 that divides the rows. Unless `microbatch_size` is given, a split whose last
      microbatch is smaller runs too. 1 is an error unless the loss calls `microbatch` itself.
      `accumulator_dtype` is left at its default, and `axis_name` is refused.

  Returns:
    A `SplitReport`: its `ok`, its `verdict`, and a table with the mend as `str`.

  Raises:
    ValueError: The batch has no arrays or one row, or nothing is split.
    TypeError: An option that there is not, traced or abstract arguments, or parameters that cannot
      be differentiated.
    Exception: What the loss raises, with a note that says on how many rows it did. A loss that
      takes rows in groups is "coupled" instead, and an aux that its word cannot reduce has a mend.

  Examples:
    >>> import jax.numpy as jnp, optax_accum
    >>> def loss_fn(params, batch):
    ...   each = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6), "mask": jnp.ones(6)}
    >>> report = optax_accum.check_split(loss_fn, jnp.array([1.0, -1.0]), batch)
    >>> report.verdict, report.mend
    ('weighted', "weight_fn=lambda batch: jnp.sum(batch['mask'])")
  """
  call = Call(loss_fn, args, options)
  return call.refused() or call.report()
