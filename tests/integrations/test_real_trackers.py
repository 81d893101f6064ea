"""The packages themselves, offline: each holds one run with one curve, over a stop and a resume."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps

STEPS = 6

READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(RUN + "/tensorboard", size_guidance={"scalars": 0}).Reload()
points = [(event.step, event.value) for event in events.Scalars("loss")]
""",
    "wandb": """
# Records of protobuf in LevelDB's log format: blocks of 32 KiB, a head of 7 bytes before each part.
import glob, struct
from wandb.proto import wandb_internal_pb2 as pb
points = []
for path in sorted(glob.glob(RUN + "/wandb/offline-run-*/*.wandb")):
    data, at, text = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        text += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):
            record = pb.Record.FromString(text)
            text = b""
            row = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            if "loss" in row:
                points.append((row["step"], row["loss"]))
""",
    "trackio": """
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("watched")
points = [(row["step"], row["loss"]) for row in SQLiteStorage.get_logs("watched", run)]
""",
    "mlflow": """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("watched").experiment_id])
assert run.info.status == "FINISHED", run.info.status
assert run.data.params["training.steps"] == "3", run.data.params
points = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")]
""",
}
"""Reads the points of the loss as the package kept them."""


@pytest.mark.parametrize("tracker", READERS)
def test_one_run_and_one_curve(tracker, tmp_path, monkeypatch):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: make test-integrations")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    texts = [f"{n} comes before {n + 1}" for n in range(200)]
    ps.train_tokenizer(iter(texts), vocab_size=300, output=tmp_path / "tokenizer")
    ps.prepare(iter(texts), tokenizer=tmp_path / "tokenizer", output=tmp_path / "data")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, penstock as ps\n"
        f"model = ps.build_model(layers=1, width=16, heads=2, vocab_size=300)\n"
        f"loader = ps.Loader({str(tmp_path / 'data')!r}, sequence_length=64, rows_per_step=2)\n"
        f"ps.train(model, loader, steps=int(sys.argv[1]), output={str(tmp_path / 'run')!r},\n"
        f"    resume=True, log={tracker!r}, log_project='watched', device='cpu', threads=1)\n"
    )
    for steps in (STEPS // 2, STEPS):
        subprocess.run([sys.executable, str(script), str(steps)], check=True, cwd=tmp_path)
    read = (
        f"import json\nRUN = {str(tmp_path / 'run')!r}\n{READERS[tracker]}"
        "print('POINTS', json.dumps(points))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", read], check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout
    points = json.loads(shown.rsplit("POINTS ", 1)[1])
    expected = [
        (record["step"], record["loss"]) for record in ps.open_run(tmp_path / "run").metrics
    ]
    assert [step for step, _ in points] == [step for step, _ in expected] == [*range(1, STEPS + 1)]
    assert [loss for _, loss in points] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    if tracker == "wandb":
        names = {
            Path(path).name.rsplit("-", 1)[1]
            for path in glob.glob(f"{tmp_path}/run/wandb/offline-run-*")
        }
        assert len(names) == 1, "a resumed run must go on with the same id"
    assert os.path.exists(tmp_path / "run" / "metrics.jsonl")
