"""What is told about the package agrees, and a wheel holds all of it."""

import ast
import contextlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import zipfile

import yaml

import optax_accum

ROOT = pathlib.Path(__file__).parents[2]


def test_version_is_told_once():
  version = optax_accum.__version__
  assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", version)
  assert str(citation()["version"]) == version
  # run from a source tree
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    assert importlib.metadata.version("optax_accum") == version


def test_the_changelog_has_the_version():
  """It is the last release, or one that is being prepared under "Unreleased"."""
  headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
  assert headings[0] == "Unreleased"
  assert optax_accum.__version__ not in headings[2:]
  if re.fullmatch(r"[\d.]+", optax_accum.__version__):  # no development version
    assert headings[1] == optax_accum.__version__
  for release in headings[1:]:
    assert numbers(release) <= numbers(optax_accum.__version__)


def test_the_citation_is_one():
  found = citation()
  assert {"cff-version", "message", "title", "authors", "type", "license"} <= set(found)
  assert found["cff-version"] == "1.2.0"
  assert found["authors"] == [{"name": "optax_accum authors"}]


def test_a_wheel_holds_the_whole_package(tmp_path):
  command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
  subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
  (wheel,) = tmp_path.glob("*.whl")
  assert wheel.name.startswith(f"optax_accum-{optax_accum.__version__}-")
  held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
  package = ROOT / "optax_accum"
  files = [*package.rglob("*.py"), package / "py.typed"]
  assert held == {str(path.relative_to(ROOT)) for path in files}


# What users call is above, and the mechanism below.
FLOORS = (
  "__init__ flax",
  "_flax _plan",
  "_train_step",
  "_check_split",
  "_mesh",
  "_streaming",
  "_microbatches",
  "_arithmetic",
  "_compiled",
  "_validate _versions",
)


def test_no_room_imports_one_above_it():
  package = ROOT / "optax_accum"
  floors = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
  assert {path.stem for path in package.iterdir() if path.suffix in ("", ".py")} - {
    "__pycache__"
  } == floors.keys()
  for path in package.rglob("*.py"):
    room = path.relative_to(package).parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optax_accum"):
        inside = node.module.split(".")[1:]
        for other in inside[:1] or [alias.name for alias in node.names]:
          assert other == room or floors[other] > floors[room], (path, other)


def citation():
  return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def numbers(version):
  return [int(number) for number in re.findall(r"\d+", version)]
