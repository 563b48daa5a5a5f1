"""The Llama-2 recipe: its data, its checkpoints, and a run that is killed and resumed."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.launching import kill_tree, started, wait_until
from tests.support.recipes import checkpoint, data, text

RECIPE = ROOT / "examples" / "llama2"


def make_batches(tokens: torch.Tensor, *, rank: int = 0, world_size: int = 1, micro_batch: int = 2, seed: int = 0):
    return data.Batches(tokens=tokens, seq_len=8, micro_batch=micro_batch, rank=rank, world_size=world_size, seed=seed)


def test_text_is_read_in_file_name_order_and_decodes_to_itself(tmp_path):
    first, second = "först".encode(), b"second\xff"
    (tmp_path / "b.txt").write_bytes(second)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(first)
    tokens = text.load_tokens(tmp_path, text.ByteTokenizer())
    end = text.ByteTokenizer.end_of_text
    assert tokens.tolist() == [*first, end, *second, end]
    assert text.ByteTokenizer().decode(tokens.numpy()) == first + second


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data"):
        text.load_tokens(tmp_path, text.ByteTokenizer())


def test_default_text_exists_and_is_read_no_further_than_needed():
    tokens = text.load_tokens(None, text.ByteTokenizer())
    assert len(tokens) == text.DEFAULT_TOKENS
    more = text.load_tokens(None, text.ByteTokenizer(), 2 * text.DEFAULT_TOKENS)
    assert len(more) == 2 * text.DEFAULT_TOKENS, "packages follow the single modules"
    assert torch.equal(more[: len(tokens)], tokens)


def test_default_text_suffices_for_eight_ranks_with_long_sequences():
    batch_tokens = 8 * 32768
    tokens = text.load_tokens(None, text.ByteTokenizer(), data.tokens_wanted(batch_tokens))
    train, validation = data.split(tokens, batch_tokens)
    assert len(validation) == batch_tokens and len(train) == 19 * batch_tokens


def test_validation_text_is_the_last_twentieth_but_at_least_one_batch():
    tokens = torch.arange(2000, dtype=torch.int16)
    for batch_tokens, cut in ((0, 1900), (99, 1900), (300, 1700), (3000, 0)):
        train, validation = data.split(tokens, batch_tokens)
        assert torch.equal(train, tokens[:cut])
        assert torch.equal(validation, tokens[cut:])


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (2, 4), (3, 2)])
def test_ranks_together_repeat_no_window_of_text_in_one_epoch(world_size, micro_batch):
    tokens = torch.arange(1003, dtype=torch.int16)
    ranks = [
        make_batches(tokens, rank=rank, world_size=world_size, micro_batch=micro_batch) for rank in range(world_size)
    ]
    first_epoch = torch.cat([batches[index] for index in range(len(ranks[0])) for batches in ranks])
    windows = first_epoch[:, 0].tolist()
    assert torch.equal(first_epoch, first_epoch[:, :1] + torch.arange(8)), "a window is contiguous"
    assert len(set(windows)) == len(windows) == 1003 // 8 // (world_size * micro_batch) * world_size * micro_batch
    second_epoch = torch.cat([ranks[0][len(ranks[0]) + index] for index in range(len(ranks[0]))])
    assert second_epoch[:, 0].tolist() != torch.cat([ranks[0][i] for i in range(len(ranks[0]))])[:, 0].tolist()


def test_batch_depends_on_seed_and_index_alone():
    tokens = torch.arange(1000, dtype=torch.int16)
    batches = make_batches(tokens)
    expected = [batches[index] for index in range(5)]
    again = make_batches(tokens)
    assert all(torch.equal(again[index], expected[index]) for index in (4, 0, 3, 1, 2))
    assert not torch.equal(make_batches(tokens, seed=1)[0], expected[0])


def test_too_little_text_is_refused_with_advice():
    with pytest.raises(ValueError, match="--seq-len"):
        make_batches(torch.arange(15, dtype=torch.int16))


@pytest.mark.parametrize(
    ("size", "parameters"), [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)]
)
def test_model_shapes_are_those_of_llama_2(size, parameters):
    shape = yaml.safe_load((ROOT / f"configs/models/{size}.yaml").read_text())
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


class FileEngine:
    """An engine that saves and loads only the script's own state, in real files in DeepSpeed's layout."""

    def save_checkpoint(self, save_dir: str, tag: str, client_state: dict, save_latest: bool) -> None:
        assert not save_latest, "DeepSpeed would overwrite the pointer, and not atomically"
        (Path(save_dir) / tag / "model.json").write_text(json.dumps(client_state))

    def load_checkpoint(self, load_dir: str, tag: str) -> tuple[str, dict]:
        path = Path(load_dir) / tag / "model.json"
        return str(path), json.loads(path.read_text())


@pytest.fixture
def single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Killed(BaseException):
    """Stands for the kill of a process: no code handles this exception."""


def die(*args, **kwargs):
    raise Killed


@pytest.mark.parametrize("moment", ["files half written", "before the rename", "before the pointer"])
def test_interrupted_save_leaves_the_previous_checkpoint_loadable(tmp_path, single_rank, monkeypatch, moment):
    engine, folder = FileEngine(), tmp_path / "checkpoints"
    checkpoint.save(engine, folder, {"step": 3})
    where = {
        "files half written": (engine, "save_checkpoint"),
        "before the rename": (os, "rename"),
        "before the pointer": (os, "replace"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[moment], die)
        with pytest.raises(Killed):
            checkpoint.save(engine, folder, {"step": 6})
    assert checkpoint.latest(folder) == "step-00000003"
    assert checkpoint.load(engine, folder) == {"step": 3}

    checkpoint.save(engine, folder, {"step": 5})
    assert checkpoint.load(engine, folder) == {"step": 5}
    assert sorted(path.name for path in folder.glob("s*")) == ["step-00000003", "step-00000005"], "nothing is left over"


def test_last_two_checkpoints_are_kept(tmp_path, single_rank):
    engine = FileEngine()
    for step in (1, 2, 3, 4):
        checkpoint.save(engine, tmp_path, {"step": step})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert checkpoint.latest(tmp_path) == "step-00000004"


def test_loading_a_checkpoint_restores_the_random_state(tmp_path, single_rank):
    engine = FileEngine()
    checkpoint.save(engine, tmp_path, {"step": 1})
    expected = torch.rand(4)
    torch.manual_seed(123)
    checkpoint.load(engine, tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_checkpoint_of_fewer_ranks_is_refused(tmp_path, single_rank, monkeypatch):
    engine = FileEngine()
    checkpoint.save(engine, tmp_path, {"step": 1})
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(FileNotFoundError, match="number of ranks"):
        checkpoint.load(engine, tmp_path)


def test_resume_without_checkpoint_is_refused(tmp_path, single_rank):
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.load(FileEngine(), tmp_path)


def read_losses(log: Path) -> dict[int, float]:
    """Return the loss of each step; the kill may have cut off the last line."""
    text = log.read_text() if log.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines if "step" in line}


@pytest.mark.distributed
@pytest.mark.long  # tests/programs/test_distributed.py kills and resumes a run with memplug
def test_killed_run_resumes_with_the_same_losses(tmp_path):
    # the killed run is the reference: it trains well past its checkpoint before it dies
    config = json.loads((ROOT / "configs/ds_tiny.json").read_text())
    config.update(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    (tmp_path / "ds.json").write_text(json.dumps(config))
    saves, killed_log, resumed_log = tmp_path / "saves", tmp_path / "killed.jsonl", tmp_path / "resumed.jsonl"
    common = [RECIPE / "train.py", "--memplug", "none", "--deepspeed_config", tmp_path / "ds.json", "--seq-len", "64"]
    common += ["--save-dir", saves, "--save-every", "10"]

    with started([*common, "--steps", "1000", "--loss-log", killed_log]) as (process, read_output):
        assert wait_until(lambda: max(read_losses(killed_log), default=0) >= 13, process), read_output()
        kill_tree(process)
    assert checkpoint.latest(saves) == "step-00000010"
    expected = read_losses(killed_log)
    shutil.copytree(saves / "step-00000010", saves / "saving")  # a kill in the middle of a save leaves such a folder

    output = launch_forked([*common, "--steps", "13", "--loss-log", resumed_log, "--resume"])
    assert read_losses(resumed_log) == {step: expected[step] for step in (11, 12, 13)}
    assert checkpoint.latest(saves) == "step-00000013"
    assert "resumed from step-00000010" in output
    report = json.loads(resumed_log.read_text().splitlines()[-1])["report"]
    assert report["validation_loss"] < expected[1]
