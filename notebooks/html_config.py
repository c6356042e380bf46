"""For `jupyter nbconvert --to html --config html_config.py NOTEBOOK`: the page's charts can be searched and zoomed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.explorer.export import interactive

c.HTMLExporter.preprocessors = [interactive]  # noqa: F821 (traitlets defines c)
