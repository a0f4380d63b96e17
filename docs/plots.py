"""How the site's plots look: lines that can be read on a light page and on a dark one."""

import matplotlib as mpl
from matplotlib_inline import backend_inline

_GREY = "#808080"


def use() -> None:
  """Draws what follows as SVG, without a background, in grey and colours."""
  backend_inline.set_matplotlib_formats("svg")
  mpl.rcParams.update(
    {
      "figure.facecolor": "none",
      "axes.facecolor": "none",
      "savefig.facecolor": "none",
      "legend.framealpha": 0,
      "axes.spines.top": False,
      "axes.spines.right": False,
      "axes.prop_cycle": mpl.cycler(
        color=["#1f77b4", "#e07b00", "#2ca02c", "#c03d3e", "#8a63b8"]
      ),
      "svg.hashsalt": "optax_accum",
      **dict.fromkeys(
        (
          "text.color",
          "axes.labelcolor",
          "axes.edgecolor",
          "xtick.color",
          "ytick.color",
        ),
        _GREY,
      ),
    }
  )
