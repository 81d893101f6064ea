"""Chats: killed at any moment and started again, prepare ends with the same bytes."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from prepare_cases import Killed, contents, dying, slowly
from test_prepare_chat import DATED, make_chats

from makers.datasets import prepare_here
from makers.processes import child_environment
from makers.tokenizers import CHATML
from patience import wait_for
from penstock import load_tokenizer, prepare

OPTIONS = {
    "part_bytes": 2_000,
    "validation": 0.2,
    "on_error": "skip",
    "on_rewrite": "split",
    "date": "2026-01-02",
}


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps(record) for record in make_chats(60)]
    lines[7], lines[31] = "{broken", json.dumps({"messages": [{"role": "nobody", "content": "a"}]})
    path.write_text("\n".join(lines))
    return path


prepare_parts = partial(prepare_here, template=DATED, **OPTIONS)


def test_killed_at_every_rename_and_sync(tmp_path, raw, chat_tokenizer, monkeypatch):
    prepare_parts(raw, chat_tokenizer, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    assert {"train/chat.json", "train/chat_template.jinja", "rejected.jsonl"} <= set(whole)
    steps = [0, -1]
    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), steps))
    deaths = 0
    for die_at in range(1, 400, 7):
        steps[0], steps[1] = 0, die_at
        try:
            prepare_parts(raw, chat_tokenizer, tmp_path / f"killed {die_at}")
        except Killed:
            deaths += 1
            steps[1] = -1
            prepare_parts(raw, chat_tokenizer, tmp_path / f"killed {die_at}")
        assert contents(tmp_path / f"killed {die_at}") == whole
        if steps[1] != -1:
            break
    assert deaths > 10


@pytest.mark.slow
def test_kill_9_between_parts(tmp_path, raw, chat_tokenizer):
    chat_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "template.jinja").write_text(CHATML)
    code = (
        "import sys; from penstock import prepare; from prepare_cases import "
        "slowly\nprepare(*sys.argv[1:2], tokenizer=sys.argv[2], output=sys.argv[3], "
        "template=sys.argv[4], processes=2, progress=False, transform=slowly, part_bytes=500, "
        "on_error='skip')"
    )
    arguments = [
        str(tmp_path / name) for name in ("chats.jsonl", "tokenizer", "killed", "template.jinja")
    ]
    for parts in (2, 7):
        environment = child_environment(STOP_AT=f"{tmp_path / 'killed'}:{parts}")
        child = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
        wait_for(
            lambda parts=parts: len(list((tmp_path / "killed").glob("*.arrow"))) >= parts, child
        )
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    options = {
        "processes": 1,
        "progress": False,
        "transform": slowly,
        "part_bytes": 500,
        "on_error": "skip",
    }
    tokenizer, template = load_tokenizer(tmp_path / "tokenizer"), tmp_path / "template.jinja"
    for name in ("killed", "whole"):
        prepare(raw, tokenizer=tokenizer, template=template, output=tmp_path / name, **options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
