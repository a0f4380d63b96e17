"""Pages of documentation: their sections, and the code in these."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[2] / "docs"

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Page:
  """A page of `docs/`: a set-up, which is code before the first section, and sections by title."""

  def __init__(self, name):
    parts = SECTION.split((DOCS / name).read_text())
    self.opening = parts[0]
    self.sections = dict(zip(parts[1::2], parts[2::2], strict=True))

  def blocks(self, section):
    """The code blocks of a section."""
    return code_of(self.sections[section])

  def run(self, *code, **names):
    """What the set-up and then these blocks define; `names` replace what the set-up defined."""
    namespace = {"__name__": "page"}
    for block in code_of(self.opening):
      exec(compile(block, "set-up", "exec"), namespace)
    namespace.update(names)
    for block in code:
      exec(compile(block, "block", "exec"), namespace)
    return namespace


def code_of(text):
  """The code that is shown in ```python fences."""
  return CODE.findall(text)
