"""The pictures of four tutorials, from their own data: `python examples/pictures/tutorials.py
[FOLDER]`.

chunks.svg: one sentence in two tokenizations, one above the other, and the chunks that both agree
on. slots.svg: a chat with an image as its tokens, with the patches of the image in their slots.
branches.svg: a pair of answers as a prefix tree. diffusion.svg: who sees whom in a masked document,
and in its blocks. Each comes out the same on every machine.
"""

import argparse
import base64
import html
import io
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.inputs import AttentionRule
from PIL import Image, ImageDraw

import penstock as ps
from penstock.data.shards import Corpus, Document
from penstock.tokenizers import Tokenizer
from penstock.use.config.run_file import LOOKED_AT
from penstock.use.inspection import tokenizer_of, view_rows

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SIZE, CHARACTER = 13, 7.9
"""Of the font, and the width of one character, in pixels."""
HEIGHT, GAP, MARGIN = 28, 3, 24
TEAL, BROWN, INK, GREY, PALE = "#0b6e75", "#8a4b00", "#16202a", "#5c6b73", "#eef2f3"
PALE_TEAL, CELL = "#b5d6d9", 14
"""Of clean copies; and the side of a cell, in pixels."""
CHUNKS = ("#d9ecec", "#f3e6d3")
CONTROLS = ["<|im_start|>", "<|im_end|>", "<image>"]


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("docs/pictures"), help="where they are written"
    )
    folder: Path = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as work:
        for name, draw in DRAWN.items():
            (folder / f"{name}.svg").write_text(draw(Path(work)), encoding="utf-8")
            print(folder / f"{name}.svg")


# -- the pictures
# --------------------------------------------------------------------------------------------------


def chunks(work: Path) -> str:
    """A sentence as a student and a teacher cut it; equal text is at equal places."""
    sentence = "Monday: Emma goes to the station for a timetable."
    words = sentence.split()
    short, long = (f"{work}/{name}" for name in ("student", "teacher"))
    student = ps.train_tokenizer(
        ["on day on day et", "goes to the station for a " * 9],
        vocab_size=290,
        output=short,
        progress=False,
    )
    teacher = ps.train_tokenizer(
        [sentence] * 9 + words, vocab_size=400, output=long, progress=False
    )
    ours, theirs = student.encode(sentence), teacher.encode(sentence)
    found = ps.tokenizers.align(ours, theirs, student, teacher)
    wide = 11.5
    left, parts = 96.0, []
    for label, tokenizer, ids, bounds, top in (
        ("student", student, ours, found.student_bounds, 20),
        ("teacher", teacher, theirs, found.teacher_bounds, 84),
    ):
        parts.append(_text(MARGIN, top + 19, label, GREY, weight=600))
        x = left
        for number, (begin, end) in enumerate(bounds.tolist()):
            for token in ids[begin:end].tolist():
                text = tokenizer.decode([token])
                width = wide * len(text)
                parts.append(
                    _box(
                        x,
                        top,
                        width - 2,
                        CHUNKS[number % 2],
                        _spaces(text),
                        spacing=wide - CHARACTER,
                    )
                )
                x += width
    x = left
    for number, (begin, end) in enumerate(found.teacher_bounds.tolist()):
        width = wide * len(teacher.decode(theirs[begin:end]))
        fill = CHUNKS[number % 2]
        parts.append(
            f'<path d="M{x:.1f} 48H{x + width - 2:.1f}V84H{x:.1f}Z" fill="{fill}" opacity=".55"/>'
        )
        x += width
    counts = (
        f"{len(ours)} and {len(theirs)} tokens: {len(found.kinds)} chunks, each of the same bytes "
        "on both sides"
    )
    parts.append(_text(left, 138, counts, GREY))
    return _svg(
        x + MARGIN,
        156,
        parts,
        "One sentence in two tokenizations, and the chunks that spell the same bytes",
    )


def slots(work: Path) -> str:
    """A chat with an image: its tokens in a line, and each patch of the image at the slot that it
    fills.
    """
    picture = Image.new("RGB", (24, 24), "white")
    ImageDraw.Draw(picture).ellipse((4, 3, 19, 18), (50, 80, 220))
    texts = ["A blue circle. What is it? user assistant"] * 9
    tokenizer = ps.train_tokenizer(
        texts, vocab_size=340, special_tokens=CONTROLS, output=f"{work}/shapes", progress=False
    )
    processor = ps.media.PatchProcessor(tokenizer, image_size=24, patch=8)
    processor.save(work / "processor")
    picture.save(work / "circle.png")
    asked = [
        {"type": "image", "image": str(work / "circle.png")},
        {"type": "text", "text": "What is it?"},
    ]
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "A blue circle."},
    ]
    ps.prepare(
        [{"messages": messages}],
        tokenizer=work / "processor",
        processor=work / "processor",
        template="auto",
        output=work / "data",
        progress=False,
    )
    document = ps.open_dataset(work / "data")[0]
    parts, x, patch, top = [], float(MARGIN), 0, 150
    for token, weight in zip(document.tokens.tolist(), document.loss_weights.tolist(), strict=True):
        if token == processor.slot_id:
            row, column = divmod(patch, 3)
            cut = picture.crop((8 * column, 8 * row, 8 * column + 8, 8 * row + 8))
            px, py = MARGIN + 150 + 34 * column, 16 + 34 * row
            parts.append(_image(cut, px, py, 32))
            parts.append(
                f'<path d="M{px + 16} {py + 32}L{x + 12:.1f} {top}" stroke="{GREY}" '
                'stroke-width=".7" opacity=".55"/>'
            )
            parts.append(_image(cut, x, top, 26))
            x, patch = x + 26 + GAP, patch + 1
            continue
        text = tokenizer.decode([token])
        width = CHARACTER * max(len(text), 1) + 6
        parts.append(
            _box(
                x,
                top,
                width,
                CHUNKS[0] if weight else PALE,
                _spaces(text),
                line=TEAL if weight else "",
            )
        )
        x += width + GAP
    lines = sorted((part for part in parts if part.startswith("<path d")), reverse=True)
    parts = lines + [part for part in parts if not part.startswith("<path d")]
    parts.append(_text(MARGIN + 270, 40, "a picture is cut into 9 patches,", INK))
    parts.append(_text(MARGIN + 270, 60, "each fills a slot of the row", INK))
    parts.append(_text(MARGIN, 208, "underlined: trained. Slots of an image never are.", GREY))
    return _svg(
        x + MARGIN,
        226,
        parts,
        "A chat with an image as a row of slots; the patches of the image fill nine of them",
    )


def branches(work: Path) -> str:
    """A better and a worse answer to one prompt: what both begin with is there once."""
    texts = [
        "What is the capital of France? Paris, on the map. What a question! user assistant"
    ] * 9
    ps.train_tokenizer(
        texts, vocab_size=360, special_tokens=CONTROLS, output=f"{work}/pairs", progress=False
    )
    pair = {
        "prompt": "What is the capital of France?",
        "chosen": "Paris, on the map.",
        "rejected": "Paris. What a question!",
    }
    ps.prepare(
        [pair],
        tokenizer=f"{work}/pairs",
        template="chatml",
        answers="tree",
        output=work / "tree",
        progress=False,
    )
    return _svg_of_tree(ps.open_dataset(work / "tree")[0], ps.load_tokenizer(f"{work}/pairs"))


def _svg_of_tree(document: Document, tokenizer: Tokenizer) -> str:
    """A line of tokens for each branch; a branch begins under the token that it forks from."""
    assert document.tree is not None
    ids, weights = document.tokens.tolist(), document.loss_weights.tolist()
    begins = [*document.tree.branches[:, 0].tolist(), len(ids)]
    places: list[list[float]] = []
    parts: list[str] = []
    right = 0.0
    for number, (begin, fork, parent) in enumerate(document.tree.branches.tolist()):
        top = 44 + 66 * number
        x = places[parent][fork] if parent >= 0 else float(MARGIN)
        if parent >= 0:
            parts.append(
                f'<path d="M{x + 4:.1f} {44 + HEIGHT}V{top}" stroke="{BROWN}" stroke-width="1.5"/>'
            )
        places.append([])
        for slot in range(begin, begins[number + 1]):
            text = tokenizer.decode([ids[slot]])
            width = CHARACTER * len(text) + 6
            fill = CHUNKS[number] if weights[slot] else PALE
            line = (TEAL, BROWN)[number] if weights[slot] else ""
            parts.append(_box(x, top, width, fill, _spaces(text), line=line))
            places[-1].append(x)
            x += width + GAP
        right = max(right, x)
    parts.append(_text(MARGIN, 28, "the better answer, with the prompt", TEAL, weight=600))
    begins_at = places[1][0]
    parts.append(_text(begins_at - 250, 129, "the worse answer, from the fork", BROWN, weight=600))
    parts.append(
        _text(MARGIN, 172, f"{len(ids)} slots; as two documents {_separate(document)}.", GREY)
    )
    return _svg(
        right + MARGIN,
        190,
        parts,
        "Two answers to one prompt as a prefix tree: what both begin with is there once",
    )


def _separate(document: Document) -> int:
    """Slots of the paths of a tree, each by itself."""
    assert document.tree is not None
    return int(document.tree.paths[:, 1].sum())


def diffusion(work: Path) -> str:
    """A document under masked and under block diffusion: its slots downwards, and whom each sees to
    the right.
    """
    texts = ["The capital of Japan is Tokyo, if I remember."] * 9
    ps.train_tokenizer(
        texts, vocab_size=400, special_tokens=["<|mask|>"], output=f"{work}/masks", progress=False
    )
    data = ps.prepare(
        [{"text": texts[0]}], tokenizer=f"{work}/masks", output=work / "masked", progress=False
    )
    parts: list[str] = []
    left = float(MARGIN)
    bottom = 0.0
    for title, objective in (
        ("MaskedDiffusion()", ps.MaskedDiffusion()),
        ("BlockDiffusion(block=4)", ps.BlockDiffusion(block=4)),
    ):
        drawn, right, low = _who_sees_whom(data, objective, left)
        parts += [_text(left, 28, title, TEAL, weight=600), *drawn]
        left, bottom = right + 3 * MARGIN, max(bottom, low)
    about = "Brown: a mask, and the word that it must predict. Pale: clean copies, only read."
    parts.append(_text(MARGIN, bottom + 30, about, GREY))
    return _svg(
        left - 2 * MARGIN,
        bottom + 48,
        parts,
        "Who sees whom: all slots of a masked document, or a block itself and the clean copies "
        "before it",
    )


def _who_sees_whom(data: Corpus, objective: Any, left: float) -> tuple[list[str], float, float]:
    """The slots of the first document as lines, with a cell for each slot that they see; and where
    the drawing ends.
    """
    loader = ps.Loader(
        ps.Source(data, objective=objective), sequence_length=48, rows_per_step=1, seed=2,
        requirements=LOOKED_AT, threads=0,
    )  # fmt: skip
    [view] = view_rows(loader, 0, [0], tokenizer_of)
    document = view.documents[0]
    seen = AttentionRule.of(next(iter(loader.seek(0)))[0]).dense_mask()
    role = {i: each for each in document.stretches for i in range(each.begin, each.end)}
    parts, labels = [], 78.0
    for slot in range(document.end):
        top = 44 + CELL * slot
        masked = role[slot].role == "masked"
        word = view.target_texts[slot] if masked else view.texts[slot]
        ink = BROWN if masked else GREY if role[slot].role == "clean" else INK
        parts.append(
            f'<text x="{left + labels - 6:.1f}" y="{top + CELL - 4}" text-anchor="end" '
            f'font-size="11" fill="{ink}" font-weight="{600 if masked else 400}" '
            f'xml:space="preserve">{html.escape(_spaces(word))}</text>'
        )
        for key in range(document.end):
            if seen[slot, key]:
                fill = PALE_TEAL if role[key].role == "clean" else TEAL
                fill = BROWN if role[key].role == "masked" else fill
                parts.append(
                    f'<rect x="{left + labels + CELL * key:.1f}" y="{top}" width="{CELL - 1}" '
                    f'height="{CELL - 1}" rx="2" fill="{fill}"/>'
                )
    size = CELL * document.end
    return parts, left + labels + size, 44.0 + size


DRAWN = {"chunks": chunks, "slots": slots, "branches": branches, "diffusion": diffusion}
"""Each makes the picture of its name."""


# -- what they are made of
# ---------------------------------------------------------------------------------------------


def _svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """A picture on a white card, so that it can be read on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img" font-family="{html.escape(FONT)}" '
        f'font-size="{SIZE}"><title>{html.escape(title)}</title><rect width="100%" '
        f'height="100%" rx="10" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _box(
    x: float, top: float, width: float, fill: str, text: str, *, line: str = "", spacing: float = 0
) -> str:
    """A token; `line`: colour of the line under it; `spacing`: pixels between its characters."""
    middle = x + (width + spacing) / 2
    under = (
        f'<path d="M{x:.1f} {top + HEIGHT - 1}h{width:.1f}" stroke="{line}" stroke-width="2.5"/>'
        if line
        else ""
    )
    return (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" rx="3" '
        f'fill="{fill}"/>{under}<text x="{middle:.1f}" y="{top + 19}" text-anchor="middle" '
        f'fill="{INK}" letter-spacing="{spacing:.1f}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
    )


def _text(x: float, y: float, text: str, fill: str, *, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{fill}" font-weight="{weight}">{html.escape(text)}</text>'
    )


def _image(picture: Image.Image, x: float, y: float, side: int) -> str:
    """A patch with its pixels visible."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<image x="{x:.1f}" y="{y}" width="{side}" height="{side}" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/><rect '
        f'x="{x:.1f}" y="{y}" width="{side}" height="{side}" fill="none" stroke="{GREY}" '
        'stroke-width=".8"/>'
    )


def _spaces(text: str) -> str:
    """Spaces and line ends made visible."""
    return text.replace(" ", "␣").replace("\n", "⏎")


if __name__ == "__main__":
    main()
