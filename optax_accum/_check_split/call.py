"""A call of `check_split`: what is run and compared, and the report of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
from typing import Any

import jax

from optax_accum import _validate
from optax_accum._check_split import (
  bent,
  fixed_noise,
  hypotheses,
  loss_facts,
  mends,
  noise_of_rows,
  probes,
)
from optax_accum._check_split.dependence import constant, Value
from optax_accum._check_split.hypotheses import Case
from optax_accum._check_split.report import SplitReport
from optax_accum._check_split.runs import agree, in_check_dtype, is_array, Runs
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import (
  find_slots,
  names_or_positions,
  refuse_keys,
  refuse_rows,
  Slot,
  with_keys,
  with_rows,
)
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad


class Call:
  """One call of `check_split`: the loss, its arguments and the options, put in order."""

  def __init__(self, loss_fn: Callable[..., Any], args: Any, options: dict[str, Any]):
    order = "What the loss takes comes by position: check_split(loss_fn, params, batch)."
    if not callable(loss_fn):
      raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, and no function. {order}")
    try:
      bound = inspect.signature(microbatch_value_and_grad).bind(loss_fn, **options)
    except TypeError as error:
      raise TypeError(
        f"check_split {error}. Only options of microbatch_value_and_grad have names. {order}"
      ) from None
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given["axis_name"] is not None:
      raise ValueError(
        f"check_split runs on one device: leave axis_name={given['axis_name']!r} out."
      )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
      raise TypeError("check_split got traced arguments: call it outside jax.jit, with arrays.")
    for name, leaf in _validate.named_leaves("args", args):
      if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} is a ShapeDtypeStruct: check_split runs the loss; pass arrays.")
    self.sizes = {k: given.pop(k) for k in ("num_microbatches", "microbatch_size")}
    self.split = Split.of({**given, "num_microbatches": 1}, default_argnum=1)
    wanted = names_or_positions("argnums", given["argnums"], int)
    self.argnums = [int(i) for i in find_slots("argnums", wanted, loss_fn, args, {})]
    arguments: dict[Slot, Any] = dict(enumerate(args))
    with _noted(order):
      self.roles = self.split.roles(loss_fn, args, {}, self.argnums)
      for i in self.argnums:
        parameters.check_differentiable(f"argument {i}", args[i])
      self.rows = cut.batch_rows(self.roles.batch, arguments)
    if self.rows == 1:
      raise ValueError("The batch has 1 row, which cannot be split: give check_split 2 or more.")
    self.names = _names(loss_fn, [int(slot) for slot in self.roles.batch])
    self.keys = [int(slot) for slot in self.roles.rng]
    self.fun, self.args, self.options = loss_fn, args, given

  def refused(self) -> SplitReport | None:
    """The report where the defaults refuse the call."""
    if self.split.batch_argnums is None:
      try:
        refuse_rows(self.roles, self.split.batch_positions, {self.rows})
      except ValueError as error:
        found = with_rows(self.roles, {self.rows})
        batch = tuple(sorted(int(slot) for slot in {*self.roles.batch, *dict(found)}))
        mend = mends.split_too(batch, [int(slot) for slot in self.roles.batch])
        return SplitReport("unsplit", str(error), mend)
    if self.split.rng_argnums is None:
      try:
        refuse_keys(self.roles)
      except ValueError as error:
        slots = [int(slot) for slot in with_keys(self.roles)]
        alone = all(map(fixed_noise.is_key, jax.tree.leaves([self.args[i] for i in slots])))
        mend = f"rng_argnums={mends.one_or_more(slots)}" if alone else mends.PASS_A_KEY
        return SplitReport("random", str(error), mend)
    return None

  def report(self) -> SplitReport:
    """The report of what was run."""
    args = self._prepared()
    sizes = self._sizes()
    runs = Runs(self._without_carry(), args, self._options(), sizes)
    if sizes == [{"num_microbatches": 1}] and runs.splits_nothing(args):
      raise ValueError(
        "num_microbatches=1 splits nothing, and the loss calls no optax_accum.microbatch that"
        " does: leave it out, or give more."
      )
    with _noted(f"check_split ran it on the whole batch, {self.rows} rows."):
      given, facts = runs.whole(args), loss_facts.facts(runs.traced(args), self._values(args))
    batch = {int(slot): axis for slot, axis in self.roles.batch.items()}
    facts = facts.with_integers(probes.negative_labels(args, batch))
    numbers = facts.integers, facts.floats
    changed = (args, batch, self.argnums, self.keys, self.rows, numbers, self.names)
    tried = list(probes.of_call(*changed))
    case = Case(runs, args, self.roles, self.argnums, self.rows, self.names, tried, facts)
    if not given.is_finite:
      return SplitReport("unknown", mends.NOT_FINITE, mends.OTHER_BATCH)
    try:
      outcomes = case.outcomes
    except Exception as error:
      finding = hypotheses.of_error(case, _counts(sizes, self.rows))
      if finding is None:
        failed = next((s for s in sizes if not case.with_sizes([s]).runs_well), sizes[0])
        size = _in_words(failed, self.rows)
        error.add_note(f"check_split ran it in {size}; on all {self.rows} rows it ran.")
        raise
      return SplitReport(*finding[:3])
    compared = [
      (f"{name}; {_in_words(size, self.rows)}", runs.compare(whole, split))
      for name, whole, splits in outcomes
      for size, split in zip(sizes, splits, strict=True)
    ]
    batches = tuple(name for name, _, _ in outcomes)
    left_out = tuple(probe.name for probe in tried if probe.name not in batches)
    wrong = next((c for c in compared if not agree(c[1])), None)
    if wrong is None:
      keys = [*self.keys, *map(int, self.roles.carry)]
      try:
        differ = noise_of_rows.disagreements(case, keys)
      except Exception as error:
        reason = mends.noise_not_run(error)
        return SplitReport("unknown", reason, mends.DRAW_OUTSIDE, "", (), batches, left_out)
      for drawn in differ:
        return SplitReport("coupled", mends.DRAWN, mends.DRAW_OUTSIDE, *drawn, batches, left_out)
      if facts.has_kinks and bent.disagrees(runs, args, self._kinds(), tried):
        return SplitReport("coupled", mends.BENT, mends.TWO_SUMS, "", (), batches, left_out)
      if not outcomes:
        return SplitReport("unknown", mends.ALL_ZERO, mends.OTHER_BATCH_TOO)
      return SplitReport("ok", "", "", *compared[0], batches, left_out)
    return SplitReport(*hypotheses.explain(case)[:3], *wrong, batches, left_out)

  def _kinds(self) -> dict[int, str]:
    kinds = dict.fromkeys(map(int, self.roles.batch), "batch")
    kinds |= dict.fromkeys([*self.keys, *map(int, self.roles.carry)], "key")
    return {**kinds, **dict.fromkeys(self.argnums, "params")}

  def _prepared(self) -> tuple[Any, ...]:
    """The arguments in the dtypes of the check, and with fixed noise."""
    cast = {*self.argnums, *self.roles.batch}
    args = tuple(
      jax.tree.map(lambda x, i=i: in_check_dtype(x) if i in cast or is_array(x) else x, arg)
      for i, arg in enumerate(self.args)
    )
    args = probes.with_noise(args, self.keys, fixed_noise.LEVELS[0])
    carries = list(map(int, self.roles.carry))
    typed, raw = (probes.with_noise(args, carries, fixed_noise.LEVELS[0], x) for x in (False, True))
    if not any(map(fixed_noise.may_be_raw_key, jax.tree.leaves([typed[i] for i in carries]))):
      return typed
    try:  # two words may be something else than a key, and then cannot be one
      jax.eval_shape(lambda: self.fun(*raw))
    except (TypeError, ValueError):
      return typed
    return raw

  def _values(self, args: tuple[Any, ...]) -> list[Value]:
    """What is known of the arrays of the call."""
    kinds = self._kinds()
    return [
      Value(frozenset({kind}), constant(x).numbers if kind in ("other", "key") else None)
      for i, arg in enumerate(args)
      for kind in [kinds.get(i, "other")]
      for x in jax.tree.leaves(arg)
      if is_array(x)
    ]

  def _options(self) -> dict[str, Any]:
    """The options of all runs: every argument by its position, and no carry."""
    carries = self.split.carry_argnum is not None
    return {
      **{k: x for k, x in self.options.items() if k not in ("fun", "accumulator_dtype")},
      "has_aux": self.options["has_aux"] or carries,
      "batch_argnums": tuple(self.roles.batch),
      "batch_argnames": (),
      "batch_axis": tuple(self.roles.batch.values()),
      "rng_argnums": tuple(self.roles.rng),
      "rng_argnames": (),
      "carry_argnum": None,
      "carry_reduction": None,
    }

  def _without_carry(self) -> Callable[..., Any]:
    """The loss, whose carry is an argument like others."""
    if self.split.carry_argnum is None:
      return self.fun

    @functools.wraps(self.fun)
    def fun(*args: Any) -> Any:
      loss, (_, aux) = self.fun(*args)
      return loss, aux

    return fun

  def _sizes(self) -> list[dict[str, int]]:
    """The splits to run: as asked for, and a ragged one."""
    number, size = self.sizes.values()
    if size is not None and number is None:
      Split(microbatch_size=size)
      if size >= self.rows:
        raise ValueError(f"microbatch_size={size} does not split {self.rows} rows: give less.")
      return [{"microbatch_size": size}]
    if number is None:
      number = next(n for n in range(2, self.rows + 1) if self.rows % n == 0)
    Split(num_microbatches=number, microbatch_size=size)
    if number == 1:  # what runs in microbatches is within the loss
      return [{"num_microbatches": 1}]
    ragged = -(-2 * self.rows // 3)
    return [{"num_microbatches": number}] + [{"microbatch_size": ragged}] * (ragged < self.rows)


def _names(loss_fn: Callable[..., Any], slots: Sequence[int]) -> Mapping[int, str]:
  """What the loss calls the batch arguments."""
  try:
    names = list(inspect.signature(loss_fn).parameters)
  except (TypeError, ValueError):
    names = []
  return {i: names[i] if i < len(names) else f"batch_{i}" for i in slots}


def _counts(sizes: Sequence[Mapping[str, int]], rows: int) -> set[int]:
  """How many rows the microbatches have."""
  given = [s.get("microbatch_size", 0) or rows // s["num_microbatches"] for s in sizes]
  return {*given, *(rows % n for n in given if rows % n)}


def _in_words(size: Mapping[str, int], rows: int) -> str:
  if "num_microbatches" in size:
    count = size["num_microbatches"]
    return f"{count} microbatch{'es' if count > 1 else ''} of {rows // count} rows"
  return f"microbatches of {size['microbatch_size']} rows, of {rows}"


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
  """Adds a note to an error of the loss."""
  try:
    yield
  except Exception as error:
    error.add_note(note)
    raise
