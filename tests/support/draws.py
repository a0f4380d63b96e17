"""Configurations of a training run, drawn at random: what there is to choose, and what goes."""

import dataclasses
from typing import Any

import numpy as np

# A generator with a seed and not hypothesis: a draw is one line, whatever drew it, and a draw
# takes a second, so that few are made and shrinking has to be cheap.

# The first choice is the plainest: it is the default, a line leaves it out, and shrinking tries it.
# What stands twice is drawn twice as often.
CHOICES: dict[str, tuple[Any, ...]] = {
  "entry": ("step", "step", "gradient", "update", "apply", "step+accumulate", "linen"),
  # "jit": arrays that are sharded over automatic axes, without a word to the library.
  "place": ("one", "jit", "mesh", "mesh", "mesh", "shard_map", "pmap"),
  "devices": (2, 1, 4, 8),
  # Kinds of axes: of "data" alone, of "data" and "model", or of rows over "data" and "fsdp".
  "mesh": (
    *("auto", "explicit", "auto+model", "explicit+model"),
    *("auto+explicit model", "explicit+auto model", "auto+fsdp", "explicit+fsdp"),
  ),
  "params": ("whole", "data", "model", "data+model", "fsdp", "data,fsdp"),
  # in flax's annotations, which name the axes that `params` says
  "boxed": (False, True),
  "opt_state": ("like params", "data", "whole"),
  "placed": (False, True),  # is the batch on the mesh already?
  "microbatches": (2, 1, 3, 4),
  "size": (1, 2, 3),  # rows of a microbatch on a device
  # microbatch_size, with a smaller microbatch at the end
  "tail": (False, True),
  "uneven": (False, True),  # the last call of a cycle has fewer rows
  "every_k": (2, 1, 3, "schedule"),
  "flush": (False, True),  # the second cycle ends early
  # "python": nothing is traced
  "loop": ("jit", "jit", "jit", "scan", "python"),
  "wrap": ("none", "chain", "partition"),  # what `accumulate` is in
  "differentiable": (False, True),
  "weights": ("none", "counts", "floats", "fractions"),
  "padding": (False, True),  # some microbatches hold nothing but padding
  "empty": (False, True),  # the second cycle holds nothing but padding
  "nan": (False, True),  # some microbatches are not finite
  "aux": (
    *("none", "mean", "sum", "max", "min", "last", "stack", "concat", "constant"),
    *("all", "all", "all", "all", "all"),
  ),
  "carry": (False, True),
  "carry_reduction": ("mean", "max", "min", "sum"),
  "further": ("none", "array", "python"),  # an argument that is not split
  "key": ("none", "typed", "raw", "named"),
  "batch": ("one", "two", "named", "mixed"),  # how the batch is passed
  "reduction": ("mean", "sum"),
  "dtype": ("float32", "float64", "bfloat16", "complex64"),
  "accumulator_dtype": ("default", "float32"),
  "optimizer": (
    *("sgd", "momentum", "adam", "clip+adamw", "lion", "adafactor"),
    *("partition", "masked", "inject", "polyak", "linesearch", "lbfgs"),
  ),
  "donate": (False, True),
  "seed": tuple(range(100)),
  # are rows over the automatic axis "model" too?
  "spread": (False, True, True, True),
  "has_weight": (False, True),  # does the loss return a total and its weight?
  # Does the batch come in two calls of `add`, to one cycle or to two that are merged?
  "arrives": (False, *("one cycle", "merged") * 2),
}

_FIELDS = [(name, Any, dataclasses.field(default=of[0])) for name, of in CHOICES.items()]
_Draw = dataclasses.make_dataclass("_Draw", _FIELDS, frozen=True)


class Draw(_Draw):
  """One configuration. As text, it is what differs from the plainest one."""

  def __str__(self) -> str:
    plain = Draw()
    pairs = [(name, getattr(self, name)) for name in CHOICES]
    return " ".join(f"{k}={v}".replace(" ", "_") for k, v in pairs if v != getattr(plain, k))

  @property
  def streams(self) -> bool:
    """Whether microbatches arrive one by one."""
    return self.entry in ("update", "apply")

  @property
  def steps(self) -> bool:
    """Whether a call is a train step."""
    return self.entry in ("step", "step+accumulate", "linen")

  @property
  def accumulates(self) -> bool:
    """Whether `accumulate` is part of it."""
    return self.streams or self.entry == "step+accumulate"

  @property
  def local(self) -> bool:
    """Whether the devices' own code calls the library, with an `axis_name`."""
    return self.place in ("shard_map", "pmap")

  @property
  def parts(self) -> int:
    """How many devices have microbatches of their own."""
    return self.devices if self.local or self.place == "mesh" else 1

  @property
  def over(self) -> int:
    """How many devices rows are spread over, by the library and by the compiler."""
    return self.devices * (2 if self.spread else 1)

  @property
  def rows(self) -> int:
    """Rows of a call's batch, on all devices."""
    full = 1 if self.streams else self.microbatches
    return self.over * (full * self.size + (1 if self.tail else 0))

  @property
  def full_size(self) -> int:
    """Rows of a full microbatch, on all devices."""
    return self.over * self.size

  @property
  def stepless(self) -> bool:
    """Whether a cycle in which nothing counted is no step."""
    return self.entry != "gradient"


# Where a choice means something. Elsewhere it is the plainest. In order: later ones see earlier.
MEANS = {
  # A step goes into no map over devices, and what is no step has no mesh.
  "place": lambda d: (
    d.place in ("one", "mesh")
    if d.entry == "linen"
    else d.place in ("one", "jit", "mesh")
    if d.steps
    else d.place != "mesh"
  ),
  "devices": lambda d: d.place != "one",
  "mesh": lambda d: d.place == "mesh",
  "params": lambda d: (
    d.place == "mesh"
    or (d.place == "jit" and d.params == "data" and d.entry in ("step", "gradient"))
  ),
  "boxed": lambda d: d.entry == "linen",
  "opt_state": lambda d: d.place == "mesh" and (d.params == "whole") == (d.opt_state == "data"),
  "placed": lambda d: d.place == "mesh",
  "microbatches": lambda d: not d.streams,
  "tail": lambda d: not d.streams and d.size > 1,
  "every_k": lambda d: d.accumulates,
  "flush": lambda d: d.streams and d.every_k != 1,
  "loop": lambda d: d.place == "one" if d.loop == "python" else d.place != "pmap",
  "wrap": lambda d: d.accumulates and (d.entry != "apply"),
  "differentiable": lambda d: d.accumulates,
  "uneven": lambda d: (
    d.accumulates and d.weights != "none" and d.size > 1 and not d.tail and d.loop != "scan"
  ),
  "padding": lambda d: d.weights != "none",
  "empty": lambda d: d.weights != "none",
  "aux": lambda d: not d.streams,
  "carry": lambda d: not d.streams and d.entry != "linen",
  "carry_reduction": lambda d: d.carry and (d.parts > 1 or d.local),
  "further": lambda d: not d.streams and d.entry != "linen",
  "key": lambda d: not d.streams and d.entry != "linen",
  "batch": lambda d: not d.streams and d.entry != "linen",
  "accumulator_dtype": lambda d: d.dtype in ("float64", "bfloat16"),
  "donate": lambda d: d.steps and d.loop == "jit",
  # Rows are taken out of a batch, and one device's keys have the numbers of one call.
  "arrives": lambda d: (
    d.entry == "step"
    and d.place in ("one", "mesh")
    and d.aux not in ("stack", "concat", "all")
    and d.optimizer not in ("linesearch", "lbfgs")
    and not (d.placed or (d.key != "none" and d.parts > 1))
    # Merged cycles begin with one carry, and number their microbatches from 0.
    and not (d.arrives == "merged" and (d.carry or d.key != "none"))
  ),
  "spread": lambda d: d.placed and d.mesh in ("auto+model", "explicit+auto model"),
  "has_weight": lambda d: d.weights != "none" and d.reduction == "mean" and not d.streams,
}

# What cannot work, or cannot be compared closely.
REFUSED = {
  "a second axis takes half of the devices": lambda d: (
    ("model" in d.mesh and d.devices == 8) or ("fsdp" in d.mesh and d.devices == 1)
  ),
  "parameters are sharded over an axis of the mesh": lambda d: any(
    axis in d.params and axis not in d.mesh for axis in ("model", "fsdp")
  ),
  "line searches need value_fn, which is a train step's, of all rows of a cycle": lambda d: (
    d.optimizer in ("linesearch", "lbfgs") and (not d.steps or (d.accumulates and d.every_k != 1))
  ),
  "optax's line searches multiply arrays of explicit sharding without saying where": lambda d: (
    (d.optimizer in ("linesearch", "lbfgs") and "explicit" in d.mesh)
    and (d.params != "whole" or d.opt_state == "data")
  ),
  "optax's adafactor makes the state of sharded explicit parameters on one device": lambda d: (
    d.optimizer == "adafactor" and "explicit" in d.mesh and d.params != "whole"
  ),
  "a cubic line search magnifies rounding": lambda d: (
    d.optimizer == "lbfgs" and (d.dtype != "float64" or d.accumulator_dtype != "default")
  ),
  "a group has not all parameters": lambda d: (
    d.wrap == "partition" and d.optimizer in ("masked", "partition", "linesearch", "lbfgs")
  ),
  "their steps are not smooth in the gradient, or they have no complex form": lambda d: (
    d.dtype in ("bfloat16", "complex64") and d.optimizer not in ("sgd", "momentum", "masked")
  ),
}

# What is known to be wrong, until it is fixed: delete the line, and it is drawn.
KNOWN = {
  "optax makes no state of adafactor for parameters over explicit axes": lambda d: (
    d.place == "mesh" and d.mesh.startswith("explicit") and d.optimizer == "adafactor"
  )
}


def plainest_where_meaningless(draw: Draw) -> Draw:
  """`draw` with the plainest choice wherever another would mean nothing."""
  for name, means in MEANS.items():
    if getattr(draw, name) != CHOICES[name][0] and not means(draw):
      draw = dataclasses.replace(draw, **{name: CHOICES[name][0]})
  return draw


def is_drawn(draw: Draw) -> bool:
  """Whether `draw` can work, as far as is known."""
  return not any(rule(draw) for rule in (*REFUSED.values(), *KNOWN.values()))


def drawn(seed: int, index: int) -> Draw:
  """Draw number `index` of a seed; the same whatever was drawn before."""
  rng = np.random.default_rng((seed, index))
  while True:
    chosen = {name: of[rng.integers(len(of))] for name, of in CHOICES.items()}
    draw = plainest_where_meaningless(Draw(**chosen))
    if is_drawn(draw):
      return draw


def parsed(line: str) -> Draw:
  """The draw that a line stands for, as `str` wrote it."""
  chosen = {}
  for pair in line.split():
    name, _, text = pair.partition("=")
    chosen[name] = next(x for x in CHOICES[name] if str(x).replace(" ", "_") == text)
  return Draw(**chosen)


def shrunk(draw: Draw, fails: Any) -> Draw:
  """A plainer draw that fails too: every choice, from the first on, is the plainest that fails."""
  for name, of in CHOICES.items():
    for choice in dict.fromkeys(of):
      if choice == getattr(draw, name):
        break
      plainer = plainest_where_meaningless(dataclasses.replace(draw, **{name: choice}))
      if is_drawn(plainer) and fails(plainer):
        draw = plainer
        break
  return draw
