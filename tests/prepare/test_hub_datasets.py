"""Which files of a dataset on the Hub are read; and reading, pushing and pulling with the Hub's own
client.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.datasets import prepare_here
from makers.hub import Hub
from penstock import open_dataset
from penstock.core.errors import ConfigError, RecordError
from penstock.core.yaml_files import parse_yaml
from penstock.data.shards.cards import may_replace, write_card
from penstock.data.shards.format.manifest import Manifest
from penstock.data.sources import formats
from penstock.data.sources.files import SourceFile
from penstock.data.sources.formats import EXTENSIONS
from penstock.data.sources.hub_datasets import Choice, choose_files
from penstock.data.sources.opening import open_sources
from penstock.data.stores.hub import is_whole, name_in

WHERE = "hf://datasets/owner/words"


def choose(names, card="", suffixes=tuple(EXTENSIONS), notice=len, **choice):
    return choose_files(WHERE, names, card, Choice(**choice), suffixes, notice)


@pytest.mark.parametrize(
    ("url", "whole", "name"),
    [
        (WHERE, True, ""),
        (f"{WHERE}/", True, ""),
        (f"{WHERE}@v1", True, ""),
        (f"{WHERE}@refs/convert/parquet", True, ""),
        (f"{WHERE}@refs/pr/3/a/b.jsonl", False, "a/b.jsonl"),
        (f"{WHERE}@refs%2Fconvert%2Fparquet/a.parquet", False, "a.parquet"),
        (f"{WHERE}/data", False, "data"),
        (f"{WHERE}/*.parquet", False, "*.parquet"),
        ("hf://datasets/owner/*", False, "hf://datasets/owner/*"),
        ("hf://buckets/owner/words", False, "hf://buckets/owner/words"),
        ("s3://datasets/owner/words", False, "s3://datasets/owner/words"),
    ],
)
def test_urls(url, whole, name):
    assert is_whole(url) == whole
    assert name_in(url) == name


PARTS = ["train", "test", "dev", "val", "training", "data", "words", "trainer", "x"]
NAMES = st.builds(
    lambda folders, between, words, number, shard: (
        "/".join([*folders, between.join(words) + number + shard]) + ".jsonl"
    ),
    st.lists(st.sampled_from([*PARTS, "my-train", "test 2", "__old"]), max_size=2),
    st.sampled_from(["-", "_", ".", " ", ""]),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=2),
    st.sampled_from(["", "1", "-00"]),
    st.sampled_from(["", "", "-00000-of-00002"]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=5, unique=True))
def test_names_say_the_same_splits_as_to_datasets(tmp_path_factory, names):
    data_files = pytest.importorskip("datasets.data_files")
    root = tmp_path_factory.mktemp("repository")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    try:
        patterns = data_files.get_data_patterns(str(root))
    except ValueError:  # shards of a split with a name that it does not allow
        return
    except data_files.EmptyDatasetError:
        with pytest.raises(RecordError, match="no file of this dataset is read as data"):
            choose(names)
        return
    due = {
        str(split): sorted({os.path.relpath(file, root) for file in files})
        for split, files in data_files.DataFilesDict.from_patterns(
            patterns, base_path=str(root)
        ).items()
    }
    for split, files in due.items():
        assert choose(names, split=split) == files, patterns
    with pytest.raises(ConfigError, match=f"has the splits? {', '.join(due)}, and no 'other'"):
        choose(names, split="other")


CARD = """---
license: mit
configs:
- config_name: de
  data_files:
  - {split: train, path: [de/a*, ./de/b.jsonl]}
  - {split: test, path: de/test.jsonl}
- config_name: en
  data_dir: en
  data_files: "**/*.jsonl"
- config_name: named
  data_dir: named
---
# Words
"""
FILES = ["de/a1.jsonl", "de/a2.jsonl", "de/b.jsonl", "de/test.jsonl", "en/x/c.jsonl", "en/d.txt",
         "named/test.jsonl", "named/valid.jsonl", "README.md"]  # fmt: skip


def test_a_card_says_subsets_and_splits():
    said = []
    assert choose(FILES, CARD, subset="de", notice=said.append) == FILES[:3]
    assert said == [
        f"{WHERE}: reading subset de, split train; not read: subsets en, named; split test"
    ]
    assert choose(FILES, CARD, subset="de", split="test") == ["de/test.jsonl"]
    assert choose(FILES, CARD, subset="en") == ["en/x/c.jsonl"]
    assert choose(FILES, CARD, subset="named", split="validation") == ["named/valid.jsonl"]
    default = CARD.replace("config_name: en", "config_name: en\n  default: true")
    assert choose(FILES, default) == ["en/x/c.jsonl"]


def test_a_card_may_have_keys_and_names_that_are_no_texts():
    """Those of classes are their numbers, and `on` is a truth value."""
    card = (
        "---\non: x\n2020-01-01: y\ndataset_info:\n  features:\n  - name: label\n    dtype:\n"
        "      class_label: {names: {0: neg, 1: pos}}\nconfigs:\n- config_name: 2012\n"
        "  data_files: [{split: 7, path: de/a*}]\n- config_name: other\n  data_dir: en\n---\n"
    )
    assert choose(FILES, card, subset="2012", split="7") == FILES[:2]
    odd = card.replace("2012", "[2012]")
    with pytest.raises(ConfigError, match="`configs` must be a list of mappings"):
        choose(FILES, odd)
    deep = card.replace("on: x", f"on: {'[' * 60}{']' * 60}")
    with pytest.raises(ConfigError, match="is nested more than 50 levels deep"):
        choose(FILES, deep)
    with pytest.raises(ConfigError, match="the key a list or mapping is not text"):
        choose(FILES, card.replace("on: x", f"? {'[' * 60}{']' * 60}\n: x"))


def test_a_card_whose_settings_are_cut_is_refused(tmp_path, monkeypatch):
    def card_of(path):
        return formats._card(SourceFile(str(path), path.stat().st_size, ""), WHERE)

    monkeypatch.setattr(formats, "_CARD_BYTES", 1 << 10)
    settings = "---\nconfigs:\n" + "- {config_name: a, data_dir: de}\n" * 20
    path = tmp_path / "README.md"
    path.write_text(f"{settings}---\n{'words ' * 1000}")
    assert choose(FILES, card_of(path)) == ["de/test.jsonl"]
    path.write_text(settings + "# words\n" * 200 + "---\n")
    with pytest.raises(ConfigError, match=r"owner/words/README.md: has more than .*/FOLDER/\*"):
        card_of(path)
    path.write_text("words " * 1000)
    assert card_of(path).startswith("words")


def test_what_the_hub_has_converted():
    where = f"{WHERE}@refs/convert/parquet"
    names = [f"de/{split}/000{n}.parquet" for split in ("train_a", "train_b") for n in range(2)]
    names += ["en/partial-train/0000.parquet", "README.md"]

    def chosen(**choice):
        return choose_files(where, names, CARD, Choice(**choice), tuple(EXTENSIONS), len)

    assert chosen(subset="de", split="train_b") == names[2:4]
    assert chosen(subset="en") == [names[4]]
    with pytest.raises(ConfigError, match="has the splits train_a, train_b, and none"):
        chosen(subset="de")
    with pytest.raises(ConfigError, match="has the subsets de, en; choose one"):
        chosen()


@pytest.mark.parametrize(
    ("names", "card", "choice", "due"),
    [
        (FILES, CARD, {}, r"has the subsets de, en, named; choose one with subset \(--subset de\)"),
        (FILES, CARD, {"subset": "fr"}, "has no subset 'fr'; it has de, en, named"),
        (FILES, "", {"subset": "fr"}, "has no subset 'fr'; its README.md names none"),
        (FILES, CARD, {"subset": "named"}, r"and none is named .*--split validation"),
        (FILES, CARD, {"subset": "de", "split": "test[:5%]"}, "for parts and sums of splits"),
        (FILES, CARD.replace("de/a*", "https://host/a"), {"subset": "de"}, "files elsewhere"),
        (FILES, "---\nconfigs: {a: b}\n---\n", {}, "`configs` must be a list of mappings"),
        (FILES, "---\nconfigs: [a\n---\n", {}, "README.md:2: is not YAML"),
    ],
)  # fmt: skip
def test_an_open_choice_is_an_error(names, card, choice, due):
    with pytest.raises(ConfigError, match=due):
        choose(names, card, **choice)


def test_the_most_frequent_kind_of_file_is_the_data():
    names = ["a.parquet", "b.parquet", "meta.json", "notes.md", "dataset_infos.json", "c.png"]
    assert choose(names) == ["a.parquet", "b.parquet"]
    assert choose(names, suffixes=None) == [
        "a.parquet",
        "b.parquet",
        "c.png",
        "meta.json",
        "notes.md",
    ]


def test_subset_and_split_are_for_whole_datasets(tmp_path, chat_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    due = "subset and split choose the files of"
    with pytest.raises(ConfigError, match=due):
        open_sources(tmp_path / "a.jsonl", split="test")
    with pytest.raises(ConfigError, match=due):
        prepare_here(iter(["a"]), chat_tokenizer, tmp_path / "out", subset="de")


CHILD = """
import json, os, sys
import datasets
from huggingface_hub import HfApi
import penstock as ps
from penstock.core.errors import PenstockError
from penstock.data.stores.store import Store

datasets.disable_progress_bars()
folder, out = sys.argv[1], {}


def prepared(name, source, output=None, **options):
    made = ps.prepare(source, tokenizer=f"{folder}/tokenizer", output=output or f"{folder}/{name}",
                      processes=1, progress=False, **options)
    out[name] = [list(map(int, made[n].tokens)) for n in range(len(made))]


def refusal(name, work, *given, **options):
    try:
        work(*given, **options)
    except PenstockError as error:
        out[name] = str(error)


def upload(name, content, repository="me/chats"):
    HfApi().upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=repository,
                        repo_type="dataset")


chats = {"template": f"{folder}/calls.jinja"}
prepared("url", "hf://datasets/owner/chats", **chats)
stream = datasets.load_dataset("owner/chats", "tools", split="train", streaming=True)
prepared("streamed", stream, **chats)
prepared("slice", datasets.load_dataset("owner/chats", "tools", split="train[:50%]"), **chats)
prepared("rest", "hf://datasets/owner/chats", split="test", **chats)
prepared("glob", "hf://datasets/owner/chats@main/tools/*.parquet", **chats)
lines = "hf://datasets/owner/words/data/train.jsonl"
for size in None, 20:
    parts = ps.sources.open_sources(lines, part_bytes=size)
    out[f"words {size}"] = [list(ps.sources.read_texts(parts)), parts[0].files]
prepared("before", "hf://datasets/owner/words")
upload("data/train.jsonl", b'{"text": "FROM THE HUB"}\\n{"text": "AND MORE"}\\n', "owner/words")
prepared("after", "hf://datasets/owner/words", output=f"{folder}/before")
refusal("open", ps.prepare, "hf://datasets/owner/chats", tokenizer=f"{folder}/tokenizer",
        output=f"{folder}/x", split="other", progress=False, **chats)
refusal("absent", ps.sources.open_sources, "hf://datasets/owner/absent")

copy, pushed = ps.shards.copy_dataset, "hf://datasets/me/chats"
out["copied"] = [copy(f"{folder}/url", pushed), copy(f"{folder}/url", pushed)]
copy(pushed, f"{folder}/pulled")
out["pulled"] = ps.shards.verify(f"{folder}/pulled").sound
prepared("straight", "hf://datasets/owner/chats", output="hf://datasets/me/straight", **chats)


upload("README.md", b"# My own words")
out["again"] = copy(f"{folder}/url", pushed)
shard = next(one for one in os.listdir(f"{folder}/url") if one.endswith(".arrow"))
content = bytearray(open(f"{folder}/url/{shard}", "rb").read())
content[len(content) // 2] ^= 1
upload(shard, bytes(content))
store = Store(pushed)
store.listing()
store._files.invalidate_cache = lambda path=None: None
upload("late.txt", b"late")
found = [store.look_up(name) for name in ("late.txt", "README.md", "none.txt")]
out["looked up"] = [one and one.size for one in found]
out["stamps"] = [store.listing()["README.md"].stamp, found[1].stamp]
refusal("damaged", copy, pushed, f"{folder}/damaged")
refusal("refused", copy, f"{folder}/url", "hf://datasets/closed/chats")
json.dump(out, open(f"{folder}/out.json", "w"))
"""


TEMPLATE = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson(sort_keys=true) }}{% endfor -%}
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501


def parquet(records):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), sink)
    return sink.getvalue().to_pybytes()


def chat(number, **arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "!"}]
    said[1]["tool_calls"] = [call]
    return {"messages": said}


def test_reading_pushing_and_pulling(tmp_path, chat_tokenizer):
    """In a process of its own: the Hub's package reads the Hub's address when it is imported."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("datasets")
    chat_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "calls.jinja").write_text(TEMPLATE)
    train = [chat(1, a="x"), chat(2, b="y")]
    card = (
        "---\nconfigs:\n- config_name: tools\n  data_files:\n"
        "  - {split: train, path: tools/a.parquet}\n  - {split: test, path: tools/b.parquet}\n---\n"
    )
    files = {
        "README.md": card.encode(),
        "tools/a.parquet": parquet(train),
        "tools/b.parquet": parquet([chat(3, a="z", b="w")]),
    }
    words = b'{"text": "from the hub"}\n{"text": "and more"}\n'
    hub = Hub({"owner/chats": files, "owner/words": {"data/train.jsonl": words}})
    with hub.served() as environment:
        ran = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                **environment,
                "HF_HOME": str(tmp_path / "home"),
                "PENSTOCK_CACHE": str(tmp_path / "cache"),
            },
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    out = json.loads((tmp_path / "out.json").read_text())

    template = str(tmp_path / "calls.jinja")
    prepare_here(iter(train), chat_tokenizer, tmp_path / "plain", template=template)
    plain = open_dataset(tmp_path / "plain")
    assert out["url"] == [list(plain[n].tokens) for n in range(2)]
    assert out["url"] == out["streamed"] == out["straight"]
    assert out["slice"] == out["url"][:1]
    assert out["glob"] == out["url"] + out["rest"]
    assert out["open"] == (
        "hf://datasets/owner/chats: has the splits train, test, and no 'other'; choose one of them"
    )
    for size in None, 20:
        texts, (named,) = out[f"words {size}"]
        assert texts == ["from the hub", "and more"]
        assert named == "hf://datasets/owner/words/data/train.jsonl"
    # The same size as before, another content.
    after = "".join(chat_tokenizer.decode(one) for one in out["after"])
    assert after == "<|bos|>FROM THE HUB<|eos|><|bos|>AND MORE<|eos|>"
    assert out["absent"].startswith("hf://datasets/owner/absent: no such file")

    assert out["copied"][1] == 0
    assert out["pulled"] is True
    assert out["again"] == 0
    # A listing that another thread began before the file was written is not what answers.
    assert out["looked up"] == [4, len("# My own words"), None]
    assert len(set(out["stamps"])) == 1
    assert hub.private == {"me/chats", "me/straight"}
    pushed = hub.files["me/chats"]
    assert pushed["README.md"] == b"# My own words"
    assert "README.md: somebody wrote this card, so it stays as it is" in ran.stderr
    made = hub.files["me/straight"]["README.md"].decode()
    assert may_replace(made.encode())
    assert "documents: 2\n" in made
    assert 'ps.open_dataset("hf://datasets/me/straight")' in made
    assert hub.commits[-1].startswith("Upload")
    assert "differs from its checksum" in out["damaged"]
    assert out["refused"].startswith("hf://datasets/closed/chats: cannot be made: ")
    assert "log in with a token that may write" in out["refused"]


def test_a_card_holds_what_the_dataset_says(tmp_path, chat_tokenizer):
    source = [{"messages": [{"role": "user", "content": f"{n}?"},
                            {"role": "assistant", "content": "!"}]} for n in range(40)]  # fmt: skip
    report = prepare_here(
        iter(source), chat_tokenizer, tmp_path / "out", template="chatml", validation=0.3
    )

    def read(name):
        path = tmp_path / "out" / name
        return path.read_bytes() if path.is_file() else None

    manifests = {name: read(name) for name in ("train/manifest.json", "validation/manifest.json")}
    card = write_card("hf://datasets/me/chats@v1", manifests, read)
    front = parse_yaml(card.decode().split("---\n")[1], "card")[1]
    facts = {one["folder"]: one for one in front["penstock"]}
    for name, made in report.splits.items():
        assert facts[name]["documents"] == made.documents
        assert facts[name]["tokens"] == made.tokens
        assert facts[name]["fingerprint"] == made.fingerprint
        assert facts[name]["chat_template"] == "chatml"
        assert facts[name]["tokenizer_fingerprint"] == chat_tokenizer.fingerprint
    assert front["size_categories"] == ["n<1K"]
    assert b'ps.open_dataset("hf://datasets/me/chats@v1/train")' in card
    assert b"penstock copy hf://datasets/me/chats@v1 data/chats" in card
    assert may_replace(card)
    assert may_replace(None)
    assert not may_replace(card.replace(b"Documents", b"Texts"))
    assert not may_replace(b"# By hand")

    def half(name):
        return None if name == "train/chat.json" else read(name)

    revised = write_card("hf://datasets/me/chats@refs/pr/1", manifests, half).decode()
    assert "\n# chats\n" in revised
    assert "penstock copy hf://datasets/me/chats@refs/pr/1 data/chats " in revised
    assert "\n| chat template |  | `chatml` |\n" in revised


@pytest.mark.parametrize(
    ("documents", "size"),
    [(999, "n<1K"), (10**9 - 1, "100M<n<1B"), (10**9, "1B<n<10B"), (10**12, "n>1T")],
)
def test_a_card_says_the_size_in_the_words_of_the_hub(tmp_path, chat_tokenizer, documents, size):
    prepare_here(iter(["words"]), chat_tokenizer, tmp_path / "out")
    content = (tmp_path / "out" / "manifest.json").read_bytes()
    parse = Manifest.parse

    def large(content, where):
        return replace(parse(content, where), documents=documents)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "parse", large)
        card = write_card(WHERE, {"manifest.json": content}, lambda name: None).decode()
    assert f"size_categories:\n- {size}\n" in card
