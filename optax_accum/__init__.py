"""Gradient accumulation for JAX and Optax: the step the whole batch would have taken.

Usage:
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=8)
  params, opt_state, metrics = step(params, opt_state, batch)
"""

import importlib as _importlib
import typing as _typing

from optax_accum._microbatches.loop import MicrobatchStats as MicrobatchStats
from optax_accum._microbatches.microbatch import microbatch as microbatch
from optax_accum._microbatches.noise_scale import (
  gradient_noise_scale as gradient_noise_scale,
)
from optax_accum._microbatches.noise_scale import (
  GradientNoiseScale as GradientNoiseScale,
)
from optax_accum._microbatches.noise_scale import (
  NoiseScaleTerms as NoiseScaleTerms,
)
from optax_accum._microbatches.value_and_grad import (
  microbatch_value_and_grad as microbatch_value_and_grad,
)
from optax_accum._streaming.accumulate import accumulate as accumulate
from optax_accum._streaming.accumulate import (
  AccumulateTransformation as AccumulateTransformation,
)
from optax_accum._streaming.state import accumulate_specs as accumulate_specs
from optax_accum._streaming.state import AccumulateState as AccumulateState
from optax_accum._streaming.state import discard_cycle as discard_cycle
from optax_accum._streaming.state import from_multi_steps as from_multi_steps
from optax_accum._streaming.state import has_updated as has_updated
from optax_accum._train_step.train_step import (
  make_train_step as make_train_step,
)
from optax_accum._train_step.train_step import TrainStep as TrainStep

# What looks at a loss or a step is imported when it is asked for: training does without.
if _typing.TYPE_CHECKING:
  from optax_accum._check_split.check_split import check_split as check_split
  from optax_accum._check_split.report import LeafComparison as LeafComparison
  from optax_accum._check_split.report import SplitReport as SplitReport
  from optax_accum._compiled.collectives import (
    CollectiveReport as CollectiveReport,
  )
  from optax_accum._compiled.collectives import (
    count_collectives as count_collectives,
  )
  from optax_accum._plan.candidate import PlanCandidate as PlanCandidate
  from optax_accum._plan.report import MicrobatchPlan as MicrobatchPlan
  from optax_accum._plan.search import plan_microbatches as plan_microbatches
else:
  _LATER = {
    "check_split": "_check_split.check_split",
    "LeafComparison": "_check_split.report",
    "SplitReport": "_check_split.report",
    "CollectiveReport": "_compiled.collectives",
    "count_collectives": "_compiled.collectives",
    "PlanCandidate": "_plan.candidate",
    "MicrobatchPlan": "_plan.report",
    "plan_microbatches": "_plan.search",
  }

  __all__ = [
    *(name for name in globals() if not name.startswith("_")),
    *_LATER,
  ]  # for `import *`

  def __getattr__(name):
    if name not in _LATER:
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f"{__name__}.{_LATER[name]}"), name)

  def __dir__():
    return [*globals(), *_LATER]


__version__ = "0.2.0"
