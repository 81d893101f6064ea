"""A program that is stopped while its store does not answer ends, and does not wait for the threads
that ask it.
"""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from makers.datasets import random_documents, tokenizer_info
from makers.object_store import s3_store
from makers.processes import child_environment
from patience import PATIENCE_SECONDS, wait_for
from penstock import write_dataset

STEPS = """
    import penstock as ps
    source = ps.Source("s3://bucket/web", shuffle="none")
    loader = ps.Loader(source, sequence_length=64, rows_per_step=2, threads={threads})
    for step in loader:
        pass
"""
PROGRAMS = {
    "steps": STEPS.format(threads=0),
    "steps in threads": STEPS.format(threads=2),
    "opening": "import penstock as ps; ps.open_dataset('s3://bucket/web')",
    "a document": "import penstock as ps; ps.open_dataset('s3://bucket/web')[900]",
    "a copy": (
        "from penstock.data import shards as s; s.copying.copy_dataset('s3://bucket/web', 'copy')"
    ),
    "an exception": """
        import threading, penstock as ps
        data = ps.open_dataset("s3://bucket/web")
        threading.Thread(target=lambda: data[900], daemon=True).start()
        import time; time.sleep(10**6)
    """,
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    documents = random_documents(1000, 20, 90)
    write_dataset(
        tmp_path / "store" / "bucket" / "web",
        documents,
        tokenizer=tokenizer_info(),
        documents_per_shard=500,
    )
    with s3_store(tmp_path / "store", monkeypatch) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends(store, tmp_path, program, name):
    waits_for = "manifest.json" if program == "opening" else "00001.arrow"
    store.fail("slow", 10**9, waits_for)
    words = [sys.executable, "-c", textwrap.dedent(PROGRAMS[program])]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env=child_environment(), cwd=tmp_path
    ) as process:
        wait_for(lambda: store.count(waits_for), process)
        time.sleep(0.5)
        process.send_signal(getattr(signal, name))
        said = process.communicate(timeout=PATIENCE_SECONDS / 10)[1]
    assert process.returncode == -getattr(signal, name), said
    assert ("KeyboardInterrupt" in said) == (name == "SIGINT")
