"""A key that does not exist: the one that was meant, also by what other trainers call it and
wherever it stands.
"""

import re

import pytest

from penstock.core.errors import ConfigError
from penstock.core.suggestions import OTHER_NAMES
from penstock.use.config import load_run
from penstock.use.config.models import model_of
from penstock.use.config.run_file import RunSettings
from penstock.use.config.validation import _keys

GOOD = """\
data:
  sources: [{path: web}]
  loader: {sequence_length: 64, rows_per_step: 4}
model: {layers: 2}
training: {steps: 12}
chat: {template: auto}
"""


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lr", "training.optimizer.learning_rate"),
        ("lr", "training.optimizer.learning_rate"),
        ("training.learning_rate", "training.optimizer.learning_rate"),
        ("training.lerning_rate", "training.optimizer.learning_rate"),
        ("training.batch_size", "data.loader.rows_per_step"),
        ("training.gradient_accumulation_steps", "data.loader.rows_per_step"),
        ("data.seq_len", "data.loader.sequence_length"),
        ("model.max-seq-len", "data.loader.sequence_length"),
        ("training.max_steps", "training.steps"),
        ("training.epochs", "data.sources.0.max_epochs"),
        ("training.warmup_steps", "training.schedule.warmup_steps"),
        ("training.weight_decay", "training.optimizer.weight_decay"),
        ("training.bf16", "model.dtype"),
        ("training.dtype", "model.dtype"),
        ("model.hidden_size", "model.width"),
        ("training.max_grad_norm", "training.optimizer.clip_norm"),
        ("training.save_steps", "training.checkpoints.every"),
        ("mask_history", "chat.mask_history"),
        ("data.sources.0.rows_per_step", "data.loader.rows_per_step"),
    ],
)
def test_the_key_that_was_meant(tmp_path, key, meant):
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=rf"{key}=1: unknown.*{re.escape(meant)}\?"):
        load_run(tmp_path / "run.yaml", [f"{key}=1"])


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.stepz", "'steps'"),
        ("model.widht", "'width'"),
        ("data.loader.sead", "'seed'"),
        ("trainig", "'train"),
    ],
)
def test_a_slip_is_looked_for_where_it_was_made(tmp_path, key, meant):
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=rf"unknown key; did you mean {meant}"):
        load_run(tmp_path / "run.yaml", [f"{key}=1"])


def test_what_is_an_option_and_what_is_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"unknown key.*command line: --output"):
        load_run(tmp_path / "run.yaml", ["training.output_dir=x"])
    with pytest.raises(ConfigError, match=r"unknown.*sequence_length, rows_per_step"):
        load_run(tmp_path / "run.yaml", ["data.loader.zzz=x"])


def test_the_table_names_keys_that_exist_and_none_twice():
    known = dict(_keys(model_of(RunSettings)))
    assert [key for key in OTHER_NAMES if key not in known] == []
    names = [name for text in OTHER_NAMES.values() for name in text.split()]
    assert len(names) == len(set(names))
