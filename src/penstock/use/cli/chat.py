"""`penstock chat`: chat with a trained model in the terminal or through pipes.

In a terminal, replies are wrapped at word borders while they stream.
"""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

import penstock as ps
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.terminal import safe_console, visible
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, OPENING, SAMPLING, Given

if TYPE_CHECKING:
    from penstock.learn.generation.session import ChatSession


@final
class Wrapping:
    """Wraps streamed text at word borders. A word is shown once it is complete."""

    def __init__(self, width: int, column: int) -> None:
        """Args: `width` of the terminal; `column` where the text begins."""
        self._width, self._column, self._word = width, column, ""
        self._begun = False

    def push(self, text: str) -> str:
        """Add text; returns what can be shown now."""
        shown = ""
        for character in text:
            if not character.isspace():
                self._word += character
                continue
            shown += self.finish()
            if not self._begun:
                continue
            if character == "\n" or self._column + 1 >= self._width:
                shown, self._column = shown + "\n", 0
            else:
                shown, self._column = shown + " ", self._column + 1
        return shown

    def finish(self) -> str:
        """Returns the last word, which was held back until now."""
        from rich.cells import cell_len

        word, self._word = self._word, ""
        size = cell_len(word)
        broken = "\n" if word and self._column and self._column + size > self._width else ""
        self._column = size if broken else self._column + size
        self._begun = self._begun or bool(word)
        return broken + word


PROMPT = "\001\x1b[1;36m\002you ›\001\x1b[0m\002 "
"""Coloured; \001 and \002 mark for readline what takes no width."""
COMMANDS = {
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message; without TEXT, show it",
    "/image FILE": "send an image with the next message, to a model that reads images",
    "/save FILE": "append the conversation to a JSONL file that penstock prepare reads",
    "/quit": "leave the chat (also Ctrl-D)",
}


@takes(
    settings=(
        MODEL,
        SAMPLING,
        options(
            "learn.generation.settings.Sampling",
            max_tokens=Option(default="the model's own, or as many as fit"),
        ),
        OPENING,
    )
)
def run(
    *,
    settings: Given,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    template: Annotated[
        str | None, typer.Option(metavar="PATH", help="Chat template; by default the model's own.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Image (or sound, if the model reads those) for the first message, a file or URL; "
                "may be repeated."
            ),
        ),
    ] = None,
) -> None:
    """Chat with a trained model through its own template.

    Ctrl-C stops a reply. If the conversation exceeds the context, its oldest turns are dropped, and
    a note says so. With pipes, each input line is a message, and the output contains only the
    replies.

    Example:
        penstock chat runs/chat --temperature 0.7
    """
    model = settings.pop("model")
    trained = ps.open_run(model)
    session = trained.session(system=system, template=template, **settings)
    if image and not session.reads_images:
        raise ConfigError(f"{model}: the model reads no images; leave out --image")
    if sys.stdin.isatty() and sys.stdout.isatty():
        Terminal(session, trained.name, trained.step, image or ()).run()
    else:
        _answer_lines(session, image or ())


def _answer_lines(session: "ChatSession", images: Sequence[str]) -> None:
    """Answer one message per input line. Replies go to standard output, notes to standard error."""
    for line in sys.stdin:
        message = line.rstrip("\n")
        if not message.strip():
            continue
        reply = session.reply(message, images)
        images = ()
        for piece in reply:
            print(piece, end="", flush=True)
        print()
        if reply.prompt.tokens_dropped:
            print(_dropped(reply), file=sys.stderr)


@final
class Terminal:
    """An interactive conversation: reads messages and commands, streams replies, shows notes."""

    def __init__(
        self, session: "ChatSession", name: str, step: int | None, images: Sequence[str] = ()
    ) -> None:
        """Args: the conversation; the model's name and step; images of the first message."""
        self._session, self._name, self._step = session, name, step
        self._attached = [*images]
        self._console = safe_console()

    def run(self) -> None:
        """Chat until the user leaves."""
        step = "" if self._step is None else f", step {self._step:,}"
        self._console.print(
            f"[bold]{_escaped(self._name)}[/]{step}, context of "
            f"{self._session.context_length:,} tokens"
        )
        self._note(f"{' '.join(name.split()[0] for name in COMMANDS)} · Ctrl-C stops a reply")
        while (message := self._read()) is not None:
            if message.startswith("/"):
                if not self._command(message):
                    return
            elif message.strip():
                self._reply(message)

    def _read(self) -> str | None:
        """The next line that the user types; None when they leave."""
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` line editing and history)
        while True:
            try:
                print()
                return input(PROMPT)
            except EOFError:
                self._console.print()
                return None
            except KeyboardInterrupt:
                self._console.print()
                self._note("/quit or Ctrl-D leaves")

    def _command(self, line: str) -> bool:
        """Run a command; returns whether the chat continues."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return False
        if name == "/clear":
            self._session.clear()
            self._note("the conversation is forgotten")
        elif name == "/system":
            if rest:
                self._session.system = rest
            self._note(f"system: {self._session.system or 'none'}")
        elif name == "/save" and rest:
            self._save(Path(rest))
        elif name == "/image" and rest:
            self._attach(rest)
        else:
            for known, does in COMMANDS.items():
                self._note(f"{known:14} {does}")
            self._note("To send a message that begins with /, type a space first.")
        return True

    def _attach(self, image: str) -> None:
        """Send an image with the next message."""
        if not self._session.reads_images:
            self._warn(f"{self._name} reads no images")
        elif "://" not in image and not Path(image).is_file():
            self._warn(f"{image}: there is no such file")
        else:
            self._attached.append(image)
            self._note(
                f"{len(self._attached)} image(s) for the next message: {', '.join(self._attached)}"
            )

    def _save(self, path: Path) -> None:

        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"messages": self._session.whole()}, ensure_ascii=False) + "\n"
                )
        except OSError as error:
            self._warn(f"{path}: cannot be written: {error.strerror}")
        else:
            self._note(f"{len(self._session.messages)} messages appended to {path}")

    def _reply(self, message: str) -> None:

        reply = None
        with _interruptions() as interrupted:
            try:
                reply = self._session.reply(message, self._attached)
                self._attached = []
                self._show(reply, interrupted)
            except PenstockError as error:
                self._warn(str(error))
                # A damaged image would make all further messages fail, too.
                self._attached = []
            except KeyboardInterrupt:
                print()
        if reply is None:
            return
        reply.stop()
        if not reply.text.strip():
            self._note("the reply is empty; this turn is discarded")
        elif reply.finish_reason is None:
            self._note("stopped")
        elif reply.finish_reason == "length":
            self._note(f"cut after {reply.num_tokens} tokens")

    def _show(self, reply: Any, interrupted: list[bool]) -> None:
        """Print a reply as it streams, until it ends or the user interrupts it."""
        if reply.prompt.tokens_dropped:
            self._note(_dropped(reply))
        label = f"{self._name} › "
        self._console.print(f"[bold green]{_escaped(label)}[/]", end="")
        wrapping = Wrapping(self._console.width, len(label))
        for piece in reply:
            print(wrapping.push(visible(piece, lines=True)), end="", flush=True)
            if interrupted:
                break
        print(wrapping.finish())

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _warn(self, text: str) -> None:
        self._console.print(text, style="red", markup=False)


@contextmanager
def _interruptions() -> Iterator[list[bool]]:
    """A list that is non-empty after Ctrl-C, so the current step can finish. A second Ctrl-C
    interrupts at once.
    """
    seen: list[bool] = []

    def note(*_: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _dropped(reply: Any) -> str:
    count = reply.prompt.tokens_dropped
    return f"context full: {count:,} tokens of the oldest turns were dropped"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
