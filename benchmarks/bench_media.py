"""What images cost: preparing, the cache of processed images, packed rows against padded batches,
and waste.

    python benchmarks/bench_media.py [--threads 1] [--records 160]

A fixed mixed set: conversations of lognormal length, a third without an image, others with one to
three JPEGs of 640 x 480 to 1,200 x 800. The processor is Qwen2-VL's (at most 256 slots an image),
with a vocabulary trained here; the model is a random Qwen2-VL of 4 layers of 256 and a tower of 2
layers of 128, float32. CPU time; rivals in turn.

Preparing is compared with decoding the same files with Pillow and nothing else. "Packed" is a step
of `ps.train` without the optimiser: rows of 2,048 slots, our attention. "Padded" is the same model,
loss and conversations as transformers' users collate them: batches of 4 and 16, padded to the
longest, with its own attention and mask. Both get pixels that are ready, and useful tokens are
those that are not padding.
"""

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from PIL import Image

import penstock as ps
from common import against, arguments, cpu_seconds, lognormal_lengths, table, take_turns
from penstock.media.images import ImageSettings, read_picture
from penstock.media.processor import load_processor
from penstock.models.theirs.model import HuggingFaceModel
from penstock.plan.loader.image_cache import ImageCache
from penstock.use.inspection.plan_report import dry_run

CONTROLS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|endoftext|>",
]
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}{%- if "
    "message.content is string -%}{{ message.content }}{%- else -%}{%- for part in "
    "message.content -%}{%- if part.type == 'image' -%}{{ "
    "'<|vision_start|><|image_pad|><|vision_end|>' }}{%- else -%}{{ part.text }}{%- endif "
    "-%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if "
    "add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
WORDS = [
    "the",
    "picture",
    "shows",
    "a",
    "small",
    "red",
    "house",
    "near",
    "water",
    "with",
    "people",
    "who",
    "walk",
    "under",
    "tall",
    "trees",
    "in",
    "bright",
    "light",
]
SIZES = ((640, 480), (800, 600), (1024, 768), (1200, 800))
SLOTS, BATCHES = 2048, (4, 16)


def pictures(folder: Path, count: int) -> list[str]:
    """JPEG files with detail at all scales, as photographs have."""
    random, names = np.random.default_rng(0), []
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        layers = [
            random.integers(0, 256, (height // scale + 1, width // scale + 1, 3))
            for scale in (1, 8, 64)
        ]
        whole = sum(
            np.kron(layer, np.ones((scale, scale, 1)))[:height, :width] * share
            for layer, scale, share in zip(layers, (1, 8, 64), (0.1, 0.3, 0.6), strict=True)
        )
        names.append(f"{number}.jpg")
        Image.fromarray(whole.astype(np.uint8)).save(folder / names[-1], quality=90)
    return names


def write_records(folder: Path, count: int) -> list[str]:
    """Conversations with their files."""
    random, lengths = Random(0), lognormal_lengths(count, 180, 0.8, 1200).tolist()
    names = pictures(folder, count)
    lines = []
    for number, length in enumerate(lengths):
        text = " ".join(random.choices(WORDS, k=max(length // 2, 1)))
        parts = [
            {"type": "image", "image": random.choice(names)}
            for _ in range(random.choice((0, 1, 1, 1, 2, 3)))
        ]
        messages = [
            {
                "role": "user",
                "content": [*parts, {"type": "text", "text": f"{number}: what is it?"}],
            },
            {"role": "assistant", "content": text},
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return lines


def make_processor(folder: Path) -> Path:
    """Qwen2-VL's processor with a small vocabulary."""
    from transformers.models.qwen2_vl import (
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    ps.train_tokenizer(
        WORDS * 20, vocab_size=600, special_tokens=CONTROLS, output=folder / "words", progress=False
    )
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words" / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    images = Qwen2VLImageProcessor(min_pixels=28 * 28 * 16, max_pixels=28 * 28 * 256)
    made = Qwen2VLProcessor(images, words, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)
    made.save_pretrained(folder / "processor")
    return folder / "processor"


def make_model(
    words: transformers.PreTrainedTokenizerFast,
) -> transformers.Qwen2VLForConditionalGeneration:
    """A random Qwen2-VL."""
    ids = words.convert_tokens_to_ids
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    text = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": len(words),
        "rope_parameters": rope,
    }
    tower = {"depth": 2, "embed_dim": 128, "hidden_size": 256, "num_heads": 4, "mlp_ratio": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config=text, vision_config=tower, image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"), vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
    ).train()  # fmt: skip


def bench_prepare(
    folder: Path, processor: Path, lines: list[str], repeats: int
) -> list[tuple[str, str, str]]:
    """Preparing against decoding alone."""
    named = [
        part["image"]
        for line in lines
        for part in json.loads(line)["messages"][0]["content"]
        if "image" in part
    ]

    def decode() -> None:
        for name in named:
            read_picture((folder / "raw" / name).read_bytes(), ImageSettings())

    def prepare(probe: str) -> None:
        shutil.rmtree(folder / "data", ignore_errors=True)
        ps.prepare(
            folder / "raw" / "chats.jsonl",
            tokenizer=processor,
            processor=processor,
            template="auto",
            probe=probe,
            output=folder / "data",
            progress=False,
        )

    found = take_turns(
        {
            "decode": lambda: cpu_seconds(decode),
            "header": lambda: cpu_seconds(lambda: prepare("header")),
            "whole": lambda: cpu_seconds(lambda: prepare("decode")),
        },
        repeats,
    )
    return [
        (
            "preparing, images a CPU second",
            f"{len(named) / found['whole']:,.0f}",
            f"{len(named)} images",
        ),
        ("  against decoding alone", f"{found['decode'] / found['whole']:.2f} x", "goal 0.9"),
        (
            "  probe: header against probe: decode",
            f"{found['whole'] / found['header']:.1f} x",
            "goal 5",
        ),
    ]


def bench_cache(folder: Path, processor: Path, repeats: int) -> list[tuple[str, str, str]]:
    """A hit against decoding and processing."""
    loaded, dataset = load_processor(processor), ps.open_dataset(folder / "data")
    images = [image for document in dataset[:40] for image in document.images]
    cache = ImageCache(folder / "cache", "k")

    def make(data: bytes) -> dict[str, np.ndarray]:
        return loaded.arrays(read_picture(data, ImageSettings()))

    contents = [(image.digest, image.read()) for image in images]
    for digest, data in contents:
        cache.get(digest, lambda data=data: make(data))
    found = take_turns(
        {
            "make": lambda: cpu_seconds(lambda: [make(data) for _, data in contents]),
            "hit": lambda: cpu_seconds(lambda: [cache.get(digest, dict) for digest, _ in contents]),
        },
        repeats,
    )
    stored = sum(path.stat().st_size for path in (folder / "cache").glob("??/*"))
    floats = sum(
        array.nbytes for digest, data in dict(contents).items() for array in make(data).values()
    )
    return [
        (
            "a hit in the image cache",
            f"{found['make'] / found['hit']:.1f} x",
            "cheaper than processing; goal 5",
        ),
        ("  bytes of the cache over those of the arrays", f"{stored / floats:.2f}", ""),
    ]


def bench_training(folder: Path, processor: Path, repeats: int) -> list[tuple[str, str, str]]:
    """Useful tokens a CPU second, packed and padded."""
    inner = make_model(transformers.AutoProcessor.from_pretrained(processor).tokenizer)
    padded_model = make_model(transformers.AutoProcessor.from_pretrained(processor).tokenizer)
    wrapped = HuggingFaceModel(inner)
    source = ps.Source(folder / "data", max_epochs=1)
    loader = ps.Loader(
        source, sequence_length=SLOTS, rows_per_step=1, requirements=wrapped.requirements()
    )
    rows = [(step, row) for step in loader for row in step][:8]
    dataset = ps.open_dataset(folder / "data")
    single = ps.Loader(
        source,
        sequence_length=SLOTS,
        rows_per_step=1,
        packing="none",
        requirements=wrapped.requirements(),
    )
    documents = [row for step in single for row in step][: len(dataset) // 2]
    batches = {
        size: [padded(documents[begin : begin + size]) for begin in range(0, len(documents), size)]
        for size in BATCHES
    }

    def packed() -> None:
        for step, row in rows:
            ps.loss(wrapped, wrapped.tensors(row), step.loss_denominators).backward()

    def in_batches(size: int) -> None:
        for given, targets in batches[size]:
            logits = padded_model(**given, use_cache=False).logits
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), targets.flatten()
            ).backward()

    useful = sum(row.num_tokens for _, row in rows), sum(row.num_tokens for row in documents)
    rivals = {f"padded {size}": partial(cpu_seconds, partial(in_batches, size)) for size in BATCHES}
    found = take_turns({"packed": lambda: cpu_seconds(packed), **rivals}, repeats)
    rate = useful[0] / found["packed"]
    rows_of_table = [
        ("training, useful tokens a CPU second, packed", f"{rate:,.0f}", f"rows of {SLOTS}")
    ]
    for size in BATCHES:
        slots = sum(given["input_ids"].numel() for given, _ in batches[size])
        other = useful[1] / found[f"padded {size}"]
        said = f"{1 - useful[1] / slots:.0%} of slots are padding; goal 3"
        rows_of_table.append(
            (f"  padded, {size} a batch", f"{other:,.0f}: {rate / other:.2f} x", said)
        )
        peer = f"transformers, padded batches of {size}"
        against("Training", "chats with images", peer, ours=1 / rate, theirs=1 / other)
    return rows_of_table


def padded(documents: list[ps.ModelInput]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch as transformers' users collate it."""
    longest = max(row.num_tokens for row in documents)
    ids = np.zeros((len(documents), longest), np.int64)
    mask, targets, types = (
        np.zeros_like(ids),
        np.full((len(documents), longest - 1), -100, np.int64),
        np.zeros_like(ids),
    )
    for number, row in enumerate(documents):
        count = row.num_tokens
        ids[number, :count], mask[number, :count] = row.tokens[:count], 1
        trained = row.loss_weights[0][: count - 1] > 0
        targets[number, : count - 1][trained] = row.targets[0][: count - 1][trained]
        types[number, row.media.slots] = 1
    given = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types}
    pictured = [row.media.arrays for row in documents if len(row.media)]
    for name in pictured[0] if pictured else ():
        given[name] = np.concatenate([one[name] for one in pictured])
    return {name: torch.from_numpy(value) for name, value in given.items()}, torch.from_numpy(
        targets
    )


def bench_waste(folder: Path) -> list[tuple[str, str, str]]:
    """Empty slots with a limit of patches, over many documents of the same kinds."""
    sources = [
        ps.Source(folder / "data", name=f"copy {number}", max_epochs=25) for number in range(4)
    ]
    settings = {
        "sequence_length": 8192,
        "rows_per_step": 8,
        "window_rows": 1024,
        "data_parallel": (0, 8),
    }
    free = dry_run(ps.Loader(ps.Mixture(sources), **settings), 10_000)
    mean, most = free.row_patches or (0.0, 0)
    rows = [
        (
            "empty slots, no limit of patches",
            f"{free.padding_share:.2%}",
            f"patches {mean:,.0f} a row, at most {most:,}",
        )
    ]
    for factor in (1.1, 1.25):
        limited = dry_run(
            ps.Loader(ps.Mixture(sources), patches_per_row=int(factor * mean), **settings), 10_000
        )
        note = (
            f"patches at most {limited.row_patches[1] if limited.row_patches else 0:,}; goal 0.5 "
            "% at 1.25"
        )
        rows.append((f"  limit of {factor} times the mean", f"{limited.padding_share:.2%}", note))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--records", type=int, default=160)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "raw").mkdir()
        lines = write_records(folder / "raw", given.records)
        processor = make_processor(folder)
        table("Preparing", bench_prepare(folder, processor, lines, min(given.repeats, 3)))
        table("Cache", bench_cache(folder, processor, min(given.repeats, 5)))
        table("Training", bench_training(folder, processor, min(given.repeats, 3)))
        table("Waste", bench_waste(folder))


if __name__ == "__main__":
    main()
