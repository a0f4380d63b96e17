"""docs/faq.md is true."""

import jax
import jax.numpy as jnp
import pytest
from support.pages import Page

import optax_accum

PAGE = Page("faq.md")


@pytest.mark.usefixtures("usual_promotion")
def test_evaluation_counts_every_row():
  x = jax.random.normal(jax.random.key(0), (700, 8))
  names = {
    "jax": jax,
    "jnp": jnp,
    "optax_accum": optax_accum,
    "params": jax.random.normal(jax.random.key(1), (8, 3)),
    "held_out": {"x": x, "y": jnp.argmax(x[:, :3], -1)},
    "logits_of": lambda params, batch: batch["x"] @ params,
  }
  (code,) = PAGE.blocks("How do I evaluate?")
  exec(compile(code, "faq.md", "exec"), names)
  hits = jnp.argmax(x @ names["params"], -1) == names["held_out"]["y"]
  assert int(names["total"]["rows"]) == 700
  assert float(names["accuracy"]) == pytest.approx(float(hits.mean()), rel=1e-6)
