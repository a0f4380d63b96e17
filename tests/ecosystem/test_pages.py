"""Pages are plain Markdown that reads in the repository: links, tables, code, words and messages are right."""

import importlib.util
import re
import subprocess
import sys
from urllib.parse import unquote

import pytest
from support.pages import DOCS

ROOT = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md"))
READ = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def module(name):
  """A script of `docs/`, which is no package."""
  spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
  found = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(found)
  return found


outputs, tables = module("outputs"), module("tables")


def name_of(path):
  return str(path.relative_to(ROOT))


def prose(text):
  return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
  """The anchors of a page's headings, as GitHub makes them."""
  headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
  plain = [re.sub(r"[^\w\- ]", "", x.lower()) for x in headings]
  return {x.replace(" ", "-") for x in plain}


def broken(page, text):
  """The links of a page to files and headings that are not there."""
  found = []
  for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
    path, _, anchor = link.partition("#")
    if re.match(r"https?:|mailto:", link):
      continue
    target = page.parent / unquote(path) if path else page
    source = text if target == page else ""
    if not source and target.suffix == ".md" and target.is_file():
      source = target.read_text()
    if not target.exists() or (anchor and anchor not in anchors(source)):
      found.append(link)
  return found


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_links_lead_to_files_and_headings(page):
  assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found():
  text = "# A `b`: c\n[x](#a-b-c) [y](#d) [z](no.md) [w](index.md#which-function)"
  assert broken(DOCS / "faq.md", text) == ["#d", "no.md"]


def not_plain(text):
  """What only a site would show: roles, directives, and code in a language that nobody runs."""
  fences = re.findall(r"^ *(?:`{3,}|~{3,}|:{3,})(.+)$", text, re.MULTILINE)
  unknown = [x for x in fences if x.strip() not in ("python", "sh", "text", "diff")]
  return unknown + re.findall(r"\{[\w:-]+\}`[^`]*`", prose(text))


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_a_page_is_plain_markdown(page):
  text = page.read_text()
  assert not_plain(re.sub(r"^```$", "", text, flags=re.MULTILINE)) == []
  assert text.startswith("# ")


def test_what_is_not_plain_is_found():
  text = "```{code-cell}\n```\n:::{note}\n{term}`row`\n```python\n"
  assert not_plain(text) == ["{code-cell}", "{note}", "{term}`row`"]


def test_there_are_at_most_18_000_words():
  assert sum(len(page.read_text().split()) for page in PAGES) <= 18_000


def test_a_row_is_an_example_at_its_first_use():
  """A reader who comes from a search engine meets the word on any page."""
  for page in PAGES:
    text = prose(page.read_text())
    if re.search(r"\brows?\b", text):
      assert re.search(r"\bexamples?\b", text), page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_those_of_the_results(page):
  assert tables.current(page) == page.read_text(), "run python docs/tables.py"


def test_every_table_is_in_a_page():
  found = [name for page in PAGES for _, name, _ in tables.MARKED.findall(page.read_text())]
  assert len(found) == len(set(found)) >= 6
  for name in found:
    assert "|" in getattr(tables, name)() or name == "summary"


@pytest.mark.parametrize("page", outputs.pages(), ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_the_page_has(page):
  """In a process of its own, on 8 devices, with JAX as it comes."""
  command = [sys.executable, outputs.__file__, "--check", page]
  run = subprocess.run(command, env=outputs.environment(), capture_output=True, text=True)
  assert run.returncode == 0, run.stderr[-3000:]


def test_all_code_of_pages_is_run():
  with_code = {page for page in PAGES if "```python" in page.read_text()}
  assert {p.name for p in with_code - set(outputs.pages())} == outputs.ELSEWHERE


def test_a_page_that_prints_something_else_is_found(tmp_path):
  page = tmp_path / "page.md"
  right = "# A\n\n```python\nprint('a', 1.5)\nprint('b')\n```\n\n```text\na 1.25\n...\n```\n"
  page.write_text(right)
  outputs.run(page, check=True)
  page.write_text(right.replace("a 1.25", "c 1.25"))
  with pytest.raises(SystemExit, match="but it prints"):
    outputs.run(page, check=True)
  outputs.run(page, check=False)
  assert page.read_text() == right.replace("1.25", "1.5")


def test_sharp_edges_begin_with_those_that_raise_no_error():
  text = (DOCS / "sharp_edges.md").read_text()
  first, second = re.findall(r"^## (.*)$", text, re.MULTILINE)[:2]
  assert "no error" in first
  silent = text.partition(f"## {first}")[2].partition(f"## {second}")[0]
  sections = silent.split("\n### ")[1:]
  assert len(sections) >= 12
  for section in sections:
    told = " ".join(section.split())
    assert "*Found " in told or "*No check finds this" in told, section


def test_a_page_is_in_the_list_of_the_first_and_in_the_navigation():
  conf = (DOCS / "conf.py").read_text()
  listed = (DOCS / "index.md").read_text().partition("## Pages")[2]
  for page in PAGES:
    name = str(page.relative_to(DOCS).with_suffix(""))
    if name != "index":
      assert f"]({name}.md)" in " ".join(listed.split())
      assert f'"{name}"' in conf or name == "reference/errors"
