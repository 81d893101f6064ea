"""`penstock chat`: talk with a trained model in the terminal, or through pipes."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, final

import typer

from penstock.cli.wrapping import Wrapping
from penstock.cli.writing import (
    ContextLength,
    Device,
    MinP,
    Model,
    Seed,
    Stop,
    Temperature,
    Threads,
    TopK,
    TopP,
    load_writer,
)

PROMPT = "\001\x1b[1;36m\002you ›\001\x1b[0m\002 "
"""In colour; \001 and \002 tell readline what takes no room."""
COMMANDS = {
    "/clear": "forget the conversation",
    "/system TEXT": "give the system's message; without TEXT show it",
    "/save FILE": "append the conversation to a JSONL file that penstock prepare reads",
    "/quit": "leave, as Ctrl-D does",
}


def run(
    model: Model,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system's message.")] = None,
    template: Annotated[
        str | None, typer.Option(metavar="PATH", help="A chat template, where the model has none, or in its place.")
    ] = None,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a reply; by default as many as fit.", min=1)
    ] = None,
    stop: Stop = None,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Chat with a trained model through its own template.

    Ctrl-C stops a reply. Where the conversation grows longer than the context, its oldest turns are left out, and that
    is told. With pipes, each line of the input is a message, and the output has the replies alone.
    """
    from penstock.chat import load_template
    from penstock.errors import ConfigError
    from penstock.generation import ChatSession, Sampling

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens,
        min_tokens=1, stop=tuple(stop or ()),
    )  # fmt: skip
    writer = load_writer(model, context_length=context_length, device=device, threads=threads, slots=1)
    written = writer.template if template is None else load_template(template, tokenizer=writer.tokenizer)
    if written is None:
        raise ConfigError(f"{model}: it has no chat template; use penstock generate, or give --template")
    session = ChatSession(writer.engine, written, sampling=sampling, system=system)
    if sys.stdin.isatty() and sys.stdout.isatty():
        Terminal(session, writer).run()
    else:
        _answer_lines(session)


def _answer_lines(session: Any) -> None:
    """A message a line; replies to standard output, all else to standard error."""
    for line in sys.stdin:
        message = line.rstrip("\n")
        if not message.strip():
            continue
        reply = session.reply(message)
        for piece in reply:
            print(piece, end="", flush=True)
        print()
        if reply.prompt.tokens_dropped:
            print(_dropped(reply), file=sys.stderr)


@final
class Terminal:
    """A conversation in a terminal: what was typed, replies as they are written, and notes about both."""

    def __init__(self, session: Any, writer: Any) -> None:
        from penstock.terminal import safe_console

        self._session, self._writer = session, writer
        self._console = safe_console()

    def run(self) -> None:
        """Talk until the user leaves."""
        writer, step = self._writer, "" if self._writer.step is None else f", step {self._writer.step:,}"
        self._console.print(
            f"[bold]{_escaped(writer.name)}[/]{step}, context of {writer.engine.context_length:,} tokens"
        )
        self._note(f"{' '.join(name.split()[0] for name in COMMANDS)} · Ctrl-C stops a reply")
        while (message := self._read()) is not None:
            if message.startswith("/"):
                if not self._command(message):
                    return
            elif message.strip():
                self._reply(message)

    def _read(self) -> str | None:
        """A line that the user typed; None where they leave."""
        with suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited, and earlier ones found)
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
        """Do what a line says; whether the chat goes on."""
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
        else:
            for known, does in COMMANDS.items():
                self._note(f"{known:14} {does}")
            self._note("A message that begins with / is sent after a space.")
        return True

    def _save(self, path: Path) -> None:
        import json

        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self._session.whole()}, ensure_ascii=False) + "\n")
        except OSError as error:
            self._warn(f"{path}: cannot be written: {error.strerror}")
        else:
            self._note(f"{len(self._session.messages)} messages appended to {path}")

    def _reply(self, message: str) -> None:
        from penstock.errors import PenstockError

        reply = None
        with _interruptions() as interrupted:
            try:
                reply = self._session.reply(message)
                self._show(reply, interrupted)
            except PenstockError as error:
                self._warn(str(error))
            except KeyboardInterrupt:
                print()
        if reply is None:
            return
        reply.stop()
        if not reply.text.strip():
            self._note("an empty reply; this turn is not kept")
        elif reply.finish_reason is None:
            self._note("stopped")
        elif reply.finish_reason == "length":
            self._note(f"cut after {reply.num_tokens} tokens")

    def _show(self, reply: Any, interrupted: list[bool]) -> None:
        """Print a reply while it is written, until it ends or the user interrupts it."""
        from penstock.inspection import visible

        if reply.prompt.tokens_dropped:
            self._note(_dropped(reply))
        label = f"{self._writer.name} › "
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
    """A list that is no longer empty after Ctrl-C, so that a step is ended; a second one interrupts at once."""
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
    return f"{count:,} tokens of the oldest turns are no longer seen"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
