"""A figure as one PNG of 1650 by 1045 pixels: the page's content, drawn by plotly in headless Chrome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from memplug.errors import MemplugError
from memplug.figures.figure import Axis, Column, Figure, Outlines, Panel, Rectangles
from memplug.show.drawn import Drawn
from memplug.show.raster import largest

_WIDTH, _HEIGHT = 1650, 1045
_SCALE = 1.2  # enlarges letters and lines, which plotly sizes for a window
_OUTLINED = 2_000  # at most so many rectangles get an outline
_OUTLINED_PIXELS = 4  # a rectangle with a shorter side gets no outline, which would hide it
_OR_THE_PAGE = "or write the page (--html), whose camera button saves a PNG without them"


def write_picture(figure: Figure, path: str | Path) -> None:
    """Write the picture. It stacks views that a page switches between: the first `Panel.pictured` of each panel.

    Raises:
        MemplugError: plotly, kaleido or Chrome is not installed, or Chrome fails.
        OSError: The file cannot be written.
    """
    try:
        import kaleido
        import plotly.graph_objects as go
        from kaleido.errors import ChromeNotFoundError
    except ImportError as error:
        package = "plotly" if (error.name or "").startswith("plotly") else "kaleido"
        raise MemplugError(
            f"a picture needs {package}, which is not installed",
            f"Run `pip install 'memplug[pictures]'`, and install Chrome or Chromium, {_OR_THE_PAGE}.",
        ) from None
    drawn = Drawn(replace(figure, columns=[_unfolded(column) for column in figure.columns]), centred=True)
    made = go.Figure(drawn.traces, drawn.layout).to_dict()
    size = {"width": _WIDTH / _SCALE, "height": _HEIGHT / _SCALE, "scale": _SCALE}
    try:
        # Not plotly's `write_image`: it cannot leave out MathJax, a script from the network that would read "$" in a
        # name as mathematics.
        content = kaleido.calc_fig_sync(made, opts={"format": "png", **size}, kopts={"mathjax": False})
    except ChromeNotFoundError:
        raise MemplugError(
            "a picture needs Chrome or Chromium, and none is installed",
            f"Install one, for example by `plotly_get_chrome`, {_OR_THE_PAGE}.",
        ) from None
    except Exception as error:
        # Chrome may fail to start, to be reached or to answer; kaleido and choreographer raise errors without a common
        # class.
        raise MemplugError(
            f"Chrome did not draw the picture: {type(error).__name__}: {error}",
            f"See whether `chromium --headless --version` runs here, {_OR_THE_PAGE}.",
        ) from error
    Path(path).write_bytes(content)


def _unfolded(column: Column) -> Column:
    """Return the column with a panel for each view that the picture shows."""
    return replace(column, panels=[each for panel in column.panels for each in _apart(panel, column.x)])


def _apart(panel: Panel, x: Axis) -> Iterator[Panel]:
    if not panel.views:
        yield panel
    for name in [*panel.views][: panel.pictured]:
        view = panel.views[name]
        # In a page the pointer tells neighbours of one colour apart; in a picture only outlines do.
        more = [_outlines(view, x, panel.y)] if isinstance(view, Rectangles) else []
        height = panel.height / panel.pictured
        yield replace(panel, views={name: view}, content=[*more, *panel.content], height=height)


def _outlines(drawn: Rectangles, x: Axis, y: Axis) -> Outlines:
    rows = largest(drawn, _OUTLINED)
    boxes = np.stack([drawn.lower, drawn.upper, drawn.start, drawn.stop], axis=1)[rows]
    across = (boxes[:, 1] - boxes[:, 0]) / (x.high - x.low) * _WIDTH
    up = (boxes[:, 3] - boxes[:, 2]) / (y.high - y.low) * _HEIGHT
    return Outlines(boxes[np.minimum(across, up) >= _OUTLINED_PIXELS])
