"""C++ and Python round sizes of memory up to the same multiples."""

from __future__ import annotations

import re

import pytest

from memplug.sizes import BLOCK_BYTES, HOST_ROW_BYTES
from tests.support.folders import ROOT


@pytest.mark.parametrize(
    ("header", "name", "nbytes"),
    [
        ("native/blocks.h", "BLOCK_BYTES", BLOCK_BYTES),
        ("device/native/host_rows.h", "kRowAlignment", HOST_ROW_BYTES),
    ],
)
def test_core_and_python_have_the_same_alignment_constants(header: str, name: str, nbytes: int) -> None:
    stated = re.findall(rf"constexpr int64_t {name} = (\d+);", (ROOT / "memplug" / header).read_text())
    assert stated == [str(nbytes)]
