"""A linear model on padded rows, of which the last devices hold far fewer valid numbers."""

import jax.numpy as jnp
import numpy as np

ROWS = 32


def init_params(dtype=np.float64):
  rng = np.random.default_rng(0)
  shapes = {"w": (16, 8), "b": (8,), "three": (3,)}  # the last is divided by no mesh
  return {name: np.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}


def make_batch(dtype=np.float64):
  rng = np.random.default_rng(1)
  valid = rng.random((ROWS, 8)) < np.linspace(1.0, 0.2, ROWS)[:, None]
  return {"x": np.asarray(rng.normal(size=(ROWS, 16)), dtype), "valid": np.asarray(valid, dtype)}


def loss_fn(params, batch):
  scale = jnp.sum(params["three"] ** 2)
  out = (batch["x"] @ params["w"] + params["b"][None]) ** 2
  return scale * jnp.sum(out * batch["valid"]) / jnp.sum(batch["valid"])


def valid(batch):
  return jnp.sum(batch["valid"])
