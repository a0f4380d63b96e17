"""What `check_split` says of each defect: why it is known, and what to write."""

from collections.abc import Iterable, Sequence
import re
from typing import Any

import jax

DRAWS = "whether the noise of a row depends on other rows: the loss draws random numbers"
BENDS = (
  "thresholds: the loss takes a maximum, an absolute value, or the like, of one number of the"
  " batch, which may be on the same side of the threshold in all microbatches"
)
SOME_ROWS = "more than {some} of the {rows} rows at a time"
ONE_DEVICE = "sums over devices: the check ran on one device"
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
USE_FLOAT32 = "Check a loss that computes in float32 (in flax, dtype=jnp.float32)."
SUM = "The losses and gradients of the microbatches add up to those of the whole batch."
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
  " loss:\n"
  "  batch = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), batch)"
)
BATCH_NORM = (
  "Batch normalization: use group or layer norm, or normalize by running statistics in a carry"
  " (carry_argnum), as the guide When something is wrong does. Training also works as it is: each"
  " microbatch is normalized by its own rows."
)
TOGETHER = (
  f"{BATCH_NORM}\n"
  "A contrastive loss: run the encoder by optax_accum.microbatch(encode, ...) inside a loss of the"
  " whole batch. See the guide to contrastive losses.\n"
  "Several denominators, such as tokens in one term and rows in another: divide each term by its"
  " total over the whole batch, and add up the microbatches, which all get these totals"
  ' (reduction="sum"). See the guide to padded text.\n'
  "A product or ratio of means over the batch, such as a router's balance: compute it on the whole"
  ' batch from sums by optax_accum.microbatch(..., reduction="sum").\n'
  "A sum over rows plus a term without rows, such as a regularizer: take the mean over rows, or add"
  " the term and its gradient once, outside.\n"
  f"{GROUPS}"
)
NO_COLLECTIVES = (
  "step.check runs the loss on one device, where no axis has a name. A loss needs no lax.pmean or"
  " lax.psum: the step reduces over devices. Check one with another collective without it."
)
TOO_LARGE = (
  "step.check runs on one device, with no room for this: check a smaller model with the same loss."
)
OTHER_MESH = (
  "step.check runs on a mesh of one device: pass the loss what is on your mesh as arguments, and do"
  " not close over it."
)
NOT_FINITE = "The loss or its gradients are not finite on the whole batch: nothing can be compared."
ALL_ZERO = "The loss and its gradients are zero on all batches: nothing can be compared."
OTHER_BATCH = "Give parameters and a batch for which they are finite, and the loss is not zero."
RATIO = 'Return what each aux divides, and what it divides by, as two aux reduced by "sum".'
GRADIENTS = "The loss agrees, but gradients do not: grad_reduction does not fit them."
AUX = "Loss and gradients agree, but aux does not: aux_reduction does not fit it."
AS_CALLED = "Each microbatch agrees, but microbatch_value_and_grad with these options does not."
PLAIN = "Leave out options that should change no value, such as in_place, one by one."
# Of these the caller fills in what is in braces.
UNSPLIT = "{which}: {rows} rows, as many as the batch, and not split, which may be the cause."
UNEVEN = (
  "The loss runs on all {rows} rows, but not on {failed} of them: it takes rows in groups, or a"
  " certain number of them. It raises {error}"
)
DENOMINATOR = (
  "A weight_fn that returns what the loss divides by on these rows of the batch, without a small"
  " number that each microbatch would add to it (jnp.maximum(count, 1) adds none), for example\n"
  "  weight_fn=lambda {batch}: jnp.sum(class_weights[labels_of({batch})])"
)
WEIGHTED = "The loss divides by {what}. With this weight the microbatches agree."
OVERWRITTEN = (
  "The loss agrees. The gradient of {names} is an extreme of the rows, and no mean over them: a"
  " value to overwrite the leaf with, such as flax's OVERWRITE_WITH_GRADIENT."
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
  others = " and ".join(f"argument {i}" for i in more)
  return (
    f"batch_argnums={tuple(sorted([*given, *more]))}\n"
    f"or, if {others} has as many rows by chance and every microbatch needs all of it,\n"
    f"  batch_argnums={one_or_more(given)}"
  )


def one_or_more(values: Sequence[int | str]) -> str:
  """Positions or names as an option has them."""
  return repr(values[0] if len(values) == 1 else tuple(values)).replace("'", '"')


def by_name(text: str, count: int, names: Sequence[str]) -> str:
  """A text on arguments by position, for a call that gives those from `count` on by name."""

  def renamed(match: re.Match[str]) -> str:
    option, slots = match[1], [int(i) for i in re.findall(r"\d+", match[2])]
    first, named = [i for i in slots if i < count], [names[i] for i in slots if i >= count]
    at = [f"{option}nums={one_or_more(first)}"] if first and first != [1] else []
    return ", ".join([*at, f"{option}names={one_or_more(named)}"]) if named else match[0]

  text = re.sub(r"(?<!with )((?:batch|rng)_arg)nums=(\d+|\([\d, ]+\))", renamed, text)
  known = {str(i): name for i, name in enumerate(names) if i >= count}
  return re.sub(r"argument (\d+)", lambda x: f"argument {known.get(x[1], x[1])}", text)
