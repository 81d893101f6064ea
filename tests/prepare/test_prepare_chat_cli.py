"""`penstock prepare --template`: options, a file of settings and assignments come to the same; all
is printed once.
"""

import json
import re

import jsonschema
import pytest
import yaml
from test_prepare_chat import make_chats

from makers.texts import make_chat, write_json_lines
from makers.tokenizers import CHATML
from penstock import Dataset, load_tokenizer
from penstock.chat import Boundary
from penstock.core.errors import ConfigError
from penstock.use.config import load_run, run_schema
from penstock.use.config.run_file import load_chat_section, load_chat_settings


@pytest.fixture
def command(tmp_path, chat_tokenizer, command_line):
    """Runs `penstock prepare` on a file of chats; gives (exit code, standard output, standard
    error).
    """
    chat_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    write_json_lines(tmp_path / "chats.jsonl", make_chats(6))

    def call(*arguments, source="chats.jsonl", output="out"):
        words = [
            tmp_path / source,
            "-t",
            tmp_path / "tokenizer",
            "-o",
            tmp_path / output,
            "--processes",
            1,
        ]
        return command_line("prepare", *words, *arguments)

    return call


def test_one_line_at_the_start_says_what_is_read_and_how(command, tmp_path):
    code, _, err = command("--template", "auto")
    assert code == 0
    sources = (
        f"preparing {tmp_path / 'chats.jsonl'} (1 file, "
        f"{(tmp_path / 'chats.jsonl').stat().st_size} B)"
    )
    how = f"with tokenizer {tmp_path.name}/tokenizer and chat template tokenizer (family chatml)"
    assert err.startswith(f"penstock: {sources} {how} into {tmp_path / 'out'}\n")
    assert [line for line in err.splitlines() if line.startswith("penstock:")] == err.splitlines()[
        :1
    ]
    assert "penstock:" not in command("--template", "auto", "--quiet", output="two")[2]


def test_the_settings_are_printed_once_if_asked_for_and_the_figures_at_the_end(command):
    code, out, err = command(
        "--template", "auto", "--mask-history", "--roles-to-train", "assistant,user", "--verbose"
    )
    assert code == 0
    assert err.count("first record: layout messages") == 1
    assert err.count("mask settings: roles_to_train assistant+user") == 1
    assert "mask_history yes" in err
    assert "'<|im_end|>' 18 (trained 6)" in out
    assert "trained:" in out


def test_options_a_file_and_assignments_come_to_the_same(command, tmp_path):
    options = [
        "--train-on-eos",
        "all",
        "--max-tokens",
        "90",
        "--too-long",
        "drop",
        "--no-train-on-reasoning",
    ]
    (tmp_path / "chat.yaml").write_text(
        "template: auto\ntrain_on_eos: last\nmax_tokens: 90\ntoo_long: drop\n"
    )
    assignments = ["--set", "train_on_eos=all", "--set", "train_on_reasoning=false"]
    first = command("--template", "auto", *options, "--json")
    second = command(
        "--chat-config", str(tmp_path / "chat.yaml"), *assignments, "--json", output="two"
    )
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
    (tmp_path / "plain.jsonl").write_text(json.dumps(make_chat("water", "wheel")))
    assert command("--template", "auto", source="plain.jsonl", output="plain")[0] == 0
    assert Dataset.open(tmp_path / "out") == Dataset.open(tmp_path / "plain")


def test_mistakes_say_where_they_are(command, tmp_path):
    assert "set --template to a .jinja file or auto" in command("--mask-history")[2]
    assert (
        "--set train_on_eos=some: found 'some', expected 'turn'"
        in command("--template", "auto", "--set", "train_on_eos=some")[2]
    )
    (tmp_path / "chat.yaml").write_text("template: auto\nmask_histroy: true\n")
    with pytest.raises(ConfigError, match=r"yaml:2: mask_histroy.*'mask_history'\?"):
        load_chat_settings(tmp_path / "chat.yaml")
    (tmp_path / "chat.yaml").write_text("template: auto\nroles: [gpt]\n")
    with pytest.raises(ConfigError, match=r"chat\.yaml:2: roles: found \['gpt'\]"):
        load_chat_settings(tmp_path / "chat.yaml")


RUN_FILE = """\
chat:
  template: auto
  mask_history: true
  date: 2026-12-31
  role_boundaries:
    - role: assistant
      start: "<|im_start|>assistant\\n"
      end: "<|im_end|>"
data:
  sources: [{path: out}]
  loader: {sequence_length: 64, rows_per_step: 2}
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    return path


def test_a_run_file_holds_settings_of_chats(command, run_file, tmp_path):
    """As a file of their own does; and what it takes for role boundaries is logged as ids, once."""
    code, _, err = command("--config", str(run_file), "--verbose")
    assert code == 0
    chat = load_run(run_file).chat
    assert chat.mask_settings.mask_history
    assert chat.role_boundaries == (
        Boundary(role="assistant", start="<|im_start|>assistant\n", end="<|im_end|>"),
    )
    assert chat.date == "2026-12-31"
    ids = load_tokenizer(tmp_path / "tokenizer").special_tokens
    assert err.count("masks are checked against the role boundary ") == 1
    assert f"the role boundary assistant: [{ids['<|im_start|>']}, " in err
    assert f"… [{ids['<|im_end|>']}]\n" in err
    flat = yaml.safe_load(RUN_FILE)["chat"]
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(flat))
    assert command("--chat-config", str(tmp_path / "chat.yaml"), output="two")[0] == 0
    assert (tmp_path / "out/chat.json").read_bytes() == (tmp_path / "two/chat.json").read_bytes()


def test_the_role_boundaries_of_a_run_file_are_what_masks_are_held_against(
    command, run_file, tmp_path
):
    code, out, _ = command("--config", str(run_file), "--set", "mask_history=false")
    assert code == 0
    assert "cross-check: boundaries of the settings agree: 6 of 6" in out
    wrong = "[{role: assistant, start: <|im_start|>user, end: <|im_end|>}]"
    code, out, _ = command(
        "--config",
        str(run_file),
        "--set",
        "chat.mask_history=false",
        "--set",
        f"chat.role_boundaries={wrong}",
        output="two",
    )
    assert code == 0
    assert "cross-check: boundaries of the settings disagree: 6 of 6" in out


def test_a_marker_that_encodes_to_nothing_is_an_error(command, run_file):
    run_file.write_text(RUN_FILE.replace('end: "<|im_end|>"', "end: [[]]"))
    code, _, err = command("--config", str(run_file))
    assert code == 1
    assert (
        "boundary of 'assistant': end is [[]]; expected text or token ids that are not empty" in err
    )


def test_options_go_before_the_run_file(command, run_file, tmp_path):
    assert (
        command("--config", str(run_file), "--train-on-eos", "all", "--roles-to-train", "user")[0]
        == 0
    )
    mask_settings = json.loads((tmp_path / "out/chat.json").read_text())["settings"][
        "mask_settings"
    ]
    assert (
        mask_settings["mask_history"],
        mask_settings["train_on_eos"],
        mask_settings["roles_to_train"],
    ) == (
        True,
        "all",
        ["user"],
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "mask_history",
            "mask_histroy",
            r"yaml:3: chat\.mask_histroy: unknown key; did you mean 'mask_history'\?",
        ),
        (
            "mask_history: true",
            "train_on_eos: some",
            r"run\.yaml:3: chat\.train_on_eos: found 'some', expected 'turn'",
        ),
        ("mask_history: true", "max_tokens: 1", r"run\.yaml:1: chat: max_tokens must be >= 2"),
        (
            'end: "<',
            'ends: "<',
            r"run\.yaml:8: chat\.role_boundaries\.0\.ends: unknown key; did you mean 'end'\?",
        ),
        (
            "start: ",
            "end_starts_next: true # ",
            r"chat\.role_boundaries\.0\.start: missing; it is required: Marker",
        ),
        (
            "<|im_start|>assistant\\n",
            "",
            r"yaml:6: chat\.role_boundaries\.0: boundary of 'assistant': start is ''",
        ),
    ],
)
def test_mistakes_in_a_run_file_say_where_they_are(command, run_file, old, new, message):
    assert old in RUN_FILE
    run_file.write_text(RUN_FILE.replace(old, new))
    for load in (load_run, load_chat_section):
        with pytest.raises(ConfigError, match=message):
            load(run_file)
    code, _, err = command("--config", str(run_file))
    assert code == 1
    assert re.search(message, err)


def test_a_run_file_without_chats_is_not_taken_for_one(command, run_file, tmp_path):
    run_file.write_text(RUN_FILE[RUN_FILE.index("data:") :])
    assert load_run(run_file).chat is None
    assert (
        "no section `chat`; expected one with chat settings"
        in command("--config", str(run_file))[2]
    )
    (tmp_path / "chat.yaml").write_text("template: auto")
    both = command("--config", str(run_file), "--chat-config", str(tmp_path / "chat.yaml"))
    assert "give only one of them" in both[2]


def test_the_schema_has_the_settings_of_chats():
    kinds = run_schema()["$defs"]
    chat = kinds["ChatSettings"]["properties"]
    assert {"template", "role_boundaries", "train_on_eos", "field_messages", "max_tokens"} <= set(
        chat
    )
    assert not {"mask_settings", "cleaning"} & set(chat)
    assert kinds["Boundary"]["required"] == ["role", "start"]
    jsonschema.validate(
        yaml.load(RUN_FILE, yaml.BaseLoader)["chat"]["role_boundaries"][0], kinds["Boundary"]
    )
