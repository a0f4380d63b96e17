"""A loss on the whole batch and in microbatches, and all that was run of it, as NumPy arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._check_split import probes
from optax_accum._check_split.facts import are_the_same, constant, Facts, facts_of, Input
from optax_accum._check_split.probes import Arguments, BatchLeaf, is_key, Probe
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.microbatch import whole_batches
from optax_accum._microbatches.roles import Roles
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

# What makes a mean of the microbatches of what is one mean of the whole batch.
_OF_MICROBATCHES = ("weight_fn", "skip_nonfinite", "skip_empty")
# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0


class Outcome(NamedTuple):
  """What a loss gave, in NumPy."""

  leaves: list[np.ndarray]  # the loss and the gradients, in float64 or complex128
  aux: Any
  allowed: list[float]  # how much of a difference may be rounding, for each of the leaves

  @property
  def is_finite(self) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in self.leaves)

  @property
  def is_zero(self) -> bool:
    """Whether loss and gradients are all zero, which those of a wrong split may be too."""
    return not any(map(np.any, self.leaves))

  def fits(self, leaves: Sequence[np.ndarray], slack: float = 1.0) -> bool:
    """Whether loss and gradients are these, but for so many times the rounding."""
    both = zip(self.leaves, leaves, self.allowed, strict=True)
    return all(bool(_largest(x - y) <= slack * allowed) for x, y, allowed in both)


class Compared(NamedTuple):
  """One batch: what the whole of it gives, and what each split."""

  probe: Probe
  whole: Outcome
  splits: list[Outcome]

  @property
  def agree(self) -> bool:
    """Whether loss and gradients do, and not aux perhaps."""
    return all(self.whole.fits(split.leaves) for split in self.splits)


class Parts(NamedTuple):
  """A loss on the whole batch, and on two parts of its rows, of different size."""

  probe: Probe
  whole: Outcome
  first: Outcome
  rest: Outcome


class Runs:
  """A loss, its arguments and its splits, and what was run. Each program is compiled once.

  `sizes` are the rows of a microbatch, of each split.
  """

  def __init__(
    self,
    fun: Callable[..., Any],
    args: Arguments,
    roles: Roles,
    rows: int,
    options: Mapping[str, Any],
    sizes: Sequence[int],
  ):
    self.fun, self.args, self.roles, self.rows = fun, args, roles, rows
    self.options, self.sizes = options, sizes
    self.batch = {int(slot): axis for slot, axis in roles.batch.items()}
    self.names = _names(fun, self.batch)
    wrt = options["argnums"]
    self.argnums: Sequence[int] = [wrt] if isinstance(wrt, int) else wrt
    self.params = args[wrt] if isinstance(wrt, int) else tuple(args[i] for i in wrt)
    self.cut = min(-(-2 * rows // 3), rows - 1)  # the rows of the first of two parts
    whole = {name: x for name, x in options.items() if name not in _OF_MICROBATCHES}
    if options["has_aux"]:  # as the loss returns it
      whole |= {"aux_reduction": "last", "concat_axis": None}
    self._whole_fun = whole_batches()(self._of_arrays(microbatch_size=rows, **whole))
    self._whole = _jit(self._whole_fun)
    self._wholes: dict[int, Outcome] = {}  # by the ids of probes
    self._split_funs = [self._of_arrays(microbatch_size=size, **options) for size in sizes]
    self._splits = list(map(_jit, self._split_funs))

  def _of_arrays(self, **options: Any) -> Callable[[list[Any]], Any]:
    """Loss, aux and gradients, of the arrays of a call alone: the rest of it are constants."""
    value_and_grad = microbatch_value_and_grad(self.fun, **options)
    treedef: Any
    leaves, treedef = jax.tree.flatten(self.args)

    def run(arrays: list[Any]) -> tuple[Any, Any]:
      rest = iter(arrays)
      value, grads = value_and_grad(
        *treedef.unflatten([next(rest) if is_array(x) else x for x in leaves])
      )[:2]
      return value, grads

    return run

  def otherwise(
    self, fun: Callable[..., Any] | None = None, sizes: Sequence[int] | None = None, **options: Any
  ) -> "Runs":
    """The same on the same batches, of another loss, or split otherwise."""
    options, sizes = {**self.options, **options}, self.sizes if sizes is None else sizes
    runs = Runs(fun or self.fun, self.args, self.roles, self.rows, options, sizes)
    runs.names, runs.facts, runs.probes = self.names, self.facts, self.probes
    if fun is None:
      runs._whole, runs._whole_fun, runs._wholes = self._whole, self._whole_fun, self._wholes
    return runs

  def mended(self, **changes: Any) -> "Runs | None":
    """The same with another loss or options, if the microbatches then give what the batch does."""
    if changes.get("weight_fn", 0) is None and "skip_empty" in self.options:
      changes["skip_empty"] = False
    runs = self.otherwise(**changes)
    tried: list[Compared] = []
    for compared in runs._compared():
      if not compared.agree:
        return None
      tried.append(compared)
    runs.outcomes = tried  # which need not be run again
    return runs

  @functools.cached_property
  def outcomes(self) -> list[Compared]:
    """All batches that tell something. Raises what the loss does."""
    return list(self._compared())

  def _compared(self) -> Iterator[Compared]:
    for probe in self.probes:
      if id(probe) not in self._wholes:
        self._wholes[id(probe)] = self.whole(probe.args)
      whole, splits = self._wholes[id(probe)], []
      if not whole.is_finite:
        continue
      for size, split in zip(self.sizes, self._splits, strict=True):
        with noted(f"check_split ran it in {self.in_words(size)}; on all {self.rows} rows it ran."):
          splits.append(self._outcome(split, probe.args))
      compared = Compared(probe, whole, splits)
      if not compared.agree:
        compared = compared._replace(whole=self._with_rounding(whole, probe.args))
      if not all(outcome.is_zero for outcome in (whole, *splits)):
        yield compared

  @property
  def agrees(self) -> bool:
    return all(compared.agree for compared in self.outcomes)

  @functools.cached_property
  def parts(self) -> list[Parts]:
    """All batches that tell something, in parts."""
    return [self.in_parts(x.probe, x.whole) for x in self.outcomes]

  def in_parts(self, probe: Probe, whole: Outcome | None = None) -> Parts:
    first, rest = np.split(np.arange(self.rows), [self.cut])
    whole = whole or self._with_rounding(self.whole(probe.args), probe.args)
    return Parts(probe, whole, self.part(probe.args, first), self.part(probe.args, rest))

  def whole(self, args: Arguments) -> Outcome:
    """The loss on all rows at once: of the batch, or of a part of it."""
    return self._outcome(self._whole, args)

  def part(self, args: Arguments, rows: Any) -> Outcome:
    """The loss of some rows."""
    return self.whole(probes.take_rows(args, self.batch, rows))

  def _outcome(self, jitted: Callable[[list[Any]], Any], args: Arguments) -> Outcome:
    out = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, jitted(_arrays(args)))
    value, grads = jax.device_get(out)
    loss, aux = value if self.options["has_aux"] else (value, None)
    given = jax.tree.leaves((loss, grads))
    leaves, sizes = list(map(_wide, given)), list(map(_largest, given))
    kinds = [x.dtype for x in given if jnp.issubdtype(x.dtype, jnp.inexact)]
    coarsest = max(float(jnp.finfo(dtype).eps) for dtype in kinds)
    tolerance = 1e-9 if coarsest < 1e-12 else 1e-4
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    return Outcome(leaves, aux, [tolerance * max(size, 1e-2 * max(sizes)) for size in sizes])

  def _with_rounding(self, whole: Outcome, args: Arguments) -> Outcome:
    """The same, allowed also what parameters change that differ in their last bit alone."""
    nudged = self.whole(probes.nudge(args, self.argnums))
    both = zip(whole.leaves, nudged.leaves, whole.allowed, strict=True)
    return whole._replace(allowed=[max(_MANY_UNITS * _largest(x - y), z) for x, y, z in both])

  def compare(self, whole: Outcome, split: Outcome) -> tuple[LeafComparison, ...]:
    """The loss, the gradients and the aux of the whole batch beside those of microbatches."""
    names = ["loss", *(name for name, _ in _validate.named_leaves("grads", self.params))]
    both = zip(names, whole.leaves, split.leaves, whole.allowed, strict=True)
    return (*(_leaf(*each) for each in both), *self.compared_aux(whole, split).values())

  def compared_aux(self, whole: Outcome, split: Outcome) -> dict[int, LeafComparison]:
    """The aux that a split can leave as it is, each by its place among the leaves."""
    tolerance = whole.allowed[0] / (_largest(whole.leaves[0]) or 1.0)
    named = _validate.named_leaves("aux", whole.aux)
    both = zip(self.aux_words(whole.aux), named, jax.tree.leaves(split.aux), strict=True)
    return {
      i: _leaf(name, _wide(x), _wide(y), tolerance * _largest(x))
      for i, (word, (name, x), y) in enumerate(both)
      if word not in ("stack", "last")
    }

  def aux_words(self, aux: Any) -> list[str]:
    """How each leaf of the aux is reduced."""
    given, axis = self.options["aux_reduction"], self.options["concat_axis"]
    words = reduction_words.named_of_aux(given, axis)
    matched = reduction_words.match("aux_reduction", words, aux)
    return [kind.name for kind in jax.tree.leaves(matched)]

  @functools.cached_property
  def facts(self) -> Facts:
    """What the loss does by its jaxpr."""
    roles = dict.fromkeys(self.argnums, "params") | dict.fromkeys(self.batch, "batch")
    inputs = [
      Input(frozenset({roles[i]})) if i in roles else constant(x)
      for i, arg in enumerate(self.args)
      for x in _arrays((arg,))
    ]
    return facts_of(self.traced(), inputs, probes.negative_labels(self.args, self.batch))

  @functools.cached_property
  def probes(self) -> Sequence[Probe]:
    """The batches to run, the given one first."""
    keys, numbers = list(map(int, self.roles.rng)), (self.facts.integers, self.facts.floats)
    about = (self.args, self.batch, self.argnums, keys, self.rows, numbers, self.names)
    return list(probes.of_call(*about))

  @property
  def leaves(self) -> list[BatchLeaf]:
    """The arrays of the batch."""
    return probes.batch_leaves(self.args, self.batch, self.names)

  def traced(self, fun: Callable[[list[Any]], Any] | None = None) -> Any:
    """The jaxpr of a program, by default of the whole batch's, traced anew."""
    fun = fun or self._whole_fun
    # JAX remembers the jaxpr of a function that it knows.
    return jax.make_jaxpr(lambda arrays: fun(arrays))(_arrays(self.args))

  def splits_nothing(self) -> bool:
    """Whether what runs in microbatches is the program of the whole batch."""
    whole = self.traced()
    return all(are_the_same(whole, self.traced(fun)) for fun in self._split_funs)

  def in_words(self, size: int) -> str:
    """A split."""
    count, rest = divmod(self.rows, size)
    if rest:
      return f"microbatches of {size} rows, of {self.rows}"
    return f"{count} microbatch{'es' * (count > 1)} of {size} rows"


def _jit(fun: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
  """The program, which is compiled fast: it runs some fifty times, on a few rows."""
  on_cpu = jax.default_backend() == "cpu"
  return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0} if on_cpu else None)


def is_array(x: Any) -> bool:
  """Whether `x` is an array, and not a constant of the call."""
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _arrays(args: Arguments) -> list[Any]:
  return [x for x in jax.tree.leaves(args) if is_array(x)]


def _names(fun: Callable[..., Any], batch: Mapping[int, int]) -> Mapping[int, str]:
  """What the loss calls the batch arguments."""
  try:
    names = list(inspect.signature(fun).parameters)
  except (TypeError, ValueError):
    names = []
  return {i: names[i] if i < len(names) else f"batch_{i}" for i in batch}


def _largest(x: Any) -> float:
  return float(np.max(np.abs(x), initial=0.0))


def _wide(x: Any) -> np.ndarray:
  return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _leaf(name: str, x: np.ndarray, y: np.ndarray, allowed: float) -> LeafComparison:
  same_shape = x.shape == y.shape and bool(np.all(np.isfinite(y)))
  difference = _largest(x - y) if same_shape else float("inf")
  return LeafComparison(name, _largest(x), difference, allowed)


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
  """Adds a note to an error of the loss."""
  try:
    yield
  except Exception as error:
    error.add_note(note)
    raise
