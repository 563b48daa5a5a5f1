"""Rectangles in pixels, and the largest of them, for drawings that cannot have each one as a shape.

Thousands of requests share a pixel, and most live so short that they are narrower than one. The raster gives each at
least one pixel; the longest-lived are painted last, so that what is short shows where nothing else is.
"""

from __future__ import annotations

import numpy as np

from memplug.figures.figure import Rectangles


def raster(drawn: Rectangles, span: tuple[float, float], height_bytes: float, shape: tuple[int, int]) -> np.ndarray:
    """The group + 1 that is seen in each pixel, of at most 255 groups, or 0: uint8[shape].

    Args:
        drawn: what is painted.
        span: of the clock, from the left edge to the right one.
        height_bytes: the upper edge.
        shape: rows, the first one at address 0, and columns.
    """
    rows, columns = shape
    picture = np.zeros(shape, np.uint8)
    across, up = columns / (span[1] - span[0]), rows / max(height_bytes, 1)
    left = np.clip(np.floor((drawn.lower - span[0]) * across).astype(np.int64), 0, columns - 1)
    right = np.maximum(left + 1, np.round((drawn.upper - span[0]) * across).astype(np.int64))
    bottom = np.clip(np.floor(drawn.start * up).astype(np.int64), 0, rows - 1)
    top = np.maximum(bottom + 1, np.round(drawn.stop * up).astype(np.int64))
    order = np.lexsort((drawn.stop - drawn.start, drawn.upper - drawn.lower))
    edges = np.stack([bottom, top, left, right, drawn.of + 1], axis=1)[order]
    # Of equal pixels only the last would be seen.
    _, last = np.unique(edges[::-1, :4], axis=0, return_index=True)
    for low, high, first, end, value in edges[np.sort(len(edges) - 1 - last)].tolist():
        picture[low:high, first:end] = value
    return picture


def largest(drawn: Rectangles, count: int) -> np.ndarray:
    """Rows of the largest rectangles, at most so many: int64, rising."""
    area = (drawn.upper - drawn.lower).astype(np.float64) * (drawn.stop - drawn.start)
    return np.sort(np.argsort(-area, kind="stable")[:count])
