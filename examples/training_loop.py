"""The trainer's own algorithm on one page: `python examples/training_loop.py DATASET RUN`, killed
and started again.

`ps.train` does the same and more (metrics, evaluators, several processes, teachers); a test
compares the two, bit for bit.
"""

import json
import sys
from pathlib import Path

import torch

import penstock as ps
from penstock.core.randomness import key_for

STEPS, WARMUP, PEAK, CLIP = 40, 4, 3e-3, 1.0
SIZE = {"layers": 2, "width": 64, "heads": 4}


def learning_rate(step):
    """Linear warm-up; constant; then, over the last fifth of the steps, linear down to 0."""
    if step < WARMUP:
        return PEAK * ((step + 1) / WARMUP)
    begin = STEPS - round(0.2 * STEPS)
    return PEAK if step < begin else PEAK * (1 - (step - begin) / (STEPS - begin))


def make_optimizer(model):
    """AdamW; only the matrices between the embedding and the output shrink."""
    named = dict(model.named_parameters())
    decays = [
        weight for name, weight in named.items() if weight.ndim >= 2 and "embedding" not in name
    ]
    others = [weight for name, weight in named.items() if weight.ndim < 2 or "embedding" in name]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, fused=True)


def train(dataset, folder, until=STEPS):
    """Train to a step, from the checkpoint in the folder if there is one; the loss of each step."""
    torch.use_deterministic_algorithms(True)
    folder.mkdir(parents=True, exist_ok=True)
    model = ps.build_model(vocab_size=ps.open_dataset(dataset).tokenizer.vocab_size, **SIZE)
    loader = ps.Loader(
        dataset, sequence_length=64, rows_per_step=4, seed=1, requirements=model.requirements()
    )
    optimizer, losses, checkpoint = make_optimizer(model), [], folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
        losses = saved["losses"]
    for step in loader:
        if step.index >= until:
            break
        # Random numbers, such as dropout's, are a function of the step: a resumed run draws the
        # same.
        torch.manual_seed(key_for(0, "step", step.index, 0) >> 1)
        nats = 0.0
        for row in step:
            # Divided by the targets of the whole step, so the gradients of its rows add up to the
            # step's.
            part = ps.training.row_loss(model, row, step.loss_denominators)
            part.loss.backward()
            nats += float(part.cross_entropy[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step.index)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats / step.loss_denominator)
        if (step.index + 1) % 10 == 0 or step.index + 1 == until:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "losses": losses,
            }
            # The place after this very step, whatever the loader has prepared ahead.
            torch.save(
                {**state, "loader": json.dumps(step.resume_state)}, checkpoint.with_suffix(".new")
            )
            checkpoint.with_suffix(".new").replace(checkpoint)
            print(f"step {step.index + 1}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
