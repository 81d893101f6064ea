"""Gradients of two ranks are summed while the backward pass goes on, in the same order on both."""

import pytest
import torch
from training_makers import last_json, on_two_processes

from penstock.learn.training.gradient_sums import _buckets

SCRIPT = """
    import json, os
    import torch
    from torch import distributed as dist
    from penstock.core.errors import StateError
    from penstock.learn.training.gradient_sums import GradientSums

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def made():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8) for _ in range(6)]
        layers[1].bias.requires_grad_(False)
        return torch.nn.ModuleList(layers)

    def gradients_of(model):
        trained = [w for w in model.parameters() if w.requires_grad and w.grad is not None]
        return [w.grad.clone() for w in trained]

    def run(model, sums, passes=2, skipped=4, twice=False):
        # Rank 1 leaves a layer out.
        sent = []
        if sums is not None:
            send = sums._send
            sums._send = lambda: (sent.append(len(sent)), send())
        for number in range(passes):
            torch.manual_seed(10 * rank + number)
            x = torch.randn(4, 8)
            for place, layer in enumerate(model):
                if not (rank and place == skipped):
                    x = layer(x).tanh()
            if sums is not None and number == passes - 1:
                sums.begin()
            loss = x.square().sum()
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
        early = len(sent)
        if sums is not None:
            sums.finish()
        return early, gradients_of(model)

    found = {}
    plain = made()
    run(plain, None)
    wanted = []
    for weight in plain.parameters():
        if weight.requires_grad:
            total = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            dist.all_reduce(total)
            wanted.append(total)
    for name, size in (("each", 1), ("some", 600), ("one", 1 << 20), ("late", 600)):
        model, early = made(), name != "late"
        sums = GradientSums(model.parameters(), several=True, early=early, bucket_bytes=size)
        for step in range(2):
            model.zero_grad()
            count, gradients = run(model, sums)
        pairs = zip(gradients, wanted, strict=True)
        found[name] = [count, all(torch.equal(*pair) for pair in pairs)]
    model = made()
    sums = GradientSums(model.parameters(), several=True, bucket_bytes=1)
    try:
        run(model, sums, skipped=None, twice=True)
    except StateError as error:
        found["twice"] = str(error)
    print(json.dumps(found))
    dist.barrier()
    # What was sent and never landed is dropped.
    os._exit(0)
"""


@pytest.mark.slow
def test_sums_of_two_ranks(tmp_path):
    (mine, _), (other, _) = on_two_processes(tmp_path / "ranks.py", SCRIPT)
    for found in (last_json(mine), last_json(other)):
        equal = {name: value[1] for name, value in found.items() if name != "twice"}
        assert equal == {"each": True, "some": True, "one": True, "late": True}
        assert found["late"][0] == 0
        assert "runs backward twice" in found["twice"]
    # All were sent before the pass had ended, where all came; up to the layer left out, where not.
    assert last_json(mine)["each"][0] == 11
    assert last_json(other)["each"][0] == 2
    assert 0 < last_json(mine)["some"][0] < 11


def test_buckets_hold_one_dtype_and_go_from_the_last_weight_to_the_first():
    kinds = [(5, torch.float32), (5, torch.float32), (9, torch.float64), (50, torch.float32)]
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in kinds]
    found = _buckets(weights, 40)
    assert [[len(one) for one in bucket] for bucket in found] == [[50], [9], [5, 5]]
