"""`plan_microbatches` from the command line."""

import argparse
import ast
from collections.abc import Callable, Sequence
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import traceback
from typing import Any

from optax_accum._plan.report import new_figure
from optax_accum._plan.search import plan_microbatches

_DESCRIPTION = """\
Says which microbatch fits, by compiling some and reading XLA's own memory analysis. Nothing runs.

FILE.py:NAME is a function without arguments that returns (build_step, args, batch_size), as
optax_accum.plan_microbatches takes them:

  def build():
    def build_step(num_microbatches, remat=False):
      loss_fn = make_loss_fn(remat=remat)
      return optax_accum.make_train_step(loss_fn, tx, num_microbatches=num_microbatches)

    return build_step, (params, tx.init(params), batch), 256
"""
_EXAMPLE = """\
example:
  python -m optax_accum plan train.py:build --memory 16GiB --choice remat=false,true --plot plan.png
"""
_CHOICE = """\
an option of build_step and the values to try: true, 8, null as in JSON or in Python, other words as
they are; may be given again"""
# Files that are not a user's: of this package and of Python; and so are those in site-packages.
_OTHERS = (str(pathlib.Path(__file__).parents[1]), "<frozen", os.path.dirname(os.__file__))


def main(argv: Sequence[str]) -> int:
  """Runs a command; returns the exit status: 1 where nothing fits or the user's code fails."""
  parser = argparse.ArgumentParser(prog="python -m optax_accum")
  command = parser.add_subparsers(required=True, metavar="plan").add_parser(
    "plan",
    help="which microbatch fits",
    description=_DESCRIPTION,
    epilog=_EXAMPLE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  flag = command.add_argument
  flag("target", metavar="FILE.py:NAME", help="what makes the step")
  flag("--memory", help="of one device, e.g. 16GiB; default: what the device has")
  flag("--choice", action="append", default=[], metavar="NAME=VALUE,...", help=_CHOICE)
  flag("--plot", metavar="FILE", help="draw the plan, as PNG, SVG or PDF")
  options = parser.parse_args(argv)
  try:
    choices: dict[str, list[Any]] = {}
    for name, values in map(_choice, options.choice):
      choices.setdefault(name, []).extend(values)
    if options.plot:  # what cannot be written should be known before
      _check_writable(options.plot)
    build_step, args, batch_size = _built(options.target)
    memory = options.memory
    limit = int(memory) if memory and memory.isdecimal() else memory
    plan = plan_microbatches(
      build_step, args, batch_size=batch_size, memory_limit=limit, choices=choices
    )
    print(plan)
    if options.plot:
      plan.plot().figure.savefig(options.plot)
  except KeyboardInterrupt:
    return 130
  except Exception as error:
    print(_explained(error), file=sys.stderr)
    return 1
  return 0


def _check_writable(file: str) -> None:
  path = pathlib.Path(file)
  known = new_figure().canvas.get_supported_filetypes()
  if path.suffix[1:].lower() not in known:
    raise ValueError(f"--plot {file}: a name that ends in one of {', '.join(sorted(known))}.")
  if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
    raise ValueError(f"--plot {file}: no file can be written there.")


def _choice(text: str) -> tuple[str, list[Any]]:
  """``remat=false,true`` as a name and values."""
  name, equals, values = text.partition("=")
  if not equals or not name.isidentifier() or not all(values.split(",")):
    raise ValueError(f"--choice {text}: give NAME=VALUE,VALUE,..., such as remat=false,true.")
  return name, [_value(word) for word in values.split(",")]


def _value(word: str) -> Any:
  for parse in (json.loads, ast.literal_eval):  # true, and True
    try:
      return parse(word)
    except (ValueError, SyntaxError):
      pass
  return word


def _built(target: str) -> tuple[Any, Any, Any]:
  """What the user's function returns."""
  try:
    build = _function(target)
    built = build()
  except SystemExit as error:
    raise ValueError(
      f"{target} ended by itself, with sys.exit({error.code!r}): put what a script runs below"
      ' if __name__ == "__main__", and have the function return.'
    ) from None
  if not isinstance(built, tuple) or len(built) != 3:
    several = isinstance(built, (tuple, list))
    kinds = ", ".join(type(x).__name__ for x in built) if several else type(built).__name__
    raise TypeError(
      f"{target} returned ({kinds}); it must return the three (build_step, args, batch_size), as"
      " optax_accum.plan_microbatches takes them."
    )
  return built


def _function(target: str) -> Callable[[], Any]:
  """What ``FILE.py:NAME`` names, from the file, which runs."""
  file, _, name = target.rpartition(":")
  path = pathlib.Path(file)
  if not file or path.suffix != ".py":
    raise ValueError(f"{target}: give FILE.py:NAME, such as train.py:build.")
  if not path.is_file():
    there = ", ".join(sorted(x.name for x in path.parent.glob("*.py")))
    raise ValueError(f"{path} is no file; {path.parent}/ has {there or 'no .py file'}.")
  # A name that no other module has: the file may be called as one of Python's own.
  spec = importlib.util.spec_from_file_location(f"planned_{path.stem}", path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` has it
  spec.loader.exec_module(module)
  function = getattr(module, name, None)
  if not callable(function):
    functions = filter(inspect.isfunction, vars(module).values())
    own = ", ".join(f.__name__ for f in functions if f.__module__ == module.__name__)
    raise ValueError(f"{path} has no function {name!r}; it has {own or 'none'}.")
  signature = inspect.signature(function)
  try:
    signature.bind()
  except TypeError:
    raise TypeError(
      f"{target} is {name}{signature}, and it is called without arguments: name a function without,"
      " which returns (build_step, args, batch_size)."
    ) from None
  return function


def _explained(error: Exception) -> str:
  """The message of an error, with where the user's own files come to it, if they do."""
  shown = traceback.TracebackException.from_exception(error)
  link: traceback.TracebackException | None = shown
  from_users = False
  while link is not None:
    own = [
      frame
      for frame in link.stack
      if not frame.filename.startswith(_OTHERS) and "site-packages" not in frame.filename
    ]
    link.stack = traceback.StackSummary.from_list(own)
    notes = getattr(link, "__notes__", None) or []
    link.__notes__ = [x for x in notes if "JAX has removed its internal frames" not in x]
    from_users |= bool(own)
    link = link.__cause__
  lines = [*shown.format(chain=from_users)] if from_users else [*shown.format_exception_only()]
  return "".join(lines).rstrip()
