"""The benchmark of reuse reports each mode, on real or simulated CUDA."""

import json

import pytest

from memplug import native

pytestmark = pytest.mark.gpu


def test_reuse_benchmark_has_a_row_for_each_mode(tmp_path, capsys):
    pytest.importorskip("transformers")
    if not native.load().StorageSwapper.is_possible():
        pytest.skip("a swap list needs torch 2.13")
    from tests.bench import reuse

    output = tmp_path / "rows.json"
    reuse.main(["--layers", "3", "--tokens", "64", "--json", str(output)])
    rows = {(row["mode"], row["metric"]): row["value"] for row in json.loads(output.read_text())}
    assert rows["list", "mean"] >= 1 and rows["list", "largest"] >= rows["list", "mean"]
    assert rows["record_stream", "largest"] >= rows["record_stream", "mean"] >= 0
    assert "record_stream" in capsys.readouterr().out
