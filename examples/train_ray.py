"""Trains with Ray Train on one worker or several; a lost worker costs no step and repeats none.

    python examples/train_ray.py DATASET RUN --steps 40 --workers 1 2

`--workers 1 2` is elastic: training begins with what is there, goes on with fewer workers if one is
lost, and takes more when they come back. Each step has the same rows for any number of workers, and
its gradients are those of the whole step. The loader's state is part of Ray's checkpoint; it is the
same on every worker, so one copy fits any number. Needs `pip install 'penstock[train]'
'ray[train]'`. With RAY_ADDRESS it runs on that cluster, whose nodes must see the dataset and RUN
(or an `s3://…` for RUN).
"""

import argparse
import json
import os
import tempfile
from itertools import islice
from pathlib import Path


def train(settings):
    """What each worker runs."""
    import ray.train
    import torch
    import torch.distributed as dist

    import penstock as ps

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    vocab_size = ps.open_dataset(settings["dataset"]).tokenizer.vocab_size
    model = ps.build_model(vocab_size=vocab_size, layers=2, width=64, heads=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ps.Loader(
        settings["dataset"],
        sequence_length=64,
        rows_per_step=settings["rows"],
        seed=1,
        data_parallel=(rank, size),
        requirements=model.requirements(),
    )
    ps.integrations.check_ranks(loader)  # every worker plans by itself: refuse one with other data
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location=device)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(json.loads(saved["loader"]))
    for step in islice(loader, settings["steps"] - loader.step):
        nats = torch.zeros(1, device=device)
        for row in step:
            # Divided by the targets of the whole step, so gradients are summed over workers, not
            # averaged.
            part = ps.training.row_loss(model, row, step.loss_denominators)
            part.loss.backward()
            nats += part.loss.detach()
        for weight in model.parameters():
            if weight.grad is None:  # this worker's rows are empty, at the very end of the data
                weight.grad = torch.zeros_like(weight)
        for tensor in [nats, *(weight.grad for weight in model.parameters())]:
            dist.all_reduce(tensor)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if settings["on_step"] is not None:
            settings["on_step"](step, rank, size, float(nats))
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            done = step.index + 1
            if rank == 0 and (done % settings["save_every"] == 0 or done == settings["steps"]):
                # The place after this very step, whatever the loader has prepared ahead.
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(
                    {**state, "loader": json.dumps(step.resume_state)}, Path(folder) / "state.pt"
                )
                saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(
                {"step": step.index, "loss": float(nats), "workers": size}, checkpoint=saved
            )


def run(
    dataset,
    folder,
    steps,
    workers,
    *,
    rows=4,
    save_every=10,
    failures=3,
    interval=30.0,
    gpu=False,
    on_step=None,
):
    """Train on a cluster that Ray is connected to; returns Ray's result.

    `on_step` is called on each worker with the step, its rank, the number of workers and the loss.
    """
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    settings = {
        "dataset": dataset,
        "steps": steps,
        "rows": rows,
        "save_every": save_every,
        "on_step": on_step,
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(
            num_workers=workers[0] if len(set(workers)) == 1 else (min(workers), max(workers)),
            use_gpu=gpu,
            elastic_resize_monitor_interval_s=interval,
        ),
        run_config=RunConfig(
            name=Path(folder).name,
            storage_path=str(Path(folder).absolute().parent)
            if "://" not in str(folder)
            else str(folder),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def main():
    """Train as the command line says."""
    import ray

    parser = argparse.ArgumentParser()
    parser.add_argument("dataset")
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="a number, or the least and the most"
    )
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    given = parser.parse_args()
    ray.init(address=os.environ.get("RAY_ADDRESS") or "local")
    print(
        run(
            str(Path(given.dataset).absolute()),
            given.run,
            given.steps,
            given.workers,
            gpu=given.gpu,
        ).metrics
    )


if __name__ == "__main__":
    main()
