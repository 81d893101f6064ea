"""What users of transformers' and other trainers pass by habit: each is refused or explained, and
the cure is named.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCABULARY, make_loader, make_model

import penstock as ps
from makers.datasets import tokenizer_info
from penstock import write_dataset
from penstock.core.errors import ConfigError, IsolationError


def make_trainer(folder: Path, model: Any = None, settings: Any = None, **kwargs: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder),
        **{
            "max_steps": 2,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **(settings or {}),
        },
    )
    return ps.huggingface.Trainer(make_model() if model is None else model, args, **kwargs)


# -- kinds
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"loader": "web"},
            r"loader must be a penstock\.Loader, got 'web'; make it with penstock\.Loader\(",
        ),
        ({}, r"loader is missing; make it with penstock\.Loader\("),
        (
            {"train_dataset": [1]},
            r"train_dataset does not go with a loader: pass loader=penstock\.Loader\(",
        ),
        (
            {"model": "gpt2"},
            r"model must be a torch module, got 'gpt2'; load it with transformers\.Auto",
        ),
    ],
)
def test_wrong_kinds(tmp_path: Path, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, **kwargs)


def test_wrong_kinds_of_the_others(tmp_path: Path, counting: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_loader.*Loader.*'held out'"):
        make_trainer(tmp_path, loader=make_loader(counting), eval_loader="held out")
    with pytest.raises(ConfigError, match=r"transformers\.TrainingArguments.*'run'"):
        ps.huggingface.Trainer(make_model(), "run", loader=make_loader(counting))


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("packing", r"rows are packed by the loader: Loader\(packing=…\)"),
        ("max_seq_length", r"Loader\(sequence_length=…\)"),
        ("tokenizer", "transformers calls it processing_class"),
        ("learning_rate", r"it belongs in TrainingArguments\(learning_rate=…\)"),
        ("eval_loaders", "did you mean 'eval_loader'"),
        ("zzz", r"see help\(penstock\.huggingface\.Trainer\)"),
    ],
)
def test_unknown_arguments(tmp_path: Path, counting: Path, name: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no argument '{name}': .*{cure}"):
        make_trainer(tmp_path, loader=make_loader(counting), **{name: 1})


# -- settings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"per_device_train_batch_size": 2},
            "but 1 is used .*; leave it out, or pass rows_per_microbatch=2",
        ),
        (
            {"gradient_accumulation_steps": 8},
            "but 4 is used .*; leave it out, or make the loader with rows_per_step=8",
        ),
        (
            {"train_sampling_strategy": "group_by_length"},
            r"does not go with a loader: the mixture sets the order",
        ),
        (
            {"eval_strategy": "steps"},
            r"eval_strategy is 'steps', but there is nothing to evaluate; pass eval_loader=",
        ),
    ],
)
def test_settings_that_contradict(
    tmp_path: Path, counting: Path, settings: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, settings=settings, loader=make_loader(counting))


@pytest.mark.parametrize("name", ["packing", "group_by_length"])
def test_settings_of_other_trainers_arguments(tmp_path: Path, counting: Path, name: str) -> None:
    args = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    setattr(args, name, True)
    with pytest.raises(ConfigError, match=f"{name}=True does not go with a loader"):
        ps.huggingface.Trainer(make_model(), args, loader=make_loader(counting))


def test_size_of_evaluation_batches(tmp_path: Path, counting: Path) -> None:
    loaders = {"loader": make_loader(counting), "eval_loader": make_loader(counting, max_epochs=1)}
    with pytest.raises(ConfigError, match=r"per_device_eval_batch_size.*3.*1"):
        make_trainer(tmp_path, settings={"per_device_eval_batch_size": 3}, **loaders)


def test_epochs_are_the_loaders(tmp_path: Path, counting: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 5}
    with pytest.raises(ConfigError, match=r"epochs.*5, .*1\).*max_epochs=5\)"):
        make_trainer(tmp_path, settings=settings, loader=make_loader(counting, max_epochs=1))
    make_trainer(tmp_path, settings=settings, loader=make_loader(counting, max_epochs=5))


def test_settings_without_effect_are_explained(
    tmp_path: Path, counting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(
        tmp_path,
        settings={"dataloader_num_workers": 4, "data_seed": 7},
        loader=make_loader(counting),
    )
    said = [record.message for record in caplog.records if record.name == "penstock.huggingface"]
    assert said == [
        "Trainer: dataloader_num_workers=4 has no effect with a loader; use Loader(threads=…)",
        "Trainer: data_seed=7 has no effect with a loader; use Loader(seed=…)",
    ]
    caplog.clear()
    make_trainer(tmp_path, loader=make_loader(counting))
    assert not [record for record in caplog.records if record.name == "penstock.huggingface"]


# -- vocabulary
# --------------------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_model_is_refused_at_the_start(
    tmp_path: Path, counting: Path
) -> None:
    info = tokenizer_info("large", vocab_size=VOCABULARY + 6)
    write_dataset(tmp_path / "web", [[1, 2, 3]] * 50, tokenizer=info)
    message = (
        r"dataset 'web' was prepared with tokenizer 'large' of 70 ids, but LlamaForCausalLM has "
        r"embeddings for 64; call model\.resize_token_embeddings\(70\)"
    )
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, loader=make_loader(tmp_path / "web"))
    with pytest.raises(ConfigError, match=message):
        make_trainer(
            tmp_path,
            loader=make_loader(counting),
            eval_loader=make_loader(tmp_path / "web", max_epochs=1),
        )
    model = make_model()
    model.resize_token_embeddings(70)
    make_trainer(tmp_path, model, loader=make_loader(tmp_path / "web")).train()


def test_ids_of_an_unknown_tokenizer_are_found_in_the_rows(tmp_path: Path) -> None:
    write_dataset(tmp_path / "web", [[1, 2, 70, 3]] * 50)
    message = (
        r"token id 70 in slot 2 of a row, but the model has embeddings for 64 ids; the data were "
        r"prepared with another"
    )
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, loader=make_loader(tmp_path / "web")).train()
    step = next(iter(make_loader(tmp_path / "web")))
    with pytest.raises(ConfigError, match=message):
        ps.huggingface.loss(make_model(), step, 1.0)


def test_a_pad_id_without_embedding_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path / "web", [[1, 2, 3, 4, 5]] * 50)
    row = next(iter(make_loader(tmp_path / "web", pad_id=64)))[0]
    with pytest.raises(ConfigError, match=r"id 64.*loader's pad_id\)"):
        ps.huggingface.loss(make_model(), row, 1.0)


# -- what cannot be checked
# ------------------------------------------------------------------------------------------


def test_models_that_cannot_be_checked_for_isolation() -> None:
    for model in (torch.nn.Linear(2, 2), "gpt2", None, torch.nn.Embedding(4, 4)):
        with pytest.raises(IsolationError, match=rf"{type(model).__name__}.*get_input_emb"):
            ps.check_isolation(model)
    with pytest.raises(IsolationError, match=r"LlamaModel.*model"):
        ps.check_isolation(make_model().model)


def test_prefixes_that_the_model_would_read_causally(tmp_path: Path, counting: Path) -> None:
    options: Any = {"sentinels": range(100, 130), "roll": False}
    loaders = [
        ps.Loader(
            ps.Source(
                counting,
                name="denoised",
                objective=ps.Denoise.t5(**options, bidirectional=bidirectional),
            ),
            sequence_length=64,
            rows_per_step=2,
        )
        for bidirectional in (True, False)
    ]
    with pytest.raises(ConfigError, match=r"'denoised'.*bidirectional=False"):
        make_trainer(tmp_path, loader=loaders[0])
    with pytest.raises(ConfigError, match=r"bidirectional.*transformers"):
        ps.huggingface.model_inputs(next(iter(loaders[0]))[0])
    ps.huggingface.model_inputs(next(iter(loaders[1]))[0])


@pytest.mark.parametrize("name", ["curriculum_learning", "data_efficiency"])
def test_what_lets_deepspeed_change_rows_is_refused(
    tmp_path: Path, counting: Path, name: str
) -> None:
    args = transformers.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[])
    args.hf_deepspeed_config = SimpleNamespace(config={name: {"enabled": True}})
    with pytest.raises(ConfigError, match=rf"DeepSpeed.*enables {name}"):
        ps.huggingface.Trainer(make_model(), args, loader=make_loader(counting))
