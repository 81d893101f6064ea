"""Every step of a release up to the upload: `make release VERSION=1.2.3`.

Writes version and date, runs what must pass, builds into `dist`, commits and tags. Where a step
fails, the files are as they were and nothing is tagged.
"""

import argparse
import datetime
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION_FILE, CITATION, CHANGELOG = "src/penstock/core/version.py", "CITATION.cff", "CHANGELOG.md"
STEPS = ("check", "test", "docs", "package")
"""Targets of make, which must pass with the new version in place."""
UNRELEASED = "## Unreleased\n"
_VERSION = re.compile(r'^(__version__ = ")([^"]+)(")$', re.MULTILINE)
_UNTIL = re.compile(r'warn_deprecated\((?:[^()]|\([^()]*\))*?until="([\d.]+)"')


def parsed(version: str) -> tuple[int, int, int]:
    """The numbers of `1.2.3`."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"give a version such as VERSION=1.2.3, not {version!r}")
    major, minor, patch = map(int, version.split("."))
    return major, minor, patch


def next_files(texts: dict[str, str], version: str, date: str, *, first: bool) -> dict[str, str]:
    """The three files that say the version, as they are in the release.

    Args:
        texts: Path → text of each as it is now.
        version: The new version.
        date: YYYY-MM-DD.
        first: Nothing was released before, so the present version may be released as it is.
    """
    found = _VERSION.search(texts[VERSION_FILE])
    assert found is not None, f"{VERSION_FILE} has no version"
    old, new = parsed(found[2]), parsed(version)
    if new < old or (new == old and not first):
        raise SystemExit(f"the version is {found[2]} already; give one above it, not {version}")
    _, heading, after = texts[CHANGELOG].partition(UNRELEASED)
    entries = after.split("\n## ")[0].strip()
    if not heading or not entries:
        raise SystemExit(f"{CHANGELOG} has nothing under Unreleased: what is the release for?")
    released = f"{UNRELEASED}\n## {version} - {date}\n"
    return {
        VERSION_FILE: _VERSION.sub(rf"\g<1>{version}\g<3>", texts[VERSION_FILE]),
        CITATION: re.sub(r"(?m)^version: .*$", f"version: {version}", texts[CITATION]),
        CHANGELOG: texts[CHANGELOG].replace(UNRELEASED, released, 1),
    }


def make(target: str, root: Path = ROOT) -> None:
    """Make a target with settings of its own: `ARGS` of this program would reach it, too."""
    subprocess.run(["make", target, "ARGS="], cwd=root, check=True)


def outlived(sources: Iterator[tuple[str, str]], version: str) -> list[str]:
    """Files with a deprecated name that this version no longer has."""
    now = parsed(version)[:2]
    return sorted(
        f"{path}: until {until}"
        for path, text in sources
        for until in _UNTIL.findall(text)
        if tuple(map(int, until.split(".")))[:2] <= now
    )


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def say(line: str) -> None:
    print(f"release: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version")
    parser.add_argument("--steps", default=" ".join(STEPS), help="targets of make that must pass")
    options = parser.parse_args()
    version, tag = options.version, f"v{options.version}"
    parsed(version)
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"commit or remove these changes first:\n{changed}")
    tags = git("tag", "--list", "v*").split()
    if tag in tags:
        raise SystemExit(f"{tag} is there already")
    sources = (
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in (ROOT / "src").rglob("*.py")
    )
    if late := outlived(sources, version):
        raise SystemExit("remove these deprecated names first:\n" + "\n".join(late))
    texts = {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in (VERSION_FILE, CITATION, CHANGELOG)
    }
    new = next_files(texts, version, datetime.date.today().isoformat(), first=not tags)
    kernels, dist = ROOT / "src" / "penstock" / "kernels", ROOT / "dist"
    try:
        for path, text in new.items():
            (ROOT / path).write_text(text, encoding="utf-8")
        for step in options.steps.split():
            say(f"make {step}")
            make(step)
        say(f"kernels for {platform.machine()}, Python {platform.python_version()}")
        make("kernels")
        shutil.rmtree(dist, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "hatchling", "build"], cwd=ROOT, check=True)
        git("commit", "-q", "-a", "-m", f"Release {version}")
        git("tag", "-a", tag, "-m", f"penstock {version}")
    except BaseException as error:
        for path, text in texts.items():
            (ROOT / path).write_text(text, encoding="utf-8")
        if isinstance(error, subprocess.CalledProcessError):
            raise SystemExit(
                f"failed, and nothing is tagged: {' '.join(map(str, error.cmd))}"
            ) from None
        raise
    finally:
        # The next editable run must compile its own.
        shutil.rmtree(kernels, ignore_errors=True)
    for path in sorted(dist.iterdir()):
        say(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    say(f"to publish it: git push origin main {tag}")


if __name__ == "__main__":
    main()
