"""Runs whose store does not answer any more: asked to stop, they save and end, and do not wait for
it.
"""

import signal
import textwrap
import time

import pytest

from makers.forked import start_python
from makers.object_store import s3_store
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from patience import wait_for
from penstock import write_dataset
from penstock.learn.training.checkpoints import newest_complete

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]

RUN_FILE = """\
data:
  sources: [{path: "s3://bucket/web", shuffle: none}]
  loader: {sequence_length: 64, rows_per_step: 2, seed: 1}
model: {layers: 1, width: 16, heads: 2}
training:
  steps: 500
  threads: THREADS
  optimizer: {learning_rate: 0.01}
  checkpoints: {every: 400}
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with a dataset of two shards, of which the second never comes."""
    pytest.importorskip("s3fs")
    folder = tmp_path / "store" / "bucket"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", make_texts(300), 340)
    texts = [tokenizer.encode(text) for text in make_texts(1024)]
    write_dataset(folder / "web", texts, tokenizer=tokenizer, documents_per_shard=512)
    with s3_store(tmp_path / "store", monkeypatch) as found:
        found.fail("slow", 10**9, ending="00001.arrow")
        yield found


@pytest.mark.parametrize(("name", "threads"), [("SIGINT", 1), ("SIGTERM", 2)])
def test_a_run_ends_that_waits_for_a_silent_store(store, tmp_path, name, threads):
    (tmp_path / "run.yaml").write_text(textwrap.dedent(RUN_FILE).replace("THREADS", str(threads)))
    words = ["-m", "penstock", "train", tmp_path / "run.yaml", "-o", tmp_path / "run"]
    with start_python(*words, folder=tmp_path) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, process)
        wait_for(lambda: store.count("00001.arrow"), process)
        sizes = [-1] * 4
        while len(set(sizes[-4:])) > 1 or sizes[-1] < 0:  # until it waits
            time.sleep(1)
            sizes.append(metrics.stat().st_size)
        process.send_signal(getattr(signal, name))
        said = process.communicate()[1]
    done = metrics.read_text().count("\n")
    assert newest_complete(tmp_path / "run" / "checkpoints").step == done
    if process.returncode == 0:  # on a busy machine, it was still in a step
        assert f"stopped by {name} after step {done}" in said
    else:
        assert process.returncode == 1
        assert f"stopped by {name} while a store has not answered" in said
        assert f"saved after step {done}" in said
