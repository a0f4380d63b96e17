"""What a loss function returned: a real scalar, with the aux that was announced."""

from typing import Any

import jax.numpy as jnp


def check_loss(out: Any, has_aux: bool, carries: bool) -> None:
  """Checks what a loss function returned."""
  wanted = "(loss, (new_carry, aux))" if carries else "(loss, aux)" if has_aux else "loss"

  def is_pair(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2

  def describe(x: Any) -> str:
    several = isinstance(x, (tuple, list, dict))
    return f"a {type(x).__name__} of length {len(x)}" if several else "a single value"

  if has_aux and not (is_pair(out) and (not carries or is_pair(out[1]))):
    raise TypeError(
      f"The function returned {describe(out)}; with"
      f" {'carry_argnum' if carries else 'has_aux=True'} it must return {wanted}."
    )
  value, wrong = out[0] if has_aux else out, None
  if isinstance(value, (tuple, list, dict)):
    wrong = (
      f"function returned {describe(value)} as its loss; the loss must be a real scalar. If the"
      " rest is auxiliary, return (loss, aux) and pass has_aux=True."
    )
  elif value is None:
    wrong = f"function returned None; it must return {wanted}."
  elif shape := jnp.shape(value):
    wrong = f"loss has shape {shape}; it must be a scalar: take its mean or sum over the rows."
  elif not jnp.issubdtype(dtype := jnp.result_type(value), jnp.floating):
    wrong = f"loss has dtype {dtype}; it must be real, i.e. of a floating dtype."
  if wrong:
    raise TypeError(f"The {wrong}")
