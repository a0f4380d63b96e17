"""A Transformer whose layers are scanned, rematerialised, or looped over in Python."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def shapes(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
  """The shapes and dtypes of the parameters, float32, those of layers stacked."""
  of_layer = {
    "qkv": (width, 3 * width),
    "out": (width, width),
    "up": (width, 4 * width),
    "down": (4 * width, width),
    "scale_1": (width,),
    "scale_2": (width,),
  }
  tree = {name: (layers, *shape) for name, shape in of_layer.items()}
  tree["embedding"] = (vocabulary, width)
  is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=is_shape
  )


def initial(key: jax.Array, like: dict[str, Any]) -> dict[str, Any]:
  """Parameters of such shapes."""
  keys = dict(zip(like, jax.random.split(key, len(like)), strict=True))
  params = {
    name: jax.random.normal(keys[name], x.shape, x.dtype) * x.shape[-2] ** -0.5
    for name, x in like.items()
  }
  ones = {
    name: jnp.ones_like(x) for name, x in params.items() if "scale" in name
  }
  return params | ones


FORMS = ("scanned", "rematerialised", "cast", "whole", "loop")


def make_loss_fn(
  form: str, heads: int = 8, dtype: Any = jnp.bfloat16, rows_over: Any = None
) -> Any:
  """``loss_fn(params, tokens)``, the mean over rows, computed in `dtype`.

  `rows_over` is a sharding that the activations between layers are constrained to.

  `form`: "scanned"; "rematerialised" (scanned, and each layer is); "cast" (the same, but all
  parameters are cast before the scan, and not a layer's in its body); "whole" (the scan of all
  layers is rematerialised); "loop" (a Python loop over the stacked parameters). The embedding is
  tied.
  """

  def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale

  def kept(x: jax.Array) -> jax.Array:
    return (
      x if rows_over is None else jax.lax.with_sharding_constraint(x, rows_over)
    )

  def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    p, x = jax.tree.map(lambda w: w.astype(dtype), p), kept(x)
    rows, length, width = x.shape
    q, k, v = jnp.split(
      norm(x, p["scale_1"][None, None]) @ p["qkv"], 3, axis=-1
    )
    split = lambda y: y.reshape(rows, length, heads, width // heads)  # noqa: E731
    attended = jax.nn.dot_product_attention(
      split(q), split(k), split(v), is_causal=True
    )
    x = x + attended.reshape(x.shape) @ p["out"]
    return kept(
      x + jax.nn.gelu(norm(x, p["scale_2"][None, None]) @ p["up"]) @ p["down"]
    )

  def through(x: jax.Array, stacked: Any) -> jax.Array:
    if form == "loop":
      count = len(stacked["out"])
      for i in range(count):
        x = layer(x, {name: w[i] for name, w in stacked.items()})
      return x
    body = (
      jax.checkpoint(layer) if form in ("rematerialised", "cast") else layer
    )
    if form == "cast":
      stacked = jax.tree.map(lambda w: w.astype(dtype), stacked)
    return jax.lax.scan(lambda x, p: (body(x, p), None), x, stacked)[0]

  def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    stacked = {name: w for name, w in params.items() if name != "embedding"}
    embedding = params["embedding"].astype(dtype)
    run = jax.checkpoint(through) if form == "whole" else through
    x = run(embedding[tokens[:, :-1]], stacked)
    logits = (x @ embedding.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    ).mean()

  return loss_fn
