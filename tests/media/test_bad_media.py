"""A bad image, sound or video ends nothing: its record is rejected with its place, wherever it is
read.
"""

import base64
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from makers import audio, media
from makers.image_data import model_folder
from makers.media import picture
from makers.media_files import (
    animation,
    chunk,
    encoded,
    film,
    forged_rate,
    long_flac,
    noise,
    sound,
    tones,
)
from penstock.core.errors import ConversationError, CorruptionError, RecordError
from penstock.learn.generation.images import ImageReader
from penstock.media.images import ImageSettings
from penstock.media.loading import load_frames, load_image, read_reference
from penstock.media.processor import HuggingFaceProcessor, load_processor

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")
GOOD = {
    "image": encoded(picture(84, 112), "PNG"),
    "audio": audio.as_wave(audio.samples(0.5)),
    "video": animation("GIF", 3),
}


def cut(data, share=0.5):
    return data[: int(len(data) * share)]


def nan_sound(value):
    samples = tones(1000)
    samples[123] = value
    return sound("WAV FLOAT", samples, audio.RATE)


def bad_images():
    head = struct.pack(">IIBBBBB", 30, 40, 8, 2, 0, 0, 0)
    short = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(300))) + chunk(b"IEND", b"")
    return {
        "nothing": (b"", "not an image of a known format"),
        "a text": (b"not an image", "not an image of a known format"),
        **{
            f"a {kind} that was cut": (cut(encoded(noise(), kind)), "")
            for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
        },
        "a PNG without its last rows": (b"\x89PNG\r\n\x1a\n" + short, "is damaged"),
        "floats": (encoded(Image.new("F", (30, 20)), "TIFF"), "32-bit numbers"),
        "too many pixels": (encoded(Image.new("1", (9000, 9943)), "PNG"), "the image"),
        "too elongated": (encoded(Image.new("RGB", (300, 1)), "PNG"), "too elongated"),
    }


def bad_sounds():
    return {
        "nothing": (b"", "not a sound of a known format"),
        "a text": (b"not a sound", "not a sound of a known format"),
        "a WAV that was cut": (cut(GOOD["audio"]), "the sound is damaged"),
        "a float WAV that was cut": (
            cut(sound("WAV FLOAT", tones(1000), audio.RATE)),
            "it was cut",
        ),
        "an MP3 that was cut": (cut(sound("MP3", tones(9000), 16_000)), "so it was cut"),
        "a FLAC that was cut": (
            cut(sound("FLAC PCM_16", tones(9000), 16_000), 0.9),
            "the sound is damaged",
        ),
        "an Ogg that was cut": (
            cut(sound("OGG VORBIS", tones(9000), 16_000), 0.9),
            "so it was cut",
        ),
        "not a number": (nan_sound(np.nan), "sample 123 of channel 0 is nan"),
        "infinite": (nan_sound(np.inf), "sample 123 of channel 0 is inf"),
        "absurd": (nan_sound(1e30), "sample 123 of channel 0 is 1e"),
        "a rate of 0": (forged_rate("WAV", 0), "0 samples a second; expected 100"),
        "a rate of 1": (forged_rate("WAV", 1), "1 samples a second; expected 100"),
        "a rate of 2³²": (forged_rate("WAV", 2**32 - 1), "4,294,967,295 samples a second"),
        "no samples": (audio.as_wave(audio.samples(0)), "the sound is empty"),
        "one sample": (audio.as_wave(np.zeros(1, np.float32)), "sound 0 is too small"),
        "too long": (long_flac(1_000_000), "62.5 s, and the processor reads at most 2.0 s"),
    }


def bad_videos():
    large = [Image.new("P", (9000, 9000), number) for number in range(2)]
    return {
        "nothing": (b"", "not a video that can be read"),
        "a text": (b"not a video", "not a video that can be read"),
        "a playlist": (
            b"#EXTM3U\n#EXTINF:9,\nfile:///etc/passwd\n",
            "not a video that can be read",
        ),
        "a GIF that was cut": (cut(animation("GIF", 5)), "the video is damaged"),
        "a WebP that was cut": (cut(animation("WEBP", 5)), "the video"),
        "an MP4 that was cut": (
            cut(film("MP4", 5)),
            "the video has no pictures, or ends before them",
        ),
        "a large GIF": (
            encoded(large[0], "GIF", save_all=True, append_images=large[1:]),
            "2 frames of 9000x9000",
        ),
    }


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Medium → a folder with a model that reads it."""
    folder = tmp_path_factory.mktemp("models")
    audio.processor().save_pretrained(folder / "hears")
    sees = model_folder(folder, "qwen2_vl")
    return {"image": sees, "video": sees, "audio": folder / "hears"}


def said(kind, value):
    content = [{"type": kind, kind: value}, {"type": "text", "text": "What?"}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "A thing."},
        ]
    }


def prepare(folder, kind, model, values, **more):
    """Prepare records with one medium each; returns the report, the dataset and the rejects."""
    lines = [json.dumps(said(kind, value)) for value in values]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    options = {
        "template": "auto",
        "on_missing_terminator": "allow",
        "progress": False,
        "on_error": "skip",
        "max_rejects": 100,
        "processes": 1,
        **({"video_frames": 2} if kind == "video" else {}),
        **more,
    }
    report = ps.prepare(
        folder / "chats.jsonl",
        tokenizer=model,
        output=folder / "data",
        processor=model,
        overwrite=True,
        **options,
    ).report
    rejected = folder / "data" / "rejected.jsonl"
    rejects = (
        [json.loads(line) for line in rejected.read_text().splitlines()]
        if rejected.exists()
        else []
    )
    return report, ps.open_dataset(folder / "data"), rejects


@pytest.mark.parametrize("as_path", [True, False])
@pytest.mark.parametrize(
    ("kind", "bad"), [("image", bad_images), ("audio", bad_sounds), ("video", bad_videos)]
)
def test_a_preparation_goes_on_and_counts_each(homes, tmp_path, kind, bad, as_path):
    pytest.importorskip("soxr")
    pytest.importorskip("av")
    values, expected = [], {}
    for number, (name, (data, says)) in enumerate(bad().items()):
        for content in (GOOD[kind], data):
            path = tmp_path / f"{number}_{len(values)}"
            path.write_bytes(content)
            values.append(path.name if as_path else {"bytes": base64.b64encode(content).decode()})
        if as_path or data:
            expected[len(values)] = name, says
        else:
            values.pop()
    report, dataset, rejects = prepare(tmp_path, kind, homes[kind], values)
    assert report.rejects == len(expected)
    assert len(dataset) == len(values) - len(expected)
    for reject in rejects:
        name, says = expected.pop(reject["line"])
        assert reject["file"].endswith("chats.jsonl")
        assert "message 0" in reject["reason"] or name == "one sample", name
        assert says in reject["reason"], (name, reject)
        noun = {"image": "image", "audio": "sound", "video": "video"}[kind]
        assert noun in reject["reason"], (name, reject)
        theirs = "image file is truncated"  # Pillow's words
        assert kind == "image" or "image" not in reject["reason"].replace(theirs, ""), (
            name,
            reject,
        )
    assert expected == {}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"bytes": 10**15}, "has the bytes 1000000000000000; expected bytes, base64"),
        ({"bytes": {"a": 1}}, "has the bytes {'a': 1}; expected bytes, base64"),
        ({"bytes": 1.5}, "has the bytes 1.5"),
        ({"bytes": [1, 2, 256]}, "has the bytes [1, 2, 256]"),
        ({"bytes": "%%%"}, "is not valid base64"),
        (
            {"url": {"url": {"url": {"url": {"url": {"url": {"url": {"url": {"url": "a"}}}}}}}}},
            "more than 8 fields deep",
        ),
        ("missing", "cannot be read: No such file"),
        ("", "needs one of"),
        (7, "is 7; expected a path"),
        ("memory://nowhere/a", "cannot be read"),
        ("nothing-known://a/b", "cannot be read"),
        ("/dev/zero", "it is no file, but a device or a pipe"),
        ("data:x/y,abc", "data URL begins"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_values_that_lead_nowhere_are_rejects(homes, tmp_path, kind, value, says):
    (tmp_path / "good").write_bytes(GOOD[kind])
    if kind == "video" and "deep" in says:
        says = "No such file"
    report, _, rejects = prepare(tmp_path, kind, homes[kind], ["good", value, "good"])
    assert report.rejects == 1
    assert rejects[0]["line"] == 2
    assert says in rejects[0]["reason"], rejects[0]
    assert kind == "image" or value == "" or "image" not in rejects[0]["reason"]


ODD = (
    AssertionError,
    AttributeError,
    MemoryError,
    RecursionError,
    RuntimeError,
    StopIteration,
    UserWarning,
    zlib.error,
)
PLACES = {
    "PIL.Image.open": "image video",
    "PIL.ImageFile.ImageFile.load": "image video",
    "PIL.ImageOps.exif_transpose": "image",
    "PIL.Image.Image.convert": "image video",
    "PIL.Image.Image.resize": "image",
    "PIL.Image.Image.save": "video film",
    "transformers.Qwen2VLProcessor._process_images": "image",
    "transformers.Qwen2VLProcessor.__call__": "image",
    "soundfile.SoundFile": "audio",
    "soundfile.SoundFile.read": "audio",
    "soxr.resample": "audio",
    "transformers.Qwen2AudioProcessor._process_audio": "audio",
    "transformers.Qwen2AudioProcessor.__call__": "audio",
    "av.open": "film",
}


def whole(kind):
    """A file of a medium that takes a library through all that it does."""
    if kind == "audio":
        return sound("FLAC PCM_16", tones(1234), 2 * audio.RATE)
    if kind == "image":
        return encoded(noise("RGBA", 85, 113), "PNG")
    return film("MP4", 3) if kind == "film" else animation("GIF", 4)


def read_all(kind, data, processor):
    """All that is done with a medium, by libraries."""
    shrinking = ImageSettings(shrink_pixels=5000, video_frames=2)
    if kind in ("video", "film"):
        return load_frames(data, "", shrinking, processor)
    loaded = load_image(data, "", shrinking, processor)
    picture = processor.read(data, shrinking)
    ids = processor.joint_ids(processor.placeholder, [picture])
    return processor._layout(loaded.size), processor.arrays(picture), ids


@pytest.mark.parametrize("error", ODD, ids=lambda error: error.__name__)
@pytest.mark.parametrize(
    ("kind", "place"), [(kind, place) for place in PLACES for kind in PLACES[place].split()]
)
def test_whatever_a_library_raises_is_an_error_of_the_record(monkeypatch, kind, place, error):
    pytest.importorskip(place.partition(".")[0])
    processor = HuggingFaceProcessor(
        audio.processor() if kind == "audio" else media.processor("qwen2_vl")
    )
    data = whole(kind)
    assert read_all(kind, data, processor)
    raised = []

    def fail(*_, **__):
        raised.append(place)
        raise error("odd")

    monkeypatch.setattr(place, fail)
    with pytest.raises(RecordError, match="odd"):
        read_all(kind, data, processor)
    assert raised


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_an_interrupt_is_no_reject(monkeypatch, kind):
    processor = HuggingFaceProcessor(
        audio.processor() if kind == "audio" else media.processor("qwen2_vl")
    )

    data = whole(kind)

    def interrupt(*_, **__):
        raise KeyboardInterrupt("now")

    monkeypatch.setattr("soundfile.SoundFile" if kind == "audio" else "PIL.Image.open", interrupt)
    with pytest.raises(KeyboardInterrupt, match="now"):
        read_all(kind, data, processor)


def test_an_image_of_the_size_that_a_processor_is_tried_with_has_slots():
    for family in ("qwen2_vl", "llava", "gemma3"):
        processor = HuggingFaceProcessor(media.processor(family))
        assert processor.slot_id >= 0
        assert (
            processor.layout((448, 448)).slots
            == HuggingFaceProcessor(media.processor(family)).layout((448, 448)).slots
            > 0
        )


@pytest.mark.parametrize(
    ("kind", "bad", "says"),
    [
        (
            "image",
            cut(encoded(noise("RGB", 85, 113), "PNG")),
            "image .*odd.*: the image .* is damaged",
        ),
        (
            "audio",
            nan_sound(np.nan),
            "sound .*odd.*: the sound is damaged: sample 123 of channel 0 is nan",
        ),
    ],
)
def test_damage_that_preparation_did_not_look_for_is_named_by_the_loader(
    homes, tmp_path, kind, bad, says
):
    (tmp_path / "odd").write_bytes(bad)
    (tmp_path / "good").write_bytes(GOOD[kind])
    # The first ones are compared with the processor's encoding, and decoded for that.
    report, _, _ = prepare(tmp_path, kind, homes[kind], [*["good"] * 6, "odd"], probe="header")
    assert report.rejects == 0
    loader = ps.Loader(tmp_path / "data", sequence_length=512, rows_per_step=1, threads=0)
    with pytest.raises(CorruptionError, match=rf"source .*, document \d: {says}"):
        list(zip(range(9), loader, strict=False))


def test_a_reference_that_leads_elsewhere_is_damage():
    for stored in (
        b"",
        b"{}",
        b"[1]",
        b'{"path": 3}',
        b'{"path": "a", "begin": "x"}',
        b'{"path": "a", "size": -5}',
        b"\xff",
    ):
        with pytest.raises(CorruptionError, match="not a reference to an image"):
            read_reference(stored)
    with pytest.raises(RecordError, match="No such file"):
        read_reference(b'{"path": "/nowhere/a.png"}')


@pytest.mark.parametrize(("kind", "bad"), [("image", bad_images), ("audio", bad_sounds)])
def test_prompts_refuse_the_same(homes, kind, bad):
    reader = ImageReader(load_processor(homes[kind]))
    for name, (data, says) in bad().items():
        text = base64.b64encode(data or b"\0").decode()
        part = {"type": kind, kind: f"data:{kind}/x;base64,{text}"}
        if name == "one sample":
            continue  # what stands for it shows only in the text
        with pytest.raises(ConversationError, match="message 0: ") as caught:
            reader.place([{"role": "user", "content": [part]}])
        assert not data or says in str(caught.value), name


def test_messages_about_sounds_say_so(homes, tmp_path):
    sounds = [
        {**said("audio", "a"), "audios": ["a"] * 3},
        {"messages": [{"role": "user", "content": [{"type": "audio"}] * 2}], "audios": ["good"]},
    ]
    (tmp_path / "good").write_bytes(GOOD["audio"])
    for record, says in zip(
        sounds, ("cannot be read", "refers to a sound that the record does not have"), strict=True
    ):
        record["messages"] = [*record["messages"], {"role": "assistant", "content": "Yes."}][:2]
        (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
        with pytest.raises(RecordError, match=says) as caught:
            ps.prepare(
                tmp_path / "chats.jsonl",
                tokenizer=homes["audio"],
                processor=homes["audio"],
                output=tmp_path / "data",
                template="auto",
                progress=False,
            )
        assert "image" not in str(caught.value)
