"""The benchmarks' records: their prompts, and programs that pass and fail as they must."""

import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from sandbox_makers import sandbox_or_skip

from penstock.core.errors import ConfigError, RecordError
from penstock.learn.evaluation import differential
from penstock.learn.evaluation.code_datasets import (
    humaneval_problem,
    mbpp_plus_problem,
    mbpp_problems,
)
from penstock.learn.evaluation.code_problems import CodeProblem
from penstock.learn.evaluation.records import Origin, read_records
from penstock.learn.evaluation.sandbox import Limits, Outcome, Sandbox

PROMPT = (
    'import math\n\n\ndef helper(x):\n    return x * 2\n\n\ndef double(x):\n    """Twice x."""\n'
)
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": PROMPT,
    "entry_point": "double",
    "canonical_solution": "    return helper(x)\n",
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert "
        "candidate(-1) == -2\n"
    ),
}
PLUS = {
    **{
        name: HUMANEVAL[name] for name in ("task_id", "prompt", "entry_point", "canonical_solution")
    },
    "contract": "",
    "base_input": [[2], [-1]],
    "plus_input": [[0.1], [math.inf]],
    "atol": 0,
}
MBPP_PLUS = {
    "task_id": "Mbpp/2",
    "prompt": '"""\nThe elements of both.\nassert similar_elements((1, 2), (2, 3)) == (2,)\n"""\n',
    "entry_point": "similar_elements",
    "canonical_solution": "\ndef similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
    "base_input": [[[3, 4, 5], [5, 4, 7]]],
    "plus_input": [[[1], [2]]],
    "atol": 0,
    "contract": "",
    "assertion": "assert True",
}
HUB_PLUS = {
    "task_id": 2,
    "code": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))",
    "prompt": "Write a function to find the elements of both.",
    "test_list": ["assert similar_elements((1, 2), (2, 3)) == (2,)"],
    "test": (
        "inputs = [[(1, 2), (2, 3)]]\nfor given in inputs:\n    assert "
        "set(similar_elements(*given)) == {2}\n"
    ),
}


def _mbpp(number: int) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": f"Write a function to add {number}.",
        "code": f"def add(x):\r\n    return x + {number}\r\n",
        "test_setup_code": "one = 1",
        "test_list": [f"assert add(one) == {number + 1}", f"assert add(2) == {number + 2}"],
        "challenge_test_list": [],
    }


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return sandbox_or_skip(Limits(wall_seconds=240, cpu_seconds=120, memory_bytes=4 << 30))


def outcome_of(sandbox: Sandbox, problem: CodeProblem, code: str) -> Outcome:
    return sandbox.run(problem.tests, code)


BENCHMARKS: dict[str, Callable[[], CodeProblem]] = {
    "humaneval": lambda: humaneval_problem(HUMANEVAL, "file"),
    "humaneval_plus": lambda: humaneval_problem(PLUS, "file"),
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_humaneval_continues_its_prompt(sandbox: Sandbox, benchmark: str) -> None:
    problem = BENCHMARKS[benchmark]()
    assert (problem.name, problem.prompt) == ("HumanEval/900", PROMPT)
    assert outcome_of(sandbox, problem, problem.of_canonical()).passed
    assert outcome_of(
        sandbox, problem, problem.of_completion("    return helper(x)\n\n\ndef more(:\n")
    ).passed
    assert outcome_of(
        sandbox, problem, problem.of_completion("    return x + x\n# words\n) (")
    ).passed
    for wrong in ("    return x\n", "    pass\n", "    return helper(x) if x > 0 else None\n", ""):
        outcome = outcome_of(sandbox, problem, problem.of_completion(wrong))
        assert outcome.verdict == "failed", outcome
        assert outcome.detail.startswith("AssertionError")


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_humaneval_replies_may_be_whole_or_a_body(sandbox: Sandbox, benchmark: str) -> None:
    problem = BENCHMARKS[benchmark]()
    assert PROMPT in problem.request
    for reply in (
        "Here:\n```python\ndef double(x):\n    return helper(x)\n```\n",
        "```python\n" + PROMPT + "    return helper(x)\n```",
        "    return helper(x)\n",
        (
            "```python\ndouble = lambda x: helper(x)\n```\n```python\nprint(double(1), 'longer "
            "than the code')\n```"
        ),
    ):
        outcome = outcome_of(sandbox, problem, problem.of_reply(reply))
        assert outcome.passed, (reply, outcome)
    assert not outcome_of(sandbox, problem, problem.of_reply("I cannot do that.")).passed
    assert not outcome_of(
        sandbox, problem, problem.of_reply("```python\ndef triple(x):\n    return 3 * x\n```")
    ).passed


def test_plus_inputs_are_tested_each(sandbox: Sandbox) -> None:
    problem = humaneval_problem(PLUS, "file")
    only_base = "    return x * 2 if x in (2, -1) else 0\n"
    assert (
        "input 2: int 0, expected float 0.2"
        in outcome_of(sandbox, problem, problem.of_completion(only_base)).detail
    )
    almost = "    return x * 2.0000000001 if x != 2 else 4\n"
    assert (
        "input 1" in outcome_of(sandbox, problem, problem.of_completion(almost)).detail
    )  # an int is expected there, so exactly
    closer = "    return x * 2 if isinstance(x, int) else x * 2 + 1e-9\n"
    assert outcome_of(
        sandbox, problem, problem.of_completion(closer)
    ).passed  # floats are held to 1e-6


def test_a_function_may_change_what_it_is_given(sandbox: Sandbox) -> None:
    record = {
        **PLUS,
        "prompt": "def last(x):\n",
        "entry_point": "last",
        "canonical_solution": "    return x.pop()\n",
    }
    record |= {"base_input": [[[1, 2, 3]]], "plus_input": [[[4, 5]]]}
    problem = humaneval_problem(record, "file")
    assert outcome_of(sandbox, problem, problem.of_canonical()).passed
    assert outcome_of(sandbox, problem, problem.of_completion("    return x[-1]\n")).passed


def test_a_solution_that_is_slow_fails_early(sandbox: Sandbox) -> None:
    problem = humaneval_problem(PLUS, "file")
    tests = problem.tests.replace("LEAST_SECONDS = 4.0, 4.0", "LEAST_SECONDS = 4.0, 0.2")
    outcome = sandbox.run(tests, problem.of_completion("    while True:\n        pass\n"))
    assert outcome.verdict == "failed"
    assert "SlowError" in outcome.detail
    assert outcome.seconds < 4


def test_mbpp_plus_gives_tuples_and_compares_sets(sandbox: Sandbox) -> None:
    problem = mbpp_plus_problem(MBPP_PLUS, "file")
    assert problem.prompt == MBPP_PLUS["prompt"]
    assert outcome_of(sandbox, problem, problem.of_canonical()).passed
    listed = (
        "```python\ndef similar_elements(a, b):\n    assert type(a) is tuple\n    return [x for x "
        "in a if x in b]\n```"
    )
    assert outcome_of(sandbox, problem, problem.of_reply(listed)).passed
    helper = (
        "def helper(a):\n    return set(a)\n\ndef similar_elements(a, b):\n    return "
        "tuple(helper(a) & helper(b))\n"
    )
    assert outcome_of(
        sandbox, problem, problem.of_reply(helper)
    ).passed  # not the first function: the one that is named
    assert (
        "not defined"
        in outcome_of(
            sandbox, problem, problem.of_reply("def similar(a, b):\n    return a\n")
        ).detail
    )


def test_mbpp_plus_of_the_hub_runs_its_script(sandbox: Sandbox) -> None:
    problem = mbpp_plus_problem(HUB_PLUS, "file")
    assert problem.name == "Mbpp/2"
    assert outcome_of(sandbox, problem, problem.of_canonical()).passed
    assert not outcome_of(
        sandbox, problem, problem.of_completion("def similar_elements(a, b):\n    return a\n")
    ).passed


def test_mbpp_prompts_are_as_published(sandbox: Sandbox) -> None:
    records = [_mbpp(number) for number in (2, 3, 4, 10, 11, 510, 511)]
    first, last = mbpp_problems(records, 3, "file")
    assert (first.name, last.name) == ("MBPP/11", "MBPP/510")
    assert mbpp_problems(records, 1, "file")[0].prompt == (
        "You are an expert Python programmer, and here is your task: Write a function to add "
        "2. Your code should pass these tests:\n\nassert add(one) == 3\nassert add(2) == "
        "4\n[BEGIN]\ndef add(x):\n    return x + 2\n[DONE]\n\nYou are an expert Python "
        "programmer, and here is your task: Write a function to add 11. Your code should pass "
        "these tests:\n\nassert add(one) == 12\nassert add(2) == 13\n[BEGIN]\n"
    )
    assert first.prompt.count("[DONE]") == 3
    assert outcome_of(sandbox, first, first.of_canonical()).passed
    assert outcome_of(
        sandbox, first, first.of_completion("def add(x):\n    return x + 11\n[DONE]\nmore")
    ).passed
    assert outcome_of(
        sandbox, first, first.of_reply("```python\ndef add(x):\n    return x + 11\n```")
    ).passed
    assert not outcome_of(
        sandbox, last, last.of_completion("def add(x):\n    return x + 11\n[DONE]")
    ).passed
    with pytest.raises(RecordError, match="file: problem 4 is missing"):
        mbpp_problems([_mbpp(2), _mbpp(3), _mbpp(11)], 3, "file")


def test_tests_that_a_reply_repeats_are_not_its_code(sandbox: Sandbox) -> None:
    hub = mbpp_plus_problem(HUB_PLUS, "file")
    for problem, code in (
        (mbpp_problems([_mbpp(11)], 0, "file")[0], "def add(x):\n    return x + 11\n"),
        (hub, f"{HUB_PLUS['code']}\n"),
    ):
        name = problem.names[0]
        checks = "".join(f"assert {name} is not None  # {n}\n" for n in range(9))
        reply = f"Here:\n\n```python\n{code}```\n\nIt passes:\n\n```python\n{checks}```\n"
        outcome = outcome_of(sandbox, problem, problem.of_reply(reply))
        assert outcome.passed, outcome


def test_records_of_another_benchmark_are_refused() -> None:
    with pytest.raises(RecordError, match=r"'prompt'.*test_list"):
        humaneval_problem(_mbpp(11), "file")
    with pytest.raises(RecordError, match="no 'test_list'"):
        mbpp_problems([{"task_id": 11, "text": "words", "test_setup_code": ""}], 0, "file")
    with pytest.raises(RecordError, match=r"benchmark's.*tests.*Python.*':'"):
        mbpp_problems([_mbpp(11) | {"code": "def add(x) return x"}], 0, "file")
    with pytest.raises(RecordError, match="no 'plus_input'"):
        mbpp_plus_problem(
            {name: value for name, value in MBPP_PLUS.items() if name != "plus_input"}, "file"
        )


@pytest.mark.parametrize(
    ("rule", "found", "expected", "arguments", "tolerance", "same"),
    [
        ("same", (1, 2), (1, 2), [], 0, True),
        ("same", [1, 2], (1, 2), [], 0, False),
        ("same", 1.0000001, 1.0, [], 0, True),
        ("same", 1.00001, 1.0, [], 0, False),
        ("same", 1.00001, 1.0, [], 1e-4, True),
        ("same", 1, 1.0, [], 0, True),
        ("same", 2, 1.9999999, [], 0, False),  # of another type, and not equal
        ("same", [1.0000001], [1.0], [], 0, True),
        ("same", [1.0, 2.0], [1.0], [], 0, False),
        ("same", math.nan, math.nan, [], 0, False),
        ("same", math.inf, 1.0, [], 0, False),
        ("same", math.inf, math.inf, [], 0, True),
        ("same", [], [], [], 0, True),
        ("same", [1], [], [], 0, False),
        ("set", [2, 1], (1, 2), [], 0, True),
        ("something", None, False, [], 0, True),
        ("something", "match", True, [], 0, True),
        ("something", "match", None, [], 0, False),
        ("or zero", 0, 7, [], 0, True),
        ("or zero", 6, 7, [], 0, False),
        ("anything", 3, 4, [], 0, True),
        ("root", -0.5, None, [[1, 2]], 1e-4, True),
        ("root", 0.5, None, [[1, 2]], 1e-4, False),
        ("pyramid", 33, 33, [3, 4], 0, True),
        ("pyramid", 35, 33, [3, 4], 0, True),
        ("pyramid", 34, 33, [3, 4], 0, False),
        ("digits", 12, 1, [1, 256], 0, True),
        ("digits", 5, 1, [1, 256], 0, False),
    ],
)
def test_what_counts_as_the_same(
    rule: str, found: object, expected: object, arguments: list[Any], tolerance: float, same: bool
) -> None:
    assert differential.RULES[rule](found, expected, arguments, tolerance) is same


def test_records_are_found_in_folders_and_formats(tmp_path: Path) -> None:
    origin = Origin(files=("MBPP", "test"), hub="someone/mbpp", configuration="full")
    records = [{"a": 1, "b": [1, 2]}, {"a": 2, "b": []}]
    lines = "\n".join(map(json.dumps, records)) + "\n\n"
    (tmp_path / "MbppPlus-v1.jsonl").write_text('{"wrong": 1}\n')
    with pytest.raises(ConfigError, match=r"file.*MBPP.*\.jsonl"):
        read_records(str(tmp_path), origin, "mbpp")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(records), tmp_path / "test-00000-of-00001.parquet"
    )
    assert read_records(str(tmp_path), origin, "mbpp")[0] == records
    (tmp_path / "mbpp.jsonl").write_text(lines)
    assert read_records(str(tmp_path), origin, "mbpp") == (records, str(tmp_path / "mbpp.jsonl"))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write(lines)
    assert read_records(str(tmp_path / "packed.jsonl.gz"), origin, "mbpp")[0] == records
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        read_records(str(tmp_path / "absent"), origin, "mbpp")
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(RecordError, match="line 2: not valid JSON"):
        read_records(str(tmp_path / "broken.jsonl"), origin, "mbpp")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(RecordError, match="line 1: expected a JSON object, got list"):
        read_records(str(tmp_path / "list.jsonl"), origin, "mbpp")
    for name, content, reported in (
        ("a.jsonl", b'{"a": "\xff"}\n', "cannot be read"),
        ("b.jsonl.gz", b"no gzip", "cannot be read"),
        ("c.parquet", b"no parquet", "cannot be read"),
        ("d.jsonl", b"\n\n", "has no records"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordError, match=rf"{name}: {reported}.*fetch.*again"):
            read_records(str(tmp_path / name), origin, "mbpp")


def real_problems(real_data: Path, name: str) -> list[CodeProblem]:
    origin = Origin(files=(), hub="", configuration="")
    records, where = read_records(str(real_data / "eval" / name), origin, name)
    if name == "mbpp.jsonl":
        problems = mbpp_problems(records, 3, where)
    else:
        make = humaneval_problem if name.startswith("Human") else mbpp_plus_problem
        problems = [make(record, where) for record in records]
    assert len(problems) in (164, 500, 399)
    return problems


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "every"),
    [("HumanEval.jsonl.gz", 16), ("mbpp.jsonl", 50), ("MbppPlus-v0.1.0.jsonl.gz", 25)],
)
def test_canonical_solutions_pass(real_data: Path, sandbox: Sandbox, name: str, every: int) -> None:
    chosen = real_problems(real_data, name)[::every]
    tests = [one.tests for one in chosen]
    outcomes = sandbox.run_all(tests, [one.of_canonical() for one in chosen])
    for problem, outcome in zip(chosen, outcomes, strict=True):
        assert outcome.passed, (problem.name, outcome)
    emptied = [one.given + "    pass\n" if name.startswith("Human") else "" for one in chosen]
    assert not any(outcome.passed for outcome in sandbox.run_all(tests, emptied))


CHEATS = {
    "equal to everything": """
class Same:
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
def cheat(*arguments): return Same()
""",
    "looks at its callers": """
import sys
def cheat(*arguments):
    frame = sys._getframe(1)
    while frame is not None:
        if "expected" in frame.f_locals: return frame.f_locals["expected"][frame.f_locals["number"]]
        frame = frame.f_back
""",
}


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "every"),
    [("HumanEval.jsonl.gz", 8), ("mbpp.jsonl", 25), ("MbppPlus-v0.1.0.jsonl.gz", 25)],
)
def test_cheats_pass_nothing(real_data: Path, sandbox: Sandbox, name: str, every: int) -> None:
    chosen = real_problems(real_data, name)[::every]
    for code in CHEATS.values():
        codes = [f"{one.of_canonical()}\n{code}\n{entry_of(one)} = cheat\n" for one in chosen]
        outcomes = list(sandbox.run_all([one.tests for one in chosen], codes))
        assert not [
            one.name for one, outcome in zip(chosen, outcomes, strict=True) if outcome.passed
        ]


def entry_of(problem: CodeProblem) -> str:
    """The function that is called first."""
    match = re.search(r"function_of_solution\('(\w+)'\)", problem.tests)
    assert match is not None
    return match[1]
