"""A figure as one HTML page that needs no network, drawn by plotly: zoom, hover, and a switch between views."""

from __future__ import annotations

import html
from pathlib import Path

from memplug.errors import MemplugError
from memplug.figures.figure import Figure
from memplug.show.drawn import Drawn
from memplug.show.page_hover import SCRIPT

# Plotly's own "responsive" does the same 100 ms later: a page that is printed or captured in between has an empty band.
_FOLLOW_WINDOW = "addEventListener('resize', () => Plotly.relayout('{plot_id}', {autosize: true}));"


def write_page(figure: Figure, path: str | Path) -> None:
    """Write the page: 5 to 8 MB, with 4.8 MB for plotly's script; 20 MB with 300,000 rectangles.

    The page fills the window, whatever the window's size, and never scrolls.

    Raises:
        MemplugError: plotly is not installed.
        OSError: The file cannot be written.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MemplugError(
            "a page needs plotly, which is not installed", "Run `pip install 'memplug[pictures]'`."
        ) from None
    drawn = Drawn(figure)
    page = go.Figure(drawn.traces, drawn.layout).to_html(
        include_plotlyjs=True,
        div_id="figure",
        default_height="100vh",
        config={"displaylogo": False, "scrollZoom": True},
        post_script=[_FOLLOW_WINDOW, *([SCRIPT] if drawn.facts else [])],
    )
    # The encoding comes first because browsers look for it only in the first kilobyte. Browsers give a body margins;
    # without them the page is exactly as high as the window.
    first = f'<meta charset="utf-8"><title>{html.escape(figure.title)}</title><style>body {{margin: 0}}</style>'
    Path(path).write_text(page.replace("<head>", f"<head>{first}{drawn.facts}", 1), encoding="utf-8")
