"""Pictures in tests: the Chrome that draws them, and their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memplug.figures.figure import Figure
from memplug.show.picture import write_picture


@pytest.fixture(scope="session")
def chrome() -> Iterator[None]:
    """Start one Chrome for all pictures of a test process, and skip the test if there is none.

    Without this fixture each picture would start a Chrome of its own.
    """
    kaleido = pytest.importorskip("kaleido", reason="pictures need kaleido, which is not installed")
    from choreographer.browsers.chromium import Chromium

    if Chromium.find_browser(skip_local=False) is None:
        pytest.skip("pictures need Chrome or Chromium, and none is installed")
    kaleido.start_sync_server(n=1, mathjax=False, silence_warnings=True)
    yield
    kaleido.stop_sync_server(silence_warnings=True)


def pixels_of(figure: Figure, path: Path) -> np.ndarray:
    """Return the picture of a figure: uint8[height, width, 3]."""
    from PIL import Image

    write_picture(figure, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))
