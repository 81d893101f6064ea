"""Small datasets of conversations with images, for the tests of this folder."""

import base64
import json
import random
from pathlib import Path

import penstock as ps
from makers.media import picture, processor

SIZES = [(84, 112), (60, 200), (150, 66), (112, 112)]


def model_folder(folder: Path, family: str) -> Path:
    """A folder with a family's processor and tokenizer, as models have it."""
    processor(family).save_pretrained(folder / "model")
    return folder / "model"


def write_records(folder: Path, count: int = 24) -> Path:
    """Records with none, one or several images, as paths, data URLs, and fields with
    placeholders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = random.Random(0)
    lines = []
    for number in range(count):
        names = []
        for place in range(number % 4):
            name = f"{number % 9}_{place}.png"  # some images are in several records
            if not (folder / name).exists():
                picture(*order.choice(SIZES), seed=number).save(folder / name)
            names.append(name)
        if number % 3 == 0:
            text = "".join("<image>\n" for _ in names) + f"What is this, number {number}?"
            messages = [{"role": "user", "content": text}]
            record = {"messages": messages, "images": names}
        else:
            data = [base64.b64encode((folder / name).read_bytes()).decode() for name in names]
            urls = [f"data:image/png;base64,{text}" for text in data] if number % 3 == 1 else names
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            record = {
                "messages": [
                    {
                        "role": "user",
                        "content": [*parts, {"type": "text", "text": f"Number {number}?"}],
                    }
                ]
            }
        record["messages"].append(
            {"role": "assistant", "content": [{"type": "text", "text": "word " * (1 + number % 7)}]}
        )
        lines.append(json.dumps(record))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "chats.jsonl"


def prepare(source: Path, model: Path, output: Path, **options: object) -> ps.Dataset:
    """A prepared dataset."""
    options = {"template": "auto", "on_missing_terminator": "allow", "progress": False, **options}
    return ps.prepare(source, tokenizer=model, output=output, processor=model, **options)
