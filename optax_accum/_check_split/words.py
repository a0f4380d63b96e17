"""What `check_split` says of each defect: why it is known, and what to write."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

DRAWS = "it draws random numbers: rows may meet in them"
BENDS = (
  "it takes a maximum, an absolute value, or the like, of one number of the batch, and all"
  " microbatches may have been on one side of where it bends"
)
NOT_A_FUNCTION = (
  "Called twice with the same arguments, the loss computes something else. It may draw numbers with"
  " NumPy, or count its calls."
)
SHARED_KEY = (
  "The loss draws random numbers for each place in the batch from a key that all microbatches"
  " share, and so rows of different microbatches have the same noise."
)
PASS_A_KEY = (
  "Draw with jax.random, from a key that is an argument of the loss, and name it. In a carry, let"
  " it be a jax.random.key:\n"
  "  loss_fn(params, batch, key), with rng_argnums=2"
)
HALF = "The loss computes in 16 or 8 bits, whose rounding hides why microbatches differ."
USE_FLOAT32 = "Check a loss that computes in float32 (in flax, dtype=jnp.float32)."
SUM = "The losses and gradients of parts of the batch add up to those of the whole."
SOME_WEIGHT = (
  "The loss and gradients are a weighted mean of those of the microbatches, but nothing that was"
  " counted in the batch gives the weights."
)
COUPLED = (
  "A part's loss and gradients change with the other rows in it, or with their order, beyond what"
  " one weight explains: a contrastive loss, statistics of the batch, a function of a mean (a"
  " square root, a ratio), several denominators, or rows in groups."
)
GROUPS = (
  "Rows in groups: make each group one row, which every microbatch then holds whole, and flatten it"
  " in the loss:\n"
  "  batch = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), batch)"
)
TOGETHER = (
  "Batch normalization: normalize by running statistics, in a carry (carry_argnum): see the guide"
  " When something is wrong. Left as it is, each microbatch is normalized by itself (ghost batch"
  " normalization), which many want.\n"
  "A contrastive loss: run the encoder by optax_accum.microbatch(encode, ...) inside a loss of the"
  " whole batch. See the guide to contrastive losses.\n"
  "Several denominators, such as tokens in one term and rows in another: divide each term by its"
  " total over the whole batch, an argument that is not split, and add up the microbatches, as the"
  " guide to padded text does:\n"
  '  loss_fn(params, batch, totals), with batch_argnums=1, reduction="sum"\n'
  "Means of the batch that are multiplied or divided, such as a router's balance: compute them on"
  ' the whole batch from sums by optax_accum.microbatch(..., reduction="sum").\n'
  "A sum over rows and something that no row changes, such as a regularizer: take the mean over"
  " rows, or leave it out and add it and its gradient once.\n"
  f"{GROUPS}"
)
SOME_ROWS = "it ran on the first {some} of the {rows} rows"
ONE_DEVICE = "it ran on one device, on which nothing is reduced over devices"
NO_COLLECTIVES = (
  "step.check runs the loss on one device, where no axis has a name. A loss needs no lax.pmean or"
  " lax.psum: the step reduces over devices. Check one with another collective without it."
)
TOO_LARGE = (
  "step.check runs on one device, with no room for this: check a smaller model with the same loss."
)
NOT_FINITE = "The loss or its gradients are not finite on the whole batch: nothing can be compared."
ALL_ZERO = "The loss and its gradients are zero on all batches: nothing can be compared."
OTHER_BATCH = "Give parameters and a batch for which they are finite, and the loss is not zero."
RATIO = 'Return what each aux divides, and what it divides by, as two aux reduced by "sum".'
GRADIENTS = "The loss agrees, and gradients do not: they are not reduced as grad_reduction says."
AUX = "Loss and gradients agree, and aux does not: it is not reduced as aux_reduction says."
AS_CALLED = (
  "Each microbatch by itself agrees, and not microbatch_value_and_grad with these options."
)
PLAIN = "Leave out options that should change no value, such as in_place, one by one."
# Of these the caller fills in what is in braces.
UNSPLIT = "{which}: {rows} rows, as many as the batch, and not split, which may be why they differ."
UNEVEN = (
  "The loss runs on all {rows} rows, and not on {failed} of them: it takes rows in groups, or a"
  " certain number of them. It raises {error}"
)
DENOMINATOR = (
  "A weight_fn that returns what the loss divides by on these rows of the batch, without a small"
  " number that each microbatch would add to it (jnp.maximum(count, 1) adds none), for example\n"
  "  weight_fn=lambda {batch}: jnp.sum(class_weights[labels_of({batch})])"
)
WEIGHTED = "What the loss divides by is {what}. With this weight the microbatches agree."
OVERWRITTEN = (
  "{names}: not a mean over rows but an extreme of them, while the loss agrees. It is a value to"
  " overwrite the leaf with, such as flax's OVERWRITE_WITH_GRADIENT."
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


def split_too(given: Iterable[int], more: Iterable[int]) -> str:
  """The options that split more arguments than are given, or say that these are all."""
  given, more = sorted(given), sorted(more)
  return (
    f"batch_argnums={tuple(sorted([*given, *more]))}\n"
    f"or, if argument {' and '.join(map(str, more))} merely has as many rows and every"
    f" microbatch is to have it whole,\n  batch_argnums={one_or_more(given)}"
  )


def one_or_more(values: Sequence[int]) -> str:
  """Positions as an option has them."""
  return str(values[0]) if len(values) == 1 else str(tuple(values))
