"""Which models of transformers run packed rows and caches exactly, and how: the table of
docs/reference/isolation.md.

python benchmarks/isolation_table.py [model type …]    prints Markdown; about 3 min on one core, no downloads.
python benchmarks/isolation_table.py --write           puts the table into docs/reference/isolation.md.

Small random models in float32 of every causal architecture of the installed transformers that a few
settings can make small (`tests/makers/architectures.py`), with one layer of each kind. Gaps are
largest differences from transformers' own forward on each document alone, in standard deviations of
the logits; for gradients, relative to their norm.
"""  # noqa: E501

import argparse
import copy
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME / "tests"))

from makers.architectures import KINDS, make_small  # noqa: E402
from makers.rows import random_row  # noqa: E402
from penstock import PenstockError  # noqa: E402
from penstock.models.cache import Cache  # noqa: E402
from penstock.models.theirs.model import HuggingFaceModel  # noqa: E402

LENGTHS = (13, 1, 30, 7, 2)
PROMPT, STEPS = 20, 8
BEGIN, END = "<!-- models -->", "<!-- /models -->"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    lines = [
        "| model type | packed rows | gap | gradients | cache | gap |",
        "|---|---|---|---|---|---|",
    ]
    left_out, counts = [], {"tried": 0, "exact": 0, "refused": 0}
    for kind in asked.kinds or KINDS:
        try:
            inner = make_small(kind)
            with torch.no_grad():
                inner(input_ids=torch.arange(9)[None], use_cache=False)
        except Exception as error:  # transformers' own
            left_out.append(f"{kind} ({' '.join(str(error).split())[:60]})")
            continue
        found = examine(inner)
        counts["tried"] += 1
        counts["exact" if len(found) == 5 else "refused"] += 1
        lines.append(f"| {kind} | {' | '.join([*found, '', '', '', ''][:5])} |")
        print(lines[-1], file=sys.stderr, flush=True)
    summary = "{tried} configurations run; {exact} are exact in packed rows, {refused} are refused.".format(  # noqa: E501
        **counts
    )
    text = "\n".join([summary, "", *lines])
    print(text)
    print(f"not made small, {len(left_out)}: {'; '.join(left_out)}", file=sys.stderr)
    if asked.write:
        page = HOME / "docs" / "reference" / "isolation.md"
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def examine(inner: Any) -> list[str]:
    """Way, gap and gradients of packed rows, and way and gap of the cache; only a reason where the
    model is refused.
    """
    row = random_row(LENGTHS)
    theirs = copy.deepcopy(inner)
    documents = [
        torch.from_numpy(row.tokens[b:e])[None]
        for b, e in pairwise(np.cumsum([0, *LENGTHS]).tolist())
    ]
    truth = torch.cat(
        [copy.deepcopy(theirs)(input_ids=one, use_cache=False).logits[0] for one in documents]
    )
    expected = gradients(
        theirs, torch.cat([theirs(input_ids=one, use_cache=False).logits[0] for one in documents])
    )
    try:
        model = HuggingFaceModel(inner)
        packed = model.logits(model(model.tensors(row)))[0, : row.num_tokens]
    except PenstockError as error:
        return [f"refused: {str(error).split(': ', 1)[-1].split('. ')[0][:90]}"]
    gap = float((packed - truth).abs().max() / truth.std())
    off = float((gradients(inner, packed) - expected).norm() / expected.norm())
    return [model.packing_way(), f"{gap:.0e}", f"{off:.0e}", *cached(model, inner)]


def gradients(inner: Any, logits: torch.Tensor) -> torch.Tensor:
    inner.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    return torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in inner.parameters()]
    )


@torch.no_grad()
def cached(model: HuggingFaceModel, inner: Any) -> tuple[str, str]:
    """What generation keeps of a text, and the largest gap after a prompt in two parts and single
    steps.
    """
    text = torch.from_numpy(random_row((PROMPT + STEPS,), padding=0).tokens)[None]
    cache, worst = model.new_cache(1, PROMPT + STEPS), 0.0
    cuts = [0, PROMPT // 2, *range(PROMPT, PROMPT + STEPS + 1)]
    for begin, end in pairwise(cuts):
        found = model.extend(text[:, begin:end], torch.tensor([end - begin]), cache)[0]
        # A fresh copy: some models remember the longest text so far. Eager, as loaded: ours stays
        # out of it.
        own = copy.deepcopy(inner)
        own.set_attn_implementation(model.fit.own)
        truth = own(input_ids=text[:, :end], use_cache=False).logits[0, -1]
        worst = max(worst, float((found - truth).abs().max() / truth.std()))
    if isinstance(cache, Cache):
        way = "ours"
    else:
        caches = model.generation.own_caches
        way = (
            "transformers'"
            if caches is not None and caches.steps
            else "none: the text is read again"
        )
        if caches is not None and caches.steps and not caches.parts:
            way += ", prompts whole"
    return way, f"{worst:.0e}"


if __name__ == "__main__":
    main()
