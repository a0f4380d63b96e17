"""What a check runs of a loss: all rows at once, parts of them, and the step over its devices."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from optax_accum import _validate, _versions
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Tree
from optax_accum._check_split.call import Call
from optax_accum._check_split.report import LeafComparison
from optax_accum._mesh.loss import Loss
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.roles import by_slot
from optax_accum._microbatches.whole import whole_batches

Run: TypeAlias = Callable[..., Tree]
# By name: "loss", "grads['w']", "aux['count']".
Arrays: TypeAlias = Mapping[str, np.ndarray]

# Of a leaf's largest number, by the bytes of the narrowest float that the loss computes in: four
# units of the last place of bfloat16.
_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 1 / 64, 1: 1 / 64}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_DRAWS = {
  "random_bits",
  "random_gamma",
  "threefry2x32",
  "rng_bit_generator",
}
# After these an aux is that of all rows. Others keep that of each microbatch, or of one.
_WORDS = "sum", "mean", "max", "min", "concat"


class Facts(NamedTuple):
  """What the equations of a loss tell, each by itself."""

  sorts: bool
  keys: set[str]  # the dtypes of those from which it draws
  bytes: int  # of the narrowest float
  numbers: list[int]  # with which it compares
  exchanges: bool  # whether devices send something


class Outcome(NamedTuple):
  """What a loss gave for a call."""

  arrays: Arrays
  weight: float  # how much the rows count
  allowed: Mapping[str, float]  # what may be rounding

  @property
  def main(self) -> Arrays:
    """The loss and the gradients."""
    return {k: x for k, x in self.arrays.items() if not k.startswith("aux")}

  @property
  def is_finite(self) -> bool:
    return all(np.isfinite(x).all() for x in self.main.values())

  def compare(self, arrays: Arrays) -> list[LeafComparison]:
    """Its arrays beside others."""
    each = []
    for name, other in arrays.items():
      x = self.arrays[name]
      difference = _largest(x - other)
      each.append(
        LeafComparison(name, _largest(x), difference, self.allowed[name])
      )
    return each


class Programs:
  """A loss, a call of it, and what runs it, each compiled once."""

  def __init__(self, loss: Loss, call: Call):
    self.call = call
    self.local = loss.local
    self.axes: Any = ()  # which the loss may name
    self.devices = 1
    self.mesh = None
    self.one = None  # a mesh of one device, where these axes have size 1
    if loss.parallel is not None:
      self.axes = loss.parallel.axes
      self.devices = loss.parallel.devices
      self.mesh = mesh = loss.parallel.mesh
      one = np.reshape(mesh.local_devices[:1], [1] * mesh.devices.ndim)
      self.one = Mesh(one, mesh.axis_names, axis_types=mesh.axis_types)
    # The default refuses an aux of as many rows as a microbatch, which here is another number.
    aux = self.local.asked["aux_reduction"] or "mean"
    self.asked = {**self.local.asked, "aux_reduction": aux}
    whole = self._value_and_grad(self.local, None)
    self._run = _compiled(self._on_one_device(whole))
    self._steps = functools.cache(
      lambda size: _compiled(self._value_and_grad(loss, size))
    )

  def whole(self, call: Call) -> Outcome:
    """All rows at once, and what may be rounding in them."""
    outcome = self.part(call)
    # What parameters change that differ in their last bits alone may be rounding too, and 20 times
    # that.
    eps = float(jnp.finfo(jnp.result_type(float)).eps)
    nudged = self.part(call.moved(2 * eps))
    size = self.facts.bytes
    loss, *grads = map(_largest, outcome.main.values())
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    least = 1e-2 * max(loss, *grads)
    if size < 4:
      # A sum of many is rough, as of a bias's gradient on CPUs. That of losses is in float32.
      least = 8 * max(grads)
    # A gradient is rounded to the dtype of its parameter, in each microbatch.
    units = [
      float(jnp.finfo(x.value).eps) for x in call.of_role("differentiated")
    ]
    rounded = 8 * max(units) * max(grads)
    allowed = {}
    for name, x in outcome.arrays.items():
      largest = _largest(x)
      if name in outcome.main:
        largest = max(largest, least)
      allowed[name] = max(
        _TOLERANCES[size] * largest,
        20 * _largest(x - nudged.arrays[name]),
        rounded * name.startswith("grads"),
      )
    return outcome._replace(allowed=allowed)

  def part(self, call: Call) -> Outcome:
    """All rows at once on one device, where the loss does not split by itself."""
    with whole_batches():
      return self._outcome(self._run(call.values))

  def step(self, call: Call, size: int) -> Outcome:
    """What the step gives in microbatches of so many rows on all devices."""
    values = call.values
    with on(self.mesh):  # where keys are not yet
      if self.mesh:
        values = jax.device_put(values, PartitionSpec())
      return self._outcome(self._steps(size)(values))

  def _outcome(self, out) -> Outcome:
    words = dict(_validate.named_leaves("aux", self.words))
    outputs, weight = jax.device_get(out)
    arrays = {}
    for root, tree in outputs._asdict().items():
      for name, x in _validate.named_leaves(root, tree):
        if words.get(name, "mean") in _WORDS:
          arrays[name] = np.asarray(x, np.result_type(x, float))
    return Outcome(arrays, weight, {})

  @functools.cached_property
  def facts(self) -> Facts:
    """What the equations of the loss tell."""
    with whole_batches():
      closed = self._trace()
    sorts = False
    keys: set[str] = set()
    sizes = {jnp.result_type(float).itemsize}
    values = [x.value for x in self.call.of_role("shared", "of_step")]
    values += closed.consts
    exchanges = False
    for eqn in _equations(closed.jaxpr):
      name = _versions.primitive_name(eqn)
      sorts |= name in ("sort", "top_k")
      if name in _DRAWS:
        keys.add(str(eqn.invars[0].aval.dtype))
      for x in eqn.outvars:
        if jnp.issubdtype(getattr(x.aval, "dtype", int), jnp.floating):
          sizes.add(x.aval.dtype.itemsize)
      # A function within the loss may be given a number, and compare data with it.
      if name in _COMPARES or _versions.inner_jaxprs(eqn):
        values += [getattr(x, "val", 0.0) for x in eqn.invars]
      # These name an axis, and send nothing.
      if name not in ("pcast", "pvary"):
        named = eqn.params.get("axes"), eqn.params.get("axis_name")
        exchanges |= not {*self.axes}.isdisjoint(jax.tree.leaves(named))
    numbers: list[int] = []
    for x in values:
      if jnp.issubdtype(jnp.result_type(x), jnp.integer) and np.size(x) <= 16:
        for n in np.ravel(x).tolist():
          numbers += n, n - 1, n + 1
    numbers = [*dict.fromkeys(numbers)][:16]  # each takes time
    return Facts(sorts, keys, min(sizes), numbers, exchanges)

  def splits_itself(self) -> bool:
    """Whether the loss calls `microbatch`."""
    with whole_batches():
      whole = self.fingerprint()
    return whole != self.fingerprint()

  def fingerprint(self) -> tuple[str, list[bytes]]:
    """What two traces of the loss share, unless NumPy drew numbers in them."""
    closed = self._trace()
    consts = [np.asarray(x).tobytes() for x in closed.consts if not is_key(x)]
    return re.sub(r"0x[0-9a-f]+", "", str(closed)), consts

  @functools.cached_property
  def words(self) -> Tree:
    """What was asked for each aux."""
    asked = self.asked["aux_reduction"]
    outputs, _ = jax.eval_shape(self._run, self.call.values)
    return reduction_words.match("aux_reduction", asked, outputs.aux)

  def _trace(self):
    # A new function: JAX remembers the jaxpr of one that it knows.
    def run(values):
      args, kwargs = self.call.arguments(values)
      return self.local.function(*args, **kwargs)[0]

    return jax.make_jaxpr(self._on_one_device(run))(self.call.values)

  def _on_one_device(self, run: Run) -> Run:
    """`run`, in which a loss may name the axes."""
    if not self.axes:
      return run
    return jax.shard_map(
      run,
      in_specs=PartitionSpec(),
      out_specs=PartitionSpec(),
      axis_names=set(self.axes),
      check_vma=False,
    )

  def _value_and_grad(self, loss: Loss, size: int | None) -> Run:
    """The results of a loss in such microbatches, each of which reads the carry that was given."""
    split = dataclasses.replace(
      self.local.split, num_microbatches=None, microbatch_size=size
    )
    fun = self.local.fun

    @functools.wraps(fun)
    def with_old_carry(*args, **kwargs):
      out = fun(*args, **kwargs)
      for slot in self.local.roles_of(args, kwargs).carry:
        loss, (_, aux) = out
        out = loss, (by_slot(args, kwargs)[slot], aux)
      return out

    new = with_split(loss, split, self.asked, with_old_carry)

    def run(values):
      args, kwargs = self.call.arguments(values)
      _, out, stats = new.value_and_grad(*args, **kwargs)
      return out._replace(noise=None, kept=None), stats.total_weight

    return run


def with_split(loss: Loss, split, asked, fun: Run) -> Loss:
  """The loss of a function, split in another way."""
  local = loss.local
  local = LocalLoss.of(fun, local.argnums, local.has_aux, split, asked)
  if loss.parallel is None:
    return local
  return dataclasses.replace(loss, local=local)


def on(mesh: Mesh | None) -> Any:
  """Sets a mesh, if there is one."""
  return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


def _compiled(run: Run) -> Run:
  """A program of it, compiled fast: it runs some dozen times on few rows."""
  options = {}
  if jax.default_backend() == "cpu":
    options = {"xla_backend_optimization_level": 0}
  return jax.jit(run, compiler_options=options)


def _largest(x: np.ndarray) -> float:
  return float(np.abs(x).max(initial=0.0))


def _equations(jaxpr) -> Iterator[Any]:
  """All equations, with those within them."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in _versions.inner_jaxprs(eqn):
      yield from _equations(inner)
