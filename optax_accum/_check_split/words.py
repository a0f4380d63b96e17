"""What `check_split` says of each defect: why it is known, and what to write."""

from collections.abc import Sequence
from typing import Any

import jax

DRAWS = "it draws random numbers: rows may meet in them"
BENDS = (
  "it takes a maximum, an absolute value, or the like, of one number of the batch: in these batches"
  " all microbatches may be on one side of where it bends"
)
NOT_A_FUNCTION = (
  "The loss is not a function of its arguments: called twice with the same ones it computes"
  " something else. It may draw numbers with NumPy, or count its calls."
)
SHARED_KEY = (
  "The loss draws random numbers for each place in the batch from a key that all microbatches"
  " share, and so rows of different microbatches have the same noise."
)
PASS_A_KEY = (
  "Draw with jax.random, from a key that is an argument of the loss, and name it:\n"
  "  loss_fn(params, batch, key), with rng_argnums=2"
)
PLACES = (
  "The loss changes when the rows are put in another order: rows meet their neighbours, or what the"
  " loss holds for each place in the batch."
)
HALF = (
  "The loss computes in bfloat16, float16 or 8 bits, and the differences are small enough to be its"
  " rounding, or a small defect."
)
USE_FLOAT32 = "Check a loss that computes in float32 (in flax, dtype=jnp.float32)."
SUM = (
  "The losses and gradients of parts of the batch add up to those of the whole: the loss is a sum."
)
SUM_AND_MORE = (
  "The loss is a sum over rows and something that no row changes, such as a regulariser, which"
  " would be counted in every microbatch."
)
MEAN_AND_MORE = (
  "Take the mean over rows in place of the sum: what no row changes may then stay as it is. Or"
  ' leave it out, pass reduction="sum", and add it and its gradient once.'
)
SOME_WEIGHT = (
  "The whole batch's loss and gradients are a weighted mean of those of its parts, at several"
  " parameters, but nothing that was counted in the batch gives the weights."
)
GUARD = (
  "and jnp.maximum in place of the small number, which is added once for each microbatch:\n"
  "  total / jnp.maximum(count, 1)"
)
SEVERAL_COUNTS = (
  "No one weight explains the loss, and where all rows have the masks and labels of row 0 it splits"
  " well: it has several denominators, such as tokens in one term and rows in another."
)
ROUTER = (
  "A term that multiplies or divides means of the batch, such as a router's balance, is a function"
  ' of sums: take the sums from optax_accum.microbatch(..., reduction="sum"), and compute it from'
  " them on the whole batch. See make_train_step's docstring."
)
TOTALS = (
  "Write each term as a sum over rows divided by its total over the whole batch, pass the totals"
  " as an argument that is not split, and add up the microbatches:\n"
  "  totals = {...}  # counted in the whole batch\n"
  '  loss_fn(params, batch, totals), with batch_argnums=1, reduction="sum"\n' + ROUTER
)
COUPLED = (
  "A part's loss and gradients change with the other rows in it, beyond what any weight explains:"
  " a contrastive loss, statistics of the batch, or a function of a mean (a square root, a ratio)."
)
STATISTICS = (
  "For batch normalization: normalize by running statistics, and take the new ones from a second"
  " call. In flax:\n"
  '  out = model.apply({"params": params, "batch_stats": stats}, x, train=False)\n'
  '  frozen = {"params": jax.lax.stop_gradient(params), "batch_stats": stats}\n'
  '  _, new = model.apply(frozen, x, train=True, mutable=["batch_stats"])\n'
  '  return loss, (new["batch_stats"], aux)  # with stats an argument, and carry_argnum=2\n'
  "Left as it is, each microbatch is normalized by itself (ghost batch normalization), which many"
  " want."
)
ENCODE = (
  "For a contrastive loss: split what is done row by row, and leave the rest whole. Outside the"
  " loss:\n"
  '  encode_in_parts = optax_accum.microbatch(encode, reduction="concat", batch_argnums=1,'
  " microbatch_size=...)\n"
  "Call it inside the loss, which then runs on the whole batch (num_microbatches=1) and is"
  " differentiated so."
)
NEIGHBOURS = f"{STATISTICS}\n{ENCODE}\n{ROUTER}"
GROUPS_OF_NEIGHBOURS = (
  "The loss is a mean over parts whose rows follow each other, and not over the microbatches, whose"
  " rows do not: rows belong in groups with their neighbours."
)
GROUPS = (
  "Where rows belong in groups, make each group one row, of shape (groups, rows of a group, ...),"
  " and flatten it inside the loss. Microbatches then hold whole groups:\n"
  "  batch = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), batch)\n"
  "  batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # inside the loss"
)
NOT_FINITE = (
  "The loss or its gradients are not finite on the whole batch: there is nothing to compare."
)
ALL_ZERO = "The loss and its gradients are zero on all batches: there is nothing to compare."
OTHER_BATCH_TOO = "Give parameters and a batch for which the loss is not zero."
OTHER_BATCH = "Give parameters and a batch for which they are."
TWO_ROWS = "Splitting changes the loss, and two rows do not tell why."
MORE_ROWS = "Give check_split 4 rows or more."
RATIO = 'Return what each aux divides, and what it divides by, as two aux reduced by "sum".'
GRADIENTS = "The loss agrees, and gradients do not: they are not reduced as grad_reduction says."
AUX = "Loss and gradients agree, and aux does not: it is not reduced as aux_reduction says."
AS_CALLED = (
  "The microbatches agree with the whole batch where each runs by itself, and not as"
  " microbatch_value_and_grad runs them with these options."
)
PLAIN = "Leave out options that should change no value, such as in_place, one by one."
MEAN_OF_ROWS = "The loss is a mean over rows, and is weighed or added up otherwise."
# Of these the caller fills in what is in braces.
UNSPLIT = (
  "{which}: {rows} rows, as many as the batch, and not split. Where they are split too, the"
  " microbatches give what the whole batch does."
)
SPLIT_TOO = (
  "batch_argnums={batch}\n"
  "or, if argument {more} merely has as many rows and every microbatch is to have it whole,\n"
  "  batch_argnums={given}"
)
UNEVEN = (
  "The loss runs on all {rows} rows, and not on {failed} of them: it takes rows in groups, or a"
  " certain number of them. It raises {error}"
)
DENOMINATOR = (
  "A weight_fn that gets rows of the batch, and returns what the loss divides by on these rows:\n"
  "  weight_fn=lambda {batch}: jnp.sum(class_weights[labels_of({batch})])  # for example"
)
WEIGHTED = (
  "The loss is no mean over rows: what it divides by is {what}. With this weight the microbatches"
  " give what the whole batch does."
)
EPSILON = (
  "What the loss divides by is {what} and about {epsilon:.1g} that is added to it. With this weight"
  " alone the microbatches differ by as much."
)
OVERWRITTEN = (
  "{names}: not a mean over rows but an extreme of them, while the loss agrees. It is a value to"
  " overwrite the leaf with, such as flax's OVERWRITE_WITH_GRADIENT."
)
SUM_OVER_ALL_ROWS = (
  'reduction="sum", {option}\n'
  "and a loss that is the sum over its rows divided by all rows of the batch. Cotangents of a"
  " mean are larger where there are fewer rows, and 8 bits round them otherwise:\n"
  "  return loss * ({rows} / {all_rows})  # loss: the mean; {all_rows}: all rows of the batch"
)


def option(name: str, tree: Any) -> str:
  """An option with a tree of words; a part of it whose words are all the same is that word."""

  def collapsed(x: Any) -> Any:
    words = set(jax.tree.leaves(x))
    if len(words) == 1:
      return words.pop()
    if type(x) is dict:
      return {key: collapsed(value) for key, value in x.items()}
    return type(x)(map(collapsed, x)) if type(x) in (list, tuple) else x

  return f"{name}={collapsed(tree)!r}".replace("'", '"')


def one_or_more(values: Sequence[int]) -> str:
  """Positions as an option has them."""
  return str(values[0]) if len(values) == 1 else str(tuple(values))
