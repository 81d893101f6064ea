"""Conversations with images become datasets: assets, rejects, resume, verification, and rows with
media.
"""

import io
import json
import shutil
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from contracts import assert_exact_resume, assert_ranks_share_steps
from makers.image_data import model_folder, prepare, write_records
from makers.media import chat, picture
from penstock.core.errors import ConfigError, CorruptionError, RecordError
from penstock.data.shards import extend_dataset, verify, write_megatron
from penstock.media.images import ImageSettings, read_picture
from penstock.media.loading import digest_of
from penstock.media.processor import join_arrays, load_processor
from penstock.use.inspection.datasets import view_document
from penstock.use.inspection.plan_report import dry_run


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    model = model_folder(folder, "qwen2_vl")
    source = write_records(folder / "raw")
    prepare(source, model, folder / "data", verify_all=True)
    return folder


@pytest.fixture
def dataset(home):
    return ps.open_dataset(home / "data")


def loader(home, **settings):
    settings = {"sequence_length": 512, "rows_per_step": 2, "seed": 3, **settings}
    return ps.Loader({str(home / "data"): 1.0}, **settings)


def test_images_of_all_forms_are_there(home, dataset):
    assert len(dataset) == 24
    assert [len(one.images) for one in dataset[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    for number, document in enumerate(dataset):
        for place, image in enumerate(document.images):
            data = (home / "raw" / f"{number % 9}_{place}.png").read_bytes()
            assert (image.read(), image.digest) == (data, digest_of(data))
            picture = read_picture(data, ImageSettings())
            assert (image.height, image.width) == (picture.height, picture.width)
            inside = document.tokens[image.begin : image.end]
            assert (inside == dataset.media.slot_id).sum() == image.slots
            assert not document.loss_weights[image.begin : image.end].any()
        assert document.loss_weights.sum() >= 1
    report = json.loads((home / "data" / "report.json").read_text())
    assert report["chats"]["images"]["verified"] == sum(len(one.images) > 0 for one in dataset)


def test_an_image_is_stored_once_a_shard(home, dataset):
    distinct = {
        image.digest: len(image.read()) + len(image.name) for one in dataset for image in one.images
    }
    assert sum(len(one.images) for one in dataset) > len(distinct)
    [assets] = (home / "data").glob("*.assets")
    assert assets.stat().st_size == sum(distinct.values())


def test_the_dataset_is_sound_and_brings_its_processor(home, dataset):
    assert verify(home / "data").faults == ()
    assert dataset.processor.fingerprint == load_processor(home / "model").fingerprint


def test_a_flipped_bit_in_an_image_is_found(home, tmp_path):
    shutil.copytree(home / "data", tmp_path / "data")
    [assets] = (tmp_path / "data").glob("*.assets")
    content = bytearray(assets.read_bytes())
    content[100] ^= 1
    assets.write_bytes(content)
    damaged = ps.open_dataset(tmp_path / "data")
    with pytest.raises(CorruptionError, match="differs from its digest"):
        [image.read() for one in damaged for image in one.images]
    reasons = " ".join(fault.reason for fault in verify(tmp_path / "data").faults)
    assert "checksum" in reasons
    assert "digest" in reasons
    with pytest.raises(CorruptionError, match="differs from its digest"):
        list(islice(loader(tmp_path), 40))


def test_a_flipped_bit_in_a_list_of_images_is_found(home, tmp_path, dataset):
    shutil.copytree(home / "data", tmp_path / "data")
    [shard] = (tmp_path / "data").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    digest = next(image.digest for one in dataset for image in one.images)
    content[content.index(digest)] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"differs.*checksums"):
        list(ps.open_dataset(tmp_path / "data"))


def test_cut_assets_are_found(home, tmp_path):
    shutil.copytree(home / "data", tmp_path / "data")
    [assets] = (tmp_path / "data").glob("*.assets")
    assets.write_bytes(assets.read_bytes()[:-50])
    with pytest.raises(CorruptionError, match="ends before byte"):
        [image.read() for one in ps.open_dataset(tmp_path / "data") for image in one.images]
    assert verify(tmp_path / "data").faults


def test_preparing_again_changes_nothing_and_new_records_keep_old_parts(home, tmp_path):
    shutil.copytree(home / "raw", tmp_path / "raw")
    source = tmp_path / "raw" / "chats.jsonl"
    first = prepare(source, home / "model", tmp_path / "data", part_bytes=3000)
    before = [one.images[0].key for one in first if one.images]
    again = prepare(source, home / "model", tmp_path / "data", part_bytes=3000)
    assert again.fingerprint == first.fingerprint
    lines = source.read_text().splitlines()
    (tmp_path / "raw" / "more.jsonl").write_text("\n".join(lines[:5]) + "\n")
    both = [source, tmp_path / "raw" / "more.jsonl"]
    ps.prepare(
        both,
        tokenizer=home / "model",
        output=tmp_path / "data",
        processor=home / "model",
        template="auto",
        on_missing_terminator="allow",
        progress=False,
        part_bytes=3000,
    )
    more = ps.open_dataset(tmp_path / "data")
    assert len(more) == 29
    assert verify(tmp_path / "data").faults == ()
    assert [one.images[0].key for one in more if one.images][: len(before)] == before


def test_the_fingerprint_does_not_depend_on_parts(home, tmp_path, dataset):
    parts = prepare(
        home / "raw" / "chats.jsonl", home / "model", tmp_path / "data", part_bytes=2000
    )
    assert len(parts.manifest.shards) > 2
    assert parts.fingerprint == dataset.fingerprint


def test_a_split_keeps_each_image_with_its_document(home, tmp_path):
    prepare_options = {"validation": 0.4}
    ps.prepare(
        home / "raw" / "chats.jsonl",
        tokenizer=home / "model",
        output=tmp_path / "data",
        template="auto",
        processor=home / "model",
        on_missing_terminator="allow",
        progress=False,
        **prepare_options,
    )
    found = [ps.open_dataset(tmp_path / "data" / split) for split in ("train", "validation")]
    assert sum(map(len, found)) == 24
    assert all(
        len(one.images) and image.read() for part in found for one in part for image in one.images
    )


def test_references_lead_to_the_files(home, tmp_path):
    shutil.copytree(home / "raw", tmp_path / "raw")
    kept = prepare(
        tmp_path / "raw" / "chats.jsonl",
        home / "model",
        tmp_path / "data",
        image_storage="reference",
    )
    images = [image for one in kept for image in one.images]
    assert any(image.reference is not None for image in images)
    assert any(image.reference is None for image in images), "those in records are stored"
    assert all(image.read() for image in images)
    referred = next(image for image in images if image.reference is not None)
    picture(9, 9).save(referred.name)
    with pytest.raises(CorruptionError, match="is not the one that was prepared"):
        referred.read()


def test_columns_are_added_to_images(home, tmp_path, dataset):
    more = extend_dataset(
        dataset, tmp_path / "more", {"score": (np.zeros(len(one.tokens)) for one in dataset)}
    )
    assert all(
        a.images[n].key == b.images[n].key
        for a, b in zip(more, dataset, strict=True)
        for n in range(len(b.images))
    )
    assert verify(tmp_path / "more").faults == ()


def test_a_format_without_images_is_refused(dataset, tmp_path):
    with pytest.raises(ConfigError, match="has images"):
        write_megatron(dataset, tmp_path / "m", drop_spans=True)


def as_png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_columns_of_images_of_the_hub(home, tmp_path):
    """Parts of type image without a value, and a column of `{bytes, path}`, as `datasets` writes
    both to Parquet.
    """
    images = [
        [{"bytes": as_png(picture(60, 80, seed)), "path": f"{seed}.png"}] for seed in range(3)
    ]
    messages = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A thing."}]},
        ]
    ] * 3
    pq.write_table(pa.table({"messages": messages, "images": images}), tmp_path / "a.parquet")
    found = prepare(tmp_path / "a.parquet", home / "model", tmp_path / "data")
    assert [(one.images[0].name, one.images[0].read()) for one in found] == [
        (f"{seed}.png", images[seed][0]["bytes"]) for seed in range(3)
    ]


REFUSED = {
    "missing": ({"image": "no.png"}, "No such file"),
    "truncated": ({"image": "cut.png"}, "damaged|read"),
    "not an image": ({"image": "text.png"}, "not an image"),
    "elongated": ({"image": "long.png"}, "elongated"),
    "several": ({"image": "good.png", "url": "good.png"}, "several"),
    "video": (None, 'type "video"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_image_rejects_its_record_with_its_place(home, tmp_path, case):
    value, message = REFUSED[case]
    good = as_png(picture(40, 50))
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "cut.png").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.png").write_bytes(b"hello")
    (tmp_path / "long.png").write_bytes(as_png(picture(2, 500)))
    bad = {"type": "video", "video": "a.mp4"} if value is None else {"type": "image", **value}
    records = []
    for part in ({"type": "image", "image": "good.png"}, bad):
        content = [part, {"type": "text", "text": "What?"}]
        records.append(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": "Yes."},
                ]
            }
        )
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    with pytest.raises(RecordError, match=message) as caught:
        prepare(tmp_path / "a.jsonl", home / "model", tmp_path / "stopped")
    assert "a.jsonl:2: message 0" in str(caught.value)
    kept = prepare(tmp_path / "a.jsonl", home / "model", tmp_path / "data", on_error="skip")
    assert len(kept) == 1
    rejected = (tmp_path / "data" / "rejected.jsonl").read_text()
    assert json.loads(rejected)["line"] == 2


def test_without_a_processor_images_are_refused(home, tmp_path):
    with pytest.raises(RecordError, match="images need the processor"):
        ps.prepare(
            home / "raw" / "chats.jsonl",
            tokenizer=home / "model",
            output=tmp_path / "d",
            template="auto",
            progress=False,
        )


def test_more_references_than_images_are_an_error(home, tmp_path):
    picture(40, 50).save(tmp_path / "a.png")
    record = {"messages": chat([], "x"), "images": ["a.png", "a.png"]}
    record["messages"][0]["content"] = [{"type": "image"}] * 3
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(RecordError, match=r"refers.*image.*record.*does"):
        prepare(tmp_path / "a.jsonl", home / "model", tmp_path / "data")


def test_rows_have_the_arrays_of_their_images(home, dataset):
    wrapped = dataset.processor
    plan = loader(home)
    step = next(iter(plan))
    for number, row in enumerate(step):
        documents = [dataset[one.document] for one in plan.explain(0, number)]
        images = [image for one in documents for image in one.images]
        assert len(row.media) == len(images)
        expected = join_arrays(
            [wrapped.arrays(read_picture(one.read(), ImageSettings())) for one in images]
        )
        assert row.media.arrays.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(row.media.arrays[name], array)
        assert (row.tokens[row.media.slots] == wrapped.slot_id).all()
        assert (row.tokens == wrapped.slot_id).sum() == len(row.media.slots)
        assert row.media.documents.tolist() == [
            n for n, one in enumerate(documents) for _ in one.images
        ]
        assert row.media.digests == tuple(image.digest for image in images)
        assert (row.targets[0][row.media.slots - 1] == -100).all(), "an image is never a target"


def test_resume_and_ranks_are_exact_with_images(home):
    assert_exact_resume(lambda: loader(home, threads=0), 5)
    assert_ranks_share_steps(
        lambda part: loader(home, rows_per_step=4, data_parallel=part), [1, 2, 4], 3
    )


def test_joined_rows_have_the_images_of_all(home):
    step = next(iter(loader(home, rows_per_step=3)))
    [whole] = step.joined(3)
    rows = list(step)
    assert len(whole.media) == sum(len(row.media) for row in rows)
    assert (whole.tokens[whole.media.slots] == rows[0].media.blank.tokens[0]).all()
    assert whole.media.positions.shape == (4, 1, 3 * 512)
    both = step.arrays()["media"]
    np.testing.assert_array_equal(both.slots, whole.media.slots)
    documents = whole.document_ids[whole.media.slots]
    of_images = np.repeat(
        whole.media.documents,
        np.diff(np.searchsorted(whole.media.slots, [*whole.media.begins, 1536])),
    )
    np.testing.assert_array_equal(documents, of_images)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": "concat"}, "packing 'concat' cuts documents"),
        ({"attention": "row"}, "joins documents"),
        (
            {"requirements": ps.InputRequirements(loss_weights=True)},
            "does not say that it sees them",
        ),
        (
            {"requirements": ps.InputRequirements(loss_weights=True, images=False)},
            "cannot see them",
        ),
    ],
)
def test_what_would_lose_images_is_refused(home, settings, message):
    with pytest.raises(ConfigError, match=message):
        loader(home, **settings)


def test_images_are_never_cut(home):
    for policy in ("split", "truncate", "keep_end"):
        with pytest.raises(ConfigError, match="would cut images"):
            ps.Loader(
                ps.Source(home / "data", too_long=policy), sequence_length=512, rows_per_step=2
            )
    short = ps.Loader(ps.Source(home / "data", max_epochs=1), sequence_length=72, rows_per_step=1)
    steps = list(short)
    assert short.dropped
    slot_id = short.datasets[0].media.slot_id
    assert all(
        (row.tokens == slot_id).sum() == len(row.media.slots) for step in steps for row in step
    )
    assert any(len(row.media) for step in steps for row in step)


@pytest.mark.parametrize("patches", [None, 200])
def test_rows_with_images_keep_to_a_limit_of_documents(home, patches):
    """A capacity implies it, next to a limit of patches too; no image is lost."""
    need = ps.InputRequirements(
        loss_weights=True, cu_seqlens=True, cu_seqlens_capacity=4, images=True
    )
    source = ps.Source(home / "data", max_epochs=1)
    options = {"sequence_length": 512, "rows_per_step": 2, "patches_per_row": patches}
    limited, free = ps.Loader(source, requirements=need, **options), ps.Loader(source, **options)
    rows = [row for step in limited for row in step]
    assert max(row.num_documents for row in rows) == 2
    assert {row.cu_seqlens.shape for row in rows} == {(4,)}
    assert (
        sum(len(row.media) for row in rows)
        == sum(len(row.media) for step in free for row in step)
        > 0
    )


def test_inspection_names_images_and_counts_patches(home, dataset):
    number = next(n for n, one in enumerate(dataset) if len(one.images) > 1)
    view = view_document(dataset, number, dataset.loaded_tokenizer)
    image = dataset[number].images[0]
    assert len(view.texts) == len(view.tokens)
    assert view.texts[image.begin].endswith(f"{image.width}x{image.height}, {image.slots} slots]")
    assert set(view.texts[image.begin + 1 : image.end]) == {""}
    limited = loader(home, rows_per_step=4, data_parallel=(0, 4), patches_per_row=200)
    report = dry_run(limited, 3)
    patches = [sum(image.patches for image in one.images) for one in dataset]
    plan = loader(home, rows_per_step=4, patches_per_row=200)
    of_rows = [
        sum(patches[one.document] for one in plan.explain(step, row))
        for step in range(3)
        for row in range(4)
    ]
    assert report.row_patches == (pytest.approx(np.mean(of_rows)), max(of_rows))
    halves = [np.array(of_rows[at : at + 4]).reshape(2, 2).sum(1) for at in range(0, 12, 4)]
    assert report.patch_spread[2] == pytest.approx(
        np.mean([both.max() / both.mean() for both in halves])
    )
    assert max(of_rows) <= 200
    free = dry_run(loader(home, rows_per_step=4, data_parallel=(0, 4)), 3)
    assert free.row_patches[1] > 200


def test_the_result_is_the_same_for_any_number_of_processes(home, tmp_path):
    options = {"part_bytes": 20_000}
    for processes in (1, 2):
        prepare(
            home / "raw" / "chats.jsonl",
            home / "model",
            tmp_path / str(processes),
            processes=processes,
            **options,
        )
    files = sorted(path.name for path in (tmp_path / "1").glob("part-*"))
    assert len(files) > 4
    assert files == sorted(path.name for path in (tmp_path / "2").glob("part-*"))
    for name in [*files, "manifest.json", "lengths.u32"]:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_sources_may_have_smaller_images(home, dataset, tmp_path):
    source, model = home / "raw" / "chats.jsonl", home / "model"
    report = ps.prepare(
        source,
        tokenizer=model,
        output=tmp_path / "small",
        processor=model,
        template="auto",
        verify_all=True,
        on_missing_terminator="allow",
        shrink_pixels=5000,
        progress=False,
    ).report
    small = ps.open_dataset(tmp_path / "small")
    pairs = [
        pair
        for one, two in zip(dataset, small, strict=True)
        for pair in zip(one.images, two.images, strict=True)
    ]
    assert {now.digest == before.digest for before, now in pairs} == {True}
    shrunk = [now for before, now in pairs if before.height * before.width > 5000]
    assert shrunk
    assert all(now.height * now.width <= 5000 for now in shrunk)
    assert f"{len(shrunk)} of them made smaller" in report.as_text()
    assert sum(now.patches for now in shrunk) < sum(before.patches for before, _ in pairs)
    # Rows take each source's images as it was prepared.
    both = ps.Loader(
        {str(home / "data"): 1.0, str(tmp_path / "small"): 1.0},
        sequence_length=512,
        rows_per_step=4,
    )
    patches = {image.patches for data in (dataset, small) for one in data for image in one.images}
    step = next(iter(both))
    assert {int(count) for row in step for count in row.media.patches} <= patches


def test_long_conversations_with_images_are_cut_at_a_turn(home, tmp_path):
    picture(84, 112, 1).save(tmp_path / "a.png")
    turn = [
        {
            "role": "user",
            "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}],
        },
        {"role": "assistant", "content": "A thing."},
    ]
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": turn * 4}) + "\n" + json.dumps({"messages": turn})
    )
    model = home / "model"
    settings = {
        "tokenizer": model,
        "processor": model,
        "template": "auto",
        "on_missing_terminator": "allow",
    }
    whole = ps.prepare(
        tmp_path / "chats.jsonl", output=tmp_path / "whole", progress=False, **settings
    ).report
    lengths = [len(one.tokens) for one in ps.open_dataset(tmp_path / "whole")]
    cut = ps.prepare(
        tmp_path / "chats.jsonl",
        output=tmp_path / "cut",
        progress=False,
        max_tokens=2 * lengths[1] + 3,
        too_long="truncate",
        verify_all=True,
        **settings,
    ).report
    found = ps.open_dataset(tmp_path / "cut")
    assert [len(one.images) for one in found] == [2, 1]
    assert [len(one.tokens) for one in found] == [2 * lengths[1], lengths[1]]
    assert whole.documents == cut.documents == 2
    assert "truncated" in cut.as_text()
    with pytest.raises(RecordError, match=r"188.*tokens.*8.*messages.*most.*47"):
        ps.prepare(
            tmp_path / "chats.jsonl",
            output=tmp_path / "error",
            progress=False,
            max_tokens=lengths[1],
            **settings,
        )
