"""Does it run? Twenty steps of each kind of training; what crashes is the answer.

python benchmarks/gpu/01_smoke.py --output results
"""

import json
import os
from pathlib import Path
from typing import Any

import penstock as ps
from common import Data, Figures, Report, folder, need, own_model, their_model, train
from penstock.models.settings import BlockSettings, VisionSettings

WINDOWS = {
    "blocks": {"local": BlockSettings(sliding_window=16), "global": BlockSettings()},
    "pattern": ("local", "global"),
}
EXPERTS = {"blocks": {"sparse": BlockSettings(experts=4, balance=0.01)}, "pattern": ("sparse",)}
HYBRID = {
    "blocks": {"delta": BlockSettings(mixer="gated_delta"), "full": BlockSettings()},
    "pattern": ("delta", "full"),
}


class Smoke:
    """The trainings, on one set of data."""

    def __init__(self, report: Report, place: Path) -> None:
        self.report, self.place, toy = report, place, report.toy
        self.steps, self.slots, self.rows = (2, 64, 2) if toy else (20, 4096, 8)
        self.data = Data(place, 200 if toy else 4000, 20.0 if toy else 800.0)

    def loader(self, path: Path | None = None, **more: Any) -> Any:
        """Of a dataset; by default of texts."""
        return ps.Loader(
            ps.Source(path or self.data.web),
            sequence_length=self.slots,
            rows_per_step=self.rows,
            **more,
        )

    def own(self, made: dict[str, Any] | None = None, **settings: Any) -> Figures:
        """Our transformer."""
        model = own_model(self.report, **(made or {}))
        return train(self.report, model, self.loader(), steps=self.steps, **settings)

    def theirs(self, kind: str, made: dict[str, Any] | None = None, **settings: Any) -> Figures:
        """A model of transformers."""
        model = f"hf:{their_model(self.report, self.place, kind, **(made or {}))}"
        return train(self.report, model, self.loader(), steps=self.steps, **settings)

    def answers(self, **settings: Any) -> Figures:
        """Preferences and policies."""
        answers = self.data.answers(40 if self.report.toy else 400, 12 if self.report.toy else 300)
        needs = ps.InputRequirements(trees=True, loss_weights=True)
        return train(
            self.report,
            own_model(self.report),
            self.loader(answers, requirements=needs),
            steps=self.steps,
            **settings,
        )

    def teacher(self) -> Figures:
        """A student of a run."""
        ps.train(
            own_model(self.report),
            self.loader(),
            output=self.place / "teacher",
            steps=2,
            progress=False,
            warmup_steps=0,
        )
        ps.distill(
            own_model(self.report),
            self.loader(),
            teacher={"model": str(self.place / "teacher"), "loss": {"kind": "kl"}},
            output=self.place / "student",
            steps=self.steps,
            progress=False,
            warmup_steps=0,
        )
        return {"loss_last": ps.open_run(self.place / "student").metrics[-1]["loss"]}

    def images(self) -> Figures:
        """Our transformer with a vision tower, on made-up pictures."""
        pictures, size = need("PIL.Image"), 32 if self.report.toy else 224
        place = self.place / "pictures"
        (place / "processor").mkdir(parents=True)
        lines = []
        for number in range(12):
            pictures.new("RGB", (size, size), (number * 20, 80, 160)).save(place / f"{number}.png")
            asked = {"role": "user", "content": f"<image>\nWhat is this, number {number}?"}
            answer = {"role": "assistant", "content": "a word " * (1 + number % 5)}
            record = {"messages": [asked, answer], "images": [f"{number}.png"]}
            lines.append(json.dumps(record))
        (place / "chats.jsonl").write_text("\n".join(lines))
        tokenizer = ps.train_tokenizer(
            ["What is this, number? user assistant a word"] * 5,
            vocab_size=300,
            special_tokens=["<|im_start|>", "<|im_end|>", "<image>"],
            output=place / "tokenizer",
            progress=False,
        )
        processor = ps.media.PatchProcessor(tokenizer, image_size=size, patch=size // 4)
        processor.save(place / "processor")
        data = ps.prepare(
            place / "chats.jsonl",
            tokenizer=place / "processor",
            processor=place / "processor",
            output=place / "data",
            template="auto",
            on_missing_terminator="allow",
            progress=False,
        )
        vision = {"image_token": processor.slot_id, "image_size": size, "patch": size // 4}
        tower = {"vision": VisionSettings(**vision, layers=2, width=64, heads=2)}
        loader = ps.Loader(data, sequence_length=256, rows_per_step=2, packing="none")
        return train(self.report, own_model(self.report, **tower), loader, steps=self.steps)

    def one_rank(self) -> Figures:
        """Sharded on a mesh of one, which runs FSDP's paths."""
        there = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        before = dict(os.environ)
        os.environ.update(there | {"MASTER_PORT": "29541"})
        try:
            return self.own(shard=True)
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> None:
    report = Report(__file__, __doc__)
    with folder() as place:
        smoke = Smoke(report, place)
        parts: dict[str, Any] = {
            "ours, bfloat16": lambda: smoke.own(precision="bfloat16"),
            "ours, float32": lambda: smoke.own(precision="float32"),
            "ours, not deterministic": lambda: smoke.own(deterministic=False),
            "ours, checkpointing full": lambda: smoke.own(activation_checkpointing="full"),
            "ours, checkpointing selective": lambda: smoke.own(
                activation_checkpointing="selective"
            ),
            "ours, Muon": lambda: smoke.own(optimizer="muon"),
            "mixed windows": lambda: smoke.own(WINDOWS),
            "experts": lambda: smoke.own(EXPERTS),
            "hybrid": lambda: smoke.own(HYBRID),
            "llama": lambda: smoke.theirs("llama"),
            "llama, bfloat16, checkpointing": lambda: smoke.theirs(
                "llama", precision="bfloat16", activation_checkpointing="full"
            ),
            "qwen3": lambda: smoke.theirs("qwen3"),
            "gemma3_text": lambda: smoke.theirs("gemma3_text"),
            "LoRA": lambda: smoke.theirs("llama", lora={"rank": 8}),
            "preference": lambda: smoke.answers(preference="dpo"),
            "policy": lambda: smoke.answers(policy="cispo"),
            "teacher": smoke.teacher,
            "images": smoke.images,
            "a mesh of one": smoke.one_rank,
        }
        if not report.toy:
            parts["ours, compiled"] = lambda: smoke.own(compile=True)
            parts["llama, compiled"] = lambda: smoke.theirs("llama", compile=True)
        for name, work in parts.items():
            report.part(name, work)
    report.done()


if __name__ == "__main__":
    main()
