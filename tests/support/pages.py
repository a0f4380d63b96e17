"""Pages of documentation: their sections, and the code in these."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[2] / "docs"

FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
CODE = re.compile(
  r"^```(?:python|\{code-cell\}[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
OPTIONS = re.compile(
  r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.MULTILINE | re.DOTALL
)


class Page:
  """A page of `docs/`: a set-up, which is code before the first section, and sections by title."""

  def __init__(self, name):
    text = FRONT_MATTER.sub("", (DOCS / name).read_text())
    parts = SECTION.split(text)
    self.opening, self.sections = (
      parts[0],
      dict(zip(parts[1::2], parts[2::2], strict=True)),
    )

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
  """The code that is shown in ```python and ```{code-cell} fences, without options of cells."""
  blocks = CODE.findall(text)
  return [
    OPTIONS.sub("", x)
    for x in blocks
    if "remove-input" not in (OPTIONS.match(x) or [""])[0]
  ]
