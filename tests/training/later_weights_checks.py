"""What test_later_weights.py asks of two ranks, each answer of which every rank prints as JSON.

Run as a program: a folder, and the names of checks.
"""

import json
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sharding_checks import MODELS, THEIRS, a_row
from torch.utils._python_dispatch import TorchDispatchMode

from makers.models import tiny_huggingface
from penstock.core.errors import PenstockError
from penstock.learn.training import preparing
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.preparing import fill
from penstock.learn.training.sharding import shard
from penstock.models import ModelSettings, save_model
from penstock.models import tensor_files as files
from penstock.models.building import build_model
from penstock.models.later_weights import LaterWeights, drawn_later, load_later
from penstock.models.lora.lora import add_lora
from penstock.models.lora.settings import LoraSettings
from penstock.models.saving import load_model
from penstock.models.theirs.loading import load_huggingface

CPU = torch.device("cpu")
DRAWN = ("tied", "untied", "experts", "recurrent", "lora")
LORA_SEED = 6
LARGER = {"vocab_size": 97, "num_hidden_layers": 3}


class Held(TorchDispatchMode):
    """Inside, the bytes of tensors that are made and still held, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # A file that is mapped, of which nothing is read yet.
        mapped = func._overloadpacket._qualified_op_name == "aten::set_"
        for one in found if isinstance(found, tuple | list) else [found]:
            if type(one) is torch.Tensor and one.device.type == "cpu" and one.numel():
                self._see(one, mapped=mapped)
        return found

    def _see(self, one: torch.Tensor, *, mapped: bool) -> None:
        storage = one.untyped_storage()
        place, size = storage.data_ptr(), 0 if mapped else storage.nbytes()
        if place in self._known:
            return
        self._known.add(place)
        self.now += size
        self.most, self.largest = max(self.most, self.now), max(self.largest, size)
        weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self.now -= size
        self._known.discard(place)


class Slices:
    """Numbers of stored tensors that are read, by `get_slice` and its kind."""

    def __init__(self) -> None:
        self.numbers = 0
        self._open = files.safe_open

    def __enter__(self) -> "Slices":
        files.safe_open = self._opened  # type: ignore[attr-defined,misc,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        files.safe_open = self._open  # type: ignore[attr-defined,misc]

    def _opened(self, *args: Any, **given: Any) -> Any:
        return _File(self._open(*args, **given), self)


class _File:
    def __init__(self, file: Any, slices: Slices) -> None:
        self._file, self._slices = file, slices

    def __enter__(self) -> "_File":
        self._inner = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        assert name in ("keys", "metadata"), f"{name} reads whole tensors"
        return getattr(self._inner, name)

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self._inner.get_slice(name), self._slices)


class _Slice:
    def __init__(self, inner: Any, slices: Slices) -> None:
        self._inner, self._slices = inner, slices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, place: Any) -> torch.Tensor:
        part: torch.Tensor = self._inner[place]
        self._slices.numbers += part.numel()
        return part


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}


def filled(ranks: Ranks, model: Any, later: LaterWeights, expected: Any) -> dict[str, Any]:
    """Shard and fill a model without weights; how it differs from one that was loaded whole."""
    # Trials, and digests, come before any weight.
    assert model.packing(64).longest == 64
    digest = later.made_from(model)
    assert all(weight.is_meta for weight in model.parameters())
    assert model.device == CPU
    buffers = dict(model.named_buffers())
    assert not any(one.is_meta for one in buffers.values())
    shard(model, ranks)
    with Held() as held, Slices() as slices:
        fill(model, later, ranks)
    own = sum(p.to_local().numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    dtypes = sorted({str(p.dtype)[6:] for p in model.parameters()})
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    found, due = whole(model), whole(expected)
    row = a_row(3, len(model.prediction_weights))
    with torch.no_grad():
        for one in (model, expected):
            one.eval()
        hidden = [one(one.tensors(row)) for one in (model, expected)]
    there = dict(expected.named_buffers())
    return {
        "names": sorted(found.keys() ^ due.keys()),
        "weights": [n for n in due if not torch.equal(found[n], due[n])],
        "dtypes": dtypes,
        "buffers": [n for n in there | buffers if not torch.equal(buffers[n], there[n])],
        "number of buffers": len(buffers),
        "trained": trained == [n for n, p in expected.named_parameters() if p.requires_grad],
        "output": float((hidden[0] - hidden[1]).abs().max()),
        "way": "drawn" if later.folder is None else "stored" if later.stored else "sent",
        "digest": digest,
        "read": slices.numbers / sum(p.numel() for p in expected.parameters()),
        "own share": own / sum(p.numel() for p in model.parameters()),
        # In weights of the largest kind, above its own part.
        "most": (held.most / 4 - own) / largest,
        "largest": held.largest / 4 / largest,
    }


def check_drawn(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for name in DRAWN:
        settings = {k: v for k, v in MODELS[name].items() if k != "vocab_size"}
        given = ModelSettings(**settings)
        model, later = drawn_later(given, vocab_size=97, device=CPU, seed=3)
        expected = build_model(given, vocab_size=97, seed=3)
        if name == "lora":
            later = with_lora(model, later, expected)
        for one in (model, expected):
            one.begin_step(seed=0, number=0, tokens=1)
        found[name] = filled(ranks, model, later, expected)
    return found


def with_lora(model: Any, later: LaterWeights, expected: Any) -> LaterWeights:
    for one in (model, expected):
        add_lora(one, LoraSettings(rank=2), seed=LORA_SEED)
    return replace(later, lora_seed=LORA_SEED)


def check_theirs(ranks: Ranks, folder: Path) -> Any:
    """As `hf:`, in float32 from bfloat16 or float32 files."""
    found = {}
    for name, (kind, more) in THEIRS.items():
        at = folder / name
        if ranks.is_first:
            inner = tiny_huggingface(kind, **LARGER, **more)
            (inner.bfloat16() if name == "qwen3" else inner).save_pretrained(
                at, max_shard_size="40KB"
            )
        ranks.barrier()
        model, later = load_later(at, device=CPU, dtype=torch.float32)
        expected = load_huggingface(at, dtype=torch.float32)
        assert model.inner.config.to_dict() == expected.inner.config.to_dict()
        assert model.inner.generation_config.to_dict() == (
            expected.inner.generation_config.to_dict()
        )
        assert model.facts == expected.facts
        assert model.packing_way() == expected.packing_way() or not expected.packing(64)
        found[name] = filled(ranks, model, later, expected)
        if name in ("gemma3", "mixtral"):
            model, later = load_later(at, device=CPU, dtype=torch.float32)
            expected = load_huggingface(at, dtype=torch.float32)
            later = with_lora(model, later, expected)
            found[f"{name} with LoRA"] = filled(ranks, model, later, expected)
    return found


def check_folders(ranks: Ranks, folder: Path) -> Any:
    """As `from:`: folders of ours, a plain Llama that becomes ours, theirs whole and cut."""
    found = {}
    made: dict[str, Any] = {
        "ours": lambda: build_model(ModelSettings(layers=3, width=32, heads=2), vocab_size=97),
        "bfloat16": lambda: build_model(
            ModelSettings(layers=3, width=32, heads=2, dtype="bfloat16"),
            vocab_size=97,
            dtype=torch.bfloat16,
        ),
        "llama": lambda: tiny_huggingface(**LARGER),
        "gemma3": lambda: tiny_huggingface(*THEIRS["gemma3"][:1], **LARGER, head_dim=16).bfloat16(),
    }
    for name, make in made.items():
        at = folder / f"of {name}"
        if ranks.is_first:
            model = make()
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(at)
            else:
                save_model(model, at)
        ranks.barrier()
        found[name] = filled(ranks, *load_later(at, device=CPU), expected_of(at))
    model, later = load_later(folder / "of gemma3", device=CPU)
    shard(model, ranks)
    fill(model, later, ranks)
    cut = folder / "cut"
    if ranks.is_first:
        save_model(model, cut, with_weights=False)
        (cut / "weights.shards").mkdir()
    ranks.barrier()
    pieces = files.own_pieces(model.state_dict(), is_first=ranks.is_first)
    rank = ranks.place.rank
    files.write_pieces(cut / "weights.shards" / f"{rank}.safetensors", pieces, cut=True)
    ranks.barrier()
    found["cut"] = filled(ranks, *load_later(cut, device=CPU), expected_of(cut))
    return found


def expected_of(folder: Path) -> Any:
    """As it is loaded whole for a run that begins with it."""
    model = load_model(folder)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return model


def check_refused(ranks: Ranks, folder: Path) -> Any:
    """What each rank says of folders with faults that are found before or after sharding."""
    said = {}
    for name in sorted(path.name for path in folder.glob("bad *")):
        error = ""
        try:
            model, later = load_later(folder / name, device=CPU, dtype=torch.float32)
            shard(model, ranks)
            fill(model, later, ranks)
        except PenstockError as caught:
            error = f"{type(caught).__name__}: {caught}"
        said[name] = error
        ranks.barrier()
    return said


def check_one_lacks_a_file(ranks: Ranks, folder: Path) -> Any:
    """Whatever happens to one rank while it reads is an error of all."""
    model, later = load_later(folder / "llama", device=CPU, dtype=torch.float32)
    shard(model, ranks)
    if not ranks.is_first:

        def fails(*_: object) -> None:
            raise OSError("the line is gone")

        preparing._read = fails
    try:
        fill(model, later, ranks)
    except (PenstockError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


CHECKS: dict[str, Callable[[Ranks, Path], Any]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with Ranks(CPU) as all_ranks:
        answers = {name: CHECKS[name](all_ranks, Path(sys.argv[1])) for name in sys.argv[2:]}
        all_ranks.barrier()
    print(json.dumps(answers), flush=True)
    # Gloo's threads may still hold tensors, and abort an interpreter that ends
    # (pytorch/pytorch#179291).
    os._exit(0)
