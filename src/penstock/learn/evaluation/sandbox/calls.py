"""The two ends of the pipe between tests and the tested solution, which runs in its own process.

The tests' process asks the solution's process to call a function with arguments. The solution's
process has nothing else: no test, no expected value, no verdict to change. Its answers are read as
plain values (`values`). An object of the solution's own class stays in its process; the tests get a
handle, which they can pass back as an argument.

Part of the script that runs in the sandbox, so it imports little.
"""

import json
import os
import select
import sys
import time

TYPE_CHECKING = False  # as typing's, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from penstock.learn.evaluation.sandbox.values import (
        decode,
        encode,
    )  # the script has them before this module

_HEAD = 8
_READ = 1 << 20


class SolutionError(BaseException):
    """The solution raised, or took too long. Not an `Exception`, so that no test catches it."""

    def __init__(self, report: bytes) -> None:
        self.report = report


class Ended(BaseException):
    """The process at the other end has ended."""


class Channel:
    """Messages over two pipes. A message is some texts, each after its length in bytes, and an
    empty text.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write

    def send(self, texts: "Iterable[str]") -> None:
        """Send a message; raises Ended if the other end is closed."""
        for text in texts:
            self._send(text.encode())
        self._send(b"")

    def receive(self, seconds: "float | None" = None) -> "Iterator[str]":
        """The texts of the next message; raises Ended, or TimeoutError if a text takes longer than
        `seconds`.
        """
        while text := self._receive(None if seconds is None else time.monotonic() + seconds):
            yield text.decode()

    def _send(self, data: bytes) -> None:
        left = memoryview(len(data).to_bytes(_HEAD, "big") + data)
        try:
            while left:
                left = left[os.write(self._write, left) :]
        except BrokenPipeError:
            raise Ended from None

    def _receive(self, deadline: "float | None") -> bytes:
        return self._whole(int.from_bytes(self._whole(_HEAD, deadline), "big"), deadline)

    def _whole(self, size: int, deadline: "float | None") -> bytes:
        found = bytearray()
        while len(found) < size:
            if deadline is not None:
                left = max(deadline - time.monotonic(), 0.0)
                if not select.select([self._read], [], [], left)[0]:
                    raise TimeoutError
            data = os.read(self._read, min(size - len(found), _READ))
            if not data:
                raise Ended
            found += data
        return bytes(found)


class Asked:
    """The tests' end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answer(None)  # the solution's code has run

    def function(self, name: str) -> "Function":
        """A callable for a function of the solution."""
        return Function(self, name)

    def ask(self, request: "list[Any]", seconds: "float | None" = None) -> "Any":
        """The solution's answer to a request; see `serve`."""
        self._channel.send(encode(request, _as_handle))
        return self._answer(seconds)

    def _answer(self, seconds: "float | None") -> "Any":
        texts = self._channel.receive(seconds)
        try:
            return decode(texts, object=lambda content: Handle(self, content), error=_raise)
        except TimeoutError:
            raise SolutionError(b"FSlowError: an input takes too long") from None


class Function:
    """A function of the solution."""

    def __init__(self, asked: Asked, name: str) -> None:
        self._asked, self._name = asked, name

    def __call__(self, *arguments: "Any", **named: "Any") -> "Any":
        """Call it; raises SolutionError if it raises."""
        return self._asked.ask(["call", self._name, arguments, named])

    def within(self, seconds: float, arguments: "list[Any]") -> "Any":
        """Call it; raises SolutionError if it raises or takes longer than `seconds`."""
        return self._asked.ask(["call", self._name, arguments, {}], seconds)


class Handle:
    """An object of the solution's own class, which stays in the solution's process.

    It can be passed as an argument, and its attributes can be read and set: tests build trees of
    such objects. It does not count as an answer.
    """

    def __init__(self, asked: Asked, content: "list[Any]") -> None:
        number, kind = content
        self.__dict__.update(_asked=asked, _number=int(number), _kind=str(kind)[:80])

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        return self._asked.ask(["get", self, name])

    def __setattr__(self, name: str, value: "Any") -> None:
        self._asked.ask(["set", self, name, value])

    def _refuse(self, *_: object) -> "Any":
        kind = self.__dict__["_kind"]
        raise AssertionError(
            f"an answer has the type {kind}; expected plain values: numbers, texts, lists, …"
        )

    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __hash__ = __bool__ = __len__ = (
        __iter__
    ) = _refuse
    __repr__ = __str__ = lambda self: f"<{self.__dict__['_kind']}>"


def _raise(report: str) -> None:
    raise SolutionError(str(report).encode("utf-8", "replace"))


def _as_handle(value: "Any") -> "Any":
    if type(value) is Handle:
        return value._number
    raise TypeError(f"tests cannot pass a {type(value).__name__} to a solution")


def serve(channel: Channel, source: str, report: "Callable[[BaseException], bytes]") -> None:
    """The solution's end: run its code as `__main__`, then answer requests until one fails or the
    tests end.

    Requests are `["call", name, arguments, named]`, `["get", object, name]` and `["set", object,
    name, value]`; an answer is a value, or `{"error": report}`.
    """
    # A fresh __main__, so that code that looks up its own module finds the solution, not this
    # script.
    module = sys.modules["__main__"] = type(sys)("__main__")
    objects: list[Any] = []

    def keep(value: "Any") -> "Any":
        objects.append(value)
        return [len(objects) - 1, type(value).__name__]

    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
        channel.send(encode(None, keep))
        while True:
            request = decode(channel.receive(), object=objects.__getitem__)
            answer = _answer(module.__dict__, *request)
            sys.stdout.flush()
            channel.send(encode(answer, keep))
    except BaseException as error:  # if the tests have ended, nobody reads this
        channel.send([json.dumps({"error": report(error).decode("utf-8", "replace")})])


def _answer(scope: "dict[str, Any]", name: str, target: "Any", *rest: "Any") -> "Any":
    if name == "call":
        if target not in scope:
            raise NameError(f"{target} is not defined")
        return scope[target](*rest[0], **rest[1])
    return getattr(target, *rest) if name == "get" else setattr(target, *rest)
