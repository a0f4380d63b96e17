"""Flax: linen, nnx, and a `TrainState`. `optax_accum.flax` says what is public.

Both steps are `flax_step`s, and differ in where the arguments of their programs are. `linen` has
them in the fields of a state (`state_fields`) and in `boxes`. `nnx` takes them from a model, which
`nnx_objects` checks: its `variables` are parameters, constant, or changed by the loss, and so
carried. `pure_loss` finds those while the loss is traced, and `forwarded` leaves out what only
passed through. `train_state` has flax's with `weight`.
"""
