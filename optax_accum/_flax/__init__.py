"""Flax: linen, nnx, and a `TrainState`. `optax_accum.flax` says what is public.

Both steps are a `flax_step`, and make its four calls, a step and `begin`, `add` and `finish`, of
what they step: `linen` of the fields of a state, whose `boxes` stay, and `nnx` of a model and its
optimizer, which it updates in place. `train_state` has flax's with `weight`.
"""
