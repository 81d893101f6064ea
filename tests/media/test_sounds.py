"""Sounds: decoded, prepared, packed, generated from and trained on, with Qwen2-Audio."""

import base64
import io
import json

import numpy as np
import pytest
import torch

import penstock as ps
from makers.audio import RATE, SECONDS, as_wave, model, processor, samples
from makers.image_data import prepare
from makers.media import picture
from penstock.core.errors import ConfigError, RecordError
from penstock.learn.generation import Engine, Sampling
from penstock.learn.generation.images import ImageReader
from penstock.learn.generation.session import fit_chat
from penstock.media.processor import HuggingFaceProcessor, join_arrays, load_processor
from penstock.media.sounds import read_sound
from penstock.models.theirs.attention import use_attention
from penstock.models.theirs.model import HuggingFaceModel

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")
LENGTHS = (0.5, 1.3, 2.0, 0.11)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    processor().save_pretrained(folder / "model")
    model().save_pretrained(folder / "model")
    lines = []
    for number in range(12):
        names = []
        for place in range(number % 3):
            name = f"{number}_{place}.wav"
            (folder / name).write_bytes(as_wave(samples(LENGTHS[(number + place) % 4], number)))
            names.append(name)
        if number % 2:
            data = [base64.b64encode((folder / name).read_bytes()).decode() for name in names]
            parts = [
                {"type": "input_audio", "input_audio": {"data": one, "format": "wav"}}
                for one in data
            ]
            content = [*parts, {"type": "text", "text": f"Number {number}?"}]
            record = {"messages": [{"role": "user", "content": content}]}
        else:
            text = "<audio>" * len(names) + f"Number {number}?"
            record = {"messages": [{"role": "user", "content": text}], "audios": names}
        record["messages"].append({"role": "assistant", "content": "word " * (1 + number % 7)})
        lines.append(json.dumps(record))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    prepare(folder / "chats.jsonl", folder / "model", folder / "data", verify_all=True)
    return folder


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_waves_of_all_widths(width, channels):
    values = samples(0.3)
    found = read_sound(as_wave(values, width, channels), RATE, RATE)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, atol=2.2 / (1 << (8 * min(width, 3) - 1)) + 1e-6)


def test_other_formats_and_rates():
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    values, out = samples(0.5), io.BytesIO()
    soundfile.write(out, values, RATE, format="FLAC")
    np.testing.assert_allclose(read_sound(out.getvalue(), RATE, RATE), values, atol=1e-4)
    assert len(read_sound(as_wave(values, rate=2 * RATE), RATE, RATE)) == len(values) // 2


def test_what_is_no_sound_is_refused():
    whole = as_wave(samples(0.5))
    for data, message in (
        (whole[:600], "damaged"),
        (as_wave(samples(0.0)), "empty"),
        (b"RIFF" + whole[4:30], "damaged"),
        (as_wave(samples(SECONDS + 0.1)), "2.1 s, and the processor reads at most 2.0 s"),
    ):
        with pytest.raises(RecordError, match=message):
            read_sound(data, RATE, SECONDS * RATE)
    pytest.importorskip("soundfile")
    with pytest.raises(RecordError, match="not a sound of a known format"):
        read_sound(b"not a sound", RATE, RATE)


def test_arrays_of_single_sounds_join_to_those_of_all():
    wrapped = HuggingFaceProcessor(processor())
    sounds = [samples(length, 1) for length in LENGTHS]
    joined = join_arrays([wrapped.arrays(one) for one in sounds])
    whole, _ = wrapped.inner._process_audio(sounds, sampling_rate=RATE, return_tensors="pt")
    assert set(joined) == {"input_features", "feature_attention_mask"}
    for name, array in joined.items():
        np.testing.assert_array_equal(array, whole[name].numpy(), err_msg=name)


def alone(inner, whole, document):
    """Logits by transformers' own forward, with what the processor gives for the sounds
    together.
    """
    given = {}
    if document.images:
        sounds = [read_sound(one.read(), RATE, SECONDS * RATE) for one in document.images]
        found, _ = whole._process_audio(sounds, sampling_rate=RATE, return_tensors="pt")
        given = {name: found[name] for name in ("input_features", "feature_attention_mask")}
    ids = torch.from_numpy(document.tokens.astype(np.int64))[None]
    return inner(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given
    ).logits[0]


def test_packed_rows_equal_documents_alone(home):
    dataset, wrapped, reference, whole = (
        ps.open_dataset(home / "data"),
        HuggingFaceModel(model()),
        model(),
        processor(),
    )
    assert dataset.processor.medium == "audio"
    loader = ps.Loader(
        ps.Source(home / "data", max_epochs=1), sequence_length=512, rows_per_step=1, seed=1,
        requirements=wrapped.requirements(),
    )  # fmt: skip
    row = next(iter(loader))[0]
    assert row.num_documents > 2
    assert len(row.media) > 1
    with torch.no_grad():
        packed = wrapped.logits(wrapped(wrapped.tensors(row)))[0]
        assert wrapped.images.way(row.media.blank) == "ours"
        use_attention(wrapped.inner, "sdpa")
        for number, one in enumerate(loader.explain(0, 0)):
            begin, end = row.cu_seqlens[number : number + 2]
            expected = alone(reference, whole, dataset[one.document])
            assert float((packed[begin:end] - expected).abs().max() / expected.std()) < 2e-5


def test_the_engine_writes_what_transformers_does(home):
    tokenizer, whole = ps.load_tokenizer(home / "model"), processor()
    reader = ImageReader(load_processor(home / "model"))
    template = ps.chat.load_template(home / "model", tokenizer=tokenizer)
    sound = as_wave(samples(1.3, 4))
    content = [{"type": "audio", "audio": sound}, {"type": "text", "text": "What?"}]
    prompt = fit_chat(
        [{"role": "user", "content": content}], template, tokenizer, room=400, images=reader
    )
    engine = Engine(
        HuggingFaceModel(model()),
        tokenizer,
        context_length=500,
        forbidden_ids=(),
        prompt_part=20,
        images=reader.blank,
    )
    written = engine.generate_all(
        [prompt.ids], Sampling(temperature=0, max_tokens=5), images=[prompt.images]
    )
    text = whole.apply_chat_template(
        [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What?"}]}],
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    given = whole(
        text=[text],
        audio=[read_sound(sound, RATE, RATE * SECONDS)],
        sampling_rate=RATE,
        return_tensors="pt",
    )
    ids, reference, due = given.pop("input_ids"), model(), []
    assert ids[0].tolist() == list(prompt.ids)
    given.pop("attention_mask")
    with torch.no_grad():
        for _ in range(5):
            due.append(
                int(reference(input_ids=ids, use_cache=False, **given).logits[0, -1].argmax())
            )
            ids = torch.cat([ids, torch.tensor([[due[-1]]])], 1)
    assert list(written[0].tokens) == due


def test_training_and_a_chat(home, tmp_path):
    loader = ps.Loader(str(home / "data"), sequence_length=256, rows_per_step=2)
    run = ps.train(
        f"hf:{home / 'model'}",
        loader,
        steps=6,
        output=tmp_path / "run",
        progress=False,
        learning_rate=3e-3,
    )
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    assert losses[-1] < losses[0]
    parts = [{"type": "audio", "audio": str(home / "1_0.wav")}, {"type": "text", "text": "What?"}]
    assert isinstance(
        ps.open_run(tmp_path / "run").chat([{"role": "user", "content": parts}], max_tokens=4), str
    )


def test_other_media_are_refused(home, tmp_path):
    picture(20, 20).save(tmp_path / "a.png")
    for part, message in (
        ({"type": "image", "image": "a.png"}, "only audio is supported here"),
        ({"type": "video", "video": "a.mp4"}, "only audio is supported here"),
        ({"type": "audio", "audio": "none.wav"}, "cannot be read"),
    ):
        record = {
            "messages": [
                {"role": "user", "content": [part]},
                {"role": "assistant", "content": "Yes."},
            ]
        }
        (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
        with pytest.raises(RecordError, match=message):
            prepare(tmp_path / "chats.jsonl", home / "model", tmp_path / "data")
    with pytest.raises(ConfigError, match="reads no images or sounds"):
        HuggingFaceProcessor(type("Nothing", (), {})())
