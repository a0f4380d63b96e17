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
import optax_accum.flax

PUBLIC = {
  name: value
  for module in (optax_accum, optax_accum.flax)
  for name, value in vars(module).items()
  if not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = [value for value in PUBLIC.values() if inspect.isfunction(value)]
MODULES = ["optax_accum"] + [
  module.name
  for module in pkgutil.walk_packages(optax_accum.__path__, "optax_accum.")
  if not module.name.endswith(".__main__")
]


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
      assert any(f"  {stars}{argument}:" in value.__doc__ for stars in ("", "*", "**")), argument


def examples_of(documented):
  return sum(len(doctest.DocTestParser().get_examples(f.__doc__)) for f in documented)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    result = doctest.testmod(importlib.import_module(module))
  assert result.failed == 0
  assert result.attempted >= examples_of(f for f in FUNCTIONS if f.__module__ == module)


def test_every_public_function_has_an_example_that_runs():
  assert FUNCTIONS
  for function in FUNCTIONS:
    assert examples_of([function]) > 0, function.__name__
    assert "+SKIP" not in function.__doc__, function.__name__
    assert function.__module__ in MODULES, function.__name__


def test_optional_packages_are_not_imported():
  code = "import sys, optax; print(*sys.modules); import optax_accum; print(*sys.modules)"
  printed = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout
  before, after = ({name.split(".")[0] for name in line.split()} for line in printed.splitlines())
  assert "optax" in before
  assert not {"flax", "matplotlib", "sklearn", "tqdm", "hypothesis", "pytest"} & after
  assert after - before == {"optax_accum"}  # nor chex, which some versions of optax import


def test_the_package_is_typed():
  assert (pathlib.Path(optax_accum.__path__[0]) / "py.typed").exists()
