"""Files that are made to hurt a reader of YAML, or that YAML reads otherwise than it looks: one
line each, at once.
"""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.yaml_files import MOST_BYTES, parse_yaml
from penstock.use.config import load_run
from penstock.use.config.run_file import resolved_text

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{now}: &{now} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, now in zip("abcdefgh", "bcdefghi", strict=True)
)
"""700 bytes that stand for 9⁹ values."""
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{now}: &{now}\n  <<: [{', '.join([f'*{before}'] * 9)}]\n"
    for before, now in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))
GOOD = """\
data:
  sources:
    - {path: web, slice: &half [0, 0.5]}
    - {path: talk, slice: *half}
  loader: {sequence_length: 64, rows_per_step: 4}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            LAUGHS,
            (
                r"run.yaml:\d: has [\d,]+ values with aliases \(\*name\) expanded; expected at "
                r"most 50,000$"
            ),
        ),
        (MERGED, r"run.yaml:\d+: has [\d,]+ values with aliases"),
        (CHAIN, r"run.yaml:\d+: is nested more than 50 levels deep; expected fewer$"),
        ("a: " + "[" * 5000, r"run.yaml: is nested more than 50 levels deep; expected fewer$"),
        ("a: " + "[" * 60 + "]" * 60, r"run.yaml:1: is nested more than 50 levels deep"),
        (
            "data: &x {a: *x}",
            r"run.yaml:1: contains itself through an alias \(\*name\); write it out$",
        ),
        ("data:\n  1: a", r"run.yaml:2: the key 1 is not text; put it in quotes$"),
        ("data:\n  on: a", r"run.yaml:2: the key on is not text; put it in quotes$"),
        ("? [a]\n: 2", r"run.yaml:1: the key a list or mapping is not text"),
        ("data: {a: 1, a: 2}", r"run.yaml:1: data.a is given twice, first on line 1; keep one$"),
        ("data: !!timestamp x", r"run.yaml: is not YAML: .*; correct it there$"),
        ("data: !!bool x", r"run.yaml: is not YAML: .*; correct it there$"),
        ("data: " + "9" * 5000, r"run.yaml: is not YAML: .*4300 digits"),
        ("data: 1\n---\ndata: 2", r"run.yaml:2: is not YAML: but found another document"),
        ("data: \x01", r"run.yaml: is not YAML: unacceptable character"),
        (
            "#" * (MOST_BYTES + 1),
            r"run.yaml: is larger than 1 MiB; expected a YAML file that a person wrote$",
        ),
    ],
)
def test_hostile_files(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    for read in (load_run, resolved_text):
        with pytest.raises(ConfigError, match=message) as told:
            read(path)
        assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (f"data={LAUGHS.replace(chr(10), ', ')}", r"^--set data=a: &a .*…: the value: is not YAML"),
        ("data={a: &a [1], b: {c: *a, d: *a}, a: 1}", r"^--set data=.*: data.a is given twice"),
        (".".join("a" * 200) + "=1", r"^--set a\.a.*…: has 199 dots; expected fewer than 50$"),
        (
            "data={1: a}",
            r"^--set data=\{1: a\}: the value: the key 1 is not text; put it in quotes$",
        ),
    ],
)
def test_hostile_assignments(tmp_path, assignment, message):
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=message):
        load_run(tmp_path / "run.yaml", [assignment])


def test_other_bytes_and_a_mark_at_the_beginning(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"data:\n  a: \xff")
    with pytest.raises(ConfigError, match=r"run.yaml:2: is not UTF-8; save.*UTF-8$"):
        load_run(path)
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert [source.slice for source in load_run(path).data.sources] == [(0, 0.5), (0, 0.5)]


def test_a_file_without_end_is_not_read_to_its_end():
    with pytest.raises(ConfigError, match="/dev/zero: is larger than 1 MiB"):
        load_run("/dev/zero")


def test_aliases_as_people_use_them():
    _, value = parse_yaml("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\nyours: [*b, *b]", "a")
    assert value["mine"] == {"x": 1, "y": 3}
    assert value["yours"] == [{"x": 1, "y": 2}] * 2
