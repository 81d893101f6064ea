"""`make test ROOM=loader` runs what a change in that room can break, and leaves out what it
cannot.
"""

import subprocess
import sys

import pytest

from room_tests import TESTS, files_of, reaching, room_of, rooms


def test_rooms_by_long_and_short_addresses():
    assert (
        room_of("penstock.plan.loader.state")
        == room_of("penstock.loader.Loader")
        == room_of("penstock.Loader")
        == "loader"
    )
    assert room_of("penstock.models.ours.transformer") == "models"
    assert room_of("penstock.huggingface.Trainer") == "integrations"
    assert room_of("penstock") is None
    assert room_of("penstock.data") is None


def test_a_change_reaches_the_rooms_above_and_none_below():
    assert reaching("core") == set(rooms())
    found = reaching("loader")
    assert {"loader", "training", "runs", "cli", "integrations"} <= found
    assert not found & {"core", "chat", "shards", "packing", "tokenizers"}
    assert reaching("cli") == {"cli"}


def test_files_are_those_that_use_a_reached_room():
    found = {path.relative_to(TESTS).as_posix() for path in files_of("packing")}
    assert {"packing/test_packing.py", "loader/test_plan.py", "test_doors.py"} <= found
    assert not {name for name in found if name.startswith(("sampling/", "sources/"))}
    assert set(files_of("core")) == set(TESTS.rglob("test_*.py"))


def test_every_folder_of_tests_is_run_for_its_room():
    folders = {path.name for path in TESTS.iterdir() if path.name in rooms()}
    for room in folders:
        assert set((TESTS / room).rglob("test_*.py")) <= set(files_of(room))


def test_an_unknown_room_is_refused():
    with pytest.raises(ValueError, match=r"'lodaer'.*loader"):
        files_of("lodaer")
    found = subprocess.run(
        [sys.executable, str(TESTS / "room_tests.py"), "lodaer"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "'lodaer'" in found.stderr
