"""The run file: what is read, what is refused and with which words, overrides, and the schema."""

from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml

from makers.datasets import tokenizer_info
from makers.forked import run_penstock
from penstock import write_dataset
from penstock.core.errors import ConfigError, FormatError
from penstock.use.config import load_run, make_loader, run_schema

GOOD = """\
data:
  sources:
    - path: data/web
      share: 0.7
      max_epochs: 4
    - path: data/talk
      share: 0.3
      name: chat
      slice: [0, 0.5]
      shuffle: block
      too_long: error
      objective: causal
  changes:
    - step: 10
      shares: {chat: 0.5}
  loader:
    sequence_length: 256
    rows_per_step: 8
    seed: 7
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_a_run_file_becomes_the_settings_of_the_rooms(write):
    data = load_run(write(GOOD)).data
    web, chat = data.mixture.sources
    assert (web.path, web.name, web.share, web.max_epochs, web.shuffle) == (
        "data/web",
        "web",
        0.7,
        4,
        "full",
    )
    assert (chat.name, chat.slice, chat.shuffle, chat.too_long) == (
        "chat",
        (0, 0.5),
        "block",
        "error",
    )
    assert chat.objective.name == "causal"
    assert data.mixture.shares_at(9) == [0.7, 0.3]
    assert data.mixture.shares_at(10) == [0.7, 0.5]
    assert (data.loader.sequence_length, data.loader.seed, data.loader.packing) == (
        256,
        7,
        "best_fit",
    )
    assert data.target_distances is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "share: 0.7",
            "shares: 0.7",
            r"run.yaml:4: data.sources.0.shares: unknown key; did you mean 'share'\?",
        ),
        (
            "seed: 7",
            "zzz: 7",
            (
                r"run.yaml:19: data.loader.zzz: unknown key; known here: sequence_length, "
                r"rows_per_step"
            ),
        ),
        ("data:", "dota:", r"run.yaml:1: dota: unknown key; did you mean 'data'\?"),
        (
            "seed: 7",
            "seed: many",
            r"run.yaml:19: data.loader.seed: found 'many', expected a whole number",
        ),
        (
            "share: 0.7",
            "share: -1",
            (
                r"run.yaml:3: data.sources.0: source 'web': share must be at least 0 and finite, "
                r"got -1"
            ),
        ),
        (
            "shuffle: block",
            "shuffle: some",
            r"run.yaml:10: data.sources.1.shuffle: found 'some', expected 'full', 'block' or",
        ),
        (
            "objective: causal",
            "objective: ul3",
            r"run.yaml:12: data.sources.1.objective: found 'ul3', expected 'causal'",
        ),
        (
            "    sequence_length: 256\n",
            "",
            r"run.yaml:16: data.loader.sequence_length: missing; it is required: Token",
        ),
        ("name: chat", "name: web", r"run.yaml:1: data: two sources are called 'web'"),
        ("{chat: 0.5}", "{chad: 0.5}", r"run.yaml:1: data: the change at step 10 names 'chad'"),
        (
            "seed: 7",
            "seed: 7\n    seed: 8",
            r"run.yaml:20: data.loader.seed is given twice, first on line 19",
        ),
        ("seed: 7", "seed: [7", r"run.yaml:\d+: is not YAML"),
        (
            "    - path: data/web\n      share: 0.7\n      max_epochs: 4",
            "    - web",
            "sources.0: found 'web', expected a map",
        ),
    ],
)
def test_mistakes_are_refused_with_their_place(write, old, new, message):
    assert old in GOOD
    with pytest.raises(ConfigError, match=message):
        load_run(write(GOOD.replace(old, new, 1)))


def test_all_mistakes_are_told_at_once(write):
    text = GOOD.replace("share: 0.7", "shore: 0.7").replace("seed: 7", "sead: 7")
    with pytest.raises(ConfigError, match=r"(?s)sources.0.shore.*\n.*loader.sead"):
        load_run(write(text))


def test_other_files_are_refused(tmp_path, write):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read \(No such file"):
        load_run(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"top.*level.*file.*mapping"):
        load_run(write("- a\n"))
    with pytest.raises(ConfigError, match=r"top.*level.*file.*mapping"):
        load_run(write(""))


def test_overrides_reach_keys_indices_and_names(write):
    assignments = [
        "data.loader.seed=8",
        "data.loader.packing=next_fit",
        "data.sources.0.share=0.25",
        "data.sources.chat.share=1e-2",
        "data.sources.web.slice=[0.5, 1]",
    ]
    data = load_run(write(GOOD), assignments).data
    assert (data.loader.seed, data.loader.packing) == (8, "next_fit")
    assert [source.share for source in data.sources] == [0.25, 0.01]
    assert data.sources[0].slice == (0.5, 1)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.loader.seed", "expected key=value"),
        ("data.loader.sead=1", r"--set data.loader.sead=1: unknown key; did you mean 'seed'\?"),
        ("model.widht=3", r"--set model.widht=3: unknown key; did you mean 'width'\?"),
        ("data.sources.wob.share=1", r"no entry 'wob' in the list; it has 0 \(web\), 1 \(chat\)"),
        ("data.loader.seed.deep=1", "nothing can be set at 'deep', since it would be inside 7"),
        ("data.loader.seed=[1", "the value: is not YAML"),
        (
            "data.loader.seed=many",
            "--set data.loader.seed=many: found 'many', expected a whole number$",
        ),
        (
            "data.sources.web={path: a, shore: 1}",
            "--set data.sources.web=.*: data.sources.0.shore: unknown key; did you mean 'share'",
        ),
        (
            "data.sources.web.share=-1",
            (
                r"run.yaml:3: data.sources.0 \(with --set data.sources.web.share=-1\): source "
                r"'web': share must be"
            ),
        ),
        (
            "data.sources.web.name=chat",
            (
                r"run.yaml:1: data \(with --set data.sources.web.name=chat\): two sources are "
                r"called 'chat'"
            ),
        ),
    ],
)
def test_wrong_overrides_are_refused(write, assignment, message):
    with pytest.raises(ConfigError, match=message):
        load_run(write(GOOD), [assignment])


def test_other_keys_keep_their_line_beside_an_override(write):
    with pytest.raises(ConfigError, match=r"run.yaml:19: data.loader.sead"):
        load_run(write(GOOD.replace("seed: 7", "sead: 7")), ["data.loader.packing=concat"])


def test_a_source_that_is_missing_is_named_with_its_run_file(write, tmp_path):
    with pytest.raises(FormatError, match=r"run.yaml.*'web': data/web.*folder"):
        make_loader(load_run(write(GOOD)).data, run_file="run.yaml")
    shown = run_penstock("plan", write(GOOD))
    assert (
        shown.returncode,
        f"{tmp_path / 'run.yaml'}: source 'web': data/web: " in shown.stderr,
    ) == (1, True)


def test_what_the_loader_refuses_is_named_with_its_run_file(write, tmp_path):
    arrays = [np.arange(4)]
    for name, vocab_size in (("web", 9), ("talk", 8)):
        info = tokenizer_info(name, vocab_size=vocab_size)
        write_dataset(tmp_path / name, arrays, tokenizer=info)
    text = GOOD.replace("data/web", str(tmp_path / "web")).replace(
        "data/talk", str(tmp_path / "talk")
    )
    with pytest.raises(ConfigError, match=r"a.yaml.*prepare.*both.*tokenizer"):
        make_loader(load_run(write(text)).data, run_file="a.yaml")


def test_an_override_of_an_aliased_part_leaves_the_other(write):
    text = GOOD.replace("max_epochs: 4", "slice: &half [0, 0.5]").replace(
        "slice: [0, 0.5]", "slice: *half"
    )
    data = load_run(write(text), ["data.sources.web.slice.1=1"]).data
    assert [source.slice for source in data.sources] == [(0, 1), (0, 0.5)]


def test_the_schema_accepts_what_is_accepted_and_refuses_the_rest(write):
    schema = run_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(GOOD), schema)
    for wrong in ("shares: 0.7", "share: lots"):
        with pytest.raises(jsonschema.ValidationError, match=r"shares|lots"):
            jsonschema.validate(yaml.safe_load(GOOD.replace("share: 0.7", wrong)), schema)


def test_every_key_of_the_schema_is_described():
    schema = run_schema()
    objects = [schema, *schema["$defs"].values()]
    without = [
        f"{o['title']}.{k}"
        for o in objects
        for k, v in o["properties"].items()
        if not v.get("description")
    ]
    assert without == []


def test_schema_verb_prints_and_writes(tmp_path):
    printed = run_penstock("schema", check=True).stdout
    run_penstock("schema", "--output", tmp_path / "s.json", check=True)
    assert (tmp_path / "s.json").read_text() == printed
    refused = run_penstock("schema", "-o", tmp_path / "no" / "s.json")
    assert refused.returncode == 1
    assert "s.json: cannot be written (No such file or directory)" in refused.stderr


@pytest.mark.parametrize(
    "text",
    [
        "data: !!python/object:os.system x",
        "a: 2020-13-45",
        "? {a: 1}\n: 2",
        "data: &x {a: *x}",
        "a: " + "[" * 5000,
    ],
)
def test_yaml_that_cannot_be_taken_is_an_error_with_the_file(write, text):
    with pytest.raises(ConfigError, match=r"\.yaml"):
        load_run(write(text))


JOINED = """\
data:
  sources:
    - {path: [web-0, web-1], share: tokens}
    - {path: "talk-*", share: tokens, max_epochs: 2}
  loader: {sequence_length: 16, rows_per_step: 2}
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, tokens in (("web-0", 5), ("web-1", 7), ("talk-0", 3), ("talk-1", 9), ("talk-2", 6)):
        write_dataset(tmp_path / name, [[*range(tokens)]] * 10, vocab_size=10)


def test_a_source_of_several_datasets_by_their_tokens(write, parts):
    jsonschema.validate(yaml.safe_load(JOINED), run_schema())
    run_file = write(JOINED)
    loader = make_loader(
        load_run(run_file, ["data.sources.talk-*.max_epochs=1"]).data, run_file=str(run_file)
    )
    assert [source.name for source in loader.mixture.sources] == ["web-0 and 1 more", "talk-*"]
    assert [len(corpus.parts) for corpus in loader.datasets] == [2, 3]
    assert loader.mixture.shares_at(0) == [120, 180]
    assert loader.mixture.sources[1].max_epochs == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[web-0, web-1]",
            "[]",
            r"run.yaml:3: data.sources.0: a source needs at least one dataset, got an empty list",
        ),
        ("[web-0, web-1]", "5", r"run.yaml:3: data.sources.0.path: found 5, expected"),
        (
            "[web-0, web-1]",
            "[web-0, 5]",
            r"run.yaml:3: data.sources.0.path.*: found .*5.*, expected",
        ),
        ("tokens}", "token}", r"run.yaml:3: data.sources.0.share: found 'token', expected"),
        (
            "tokens}",
            "0.5}",
            (
                r"run.yaml:1: data: source 'talk-\*' has share 'tokens' and source 'web-0 and 1 "
                r"more' has"
            ),
        ),
    ],
)
def test_mistakes_in_joined_sources_are_refused_with_their_place(write, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_run(write(JOINED.replace(old, new, 1)))


def test_a_glob_without_a_match_names_file_and_source(write, parts):
    run_file = write(JOINED.replace("talk-*", "nothing-*"))
    with pytest.raises(FormatError, match=r"run.yaml.*'nothing-\*'"):
        make_loader(load_run(run_file).data, run_file=str(run_file))
