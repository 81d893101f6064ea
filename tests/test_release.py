"""`make release`: what it writes, what it refuses, and that the workflows do what it says."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.core.version import __version__

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("release", ROOT / "tests/packaging/release.py")
assert _spec is not None
assert _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)

FILES = {
    release.VERSION_FILE: '"""The version."""\n\n__version__ = "0.1.0"\n',
    release.CITATION: "cff-version: 1.2.0\nversion: 0.1.0\ntype: software\n",
    release.CHANGELOG: "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0 - x\n",
}


def test_the_version_is_written_everywhere():
    new = release.next_files(FILES, "0.2.0", "2027-01-02", first=False)
    assert new[release.VERSION_FILE].endswith('__version__ = "0.2.0"\n')
    assert new[release.CITATION] == "cff-version: 1.2.0\nversion: 0.2.0\ntype: software\n"
    heading = "## Unreleased\n\n## 0.2.0 - 2027-01-02\n\n### Added\n\n- A thing.\n\n## 0.1.0 - x\n"
    assert new[release.CHANGELOG] == f"# Changelog\n\n{heading}"


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.1.0", "above it"), ("0.0.9", "above it"), ("1.2", "such as"), ("v1.2.3", "such as")],
)
def test_wrong_versions_are_refused(version, message):
    with pytest.raises(SystemExit, match=message):
        release.next_files(FILES, version, "2027-01-02", first=False)


def test_the_first_release_may_have_the_version_that_is_there():
    assert release.next_files(FILES, "0.1.0", "2027-01-02", first=True)


def test_a_release_without_entries_is_refused():
    empty = FILES | {release.CHANGELOG: "## Unreleased\n\n## 0.1.0 - x\n\n- Old.\n"}
    with pytest.raises(SystemExit, match="nothing under Unreleased"):
        release.next_files(empty, "0.2.0", "2027-01-02", first=False)


def test_deprecated_names_that_have_had_their_time():
    call = 'warn_deprecated("ps.a", use="ps.b(1)", since="0.2", until="{}")'
    sources = [("a.py", call.format("0.4")), ("b.py", call.format("0.5"))]
    assert release.outlived(iter(sources), "0.3.9") == []
    assert release.outlived(iter(sources), "0.4.0") == ["a.py: until 0.4"]


def test_what_is_cited_is_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["version"] == __version__


def test_workflows_run_what_any_machine_can_run():
    """Each step of a workflow is a target of make, .ci/run, or a tool that the step installs."""
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        for job in jobs.values():
            assert job["timeout-minutes"] <= 90 if "matrix" in job.get("strategy", {}) else True
            for step in job["steps"]:
                for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                    assert target in targets, (path.name, target)
    pythons = {entry["python"] for entry in _matrix("ci.yml", "tests")["include"]} | {"3.11"}
    supported = re.findall(
        r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert pythons == set(supported) == set(_matrix("release.yml", "wheel")["python"])


def _matrix(name: str, job: str) -> dict:
    text = (ROOT / ".github/workflows" / name).read_text(encoding="utf-8")
    return yaml.safe_load(text)["jobs"][job]["strategy"]["matrix"]


def test_the_page_of_packages_names_what_is_installed():
    page = (ROOT / "docs/reference/packages.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    always, by_extra = re.split(r"^## ", page, flags=re.MULTILINE)[1:3]

    def names(requirements):
        return {re.split(r"[^\w-]", one)[0] for one in requirements}

    assert set(re.findall(r"\[([\w-]+)\]\(https", always)) == names(project["dependencies"])
    listed = {}
    for extras, packages in re.findall(r"^\| (`[^|]*`) \| ([^|]+) \|", by_extra, re.MULTILINE):
        each, all_packages = re.findall(r"`([\w-]+)`", extras), packages.split(", ")
        several = len(each) > 1
        for extra in each:
            listed[extra] = {extra} if several else {one.strip() for one in all_packages}
    extras = project["optional-dependencies"]
    assert listed == {one: names(extras[one]) for one in extras if one not in ("dev", "docs")}


def test_the_targets_that_it_makes_do_not_get_its_arguments(tmp_path):
    code = "import pathlib, release; release.make('inner', pathlib.Path())"
    (tmp_path / "Makefile").write_text(
        f"outer:\n\t{sys.executable} -c \"{code}\"\ninner:\n\t@echo 'given [$(ARGS)]'\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "packaging")}
    done = subprocess.run(
        ["make", "outer", "ARGS=--steps x"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "given []" in done.stdout
