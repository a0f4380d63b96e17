"""What type checkers say of a user's code: nothing of what is right, and something of a mistake."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import optax_accum

HERE = pathlib.Path(__file__).parent / "typing"
FILES = ("user_ok.py", "user_wrong.py")
LIBRARY = str(pathlib.Path(optax_accum.__path__[0]).parent)


def check(*command, **env):
  return subprocess.run(
    [sys.executable, "-m", *command],
    cwd=HERE,
    env={**os.environ, **env},
    capture_output=True,
    text=True,
    check=False,  # the mistakes are errors
  )


def assert_mistakes_alone(found):
  """Checks that errors, as (file, line, message), are on every marked line and on no other."""
  marked = {
    (name, line)
    for name in FILES
    for line, text in enumerate((HERE / name).read_text().splitlines(), 1)
    if "# MISTAKE" in text
  }
  assert {name for name, _ in marked} == {"user_wrong.py"}
  lines = {(name, int(line)) for name, line, _ in found}
  assert not marked - lines, "no error where there should be one"
  assert not lines - marked, [error for error in found if (error[0], int(error[1])) not in marked]


def test_mypy_knows_the_types_of_what_is_public():
  # The library's own errors are not shown, as of an installed package.
  options = ("--config-file", "mypy.ini", "--follow-imports", "silent")
  cache = str(HERE.parents[2] / ".mypy_cache")
  done = check("mypy", *options, "--cache-dir", cache, *FILES, MYPYPATH=LIBRARY)
  assert done.returncode == 1, done.stderr
  assert_mistakes_alone(re.findall(r"(?m)^(\S+?):(\d+): error: (.*)", done.stdout))


def test_pyright_knows_the_types_of_what_is_public(tmp_path):
  # Its package holds only what fetches it: the first run on a machine needs the network.
  folder = shutil.copytree(HERE, tmp_path / "typing")
  config = folder / "pyrightconfig.json"
  config.write_text(json.dumps({"include": FILES, "extraPaths": [LIBRARY]}))
  done = check("pyright", "-p", str(config), "--pythonpath", sys.executable, "--outputjson")
  assert done.returncode == 1, (done.stdout, done.stderr)
  found = [
    (pathlib.Path(e["file"]).name, e["range"]["start"]["line"] + 1, e["message"])
    for e in json.loads(done.stdout)["generalDiagnostics"]
    if e["severity"] == "error"
  ]
  assert_mistakes_alone(found)
