"""Code in replies and continuations."""

import math
from itertools import combinations

import pytest

from penstock.core.errors import ConfigError
from penstock.learn.evaluation.code import pass_at_k
from penstock.learn.evaluation.code_problems import code_of_reply, cut_at, defines, fenced_blocks

ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    "reply",
    [
        ADD,
        f"```python\n{ADD}```",
        f"Sure! Here it is:\n\n```python\n{ADD}```\n\nIt adds `a` and `b`.",
        f"```\n{ADD}```",
        f"~~~ Python\n{ADD}~~~",
        f"```python title='add.py'\n{ADD}```",
        f"```python\n{ADD}",
        f"```bash\npip install nothing-at-all-but-long-enough-to-win\n```\nThen:\n```py\n{ADD}```",
        (
            "So:\n```python\nprint(add(1, 2))  # a longer block than the function itself "
            f"is\n```\n```python\n{ADD}```"
        ),
        "1. First:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n2. Done.",
        (
            f"```python\n{ADD}```\n\nTo test it:\n\n```python\nassert add(1, 2) == 3\nassert "
            "add(3, 4) == 7\n```"
        ),
        f"````python\n{ADD}````",
    ],
)
def test_the_function_is_found(reply: str) -> None:
    assert code_of_reply(reply, ("add",)).strip() == ADD.strip()


def test_a_draft_in_the_models_thoughts_is_not_the_reply() -> None:
    draft = "<think>\n```python\ndef add(a, b):\n    return a - b\n```\nNo.\n</think>\n"
    assert code_of_reply(f"{draft}```python\n{ADD}```", ("add",)) == ADD
    assert code_of_reply(f"{draft}\n{ADD}", ("add",)).strip() == ADD.strip()


def test_the_block_with_most_names_wins() -> None:
    part, whole = "class Pair:\n    pass\n", f"class Pair:\n    pass\n\n\n{ADD}"
    calls = "add(1, 2)\n" * 9
    reply = f"```python\n{part}```\n```python\n{whole}```\n```python\n{calls}```"
    assert code_of_reply(reply, ("Pair", "add")) == whole


def test_blocks_keep_order_and_language() -> None:
    text = "a\n```Python\none\n```\nb\n```\ntwo\n```\n~~~js\nthree\n"
    assert fenced_blocks(text) == [("python", "one\n"), ("", "two\n"), ("js", "three\n")]
    assert fenced_blocks("no `code` at all") == []
    assert fenced_blocks("```") == [("", "")]


def test_a_shorter_fence_does_not_close_a_longer_one() -> None:
    assert fenced_blocks("````\n```\ninner\n```\n````\n") == [("", "```\ninner\n```\n")]


def test_without_an_entry_point_the_longest_python_block_wins() -> None:
    assert (
        code_of_reply(
            "```python\nx = 1\n```\n```python\nx = 1\ny = 2\n```\n```text\nlong words, longer\n```"
        )
        == "x = 1\ny = 2\n"
    )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (ADD, True),
        ("async def add(): pass", True),
        ("class add: pass", True),
        ("add = lambda a, b: a + b", True),
        ("def other():\n    def add(): pass", False),
        ("add(1, 2)", False),
        ("def added(): pass", False),
        ("def add(a, b):\n    return (a +", True),
        ("x = '''def add", False),
    ],
)
def test_what_defines_a_function(code: str, found: bool) -> None:
    assert defines(code, "add") is found


def test_a_continuation_ends_at_the_first_stop() -> None:
    assert cut_at("    return 1\n\nprint(2)\ndef f()", ("\ndef", "\nprint")) == "    return 1\n"
    assert cut_at("    return 1\n", ("\ndef",)) == "    return 1\n"


@pytest.mark.parametrize("passed", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_counts_the_sets_with_one_that_passed(passed: int, k: int) -> None:
    sets = list(combinations([True] * passed + [False] * (5 - passed), k))
    assert math.isclose(pass_at_k(5, passed, k), sum(map(any, sets)) / len(sets))


def test_pass_at_k_holds_for_many_samples() -> None:
    product = 1 - math.prod(1 - 100 / n for n in range(190 - 1 + 1, 200 + 1))
    assert math.isclose(pass_at_k(200, 11, 100), product)
    with pytest.raises(ConfigError, match=r"pass@10.*least 10.*got 5"):
        pass_at_k(5, 1, 10)
    with pytest.raises(ConfigError, match="num_passed must be 0 to 5, got 6"):
        pass_at_k(5, 6, 1)
