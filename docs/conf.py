"""How Sphinx builds the site: `sphinx-build -W -E -j auto docs docs/_build`. -E runs all guides."""

import os
import pathlib
import sys

from docutils import nodes
from sphinx import addnodes

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import optax_accum

# Guides run on 8 devices, whatever the machine has: their processes inherit this.
os.environ["JAX_PLATFORMS"] = "cpu"
# Code for the CPU is not optimized, and compiles in half the time. The programs are.
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

project, author = "optax_accum", "optax_accum authors"
copyright = f"2026, {author}"
release = version = optax_accum.__version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
  "sphinx_design",
]
exclude_patterns = ["_build", "_templates", "jupyter_execute"]
templates_path = ["_templates"]

# Markdown. A guide is run whenever its page is read, and one that fails ends the build.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
nb_render_markdown_format = "myst"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Docstrings. A name in single backticks is a link where this site has a page for it.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = (
  "none"  # the signature has the names, the docstring says what they take
)
autodoc_member_order = "bysource"
autosummary_generate = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = [
  "The loss",
  "Over a mesh",
  "The optimizer",
  "A reduction of your own",
  "Differentiation",
  "Calls",
  "Edge cases",
  # The options of a function that has many, those that most people need first.
  ("Randomness and carried state", "params_style"),
  ("Robustness and monitoring", "params_style"),
  ("Several devices", "params_style"),
  ("Expert options", "params_style"),
]
napoleon_use_rtype, napoleon_use_ivar = False, True
python_maximum_signature_line_length = 80

# A link to a name of ours that leads nowhere ends the build. Arguments, fields and names of other
# packages have no page here: they are code.
nitpicky = True
nitpick_ignore_regex = [
  ("py:.*", r"(?!optax_accum\.).*"),
  ("py:.*", r"optax_accum\.(?!flax\.)\w+\..*"),
]

html_theme = "furo"
html_title = "optax_accum"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style, pygments_dark_style = "a11y-light", "github-dark"


def skip_fields(app, what, name, value, skip, options):
  """The fields of a named tuple are in its docstring, in better words than Python has for them."""
  return skip or type(value).__name__ == "_tuplegetter"


def link_of(app, env, node, contnode):
  """A name in single backticks leads to its page from a page of the other module too."""
  domain, target = env.domains["py"], node.get("reftarget", "")
  for module in ("optax_accum", "optax_accum.flax"):
    name = f"{module}.{target}"
    if name in domain.objects:
      return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", name, node, contnode
      )
  return None


def as_sections(app, doctree):
  """The parts of a function's docstring become sections, which the page's contents list."""
  for function in list(doctree.findall(addnodes.desc)):
    if function["objtype"] != "function":
      continue
    for signature in function.findall(addnodes.desc_signature):
      signature["_toc_name"] = ""  # the page has its name already
    content, sections = function[-1], []
    for node in list(content):
      is_fields = isinstance(node, nodes.field_list)
      for part in node.children if is_fields else [node]:
        if isinstance(part, (nodes.field, nodes.rubric)):
          title = part[0].astext() if is_fields else part.astext()
          sections.append(
            nodes.section(
              "", nodes.title("", title), ids=[nodes.make_id(title)]
            )
          )
          part = part[1].children if is_fields else []
        if sections:
          sections[-1] += part
      if sections:
        content.remove(node)
    place = function.parent.index(function) + 1
    function.parent[place:place] = sections


def setup(app):
  # before the contents are collected
  app.connect("doctree-read", as_sections, priority=100)
  app.connect("autodoc-skip-member", skip_fields)
  app.connect("missing-reference", link_of)
