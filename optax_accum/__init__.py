"""Gradient accumulation for JAX and Optax: the step the whole batch would have taken.

Usage:
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=8)
  params, opt_state, metrics = step(params, opt_state, batch)
"""

from optax_accum._check_split.check_split import check_split as check_split
from optax_accum._check_split.report import SplitReport as SplitReport
from optax_accum._compiled.collectives import (
  CollectiveReport as CollectiveReport,
  count_collectives as count_collectives,
)
from optax_accum._mesh.microbatch import microbatch as microbatch
from optax_accum._microbatches.accumulator import (
  MicrobatchStats as MicrobatchStats,
)
from optax_accum._microbatches.noise_scale import (
  gradient_noise_scale as gradient_noise_scale,
  GradientNoiseScale as GradientNoiseScale,
  NoiseScaleTerms as NoiseScaleTerms,
)
from optax_accum._microbatches.value_and_grad import (
  microbatch_value_and_grad as microbatch_value_and_grad,
)
from optax_accum._plan.report import MicrobatchPlan as MicrobatchPlan
from optax_accum._plan.search import plan_microbatches as plan_microbatches
from optax_accum._streaming.accumulate import accumulate as accumulate
from optax_accum._streaming.accumulation import (
  AccumulateTransformation as AccumulateTransformation,
)
from optax_accum._streaming.state import (
  accumulate_specs as accumulate_specs,
  AccumulateState as AccumulateState,
  has_updated as has_updated,
)
from optax_accum._train_step.state_on_host import (
  state_on_host as state_on_host,
)
from optax_accum._train_step.train_step import (
  make_train_step as make_train_step,
  TrainStep as TrainStep,
)

__version__ = "0.4.0"
