"""Rows over the devices of a mesh, and the way of a gradient that is sharded.

A loss over a mesh is an `OverMesh` (`loss`), with the methods of a loss on one device. A gradient's
way, from the step on:

1. `OverMesh.place` puts the arguments on the mesh, by `placement`: a batch by its rows, over the
   axes of `data_parallel`, an optimizer state as the parameters that it follows
   (`state_of_parameters` finds these), the rest as copies. It notes how each is sharded.
2. `OverMesh.with_state` says where each gradient goes: where its parameter is, or (ZeRO-1) where
   the optimizer state of that is.
3. `on_each_device` is one `jax.shard_map` over the data axes, in which each device gathers its
   parameters (`Shards.gather`) and runs the method of `LocalLoss` on its own rows.
4. `Accumulator.finish` sums over the devices, once: `psum`, or for a shard `psum_scatter`, as
   `shards` has it. Other axes are not mapped: explicit ones are part of the types, and of automatic
   ones `Shards` is told, so that no more is sent than the shards.
5. `OverMesh.update` cuts the parameters as the gradients are, outside of the map. The optimizer
   runs on these parts, and the new parameters are gathered: all comes out as it came in.

`microbatch` is public: it maps any function alike, and each device gets in full what is not split.
"""
