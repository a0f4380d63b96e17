"""Training steps for Flax: whole cycles in linen and in nnx, and a `TrainState` that streams.

Import it by name, ``import optax_accum.flax``: `import optax_accum` does without flax.
"""

from optax_accum._flax.linen import linen_train_step as linen_train_step
from optax_accum._flax.nnx import nnx_train_step as nnx_train_step
from optax_accum._flax.train_state import TrainState as TrainState
