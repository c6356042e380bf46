"""Interactive charts of the non-zeros, in notebooks and on the page: choose a run and a layer, zoom, search.

Each chart function takes `Results` and returns a `Chart`, or `Absent` if its data were not gathered. A chart is a
Vega-Lite specification that contains its data: JupyterLab and the page draw it without a kernel or a network. Other
viewers show a picture of its initial state. `table`, `first_run` and `unpack_masks` are the data behind the charts.
"""

from analysis.explorer.chart import Absent, Chart, script
from analysis.explorer.compare import two_runs
from analysis.explorer.masks import unpack_masks
from analysis.explorer.neurons import coactivation, deaths, drift, fates, firing_rates, overlap, pairs
from analysis.explorer.nonzeros import by_layer, distribution, unions
from analysis.explorer.runs import first_run, table
from analysis.explorer.tokens import classes, reading, search

# In the order of the page.
CHARTS = (
    by_layer, distribution, unions, firing_rates, coactivation, overlap, drift, deaths, search, reading, classes,
    two_runs,
)  # fmt: skip

__all__ = [
    "CHARTS", "Absent", "Chart", "by_layer", "classes", "coactivation", "deaths", "distribution", "drift", "fates",
    "firing_rates", "first_run", "overlap", "pairs", "reading", "script", "search", "table", "two_runs", "unions",
    "unpack_masks",
]  # fmt: skip
