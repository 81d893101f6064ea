"""Configurations and model folders that were made to do harm: each is read as what it is, or
refused by name.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock as ps
from makers.processes import call_penstock
from penstock.core.errors import ConfigError, CorruptionError, FormatError
from penstock.core.json_files import json_text
from penstock.core.yaml_files import parse_yaml, write_yaml
from penstock.use.config.imports.conversion import import_axolotl, quoted
from penstock.use.config.run_file import load_run

BASE = {
    "base_model": "m/x", "datasets": [{"path": "d.jsonl", "type": "alpaca"}], "sequence_len": 128,
    "micro_batch_size": 1, "num_epochs": 1, "learning_rate": 1e-4, "output_dir": "out",
}  # fmt: skip
BREAKS = [
    "\n",
    "\r",
    "\r\n",
    "\x85",
    "\u2028",
    "\u2029",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x07",
    "\x00",
    "\x1b[2J",
    "\ufeff",
]
PLACES = [
    "base_model",
    "output_dir",
    "wandb_project",
    "chat_template_jinja",
    "nobody_knows",
    "path",
    "field_messages",
]


def configured(folder: Path, **values: Any) -> Path:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump({**BASE, **values}))
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ending", BREAKS)
def test_no_value_breaks_out_of_a_comment(tmp_path: Path, ending: str, place: str) -> None:
    value = f"out{ending}teachers: {{big: {{model: evil}}}}{ending}# "
    if place in ("path", "field_messages"):
        entry = {"path": "d.jsonl", "type": "chat_template", place: value}
        given = configured(tmp_path, datasets=[entry])
    else:
        given = configured(tmp_path, **{place: value})
    assert yaml.safe_load(given.read_text())
    found = import_axolotl(given)
    text = found.text(str(given))
    _, read = parse_yaml(text, "run file")
    assert read == json.loads(json.dumps(found.run)), "what is read is what was meant"
    assert all(command.isprintable() for command in found.commands)
    head = text.split("\n\n", 1)[0]
    assert all(line.startswith("#") for line in head.splitlines())


@pytest.mark.parametrize(
    "word", ["plain", "a b", "it's", "a\nb", "\\n\n'", "\x1b[2J\r", "\u2028\x85é", "$'x'\n$(id)"]
)
def test_a_quoted_word_is_one_line_that_a_shell_gives_back(word: str) -> None:
    assert quoted(word).isprintable()
    found = subprocess.run(
        ["bash", "-c", f"printf %s {quoted(word)}"],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    assert found.stdout.decode() == word


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1" + "0" * 400])
@pytest.mark.parametrize(
    "name", ["max_steps", "learning_rate", "micro_batch_size", "sequence_len", "lora_r"]
)
def test_enormous_numbers_are_errors_by_name(tmp_path: Path, name: str, number: str) -> None:
    path = configured(tmp_path, adapter="lora")
    kept = [line for line in path.read_text().splitlines() if not line.startswith(f"{name}:")]
    path.write_text("\n".join([*kept, f"{name}: {number}", ""]))
    with pytest.raises(ConfigError, match=rf"c.yaml: {name}.*infinity"):
        import_axolotl(path)


def test_a_run_file_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = configured(tmp_path, learning_rate=-1.0)
    with pytest.raises(ConfigError, match=r"c.yaml: .*learning_rate.*above 0"):
        call_penstock("import-config", path, "-o", tmp_path / "run.yaml")
    assert not (tmp_path / "run.yaml").exists()
    call_penstock("import-config", configured(tmp_path), "-o", tmp_path / "run.yaml")
    assert load_run(tmp_path / "run.yaml").model == "hf:m/x"


@pytest.mark.parametrize(
    "text",
    [
        "a\x85b",
        "a\u2028b",
        "a\u2029 b\n",
        "\x85",
        "\ufeff",
        "a: b\n---\n",
        "é\x07",
        "1e-3",
        "\ud800",
    ],
)
def test_what_is_written_as_yaml_is_read_back(text: str) -> None:
    value = {"a": [text, {"b": text}]}
    assert parse_yaml(write_yaml(value, "file"), "file")[1] == value


@pytest.mark.parametrize("text", ["é", "\ud800", "\u2028\x85\n", "\x00", '"'])
def test_what_is_written_as_json_is_read_back(text: str) -> None:
    value = {"a": [text, 1.5, None], text: float("inf")}
    written = json_text(value, "file", indent=1)
    assert json.loads(written.encode()) == value
    with pytest.raises(ConfigError, match="file: a value is not what it was"):
        json_text({1: 2, "1": 3}, "file")


NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that ours reads, and one that only transformers does."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    for kind, more in (
        (
            "llama",
            {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        ),
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    ):
        config = transformers.AutoConfig.for_model(kind, **sizes, **more)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place / kind)
    return {"llama": place / "llama", "gpt2": place / "gpt2"}


def copied(folder: Path, target: Path, name: str, content: str) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / name).write_text(content)
    return target


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"],
)
def test_nested_files_are_errors_by_name(
    folders: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    folder = copied(folders[kind], tmp_path / "model", name, NESTED)
    opens = ps.load_tokenizer if name.startswith("tokenizer") else ps.load_model
    if name == "tokenizer_config.json":
        (folder / "tokenizer.json").write_text(
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
        )
    named = "" if name.startswith("tokenizer") else name
    with pytest.raises(ps.PenstockError, match=rf"{named}.*nested too deeply"):
        opens(folder)


@pytest.mark.parametrize("number", [1_000_000, 1e300, float("inf"), 10**400])
@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("gpt2", "num_experts")]
)
def test_a_model_of_a_million_layers_is_refused_at_once(
    folders: dict[str, Path], tmp_path: Path, kind: str, name: str, number: float
) -> None:
    config = {**json.loads((folders[kind] / "config.json").read_text()), name: number}
    folder = copied(folders[kind], tmp_path / "model", "config.json", json.dumps(config))
    with pytest.raises(FormatError, match=rf"config.json.*{name}.*weights.*folder"):
        ps.load_model(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/x.safetensors", "a/../../x", "..\\x", "C:x", "~/x", ".."],
)
def test_an_index_names_files_of_its_folder_alone(
    folders: dict[str, Path], tmp_path: Path, kind: str, file: str
) -> None:
    (tmp_path / "outside.safetensors").write_bytes(
        (folders[kind] / "model.safetensors").read_bytes()
    )
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": file}})
    folder = copied(folders[kind], tmp_path / "model", "model.safetensors.index.json", index)
    with pytest.raises(CorruptionError, match="which is not in the folder"):
        ps.load_model(folder)


@pytest.mark.parametrize("content", ['{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_of_another_form_is_refused(
    folders: dict[str, Path], tmp_path: Path, content: str
) -> None:
    folder = copied(folders["llama"], tmp_path / "model", "model.safetensors.index.json", content)
    with pytest.raises(CorruptionError, match=r"weight_map.*mapping.*files"):
        ps.load_model(folder)
