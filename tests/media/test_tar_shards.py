"""Tar shards of WebDataset become conversations: captions, JSON with several images, references
with ranges, damage.
"""

import io
import json
import tarfile

import pytest

from makers.image_data import model_folder, prepare
from makers.media import picture
from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.shards import verify
from penstock.data.sources import open_sources


def png(seed):
    out = io.BytesIO()
    picture(40, 50, seed).save(out, "PNG")
    return out.getvalue()


def tar_of(path, files):
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"), "qwen2_vl")


def said(parts):
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A thing."}]
    return json.dumps({"messages": messages}).encode()


@pytest.fixture
def shard(tmp_path):
    interleaved = [
        {"type": "text", "text": "0.png"}, {"type": "image", "image": "c.1.png"},
        {"type": "text", "text": " and "}, {"type": "image", "image": "0.png"},
    ]  # fmt: skip
    return tar_of(
        tmp_path / "shard-000.tar",
        [
            ("a/a.jpg", png(1)),
            ("a/a.txt", b"A red house.\n"),
            ("a/b.png", png(2)),
            ("a/b.json", said([{"type": "image"}, {"type": "text", "text": "What?"}])),
            ("a/c.0.png", png(3)),
            ("a/c.1.png", png(4)),
            ("a/c.json", said(interleaved)),
            ("a/d.json", said([{"type": "text", "text": "Hello"}])),
        ],
    )


def test_records_of_all_kinds(shard, model, tmp_path):
    dataset = prepare(shard, model, tmp_path / "data", verify_all=True)
    images = [[image.read() for image in one.images] for one in dataset]
    assert images == [[png(1)], [png(2)], [png(4), png(3)], []]
    texts = [dataset.loaded_tokenizer.decode(one.tokens) for one in dataset]
    assert "A red house." in texts[0]
    assert texts[2].startswith("<|im_start|>user\n0.png")
    assert dataset[0].images[0].name == f"{shard}/a.jpg"
    assert [one.origin.line for one in dataset] == [0, 1, 2, 3]
    assert verify(tmp_path / "data").faults == ()


def test_references_are_ranges_of_the_tar(shard, model, tmp_path):
    dataset = prepare(shard, model, tmp_path / "data", image_storage="reference")
    references = [json.loads(image.reference) for one in dataset for image in one.images]
    for reference, expected in zip(references, (png(1), png(2), png(4), png(3)), strict=True):
        assert reference["path"] == str(shard)
        begin, size = reference["begin"], reference["size"]
        assert shard.read_bytes()[begin : begin + size] == expected
    assert [image.read() for one in dataset for image in one.images] == [
        png(1),
        png(2),
        png(4),
        png(3),
    ]


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_a_cut_tar_is_damage(shard, model, tmp_path, keep):
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data.rstrip(b"\0")) * keep)])
    with pytest.raises(DamagedFileError, match="not a sound tar"):
        prepare(shard, model, tmp_path / "stopped")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("a.json", b"{")], "not JSON"),
        ([("a.jpg", b"x"), ("a.txt", b"\xff")], "not UTF-8"),
        ([("a.jpg", b"no image"), ("a.txt", b"Hi")], "not an image"),
        ([("a.jpg", png(1))], "no field|layout"),
    ],
)
def test_a_bad_record_is_named(files, message, model, tmp_path):
    path = tar_of(tmp_path / "x.tar", [("0.jpg", png(7)), ("0.txt", b"Good."), *files])
    with pytest.raises(RecordError, match=message):
        prepare(path, model, tmp_path / "stopped")
    kept = prepare(path, model, tmp_path / "data", on_error="skip")
    assert len(kept) == 1
    assert "\\x" not in (tmp_path / "data" / "rejected.jsonl").read_text(), "no bytes of images"


def test_texts_are_not_read_from_tars(shard):
    with pytest.raises(ConfigError, match="tar shards hold records with images"):
        open_sources(shard)


def folder_of(path, files):
    path.mkdir(parents=True)
    for name, data in files:
        (path / name).write_bytes(data)
    return path


def test_a_folder_of_images_with_captions(model, tmp_path):
    folder = folder_of(
        tmp_path / "images",
        [
            ("a.png", png(1)),
            ("a.txt", b"A red house.\n"),
            ("b.png", png(2)),
            ("b.json", said([{"type": "image"}, {"type": "text", "text": "What?"}])),
            ("README", b"x"),
        ],
    )
    dataset = prepare(folder, model, tmp_path / "data", format="imagefolder")
    texts = [dataset.loaded_tokenizer.decode(one.tokens) for one in dataset]
    assert [len(one.images) for one in dataset] == [1, 1]
    assert [one.images[0].read() for one in dataset] == [png(1), png(2)]
    assert "A red house.<|im_end|>" in texts[0]
    assert "What?" in texts[1]
    assert "a.png" in str(dataset[0].origin)
    (folder / "c.png").write_bytes(png(3))
    with pytest.raises(RecordError, match=r"c\.png.*has no caption"):
        prepare(folder, model, tmp_path / "other", format="imagefolder")


def test_a_folder_with_metadata(model, tmp_path):
    lines = [
        {"file_name": "a.png", "text": "A red house."},
        {"file_name": "sub/b.png", "messages": json.loads(said([{"type": "image"}]))["messages"]},
    ]
    folder = folder_of(tmp_path / "images", [("a.png", png(1)), ("unlisted.png", png(5))])
    folder_of(folder / "sub", [("b.png", png(2))])
    (folder / "sub" / "b.png").rename(folder / "b.png")
    lines[1]["file_name"] = "b.png"
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = prepare(folder, model, tmp_path / "data", format="imagefolder")
    assert [one.images[0].read() for one in dataset] == [png(1), png(2)]
    assert "A red house.<|im_end|>" in dataset.loaded_tokenizer.decode(dataset[0].tokens)
    with pytest.raises(ConfigError, match="prepare them as chats"):
        open_sources(folder, format="imagefolder")
    notices: list[str] = []
    open_sources(folder, notice=notices.append)
    assert "images with captions are read with format imagefolder" in notices[0]
