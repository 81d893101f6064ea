"""A small model learns to say what is in a picture: `python examples/shapes.py`.

Everything is made here: pictures of coloured shapes and digits, a tokenizer, a dataset of chats
with images, and a transformer with a small vision tower, trained from nothing on packed rows. It
answers for pictures that it never saw.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import penstock as ps
from penstock.media import PatchProcessor
from penstock.plan.inputs import IGNORE

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 200, 40),
}
SHAPES = ("circle", "square", "triangle")
DIGITS = "0123456789"
CONTROLS = ["<|im_start|>", "<|im_end|>", "<image>"]
SIDE = 48
"""Pixels of a picture."""
TRAINED, HELD_OUT = 8000, 300
"""Pictures."""
STEPS = 1500


def main() -> None:
    """Make everything, train, and count right answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("shapes"), help="folder of everything that is made"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    for name, count, seed in (("train", TRAINED, 0), ("held-out", HELD_OUT, 1)):
        write_chats(folder / name, count, seed)
    processor = make_processor(folder)
    for name in ("train", "held-out"):
        ps.prepare(
            folder / name / "chats.jsonl",
            tokenizer=folder / "processor",
            processor=folder / "processor",
            template="auto",
            output=folder / "data" / name,
        )
    vision = {
        "image_token": processor.slot_id,
        "image_size": SIDE,
        "patch": 8,
        "layers": 2,
        "width": 96,
        "heads": 4,
    }
    model = ps.build_model(
        vocab_size=processor.tokenizer.vocab_size, layers=3, width=96, heads=4, vision=vision
    )
    loader = ps.Loader(str(folder / "data" / "train"), sequence_length=512, rows_per_step=4)
    run = ps.train(
        model,
        loader,
        steps=arguments.steps,
        optimizer="muon",
        learning_rate=2e-3,
        warmup_steps=30,
        output=folder / "run",
        resume=True,
    )
    share, wrong = right_answers(ps.load_model(run.path), folder / "data" / "held-out")
    print(
        f"{share:.1%} of {HELD_OUT} pictures that it never saw are described right "
        f"({time.monotonic() - began:.0f} s)"
    )
    for text in wrong[:5]:
        print(f"  wrong: {text}")


def write_chats(folder: Path, count: int, seed: int) -> None:
    """Pictures with a question and its answer, as files and JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(seed)
    lines = []
    for number in range(count):
        picture, answer = draw(random)
        name = f"{number:05}.png"
        picture.save(folder / name)
        asked = [
            {"type": "image", "image": name},
            {"type": "text", "text": "What is in the picture?"},
        ]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")


def draw(random: Random) -> tuple[Image.Image, str]:
    """A picture of a coloured shape or digit somewhere on a noisy ground, and what it shows."""
    ground = np.random.default_rng(random.getrandbits(32)).integers(
        180, 256, (SIDE, SIDE, 3), dtype=np.uint8
    )
    picture = Image.fromarray(ground)
    pen = ImageDraw.Draw(picture)
    colour = random.choice(list(COLOURS))
    size = random.randint(24, 32)
    left, top = (random.randint(2, SIDE - size - 2) for _ in range(2))
    right, bottom = left + size, top + size
    if random.random() < 0.4:
        digit = random.choice(DIGITS)
        font = ImageFont.load_default(size + 8)
        pen.text((left + size / 2, top + size / 2), digit, COLOURS[colour], font=font, anchor="mm")
        return picture, f"The digit {digit} in {colour}."
    shape = random.choice(SHAPES)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), COLOURS[colour])
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), COLOURS[colour])
    else:
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], COLOURS[colour])
    return picture, f"A {colour} {shape}."


def make_processor(folder: Path) -> PatchProcessor:
    """A tokenizer trained on all answers, with a control token for images, and the processor that
    uses it.
    """
    if not (folder / "processor" / "patch_processor.json").is_file():
        texts = [
            f"A {colour} {shape}. What is in the picture?" for colour in COLOURS for shape in SHAPES
        ]
        texts += [
            f"The digit {digit} in {colour}. user assistant"
            for colour in COLOURS
            for digit in DIGITS
        ]
        tokenizer = ps.train_tokenizer(
            texts, vocab_size=320, special_tokens=CONTROLS, output=folder / "tokenizer"
        )
        PatchProcessor(tokenizer, image_size=SIDE, patch=8).save(folder / "processor")
    found = ps.media.load_processor(folder / "processor")
    assert isinstance(found, PatchProcessor)
    return found


@torch.no_grad()
def right_answers(model: ps.models.LanguageModel, data: Path) -> tuple[float, list[str]]:
    """Share of answers of which each token is the likeliest, and those that are not."""
    loader = ps.Loader(
        ps.Source(data, max_epochs=1), sequence_length=128, rows_per_step=1, packing="none",
        requirements=model.requirements(),
    )  # fmt: skip
    tokenizer = ps.open_dataset(data).loaded_tokenizer
    right, wrong = 0, []
    for step in loader:
        row = step[0]
        trained = row.targets[0] != IGNORE
        trained &= row.loss_weights[0] > 0
        likeliest = model.logits(model(model.tensors(row)))[0].argmax(-1).numpy()
        found, expected = likeliest[trained], row.targets[0][trained]
        if (found == expected).all():
            right += 1
        else:
            wrong.append(f"{tokenizer.decode(found)!r} for {tokenizer.decode(expected)!r}")
    return right / (right + len(wrong)), wrong


if __name__ == "__main__":
    main()
