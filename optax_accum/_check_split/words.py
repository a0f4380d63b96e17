"""What `check_split` says of each defect: why it is known, and what to write."""

from collections.abc import Collection, Mapping

import jax

from optax_accum._microbatches.options import Slot
from optax_accum._microbatches.refusals import naming

DRAWS = (
  "the random numbers that the loss draws: whether the noise of a row depends on other rows, or"
  " all rows share one number, which would be another in each microbatch"
)
BENDS = (
  "thresholds: the loss takes a maximum, an absolute value, or the like, of one number of the"
  " batch, or compares it, and it may be on the same side of the threshold in all microbatches"
)
SOME_ROWS = "more than {some} of the {rows} rows at a time"
ONE_DEVICE = "what devices send: the check ran on one, and took a microbatch for each of the others"
NOT_ALONE = (
  "whether the devices together give what one device does: the loss does not run on one, so the"
  " check compared microbatches with one microbatch, both over the mesh"
)
SENDS = (
  "Devices exchange something in the loss, so a microbatch is that of all of them together. The"
  " loss may also depend on their number, as l.sum() / lax.psum(count, axis) does, or be a mean of"
  " means, as lax.pmean of a mean over a mask is."
)
OVER_MESH = (
  "On one device each microbatch agrees, but the step over its mesh does not: the loss depends on"
  " the number of devices."
)
OWN_MEAN = (
  "Return the mean of the device's own rows, l.sum() / count, without lax.psum or lax.pmean, and"
  " let weight_fn return count: lax.psum of a Python number, lax.axis_size and lax.axis_index"
  " differ with the devices. Leave out options that should change no value, such as in_place, one"
  " by one."
)
NOT_A_FUNCTION = (
  "A second call with the same arguments gives another result. The loss may draw numbers with"
  " NumPy, or count its calls."
)
SHARED_KEY = (
  "All microbatches share a key from which the loss draws noise for each place in the batch. So"
  " rows of different microbatches have the same noise."
)
PASS_A_KEY = (
  "Draw with jax.random, from a key that is an argument of the loss, and name it. In a carry, let"
  " it be a jax.random.key:\n"
  "  loss_fn(params, batch, key), with rng_argnums=2"
)
HALF = "The loss computes in 16 or 8 bits, whose rounding hides why microbatches differ."
USE_FLOAT32 = (
  "Check a loss that computes in float32 (in flax, dtype=jnp.float32)."
)
SUM = "The losses and gradients of the microbatches add up to those of the whole batch."
AUX_MAY_COUNT = (
  "If the aux is how much the rows count, has_weight=True in the place of has_aux=True gives the"
  " mean. If the sum is meant:\n"
)
OR_BOTH = (
  "Or let the loss return (total, weight), the sum of its losses and what it divides that by, with"
  " has_weight=True."
)
TOTAL = (
  "With has_weight=True return (total, weight) of the rows that the loss is given: the sum of their"
  " losses, which is no mean, and how much these rows count."
)
QUOTIENT = "Or return total / weight alone:"
MEAN_FOR_TOTAL = (
  "The first of what the loss returns, (total, weight), is a mean over its rows, and is divided by"
  " their weight once more."
)
SOME_WEIGHT = (
  "The loss and gradients are a weighted mean of those of the microbatches. The check did not find"
  " what in the batch gives the weights."
)
COUPLED = (
  "The loss of a row depends on the other rows or on their order, and no weight of a microbatch"
  " explains it: a contrastive loss, statistics of the batch, a function of a mean (a square root,"
  " a ratio), several denominators, or rows in groups."
)
GROUPS = (
  "Rows in groups: make each group one row, so that no microbatch cuts it, and flatten it in the"
  " loss; of neighbors, or of the first and the second half:\n"
  "  batch = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), batch)\n"
  "  batch = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2), axis=1), batch)"
)
BATCH_NORM = (
  "Batch normalization: use group or layer norm, or the running statistics of earlier steps, as the"
  " guide When something is wrong does. Training also works as it is: each microbatch is normalized"
  " by its own rows."
)
_PATTERN = ' See "A statistic of the whole batch" on the page "Your loss, and what to write".'
# Of each way in which rows meet. A report has those that were seen in the loss, or all.
MENDS = {
  "groups": GROUPS,
  "mixed": "Rows in a random order (mixup, shuffled negatives): draw the order before the step, for"
  " the whole batch, and pass to each row what it meets, as further leaves of the batch:\n"
  '  batch = {**batch, "x_other": batch["x"][order]}',
  "pairs": "A contrastive loss: run the encoder by optax_accum.microbatch(encode, ...) inside a"
  " loss of the whole batch. On several devices gather the rows of all by jax.lax.all_gather. See"
  " the guide to contrastive losses.",
  "ordered": "Rows that are sorted or selected (the hardest rows): select them before the step,"
  ' among the losses of all rows by optax_accum.microbatch(..., reduction="concat"), and pass a'
  " weight for each row as a leaf of the batch, which weight_fn adds up; or pass the threshold."
  + _PATTERN,
  "data": "A statistic of the data (normalized advantages), or noise that depends on other rows:"
  " compute or draw it before the step, for the whole batch, and pass it as a leaf of the batch, or"
  " as a further argument that is not split." + _PATTERN,
  "statistics": f"{BATCH_NORM}\n"
  "Other statistics of the batch, as of correlations: run what comes before them by"
  " optax_accum.microbatch(encode, ...) inside a loss of the whole batch.",
  "bends": "A threshold on a mean over the batch (free bits): apply it to each row, or find which"
  " means are above it before the step, and pass that as an argument that is not split.",
  "function": "A ratio, product or root of means over the batch, as the balance of a router:"
  ' compute it on the whole batch from sums by optax_accum.microbatch(..., reduction="sum").',
  "denominators": "Several denominators: compute the totals over the whole batch first, and pass"
  ' them to all microbatches. If the loss divides by them, reduction="sum" adds these up.'
  + _PATTERN,
  "regularizer": "A sum over rows plus a term without rows, such as a regularizer: take the mean"
  " over rows, or add the term and its gradient once, outside.",
}
OTHERS = 'For other causes see the page "Your loss, and what to write".'
MIXED = "The loss puts rows in an order that it draws, so each row meets others in a microbatch."
CARRIED = (
  "The loss reads what it carries: with another {names} its result is another one. So a microbatch"
  " reads what those before it changed, and the whole batch reads the old value."
)
READ_THE_OLD = (
  "Let every microbatch read the old value: pass it as an argument that is not split, return what"
  " changes it as aux, and update it after the step. In linen leave it out of mutable; in nnx"
  " assign it after the step."
)
NOT_FINITE = "The loss or its gradients are not finite on the whole batch: nothing can be compared."
ALL_ZERO = (
  "The loss and its gradients are zero on all batches, or not finite on a device where nothing"
  " counts: nothing can be compared."
)
OTHER_BATCH = "Give parameters and a batch for which they are finite, and the loss is not zero."
RATIO = 'Return what each aux divides, and what it divides by, as two aux reduced by "sum".'
AUX = (
  "Loss and gradients agree, but aux does not: aux_reduction does not fit it."
)
AS_CALLED = "Each microbatch agrees, but microbatch_value_and_grad with these options does not."
PLAIN = (
  "Leave out options that should change no value, such as in_place, one by one."
)
# Of these the caller fills in what is in braces.
UNEVEN = (
  "The loss runs on all {rows} rows, but not on {failed} of them: it takes rows in groups, or a"
  " certain number of them. It raises {error}"
)
DENOMINATOR = (
  "A weight_fn that returns what the loss divides by on these rows of the batch, without a small"
  " number that each microbatch would add to it (jnp.maximum(count, 1) adds none), for example\n"
  "  weight_fn=lambda {batch}: jnp.sum(class_weights[labels_of({batch})])  # your own names\n"
  f"{OR_BOTH}"
)
WEIGHTED = (
  "The loss divides by {what}. With this weight the microbatches agree."
)


def tree_option(name: str, tree) -> str:
  """An option with a tree of words; a part of it whose words are all the same is that word."""

  def is_one(x):
    return len(set(jax.tree.leaves(x))) == 1

  tree = jax.tree.map(lambda x: jax.tree.leaves(x)[0], tree, is_leaf=is_one)
  return f"{name}={tree!r}".replace("'", '"')


def unsplit(
  given: Collection[Slot], more: Mapping[Slot, str]
) -> tuple[str, str]:
  """Why more arguments than are given may be to split, and the options for both cases."""
  which = " and ".join(f"argument {slot}" for slot in more)
  found = ", ".join(more.values())
  return (
    f"{found}, as many as the batch, and is not split, which may be the cause.",
    f"{naming('batch', [*given, *more])}\n"
    f"or, if {which} has as many rows by chance and every microbatch needs all of it,\n"
    f"  {naming('batch', given)}",
  )
