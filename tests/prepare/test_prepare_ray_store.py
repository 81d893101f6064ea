"""Prepared by Ray nodes that share no disk, into a store: the dataset of one process."""

from dataclasses import replace

import pytest

from makers.ray_clusters import begin_cluster
from penstock import Dataset, open_dataset, prepare
from penstock.prepare.ray_tasks import RayTasks


@pytest.mark.slow
def test_nodes_without_the_folder_into_a_store(tmp_path, corpus, tokenizer, monkeypatch):
    ray = pytest.importorskip("ray", reason="needs Ray")
    pytest.importorskip("s3fs")
    stores = pytest.importorskip("makers.object_store", reason="needs stores as outputs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "store/bucket").mkdir(parents=True)
    start = RayTasks.start

    def start_elsewhere(self, *work):
        place = self._place
        self._place = replace(place, marker=place.marker.with_name("none"))
        start(self, *work)
        self._place = place

    monkeypatch.setattr(RayTasks, "start", start_elsewhere)
    options = {"part_bytes": 12_000, "drop_duplicates": True, "progress": False, "tokenizer": tokenizer}
    cluster, _ = begin_cluster()
    try:
        with stores.s3_store(tmp_path / "store", monkeypatch):
            prepare(corpus, output="s3://bucket/web", executor="ray", **options)
            found = open_dataset("s3://bucket/web").manifest
    finally:
        ray.shutdown()
        cluster.shutdown()
    prepare(corpus, output=tmp_path / "here", processes=1, **options)
    expected = Dataset.open(tmp_path / "here").manifest
    assert found == expected
