"""What type checkers know of the public names, as an editor shows it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

CODE = """\
import torch

import penstock as ps

model = ps.build_model(layers=1, width=16, heads=2, vocab_size=300).to("cpu").eval()
reveal_type(model)
train = ps.prepare("a.jsonl", tokenizer="t", output="d", validation=0.1)
reveal_type(train.report.documents)
reveal_type(train.validation)
step = next(iter(ps.Loader(train, sequence_length=8, rows_per_step=2)))
next(iter(ps.Loader(train.validation, sequence_length=8, rows_per_step=2)))
reveal_type(step.torch()["tokens"])
reveal_type(step.torch()["max_seqlen"])
reveal_type(step.arrays()["targets"])
torch.optim.AdamW(model.parameters())
model.load_state_dict(model.state_dict())
step.torch()["token"]
ps.Source("d", epochs=2)
"""


def test_values_and_methods_have_types(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(CODE)
    # With the settings and the cache of `make check`: torch from nothing takes half a minute.
    words = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    words += ["--cache-dir", ROOT / ".mypy_cache", tmp_path / "user.py"]
    said = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False).stdout
    found = [line.split(": ", 2)[1:] for line in said.splitlines() if "user.py:" in line]
    assert [text for kind, text in found if kind == "note"][:6] == [
        'Revealed type is "penstock.models.language_model.LanguageModel"',
        'Revealed type is "int"',
        'Revealed type is "penstock.data.shards.dataset.Dataset"',
        'Revealed type is "torch._tensor.Tensor"',
        'Revealed type is "int | Any"',
        'Revealed type is "numpy.ndarray[Any, numpy.dtype[Any]]"',
    ]
    errors = [text for kind, text in found if kind == "error"]
    assert len(errors) == 2
    assert 'has no key "token"' in errors[0]
    assert 'Unexpected keyword argument "epochs"' in errors[1]
