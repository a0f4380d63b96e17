"""What is public."""

import inspect

import optax_accum
import optax_accum.flax

PUBLIC = {
  name: value
  for module in (optax_accum, optax_accum.flax)
  for name, value in inspect.getmembers(module)
  if not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = [value for value in PUBLIC.values() if inspect.isfunction(value)]
