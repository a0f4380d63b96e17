"""Flax: linen, nnx, and a `TrainState`. `optax_accum.flax` says what is public."""
