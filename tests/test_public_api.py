"""What is public, that its documentation is true, and that optional packages stay optional."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import jax
import pytest

import optax_accum

PUBLIC = {name: value for name, value in vars(optax_accum).items() if not name.startswith("_")}


def test_public_names_are_functions_and_types_of_ours():
  for name, value in PUBLIC.items():
    assert value.__module__.startswith("optax_accum."), name
    assert value.__name__ == name


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_argument_is_documented(name):
  value = PUBLIC[name]
  assert value.__doc__
  if inspect.isfunction(value):
    for argument in inspect.signature(value).parameters:
      assert f"  {argument}:" in value.__doc__ or f"  **{argument}:" in value.__doc__, argument


@pytest.mark.parametrize(
  "module", [m.name for m in pkgutil.iter_modules(optax_accum.__path__) if m.name != "__main__"]
)
def test_examples_in_docstrings_run(module):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    result = doctest.testmod(importlib.import_module(f"optax_accum.{module}"))
  assert result.failed == 0


def test_every_public_function_has_an_example():
  functions = [v for v in PUBLIC.values() if inspect.isfunction(v)]
  assert functions
  for function in functions:
    assert ">>> " in function.__doc__, function.__name__


def test_optional_packages_are_not_imported():
  code = "import sys, optax_accum; print(*sorted(m.split('.')[0] for m in sys.modules))"
  loaded = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout.split()
  assert "optax" in loaded
  assert not {"flax", "matplotlib", "sklearn", "tqdm", "hypothesis", "pytest"} & set(loaded)


def test_the_package_is_typed():
  assert (pathlib.Path(optax_accum.__path__[0]) / "py.typed").exists()
