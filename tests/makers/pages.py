"""Pages of Markdown as programs: their blocks of code are run as a reader runs them, in the order
of the page.

    ```python                        runs in the page's one interpreter, which has imported torch; the value of a last expression is shown, as a
                                     notebook shows it
    ```bash                          runs in the page's one shell (`cd`, variables and jobs in the background remain),
                                     in the same folder, with `penstock`, `python` and `torchrun` on
                                     its path
    ```yaml title="run.yaml"         any language with a title: the block is written to that file, and not run
    ```text                          right after a block: what the block prints

A comment on a line of its own before a block says more:

    <!-- not run: reason -->         the block is only read
    <!-- fails -->                   the block ends with an error, which is part of what it prints
    <!-- exact -->                   before a ```text block: its numbers are compared too

and anywhere on the page:

    <!-- needs: av, soundfile -->    the page is skipped where one of these modules is not there
    <!-- models: smollm2 -->         the page needs folders of these real models: `make test-real` runs it alone
    <!-- continues: first.md -->     the page goes on in the folder of that page, in a session of its own
    <!-- given: model: Any; … -->    names that blocks use and the reader has, with their types, for the type checker

What a block prints is compared line by line: colours, the amount of white space and the values of
numbers do not count, `…` stands for anything within a line, and a line that is only `…` for any
lines.
"""  # noqa: E501

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from makers.forked import fork
from makers.page_child import serve
from patience import PATIENCE_SECONDS

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]+)?(?P<rest>[^`]*)$")
_COMMENT = re.compile(r"^ *<!-- *(?P<name>not run|fails|exact)(?:: *(?P<reason>.*?))? *-->$")
_NUMBER = re.compile(r"[-+−]?\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?")
_NOISE = re.compile(
    r"^(?:penstock: compiling kernels .*|(?!step )[^\n]+:[^\n]* · \d+:\d\d(?: elapsed)?(?: · "
    r"\d+:\d\d left)?)(?:\n|\Z)",
    re.MULTILINE,
)
"""Lines that depend on what ran before, and lines of progress, which a terminal shows as a bar that
moves.
"""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")


class PageError(AssertionError):
    """A block of a page did not do what the page says; the message has page and line."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code: its text, where it starts on the page, and what the page says about it."""

    language: str
    code: str
    line: int
    """The line of its first line of code, from 1."""
    title: str | None = None
    not_run: str | None = None
    fails: bool = False
    expected: str | None = None
    exact: bool = False

    @property
    def runs(self) -> bool:
        """Whether the block is run, and not only read or written to a file."""
        return self.language in ("python", "bash") and self.not_run is None and self.title is None


@dataclass(kw_only=True)
class Output:
    """What a block printed, and the value that it ended with as a notebook shows it: MIME type to
    text.
    """

    printed: str = ""
    shown: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def text(self) -> str:
        """All that a reader of plain text sees, errors included."""
        return "\n".join(
            part.rstrip("\n") for part in (self.printed, self.shown.get("text/plain", "")) if part
        )


def read_blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page in their order; a ```text block right after another is its
    `expected`.
    """
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    marks: dict[str, str] = {}
    follows, at = False, 0  # whether only blank lines and comments came since the last block
    while at < len(lines):
        line = lines[at]
        if comment := _COMMENT.match(line):
            marks[comment["name"]] = comment["reason"] or ""
        elif fence := _FENCE.match(line):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), None)
            if end is None:
                raise PageError(
                    f"{page}:{at + 1}: a block that is never closed; expected a line ``` after it"
                )
            code = "".join(
                part.removeprefix(fence["indent"]) + "\n" for part in lines[at + 1 : end]
            )
            block = _block(page, fence, code, at + 2, marks)
            if (
                block.language == "text"
                and follows
                and blocks
                and blocks[-1].expected is None
                and not block.title
            ):
                blocks[-1] = _expecting(blocks[-1], block)
            else:
                blocks.append(block)
            marks, follows, at = {}, True, end
        elif line.strip():
            if marks:
                raise PageError(
                    f"{page}:{at + 1}: text after the comment {next(iter(marks))!r}; expected "
                    "a block"
                )
            follows = False
        at += 1
    return blocks


def _block(page: Path, fence: re.Match[str], code: str, line: int, marks: dict[str, str]) -> Block:
    title = re.search(r'title="([^"]+)"', fence["rest"])
    if marks.get("not run") == "":
        raise PageError(f"{page}:{line}: no reason; expected <!-- not run: the reason -->")
    return Block(
        language=fence["language"] or "",
        code=code,
        line=line,
        title=title and title[1],
        not_run=marks.get("not run"),
        fails="fails" in marks,
        exact="exact" in marks,
    )


def _expecting(block: Block, text: Block) -> Block:
    return Block(**{**vars(block), "expected": text.code, "exact": text.exact})


def needs(page: Path) -> list[str]:
    """The modules without which the page cannot be run."""
    found = re.findall(r"<!-- needs: (.*?) -->", page.read_text(encoding="utf-8"))
    return [name.strip() for names in found for name in names.split(",")]


def models(page: Path) -> list[str]:
    """The folders with real models that the page needs."""
    found = re.findall(r"<!-- models: (.*?) -->", page.read_text(encoding="utf-8"))
    return [name.strip() for names in found for name in names.split(",")]


def continues(page: Path) -> Path | None:
    """The page that this one continues, in the same folder; None: it begins with an empty one."""
    found = re.search(r"<!-- continues: (.*?) -->", page.read_text(encoding="utf-8"))
    return page.parent / found[1] if found else None


def given(page: Path) -> list[str]:
    """The names that the page's reader has, each as `name: type`."""
    found = re.findall(r"<!-- given: (.*?) -->", page.read_text(encoding="utf-8"))
    return [one.strip() for names in found for one in names.split(";")]


def run_page(page: Path, folder: Path) -> list[tuple[Block, Output]]:
    """Run a page in a folder and compare what its blocks print; what each of them gave.

    Raises:
        PageError: A block failed, did not fail though the page says so, or printed something else.
    """
    found = []
    with Session(page, folder) as session:
        for block in read_blocks(page):
            output = session.run(block)
            compare(page, block, output)
            found.append((block, output))
    return found


def compare(page: Path, block: Block, output: Output) -> None:
    """Fail where a block that ran did not end or print as its page says."""
    where = f"{page}:{block.line}"
    if not block.runs:
        return
    if output.error is not None and not block.fails:
        raise PageError(f"{where}: the block failed\n{output.text}\n{output.error}")
    if output.error is None and block.fails:
        raise PageError(f"{where}: the block did not fail, which the page says\n{output.text}")
    if block.expected is not None and not matches(block.expected, output.text, exact=block.exact):
        raise PageError(f"{where}: printed\n{output.text}\nexpected\n{block.expected}")


def rewrite_page(page: Path, folder: Path) -> None:
    """Run a page, and write the numbers that its blocks printed into it.

    Raises:
        PageError: A block failed, or printed something else than other numbers; the page is as it
            was.
    """
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    with Session(page, folder) as session:
        found = [(block, session.run(block)) for block in read_blocks(page)]
    for block, output in reversed(found):
        compare(page, block, output)
        if block.runs and block.expected is not None:
            begin = (
                next(i for i in range(block.line, len(lines)) if lines[i].startswith("```text")) + 1
            )
            lines[begin : begin + block.expected.count("\n")] = [renew(block.expected, output.text)]
    page.write_text("".join(lines), encoding="utf-8")


def renew(expected: str, printed: str) -> str:
    """The expected text with the numbers that were printed, where the two match."""
    pattern = "".join(
        r"(?:.*\n)*?"
        if line == "…"
        else ".*?".join(f"({_open(part)})" for part in line.split("…")) + r"[ \t]*\n"
        for line in expected.strip("\n").splitlines()
    )
    found = re.fullmatch(pattern, clean(printed).strip("\n") + "\n")
    if found is None:
        return expected
    parts = iter(found.groups())
    lines = [
        line if line == "…" else "…".join(next(parts) for _ in line.split("…"))
        for line in expected.strip("\n").splitlines()
    ]
    return "".join(f"{line}\n" for line in lines)


def _open(text: str) -> str:
    """A pattern for a text with any numbers, and any amount of white space where there is some."""
    words = [re.escape(word) for word in re.split(r"[ \t]+", _NUMBER.sub("\0", text))]
    return r"[ \t]+".join(words).replace(re.escape("\0"), _NUMBER.pattern)


def matches(expected: str, printed: str, *, exact: bool = False) -> bool:
    """Whether a text is what a page says, where `…` stands for anything and, unless `exact`,
    numbers for any number.
    """
    lines = [_plain(line, exact) for line in expected.strip("\n").splitlines()]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else ".*?".join(map(re.escape, line.split("…"))) + r"\n"
        for line in lines
    )
    text = "".join(_plain(line, exact) + "\n" for line in clean(printed).strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None


def clean(printed: str) -> str:
    """A text without colours, lines of progress, and the line that kernels are compiled."""
    return _NOISE.sub("", _COLOUR.sub("", printed))


def _plain(line: str, exact: bool) -> str:
    line = " ".join(line.split())
    return line if exact else _NUMBER.sub("0", line)


class Session:
    """What a page runs in: an interpreter and a shell, both started when first needed, in one
    folder.

    Everything that its blocks started ends with it.
    """

    def __init__(self, page: Path, folder: Path) -> None:
        self._page, self._folder = page.resolve(), folder
        self._shell: subprocess.Popen[bytes] | None = None
        self._interpreter: Any = None
        self._printed = folder.parent / f"{folder.name}-{page.stem}-printed"
        self._printed.mkdir(exist_ok=True)
        self._count = 0

    def run(self, block: Block) -> Output:
        """Run a block, or write it to its file; an error of the block is in the output."""
        if block.title is not None and block.not_run is None:
            target = self._folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.code, encoding="utf-8")
        if not block.runs:
            return Output()
        self._count += 1
        printed = self._printed / f"{self._count}.txt"
        reply = (
            self._python(block, printed)
            if block.language == "python"
            else self._bash(block, printed)
        )
        text = clean(printed.read_text(encoding="utf-8", errors="replace"))
        return Output(printed=text, shown=reply.get("shown", {}), error=reply.get("error"))

    def _python(self, block: Block, printed: Path) -> dict[str, Any]:
        if self._interpreter is None:
            self._asking, asked = Pipe()
            self._interpreter = fork(serve, asked, _environment(), str(self._folder))
            asked.close()
        request = {
            "code": block.code,
            "page": str(self._page),
            "line": block.line,
            "printed": str(printed),
        }
        try:
            self._asking.send(request)
            if not self._asking.poll(PATIENCE_SECONDS):
                raise self._endless(block)
            return dict(self._asking.recv())
        except (EOFError, ConnectionError):
            return {"error": "the interpreter ended"}

    def _bash(self, block: Block, printed: Path) -> dict[str, Any]:
        script = printed.with_suffix(".sh")
        script.write_text(block.code, encoding="utf-8")
        flags = "set +e" if block.fails else "set -eo pipefail"
        request = (
            f"{flags}; source {_quoted(script)} > {_quoted(printed)} 2>&1 < /dev/null; echo $?"
        )
        reply = self._ask(block, request)
        return (
            {} if reply == "0" else {"error": f"exit code {reply}" if reply else "a command failed"}
        )

    def _ask(self, block: Block, request: str) -> str:
        """What the shell answers to a line."""
        if self._shell is None:
            self._shell = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                cwd=self._folder,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        shell = self._shell
        assert shell.stdin is not None
        assert shell.stdout is not None
        try:
            shell.stdin.write(request.encode() + b"\n")
            shell.stdin.flush()
        except BrokenPipeError:
            return ""
        if not select.select([shell.stdout], [], [], PATIENCE_SECONDS)[0]:
            raise self._endless(block)
        return shell.stdout.readline().decode().strip()

    def _endless(self, block: Block) -> PageError:
        return PageError(
            f"{self._page}:{block.line}: the block did not end within {PATIENCE_SECONDS} s"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in (self._shell, self._interpreter):
            if child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if self._shell is not None:
            for stream in (self._shell.stdin, self._shell.stdout):
                if stream is not None:
                    stream.close()
            self._shell.wait()
        if self._interpreter is not None:
            self._asking.close()
            self._interpreter.join()


def _environment() -> dict[str, str]:
    """Pages are tested on the CPU, without the network, and as wide as a page shows."""
    here = str(Path(sys.executable).parent)
    chosen = {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "88",
        "PYTHONUTF8": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**os.environ, **chosen, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
