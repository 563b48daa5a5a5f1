"""Paints rectangles as pixels, and finds the largest, for drawings with too many rectangles to draw each as a shape.

A rectangle is a request. Thousands share a pixel, and most live so briefly that they are narrower than a pixel. The
raster gives each request at least one pixel, and paints requests in order of lifetime, the longest last. So where two
requests share a pixel, the one with the longer lifetime is visible.
"""

from __future__ import annotations

import numpy as np

from memplug.figures.figure import Rectangles


def raster(drawn: Rectangles, span: tuple[float, float], height_bytes: float, shape: tuple[int, int]) -> np.ndarray:
    """Return for each pixel 1 + the index of the visible group, or 0 if there is none; for at most 255 groups.

    Args:
        drawn: The rectangles to paint.
        span: Clock values at the left and the right edge.
        height_bytes: Address at the upper edge.
        shape: Numbers of pixel rows, from address 0 up, and of pixel columns.

    Returns:
        uint8[shape].
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
    # If rectangles cover the same pixels, paint only the last, which would hide the others.
    _, last = np.unique(edges[::-1, :4], axis=0, return_index=True)
    for low, high, first, end, value in edges[np.sort(len(edges) - 1 - last)].tolist():
        picture[low:high, first:end] = value
    return picture


def largest(drawn: Rectangles, count: int) -> np.ndarray:
    """Return the indices of the `count` largest rectangles, or of all if there are fewer.

    Returns:
        int64[at most count], in increasing order.
    """
    area = (drawn.upper - drawn.lower).astype(np.float64) * (drawn.stop - drawn.start)
    return np.sort(np.argsort(-area, kind="stable")[:count])
