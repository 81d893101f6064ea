"""An axolotl configuration becomes a run file that loads, commands that run, and an answer for each
of its keys.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from makers.models import save_tiny_llama
from makers.processes import call_penstock
from makers.texts import make_texts, write_json_lines
from penstock.core.errors import ConfigError, OutputError
from penstock.use.cli import build_app
from penstock.use.config import load_run
from penstock.use.config.imports.axolotl_keys import NO_EFFECT, UNSUPPORTED
from penstock.use.config.imports.conversion import Imported, import_axolotl

KEYS = (Path(__file__).parent / "axolotl_keys.txt").read_text().split()
"""All keys of the configuration class of axolotl 0.19.0."""

BASE = {"base_model": "org/base", "datasets": [{"path": "chats.jsonl"}], "learning_rate": "2e-4"}

CHAT_LORA = """
base_model: Qwen/Qwen3-0.6B
chat_template: qwen3
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {user: [human], assistant: [gpt, model]}
    roles_to_train: [assistant]
    train_on_eos: turn
    message_field_training: train
    message_field_training_detail: train_detail
  - path: org/more-chats
    data_files: [part-0.parquet, part-1.parquet]
    ds_type: parquet
    split: train
    chat_template: chatml
    train_on_eos: last
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, k_proj, v_proj]
peft_use_rslora: true
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 1000
warmup_ratio: 0.1
optimizer: adamw_torch_fused
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
weight_decay: 0.01
eval_steps: 100
save_steps: 0.25
use_wandb: true
wandb_project: chats
seed: 7
"""
PRETRAIN = """
base_model: org/base
pretraining_dataset:
  - path: web/*.jsonl
    text_column: content
sequence_len: 8192
sample_packing: true
pretrain_multipack_attn: true
micro_batch_size: 1
gradient_accumulation_steps: 8
max_steps: 20000
warmup_steps: 500
optimizer: muon
lr_scheduler: linear
learning_rate: 0.001
adam_beta2: 0.95
max_grad_norm: 0
deepspeed: deepspeed_configs/zero3.json
context_parallel_size: 2
"""
PREFERENCE = """
base_model: org/chat
rl: dpo
rl_beta: 0.05
datasets:
  - path: pairs.jsonl
    split: train
    type: chatml.intel
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 2
learning_rate: 5e-7
optimizer: paged_adamw_8bit
lr_scheduler: constant
"""
CUSTOM = """
base_model: org/base
datasets:
  - path: questions.jsonl
    type:
      field_instruction: question
      field_output: answer
      format: "Q: {instruction} {input}\\nA: "
      no_input_format: "Q: {instruction}\\nA: "
  - path: books
    type: completion
    field: body
excess_length_strategy: truncate
sequence_len: 1024
micro_batch_size: 4
num_epochs: 3
learning_rate: 1e-5
"""


def translate(folder: Path, text: str | dict[str, Any], **options: Any) -> Imported:
    path = folder / "axolotl.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return import_axolotl(path, run_file=str(folder / "run.yaml"), **options)


def loaded(folder: Path, found: Imported) -> Any:
    """The settings of the run file, read as `penstock train` reads it."""
    (folder / "run.yaml").write_text(found.text("axolotl.yaml"))
    return load_run(folder / "run.yaml")


def fates(found: Imported) -> dict[str, set[str]]:
    """Key → what became of it."""
    by_key: dict[str, set[str]] = {}
    for note in found.notes:
        by_key.setdefault(note.key.partition(":")[0], set()).add(note.fate)
    return by_key


def test_a_chat_run_with_lora(tmp_path: Path) -> None:
    found = translate(tmp_path, CHAT_LORA, ranks=4)
    run = loaded(tmp_path, found)
    assert run.model == "hf:Qwen/Qwen3-0.6B"
    first, second = run.data.sources
    assert (first.path, second.path) == ("data/chats/train", "data/more-chats/train")
    assert (first.name, first.share, first.too_long, first.max_epochs) == (
        "chats",
        "tokens",
        "drop",
        None,
    )
    loader = run.data.loader
    assert (loader.sequence_length, loader.rows_per_step, loader.seed, loader.packing) == (
        4096,
        32,
        7,
        "best_fit",
    )
    training = run.training
    assert training.steps == 1000
    assert training.schedule.warmup_steps == 100
    assert (training.schedule.shape, training.schedule.floor) == ("cosine", 0.1)
    assert training.optimizer.betas == (0.9, 0.999)
    assert (training.optimizer.learning_rate, training.optimizer.weight_decay) == (2e-4, 0.01)
    assert training.optimizer.decay_embeddings
    assert training.lora.rank == 32
    assert (training.lora.alpha, training.lora.rslora) == (16, True)
    assert training.lora.targets == ("q_proj", "k_proj", "v_proj")
    assert (training.checkpoints.every, training.checkpoints.keep) == (250, 4)
    assert training.evaluators["held out"].every == 100
    assert training.trackers == ("wandb",)
    assert training.log_project == "chats"
    assert run.chat.layout.message_property_mappings == {}, "the two datasets differ"
    first, second = (shlex.split(line) for line in found.commands[:2])
    assert first[2:6] == ["chats.jsonl", "-t", "Qwen/Qwen3-0.6B", "-o"]
    assert "roles={assistant: [gpt, model], user: [human]}" in first
    assert "message_property_mappings={content: value, role: from}" in first
    assert "message_field_training_detail=train_detail" in first
    files = [f"hf://datasets/org/more-chats/part-{number}.parquet" for number in range(2)]
    assert second[2:4] == files
    assert "template=chatml" in second
    assert second[-2:] == ["--validation", "0.05"]
    assert found.commands[-1].startswith("torchrun --nproc-per-node 4 -m penstock train")
    assert found.install == "pip install 'penstock[train,huggingface,lora,wandb]'"
    assert f"# The commands need: {found.install}\n" in found.text("axolotl.yaml")
    assert fates(found)["chat_template"] == {"decide"}, "qwen3 is no template of ours"


def test_pretraining_on_several_processes(tmp_path: Path) -> None:
    run = loaded(tmp_path, translate(tmp_path, PRETRAIN, ranks=8))
    assert run.data.loader.rows_per_step == 1 * 8 * (8 // 2)
    assert run.training.context_parallel == 2
    assert run.training.shard
    assert run.training.optimizer.kind == "muon"
    assert run.training.optimizer.clip_norm is None
    assert run.training.optimizer.betas == (0.9, 0.95)
    assert run.data.attention == "document"
    (source,) = run.data.sources
    assert (source.path, source.too_long) == ("data/web", "split"), (
        "named after the folder of the glob"
    )
    assert run.chat is None


def test_preferences(tmp_path: Path) -> None:
    found = translate(tmp_path, PREFERENCE)
    run = loaded(tmp_path, found)
    assert (run.training.preference.kind, run.training.preference.beta) == ("dpo", 0.05)
    assert (run.data.loader.packing, run.data.loader.rows_per_step) == ("none", 4)
    assert run.chat.layout.answers == "tree"
    assert run.chat.template == "chatml"
    assert (run.training.schedule.shape, run.training.schedule.warmup_steps) == ("constant", 0)
    assert fates(found)["optimizer"] == {"differs"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"rl": "ipo"}, {"kind": "ipo", "beta": 0.1}),
        ({"rl": "orpo", "orpo_alpha": 0.2}, {"kind": "orpo", "beta": 0.2, "sft_weight": 1.0}),
        (
            {"rl": "simpo", "simpo_gamma": 1.4, "rl_beta": 2},
            {"gamma": 1.4, "beta": 2, "sft_weight": 1.0},
        ),
        ({"rl": "kto", "trl": {"beta": 0.3}}, {"kind": "kto", "beta": 0.3}),
        ({"rl": "dpo", "dpo_label_smoothing": 0.1}, {"kind": "cdpo", "label_smoothing": 0.1}),
        (
            {
                "rl": "dpo",
                "dpo_loss_type": ["sigmoid", "ipo", "sft"],
                "dpo_loss_weights": [2.0, 1.0, 1.0],
            },
            {"kind": "dpo", "also": {"ipo": 0.5}, "sft_weight": 0.5},
        ),
    ],
)
def test_kinds_of_preferences(
    tmp_path: Path, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = loaded(tmp_path, translate(tmp_path, {**BASE, **more})).training.preference
    assert {name: getattr(settings, name) for name in expected} == expected


def test_subset_split_and_revision_of_the_hub(tmp_path: Path) -> None:
    entry = {"path": "org/chats", "name": "de", "split": "extra", "revision": "v2"}
    found = translate(tmp_path, {**BASE, "datasets": [entry]})
    words = shlex.split(found.commands[0])
    assert words[2] == "hf://datasets/org/chats@v2"
    assert words[words.index("--subset") + 1] == "de"
    assert words[words.index("--split") + 1] == "extra"
    assert not {"decide", "unsupported"} & (
        fates(found)["datasets.0.name"] | fates(found)["datasets.0.split"]
    )
    entry["split"] = "train[:5%]"
    found = translate(tmp_path, {**BASE, "datasets": [entry]})
    assert fates(found)["datasets.0.split"] == {"decide"}


def test_paths_with_spaces_and_a_run_file_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "their.yaml"
    entry = {"path": "my data/a b.jsonl", "type": "alpaca"}
    path.write_text(yaml.safe_dump({**BASE, "datasets": [entry]}))
    found = import_axolotl(path, run_file="its folder/run.yaml")
    assert found.commands[0].startswith("PYTHONPATH='its folder' penstock prepare 'my data/a b.j")


def test_zero_is_answered_as_any_wrong_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not have the form that axolotl expects"):
        translate(tmp_path, {**BASE, "learning_rate": 0, "embedding_lr": 1e-4})


def test_an_evaluation_after_each_epoch(tmp_path: Path) -> None:
    given = {**BASE, "val_set_size": 0.1, "eval_strategy": "epoch", "num_epochs": 2}
    assert fates(translate(tmp_path, given))["eval_strategy"] == {"decide"}
    found = translate(tmp_path, given, steps=80)
    assert fates(found)["eval_strategy"] == {"mapped"}
    assert found.run["training"]["evaluators"]["held out"]["every"] == 40


def test_a_prompt_of_the_user_and_plain_text(tmp_path: Path) -> None:
    found = translate(tmp_path, CUSTOM)
    run = loaded(tmp_path, found)
    chats, books = run.data.sources
    assert (chats.too_long, books.too_long) == ("truncate", "split")
    assert chats.share == books.share == "tokens"
    assert run.data.loader.packing == "none"
    assert found.commands[1].startswith("penstock prepare hf://datasets/books ")
    assert "--text-field body" in found.commands[1]
    assert found.code is not None
    space: dict[str, Any] = {}
    exec(found.code, space)
    record = {"question": "2 {input}?", "answer": "4"}
    made = space["text_of_questions"](record)
    assert made["answer"] == "Q: 2 {input}?\nA: 4"
    assert made["loss_weights"] == [{"begin": 17, "end": 18, "weight": 1.0}]
    assert (
        space["text_of_questions"]({**record, "input": "now"})["answer"]
        == "Q: 2 {input}? now\nA: 4"
    )


def test_what_depends_on_the_number_of_steps_is_left_to_the_user_or_computed(
    tmp_path: Path,
) -> None:
    given = {
        **BASE,
        "num_epochs": 2,
        "val_set_size": 0.1,
        "evals_per_epoch": 4,
        "saves_per_epoch": 1,
        "warmup_ratio": 0.1,
    }
    found = translate(tmp_path, given)
    assert loaded(tmp_path, found).training.schedule.warmup_steps is None
    assert [
        fates(found)[name] for name in ("evals_per_epoch", "saves_per_epoch", "warmup_ratio")
    ] == [{"decide"}] * 3
    known = translate(tmp_path, given, steps=800)
    training = loaded(tmp_path, known).training
    assert training.steps is None
    assert training.schedule.warmup_steps == 80
    assert training.checkpoints.every == 400
    assert training.evaluators["held out"].every == 100
    assert "decide" not in {fate for one in fates(known).values() for fate in one}


def test_memory_and_early_stopping_are_carried(tmp_path: Path) -> None:
    given = {**BASE, "gradient_checkpointing": True, "early_stopping_patience": 3}
    found = translate(tmp_path, {**given, "val_set_size": 0.1})
    training = loaded(tmp_path, found).training
    assert training.activation_checkpointing == "full"
    assert training.evaluators["held out"].patience == 3
    named = ("gradient_checkpointing", "early_stopping_patience")
    assert [fates(found)[name] for name in named] == [{"mapped"}] * 2
    alone = translate(tmp_path, {**given, "gradient_checkpointing": False})
    assert loaded(tmp_path, alone).training.activation_checkpointing == "none"
    assert fates(alone)["early_stopping_patience"] == {"decide"}, "nothing is held out"


@pytest.mark.parametrize("value", [None, True, False, 1, "x", {"a": 1}])
def test_every_key_of_axolotl_is_accounted_for(tmp_path: Path, value: Any) -> None:
    for key in set(KEYS) - {"datasets", "test_datasets", "pretraining_dataset", "base_model"}:
        try:
            known = fates(translate(tmp_path, {**BASE, key: value}))
        except ConfigError as error:
            assert key in str(error)  # noqa: PT017 (a value of the wrong kind, named)
            continue
        assert key in known, (key, value)
        assert "unknown" not in known[key], (key, value)


def test_the_lists_name_keys_that_exist() -> None:
    aliases = {"model_type", "model_config", "model_kwargs", "model_revision"}
    plugins = {name for name in NO_EFFECT if name.startswith(("liger_", "unsloth_", "cut_"))}
    removed = {"wandb_run_group", "wandb_offline"}
    assert (set(NO_EFFECT) | set(UNSUPPORTED)) - set(KEYS) - aliases - plugins - removed == set()
    assert set(NO_EFFECT) & set(UNSUPPORTED) == set()


def test_unknown_keys_and_unsupported_values_are_told(tmp_path: Path) -> None:
    found = translate(
        tmp_path,
        {
            **BASE,
            "sample_pakcing": True,
            "lora_dropout": 0.0,
            "neftune_noise_alpha": 5,
            "wandb_project": None,
            "special_tokens": {"pad_token": "<pad>"},
            "plugins": ["axolotl.integrations.liger.LigerPlugin"],
            "datasets": [
                {"path": "a.jsonl", "type": "sharegpt", "colour": "red", "roles_to_train": ["gpt"]}
            ],
        },
    )
    known = fates(found)
    assert known["sample_pakcing"] == known["datasets.0.colour"] == {"unknown"}
    assert (
        known["lora_dropout"] == known["wandb_project"] == known["special_tokens"] == {"no effect"}
    )
    assert known["plugins"] == {"no effect"}
    assert known["neftune_noise_alpha"] == known["datasets.0.type"] == {"unsupported"}
    told = found.text("axolotl.yaml")
    assert "#   datasets.0.colour: red → no key of this name" in told
    assert "#   sample_pakcing: True → did you mean sample_packing?" in told
    assert loaded(tmp_path, found).chat.mask_settings.roles_to_train == ("assistant",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 1}, "expected an axolotl configuration, with base_model and datasets"),
        ({**BASE, "learning_rate": None}, "learning_rate is missing"),
        ({**BASE, "learning_rate": "fast"}, "learning_rate is 'fast'; expected a number"),
        ({**BASE, "micro_batch_size": 1.5}, "micro_batch_size is 1.5; expected a whole number"),
        ({**BASE, "rl": "grpo"}, "rl: grpo samples answers while it trains"),
        (
            {**BASE, "context_parallel_size": 3},
            "context_parallel_size 3 does not divide the 1 processes",
        ),
        ({**BASE, "datasets": {"a": 1}}, r"datasets.0.path is missing"),
        ({**BASE, "datasets": 3}, "datasets is 3; expected a list of datasets"),
    ],
)
def test_what_cannot_be_translated_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(tmp_path, given)


@pytest.mark.parametrize("text", [CHAT_LORA, PRETRAIN, PREFERENCE, CUSTOM])
def test_commands_are_command_lines_of_ours(tmp_path: Path, text: str) -> None:
    group: Any = get_command(build_app([]))
    for line in translate(tmp_path, text, ranks=2).commands:
        words = shlex.split(line[line.index("penstock ") :])
        group.commands[words[1]].make_context(words[1], words[2:])


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model of transformers and its tokenizer."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "base")
    return tmp_path


RUN = """
base_model: base
datasets:
  - path: alpaca.jsonl
    type: alpaca
  - path: chats.jsonl
    type: chat_template
    chat_template: chatml
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
val_set_size: 0.2
sequence_len: 256
sample_packing: true
micro_batch_size: 2
num_epochs: 1
learning_rate: 1e-3
evals_per_epoch: 1
"""


def test_the_whole_way_from_a_configuration_to_a_dry_run(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = make_texts(40, 3)
    records = [
        {"instruction": text, "input": "more" if number % 2 else "", "output": answer}
        for number, (text, answer) in enumerate(zip(make_texts(40, 2), answers, strict=True))
    ]
    write_json_lines(desk / "alpaca.jsonl", records)
    turns = [
        [{"from": "human", "value": text}, {"from": "gpt", "value": text[::-1]}]
        for text in make_texts(40, 4)
    ]
    write_json_lines(desk / "chats.jsonl", ({"conversations": one} for one in turns))
    (desk / "axolotl.yaml").write_text(RUN)
    shown = call_penstock("import-config", "axolotl.yaml")
    assert shown.exit_code == 0
    with pytest.raises(OutputError, match=r"run.yaml.*exists.*already.*--output"):
        call_penstock("import-config", "axolotl.yaml")
    commands = [
        line
        for line in shown.stdout.splitlines()
        if "penstock prepare" in line or "penstock train" in line
    ]
    monkeypatch.syspath_prepend(str(desk))  # where the functions for --transform are
    for line in commands:
        assert call_penstock(*shlex.split(line.removeprefix("PYTHONPATH=. "))[1:]).exit_code == 0, (
            line
        )
    import penstock as ps

    dataset = ps.open_dataset("data/alpaca/train")
    tokenizer = ps.load_tokenizer("base")
    end = tokenizer.decode([tokenizer.eos_id])
    wanted = {record["output"] for record in records}
    for number in range(len(dataset)):
        document = dataset[number]
        text = tokenizer.decode(document.tokens)
        assert "### Instruction:\n" in text
        assert ("### Input:\nmore" in text) == ("paired with an input" in text)
        weights = document.loss_weights
        trained = tokenizer.decode(
            [int(one) for one, weight in zip(document.tokens, weights, strict=True) if weight]
        )
        assert trained.removesuffix(end) in wanted
        assert trained.endswith(end), "the end of an answer is trained"
    assert (desk / "model-out" / "metrics.jsonl").exists()


SHORT = (
    "base_model: base\nsequence_len: 128\nmicro_batch_size: 2\nlearning_rate: "
    "1e-4\nchat_template: chatml\n"
)


@pytest.mark.parametrize(
    ("more", "records"),
    [
        (
            "rl: dpo\ndatasets: [{path: records.jsonl, type: chatml.intel}]\n",
            lambda a, b, c: {"system": "be kind", "question": a, "chosen": b, "rejected": c},
        ),
        (
            (
                "rl: orpo\nadapter: lora\nlora_target_modules: [q_proj]\ndatasets: [{path: "
                "records.jsonl, type: chatml}]\n"
            ),
            lambda a, b, c: {"prompt": a, "chosen": b, "rejected": c},
        ),
        (
            "rl: kto\ndatasets: [{path: records.jsonl, type: chatml.argilla}]\n",
            lambda a, b, c: {"instruction": a, "completion": b, "label": len(b) > len(c)},
        ),
        (
            "pretraining_dataset: [{path: records.jsonl, text_column: content}]\noptimizer: muon\n",
            lambda a, b, c: {"content": f"{a} {b} {c}"},
        ),
    ],
    ids=["dpo", "orpo", "kto", "pretraining"],
)
def test_other_kinds_reach_a_dry_run(desk: Path, more: str, records: Any) -> None:
    if "lora" in more:
        pytest.importorskip("peft")
    texts = (make_texts(30, seed) for seed in (1, 2, 3))
    write_json_lines(desk / "records.jsonl", (records(*one) for one in zip(*texts, strict=True)))
    (desk / "axolotl.yaml").write_text(f"{SHORT}max_steps: 3\nwarmup_steps: 1\n{more}")
    shown = call_penstock("import-config", "axolotl.yaml").stdout.splitlines()
    for line in [line for line in shown if line.startswith("penstock")][:2]:
        assert call_penstock(*shlex.split(line)[1:]).exit_code == 0, line


def test_secrets_of_urls_are_not_written_down(tmp_path: Path) -> None:
    """Neither in the commands nor in the run file; a note says what is missing."""
    urls = [
        "https://reader:pa55w0rd@host/a.jsonl",
        "https://host/b.jsonl?X-Amz-Signature=5igna7ure",
    ]
    for datasets in ([{"path": url} for url in urls], [{"path": "json", "data_files": urls}]):
        found = translate(tmp_path, {**BASE, "datasets": datasets})
        told = found.text("axolotl.yaml") + "\n".join([*found.commands, *map(repr, found.notes)])
        assert "https://host/a.jsonl" in told
        assert "https://host/b.jsonl" in told
        assert "secrets are not written down" in told
        assert not [secret for secret in ("pa55w0rd", "5igna7ure") if secret in told]
