"""Models of transformers read packed rows with images as they read each document alone."""

import inspect
from contextlib import suppress

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import penstock as ps
from makers.image_data import model_folder, prepare, write_records
from makers.media import MODELS, model, picture, processor
from penstock.core.errors import ConfigError, IsolationError
from penstock.learn.training.losses import row_loss
from penstock.media.images import ImageSettings, read_picture
from penstock.media.processor import HuggingFaceProcessor
from penstock.media.rows import grid_positions
from penstock.models.isolation.images import try_images
from penstock.models.theirs.attention import use_attention
from penstock.models.theirs.image_rows import image_arguments
from penstock.models.theirs.loading import load_huggingface
from penstock.models.theirs.model import HuggingFaceModel
from penstock.plan.inputs.blank_images import with_blank

WAYS = {"gemma3": "masks", "gemma4": "sliding_masks", "llama4": "own", "lfm2_vl": "borders"}
"""Others run with our attention."""
MIXED = "lfm2_vl"
"""Its short convolutions carry state across documents, unless ours take their place."""
PACKED = [family for family in MODELS if family != "llama3_2_vision"]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Family → its dataset, made when it is asked for."""
    home = tmp_path_factory.mktemp("families")
    source = write_records(home / "raw", 12)
    made = {}

    def of(family):
        if family not in made:
            made[family] = prepare(
                source, model_folder(home / family, family), home / family / "data"
            )
        return made[family]

    return of


def rows_of(dataset, model, **settings):
    settings = {"sequence_length": 1024, "rows_per_step": 1, "seed": 1, **settings}
    source = ps.Source(dataset.path, max_epochs=1)
    loader = ps.Loader(source, requirements=model.requirements(), **settings)
    return loader, next(iter(loader))


def single_rows(dataset, model):
    """Rows of one document each: (step, row)."""
    loader, _ = rows_of(dataset, model, sequence_length=512, packing="none")
    return [(step, row) for step in loader for row in step]


def alone(wrapped, family, document):
    """Logits of one document by transformers' own forward, with what its processor gives for the
    pictures together.
    """
    inner, whole = wrapped.inner, processor(family)
    ids = torch.from_numpy(document.tokens.astype(np.int64))[None]
    given = {}
    if document.images:
        pictures = [read_picture(image.read(), ImageSettings()) for image in document.images]
        nested = family in ("smolvlm2", "idefics3")
        arguments = HuggingFaceProcessor(whole)._image_arguments
        found, _ = whole._process_images([pictures] if nested else pictures, **arguments)
        names = {*whole.model_input_names, "pixel_values"}
        given = {
            name: value
            for name, value in found.items()
            if name in names and hasattr(value, "shape")
        }
        given = {
            name: value.float() if value.is_floating_point() else value
            for name, value in given.items()
        }
    slots = (ids == image_token(inner)).long()
    known = inspect.signature(inner.forward).parameters
    given |= {name: slots for name in ("mm_token_type_ids", "token_type_ids") if name in known}
    return inner(input_ids=ids, use_cache=False, **given).logits[0]


def image_token(inner):
    found = getattr(inner.config, "image_token_id", None)
    return inner.config.image_token_index if found is None else found


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_equal_documents_alone(data, family):
    dataset, wrapped = data(family), HuggingFaceModel(model(family))
    loader, step = rows_of(dataset, wrapped)
    row = step[0]
    assert row.num_documents > 2
    assert len(row.media) > 1
    with torch.no_grad():
        packed = wrapped.logits(wrapped(wrapped.tensors(row)))[0]
        assert wrapped.images.way(row.media.blank) == WAYS.get(family, "ours")
        use_attention(wrapped.inner, "sdpa")
        for number, one in enumerate(loader.explain(0, 0)):
            begin, end = row.cu_seqlens[number : number + 2]
            expected = alone(wrapped, family, dataset[one.document])
            gap = (packed[begin:end] - expected).abs().max() / expected.std()
            assert gap < TOLERANCE, (number, float(gap))


@pytest.mark.parametrize("family", ["qwen2_vl", "pixtral", "gemma3"])
def test_another_picture_changes_its_own_document_only(data, family):
    wrapped = HuggingFaceModel(model(family))
    _, step = rows_of(data(family), wrapped)
    row = step[0]
    with torch.no_grad():
        before = wrapped.logits(wrapped(wrapped.tensors(row)))[0]
        pixels = row.media.arrays["pixel_values"]
        patches = int(row.media.patches[0]) if "image_grid_thw" in row.media.arrays else 1
        pixels[:patches] = pixels[:patches][::-1] * 0.5 + 0.1
        after = wrapped.logits(wrapped(wrapped.tensors(row)))[0]
    changed = (before - after).abs().amax(1) > 1e-6
    begin, end = row.cu_seqlens[row.media.documents[0] :][:2]
    assert changed[begin:end].any()
    assert not changed[:begin].any()
    assert not changed[end:].any()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "smolvlm2", "gemma3"])
def test_gradients_of_a_row_are_those_of_its_documents(data, family):
    dataset, wrapped = data(family), HuggingFaceModel(model(family).double())
    loader, step = rows_of(dataset, wrapped)
    row = step[0]
    row_loss(wrapped, wrapped.tensors(row), step.loss_denominators).loss.backward()
    packed = {
        name: one.grad.clone()
        for name, one in wrapped.inner.named_parameters()
        if one.grad is not None
    }
    wrapped.zero_grad()
    whole = 0
    for one in loader.explain(0, 0):
        document = dataset[one.document]
        alone_loader = ps.Loader(
            ps.Source(
                dataset.path, slice=(one.document / len(dataset), (one.document + 1) / len(dataset))
            ),
            sequence_length=1024,
            rows_per_step=1,
            requirements=wrapped.requirements(),
            packing="none",
        )
        single = next(iter(alone_loader))[0]
        assert single.num_tokens == len(document.tokens)
        row_loss(wrapped, wrapped.tensors(single), step.loss_denominators).loss.backward()
        whole += 1
    assert whole > 2
    # The norms of Gemma compute in float32.
    allowed = 1e-7 if family == "gemma3" else 1e-10
    largest = max(float(one.abs().max()) for one in packed.values())
    for name, one in wrapped.inner.named_parameters():
        if name in packed:
            assert float((one.grad - packed[name]).abs().max()) < allowed * largest, name
    assert any("vis" in name and float(one.abs().max()) > 0 for name, one in packed.items())


@pytest.mark.parametrize("family", PACKED)
def test_a_row_without_images_gives_all_weights_gradients(data, family):
    wrapped = HuggingFaceModel(model(family))
    rows = single_rows(data(family), wrapped)
    step, row = next((step, row) for step, row in rows if not len(row.media))
    row_loss(wrapped, wrapped.tensors(row), step.loss_denominators).loss.backward()
    with_images = {name for name, one in wrapped.inner.named_parameters() if one.grad is not None}
    tower = [name for name in with_images if "vision" in name or "visual" in name]
    assert tower
    assert all(
        float(dict(wrapped.inner.named_parameters())[name].grad.abs().max()) == 0 for name in tower
    )
    # Which weights take no part at all, such as a pooling head, depends on the model alone.
    wrapped.zero_grad()
    step, pictured = next((step, row) for step, row in rows if len(row.media))
    row_loss(wrapped, wrapped.tensors(pictured), step.loss_denominators).loss.backward()
    assert with_images == {
        name for name, one in wrapped.inner.named_parameters() if one.grad is not None
    }


def test_a_blank_image_changes_no_logits(data):
    wrapped = HuggingFaceModel(model("qwen2_vl"))
    row = next(row for _, row in single_rows(data("qwen2_vl"), wrapped) if not len(row.media))
    longer = with_blank(row)
    assert longer.sequence_length == row.sequence_length + len(row.media.blank.tokens)
    with torch.no_grad():
        short = wrapped(wrapped.tensors(row))[0]
        whole = wrapped(wrapped.tensors(longer))[0, : row.sequence_length]
    assert float((short - whole).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "family", [one for one in MODELS if one in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")]
)
def test_positions_are_those_of_the_model(data, family):
    inner = model(family)
    wrapped = HuggingFaceModel(inner)
    loader, step = rows_of(data(family), wrapped)
    row = step[0]
    for number, one in enumerate(loader.explain(0, 0)):
        begin, end = row.cu_seqlens[number : number + 2].tolist()
        document = data(family)[one.document]
        ids = torch.from_numpy(document.tokens.astype(np.int64))[None]
        mine = row.media.documents == number
        grids = torch.from_numpy(row.media.arrays["image_grid_thw"][mine])
        types = (ids == image_token(inner)).int()
        given = {"image_grid_thw": grids} if mine.any() else {}
        expected, _ = inner.model.get_rope_index(ids, mm_token_type_ids=types, **given)
        np.testing.assert_array_equal(row.media.positions[1:, :, begin:end], expected.numpy())
        np.testing.assert_array_equal(row.media.positions[0, 0, begin:end], np.arange(end - begin))


def test_two_pictures_without_a_token_between_them_keep_their_own_grids():
    """transformers joins their slots into one group there (`get_rope_index`, by runs of types)."""
    grids = np.array([[1, 4, 4], [1, 2, 6]])
    found = grid_positions(np.arange(1, 8), 9, grids, 2)
    # One text token; 2 x 2 features from 1; 1 x 3 features from 3; one text token after the
    # largest.
    assert found.T.tolist() == [
        [0, 0, 0],
        [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2],
        [3, 3, 3], [3, 3, 4], [3, 3, 5],
        [6, 6, 6],
    ]  # fmt: skip


def test_images_of_another_model_are_refused(data):
    wrapped = HuggingFaceModel(model("pixtral"))
    wrapped.inner.config.image_token_id = wrapped.inner.config.image_token_index = 3
    _, step = rows_of(data("pixtral"), wrapped)
    with pytest.raises(ConfigError, match="images stand at token"):
        wrapped.tensors(step[0])


def test_a_model_that_mixes_documents_gets_one_a_row(data, monkeypatch):
    wrapped = HuggingFaceModel(model("qwen2_vl"))
    monkeypatch.setattr("penstock.models.theirs.image_ways.TRIED", ())
    _, step = rows_of(data("qwen2_vl"), wrapped)
    with pytest.raises(IsolationError, match="images see each other in one row"):
        wrapped.tensors(step[0])
    _, single = rows_of(data("qwen2_vl"), wrapped, packing="none")
    assert torch.isfinite(wrapped(wrapped.tensors(single[0]))).all()


def test_models_that_mix_documents_are_refused(data, monkeypatch):
    monkeypatch.setattr(
        "penstock.models.theirs.image_ways.TRIED", ("ours", "own", "masks", "sliding_masks")
    )
    wrapped = HuggingFaceModel(model(MIXED))
    _, step = rows_of(data(MIXED), wrapped)
    with pytest.raises(IsolationError, match="images see each other in one row"):
        wrapped.tensors(step[0])
    row = next(row for _, row in single_rows(data(MIXED), wrapped) if len(row.media))
    tokens = row.tokens[: row.num_tokens].tolist()
    document = next(one for one in data(MIXED) if one.tokens.tolist() == tokens)
    with torch.no_grad():
        found = wrapped.logits(wrapped(wrapped.tensors(row)))[0][: row.num_tokens]
        expected = alone(wrapped, MIXED, document)
    assert float((found - expected).abs().max() / expected.std()) < TOLERANCE


def test_cross_attention_to_images_takes_one_document_a_row(data):
    family = "llama3_2_vision"
    dataset, wrapped = data(family), HuggingFaceModel(model(family))
    reference, whole = model(family), processor(family)
    loader, _ = rows_of(dataset, wrapped, packing="none", sequence_length=512)
    seen = set()
    for step in loader:
        row = step[0]
        [origin] = loader.explain(step.index, 0)
        document = dataset[origin.document]
        pictures = [read_picture(image.read(), ImageSettings()) for image in document.images]
        text = whole.tokenizer.decode(document.tokens)
        given = whole(
            text=[text],
            images=[pictures] if pictures else None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert given.pop("input_ids")[0].tolist() == document.tokens.tolist()
        given.pop("attention_mask")
        with torch.no_grad():
            found = wrapped.logits(wrapped(wrapped.tensors(row)))[0][: row.num_tokens]
            ids = torch.from_numpy(document.tokens.astype(np.int64))[None]
            expected = reference(input_ids=ids, use_cache=False, **given).logits[0]
        assert float((found - expected).abs().max() / expected.std()) < TOLERANCE
        seen.add(len(pictures))
    assert seen == {0, 1, 2, 3}
    _, step = rows_of(dataset, wrapped)
    with pytest.raises(IsolationError, match=r"text.*attends.*images.*layers"):
        wrapped.tensors(step[0])
    with pytest.raises(ConfigError, match="needs a mask of text over images"):
        ps.huggingface.loss(reference, list(step), step.loss_denominator)


def test_llama_3_2_vision_learns(data):
    family = "llama3_2_vision"
    wrapped = HuggingFaceModel(model(family))
    _, step = rows_of(data(family), wrapped, packing="none", rows_per_step=4)
    optimizer = torch.optim.Adam(wrapped.parameters(), 1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        total = [
            row_loss(wrapped, wrapped.tensors(row), step.loss_denominators).loss for row in step
        ]
        sum(total).backward()
        optimizer.step()
        losses.append(float(sum(total).detach()))
    assert losses[-1] < losses[0]
    assert all(
        one.grad is not None
        for name, one in wrapped.inner.named_parameters()
        if "cross_attn" in name
    )


def test_a_model_without_vision_refuses_images(data):
    settings = {"layers": 1, "width": 32, "heads": 2, "vocab_size": 512}
    plain = ps.build_model(**settings)
    with pytest.raises(ConfigError, match="have images, but"):
        rows_of(data("qwen2_vl"), plain)


def loader_of(data, family):
    return ps.Loader({str(data(family).path): 1.0}, sequence_length=512, rows_per_step=2)


def test_training_learns_and_saves(data, tmp_path):
    family = "qwen2_vl"
    model(family).save_pretrained(tmp_path / "model")
    settings = {"learning_rate": 3e-3, "progress": False, "rows_per_pass": 2}
    whole = ps.train(
        load_huggingface(tmp_path / "model"),
        loader_of(data, family),
        steps=8,
        output=tmp_path / "whole",
        **settings,
    )
    losses = [line["loss"] for line in whole.metrics if "loss" in line]
    assert losses[-1] < losses[0] - 1
    row = next(iter(loader_of(data, family)))[0]
    whole.export(tmp_path / "exported")
    with torch.no_grad():
        trained, exported = (
            one.logits(one(one.tensors(row)))
            for one in (ps.load_model(tmp_path / "whole"), load_huggingface(tmp_path / "exported"))
        )
    torch.testing.assert_close(trained, exported)


def test_a_killed_run_goes_on_exactly(data, tmp_path):
    family = "qwen2_vl"
    model(family).save_pretrained(tmp_path / "model")
    settings = {"learning_rate": 3e-3, "progress": False, "steps": 6, "checkpoints": {"every": 2}}
    whole = ps.train(
        load_huggingface(tmp_path / "model"),
        loader_of(data, family),
        output=tmp_path / "a",
        **settings,
    )

    def stop(model, step, record):
        if step == 4:
            raise KeyboardInterrupt

    loaders = [loader_of(data, family) for _ in range(2)]
    with suppress(KeyboardInterrupt):
        wrapped = load_huggingface(tmp_path / "model")
        ps.train(wrapped, loaders[0], output=tmp_path / "b", on_step=stop, **settings)
    cut = ps.train(
        load_huggingface(tmp_path / "model"),
        loaders[1],
        output=tmp_path / "b",
        resume=True,
        on_step=stop,
        **settings,
    )
    last = [[line["loss"] for line in run.metrics if "loss" in line][-1] for run in (whole, cut)]
    assert last[0] == last[1]


def test_the_trainer_of_transformers_trains_on_images(data, tmp_path):
    inner = model("qwen2_vl")
    loader = loader_of(data, "qwen2_vl")
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=6,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = ps.huggingface.Trainer(inner, arguments, loader=loader)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert all(one.grad is None or torch.isfinite(one.grad).all() for one in inner.parameters())


def test_the_trainer_computes_the_loss_of_our_own_model(data):
    inner = model("qwen3_vl")
    step = next(iter(loader_of(data, "qwen3_vl")))
    wrapped = HuggingFaceModel(model("qwen3_vl"))
    ours = sum(
        float(row_loss(wrapped, wrapped.tensors(row), step.loss_denominators).loss.detach())
        for row in step
    )
    inner.eval()
    theirs = float(ps.huggingface.loss(inner, list(step), step.loss_denominator).detach())
    assert theirs == pytest.approx(ours, rel=1e-5)


def test_the_trainer_refuses_images_for_a_text_model(data, tmp_path):
    plain = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    with pytest.raises(ConfigError, match=r"images.*model.*does.*read"):
        ps.huggingface.Trainer(plain, arguments, loader=loader_of(data, "qwen2_vl"))


@pytest.mark.parametrize("family", ["qwen2_vl", "pixtral"])
def test_check_isolation_tries_images(data, family):
    blank = loader_of(data, family).blank_image
    ps.check_isolation(model(family), images=blank)

    def leaky(inner, row):
        given = image_arguments(inner, row, torch.device("cpu"), torch.float32)
        return inner(**given, attention_mask=torch.ones_like(given["input_ids"])).logits[0]

    with pytest.raises(IsolationError, match="documents with images see each other"):
        try_images(model(family), blank, leaky)


def test_explain_names_the_files_of_images(data):
    lines = [str(one) for one in loader_of(data, "qwen2_vl").explain(0) if one.images]
    assert lines
    assert all("image " in line and ", slots " in line and "[image]" in line for line in lines)
    assert any(".png: " in line for line in lines)
    assert not any("<|image_pad|>" in line for line in lines)


def test_lora_trains_text_and_tower_and_a_frozen_tower_stays(data, tmp_path):
    family = "qwen2_vl"
    settings = {"learning_rate": 3e-3, "progress": False, "steps": 3}
    wrapped = HuggingFaceModel(model(family))
    run = ps.train(
        wrapped, loader_of(data, family), output=tmp_path / "lora", lora={"rank": 2}, **settings
    )
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    assert losses[-1] < losses[0]
    trained = [name for name, one in wrapped.named_parameters() if one.requires_grad]
    assert any("visual" in name for name in trained)
    assert all(".lora_" in name for name in trained)

    frozen = HuggingFaceModel(model(family))
    before = {name: one.clone() for name, one in frozen.named_parameters()}
    ps.train(
        frozen, loader_of(data, family), output=tmp_path / "frozen", frozen=["*visual*"], **settings
    )
    for name, one in frozen.named_parameters():
        assert ("visual" in name) == torch.equal(one, before[name]), name
    for wrong in (["*nothing*"], ["*"]):
        with pytest.raises(ConfigError, match=r"training\.frozen"):
            ps.train(
                frozen, loader_of(data, family), output=tmp_path / "wrong", frozen=wrong, **settings
            )


def test_an_export_has_the_processor(data, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = model_folder(tmp_path / "base", "qwen2_vl")
    model("qwen2_vl").save_pretrained(folder)
    loader = ps.Loader(data("qwen2_vl").path, sequence_length=1024, rows_per_step=1)
    run = ps.train(f"hf:{folder}", loader, steps=1, output=tmp_path / "run", progress=False)
    run.export(tmp_path / "out")
    taken, wanted = AutoProcessor.from_pretrained(tmp_path / "out"), processor("qwen2_vl")
    assert type(taken) is type(wanted)
    assert taken.image_processor.to_dict() == wanted.image_processor.to_dict()
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    message = {
        "role": "user",
        "content": [{"type": "image", "image": picture(84, 112)}, {"type": "text", "text": "?"}],
    }
    first, second = (ps.open_run(tmp_path / name) for name in ("run", "out"))
    assert first.chat([message], temperature=0, max_tokens=6) == second.chat(
        [message], temperature=0, max_tokens=6
    )
