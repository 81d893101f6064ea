"""drop_duplicates on conversations with images: equal ones have the same images, and assets of
dropped ones go.
"""

import json

import pytest

import penstock as ps
from makers.image_data import model_folder, prepare
from makers.media import picture
from makers.object_store import s3_store
from penstock.data.shards import verify


def write_chats(tmp_path):
    """Conversations about three pictures; the documents of rows 0, 1, 3, 4 and 7 are new."""
    (tmp_path / "raw").mkdir()
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        picture(84, 112, seed=seed).save(tmp_path / f"raw/{name}.png")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "word"}]}

    def record(name, text):
        asked = {"role": "user", "content": f"{'<image>' * bool(name)}{text}"}
        return {"messages": [asked, answer], "images": [name] * bool(name)}

    records = [
        record(name, text)
        for name, text in [
            ("a.png", "What?"),
            ("b.png", "What?"),
            ("a.png", "What?"),
            ("", "What?"),
            ("c.png", "Who?"),
            ("c.png", "Who?"),
            ("b.png", "What?"),
            ("a.png", "Who?"),
            ("", "What?"),
        ]
    ]
    (tmp_path / "raw/chats.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return tmp_path / "raw/chats.jsonl"


def test_other_pictures_of_the_same_size_are_other_documents(tmp_path):
    model, chats = model_folder(tmp_path, "qwen2_vl"), write_chats(tmp_path)
    whole = prepare(chats, model, tmp_path / "whole", part_bytes=300)
    some = prepare(chats, model, tmp_path / "some", part_bytes=300, drop_duplicates=True)
    verify(some.path)
    rows = [0, 1, 3, 4, 7]
    assert len(some) == len(rows)
    for row, found in zip(rows, some[0 : len(some)], strict=True):
        expected = whole[row]
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert [image.read() for image in found.images] == [
            image.read() for image in expected.images
        ]
    stored = {path.name: path.stat().st_size for path in some.path.glob("*.assets")}
    assert stored == {
        shard.file.replace(".arrow", ".assets"): shard.assets
        for shard in some.manifest.shards
        if shard.assets
    }
    next(iter(ps.Loader(some.path, sequence_length=256, rows_per_step=2)))


@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_pictures_go_to_a_store_with_their_shards(tmp_path, monkeypatch, drop_duplicates):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    model, chats = model_folder(tmp_path, "qwen2_vl"), write_chats(tmp_path)
    (tmp_path / "store/bucket").mkdir(parents=True)
    options = {"part_bytes": 300, "drop_duplicates": drop_duplicates}
    here = prepare(chats, model, tmp_path / "here", **options)
    with s3_store(tmp_path / "store", monkeypatch) as store:
        there = prepare(chats, model, "s3://bucket/chats", **options)
        assert there.manifest == here.manifest
        assert bool(store.count(".assets", "GET")) == drop_duplicates
    names = [path.relative_to(here.path) for path in here.path.rglob("*") if path.is_file()]
    assert sum(name.suffix == ".assets" for name in names) > 1
    for name in names:
        assert (tmp_path / "store/bucket/chats" / name).read_bytes() == (
            here.path / name
        ).read_bytes(), name
    stored = [path for path in (tmp_path / "store/bucket/chats").rglob("*") if path.is_file()]
    assert len(stored) == len(names)
