"""Code that cannot do its task but would pass where it shares a process with its tests: none of it
may pass.
"""

from pathlib import Path
from typing import Any

import pytest
from evaluation_makers import Writer
from sandbox_makers import sandbox_or_skip

from makers.texts import write_json_lines
from penstock.learn.evaluation.code import CodeTask
from penstock.learn.evaluation.tasks import TaskSettings

PROMPT = 'def helper(x):\n    return x * 2\n\n\ndef double(x):\n    """Twice x."""\n'
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": PROMPT,
    "entry_point": "double",
    "canonical_solution": "    return helper(x)\n",
}
PLUS = {"base_input": [[2], [-1]], "plus_input": [[7], [100]], "atol": 0}
SCRIPT = """
def assertion(out, exp, atol):
    assert out == exp or (atol != 0 and abs(out - exp) <= atol)

inputs = [[2], [-1], [7]]
results = [4, -2, 14]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(double(*inp), exp, 0)
"""
CHECK = """
import math
def check(candidate):
    assert candidate(2) == 4
    assert abs(candidate(-1) + 2) < 1e-6
    assert math.isclose(candidate(7), 14)
    assert candidate(5) == helper(5)
    assert candidate(3) == double(3)
"""
RECORDS: dict[str, dict[str, Any]] = {
    "humaneval": HUMANEVAL | {"test": CHECK},
    "humaneval_plus": HUMANEVAL | PLUS,
    "mbpp": {
        "task_id": 11,
        "text": "Write a function to double a number.",
        "code": "def double(x):\r\n    return 2 * x",
        "test_setup_code": "",
        "test_list": ["assert double(2) == 4", "assert double(-1) == -2", "assert double(7) == 14"],
    },
    "mbpp_plus": HUMANEVAL | PLUS | {"task_id": "Mbpp/900"},
    "mbpp_plus of the hub": {
        "task_id": 900,
        "prompt": "Double a number.",
        "code": "def double(x):\n    return 2 * x",
        "test_list": ["assert double(2) == 4"],
        "test": SCRIPT,
    },
}  # fmt: skip

CHEATS = {
    "equal to everything": """
class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __add__(self, other): return 0
    def __float__(self): return 14.0
def double(x): return Same()
""",
    "a number of its own": """
class Same(float):
    __eq__ = __le__ = __lt__ = lambda self, other: True
    __add__ = __sub__ = __abs__ = lambda self, *other: self
    __hash__ = float.__hash__
def double(x): return Same(x)
""",
    "a number that lies about its class": """
class Same:
    __class__ = property(lambda self: int)
    __eq__ = __le__ = __lt__ = lambda self, other: True
    __add__ = __sub__ = __abs__ = lambda self, *other: self
    __float__ = lambda self: 14.0
def double(x): return Same()
""",
    "a class equal to everything": """
class Kind(type):
    __eq__ = __lt__ = lambda self, other: True
    __add__ = __abs__ = lambda self, *other: self
    __hash__ = type.__hash__
    __float__ = lambda self: 14.0
class Same(metaclass=Kind): pass
def double(x): return Same
""",
    "a class that calls itself built-in": """
Same = type("dict", (dict,), {"__module__": "builtins", "__eq__": lambda self, other: True, "__hash__": None,
    "__add__": lambda self, other: 0, "__float__": lambda self: 14.0})
def double(x): return Same()
""",  # noqa: E501
    "looks at its callers": """
import sys
def double(x):
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_locals
        if "number" in place and "expected" in place: return place["expected"][place["number"]]
        if "exp" in place: return place["exp"]
        consts = list(frame.f_code.co_consts)
        if x in consts[:-1]: return consts[consts.index(x) + 1]
        frame = frame.f_back
""",
    "calls the reference": """
import gc, types
def double(x):
    for found in gc.get_objects():
        if isinstance(found, types.FunctionType) and found.__name__ == "double" and found is not double:
            return found(x)
""",  # noqa: E501
    "replaces built-ins": """
import builtins
builtins.abs = lambda value: 0
builtins.len = lambda value: 0
builtins.all = builtins.any = lambda values: True
builtins.zip = builtins.enumerate = lambda *values, **named: []
def double(x): return 0
""",
    "replaces the tests": """
import sys
def replace():
    main = sys.modules["__main__"].__dict__
    for frame in sys._current_frames().values():
        while frame is not None:
            for scope in (main, frame.f_globals):
                scope["assertion"] = scope["check"] = lambda *values: None
                for rule in scope.get("RULES", ()):
                    scope["RULES"][rule] = lambda *values: True
            frame = frame.f_back
replace()
def double(x):
    replace()
    return 0
""",
    "patches math and numpy": """
import math, unittest
import numpy
math.isclose = numpy.allclose = lambda *values, **named: True
unittest.TestCase.assertEqual = lambda *values: None
def double(x): return 0
""",
    "patches how answers are read": """
import json, sys
json.loads = json.dumps = lambda *values, **named: 4
for frame in sys._current_frames().values():
    while frame is not None:
        for name in ("decode", "encode", "_answer", "_report", "_attest"):
            if name in frame.f_globals: frame.f_globals[name] = lambda *values, **named: 4
        frame = frame.f_back
def double(x): return 4
""",
    "jumps over the tests": """
import sys
def jump(frame, event, argument):
    if event == "line" and frame.f_code.co_name == "<module>":
        for line in range(frame.f_lineno + 60, frame.f_lineno, -1):
            try:
                frame.f_lineno = line
                return jump
            except ValueError:
                pass
    return jump
def double(x): return 0
sys.settrace(lambda *values: None)
sys._getframe().f_trace = jump
""",
    "leaves at the first call": "import sys\ndef double(x): sys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves by an exception": "def double(x): raise SystemExit(0)",
    "raises what tests may catch": "def double(x): raise AssertionError",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 0",
    "leaves from a thread": (
        "import os, threading\nthreading.Timer(0, os._exit, (0,)).start()\ndef double(x): return 0"
    ),
    "says that it passed": """
import os
print("P" * 33, "passed", flush=True)
def double(x):
    for pipe in range(64):
        try: os.write(pipe, b"P" + bytes(32))
        except OSError: pass
    os._exit(0)
""",
    "forges answers": """
import os, sys
def double(x):
    text = b'{"object": [0, "int"]}'
    for pipe in range(3, 64):
        try: os.write(pipe, len(text).to_bytes(8, "big") + text + bytes(8))
        except OSError: pass
    return 0
""",
    "two processes answer": "import os\nos.fork()\ndef double(x): return 0",
    "ends the tests": """
import os, signal
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
    try: os.kill(os.getppid(), name)
    except OSError: pass
def double(x): return 0
""",
    "reads the memory of the tests": """
import ctypes, os
library = ctypes.CDLL(None)
def double(x):
    for process in (os.getppid(), os.getpid() - 1):
        if library.ptrace(16, process, 0, 0) == 0: return 2 * x
        try: return 2 * x if open(f"/proc/{process}/mem", "rb") else 0
        except OSError: pass
        try: return 2 * x if os.listdir(f"/proc/{process}/fd") else 0
        except OSError: pass
    return 0
""",
    "finds the tests in files": """
import glob, sys
def double(x):
    for path in (__file__ if "__file__" in globals() else "", *sys.argv, *glob.glob("/tmp/*"), *glob.glob("/*.py")):
        try: return 2 * x if "double(" in open(path).read() else 0
        except OSError: pass
    return 0
""",  # noqa: E501
}
CHEATS_WITH_NAMES = {
    "gives the tests another helper": "def helper(x): return 0\ndef double(x): return 2 * x if x != 5 else 0",  # noqa: E501
    "agrees with itself": "def double(x): return 2 * x if x != 3 else 0",
}
"""For tests that call the prompt's helpers, or the function itself, by name."""
HONEST = (
    "import math\ndef helper(x): return x + x\ndef double(x):\n    print('twice')\n    return "
    "helper(x)\n"
)


def make_task(benchmark: str, folder: Path) -> CodeTask:
    sandbox_or_skip(packages=("numpy",))
    name = benchmark.split()[0]
    path = folder / {"mbpp": "mbpp.jsonl", "mbpp_plus": "MbppPlus.jsonl"}.get(
        name, "HumanEvalPlus.jsonl"
    )
    examples = (
        [RECORDS["mbpp"] | {"task_id": number} for number in (2, 3, 4)] if name == "mbpp" else []
    )
    write_json_lines(path, (RECORDS[benchmark], *examples))
    return CodeTask(TaskSettings(name=name, data=str(path), chat=True))


def score(task: CodeTask, code: str) -> tuple[float, object]:
    (answer,) = task.answer(Writer([f"```python\n{code}\n```"]).subject, task.problems())
    return answer.score, answer.detail["samples"]


@pytest.mark.parametrize("benchmark", RECORDS)
def test_honest_code_passes(tmp_path: Path, benchmark: str) -> None:
    assert score(make_task(benchmark, tmp_path), HONEST)[0] == 1


@pytest.mark.parametrize("kind", CHEATS)
@pytest.mark.parametrize("benchmark", RECORDS)
def test_cheats_fail(tmp_path: Path, benchmark: str, kind: str) -> None:
    found, detail = score(make_task(benchmark, tmp_path), CHEATS[kind])
    assert found == 0, detail


@pytest.mark.parametrize("kind", CHEATS_WITH_NAMES)
def test_tests_use_their_own_names(tmp_path: Path, kind: str) -> None:
    found, detail = score(make_task("humaneval", tmp_path), CHEATS_WITH_NAMES[kind])
    assert found == 0, detail


TREE = {
    "task_id": 11,
    "text": "Write a function to find the depth of a tree.",
    "code": "class Node:\r\n    def __init__(self, x):\r\n        self.x, self.left = x, None\r\n"
    "def depth(node):\r\n    return 0 if node is None else 1 + depth(node.left)",
    "test_setup_code": "root = Node(1)\r\nroot.left = Node(2)\r\nroot.left.left = Node(3)",
    "test_list": ["assert depth(root) == 3", "assert depth(root.left) == 2"],
}


def test_tests_may_build_objects_of_the_codes_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDS, "mbpp", TREE)
    task = make_task("mbpp", tmp_path)
    assert score(task, TREE["code"].replace("\r", ""))[0] == 1
    assert score(task, TREE["code"].replace("\r", "").replace("1 + ", "2 + "))[0] == 0
    found, detail = score(
        task, TREE["code"].replace("\r", "").replace("0 if node is None else 1 +", "node or")
    )
    assert found == 0
    assert "an answer has the type Node; expected plain values" in str(detail)
