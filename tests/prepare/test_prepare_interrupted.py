"""A run that goes on where another was killed, or over its results, takes from it only what would
come out now.
"""

import json
import os
import shutil
import sys
from functools import partial

import pytest
from prepare_cases import Killed, contents, dying

from makers.datasets import prepare_here
from penstock import load_tokenizer
from penstock.core.arrow import from_texts
from penstock.core.errors import OutputError
from penstock.data.shards import verify
from penstock.tokenizers import Tokenizer

FIRST = [f"alpha {number}" for number in range(40)]
OTHERS = {
    "others": [f"beta {number} beta" for number in range(40)],
    "fewer": FIRST[:20],
    "one less": FIRST[:-1],
    "more": [*FIRST, *FIRST[:7]],
    "the last differs": [*FIRST[:-1], "omega"],
    "the first differs": ["omega", *FIRST[1:]],
    "same": FIRST,
}


prepare_parts = partial(prepare_here, part_bytes=60)


@pytest.fixture
def die(monkeypatch):
    """Kills what `action` does where it would rename a file to a name that ends so."""
    replace = os.replace

    def killed(action, ending):
        def stop(source, target):
            if str(target).endswith(ending):
                raise Killed
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            with pytest.raises(Killed, match=r"^$"):
                action()

    return killed


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize(
    ("validation", "ending"),
    [(0, "report.json"), (0.3, "report.json"), (0.3, "validation/manifest.json")],
)
@pytest.mark.parametrize("renewed", [False, True])
def test_other_records_after_a_kill_between_manifest_and_report(
    tmp_path, tokenizer, die, others, validation, ending, renewed
):
    if renewed:
        prepare_parts(iter(["before", *FIRST]), tokenizer, tmp_path / "out", validation=validation)
    die(
        lambda: prepare_parts(iter(FIRST), tokenizer, tmp_path / "out", validation=validation),
        ending,
    )
    report = prepare_parts(iter(OTHERS[others]), tokenizer, tmp_path / "out", validation=validation)
    whole = prepare_parts(
        iter(OTHERS[others]), tokenizer, tmp_path / "whole", validation=validation
    )
    assert report.as_json(lasting=True) == whole.as_json(lasting=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    for split in report.splits:
        assert verify(tmp_path / "out" / split).sound


@pytest.mark.parametrize("others", ["fewer", "the last differs"])
def test_killed_again_at_every_step(tmp_path, tokenizer, die, others, monkeypatch):
    die(
        lambda: prepare_parts(iter(FIRST), tokenizer, tmp_path / "first", validation=0.3),
        "report.json",
    )
    prepare_parts(iter(OTHERS[others]), tokenizer, tmp_path / "whole", validation=0.3)
    steps = [0, -1]
    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), steps))
    for die_at in range(1, 1000, 5):
        steps[1] = -1
        shutil.copytree(tmp_path / "first", tmp_path / "out")
        steps[0], steps[1] = 0, die_at
        try:
            prepare_parts(iter(OTHERS[others]), tokenizer, tmp_path / "out", validation=0.3)
            break
        except Killed:
            steps[1] = -1
            prepare_parts(iter(OTHERS[others]), tokenizer, tmp_path / "out", validation=0.3)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")
    assert die_at > 50


def test_sums_of_weights_that_are_due_no_more(tmp_path, tokenizer, die):
    weighted = [{"text": text, "w": [{"begin": 3, "end": 7, "weight": 0.5}]} for text in FIRST]
    options = {"weights_field": "w"}
    die(
        lambda: prepare_parts(iter(weighted), tokenizer, tmp_path / "out", **options), "report.json"
    )
    assert (tmp_path / "out/weight_sums.f64").exists()
    prepare_parts(iter(FIRST), tokenizer, tmp_path / "out", **options)
    prepare_parts(iter(FIRST), tokenizer, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture
def files(tmp_path):
    """Five files of JSONL; each has a record with weights and a bad one."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(5):
        lines = [json.dumps({"text": f"{number} {text}"}) for text in FIRST]
        lines[3] = json.dumps(
            {"text": "water flows", "w": [{"begin": 5, "end": 11, "weight": 0.5}]}
        )
        lines[5] = "{broken"
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[4] ^= 3
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def drop(path):
    path.unlink()


@pytest.mark.parametrize(
    ("name", "harm", "redone"),
    [
        *[
            (name, harm, 5)
            for name in ("lengths.u32", "batches.u64", "weight_sums.f64")
            for harm in (drop, flip, cut)
        ],
        ("manifest.json", flip, 5),
        ("rejected.jsonl", drop, 5),
        ("rejected.jsonl", cut, 1),
    ],
)
def test_damage_beside_shards_is_not_taken_over(tmp_path, files, tokenizer, name, harm, redone):
    options = {"part_bytes": None, "on_error": "skip", "weights_field": "w"}
    prepare_parts(files, tokenizer, tmp_path / "out", **options)
    harm(tmp_path / "out" / name)
    (files / "0.jsonl").unlink()
    report = prepare_parts(files, tokenizer, tmp_path / "out", **options)
    assert report.parts - report.parts_resumed == min(redone, 4)
    prepare_parts(files, tokenizer, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert verify(tmp_path / "out").sound


@pytest.mark.parametrize(
    "ending", ["arrow.lengths", "arrow.batches", "arrow.weights", "rejected.jsonl"]
)
def test_files_that_went_away_after_a_kill(tmp_path, files, tokenizer, die, ending):
    options = {"part_bytes": None, "on_error": "skip", "weights_field": "w"}
    die(lambda: prepare_parts(files, tokenizer, tmp_path / "out", **options), "manifest.json")
    lost = sorted((tmp_path / "out").rglob(f"*{ending}"))
    for path in lost[:2]:
        path.unlink()
    assert prepare_parts(files, tokenizer, tmp_path / "out", **options).parts_resumed == 3
    prepare_parts(files, tokenizer, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture
def weird(monkeypatch):
    """Lets the vocabulary's own encoder disagree with the fast one on texts that hold this word."""
    encode = Tokenizer._encode_slowly

    def slowly(self, texts, own=None):
        if any(
            "weird" in text for text in (texts if isinstance(texts, list) else texts.to_pylist())
        ):
            texts = from_texts(["other"] * len(texts))
        return encode(self, texts, own)

    monkeypatch.setattr(Tokenizer, "_encode_slowly", slowly)


@pytest.fixture
def load(tmp_path, tokenizer):
    """Loads the tokenizer anew, since a look at the input may change one for good."""
    tokenizer.save(tmp_path / "tokenizer")
    return lambda: load_tokenizer(tmp_path / "tokenizer")


def encoders(output):
    return {record["encoder"] for record in json.loads((output / "parts.json").read_bytes())}


def test_parts_of_another_encoder_are_prepared_again(tmp_path, files, load, weird):
    options = {"part_bytes": None, "on_error": "skip"}
    assert prepare_parts(files, load(), tmp_path / "out", **options).encoder == "gigatoken"
    (files / "00.jsonl").write_text('{"text": "weird"}\n')
    report = prepare_parts(files, load(), tmp_path / "out", **options)
    assert (report.encoder, report.parts_resumed) == ("tokenizers", 0)
    assert encoders(tmp_path / "out") == {"tokenizers"}
    (files / "00.jsonl").unlink()
    report = prepare_parts(files, load(), tmp_path / "out", **options)
    assert (report.encoder, report.parts_resumed) == ("gigatoken", 0)
    assert encoders(tmp_path / "out") == {"gigatoken"}


def test_parts_of_another_encoder_after_a_kill(tmp_path, load, weird, die):
    texts = ["a" * 70, "b" * 70, "c" * 70]
    die(lambda: prepare_parts(iter(texts), load(), tmp_path / "out"), "report.json")
    report = prepare_parts(iter(["weird" * 14, *texts[1:]]), load(), tmp_path / "out")
    assert (report.encoder, report.parts, report.parts_resumed) == ("tokenizers", 3, 0)
    assert encoders(tmp_path / "out") == {"tokenizers"}


def test_processes_that_counted_lines_take_the_other_encoder(tmp_path, load, weird):
    """They were started before the look at the input."""
    (tmp_path / "large.jsonl").write_text('{"text": "weird"}\n' * 100)
    report = prepare_parts(
        tmp_path / "large.jsonl", load(), tmp_path / "out", part_bytes=900, processes=2
    )
    assert (report.encoder, report.parts) == ("tokenizers", 2)
    assert encoders(tmp_path / "out") == {"tokenizers"}


def earlier_version(output):
    """Make a finished preparation look like one of the first version, which noted less."""
    plan = json.loads((output / "prepare.json").read_bytes())
    plan["settings"]["on_error"] = "skip"
    (output / "prepare.json").write_text(json.dumps(plan))
    return plan


def test_settings_that_no_longer_decide_anything_are_no_change(tmp_path, files, tokenizer):
    options = {"part_bytes": None, "on_error": "skip"}
    prepare_parts(files, tokenizer, tmp_path / "out", **options)
    whole = contents(tmp_path / "out")
    plan = earlier_version(tmp_path / "out")
    assert prepare_parts(files, tokenizer, tmp_path / "out", **options).seconds is None
    del plan["files"]
    plan["inputs"] = ["of another form"]
    (tmp_path / "out/prepare.json").write_text(json.dumps(plan))
    (tmp_path / "out/parts.json").unlink()
    report = prepare_parts(files, tokenizer, tmp_path / "out", **options)
    assert (report.parts_resumed, report.input_changes) == (0, {})
    assert contents(tmp_path / "out") == whole
    earlier_version(tmp_path / "out")
    with pytest.raises(OutputError, match=r"preparation.*keep_text.*False"):
        prepare_parts(files, tokenizer, tmp_path / "out", keep_text=True, **options)


def test_without_gigatoken_the_bytes_are_the_same(tmp_path, files, load, die, monkeypatch):
    """Whether it was missing from the beginning, or went away between a kill and the next run."""
    options = {"part_bytes": None, "on_error": "skip"}
    whole = prepare_parts(files, load(), tmp_path / "whole", **options)
    die(lambda: prepare_parts(files, load(), tmp_path / "out", **options), "manifest.json")
    for module in ("gigatoken", "gigatoken.gigatoken_rs"):
        monkeypatch.setitem(sys.modules, module, None)
    assert prepare_parts(files, load(), tmp_path / "slow", **options).encoder == "penstock"
    report = prepare_parts(files, load(), tmp_path / "out", **options)
    assert (whole.encoder, report.encoder, report.parts_resumed) == ("gigatoken", "penstock", 0)
    names_the_encoder = {"report.json", "parts.json"}
    wanted = {
        name: data
        for name, data in contents(tmp_path / "whole").items()
        if name not in names_the_encoder
    }
    for folder in ("slow", "out"):
        found = contents(tmp_path / folder)
        assert {
            name: data for name, data in found.items() if name not in names_the_encoder
        } == wanted
