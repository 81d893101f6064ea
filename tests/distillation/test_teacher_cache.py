"""A teacher on disk: outputs are read back as stored, however rows are packed; kills, changes,
damage are reported.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import teacher_cases
import torch
from teacher_cases import student_tokenizer, water_texts
from teacher_makers import assert_same, tiny_teacher

from makers.datasets import prepare_here
from makers.processes import child_environment
from patience import wait_for
from penstock import Dataset, Loader, Mixture, Source
from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.core.json_files import seal_of
from penstock.data.shards import verify
from penstock.data.stores.files import checksum
from penstock.learn.distillation import cache_format as layout
from penstock.learn.distillation.cache_format import CacheManifest
from penstock.learn.distillation.cache_writer import document_bounds, write_cache
from penstock.learn.distillation.cached_teacher import CachedTeacher
from penstock.learn.distillation.outputs import TeacherOutputs, Wanted
from penstock.learn.distillation.teacher_rows import TeacherRow, TeacherRows, TeacherText
from penstock.learn.distillation.teachers import ModelTeacher
from penstock.tokenizers import Tokenizer

WANTED = Wanted(temperature=2.0, top_k=6, boundary=True)
SOURCES = "ab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of a student's tokenizer, and the teacher's."""
    root = tmp_path_factory.mktemp("cached")
    student = student_tokenizer(root / "student")
    teacher_cases.teacher_tokenizer(root / "teacher")
    for seed, name in enumerate(SOURCES):
        prepare_here(iter(water_texts(40, seed=seed)), student, root / name, add_bos="no")
    return root


@pytest.fixture(scope="module")
def student(folder: Path) -> Tokenizer:
    return Dataset.open(folder / "a").loaded_tokenizer


@pytest.fixture(scope="module")
def teacher_tokenizer(folder: Path) -> Tokenizer:
    from penstock import load_tokenizer

    return load_tokenizer(folder / "teacher")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_teacher(vocab_size=448)


def make_loader(folder: Path, student: Tokenizer, teacher: Tokenizer, **settings: Any) -> Loader:
    names, text = settings.pop("names", SOURCES), settings.pop("text", {})
    sources = [Source(folder / name, max_epochs=settings.pop("max_epochs", 1)) for name in names]
    defaults = {
        "sequence_length": 64,
        "rows_per_step": 4,
        "seed": 3,
        "window_rows": 16,
        "threads": 0,
    }
    companion = TeacherRows(student, [TeacherText(teacher, **text)])
    return Loader(Mixture(sources), companion=companion, **{**defaults, **settings})


def rows_of(loader: Loader) -> list[TeacherRow]:
    return [row.distillation[0] for step in loader for row in step if row.num_documents]


def read_all(teacher: CachedTeacher, loader: Loader) -> None:
    for row in rows_of(loader):
        teacher.outputs(row)


def sources_of(loader: Loader) -> list[str]:
    return [dataset.fingerprint for dataset in loader.datasets]


def pieces_of(
    row: TeacherRow, outputs: TeacherOutputs
) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
    for piece, (begin, end) in zip(row.pieces.tolist(), document_bounds(row), strict=True):
        yield (
            tuple(piece),
            {name: tensor[begin:end].numpy() for name, tensor in outputs.tensors().items()},
        )


@pytest.fixture
def write(
    tmp_path: Path, folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, model: Any
) -> Any:
    """Writes a cache of the two datasets; settings of the loader, and of the cache."""

    def run(to: str = "cache", wanted: Wanted = WANTED, **settings: Any) -> Path:
        given = {
            name: settings.pop(name)
            for name in ("precision", "part_bytes", "name", "bos")
            if name in settings
        }
        loader = make_loader(folder, student, teacher_tokenizer, **settings)
        teacher = ModelTeacher(model, teacher_tokenizer, wanted)
        write_cache(
            loader, teacher, tmp_path / to, tokenizer=teacher_tokenizer, wanted=wanted, **given
        )
        return tmp_path / to

    return run


def test_reads_the_bits_that_the_teacher_gave(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, model: Any, write: Any
) -> None:
    cache = write(precision="float32")
    loader = make_loader(folder, student, teacher_tokenizer)
    cached = CachedTeacher(cache, CachedTeacher.reading_of(cache)[0], WANTED, sources_of(loader))
    live = ModelTeacher(model, teacher_tokenizer, WANTED)
    rows = rows_of(loader)
    assert any(len(row.input.tokens) > row.input.num_tokens or len(row.pieces) > 1 for row in rows)
    for row in rows:
        assert_same(cached.outputs(row), live.outputs(row))
    assert cached.manifest.pieces == sum(len(row.pieces) for row in rows)
    assert cached.manifest.tokens == sum(row.input.num_tokens for row in rows)


def test_a_cache_of_a_joined_source_is_of_that_source(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, model: Any, write: Any
) -> None:
    """Documents are numbered through all parts, so another packing finds them, and other sources
    are refused.
    """
    joined = ("[ab]",)
    cache = write(precision="float32", names=joined)
    due = {}
    live = ModelTeacher(model, teacher_tokenizer, WANTED)
    for row in rows_of(make_loader(folder, student, teacher_tokenizer, names=joined)):
        due |= dict(pieces_of(row, live.outputs(row)))
    changed = make_loader(
        folder, student, teacher_tokenizer, names=joined, seed=9, packing="next_fit"
    )
    cached = CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(changed))
    found = {}
    for row in rows_of(changed):
        found |= dict(pieces_of(row, cached.outputs(row)))
    assert found.keys() == due.keys()
    assert {document for _, document, *_ in found} == set(range(80))
    for piece, tensors in due.items():
        for name, array in tensors.items():
            np.testing.assert_array_equal(found[piece][name], array, err_msg=name)
    apart = make_loader(folder, student, teacher_tokenizer)
    with pytest.raises(ConfigError, match=r"nothing.*dataset.*\[ab\]"):
        CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(apart))


def test_however_rows_are_packed_and_sources_are_mixed(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, model: Any, write: Any
) -> None:
    """Other order, packing, epochs, and one source of the two under another number: the same bits
    for each piece.
    """
    cache = write(precision="float32")
    written = make_loader(folder, student, teacher_tokenizer)
    live = ModelTeacher(model, teacher_tokenizer, WANTED)
    expected = {}
    for row in rows_of(written):
        expected |= dict(pieces_of(row, live.outputs(row)))
    changed = make_loader(
        folder, student, teacher_tokenizer, names="b", seed=9, packing="next_fit", max_epochs=2
    )
    cached = CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(changed))
    seen = 0
    for row in rows_of(changed):
        for (_, *piece), found in pieces_of(row, cached.outputs(row)):
            seen += 1
            for name, array in expected[1, *piece].items():
                np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert seen == 2 * sum(1 for piece in expected if piece[0] == 1)


def test_half_precision_keeps_the_mass(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, model: Any, write: Any
) -> None:
    cache = write()
    loader = make_loader(folder, student, teacher_tokenizer)
    cached = CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(loader))
    live = ModelTeacher(model, teacher_tokenizer, WANTED)
    for row in rows_of(loader):
        found, expected, used = cached.outputs(row), live.outputs(row), row.input.num_tokens
        assert torch.equal(found.top_ids, expected.top_ids)
        error = (found.top_log_probs - expected.top_log_probs)[:used].abs()
        assert (error <= expected.top_log_probs[:used].abs().amax(-1, keepdim=True) * 2**-10).all()
        masses = [
            outputs.top_log_probs[:used].double().exp().sum(-1) for outputs in (found, expected)
        ]
        torch.testing.assert_close(*masses, rtol=0, atol=1e-6)
        for name in ("token_log_probs", "boundary_log_probs", "entropy"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def test_fewer_tokens_are_the_likeliest(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, model: Any, write: Any
) -> None:
    cache = write(precision="float32")
    loader = make_loader(folder, student, teacher_tokenizer)
    fewer = Wanted(temperature=2.0, top_k=2)
    cached = CachedTeacher(cache, teacher_tokenizer, fewer, sources_of(loader))
    live = ModelTeacher(model, teacher_tokenizer, fewer)
    for row in rows_of(loader)[:3]:
        assert_same(cached.outputs(row), live.outputs(row))


def test_a_finished_cache_and_parts(write: Any, folder: Path) -> None:
    """One part or many: the same pieces; nothing else is left in the folder, and datasets are as
    they were.
    """
    whole, cut = write("whole"), write("cut", part_bytes=1)
    assert {path.name for path in whole.iterdir()} == {
        "cache.json",
        "index.u64",
        "part-00000.bin",
        "tokenizer",
    }
    parts = CacheManifest.load(cut).part_bytes
    assert len(parts) > 3
    assert (
        b"".join((cut / layout.part_name(n)).read_bytes() for n in range(len(parts)))
        == (whole / layout.part_name(0)).read_bytes()
    )
    before = (whole / "cache.json").stat().st_mtime_ns
    assert write("whole") == whole
    assert (whole / "cache.json").stat().st_mtime_ns == before
    assert verify(folder / "a").sound


class Dies:
    """A teacher whose process is gone after some rows."""

    def __init__(self, teacher: ModelTeacher, rows: int) -> None:
        self._teacher, self._left = teacher, rows

    def ask(self, rows: Any) -> None:
        pass

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the power is gone")
        return self._teacher.outputs(row)

    def close(self) -> None:
        pass


def test_goes_on_from_the_last_part(
    tmp_path: Path,
    folder: Path,
    student: Tokenizer,
    teacher_tokenizer: Tokenizer,
    model: Any,
    write: Any,
) -> None:
    whole, broken = write("whole", part_bytes=1), tmp_path / "broken"
    teacher = ModelTeacher(model, teacher_tokenizer, WANTED)
    given = {"tokenizer": teacher_tokenizer, "wanted": WANTED, "part_bytes": 1}
    with pytest.raises(RuntimeError, match="the power is gone"):
        write_cache(
            make_loader(folder, student, teacher_tokenizer), Dies(teacher, 9), broken, **given
        )
    assert (broken / layout.part_name(1)).is_file()
    with pytest.raises(FormatError, match="an unfinished cache; run the same"):
        CachedTeacher(broken, teacher_tokenizer, WANTED, [])
    counted = Dies(teacher, 1 << 30)
    write_cache(make_loader(folder, student, teacher_tokenizer), counted, broken, **given)
    rows = len(rows_of(make_loader(folder, student, teacher_tokenizer)))
    assert (1 << 30) - counted._left == rows - 8
    for name in ("cache.json", "index.u64"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in broken.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.slow
def test_kill_at_any_moment(
    tmp_path: Path, folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, write: Any
) -> None:
    """With kill -9, after two parts: what is there is no cache, and the next run completes it to
    the same bytes.
    """
    whole, broken = write("whole", part_bytes=20_000), tmp_path / "broken"
    program = (
        "import sys; from pathlib import Path\nfrom test_teacher_cache import *\nfrom "
        "penstock import load_tokenizer\nfolder, to = map(Path, sys.argv[1:])\nstudent, "
        "teacher = Dataset.open(folder / 'a').loaded_tokenizer, load_tokenizer(folder / "
        "'teacher')\nclass Stops(Dies):\n    def outputs(self, row):\n        while (to / "
        "f'{layout.part_name(1)}.json').is_file(): signal.pause()\n        return "
        "super().outputs(row)\nlive = Stops(ModelTeacher(tiny_teacher(vocab_size=448), "
        "teacher, WANTED), 1 << 30)\nloader = make_loader(folder, student, "
        "teacher)\nwrite_cache(loader, live, to, tokenizer=teacher, wanted=WANTED, "
        "part_bytes=20_000)\n"
    )
    command = [sys.executable, "-c", program, str(folder), str(broken)]
    with subprocess.Popen(command, env=child_environment()) as process:
        wait_for((broken / f"{layout.part_name(1)}.json").is_file, process)
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(FormatError, match="an unfinished cache"):
        CacheManifest.load(broken)
    assert write("broken", part_bytes=20_000) == broken
    for name in (path.name for path in whole.iterdir() if path.is_file()):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_a_changed_byte_names_the_piece(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, write: Any
) -> None:
    cache = write()
    loader = make_loader(folder, student, teacher_tokenizer)
    row = rows_of(loader)[0]
    path = cache / layout.part_name(0)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    cached = CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(loader))
    _, document, begin, tokens = row.pieces[0].tolist()
    name = (
        rf"document {document} of [ab] \(tokens {begin} to {begin + tokens}\), at byte 0, differs "
        rf"from its checksum"
    )
    with pytest.raises(CorruptionError, match=name):
        cached.outputs(row)
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptionError, match="bytes, expected"):
        CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(loader))


@pytest.mark.parametrize("name", ["cache.json", "index.u64"])
def test_damage_elsewhere(
    folder: Path, teacher_tokenizer: Tokenizer, write: Any, name: str
) -> None:
    cache = write()
    data = bytearray((cache / name).read_bytes())
    for place in range(0, len(data), max(len(data) // 40, 1)):
        damaged = bytearray(data)
        damaged[place] ^= 4
        (cache / name).write_bytes(damaged)
        with pytest.raises(FormatError, match=r"damaged|checksum|version|no cache"):
            CachedTeacher(cache, teacher_tokenizer, WANTED, [])


def test_what_does_not_fit_is_refused(
    tmp_path: Path, folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, write: Any
) -> None:
    cache = write()
    loader = make_loader(folder, student, teacher_tokenizer)
    sources, teacher = sources_of(loader), teacher_tokenizer
    with pytest.raises(ConfigError, match=r"temperature 2.*expects 1"):
        CachedTeacher(cache, teacher, Wanted(top_k=6), sources)
    for top_k in (None, 7):
        with pytest.raises(ConfigError, match="holds the 6 likeliest tokens"):
            CachedTeacher(cache, teacher, Wanted(temperature=2.0, top_k=top_k), sources)
    with pytest.raises(ConfigError, match="the cache was made with tokenizer"):
        CachedTeacher(cache, student, WANTED, sources)
    with pytest.raises(ConfigError, match="holds nothing of dataset 0123"):
        CachedTeacher(cache, teacher, WANTED, ["0123"])
    with pytest.raises(FormatError, match="not a teacher's cache"):
        CachedTeacher(tmp_path / "elsewhere", teacher, WANTED, sources)
    cached = CachedTeacher(cache, teacher, WANTED, sources)
    for settings in ({"sequence_length": 48}, {"packing": "concat"}):
        with pytest.raises(ConfigError, match=r"document \d+ of [ab].*rows of 64"):
            read_all(cached, make_loader(folder, student, teacher, **settings))
    with pytest.raises(ConfigError, match=r"teacher.*read.*tokens.*cache"):
        read_all(cached, make_loader(folder, student, teacher, text={"max_tokens": 4}))


def test_what_cannot_be_written_is_refused(
    tmp_path: Path, folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, write: Any
) -> None:
    write()
    with pytest.raises(OutputError, match=r"other settings \(top_k: 6, now 5\)"):
        write(wanted=Wanted(temperature=2.0, top_k=5, boundary=True))
    with pytest.raises(OutputError, match="sequence_length: 64, now 48"):
        write(sequence_length=48)
    with pytest.raises(OutputError, match="bos: None, now True"):
        write(bos=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty and holds no cache"):
        write("full")
    with pytest.raises(ConfigError, match="needs top_k and boundary"):
        write("new", wanted=Wanted(boundary=True))
    with pytest.raises(ConfigError, match="each document once; set max_epochs=1"):
        write("new", max_epochs=2)
    with pytest.raises(ConfigError, match="a packing that keeps documents whole"):
        write("new", packing="concat")
    with pytest.raises(ConfigError, match="precision must be float16 or float32"):
        write("new", precision="int4")
    assert not (tmp_path / "new").exists()


def test_manifest_of_another_version(write: Any) -> None:
    cache = write()
    value = json.loads((cache / "cache.json").read_bytes())
    (cache / "cache.json").write_text(json.dumps({**value, "version": 2}))
    with pytest.raises(FormatError, match=r"cache format version 2.*reads version 1"):
        CacheManifest.load(cache)


def test_the_same_documents_in_another_order_have_no_cache(
    tmp_path: Path, folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, write: Any
) -> None:
    """Pieces are looked up by the document's number, so the key follows the order in which
    documents were read.
    """
    cache = write()
    prepare_here(reversed(water_texts(40, seed=0)), student, tmp_path / "a", add_bos="no")
    with pytest.raises(ConfigError, match="holds nothing of dataset"):
        CachedTeacher(cache, teacher_tokenizer, WANTED, [Dataset.open(tmp_path / "a").fingerprint])


def reseal(cache: Path, **changes: Any) -> None:
    """Forge a cache: other values in its manifest, and all sums as they should be."""
    value = json.loads((cache / layout.MANIFEST).read_bytes())
    index = np.fromfile(cache / layout.INDEX, np.uint64)
    value |= {
        "index_checksum": checksum(index),
        **{k: v for k, v in changes.items() if k not in value["settings"]},
    }
    value["settings"] |= {
        name: change for name, change in changes.items() if name in value["settings"]
    }
    del value["seal"]
    (cache / layout.MANIFEST).write_text(json.dumps({**value, "seal": seal_of(value)}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pieces": 2**62}, "bytes, expected"),
        ({"pieces": -1}, "damaged: -1 pieces"),
        ({"pieces": True}, "pieces: expected a whole number, found True"),
        ({"part_bytes": [2**40]}, "bytes, expected 1099511627776"),
        ({"part_bytes": "x"}, "part_bytes: expected a list, found 'x'"),
        ({"top_k": 2**40}, "settings.top_k is 1099511627776 of a vocabulary"),
        ({"top_k": 64}, r"piece \d+ does not lie inside its part"),
        ({"temperature": float("nan")}, "settings.temperature: expected a number, found nan"),
        (
            {"precision": "int8"},
            "settings.precision: expected one of float16, float32, found 'int8'",
        ),
        ({"names": []}, "2 sources and 0 names"),
        ({"extra": 1}, "extra: unknown"),
    ],
)
def test_a_forged_manifest(
    folder: Path, teacher_tokenizer: Tokenizer, write: Any, changes: dict[str, Any], match: str
) -> None:
    cache = write()
    reseal(cache, **changes)
    with pytest.raises(CorruptionError, match=match):
        CachedTeacher(cache, teacher_tokenizer, WANTED, [])


@pytest.mark.parametrize("column", [layout.SLOTS, layout.PART, layout.OFFSET])
@pytest.mark.parametrize("value", [2**62, 2**64 - 8, 2**33, 12])
def test_a_forged_index(
    folder: Path, teacher_tokenizer: Tokenizer, write: Any, column: int, value: int
) -> None:
    """Pieces that lie outside their part are found before memory is asked for them."""
    cache = write()
    index = np.fromfile(cache / layout.INDEX, np.uint64).reshape(layout.COLUMNS, -1)
    index[column, -1] = value
    index.tofile(cache / layout.INDEX)
    reseal(cache)
    if (column, value) == (layout.SLOTS, 12):
        return  # a length that a piece may have
    with pytest.raises(CorruptionError, match=rf"piece {index.shape[1] - 1} .*its part"):
        CachedTeacher(cache, teacher_tokenizer, WANTED, [])


def test_tokens_outside_the_vocabulary(
    folder: Path, student: Tokenizer, teacher_tokenizer: Tokenizer, write: Any
) -> None:
    cache = write()
    loader = make_loader(folder, student, teacher_tokenizer)
    manifest = CacheManifest.load(cache)
    index = np.fromfile(cache / layout.INDEX, np.uint64).reshape(layout.COLUMNS, -1)
    part = np.fromfile(cache / layout.part_name(0), np.uint8)
    for place in range(index.shape[1]):
        slots, offset = int(index[layout.SLOTS, place]), int(index[layout.OFFSET, place])
        data = part[offset : offset + manifest.settings.bytes_of(slots)]
        manifest.settings.views(data, slots)["ids"][:] = manifest.settings.vocab_size
        index[layout.DATA_SUM, place] = checksum(data)
    part.tofile(cache / layout.part_name(0))
    index.tofile(cache / layout.INDEX)
    reseal(cache)
    cached = CachedTeacher(cache, teacher_tokenizer, WANTED, sources_of(loader))
    with pytest.raises(CorruptionError, match=r"outside.*vocabulary.*324"):
        read_all(cached, loader)


def test_a_link_to_another_part(
    folder: Path, teacher_tokenizer: Tokenizer, write: Any, tmp_path: Path
) -> None:
    cache = write()
    (cache / "part-00000.bin").rename(tmp_path / "part")
    (cache / "part-00000.bin").symlink_to(tmp_path / "part")
    with pytest.raises(CorruptionError, match=r"part-00000\.bin: is a link"):
        CachedTeacher(cache, teacher_tokenizer, WANTED, [])


def test_a_cache_of_before_bos_was_kept_is_read(teacher_tokenizer: Tokenizer, write: Any) -> None:
    cache = write()
    value = json.loads((cache / layout.MANIFEST).read_bytes())
    del value["settings"]["bos"], value["settings"]["trained_with_bos"], value["seal"]
    (cache / layout.MANIFEST).write_text(json.dumps({**value, "seal": seal_of(value)}))
    assert CachedTeacher.reading_of(cache)[1].bos is None
    assert CachedTeacher(cache, teacher_tokenizer, WANTED, []).manifest.settings.top_k == 6
