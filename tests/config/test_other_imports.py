"""Configurations of TRL and LLaMA-Factory become run files that load, commands that run, and an
answer for each key.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from makers.models import save_tiny_llama
from makers.processes import call_penstock
from makers.texts import make_texts, write_json_lines
from penstock.core.errors import ConfigError
from penstock.use.cli import build_app
from penstock.use.config import load_run
from penstock.use.config.imports import llama_factory_keys, trainer_keys, trl_keys
from penstock.use.config.imports.conversion import Imported
from penstock.use.config.imports.llama_factory import import_llama_factory
from penstock.use.config.imports.reading import import_config, read_command
from penstock.use.config.imports.trl import OF_ONE, Method, import_trl

HERE = Path(__file__).parent
TRL_KEYS = (HERE / "trl_keys.txt").read_text().split()
"""All keys of TRL 1.16.0: configuration classes and scripts, with transformers 5.24."""
FACTORY_KEYS = (HERE / "llamafactory_keys.txt").read_text().split()
"""All keys of the argument classes of LLaMA-Factory 0.9.5."""
VALUES: list[Any] = [None, True, False, 1, "x", {"a": 1}]

TRL = {"model_name_or_path": "org/base", "dataset_name": "org/chats"}
FACTORY = {"model_name_or_path": "org/base", "dataset": "chats", "template": "qwen3"}


def fates(found: Imported) -> dict[str, set[str]]:
    """Key → what became of it."""
    by_key: dict[str, set[str]] = {}
    for note in found.notes:
        by_key.setdefault(note.key.partition(":")[0], set()).add(note.fate)
    return by_key


def translate(folder: Path, given: Any, name: str = "their.yaml", **options: Any) -> Imported:
    path = folder / name
    path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    return import_config(path, run_file=str(folder / "run.yaml"), **options)


def loaded(folder: Path, found: Imported) -> Any:
    """The settings of the run file, read as `penstock train` reads it; commands are ours."""
    (folder / "run.yaml").write_text(found.text("their.yaml"))
    group: Any = get_command(build_app([]))
    for line in found.commands:
        words = shlex.split(line[line.index("penstock ") :])
        group.commands[words[1]].make_context(words[1], words[2:])
    return load_run(folder / "run.yaml")


@pytest.mark.parametrize("method", list(OF_ONE))
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_every_key_of_trl_is_accounted_for(method: Method, value: Any) -> None:
    for key in set(TRL_KEYS) - set(TRL) - {"datasets"}:
        try:
            known = fates(import_trl({**TRL, key: value}, "f", method, "run.yaml", 1, None))
        except ConfigError as error:
            assert key in str(error), (key, value)  # noqa: PT017 (a value of the wrong kind, named)
            continue
        assert key in known, (key, value)
        assert "unknown" not in known[key], (key, value)


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo", "kto"])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_every_key_of_llama_factory_is_accounted_for(stage: str, value: Any) -> None:
    for key in set(FACTORY_KEYS) - set(FACTORY) - {"stage"}:
        given = {**FACTORY, "stage": stage, key: value}
        try:
            known = fates(import_llama_factory(given, "f", "run.yaml", 1, None))
        except ConfigError as error:
            assert key in str(error), (key, value)  # noqa: PT017 (a value of the wrong kind, named)
            continue
        assert key in known, (key, value)
        assert "unknown" not in known[key], (key, value)


def test_the_lists_name_keys_that_exist() -> None:
    removed = {
        "no_cuda", "use_mps_device", "jit_mode_eval", "half_precision_backend", "group_by_length",
        "logging_dir", "include_tokens_per_second", "overwrite_output_dir", "save_safetensors",
        "rpo_alpha",
    }  # fmt: skip
    for module in (trainer_keys, trl_keys, llama_factory_keys):
        listed = set(module.NO_EFFECT) | set(module.UNSUPPORTED)
        assert listed - set(TRL_KEYS) - set(FACTORY_KEYS) - removed == set()
        assert set(module.NO_EFFECT) & set(module.UNSUPPORTED) == set()


SFT = """
accelerate launch --num_processes 4 trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen3-0.6B --dataset_name org/chats \\
    --learning_rate 2.0e-4 --max_steps 1000 --warmup_steps 0.1 \\
    --packing --max_length 4096 --assistant_only_loss --no_remove_unused_columns \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --use_peft --lora_r 32 --lora_target_modules q_proj v_proj \\
    --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' \\
    --report_to wandb tensorboard --run_name=first --project chats --bf16 --save_steps 200
"""


def test_a_command_line_of_trl_sft(tmp_path: Path) -> None:
    found = translate(tmp_path, SFT, "train.sh", ranks=4)
    run = loaded(tmp_path, found)
    loader, training = run.data.loader, run.training
    assert (loader.sequence_length, loader.rows_per_step, loader.packing) == (4096, 64, "best_fit")
    assert run.data.sources[0].too_long == "truncate"
    assert (training.steps, training.schedule.warmup_steps) == (1000, 100)
    assert (training.schedule.shape, training.schedule.floor) == ("cosine", 0.1)
    assert (training.optimizer.learning_rate, training.optimizer.weight_decay) == (2e-4, 0.0)
    assert training.optimizer.betas == (0.9, 0.999)
    assert (training.lora.rank, training.lora.alpha, training.lora.dropout) == (32, 32, 0.05)
    assert training.lora.targets == ("q_proj", "v_proj")
    assert set(training.trackers) == {"wandb", "tensorboard"}
    assert (training.log_name, training.log_project) == ("first", "chats")
    assert (training.precision, training.checkpoints.every) == ("bfloat16", 200)
    assert not run.chat.mask_settings.train_on_inputs
    assert fates(found)["remove_unused_columns"] == {"no effect"}


@pytest.mark.parametrize(
    ("given", "trained", "fate"),
    [
        ({}, True, "decide"),
        ({"assistant_only_loss": True}, False, "mapped"),
        ({"assistant_only_loss": False}, True, "mapped"),
        ({"completion_only_loss": True}, False, "mapped"),
    ],
)
def test_what_trl_trains_of_a_conversation(
    tmp_path: Path, given: dict[str, Any], trained: bool, fate: str
) -> None:
    found = translate(tmp_path, {**TRL, **given})
    assert loaded(tmp_path, found).chat.mask_settings.train_on_inputs is trained
    assert fate in set().union(
        *(fates(found).get(name, set()) for name in (*given, "assistant_only_loss"))
    )


def test_a_method_that_no_key_says_is_asked_for(tmp_path: Path) -> None:
    for given, kind in (({}, None), ({"beta": 0.2}, "dpo")):
        found = translate(tmp_path, {**TRL, **given})
        assert found.run["training"].get("preference", {}).get("kind") == kind
        assert "decide" in fates(found)["model_name_or_path"]
    found = translate(tmp_path, {**TRL, "beta": 0.2}, library="trl-kto")
    assert found.run["training"]["preference"] == {"kind": "kto", "beta": 0.2}
    assert fates(found)["model_name_or_path"] == {"mapped"}


def test_secrets_of_urls_are_not_written_down(tmp_path: Path) -> None:
    url = "https://reader:pa55w0rd@host/a.jsonl?X-Amz-Signature=5igna7ure"
    for given in ({"dataset_name": url}, {"datasets": [{"path": url}]}, {"eval_strategy": "epoch"}):
        for method in OF_ONE:
            found = translate(
                tmp_path, {**TRL, "dataset_name": url, **given}, library=f"trl-{method}"
            )
            told = found.text("their.yaml") + "\n".join([*found.commands, *map(repr, found.notes)])
            assert not [secret for secret in ("pa55w0rd", "5igna7ure") if secret in told]


def test_words_of_a_command_line(tmp_path: Path) -> None:
    line = (
        "NAME=x llamafactory-cli train --stage sft --model_name_or_path org/sft --dataset a,b "
        "--eval_strategy no --template=qwen3 --no-packing --lora_target q_proj v_proj --seed 3"
    )
    values, method = read_command(line, tmp_path)
    assert method is None
    assert values == {
        "stage": "sft", "model_name_or_path": "org/sft", "dataset": "a,b", "eval_strategy": "no",
        "template": "qwen3", "packing": False, "lora_target": ["q_proj", "v_proj"], "seed": 3,
    }  # fmt: skip
    assert "evaluators" not in translate(tmp_path, line, "a.sh").run["training"]
    assert translate(tmp_path, {**TRL, "save_strategy": False}).run["training"]["checkpoints"] == {
        "every": 1_000_000_000, "keep": 4,
    }  # fmt: skip


def test_dpo_of_trl_and_its_losses(tmp_path: Path) -> None:
    command = (
        "trl dpo --config more.yaml --loss_type sigmoid ipo sft --loss_weights 2 1 1 --beta 0.05"
    )
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({**TRL, "beta": 3, "max_length": 2048}))
    run = loaded(tmp_path, translate(tmp_path, command, "dpo.sh"))
    preference = run.training.preference
    assert (preference.kind, preference.beta, preference.also) == ("dpo", 0.05, {"ipo": 0.5})
    assert preference.sft_weight == 0.5
    assert run.training.optimizer.learning_rate == 1e-6
    assert run.data.loader.sequence_length == 2048
    assert (run.chat.layout.answers, run.data.sources[0].too_long) == ("tree", "drop")


@pytest.mark.parametrize(
    ("loss", "more", "kind", "smoothing"),
    [
        ("sigmoid", {}, "cdpo", 0.1),
        ("robust", {}, "robust", 0.1),
        ("hinge", {}, "hinge", 0.0),
        (["sigmoid", "ipo"], {"loss_weights": [0, 1]}, "ipo", 0.0),
        (["ipo", "sigmoid"], {"loss_weights": [1, 1]}, "ipo", 0.1),
    ],
)
def test_label_smoothing_of_trl(
    tmp_path: Path, loss: Any, more: dict[str, Any], kind: str, smoothing: float
) -> None:
    given = {**TRL, "loss_type": loss, "label_smoothing": 0.1, **more}
    found = translate(tmp_path, given, library="trl-dpo")
    preference = loaded(tmp_path, found).training.preference
    assert (preference.kind, preference.label_smoothing) == (kind, smoothing)
    assert fates(found)["label_smoothing"] == {"mapped" if smoothing else "no effect"}
    with pytest.raises(ConfigError, match="no loss compares answers"):
        translate(tmp_path, {**given, "loss_type": ["sft"], "loss_weights": None})


def test_what_a_shell_reads_is_no_value(tmp_path: Path) -> None:
    args = "--dataset_name org/chats --output_dir runs/x --learning_rate 2e-5"
    line = (
        f"cd trl && export A='a;b' ; trl sft --model_name_or_path 'org/a & b' {args} "
        "--packing false --assistant_only_loss false 2>&1 | tee train.log && echo --seed 9"
    )
    found = translate(tmp_path, line, "t.sh")
    assert found.run["model"] == "hf:org/a & b"
    assert found.run["chat"]["train_on_inputs"] is True
    assert found.run["training"]["optimizer"]["learning_rate"] == 2e-5
    assert found.run["training"]["seed"] == 42
    assert found.commands[-1].endswith("-o runs/x")
    for end in ("> log.txt", "&> log", "1>log 2>err", ">> log &", "< answers"):
        found = translate(tmp_path, f"trl sft --model_name_or_path a/b {args} {end}", "t.sh")
        assert found.run["training"]["optimizer"]["learning_rate"] == 2e-5, end


def test_a_start_of_llama_factory_with_words_that_replace_keys(tmp_path: Path) -> None:
    (tmp_path / "their.yaml").write_text(yaml.safe_dump({**FACTORY, "learning_rate": 1e-4}))
    line = "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train their.yaml learning_rate=1e-5 seed=7"
    found = translate(tmp_path, line, "start.sh")
    training = found.run["training"]
    assert (training["optimizer"]["learning_rate"], training["seed"]) == (1e-5, 7)


DUMP = {
    **TRL, "dataset_text_field": "text", "loss_type": "chunked_nll", "assistant_only_loss": True,
    "packing_strategy": "bfd-requeue", "packing": True, "fsdp": [], "warmup_ratio": 0.0,
    "fsdp_config": {"min_num_params": 0, "xla": False}, "train_sampling_strategy": "random",
    "warmup_steps": 0, "save_strategy": "epoch", "save_steps": 500, "eval_strategy": "no",
    "eval_steps": None, "activation_checkpointing": True, "gradient_checkpointing": None,
}  # fmt: skip


def test_a_dump_of_all_settings_is_no_choice_of_each(tmp_path: Path) -> None:
    """`args.to_dict()` holds the defaults, which say nothing about the records."""
    found = translate(tmp_path, json.dumps(DUMP), "trl.json")
    run = loaded(tmp_path, found)
    assert not run.chat.mask_settings.train_on_inputs
    assert "--text-field" not in found.commands[0]
    assert run.data.sources[0].too_long == "split"
    assert (run.training.shard, run.training.schedule.warmup_steps) == (False, 0)
    assert run.training.activation_checkpointing == "full"
    known = fates(found)
    assert {"unsupported", "unknown"}.isdisjoint(set().union(*known.values()))
    assert known["save_steps"] == known["fsdp_config"] == {"no effect"}
    plain = translate(tmp_path, json.dumps({**DUMP, "assistant_only_loss": False}), "trl.json")
    assert "--text-field text" in plain.commands[0]
    assert "decide" in fates(plain)["dataset_text_field"]
    off = {
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 1.0, "discopop_tau": 0.05,
        "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "sync_ref_model": False,
    }  # fmt: skip
    known = fates(translate(tmp_path, {**TRL, **off}, library="trl-dpo"))
    assert all(known[name] == {"no effect"} for name in off)
    known = fates(translate(tmp_path, {**TRL, **off, "sync_ref_model": True}, library="trl-dpo"))
    assert known["ref_model_sync_steps"] == {"unsupported"}


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        ({"warmup_steps": 0.1}, 15, 2),
        ({"warmup_ratio": 0.07}, 110, 8),
        ({"warmup_ratio": 0.5, "warmup_steps": 3}, 20, 3),
        ({"warmup_ratio": 0.0}, None, 0),
    ],
)
def test_warm_up(tmp_path: Path, given: dict[str, Any], steps: int | None, warmup: int) -> None:
    found = translate(tmp_path, {**TRL, **given}, steps=steps)
    assert loaded(tmp_path, found).training.schedule.warmup_steps == warmup
    assert "unknown" not in set().union(*fates(found).values())
    if "warmup_ratio" in given and warmup == 3:
        assert fates(found)["warmup_ratio"] == {"no effect"}


def test_the_lowest_rate_of_a_cosine(tmp_path: Path) -> None:
    more = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5}
    found = translate(tmp_path, {**TRL, **more, "lr_scheduler_kwargs": {"min_lr": 1e-6}})
    assert loaded(tmp_path, found).training.schedule.floor == pytest.approx(0.1)


def test_when_trl_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = translate(tmp_path, {**TRL, "eval_strategy": "steps"})
    assert found.run["training"]["evaluators"]["held out"]["every"] == 10
    found = translate(tmp_path, {**TRL, "eval_strategy": "epoch"})
    assert "decide" in fates(found)["eval_strategy"]
    # A folder of two splits, as load_dataset reads it.
    (tmp_path / "mine" / "data").mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / "mine" / "data" / f"{name}.jsonl").write_text("{}\n")
    given = {**TRL, "dataset_name": "mine", "eval_strategy": "steps"}
    found = translate(tmp_path, given)
    first, second = (shlex.split(line)[2] for line in found.commands[:2])
    assert (first, second) == ("mine/data/train.jsonl", "mine/data/test.jsonl")
    assert "held out" in found.run["training"]["evaluators"]
    # One file has no test split.
    found = translate(tmp_path, {**given, "dataset_name": "mine/data/train.jsonl"})
    assert "evaluators" not in found.run["training"]
    assert "decide" in fates(found)["eval_strategy"]
    found = translate(tmp_path, {**given, "dataset_train_split": "test", "eval_strategy": "no"})
    assert shlex.split(found.commands[0])[2] == "mine/data/test.jsonl"
    found = translate(tmp_path, {**given, "dataset_train_split": "more", "eval_strategy": "no"})
    assert shlex.split(found.commands[0])[2] == "mine"
    assert "decide" in fates(found)["dataset_train_split"]


def test_a_mixture_with_files_and_splits(tmp_path: Path) -> None:
    files = {"train": ["a.jsonl"], "test": "b.jsonl"}
    mixture = [
        {"path": "json", "data_files": "my data/train.jsonl"},
        {"path": "org/two", "data_files": files},
        {"path": "org/three", "data_files": files, "split": "test"},
    ]
    found = translate(
        tmp_path, {"model_name_or_path": "org/base", "datasets": mixture, "packing": True}
    )
    loaded(tmp_path, found)
    first, second, third = (shlex.split(line) for line in found.commands[:3])
    assert first[2:4] == ["my data/train.jsonl", "-t"]
    assert first[first.index("--format") + 1] == "jsonl"
    assert second[2:4] == ["hf://datasets/org/two/a.jsonl", "-t"]
    assert third[2:4] == ["hf://datasets/org/three/b.jsonl", "-t"]
    mixture[1]["split"] = "dev"
    with pytest.raises(ConfigError, match="data_files has test, train, and no 'dev'"):
        translate(tmp_path, {"model_name_or_path": "org/base", "datasets": mixture})


def test_one_module_is_a_list_of_one(tmp_path: Path) -> None:
    more = {"use_peft": True, "lora_modules_to_save": "lm_head", "lora_target_modules": "q_proj"}
    lora = loaded(tmp_path, translate(tmp_path, {**TRL, **more})).training.lora
    assert (lora.modules_to_save, lora.targets) == (("lm_head",), ("q_proj",))


def test_places_of_llama_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "dataset_info.json").write_text(
        json.dumps(
            {
                "far": {"file_name": "/abs/mine.jsonl"},
                "near": {"file_name": "mine"},
                "part": {"hf_hub_url": "org/x", "folder": "sub", "revision": "v1"},
                "seen": {
                    "file_name": "s.jsonl", "formatting": "sharegpt",
                    "columns": {"messages": "messages", "images": "pics"},
                },
            }
        )
    )  # fmt: skip
    (tmp_path / "conf" / "their.yaml").write_text(
        yaml.safe_dump({**FACTORY, "dataset": "far,near,part,seen", "finetuning_type": "full"})
    )
    monkeypatch.chdir(tmp_path)
    found = import_config("conf/their.yaml", run_file="run.yaml")
    paths = [shlex.split(line)[2] for line in found.commands[:4]]
    assert paths == [
        "/abs/mine.jsonl", "./conf/data/mine", "hf://datasets/org/x@v1/sub", "conf/data/s.jsonl",
    ]  # fmt: skip
    assert fates(found)["dataset_info.seen.columns"] == {"decide"}
    assert "unknown" not in set().union(*fates(found).values())


def test_grpo_of_trl_is_a_round(tmp_path: Path) -> None:
    given = {
        **TRL, "num_generations": 4, "max_completion_length": 100, "loss_type": "cispo",
        "epsilon_high": 5.0, "beta": 0.04, "scale_rewards": False, "max_steps": 7, "top_p": 0.9,
        "mask_truncated_completions": True, "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine", "warmup_steps": 20,
    }  # fmt: skip
    found = translate(tmp_path, json.dumps(given), "grpo.json")
    run = loaded(tmp_path, found)
    policy = run.training.policy
    assert (policy.kind, policy.clip_low, policy.clip_high) == ("cispo", 1.0, 4.0)
    assert (policy.kl, policy.scale, policy.truncated) == (0.04, "none", "mask")
    assert (run.data.loader.rows_per_step, run.data.loader.sequence_length) == (2, 1424)
    assert found.commands[0].startswith("penstock rollouts org/base prompts.jsonl --reward")
    assert "--samples 4 --max-tokens 100" in found.commands[0]
    sampled, trained = (shlex.split(line) for line in found.commands[-2:])
    first = shlex.split(found.commands[-3])[-1]
    assert sampled[:3] == ["penstock", "rollouts", first], "the next round goes on from the first"
    assert trained[-3::2] == [f"model=from:{first}", f"data.sources.0.path={sampled[-1]}"]
    schedule = run.training.schedule
    assert (schedule.shape, schedule.warmup_steps) == ("constant", 0), "each round has its own"
    assert fates(found)["lr_scheduler_type"] == fates(found)["warmup_steps"] == {"differs"}
    assert fates(found)["top_p"] == {"unsupported"}
    assert fates(found)["max_steps"] == {"differs"}


def test_llama_factory_with_its_datasets(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(
        json.dumps(
            {
                "mine": {
                    "file_name": "mine.jsonl", "columns": {"prompt": "ask", "response": "say"},
                },
                "chats": {
                    "hf_hub_url": "org/chats", "formatting": "sharegpt", "colour": "red",
                    "columns": {"messages": "turns", "system": "sys"}, "tags": {"role_tag": "who"},
                },
            }
        )
    )  # fmt: skip
    given = {
        **FACTORY, "stage": "sft", "dataset": "mine, chats", "dataset_dir": ".",
        "finetuning_type": "lora", "lora_target": "q_proj,v_proj", "quantization_bit": 4,
        "cutoff_len": 1024, "packing": True, "mask_history": True, "warmup_ratio": 0.1,
        "lr_scheduler_type": "cosine", "report_to": "none", "val_size": 0.1,
        "early_stopping_steps": 2, "gradient_checkpointing": True, "eval_strategy": "steps",
        "cutof_len": 3,
    }  # fmt: skip
    found = translate(tmp_path, given, steps=50)
    run = loaded(tmp_path, found)
    assert (run.training.lora.rank, run.training.lora.alpha) == (8, 16)
    assert (run.training.lora.quantize, run.training.lora.targets) == ("nf4", ("q_proj", "v_proj"))
    assert (run.data.attention, run.data.loader.packing) == ("row", "best_fit")
    assert run.training.schedule.warmup_steps == 5
    assert run.training.evaluators["held out"].patience == 2
    assert run.training.activation_checkpointing == "full"
    assert run.chat.mask_settings.mask_history
    first, second = (shlex.split(line) for line in found.commands[:2])
    assert "fields={history: '', input: '', instruction: ask, output: say}" in first
    assert second[2] == "hf://datasets/org/chats"
    assert "message_property_mappings={content: value, role: who}" in second
    known = fates(found)
    assert known["neat_packing"] == known["template"] == {"decide"}
    assert known["cutof_len"] == known["dataset_info.chats.colour"] == {"unknown"}
    assert "did you mean cutoff_len?" in found.text("their.yaml")


def test_text_of_llama_factory_is_cut_at_rows(tmp_path: Path) -> None:
    given = {**FACTORY, "stage": "pt", "finetuning_type": "full", "dataset_dir": "nowhere"}
    found = translate(tmp_path, given)
    run = loaded(tmp_path, found)
    assert (run.data.loader.packing, run.data.attention, run.chat) == ("concat", "row", None)
    assert "decide" in fates(found)["dataset"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"pref_ftx": 0.1}, {"kind": "dpo", "beta": 0.1, "sft_weight": 0.1}),
        ({"pref_loss": "ipo", "pref_beta": 0.3}, {"kind": "ipo", "beta": 0.3}),
        ({"pref_loss": "orpo"}, {"kind": "orpo", "beta": 0.1, "sft_weight": 1.0}),
        ({"pref_loss": "orpo", "pref_ftx": 0.1}, {"kind": "orpo", "sft_weight": 1.1}),
        ({"pref_loss": "simpo", "simpo_gamma": 1.4}, {"gamma": 1.4, "sft_weight": 0.0}),
        ({"dpo_label_smoothing": 0.1}, {"kind": "cdpo", "label_smoothing": 0.1}),
        (
            {"dpo_label_smoothing": 0.1, "pref_loss": "sigmoid"},
            {"kind": "cdpo", "label_smoothing": 0.1},
        ),
        ({"stage": "kto"}, {"kind": "kto"}),
    ],
)
def test_preferences_of_llama_factory(
    tmp_path: Path, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = {**FACTORY, "stage": "dpo", "finetuning_type": "full", **more}
    settings = loaded(tmp_path, translate(tmp_path, given)).training.preference
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 1}, "expected a configuration of axolotl .* TRL .* or LLaMA-Factory"),
        ({"model_name_or_path": "m"}, "dataset_name or datasets is missing"),
        ({**TRL, "per_device_train_batch_size": 1.5}, "per_device_train_batch_size is 1.5"),
        ({**FACTORY, "stage": "ppo"}, "stage: ppo is not translated"),
        ({"model_name_or_path": "m", "stage": "sft"}, "dataset is missing"),
        ("trl sft --model_name_or_path $MODEL", r"\$MODEL: write the value"),
        ("a --config x\nb --config y", "2 command lines"),
    ],
)
def test_what_cannot_be_translated_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(tmp_path, given)
    with pytest.raises(ConfigError, match="expected one of axolotl, trl"):
        translate(tmp_path, TRL, library="verl")


def test_a_program_is_refused_with_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a program.*args\.to_dict\(\)") as refused:
        translate(tmp_path, "args = GRPOConfig(output_dir='x')\n", name="grpo.py")
    line = str(refused.value).partition("GRPOConfig: ")[2].rpartition(", and import")[0]
    compile(line, "line", "exec")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model of transformers and its tokenizer."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(CHATML)
    return tmp_path


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = "per_device_train_batch_size: 2\nmax_steps: 2\nmodel_name_or_path: base\n"
INFO = {
    "chats": {
        "file_name": "records.jsonl", "formatting": "sharegpt",
        "columns": {"messages": "turns"}, "tags": {"role_tag": "who"},
    },
    "pairs": {
        "file_name": "records.jsonl", "ranking": True,
        "columns": {"prompt": "ask", "query": "more", "chosen": "good", "rejected": "bad"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "record", "model"),
    [
        (
            (
                f"{ROWS}dataset_name: records.jsonl\nmax_length: 128\npacking: true\nbf16: true\n"
                "assistant_only_loss: true\n"
            ),
            lambda a, b, c: {
                "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
            },
            "from:base",
        ),
        (
            f"{ROWS}dataset_name: records.jsonl\nmax_length: 256\nbeta: 0.2\n",
            lambda a, b, c: {"prompt": a, "chosen": b, "rejected": c},
            "from:base",
        ),
        (
            (
                f"{ROWS}stage: sft\ndataset: chats\ndataset_dir: .\ncutoff_len: 256\n"
                "finetuning_type: lora\nneat_packing: true\ntemplate: chatml\n"
            ),
            lambda a, b, c: {"turns": [{"who": "human", "value": a}, {"who": "gpt", "value": b}]},
            "hf:base",
        ),
        (
            (
                f"{ROWS}stage: dpo\ndataset: pairs\ndataset_dir: .\ncutoff_len: 256\n"
                "finetuning_type: full\npref_loss: orpo\ntemplate: chatml\n"
            ),
            lambda a, b, c: {"ask": a, "more": c, "good": b, "bad": c},
            "from:base",
        ),
    ],
    ids=["trl-sft", "trl-dpo", "factory-sft", "factory-dpo"],
)
def test_the_whole_way_to_a_dry_run(desk: Path, text: str, record: Any, model: str) -> None:
    if "lora" in text:
        pytest.importorskip("peft")
    texts = (make_texts(30, seed) for seed in (1, 2, 3))
    write_json_lines(desk / "records.jsonl", (record(*one) for one in zip(*texts, strict=True)))
    (desk / "dataset_info.json").write_text(json.dumps(INFO))
    (desk / "their.yaml").write_text(text)
    shown = call_penstock("import-config", "their.yaml").stdout.splitlines()
    made = yaml.safe_load((desk / "run.yaml").read_text())
    assert made["model"] == model
    for line in [line for line in shown if line.startswith("penstock")][:2]:
        assert call_penstock(*shlex.split(line)[1:]).exit_code == 0, line
