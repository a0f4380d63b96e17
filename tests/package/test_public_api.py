"""What is public, that its documentation is true, and that optional packages stay optional."""

import difflib
import doctest
import functools
import importlib
import inspect
import pathlib
import pkgutil
import pydoc
import re
import subprocess
import sys
import typing

import jax
import pytest
from support.public import FUNCTIONS, PUBLIC

import optax_accum
from optax_accum._flax.flax_step import StepOptions
import optax_accum.flax

ROOT = pathlib.Path(__file__).parents[2]
MODULES = ["optax_accum"] + [
  module.name for module in pkgutil.walk_packages(optax_accum.__path__, "optax_accum.")
]


def test_public_names_are_functions_and_types_of_ours():
  for name, value in PUBLIC.items():
    assert value.__module__.startswith("optax_accum."), name
    assert value.__name__ == name


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_docstring_says_all_that_a_page_needs(name):
  value = PUBLIC[name]
  raises_nothing = name in ("accumulate_specs", "gradient_noise_scale")
  assert missing_of(value) == ["Raises"] * raises_nothing
  if inspect.isclass(value):
    for method in vars(value).values():
      method = getattr(method, "__func__", method)
      if inspect.isfunction(method) and not method.__name__.startswith("_"):
        assert method.__doc__, method
      # Sphinx takes what is before a colon for its type
      if isinstance(method, property):
        assert ":" not in method.__doc__.splitlines()[0], method.__doc__


def missing_of(value):
  """What a docstring lacks: a section, or an argument or a field under its name."""
  doc = inspect.cleandoc(value.__doc__ or "")
  missing = [] if doc else ["a docstring"]
  if inspect.isfunction(value):
    sections = {"Args": (), **dict.fromkeys(RESULTS, ())}
    documented = documented_options(doc)
    missing += [name for name in inspect.signature(value).parameters if name not in documented]
  else:
    sections = {"Attributes": own_fields(value)} if own_fields(value) else {}
  for section, names in sections.items():
    found = re.search(rf"^{section}:\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    if found is None:
      missing.append(section)
    else:
      documented = re.findall(r"^  [*]*(\w+):", found[1], re.MULTILINE)
      missing += [name for name in names if name not in documented]
  return missing


RESULTS = ("Returns", "Raises", "Examples")
# The options of a function with many are in these groups: those that most people need come first.
GROUPS = (
  "Args",
  "Randomness and carried state",
  "Robustness and monitoring",
  "Several devices",
  "Expert options",
)


def documented_options(doc):
  """What a docstring has in "Args" and in the groups after it, in its order."""
  section = rf"^(?:{'|'.join(GROUPS)}):\n((?:[ ]+.*\n?|\n)+)"
  options = "".join(re.findall(section, doc, re.MULTILINE))
  names = re.findall(r"^  [*]*(\w+(?:, \w+)*):", options, re.MULTILINE)
  return [name for several in names for name in several.split(", ")]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_options_are_documented_in_the_order_of_the_signature(function):
  parameters = list(inspect.signature(function).parameters)
  assert documented_options(inspect.cleandoc(function.__doc__)) == parameters
  headings = re.findall(r"^([A-Z][\w ]+):\n", inspect.cleandoc(function.__doc__), re.MULTILINE)
  groups = [name for name in headings if name in GROUPS]
  assert groups == [name for name in GROUPS if name in groups]


def test_help_on_a_step_is_read_at_once():
  text = pydoc.plain(pydoc.render_doc(optax_accum.make_train_step))
  assert len(text.split()) <= 900


def options_of(function):
  """The options that go by name, and have a default."""
  parameters = inspect.signature(function).parameters.values()
  return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]


OF_A_STEP = options_of(optax_accum.make_train_step)


def test_options_have_one_order():
  of_flax = list(StepOptions.__annotations__)
  shared = [optax_accum.microbatch_value_and_grad, optax_accum.microbatch]
  for options in (*map(options_of, shared), of_flax):
    both = [name for name in options if name != "axis_name"]  # of no step
    assert both == [name for name in OF_A_STEP if name in options]
    assert len(both) >= 8
  assert len(OF_A_STEP) == 18
  first = [
    "num_microbatches",
    "microbatch_size",
    "has_weight",
    "weight_fn",
    "has_aux",
    "aux_reduction",
  ]
  assert OF_A_STEP[:6] == first


def test_the_options_of_flax_are_those_of_a_step_that_it_takes():
  # A step of Flax knows where the batch, the keys and the carry are.
  own = {"has_aux", "batch_argnums", "rng_argnums", "carry_argnum"}
  assert list(StepOptions.__annotations__) == [name for name in OF_A_STEP if name not in own]
  assert not StepOptions.__required_keys__
  hints = (typing.get_type_hints(StepOptions), typing.get_type_hints(optax_accum.make_train_step))
  assert hints[0] == {name: hints[1][name] for name in hints[0]}


def own_fields(cls):
  """The fields of a named tuple or a dataclass, without those that it inherits."""
  return [name for name in inspect.get_annotations(cls) if not name.startswith("_")]


def test_a_docstring_that_lacks_something_is_found():
  def function(first, second):
    """Does it.

    Args:
      first: What it is for.

    Returns:
      A number.
    """

  class Fields(typing.NamedTuple):
    """Some.

    Attributes:
      one: It.
    """

    one: int
    two: int

  assert missing_of(function) == ["second", "Raises", "Examples"]
  assert missing_of(Fields) == ["two"]


SOURCES = [*ROOT.glob("optax_accum/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]


def nearly_public(text):
  """Names in backticks that are misspelt ones of ours."""
  words = set(re.findall(r"`~?(?:optax_accum\.)?(?:flax\.)?(\w+)`", text)) - set(PUBLIC)
  # `microbatches` is a name in profiles.
  words.discard("microbatches")
  return sorted(w for w in words if difflib.get_close_matches(w, PUBLIC, cutoff=0.9))


def test_no_name_is_misspelt():
  found = {str(path): nearly_public(path.read_text()) for path in SOURCES}
  assert {path: names for path, names in found.items() if names} == {}
  text = "`make_trian_step`, {py:func}`~optax_accum.acumulate`, `accumulate`, `make_step`"
  assert nearly_public(text) == ["acumulate", "make_trian_step"]


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


@functools.cache
def printed():
  """The modules after optax, and after a step."""
  code = (
    "import sys, optax; print(*sys.modules)",
    "import jax, optax_accum; jax.config.update('jax_num_cpu_devices', 2)",
    "tx, options = optax.sgd(0.1), dict(num_microbatches=1, mesh=jax.make_mesh((2,), ('data',)))",
    "step = optax_accum.make_train_step(lambda w, x: (w * x).mean(), tx, **options)",
    "step(1.0, tx.init(1.0), jax.numpy.ones(2)); print(*sys.modules)",
  )
  command = [sys.executable, "-c", "\n".join(code)]
  return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_optional_packages_are_not_imported():
  before, after = ({name.split(".")[0] for name in line.split()} for line in printed())
  assert "optax" in before
  assert not {"flax", "matplotlib", "sklearn", "tqdm", "hypothesis", "pytest"} & after
  # nor chex, which some versions of optax import
  assert after - before == {"optax_accum"}


def test_what_is_long_to_import_is_imported_where_it_is_used():
  """With JAX 0.12, a step that imports `jax.extend` while it is traced compiles twice."""
  after = printed()[1].split()
  assert "optax_accum._check_split.check_split" in after
  assert "jax.extend" not in after


def test_a_star_imports_all_public_names():
  found = {}
  exec("from optax_accum import *", found)
  assert found.keys() >= PUBLIC.keys() - set(dir(optax_accum.flax))


def test_the_package_is_typed():
  assert (pathlib.Path(optax_accum.__path__[0]) / "py.typed").exists()
