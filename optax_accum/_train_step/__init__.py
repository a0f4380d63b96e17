"""A training step, from a call to new parameters. Steps of Flax go the same way.

From ``step(...)`` to the sum over devices, a call and its gradient pass these stations:

1. `TrainStep.__call__`, which is public. It has a loss, on one device or over a mesh.
2. `StepProgram.prepare` (in `program`) checks and places the arguments; `donation` copies arrays
   that are passed twice. That makes a `PreparedCall`, which runs what was jitted for these
   shardings.
3. `LocalLoss.value_and_grad`; over a mesh `OverMesh.value_and_grad`, one `jax.shard_map` of it.
4. `Loop.add`, one scan, whose body runs a microbatch (`LocalLoss._run`).
5. `LossFunction.weighed`, the user's loss times its weight, which is differentiated there.
6. `Accumulator.add`, which adds its gradient to the sums.
7. `Accumulator.finish`, which sums over devices (`OverAxis.sum`, a `psum`) and divides.
8. `OptimizerStep`, one step by these gradients, unless nothing counted.

`cycle` has `begin`, `add`, `merge` and `finish`, for microbatches that arrive in several calls: the
same stations, in programs of their own. `state_on_host` is an optimizer whose state waits there.
"""
