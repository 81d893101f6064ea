"""How kernels are compiled: views that outlive nothing, and caches that are never stale."""

import os
from pathlib import Path

import numba
import numpy as np
import pytest

from penstock.core import compiled
from penstock.core.compiled import bare, keep_alive, kernel


@kernel
def _overwrite_while_viewed(rounds: int) -> int:
    changed = 0
    for _ in range(rounds):
        memory = np.full(64, 7)
        view = bare(memory)
        other = np.full(64, 1)
        changed += np.sum(view != 7) + other[0] - 1
        keep_alive(memory)
    return changed


def test_a_view_of_a_kernels_own_array_holds_until_it_is_kept_no_more() -> None:
    assert _overwrite_while_viewed(1000) == 0


def test_cached_kernels_older_than_a_source_are_deleted_in_a_folder(tmp_path: Path) -> None:
    for name, age in (("old.nbi", 10**9), ("old.1.nbc", 10**9), ("new.nbi", -60)):
        (tmp_path / name).touch()
        written = compiled._newest_source() - age
        os.utime(tmp_path / name, (written, written))
    compiled._forget_stale_kernels(tmp_path)
    assert os.listdir(tmp_path) == ["new.nbi"]


def test_the_folder_that_is_looked_through_is_the_one_that_numba_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    monkeypatch.setattr(compiled, "_forget_stale_kernels", looked_at.append)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kernel(lambda: 0)
    assert [folder.parent for folder in looked_at] == [tmp_path]


def test_two_processes_that_compile_at_once_do_not_mix_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read the index before the other has written it, and writes its own signature's code."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    files = [kernel(_double)._cache._cache_file for _ in range(2)]
    with monkeypatch.context() as before:
        for file in files:
            before.setattr(file, "_load_index", dict)
        files[0].save("signature A", "code A")
        files[1].save("signature B", "code B")
        files[0]._save_data(files[0]._data_name(1), "code A, written late")
    for name in "AB":
        assert files[0].load(f"signature {name}") in (f"code {name}", None)
    assert files[0].load("signature B") == "code B"


def _double(value: int) -> int:
    return 2 * value
