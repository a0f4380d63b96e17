"""What an option of another library, or of another function of ours, is called in a function."""

from collections.abc import Callable, Collection, Mapping
import difflib
import functools
import inspect
from typing import Any, ParamSpec, TypeVar

from optax_accum._validate import why_not

P = ParamSpec("P")
R = TypeVar("R")

# The microbatches of an optimizer step.
_COUNTS = (
  "every_k_schedule",
  "gradient_accumulation_steps",
  "grad_accum_steps",
  "accum_steps",
  "accumulate_steps",
  "accumulation_steps",
  "accumulate_grad_batches",
  "num_micro_batches",
  "num_minibatches",
)

# What to write in a call that gets the whole batch, or in what makes a function of it.
WHOLE_BATCH = {
  **{name: f"{name}= is num_microbatches= here." for name in _COUNTS},
  "every_k": "every_k= is num_microbatches= here, because a call gets the whole batch.",
  "argnums": "argnums= of optax.microbatching is batch_argnums= here: what is split. What is"
  " differentiated is an option of microbatch_value_and_grad alone.",
  "argnames": "argnames= of optax.microbatching is batch_argnums= here.",
  "in_axes": "in_axes= is gone: rows are on the first axis. Move them there by jnp.moveaxis.",
  "accumulator": 'accumulator= of optax.microbatching is reduction= here, such as "mean".',
  "rngs": "rngs= is rng_argnums= here, the positions of keys in the arguments of the function.",
  "mutable": "mutable= is carry_argnum= here, the position of what each microbatch updates.",
  "unroll": "unroll= is gone: microbatches run in one loop, as it is.",
  "concat_axis": 'concat_axis= is gone: "concat" joins the first axis of an output. Move the rows'
  " there in the function by jnp.moveaxis.",
  "donate_argnums": "donate_argnums= is donate= of make_train_step, a bool.",
  "flush": "There is nothing to flush: every call runs its whole batch. flush= is an argument of"
  " update and apply of optax_accum.accumulate.",
  "weight": "weight= of optax_accum.accumulate is weight_fn= here, a function of the batch,"
  " or has_weight=True of a loss.",
}

# What to write in a function that has such an argument.
_BY_ARGUMENT = {
  "num_microbatches": WHOLE_BATCH,
  "batch": WHOLE_BATCH,
  "every_k": {
    **{
      name: f"{name}= is every_k= here."
      for name in (*_COUNTS, "num_microbatches")
    },
    "every_k_schedule": "every_k_schedule= of optax.MultiSteps is every_k= here.",
    "use_grad_mean": 'use_grad_mean=False is reduction="sum" here, and True the default.',
    "should_skip_update_fn": "should_skip_update_fn= is skip_fn= here.",
    "skip_nonfinite": "skip_nonfinite=True is skip_fn=optax.skip_not_finite here.",
    "weight_fn": "weight_fn= is weight= of update and apply here, a number in each call.",
    "weight": "weight= is an argument of update and apply.",
    "flush": "flush= is an argument of update and apply.",
  },
}


def hinted(
  hint: str = "", **names: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Decorates a function: a call that does not fit its signature fails with what to write instead.

  That is what `instead` says of the names that the function does not have, or `hint`. `help` shows
  its arguments without their types, of which the docstring says more in fewer words.
  """

  def decorate(fun):
    @functools.wraps(fun)
    def called(*args, **kwargs):
      try:
        return fun(*args, **kwargs)
      except TypeError:
        why = hint_on(fun, args, kwargs, names, hint)
        if not why:
          raise
      raise TypeError(f"{fun.__qualname__}: {why}")

    called.__signature__ = untyped_signature(fun)  # type: ignore[attr-defined]
    return called

  return decorate


def untyped_signature(fun: Callable[..., Any]) -> inspect.Signature:
  """The arguments of a function, without their types."""
  parameters = inspect.signature(fun).parameters.values()
  return inspect.Signature([p.replace(annotation=p.empty) for p in parameters])


def hint_on(
  fun: Callable[..., Any],
  args,
  kwargs,
  names: Mapping[str, str],
  hint: str = "",
) -> str:
  """Why a function cannot be called so and what to write, or "" where it can or nobody knows."""
  misfit = why_not(fun, *args, **kwargs)
  if not misfit:
    return ""
  known = inspect.signature(fun).parameters
  unknown = [name for name in kwargs if name not in known]
  found = [instead(name, known, names, hint) for name in unknown] or [hint]
  fix = " ".join(dict.fromkeys(found))
  if not fix:
    return ""
  return f"{misfit}. {fix}"


def instead(
  name: str, known: Collection[str], names: Mapping[str, str], hint: str = ""
) -> str:
  """What to write for a name that is not `known`: as `names` say, or the table, or one like it."""
  for argument, elsewhere in _BY_ARGUMENT.items():
    if argument in known:
      names = {**elsewhere, **names}
  if name in names:
    return names[name]
  near = difflib.get_close_matches(name, known, 1, cutoff=0.78)
  if near:
    return f"Did you mean {near[0]}=?"
  return hint or f"It takes {', '.join(known)}."
