"""Rows over the devices of a mesh, and the way of a gradient that is sharded.

1. `placement` puts what is on no mesh there: an optimizer state as the parameters that it follows
   (`state_of_parameters` finds these), and the rest as copies. `batch` puts a batch there by its
   rows, over the axes of `data_parallel`.
2. `MeshLoss.place` notes how each array is sharded, in a `PlacedLoss`. Each of these is compiled.
3. `PlacedLoss.beside` says where each gradient goes: where its parameter is, or (ZeRO-1) where the
   optimizer state of that is, as `DataParallel.gradient_spec` has it. This is the field `wanted`.
4. `PlacedLoss.value_and_grad` is one `jax.shard_map` over the data axes, which `on_devices` makes.
   `Shards` gathers the parameters over them, once or in every microbatch, and scatters the sums of
   the gradients. Other axes are not mapped: within, explicit ones are part of the types, and of
   automatic ones `Shards` is told, so that no more is sent than the shards.
5. `PlacedLoss.step_beside` cuts the parameters as the gradients are, outside of the map. The
   optimizer runs on these parts, and the new parameters are gathered: all comes out as it came in.
6. With virtual devices, of which `virtual` has the rules, shards are gathered for the optimizer.
7. `microbatch` is public: it maps any function alike, and each device gets in full what is not
   split.
"""
