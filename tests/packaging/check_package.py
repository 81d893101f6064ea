"""Build the sdist and the wheel, look into both, and use the wheel in new environments outside the
checkout.

Run by `make package`; it needs `hatchling` and `packaging`, which the extra `dev` brings. The wheel
that is used also brings compiled kernels for the Python that runs this, which tries a plain
install, then `[train]`. Other Pythons from 3.11 to 3.14 that are on the PATH or in pyenv only
import and encode, because each new environment compiles kernels for most of a minute. With `--all`,
all do everything that a plain install can.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packaging.metadata import Metadata
from ship_kernels import ship_kernels

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
NEVER = ("__pycache__", ".pyc", ".kernel", ".hypothesis", ".venv", "_cache/", ".egg-info")
TORCH = os.environ.get("TORCH_SPEC", "torch==2.13.0")
TORCH_OPTIONS = os.environ.get("TORCH_PIP_OPTIONS", "").split()
BEGUN = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {line}", flush=True)


def call(*words: str | Path, cwd: Path) -> str:
    """Run a program away from the checkout; its output. Stops the check if it fails."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    found = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit(
            f"failed: {' '.join(map(str, words))}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
        )
    return found.stdout.strip()


def build(folder: Path) -> tuple[Path, Path]:
    """The unpacked sdist, and the checked wheel, built twice: from the checkout and from the
    sdist.
    """
    call(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-d",
        folder,
        "-t",
        "sdist",
        "-t",
        "wheel",
        cwd=ROOT,
    )
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    call(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-d",
        folder / "again",
        "-t",
        "wheel",
        cwd=unpacked,
    )
    ours, again = contents(wheel), contents(folder / "again" / wheel.name)
    other = {name for name in ours.keys() | again.keys() if ours.get(name) != again.get(name)}
    check(not other, "the sdist builds another wheel than the checkout; files that differ", other)
    check_files({name.partition("/")[2] for name in names}, set(ours))
    check_metadata(ours)
    say(
        f"{sdist.name}: {len(names)} files; {wheel.name}: {len(ours)} files, "
        f"{wheel.stat().st_size // 1024} KiB"
    )
    return unpacked, wheel


def add_kernels(unpacked: Path, folder: Path, plain: Path) -> Path:
    """A wheel that also brings compiled kernels, as a release does."""
    package = unpacked / "src" / "penstock"
    kernels = {path.name for path in ship_kernels(package / "kernels", package)}
    call(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-d",
        folder / "shipped",
        "-t",
        "wheel",
        cwd=unpacked,
    )
    wheel = folder / "shipped" / plain.name
    more = {Path(name).name for name in contents(wheel).keys() - contents(plain).keys()}
    check(
        more == kernels,
        "the wheel should bring the kernels that were compiled; differing",
        more ^ kernels,
    )
    say(f"with {len(kernels)} compiled kernels: {wheel.stat().st_size // 1024} KiB")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check(is_right: bool, problem: str, found: object) -> None:
    if not is_right:
        raise SystemExit(f"{problem}: {found}")


def check_files(in_sdist: set[str], in_wheel: set[str]) -> None:
    """The wheel holds what git has under src, no more and no less; the sdist that and what builds
    it.
    """
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    sources = {name for name in call(*listed, cwd=ROOT).split("\n") if (ROOT / name).is_file()}
    package = {name for name in in_wheel if ".dist-info/" not in name}
    wanted = {name.removeprefix("src/") for name in sources}
    check(package == wanted, "files of the wheel are not those of src", package ^ wanted)
    endings = {Path(name).suffix for name in package}
    check(
        {".py", ".yaml", ".jinja", ".html", ".js", ".css"} <= endings,
        "data files are missing; endings",
        endings,
    )
    check("penstock/py.typed" in package, "no py.typed", sorted(package)[:5])
    check(
        any(name.endswith("licenses/LICENSE") for name in in_wheel),
        "no licence in the wheel",
        in_wheel - package,
    )
    wanted = sources | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
    check(wanted <= in_sdist, "files are missing in the sdist", wanted - in_sdist)
    caches = {name for name in in_sdist | in_wheel if any(part in name for part in NEVER)}
    check(not caches, "caches are packed", caches)


def check_metadata(wheel: dict[str, bytes]) -> None:
    (text,) = (data for name, data in wheel.items() if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(text, validate=True)
    urls = set(metadata.project_urls or {})
    check(
        {"Homepage", "Source", "Documentation", "Changelog"} <= urls,
        "project URLs are missing; found",
        urls,
    )
    plain = {one.name for one in metadata.requires_dist or [] if "extra" not in str(one.marker)}
    check(not plain & {"torch", "transformers", "jax"}, "the core requires", plain)
    check(
        metadata.description_content_type == "text/markdown",
        "the README is",
        metadata.description_content_type,
    )
    for version in VERSIONS:
        classifier = f"Programming Language :: Python :: {version}"
        check(classifier in (metadata.classifiers or []), "no classifier", classifier)


def find_pythons() -> dict[str, Path]:
    """Version → a Python of that version that runs."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {mine: Path(sys.executable)}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for place in [place for place in places if place is not None and version not in found]:
            asked = [place, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(
                asked, capture_output=True, text=True, check=False
            )  # pyenv's shims may fail
            if answer.stdout.strip() == version:
                found[version] = Path(place)
    return found


def use(
    version: str, python: Path, wheel: Path, folder: Path, *options: str, train: bool = False
) -> None:
    """Install the wheel into a new environment, and use it there."""
    environment = folder / f"python{version}"
    call(python, "-m", "venv", environment, cwd=folder)
    inside = environment / "bin" / "python"
    pip = (inside, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check")
    call(*pip, wheel, cwd=folder)
    say(
        f"Python {version}, plain install: "
        f"{call(inside, '-I', HERE / 'core_use.py', *options, cwd=folder)}"
    )
    if train:
        # First and alone, then pinned, so that nothing replaces a CPU build by a CUDA one.
        call(*pip, *TORCH_OPTIONS, TORCH, cwd=folder)
        torch = [
            line
            for line in call(*pip[:3], "freeze", cwd=folder).split("\n")
            if line.startswith("torch==")
        ]
        (folder / "constraint.txt").write_text("\n".join(torch))
        call(*pip, "-c", folder / "constraint.txt", f"{wheel}[train]", cwd=folder)
        say(f"Python {version}, [train]: {call(inside, '-I', HERE / 'train_use.py', cwd=folder)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="the whole data path on all Pythons")
    parser.add_argument(
        "--build-only", action="store_true", help="build, and look into what was built"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-package-") as temporary:
        folder = Path(temporary)
        unpacked, wheel = build(folder)
        if options.build_only:
            return
        wheel = add_kernels(unpacked, folder, wheel)
        (first, python), *others = find_pythons().items()
        missing = [version for version in VERSIONS if version not in [first, *dict(others)]]
        say(f"Pythons not on this machine, and so not tried: {', '.join(missing) or 'none'}")
        jobs = [partial(use, first, python, wheel, folder, "--shipped", train=True)]
        for version, other in reversed(others):
            brief = [] if options.all else ["--brief"]
            jobs.append(partial(use, version, other, wheel, folder, *brief))
        with ThreadPoolExecutor(max_workers=2) as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()
    say("the package is sound")


if __name__ == "__main__":
    main()
