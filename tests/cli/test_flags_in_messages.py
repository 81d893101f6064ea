"""Messages name settings as one writes them where one is: options on the command line, keywords in
Python.
"""

import json

import pytest
from typer.main import get_command

from makers.forked import run_penstock
from makers.tokenizers import tiny_tokenizer
from penstock.use.cli import build_app
from penstock.use.cli.flags import Flags, as_flags


@pytest.fixture(scope="module")
def prepare():
    return Flags.of(get_command(build_app(["prepare"])).commands["prepare"])


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "(set on_error to skip to leave such records out)",
            "(--on-error skip to leave such records out)",
        ),
        ("set on_damaged_file to skip to continue", "--on-damaged-file skip to continue"),
        (
            "records were rejected; set max_rejects higher",
            "records were rejected; set --max-rejects higher",
        ),
        (
            "set text_field to the column that holds the text",
            "set --text-field to the column that holds the text",
        ),
        ("set format to one of jsonl, text", "set --format to one of jsonl, text"),
        ("set overwrite to replace it", "--overwrite to replace it"),
        (
            "known: user; add roles: {tool: [ipython]}",
            "known: user; add --set 'roles={tool: [ipython]}'",
        ),
        (
            "name it: fields: {prompt: q, completion: a}",
            "name it: --set 'fields={prompt: q, completion: a}'",
        ),
        ("call_ids: short gives such", "--set call_ids=short gives such"),
        ("on_rewrite: split; call_ids: keep", "--on-rewrite split; --set call_ids=keep"),
        ("drop_system_message: true removes it", "--set drop_system_message=true removes it"),
        ("train the text alone (media: drop), or", "train the text alone (--media drop), or"),
        ("raise max_tokens, or set too_long to drop", "raise --max-tokens, or --too-long drop"),
        ("is the role in roles_to_train?", "is the role in --roles-to-train?"),
        ("name it with field_messages", "name it with --set field_messages=…"),
        ("mask_history: true", "--mask-history"),
        ("on_error must be stop or skip; got 'x'", "--on-error must be stop or skip; got 'x'"),
        ("set template to a .jinja file or auto", "set --template to a .jinja file or auto"),
        ("separated by ';': set delimiter", "separated by ';': set --delimiter"),
        ("to show set tokenizer and template, and", "to show set --tokenizer and --template, and"),
        ("validation must be a share", "--validation must be a share"),
        ("the fields: field_messages: …, or", "the fields: --set 'field_messages=…', or"),
        ("of other forms set transform, which", "of other forms set --transform, which"),
        # What is no setting stays.
        ("set template by hand", "set template by hand"),
        ("the validation must be a share", "the validation must be a share"),
        ("a/run.yaml:3: chat: raise max_tokens", "a/run.yaml:3: chat: raise max_tokens"),
        ("the plan has max_tokens", "the plan has max_tokens"),
        ("tokenizer: no vocabulary there", "tokenizer: no vocabulary there"),
        (
            "a.jsonl:3: no layout: media or text_fields",
            "a.jsonl:3: no layout: media or text_fields",
        ),
        ('its "max_tokens" is 3', 'its "max_tokens" is 3'),
        ("max_tokens=3 in Python", "max_tokens=3 in Python"),
        ("x.max_tokens", "x.max_tokens"),
    ],
)
def test_settings_become_options(prepare, message, shown):
    assert as_flags(message, prepare) == shown


def test_other_verbs_have_their_own_options():
    verify = Flags.of(get_command(build_app(["verify"])).commands["verify"])
    assert (
        as_flags("roles: {tool: [x]}; set on_error to skip", verify)
        == "roles: {tool: [x]}; set on_error to skip"
    )


def test_an_error_of_the_command_line(tmp_path):
    tiny_tokenizer(tmp_path / "tok", ["a b c"], 300, ["<|im_start|>", "<|im_end|>"])
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    done = run_penstock("prepare", "a.jsonl", "-t", "tok", "-o", "out", cwd=tmp_path)
    assert "--on-error skip" in done.stderr
    assert "on_error" not in done.stderr
    chats = [{"messages": [{"role": "ipython", "content": "a"}]}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, chats)))
    done = run_penstock(
        "prepare", "b.jsonl", "-t", "tok", "-o", "out2", "--template", "chatml", cwd=tmp_path
    )
    assert "add --set 'roles={tool: [ipython]}' (--on-error skip" in done.stderr
