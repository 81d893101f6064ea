"""drop_duplicates on conversations with images: equal ones have the same images, and assets of dropped ones go."""

import json

import penstock as ps
from makers.image_data import model_folder, prepare
from makers.media import picture
from penstock.shards import verify


def test_other_pictures_of_the_same_size_are_other_documents(tmp_path):
    model = model_folder(tmp_path, "qwen2_vl")
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
            ("a.png", "What?"), ("b.png", "What?"), ("a.png", "What?"), ("", "What?"), ("c.png", "Who?"),
            ("c.png", "Who?"), ("b.png", "What?"), ("a.png", "Who?"), ("", "What?"),
        ]
    ]  # fmt: skip
    (tmp_path / "raw/chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    whole = prepare(tmp_path / "raw/chats.jsonl", model, tmp_path / "whole", part_bytes=300)
    some = prepare(tmp_path / "raw/chats.jsonl", model, tmp_path / "some", part_bytes=300, drop_duplicates=True)
    verify(some.path)
    rows = [0, 1, 3, 4, 7]
    assert len(some) == len(rows)
    for row, found in zip(rows, some[0 : len(some)], strict=True):
        expected = whole[row]
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert [image.read() for image in found.images] == [image.read() for image in expected.images]
    stored = {path.name: path.stat().st_size for path in some.path.glob("*.assets")}
    assert stored == {
        shard.file.replace(".arrow", ".assets"): shard.assets for shard in some.manifest.shards if shard.assets
    }
    next(iter(ps.Loader(some.path, sequence_length=256, rows_per_step=2)))
