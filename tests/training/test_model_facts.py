"""What a base says and what the data have, from the first step to the exported folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import penstock as ps
from makers.models import tiny_huggingface
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock.chat import load_template
from penstock.core.errors import ConfigError, CorruptionError
from penstock.learn.evaluation.lm_eval_model import LmEvalModel
from penstock.learn.evaluation.subject import Subject
from penstock.learn.training.run_folder import RunFolder
from penstock.models.facts import FACTS, ModelFacts
from penstock.use.runs import generating
from penstock.use.runs.opening import load_opened, writer_of

TEXTS = ["the cat sat on the mat", "a dog ran to the cat", "the dog sat"] * 30
GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
    "eos_token_id": [1, 7],
    "pad_token_id": 5,
    "bos_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.25},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.3},
    "gemma": {"head_dim": 8, "attention_dropout": 0.25},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers whose own encoding adds BOS, or adds none, and a dataset for each answer of
    `add_bos`.
    """
    root = tmp_path_factory.mktemp("facts")
    own = tiny_tokenizer(root / "own", TEXTS, 300, CHAT_CONTROLS)
    own.beginning_with([0]).save(root / "with")
    own.beginning_with([]).save(root / "without")
    for name in ("own", "with", "without"):
        for choice in ("auto", "yes", "no"):
            prepared(root / name, root / f"{name}-{choice}", add_bos=choice)
    for kind, more in KINDS.items():
        save_base(root / kind, root / "with", kind, **more)
    return root


def prepared(tokenizer: Path, output: Path, **more: Any) -> None:
    ps.prepare(
        [{"text": text} for text in TEXTS],
        tokenizer=str(tokenizer),
        output=output,
        processes=1,
        progress=False,
        **more,
    )


def save_base(folder: Path, tokenizer: Path, kind: str, **more: Any) -> None:
    """A model of transformers as people publish them: with a tokenizer and defaults of sampling."""
    tiny_huggingface(
        kind, vocab_size=320, **{"max_position_embeddings": 128, **more}
    ).save_pretrained(folder)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 128}))


def trained(model: Any, data: Path, output: Path, **more: Any) -> Any:
    loader = ps.Loader(data, sequence_length=32, rows_per_step=2)
    given = {"steps": 1, "learning_rate": 1e-3, "threads": 1, "progress": False, **more}
    return ps.train(model, loader, output=output, **given)


def built() -> Any:
    return ps.build_model(vocab_size=320, layers=1, width=16, heads=2)


@pytest.mark.parametrize(("name", "added"), [("own", True), ("with", True), ("without", False)])
def test_documents_begin_as_the_tokenizer_encodes_unless_told_otherwise(
    folder: Path, name: str, added: bool
) -> None:
    for choice, due in (("auto", added), ("yes", True), ("no", False)):
        dataset = ps.open_dataset(folder / f"{name}-{choice}")
        assert {int(dataset[n].tokens[0]) == 0 for n in range(len(dataset))} == {due}
        assert all(dataset[n].tokens[-1] == 1 for n in range(len(dataset))), (
            "a document needs an end"
        )


@pytest.mark.parametrize("name", ["own", "with", "without"])
@pytest.mark.parametrize("choice", ["auto", "yes", "no"])
def test_texts_begin_in_use_as_in_training(
    folder: Path, tmp_path: Path, name: str, choice: str
) -> None:
    data = folder / f"{name}-{choice}"
    begin = [0] if ps.open_dataset(data)[0].tokens[0] == 0 else []
    run = trained(built(), data, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    run = ps.open_run(tmp_path / "moved")
    opened = load_opened(run, device="cpu")
    body = opened.tokenizer.encode("the cat").tolist()
    asked = generating.ask(["the cat"], 1, generating.sampling_of({}, {}))
    assert generating.prompt_ids(writer_of(opened, 1), asked) == [[*begin, *body]]
    subject = Subject(opened.model, opened.tokenizer, context_length=32, begin_ids=opened.begin_ids)
    assert subject.prompt_ids("the cat") == [*begin, *body]
    assert LmEvalModel(subject).tok_encode("the cat") == [*begin, *body]
    found = run.rollouts(
        ["the cat"] * 2,
        lambda record, answer: len(answer),
        output=tmp_path / "rollouts",
        samples=2,
        max_tokens=3,
    )
    assert found.dataset[0].tokens[: len(begin) + len(body)].tolist() == [*begin, *body]
    run.export(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("the cat").input_ids == [*begin, *body], "other programs begin texts likewise"
    assert load_opened(tmp_path / "out", device="cpu").begin_ids == tuple(begin)
    again = trained(str(tmp_path / "moved"), folder / f"{name}-{choice}", tmp_path / "again")
    assert again.facts.begin_ids == tuple(begin)


def test_sources_that_differ_are_said(folder: Path) -> None:
    said: list[str] = []
    datasets = [ps.open_dataset(folder / name) for name in ("with-auto", "with-no")]
    assert ModelFacts().with_data(datasets, said.append).begin_ids is None
    assert len(said) == 1
    assert "add_bos" in said[0]


@pytest.mark.parametrize("given", ["name", "object", "transformers", "from"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_keeps_what_it_says(folder: Path, tmp_path: Path, kind: str, given: str) -> None:
    model: Any = {
        "name": lambda: f"hf:{folder / kind}",
        "object": lambda: ps.load_model(folder / kind),
        "transformers": lambda: transformers.AutoModelForCausalLM.from_pretrained(folder / kind),
        "from": lambda: str(
            trained(str(folder / kind), folder / "with-auto", tmp_path / "first").path
        ),
    }[given]()
    run = trained(model, folder / "with-auto", tmp_path / "run")
    assert (run.trained_length, run.context_length) == (32, 128)
    assert {1, 7} <= set(run.stop_ids)
    opened = load_opened(run, device="cpu")
    assert opened.context_length == writer_of(opened, 1).engine.context_length == 128
    assert writer_of(opened, 1).engine.stop_ids >= {1, 7}
    made = run.export(tmp_path / "out")
    assert (made.context_length, made.notices) == (128, [])
    written = {
        name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in SETTINGS
    }
    assert written["generation_config"] == {**written["generation_config"], **GENERATION}
    longest = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    assert written["config"][longest] == written["tokenizer_config"]["model_max_length"] == 128
    assert {**written["config"], **run.facts.dropout} == written["config"]
    assert 0.25 in run.facts.dropout.values() or 0.3 in run.facts.dropout.values()
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.top_k
        == 20
    )


SETTINGS = ("config", "generation_config", "tokenizer_config")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_context_can_be_shrunk_and_that_is_said(folder: Path, tmp_path: Path, kind: str) -> None:
    run = trained(str(folder / kind), folder / "with-auto", tmp_path / "run")
    made = run.export(tmp_path / "out", context_length=48)
    assert made.notices == ["the context is shrunk to 48 tokens; the base reads 128"]
    written = {
        name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in SETTINGS
    }
    assert written["tokenizer_config"]["model_max_length"] == 48
    assert ps.open_run(tmp_path / "out").context_length == 48
    assert load_opened(run, context_length=48, device="cpu").context_length == 48


def test_a_model_built_here_reads_what_it_was_trained_on(folder: Path, tmp_path: Path) -> None:
    run = trained(built(), folder / "own-auto", tmp_path / "run")
    assert (run.context_length, run.facts.context_length) == (32, None)
    run.export(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (ps.open_run(tmp_path / "out").context_length, config["model_max_length"]) == (32, 32)


def test_the_base_gives_defaults_of_sampling_which_arguments_override(
    folder: Path, tmp_path: Path
) -> None:
    from penstock.use.serving import ServedModel
    from penstock.use.serving.requests import ChatRequest, CompletionRequest
    from penstock.use.serving.settings import ServeSettings

    run = trained(str(folder / "llama"), folder / "with-no", tmp_path / "run")
    own = generating.own_sampling(run)
    assert own["max_tokens"] == 7
    assert {n: own[n] for n in ("temperature", "top_p", "top_k")} == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }
    how = generating.sampling_of({"temperature": 0.0, "top_k": None}, own)
    assert (how.temperature, how.top_k, how.top_p) == (0.0, None, 0.95)
    assert generating.sampling_of({}, {}).temperature == 0.8
    writer = writer_of(load_opened(run, device="cpu"), 2)
    served = ServedModel(
        name="m",
        engine=writer.engine,
        tokenizer=writer.tokenizer,
        template=None,
        context_length=128,
        begin_ids=writer.begin_ids,
        sampling=own,
    )
    for given, due in (({}, (0.6, 0.95, 20)), ({"temperature": 1.0, "top_k": 3}, (1.0, 0.95, 3))):
        ask = served.completion(
            CompletionRequest(model="m", prompt="the cat", **given), ServeSettings()
        )
        assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.top_k) == due
        assert ask.prompts == [writer.tokenizer.encode("the cat").tolist()], "trained without BOS"
        assert ask.sampling.max_tokens == 16, "OpenAI's"
    template = load_template("chatml", tokenizer=writer.tokenizer)
    chats = replace(served, template=template)
    message = {"role": "user", "content": "hi"}
    for given, due in (({}, 7), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 3}, 3)):
        request = ChatRequest(model="m", messages=[message], **given)
        assert chats.chat(request, ServeSettings()).sampling.max_tokens == due
        assert chats.chat(request, ServeSettings(max_tokens=20)).sampling.max_tokens == due
    assert (
        chats.chat(
            ChatRequest(model="m", messages=[message]), ServeSettings(max_tokens=5)
        ).sampling.max_tokens
        == 5
    )
    broken = {"temperature": -1}
    (folder / "llama" / "generation_config.json").write_text(json.dumps(broken))
    try:
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            ps.open_run(folder / "llama").generate("the", max_tokens=1)
    finally:
        (folder / "llama" / "generation_config.json").write_text(json.dumps(GENERATION))


@pytest.mark.parametrize("adapter", [True, False])
def test_exported_folders_name_no_place(folder: Path, tmp_path: Path, adapter: bool) -> None:
    tokenizer = json.loads((folder / "gemma" / "tokenizer_config.json").read_text())
    base = tmp_path / "base"
    shutil.copytree(folder / "gemma", base)
    (base / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer, "name_or_path": str(base), "vocab_file": "/a/b"})
    )
    data = tmp_path / "data"
    prepared(base, data)
    run = trained(f"hf:{base}", data, tmp_path / "run", lora={"rank": 2})
    made = run.export(tmp_path / "out", adapter=adapter)
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*.json")]
    assert texts
    assert not any(str(tmp_path) in text or "/a/b" in text for text in texts)
    if adapter:
        named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
        assert named == "base"
        assert "PeftModel.from_pretrained" in made.notices[0]


def test_runs_without_the_record_still_open(folder: Path, tmp_path: Path) -> None:
    for kind, due in (("llama", 128), ("gpt2", 128), (None, 32)):
        model = built() if kind is None else f"from:{folder / kind}"
        run = trained(
            model if kind is None else str(folder / kind), folder / "own-auto", tmp_path / f"{kind}"
        )
        for path in [*run.path.rglob(FACTS)]:
            path.unlink()
            if (manifest := path.with_name("manifest.json")).is_file():
                kept = json.loads(manifest.read_text())
                del kept["files"][FACTS]
                manifest.write_text(json.dumps(kept))
        found = RunFolder.open(run.path)
        assert (found.context_length, found.facts.begin_ids) == (due, (0,)), kind


def test_a_record_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    facts = ModelFacts(
        begin_ids=(), context_length=9, stop_ids=(1, 2), generation={"a": [1]}, dropout={"x": 0.5}
    )
    facts.save(tmp_path)
    assert ModelFacts.load(tmp_path) == facts
    (tmp_path / FACTS).write_text("{}")
    with pytest.raises(CorruptionError, match="copy it back from a checkpoint"):
        ModelFacts.load(tmp_path)
