"""A training step, from a call to new parameters. Steps of Flax go the same way.

1. `train_step` is public. A `TrainStep` has a loss, over a mesh or not, and a `StepProgram`.
2. `StepProgram.prepare` checks and places the arguments. `donation` says which of their arrays can
   be donated, and copies those that something else holds. That makes a `PreparedCall`.
3. `PreparedCall.run` calls what was jitted for these shardings: the loss gives the gradients of all
   microbatches, and an `OptimizerStep` takes one step by them, unless nothing counted.
4. `stepped` tells whether the optimizer took a step. `value_fn` is the loss at other parameters,
   which line searches ask for.
5. `cycle` has `begin`, `add` and `finish`, for microbatches that arrive in several calls, which are
   two programs. What is held between these is the `Accumulated` of a loss.
"""
