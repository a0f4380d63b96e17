"""`plan_microbatches` from the command line."""

import argparse
import ast
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
import logging
import pathlib
import sys
import traceback
import types
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from optax_accum._plan.search import plan_microbatches

_DESCRIPTION = """\
Finds the largest microbatch that fits in memory, by compiling a few sizes. The step does not run.

FILE.py:NAME is a function without arguments that returns (build_step, args, batch_size), the
arguments of optax_accum.plan_microbatches:

  def build():
    def build_step(num_microbatches, remat=False):
      loss_fn = make_loss_fn(remat=remat)
      return optax_accum.make_train_step(loss_fn, tx, num_microbatches=num_microbatches)

    return build_step, (params, tx.init(params), batch), 256
"""
_EXAMPLE = """\
example:
  python -m optax_accum plan train.py:build --memory 16GiB --choice remat=false,true
"""
_CHOICE = "NAME=VALUE,..."
_OF_JSON = {"true": "True", "false": "False", "null": "None"}
_PACKAGE = pathlib.Path(__file__).parents[1]


def main(argv: Sequence[str]) -> int:
  """Runs a command. Returns the exit status: 1 if nothing fits, or for a mistake in the call."""
  parser = argparse.ArgumentParser(
    prog="python -m optax_accum",
    description=_DESCRIPTION,
    epilog=_EXAMPLE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  flag = parser.add_argument
  flag("plan", choices=["plan"], help="find the largest microbatch that fits")
  flag(
    "target", metavar="FILE.py:NAME", help="the function that makes the step"
  )
  flag(
    "--memory",
    help="of one device, such as 16GiB; default: what the device reports",
  )
  flag(
    "--choice",
    action="append",
    default=[],
    type=_choice,
    metavar=_CHOICE,
    help="an option of build_step, and values to try as in JSON or Python; can be repeated",
  )
  options = parser.parse_args(argv)
  choices: dict[str, list[Any]] = {}
  for name, values in options.choice:
    choices.setdefault(name, []).extend(values)
  logger = logging.getLogger(_PACKAGE.name)
  logger.setLevel(logging.INFO)
  # The file may import what logs everything to the same place.
  logger.propagate = False
  try:
    build_step, args, batch_size = _built(options.target)
    with logging_redirect_tqdm([logger]):
      plan = plan_microbatches(
        build_step,
        args,
        batch_size=batch_size,
        memory_limit=options.memory,
        choices=choices,
      )
  except Exception as error:
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if not pathlib.Path(raised_in).is_relative_to(_PACKAGE):
      raise  # of the file: where it was raised says more
    print(error, file=sys.stderr)
    return 1
  print(plan)
  return 0


def _choice(text: str) -> tuple[str, list[Any]]:
  """``remat=false,true`` as a name and values."""
  name, _, given = text.partition("=")
  words = given.split(",")
  if not name.isidentifier() or "" in words:
    raise argparse.ArgumentTypeError(
      f"{text}: give {_CHOICE}, such as remat=false,true."
    )
  if not {"yes", "no", "on", "off"}.isdisjoint(map(str.lower, words)):
    raise argparse.ArgumentTypeError(f"{text}: write true or false.")
  return name, [_value(word) for word in words]


def _value(word: str):
  try:
    return ast.literal_eval(_OF_JSON.get(word, word))
  except (ValueError, SyntaxError):
    return word


def _built(target: str) -> Sequence[Any]:
  """What the user's function ``FILE.py:NAME`` returns. The file runs."""
  file, _, function = target.rpartition(":")
  if not file:
    raise ValueError(f"{target}: give FILE.py:NAME, such as train.py:build.")
  path = pathlib.Path(file).resolve()
  if not path.is_file():
    raise FileNotFoundError(f"There is no file {file}.")
  # A new name, because the file may have the name of one of Python's own modules.
  module = types.ModuleType(f"planned_{path.stem}")
  module.__file__ = str(path)
  sys.modules[module.__name__] = module
  sys.path.insert(0, str(path.parent))  # as `python file.py` has it
  SourceFileLoader(module.__name__, str(path)).exec_module(module)
  made_by = getattr(module, function, None)
  if not callable(made_by):
    of_file = vars(module).items()
    functions = [
      name for name, x in of_file if isinstance(x, types.FunctionType)
    ]
    raise AttributeError(
      f"{file} has no function {function!r}; it has {', '.join(functions)}."
    )
  built = made_by()
  if not isinstance(built, tuple) or len(built) != 3:
    raise TypeError(
      f"{target} returned {built!r:.80}; it must return (build_step, args, batch_size), the"
      " arguments of optax_accum.plan_microbatches."
    )
  return built
