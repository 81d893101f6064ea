"""Makes the pictures of `docs/gallery.md` and the README: `make pictures`, or some of them, `make
pictures ARGS="curves tree"`.

Everything is made here: conversations about water, a tokenizer, three small runs, pages, and
pictures of them in a headless Chromium (on the path, or named in PENSTOCK_BROWSER). What is made
once is kept in `.pictures/`; training takes two minutes. A test compares the gallery with this
list.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "tests")]

import shots  # noqa: E402
import water  # noqa: E402

from penstock.use.runs.inspecting import inspect  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
WORK = Path("water")
"""In the folder of work, so that no page shows where that is."""


def row(camera: shots.Camera) -> None:
    """A packed row, and what one slot of it sees."""
    page = _page("row", WORK / "chats", sequence_length=256)
    # Taking the picture moves the pointer to half of its place, which is in the list.
    still = "byId('list').style.pointerEvents = 'none'; byId('main').scrollTop = 0"
    steps = ("openTab('rows')", "hover .attention svg", still)
    camera.take(PICTURES / "row.png", page, 1100, 800, *steps)


def proof(camera: shots.Camera) -> None:
    """A conversation with a call of a function, and the proof of its mask."""
    page = _page(
        "proof",
        WORK / "chats.jsonl",
        tokenizer=WORK / "tokenizer",
        template="chat.jinja",
        documents=range(24),
    )
    camera.take(PICTURES / "proof.png", page, 1100, 800, "show(3)")


def chat(camera: shots.Camera) -> None:
    """The chat page, and a model of 0.5 M parameters that answers."""
    from penstock.use.runs.opening import load_opened, writer_of
    from penstock.use.serving import ServedModel, Server, ServeSettings

    writer = writer_of(load_opened(WORK / next(iter(water.RATES))), 2)
    model = ServedModel(
        name="water", engine=writer.engine, tokenizer=writer.tokenizer, template=writer.template,
        context_length=writer.engine.context_length, parameters=writer.parameters,
    )  # fmt: skip
    ready = threading.Event()
    server = Server(model, ServeSettings(port=0), on_ready=lambda _: ready.set())
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        ready.wait()
        camera.take(
            PICTURES / "chat.png",
            server.address,
            1100,
            640,
            "temperature.value = 0",
            *_say("What is a penstock?", 1),
            *_say("And a weir?", 2),
        )
    finally:
        server.should_exit = True
        thread.join()


def _say(words: str, turn: int) -> list[str]:
    done = f"until document.querySelectorAll('.message').length === {2 * turn} && !running"
    return [f"document.getElementById('input').value = {words!r}; send(); 0", done]


def curves(camera: shots.Camera) -> None:
    """Three runs on one page, and the values of one step."""
    from penstock.learn.training.curve_picture import plot_runs
    from penstock.learn.training.curves import View

    page = Path("curves.html")
    plot_runs([WORK / name for name in water.RATES], page, view=View(log_y=True))
    moved = "charts[0].setCursor({ left: charts[0].valToPos(60, 'x'), top: 10 }, true, true); 0"
    camera.take(PICTURES / "curves.png", page.resolve().as_uri(), 1100, 768, moved)


def tree(camera: shots.Camera) -> None:
    """Four answers to one question, stored and computed as one tree."""
    page = _page("tree", WORK / "rankings")
    camera.take(PICTURES / "tree.png", page, 1100, 800)


def trajectories(camera: shots.Camera) -> None:
    """Two answers with a call, a rewritten history and a masked reply, as a model learns them."""
    import penstock as ps
    from penstock.use.runs.opening import load_opened, writer_of

    writer = writer_of(load_opened(WORK / next(iter(water.RATES))), 2)
    shutil.rmtree(WORK / "trajectories", ignore_errors=True)
    done = water.trajectories(writer.engine, writer.tokenizer)
    ps.write_trajectories(WORK / "trajectories", done, tokenizer=writer.tokenizer)
    page = _page("trajectories", WORK / "trajectories")
    river = "each => each.textContent.includes('Aare') && each.dataset.kind === 'sampled'"
    told = f"showCard([...document.querySelectorAll('.t')].find({river}), false); 0"
    camera.take(PICTURES / "trajectories.png", page, 1100, 1000, told)


def image(camera: shots.Camera) -> None:
    """A conversation with an image at its slots."""
    page = _page("image", WORK / "pictures", sequence_length=256)
    camera.take(PICTURES / "image.png", page, 1100, 640)


def audit(camera: shots.Camera) -> None:
    """What a student can learn from a teacher with another tokenizer."""
    command = f"penstock distill audit {WORK}/tokenizer {WORK}/teacher --text {WORK}/texts.jsonl"
    shots.session(PICTURES / "audit.svg", "distill audit", [command])


def terminal(camera: shots.Camera) -> None:
    """Raw conversations in a terminal: a list, then one of them in full."""
    common = f"penstock inspect {WORK}/chats.jsonl -t {WORK}/tokenizer --template chat.jinja"
    shots.session(
        PICTURES / "terminal.svg",
        "inspect",
        [f"{common} --list --documents 8", f"{common} --document 3"],
    )


MADE: tuple[Callable[[shots.Camera], None], ...] = (
    row,
    proof,
    chat,
    curves,
    tree,
    trajectories,
    image,
    audit,
    terminal,
)
"""Each makes the picture of its name."""


def packed_row(camera: shots.Camera) -> None:
    """The picture of the README: a row of the demo's chats, which need no trained model."""
    import demo

    demo.FOLDER.mkdir(exist_ok=True)
    if not (demo.FOLDER / "chats" / "manifest.json").is_file():
        with contextlib.redirect_stdout(io.StringIO()):
            demo.prepare_python()
            demo.prepare_chats()
    run_file = demo.write_run_file("chat", [{"path": str(demo.FOLDER / "chats")}])
    page = _page("packed_row", run_file, rows=4)
    camera.take(PICTURES / "packed-row.png", page, 1100, 735)


IN_README: tuple[Callable[[shots.Camera], None], ...] = (packed_row,)
"""As `MADE`, of pictures that the gallery does not have."""
NEED_RUNS = {each.__name__ for each in (chat, curves, trajectories)}


def _page(name: str, target: Path, **options: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        inspect(str(target), html=f"{name}.html", **options)
    return Path(f"{name}.html").resolve().as_uri()


def main() -> None:
    """Make the data that is missing, then the pictures."""
    names = [each.__name__ for each in (*MADE, *IN_README)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"pictures to make: {', '.join(names)}; default: all",
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".pictures", help="folder of data, runs and pages"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    shots.find_chromium()
    options.work.mkdir(parents=True, exist_ok=True)
    os.chdir(options.work)
    shutil.copyfile(water.CHATML_WITH_TOOLS, "chat.jinja")
    if not (WORK / "made").is_file():
        water.make_data(WORK)
        water.make_shapes(WORK)
        (WORK / "made").touch()
    if not options.names or {*options.names} & NEED_RUNS:
        water.make_runs(WORK)
    with shots.camera() as camera:
        for make in (*MADE, *IN_README):
            if not options.names or make.__name__ in options.names:
                make(camera)
                print(make.__name__, flush=True)


if __name__ == "__main__":
    main()
