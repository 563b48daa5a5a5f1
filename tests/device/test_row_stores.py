"""Swapped rows come back unchanged from their store, which is pinned host memory or a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memplug.device.device import Device
from memplug.tokenwise.engine.core import core
from tests.support import extension

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(12, 8),
    "transposed": lambda: torch.randn(8, 12).t(),
    "heads before tokens": lambda: torch.randn(2, 12, 4, 8).transpose(1, 2),
    "one of a batch": lambda: torch.randn(1, 12, 8),
    "tokens between": lambda: torch.randn(3, 12, 4).transpose(0, 1),
    "a dimension of one": lambda: torch.randn(12, 1, 8).transpose(0, 1).transpose(0, 2),
    "conjugated": lambda: torch.randn(12, 8, dtype=torch.complex64).conj(),
}


def host(folder: Path) -> Any:
    rows = core().HostRows(lambda nbytes: False)
    rows.add(torch.empty(1 << 16, dtype=torch.uint8))
    return rows


def file(folder: Path) -> Any:
    return extension.load().FileRows(str(folder / "rows"))


@pytest.mark.parametrize("store", [host, file], ids=lambda store: store.__name__)
@pytest.mark.parametrize("fraction", [0.25, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_come_back_unchanged_from_every_store(
    layout: str, fraction: float, store: Callable[[Path], Any], tmp_path: Path
) -> None:
    rows_in_store = store(tmp_path)
    transfer = core().Transfer(Device().streams(core()), rows_in_store)
    tensor = LAYOUTS[layout]()
    expected, rows = tensor.clone(), max(1, round(fraction * tensor.shape[0]))
    swapped = transfer.offload(tensor, rows)
    nbytes = tensor.nbytes // tensor.shape[0] * rows
    transfer.release([swapped])
    assert swapped.tensor is None and rows_in_store.used_bytes >= nbytes
    tensor.zero_()
    back, valid = transfer.acquire(swapped)
    assert valid == rows and back.stride() == tensor.stride()
    assert torch.equal(back[:rows], expected[:rows])
    assert transfer.offloaded_total_bytes == transfer.prefetched_total_bytes == nbytes
    del swapped, back
    transfer.drain()
    assert rows_in_store.used_bytes == 0
