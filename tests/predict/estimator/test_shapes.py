"""Shapes of models: the shipped files, and files with errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplug.errors import EstimateError
from memplug.predict.estimator.shapes import Shape
from tests.support.folders import ROOT

pytest.importorskip("transformers")
SEVEN, QWEN, MIXTRAL = (
    (ROOT / "configs" / "models" / f"{name}.yaml").read_text() for name in ("7b", "qwen3_8b", "mixtral_8x7b")
)


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "models").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_shapes_are_valid(file: Path) -> None:
    shape = Shape.read(file)
    assert shape.layers > 1 and shape.is_mixture is ("mixtral" in file.stem)
    assert shape.family == {"mixtral": "Mixtral", "qwen3": "Qwen3"}.get(file.stem.partition("_")[0], "Llama")


def test_qwen3_head_size_defaults_to_that_of_hugging_face(tmp_path: Path) -> None:
    file, text = tmp_path / "model.yaml", QWEN.replace("num_attention_heads: 32", "num_attention_heads: 24")
    for given, size in (("head_dim: 96\n", 96), ("", 128)):
        file.write_text(text.replace("head_dim: 128\n", given))
        shape = Shape.read(file)
        assert shape.head_size == size and shape.normalizes_heads
    file.write_text(SEVEN)
    assert Shape.read(file).head_size == 128 and not Shape.read(file).normalizes_heads


def test_null_key_value_heads_default_to_the_number_of_heads(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(QWEN.replace("num_key_value_heads: 8", "num_key_value_heads:"))
    assert Shape.read(file).fields["num_key_value_heads"] == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SEVEN.replace("hidden_size: 4096", ""), "hidden_size is None"),
        (SEVEN.replace("num_hidden_layers: 32", "num_hidden_layers: 0"), "num_hidden_layers is 0"),
        (SEVEN.replace("num_attention_heads: 32", "num_attention_heads: 33"), "33 heads"),
        (SEVEN.replace("vocab_size: 32000", "vocab_size: many"), "vocab_size is 'many'"),
        (SEVEN + "hiden_size: 3\n", "no field hiden_size"),
        (SEVEN + "model_type: gpt2\n", "model_type is 'gpt2'"),
        (SEVEN + "model_type: mixtral\n", "model_type is 'mixtral', but num_local_experts is missing"),
        (SEVEN + "model_type: qwen3\nnum_local_experts: 8\n", "model_type is 'qwen3', but num_local_experts is given"),
        (SEVEN + "model_type: [qwen3]\n", "model_type is .*'qwen3'"),
        (QWEN + "mlp_bias: true\n", "Qwen3Config has no field mlp_bias"),
        (QWEN.replace("num_key_value_heads: 8", "num_key_value_heads: 5"), "32 heads in 5 groups"),
        (QWEN.replace("num_key_value_heads: 8", "num_key_value_heads: 0"), "num_key_value_heads is 0"),
        (QWEN.replace("num_key_value_heads: 8", "num_key_value_heads: eight"), "num_key_value_heads is 'eight'"),
        (QWEN.replace("head_dim: 128", "head_dim: -128"), "head_dim is -128"),
        (SEVEN + "head_dim: 0\n", "head_dim is 0"),
        (SEVEN.replace("num_hidden_layers: 32", "num_hidden_layers: true"), "num_hidden_layers is True"),
        (SEVEN.replace("num_hidden_layers: 32", f"num_hidden_layers: {10**20}"), "num_hidden_layers is 10000"),
        (SEVEN.replace("hidden_size: 4096", "hidden_size: .nan"), "hidden_size is nan"),
        (SEVEN + "max_position_embeddings: '4096'\n", "max_position_embeddings is '4096'"),
        (SEVEN + "rope_theta: .nan\n", "rope_theta is nan, which is not finite"),
        (MIXTRAL.replace("num_experts_per_tok: 2", "num_experts_per_tok: 9"), "num_experts_per_tok is 9.* 8 experts"),
        (
            MIXTRAL.replace("num_experts_per_tok: 2\n", "").replace("num_local_experts: 8", "num_local_experts: 1"),
            "num_experts_per_tok is 2.* 1 experts",
        ),
        (MIXTRAL.replace("num_local_experts: 8", "num_local_experts: 0"), "num_local_experts is 0"),
        (MIXTRAL.replace("num_local_experts: 8", "num_local_experts:"), "num_local_experts is None"),
        ("x: \0", "special characters"),
        ("[" * 100_000, "recursion"),
        ("- 7\n", "does not describe a model"),
        ("{", "line 1"),
        (None, "No such file"),
    ],
)
def test_error_for_an_invalid_shape_file_names_the_fault(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(EstimateError, match=said):
        Shape.read(file)
