"""What a loss sends between devices, told from its traced equations, and what of it is refused.

Each device's loss is weighed and differentiated, and the gradients are summed over the devices. So
a collective is exact if its derivative is that of the sum of all devices' losses, as JAX's are
without types of what varies (`check_vma=False`). Refused is what means something else on several
devices than on one:

- a loss that devices reduced to one value: it would be reduced over them a second time;
- a loss that shrinks or grows with the number of devices, as ``l.sum() / lax.psum(count)``: it is a
  part of the mean, and not the mean of the device's rows;
- a gradient that the loss takes of what was reduced: it is that of the sum over devices;
- something sent under a condition that differs between devices: they would wait for each other.

What an equation does that is not known here is not refused. ``lax.psum(len(rows))`` is a number to
Python, so that no equation tells where it came from.
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple, NoReturn

from jax import lax
import numpy as np

from optax_accum import _versions
from optax_accum._arithmetic.across_devices import (
  AxisName,
  is_bound,
  names_of,
  varying_axes,
)

_CASTS = ("pcast", "pvary")
# How the names of these primitives begin.
_REDUCTIONS = ("psum", "pmax", "pmin", "all_gather")
# What keeps the degree that its operands share: sums, shapes, choices.
_SUMS = {
  "abs", "add", "add_any", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type",
  "copy", "cumsum", "dynamic_slice", "expand_dims", "gather", "max", "min", "neg",
  "optimization_barrier", "pcast", "pvary", "reduce_max", "reduce_min", "reduce_sum", "reshape",
  "rev", "select_n", "slice", "sort", "squeeze", "stop_gradient", "sub", "top_k", "transpose",
}  # fmt: skip
# Which of the operands have a degree, where others say which part is meant.
_COUNTED = {
  "select_n": slice(1, None),
  "gather": slice(1),
  "dynamic_slice": slice(1),
}


class Value(NamedTuple):
  """What is known of a value in a loss."""

  # The axes over which devices may have different ones.
  differs: frozenset[Any] = frozenset()
  # Those over which something in it was reduced.
  reduced: frozenset[Any] = frozenset()
  # Of `reduced`, where it is a sum of all devices' values.
  gathered: frozenset[Any] = frozenset()
  # The power of the number of devices that it grows with, if all have the same rows. None: unknown.
  degree: int | None = 0

  @property
  def is_constant(self) -> bool:
    """Whether no row goes in."""
    return not self.differs and not self.reduced


def axes_sent_over(jaxpr, with_index: bool = False) -> set[Any]:
  """The axes over which a traced function sends anything from one device to another.

  Those too of which it only asks for the index of the device, if `with_index`.
  """
  sends_nothing = _CASTS if with_index else ("axis_index", *_CASTS)
  axes: set[Any] = set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name not in sends_nothing:
      axes.update(_axes(eqn))
    for inner in _versions.inner_jaxprs(eqn):
      axes |= axes_sent_over(inner, with_index)
  return axes


def refuse_real_devices(fun: str, count: int) -> NoReturn:
  """Refuses a function that asks for devices, of which `count` virtual ones are meant."""
  raise ValueError(
    f"{fun} asks for other devices, or for its own index (lax.psum, lax.axis_index), and with"
    f" virtual_devices={count} would find the real ones: compute what it needs of all rows before"
    " the step, by microbatch(..., mesh=mesh), and pass it as a further argument. For noise of each"
    " device pass a key, by rng_argnums."
  )


def check_own_loss(
  jaxpr,
  params: int,
  axis_name: AxisName,
  is_mean: bool,
  names: Sequence[str],
) -> None:
  """Checks that a traced loss, and its weight if it returns one, are those of one device's rows.

  These are its first outputs, by `names`. Its first inputs are so many arrays of parameters, and
  the others are the device's own.
  """
  axes = frozenset(names_of(axis_name))
  others = len(jaxpr.invars) - params
  inputs = [Value()] * params + [Value(differs=axes)] * others
  outputs = _Flow(axes).outputs(jaxpr, inputs)
  for name, value in zip(names, outputs, strict=False):
    same = value.reduced - value.differs
    if same:
      raise ValueError(
        f"The {name} is the same on all devices of the axes {sorted(same)}, so it was reduced over"
        f" them (lax.pmean, lax.psum), and would be reduced over them again: return the {name} of"
        " the device's own rows. It is reduced over devices afterwards."
      )
    if is_mean and value.degree:
      raise ValueError(
        f"The {name} depends on the number of devices of the axes {sorted(axes)}, as l.sum() /"
        " lax.psum(count) does, which is a part of a mean: return the mean of the device's own"
        " rows, l.sum() / count, and let weight_fn return count; or return (l.sum(), count), with"
        " has_weight=True."
      )


class _Flow:
  """Follows what is known of values through the equations of a loss, over data axes."""

  def __init__(self, axes: frozenset[Any], in_gradient: bool = False) -> None:
    self._axes = axes
    self._devices = math.prod(map(lax.axis_size, axes))
    # Whether they are of a backward pass within the loss.
    self._in_gradient = in_gradient

  def outputs(self, jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """What is known of the outputs, where this is known of the inputs."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def value(x):
      is_literal = hasattr(x, "val")
      if not is_literal and x in known:
        return known[x]
      # Of a constant, if types tell.
      return Value(self._axes & varying_axes(x.aval))

    for eqn in jaxpr.eqns:
      flow = self
      if "transpose(" in str(eqn.source_info.name_stack):
        flow = _Flow(self._axes, in_gradient=True)
      results = flow._results(eqn, list(map(value, eqn.invars)))
      known.update(zip(eqn.outvars, results, strict=True))
    return list(map(value, jaxpr.outvars))

  def _results(self, eqn, values: list[Value]) -> list[Value]:
    """What is known of the results of an equation."""
    name = eqn.primitive.name
    inner = _versions.inner_jaxprs(eqn)
    if name == "scan":
      consts, carried = _versions.scan_inputs(eqn)
      return self._loop(inner[0], values, consts, carried)
    if name == "while":
      return self._while(eqn, values)
    if name == "cond":
      choice, *operands = values
      _check_together(choice, inner)
      branches = [self.outputs(branch, operands) for branch in inner]
      each = zip(*branches, strict=True)
      return [_either(results, choice) for results in each]
    if len(inner) == 1 and len(inner[0].invars) == len(values):
      return self.outputs(inner[0], values)
    sent = self._axes.intersection(_axes(eqn))
    if sent and name not in _CASTS:
      return [self._collective(eqn, x, sent) for x in values or [Value()]]
    value = _result(eqn, values)
    is_product = value.degree and name in ("mul", "div")
    if is_product and any(map(self._may_count, eqn.invars)):
      value = value._replace(degree=None)
    return [value] * len(eqn.outvars)

  def _may_count(self, x) -> bool:
    """Whether it is a number that may be that of the devices or of all rows, or its inverse."""
    number = np.asarray(getattr(x, "val", 0.0))
    if number.shape or number.dtype.kind not in "iuf" or not number:
      return False
    parts = np.array([number, 1 / number]) / self._devices
    are_counts = np.isclose(parts, np.round(parts)) & (parts > 0.5)
    return bool(np.any(are_counts))

  def _loop(
    self, body, values: list[Value], consts: int, carried: int
  ) -> list[Value]:
    """What is known of the results of a loop, however often it runs."""
    shared = values[:consts]
    rows = values[consts + carried :]
    carry = values[consts : consts + carried]
    while True:
      results = self.outputs(body, [*shared, *carry, *rows])
      pairs = zip(carry, results, strict=False)  # results are stacked too
      after = [_either(pair) for pair in pairs]
      if after == carry:
        return [*carry, *results[carried:]]
      carry = after

  def _while(self, eqn, values: list[Value]) -> list[Value]:
    """The same of a loop that runs while a condition holds."""
    params = eqn.params
    condition = params["cond_jaxpr"].jaxpr
    body = params["body_jaxpr"].jaxpr
    first = params["cond_nconsts"]
    consts = params["body_nconsts"]
    of_condition = values[:first]
    of_body = values[first:]
    carry = self._loop(body, of_body, consts, len(of_body) - consts)
    goes_on = self.outputs(condition, [*of_condition, *carry])[0]
    _check_together(goes_on, [condition, body])
    return carry

  def _collective(self, eqn, value: Value, axes: frozenset[Any]) -> Value:
    """What is known of the result of a collective over these axes."""
    name = eqn.primitive.name
    degree = value.degree
    if name.startswith("psum") or name == "reduce_scatter":
      if degree is not None:
        degree += 1
      if self._in_gradient and not axes & value.differs:
        raise ValueError(
          "The loss takes a gradient of what was reduced over the devices of the axes"
          f" {sorted(axes)} (lax.psum, lax.pmean), which is that of the sum over all devices:"
          " within the loss, differentiate the device's own value, and reduce the gradient."
        )
    in_groups = eqn.params.get("axis_index_groups")
    if in_groups or not name.startswith(_REDUCTIONS):
      return Value(value.differs | axes, value.reduced, degree=degree)
    gathered: frozenset[Any] = frozenset()
    if name.startswith("all_gather"):
      gathered = axes
    return Value(value.differs - axes, value.reduced | axes, gathered, degree)


def _check_together(choice: Value, inner: Sequence[Any]) -> None:
  """Checks that devices run what sends something together: where its condition is the same."""
  sent = set().union(*map(axes_sent_over, inner)) & choice.differs
  if sent:
    raise ValueError(
      "The loss sends something to other devices within a conditional or a loop whose condition"
      f" differs between the devices of the axes {sorted(sent)}, so that they would wait for each"
      " other for ever: send it outside, or make the condition the same on all devices, such as"
      " lax.pmax(flag, axis)."
    )


def _result(eqn, values: list[Value]) -> Value:
  """What is known of the result of an equation on one device."""
  value = _union(values)
  degree, is_linear = _degree(eqn, values, value)
  if not is_linear:
    # Such as a contrastive loss of the rows of all devices: of each device, it is whole.
    differs = value.differs | value.gathered
    value = value._replace(differs=differs, gathered=frozenset())
  return value._replace(degree=degree)


def _degree(eqn, values: list[Value], value: Value) -> tuple[int | None, bool]:
  """The degree of such a result, and whether the result is linear in what was gathered."""
  name = eqn.primitive.name
  counted = values[_COUNTED.get(name, slice(None))]
  degrees = [x.degree for x in counted if x.degree is not None]
  if len(degrees) < len(counted):
    return None, name in _SUMS
  if name in ("mul", "dot_general"):
    return sum(degrees), any(x.is_constant for x in values)
  if name == "div":
    by_constant = values[1].is_constant
    if by_constant and degrees[0] > 0:
      # A sum over devices is taken to be divided for a mean over them.
      return 0, True
    return degrees[0] - degrees[1], by_constant
  if name == "integer_pow":
    return degrees[0] * eqn.params["y"], False
  if name not in _SUMS:
    return None if any(degrees) else 0, False
  degree = _common_degree(counted)
  # The first sum of what was gathered is taken for one over the devices, as `lax.psum`.
  is_first = name == "reduce_sum" and value.gathered and degree == 0
  if is_first and 0 in eqn.params["axes"]:
    degree = 1
  return degree, True


def _union(values: Sequence[Value]) -> Value:
  """What is known of something that all of these go into, but for the degree."""
  none: frozenset[Any] = frozenset()
  differs = none.union(*(x.differs for x in values))
  reduced = none.union(*(x.reduced for x in values))
  gathered = none.union(*(x.gathered for x in values))
  # Of what differs anyway, a sum is not one over the devices.
  return Value(differs, reduced, gathered - differs)


def _either(values: Sequence[Value], *choice: Value) -> Value:
  """What is known of one of these, of which a `choice` may say which."""
  degree = _common_degree(values)
  return _union([*values, *choice])._replace(degree=degree)


def _common_degree(values: Sequence[Value]) -> int | None:
  """The degree of a sum, or of one of several: `jnp.maximum(count, 1)` is a count."""
  degrees = {x.degree for x in values if not x.is_constant}
  if not degrees:
    return 0
  if len(degrees) == 1:
    return degrees.pop()
  known = [degree for degree in degrees if degree is not None]
  # A part of a mean beside a whole one is still a part.
  is_part = len(known) == len(degrees) and min(known) < 0
  return -1 if is_part else None


def _axes(eqn) -> list[Any]:
  """The axes of devices that an equation names, but those of a mesh within the loss."""
  params = eqn.params
  axes = names_of(params.get("axes", params.get("axis_name", ())))
  return [x for x in axes if not hasattr(x, "__index__") and is_bound(x)]
