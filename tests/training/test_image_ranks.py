"""Images on two processes by gloo, copied and sharded (FSDP2): the losses of one, also where a rank
has no images.
"""

from itertools import islice

import numpy as np
import pytest
from training_makers import on_two_processes, train, values

import penstock as ps
from makers.image_data import model_folder, prepare, write_records
from makers.media import model
from penstock.learn.training.metrics import read_metrics
from penstock.media import PatchProcessor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]

RUN_FILE = """\
data:
  sources: [{{path: {data}}}]
  loader: {{sequence_length: 256, rows_per_step: 2, seed: 1, packing: none}}
model: {model}
training:
  steps: 5
  threads: 1
  optimizer: {{learning_rate: 0.003}}
  checkpoints: {{every: 2, keep: 2}}
"""
SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    from penstock.learn.training.distributed import Ranks
    from training_makers import train

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with Ranks(torch.device("cpu")) as ranks:
        def run(name, *assignments, **options):
            train(data, folder / name, *assignments, ranks=ranks, **options)
            ranks.barrier()
        run("copied")
        run("one then copied", resume=True)
        if sys.argv[3] == "own":
            run("sharded", "training.shard=true")
            run("sharded then copied", "training.shard=true", until=2)
            run("sharded then copied", resume=True)
    print(json.dumps("done"), flush=True)
    os._exit(0)
"""


@pytest.fixture(params=["qwen2_vl", "gemma3", "own"])
def case(request, tmp_path):
    """(family, dataset, the model of a run file); `own`: our transformer with its vision tower."""
    family, raw = request.param, write_records(tmp_path / "raw")
    if family != "own":
        folder = model_folder(tmp_path, family)
        model(family).save_pretrained(folder)
        return family, prepare(raw, folder, tmp_path / "data"), f"hf:{folder}"
    controls = ["<|im_start|>", "<|im_end|>", "<image>"]
    tokenizer = ps.train_tokenizer(
        ["What is this, number? user assistant word"] * 5, vocab_size=300, special_tokens=controls,
        output=tmp_path / "tokenizer", progress=False,
    )  # fmt: skip
    (tmp_path / "processor").mkdir()
    made = PatchProcessor(tokenizer, image_size=32, patch=8)
    made.save(tmp_path / "processor")
    vision = (
        f"{{image_token: {made.slot_id}, image_size: 32, patch: 8, layers: 2, width: 32, heads: 2}}"
    )
    described = f"{{layers: 2, width: 32, heads: 2, vision: {vision}}}"
    return family, prepare(raw, tmp_path / "processor", tmp_path / "data"), described


def test_two_processes_train_as_one(tmp_path, case):
    family, data, described = case
    (tmp_path / "run.yaml").write_text(RUN_FILE.format(data=data.path, model=described))
    loader = ps.Loader(str(data.path), sequence_length=256, rows_per_step=2, seed=1, packing="none")
    images = [[len(row.media) for row in step] for step in islice(loader, 5)]
    # In some step only one rank has images.
    assert any((step[0] == 0) != (step[1] == 0) for step in images)
    train(tmp_path, tmp_path / "one")
    train(tmp_path, tmp_path / "one then copied", until=2)
    on_two_processes(tmp_path / "script.py", SCRIPT, tmp_path, tmp_path, family)
    due = read_metrics(tmp_path / "one")
    names = [
        "copied",
        "one then copied",
        *(["sharded", "sharded then copied"] if family == "own" else []),
    ]
    for name in names:
        found = read_metrics(tmp_path / name)
        for what in ("loss", "gradient_norm"):
            np.testing.assert_allclose(
                values(found, what), values(due, what), rtol=2e-4, err_msg=name
            )
