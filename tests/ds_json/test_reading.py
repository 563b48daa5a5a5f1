"""memplug reads DeepSpeed's JSON as DeepSpeed does, and remarks on contents that DeepSpeed or Accelerate refuses."""

from __future__ import annotations

import json
import logging

import hjson
import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from typer.testing import CliRunner

from memplug.cli import app
from memplug.config import load_config
from memplug.ds_json.reading import read
from memplug.errors import ConfigError

BLOCK = '"memplug": {"enabled": true}'
run = CliRunner().invoke


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def refused_by(reader, path) -> bool:
    try:
        reader(path)
    except Exception:
        return True
    return False


def deepspeed(path):
    with open(path, encoding="utf-8") as file:
        return hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)


def accelerate(path):
    return HfDeepSpeedConfig(str(path))


TWICE = [
    (f"{{{BLOCK},\n{BLOCK}}}", ['"memplug" is given more than once, at lines 1 and 2']),
    ('{"memplug": {"tokenwise": {"alpha": 0,\n"alpha": 1}}}', ['"memplug.tokenwise.alpha" is given more than once']),
    ('{"a": 1, "a": 2,\n"b": [{"c": 1,\n// no\n"c": 2}]}', ['"a" is given more than once, at line 1', "lines 2 and 4"]),
    ('{"a": 1, "a": 1, "a": 1}', ['"a" is given more than once, at line 1']),
]


@pytest.mark.parametrize(("text", "said"), TWICE, ids=str)
def test_repeated_key_is_an_error_as_in_deepspeed(tmp_path, text, said):
    path = written(tmp_path / "ds.json", text)
    assert refused_by(deepspeed, path)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(each in str(caught.value) for each in said)
    result = run(app, ["check", str(path)])
    assert result.exit_code == 1 and all(each in result.stderr for each in said)


REMARKS = [
    (f"{{\n// mine\n{BLOCK}}}", 'line 2: "// mine" is not JSON'),
    (f'{{{BLOCK},\n"a": [1],\n}}', "is not JSON"),
    (f"{{\n{BLOCK}\n'a': 1}}", "line 3: \"'a': 1}\" is not JSON"),
    (f'{{\n{BLOCK},\n"a": 0x10\n}}', "line 3"),
    (f"{BLOCK}\na: 1", "line 1"),
    (f"\ufeff{{{BLOCK}}}", "line 1: begins with a byte order mark"),
    (f'{{{BLOCK},\n"a": "NaN",\n"b": NaN\n}}', "line 3: NaN is not JSON: DeepSpeed takes it for text"),
    (f'{{{BLOCK},\n"b": [-Infinity]}}', "line 2: -Infinity is not JSON"),
]


@pytest.mark.parametrize(("text", "said"), REMARKS, ids=str)
def test_check_says_where_a_file_is_not_json(tmp_path, text, said):
    path = written(tmp_path / "ds.json", text)
    assert refused_by(accelerate, path) or refused_by(deepspeed, path) or deepspeed(path) != json.loads(text)
    (remark,) = read(path).remarks
    assert said in remark and remark.startswith(f"{path}, line ")
    assert load_config(path).enabled
    result = run(app, ["check", str(path)])
    assert result.exit_code == 0 and f"Warning: {remark}\n" in result.stderr
    assert json.loads(run(app, ["check", str(path), "--json"]).stdout)["warnings"] == [remark]


@pytest.mark.parametrize("text", [f"{{{BLOCK}}}", f'{{\n"a": "// no", "b": "NaN", "c": 5e8,{BLOCK}}}', "{}"], ids=str)
def test_file_that_deepspeed_and_accelerate_accept_has_no_remarks(tmp_path, text):
    path = written(tmp_path / "ds.json", text)
    assert deepspeed(path) == accelerate(path).config == read(path).content
    assert read(path).remarks == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{ /* x", "not JSON"),
        (
            '{\n// mine\n"a": 1,\n"b": [1,\n}',
            "at line 2, column 1; DeepSpeed's reader, which accepts more, stops at line",
        ),
        ('{"a": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("\ufeff", "at line 1, column 1"),
    ],
    ids=lambda text: text[:30],
)
def test_unreadable_file_is_an_error_with_its_place(tmp_path, text, said):
    with pytest.raises(ConfigError, match="What to do") as caught:
        load_config(written(tmp_path / "ds.json", text))
    assert said in str(caught.value)


ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
NAMING = "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Enter a folder that holds a DeepSpeed JSON, ds.json, and return it."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "ds.json", f'{{{BLOCK}, "train_batch_size": 8}}')
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", ACCELERATE + NAMING),
        ("a.yml", "output_dir: out\ndeepspeed: ds.json\n"),
        ("accelerate_config", f"# mine\n{ACCELERATE}{NAMING}"),
        ("a.json", '{"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}'),
        ("a.json", '{"output_dir": "out", "deepspeed": "ds.json"}'),
        ("a.yaml", f'deepspeed: {{{BLOCK}, "train_batch_size": 8}}'),
    ],
)
def test_deepspeed_json_named_by_another_file_is_read(here, name, text, caplog):
    path = written(here / name, text)
    assert read(path).content == read("ds.json").content and caplog.text == ""
    result = run(app, ["check", name])
    assert result.exit_code == 0 and "memplug is on" in result.stdout and result.stderr == ""
    assert ("read from        ds.json" in result.stdout) == ("ds.json" in text)


@pytest.mark.parametrize(
    ("text", "line", "block"),
    [
        (f"{ACCELERATE}{NAMING}memplug:\n  enabled: true\n", 6, "memplug"),
        (f"{ACCELERATE}{NAMING}  memplug:\n    enabled: true\n", 6, "deepspeed_config.memplug"),
        (f"deepspeed: ds.json\n{BLOCK}\n", 2, "memplug"),
    ],
)
def test_block_beside_a_named_deepspeed_json_is_ignored_with_a_warning(here, text, line, block, caplog):
    path = written(here / "a.yaml", text)
    with caplog.at_level(logging.WARNING, "memplug"):
        assert load_config(path).enabled
    (record,) = caplog.records
    assert record.getMessage().startswith(f'{path}, line {line}: "{block}" is ignored')
    assert f'line {line}: "{block}" is ignored' in run(app, ["check", "a.yaml"]).stderr


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(
    "content",
    [{}, {"memplug": {"enabled": True}}, {"deepspeed_config": {"zero_stage": 2, "memplug": {"enabled": True}}}],
)
def test_accelerate_file_without_deepspeed_json_is_an_error(tmp_path, suffix, content):
    text = json.dumps({"distributed_type": "DEEPSPEED", **content}, indent=1)
    path = written(tmp_path / f"a{suffix}", text)
    result = run(app, ["check", str(path)])
    assert result.exit_code == 1 and "is no DeepSpeed JSON, and names none" in result.stderr
    line = next((number for number, line in enumerate(text.splitlines(), 1) if "memplug" in line), None)
    assert (f'line {line}: "' in result.stderr) == ("memplug" in text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{ACCELERATE}{NAMING}{NAMING}", '"deepspeed_config" is given more than once, at lines 3 and 6'),
        ("deepspeed: {a: 1,\n a: 2}", '"deepspeed.a" is given more than once, at lines 1 and 2'),
        ("deepspeed: absent.json", "absent.json: no such file (named at a.yaml, line 1)"),
        ("deepspeed: [", "not YAML: while parsing"),
        ("", "names none"),
        ("- 1\n", "names none"),
        ("deepspeed: &a\n  b: *a\n  memplug: {enabled: 3}\n", "a.yaml: not YAML: Circular reference"),
        ("deepspeed: " + "[" * 1000, "a.yaml: nested too deeply"),
    ],
    ids=lambda text: text[:40],
)
def test_errors_in_yaml_are_reported_with_advice(here, text, said):
    written(here / "a.yaml", text)
    result = run(app, ["check", "a.yaml"])
    assert result.exit_code == 1 and said in result.stderr and "What to do" in result.stderr
