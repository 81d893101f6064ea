"""`penstock prepare --template`: options, a file of settings and assignments come to the same; all is printed once."""

import json
import sys

import pytest
from test_prepare_chat import CHATML, make_chats, turns

from penstock.cli import main
from penstock.config.chats import load_chat_settings
from penstock.errors import ConfigError
from penstock.shards import Dataset


@pytest.fixture
def command(tmp_path, chat_tokenizer, monkeypatch, capsys):
    """Runs `penstock prepare` on a file of chats; gives (exit code, standard output, standard error)."""
    chat_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in make_chats(6)))

    def run(*arguments, source="chats.jsonl", output="out"):
        paths = [str(tmp_path / source), "-t", str(tmp_path / "tokenizer"), "-o", str(tmp_path / output)]
        monkeypatch.setattr(sys, "argv", ["penstock", "prepare", *paths, "--processes", "1", *arguments])
        with pytest.raises(SystemExit, match=r"\d") as stop:
            main()
        return (stop.value.code, *capsys.readouterr())

    return run


def test_the_settings_are_printed_once_and_the_figures_at_the_end(command):
    code, out, err = command("--template", "auto", "--mask-history", "--roles-to-train", "assistant,user")
    assert code == 0
    assert err.count("first record: layout messages") == 1
    assert err.count("knobs: roles_to_train assistant+user") == 1
    assert "mask_history yes" in err
    assert "'<|im_end|>' 18 (trained 6)" in out
    assert "trained:" in out


def test_options_a_file_and_assignments_come_to_the_same(command, tmp_path):
    options = ["--train-on-eos", "all", "--max-tokens", "90", "--too-long", "drop", "--no-train-on-reasoning"]
    (tmp_path / "chat.yaml").write_text("template: auto\ntrain_on_eos: last\nmax_tokens: 90\ntoo_long: drop\n")
    assignments = ["--set", "train_on_eos=all", "--set", "train_on_reasoning=false"]
    first = command("--template", "auto", *options, "--json")
    second = command("--chat-config", str(tmp_path / "chat.yaml"), *assignments, "--json", output="two")
    assert first[0] == second[0] == 0
    one, two = json.loads(first[1]), json.loads(second[1])
    assert one["splits"][""]["fingerprint"] == two["splits"][""]["fingerprint"]
    assert (tmp_path / "out/chat.json").read_bytes() == (tmp_path / "two/chat.json").read_bytes()


def test_fields_and_roles_are_mapped(command, tmp_path):
    record = {"talk": [{"who": "asker", "says": "water"}, {"who": "bot", "says": "wheel"}]}
    (tmp_path / "odd.jsonl").write_text(json.dumps(record))
    (tmp_path / "chat.yaml").write_text(
        "field_messages: talk\nmessage_property_mappings: {role: who, content: says}\n"
        "roles: {user: [asker], assistant: [bot]}\n"
    )
    arguments = ["--template", "auto", "--chat-config", str(tmp_path / "chat.yaml")]
    assert command(*arguments, source="odd.jsonl")[0] == 0
    (tmp_path / "plain.jsonl").write_text(json.dumps(turns("water", "wheel")))
    assert command("--template", "auto", source="plain.jsonl", output="plain")[0] == 0
    assert Dataset.open(tmp_path / "out") == Dataset.open(tmp_path / "plain")


def test_mistakes_say_where_they_are(command, tmp_path):
    assert "add --template" in command("--mask-history")[2]
    assert (
        "--set train_on_eos=some: found 'some', due 'turn'"
        in command("--template", "auto", "--set", "train_on_eos=some")[2]
    )
    (tmp_path / "chat.yaml").write_text("template: auto\nmask_histroy: true\n")
    with pytest.raises(ConfigError, match=r"chat\.yaml:2: mask_histroy: unknown key; did you mean 'mask_history'\?"):
        load_chat_settings(tmp_path / "chat.yaml")
    (tmp_path / "chat.yaml").write_text("template: auto\nroles: [gpt]\n")
    with pytest.raises(ConfigError, match=r"chat\.yaml:2: roles: found \['gpt'\]"):
        load_chat_settings(tmp_path / "chat.yaml")
