"""Run as a program: forges datasets in every way it knows, and uses each; see
`test_forged_datasets.py`.

    python fuzz_datasets.py FOLDER SEED COUNT

Prints, as JSON, how often what came out, and every outcome that is neither right nor an error of
penstock. Memory is limited to little more than what the whole dataset takes, and each forgery is
named in FOLDER/now before it is used.
"""

import json
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from forging import (
    ODD_VALUES,
    WORDS,
    at,
    make_victim,
    places_of,
    read_manifest,
    reseal,
    write_manifest,
)

import penstock as ps
from penstock import open_dataset
from penstock.core.errors import PenstockError
from penstock.data.shards import verify
from penstock.data.shards.origins import read_origins
from penstock.use.inspection import summarise, view_document

MEMORY = 400 << 20
Forge = Callable[[Path], None]


def forgeries(folder: Path) -> Iterator[tuple[str, Forge]]:
    """Every field of the manifest, every kind of number in the other files, times hostile
    values.
    """
    manifest = read_manifest(folder)
    for path in places_of(manifest):
        # Bins are all alike, and so are the fields of the second shard.
        if "histogram" in path and isinstance(path[-1], int) and path[-1] not in (0, 3, 32):
            continue
        for value in ODD_VALUES:
            yield f"manifest {path} = {value!r}", partial(set_value, path, value)
        yield f"manifest {path} left out", partial(drop, path)
        if isinstance(found := at(manifest, path), int):
            for step in (-1, 1, 1024):
                yield f"manifest {path} + {step}", partial(set_value, path, found + step)
    yield "manifest: another key", partial(set_value, ("another",), 1)
    for name, count, kind in (("batches.u64", 27, np.uint64), ("lengths.u32", 60, np.uint32)):
        numbers = np.fromfile(folder / name, kind)
        for place in [*range(count), *range(len(numbers) - 20, len(numbers))]:
            old = int(numbers[place])
            for value in {
                *(word % 2 ** (8 * kind().itemsize) for word in WORDS),
                old + 1,
                old + 8,
                max(old - 8, 0),
            }:
                yield f"{name}[{place}] = {value}", partial(set_word, name, place, kind(value))
    for value in (np.nan, np.inf, -1.0, 1e300):
        yield (
            f"weight_sums.f64[9] = {value}",
            partial(set_word, "weight_sums.f64", 9, np.float64(value)),
        )
    for shard in ("00000.arrow", "00001.arrow"):
        data = np.fromfile(folder / shard, np.uint8)
        words = len(data) // 8
        # The head of the file, the offsets of its batches, and its end, where Arrow has its own
        # numbers.
        places = [*range(70), *range(words - 120, words)]
        for line in np.fromfile(folder / "batches.u64", np.uint64).reshape(-1, 9).tolist():
            places += [
                line[column] // 8 + step
                for column in (0, 2, 4, 5, 6, 8)
                for step in (-1, 0, 1, 5, 40)
            ]
        for place in sorted({place for place in places if 0 <= place < words}):
            for value in WORDS[place % 2 :: 2]:
                yield (
                    f"{shard}: word {place} = {value}",
                    partial(set_word, shard, place, np.uint64(value)),
                )
    for name in (
        "files.json",
        "lengths.u32",
        "batches.u64",
        "weight_sums.f64",
        "00000.arrow",
        "00001.arrow",
    ):
        for keep in (0, 1, 8, 100, -1, -8):
            yield f"{name} cut to {keep}", partial(cut, name, keep)
        yield f"{name} longer", partial(lengthen, name)
    for value in ODD_VALUES:
        yield f"files.json = {value!r}", partial(replace, "files.json", json.dumps(value).encode())
    for data in (b"", b"[" * 100_000, b"\xff", b"1" * 9_000, b'["\x1b[31m"]'):
        yield f"files.json = {data[:20]!r}", partial(replace, "files.json", data)


def set_value(path: tuple[Any, ...], value: Any, folder: Path) -> None:
    manifest = read_manifest(folder)
    at(manifest, path[:-1])[path[-1]] = value
    write_manifest(folder, manifest)


def drop(path: tuple[Any, ...], folder: Path) -> None:
    manifest = read_manifest(folder)
    del at(manifest, path[:-1])[path[-1]]
    write_manifest(folder, manifest)


def set_word(name: str, place: int, value: Any, folder: Path) -> None:
    numbers = (
        np.fromfile(folder / name, type(value)) if name.endswith((".u64", ".u32", ".f64")) else None
    )
    if numbers is None:
        whole = np.fromfile(folder / name, np.uint8)
        whole[place * 8 : place * 8 + 8] = np.frombuffer(value.tobytes(), np.uint8)
        numbers = whole
    else:
        numbers[place] = value
    replace(name, numbers.tobytes(), folder)


def cut(name: str, keep: int, folder: Path) -> None:
    replace(name, (folder / name).read_bytes()[:keep], folder)


def lengthen(name: str, folder: Path) -> None:
    replace(name, (folder / name).read_bytes() + bytes(8), folder)


def replace(name: str, data: bytes, folder: Path) -> None:
    (folder / name).write_bytes(data)
    reseal(folder)


def use(folder: Path) -> str:
    """Check, open, read and train a dataset; what came of it.

    Raises:
        AssertionError: What is called sound is not.
    """
    report = verify(folder)
    dataset = open_dataset(folder)
    broken: list[str] = []
    for step in (read_all, look_at, train):
        try:
            step(dataset)
        except PenstockError as error:
            broken.append(f"{step.__name__}: {error}")
    assert not (report.sound and broken), broken
    if report.sound:
        read_by_arrow(dataset)
    return "sound" if report.sound else "refused when used" if broken else "found by verify alone"


def read_all(dataset: Any) -> None:
    manifest, table = dataset.manifest, dataset.table
    whole = table.read(0, len(dataset))
    assert len(whole.values) <= sum(shard.bytes for shard in manifest.shards)
    files, _ = read_origins(dataset)
    assert len(files) == len(dataset)
    few = [*range(0, len(dataset), 101), *range(min(8, len(dataset)))]
    for number in few:
        document = dataset[number]
        assert document.tokens.tolist() == whole[number].tolist()
        assert len(document.loss_weights) == len(document.tokens)
    assert manifest.tokens == len(whole.values) or not verify(dataset.path).sound


def read_by_arrow(dataset: Any) -> None:
    """What is sound is the same for Arrow's own reader, unless that is stricter about parts that
    nobody reads.
    """
    tokens = []
    for shard in dataset.manifest.shards:
        try:
            with pa.OSFile(str(dataset.path / shard.file)) as file:
                table = pa.ipc.open_file(file).read_all()
        except (pa.ArrowException, OSError):
            return
        table.validate(full=True)
        tokens += table["tokens"].combine_chunks().flatten().to_pylist()
    assert tokens == dataset.table.read(0, len(dataset)).values.tolist()


def look_at(dataset: Any) -> None:
    summarise(dataset)
    view_document(dataset, 0, None)
    assert isinstance(dataset.framed, tuple)


def train(dataset: Any) -> None:
    too_long = ("split", "drop", "truncate")[dataset.manifest.checksums["batches.u64"] % 3]
    source = ps.Source(dataset, name="forged", max_epochs=1, too_long=too_long)
    loader = ps.Loader(source, sequence_length=256, rows_per_step=8, threads=0, window_rows=16)
    for number, step in enumerate(loader):
        for row in step:
            assert int(row.tokens.max()) < dataset.tokenizer.vocab_size
        if number == 6:
            break


def main(folder: Path, seed: int, count: int) -> dict[str, Any]:
    victim = folder / "d"
    make_victim(victim)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in victim.iterdir()}
    assert use(victim) == "sound"
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    forged = list(forgeries(victim))
    order = np.random.default_rng(seed).permutation(len(forged))[:count].tolist()
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number in order:
        name, forge = forged[number]
        (folder / "now").write_text(name)
        try:
            forge(victim)
            outcomes[use(victim)] += 1
        except PenstockError:
            outcomes["refused"] += 1
        except BaseException:
            wrong.append(f"{name}: {traceback.format_exc(limit=-4)}")
        for file_name, (data, _) in before.items():
            if (victim / file_name).stat().st_mtime_ns != before[file_name][1]:
                (victim / file_name).write_bytes(data)
                before[file_name] = data, (victim / file_name).stat().st_mtime_ns
    return {"forgeries": len(order), "known": len(forged), "outcomes": outcomes, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
