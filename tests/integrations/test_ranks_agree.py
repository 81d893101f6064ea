"""Every adapter compares what ranks train before the first step; a new one without the comparison
fails here.
"""

import ast
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import VOCABULARY, make_loader, make_model

import penstock
import penstock as ps
from makers.ranks import run_processes
from penstock.core.errors import ConfigError, DistributedError
from penstock.plan.loader import agreement

pytestmark = pytest.mark.filterwarnings("ignore")

ROOM = Path(penstock.__file__).parent / "integrations"


class OtherRanks:
    """torch.distributed as in two processes, of which the other one's plan has another seed."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: self)

    def get_world_size(self) -> int:
        return 2

    def other(self, value: Any) -> Any:
        plan, more = value["plan"], value["more"]
        if plan is None:
            return {"plan": None, "more": {name: f"another {one}" for name, one in more.items()}}
        return {"plan": {**plan, "seed": plan["seed"] + 1}, "more": more}

    def all_gather_object(self, found: list[Any], value: Any) -> None:
        found[:] = [value, self.other(value)]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert not expected
        return self.kept.setdefault(key, value).encode()

    def wait(self, keys: list[str]) -> None:
        (mine,) = (key for key in keys if key in self.kept)
        for key in keys:
            self.kept.setdefault(key, json.dumps(self.other(json.loads(self.kept[mine]))))

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


def accelerate(data: Path, folder: Path) -> None:
    from accelerate import Accelerator

    ps.accelerate.AcceleratorSteps(Accelerator(cpu=True), make_loader(data))


def huggingface(data: Path, folder: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to="none")
    ps.huggingface.Trainer(make_model(), arguments, loader=make_loader(data))


def huggingface_evaluation(data: Path, folder: Path) -> None:
    """The loader for training agrees, that for evaluation does not."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to="none")
    held_out = make_loader(data, max_epochs=1)
    made_from = type(held_out).made_from.fget  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        others = OtherRanks()
        kept = others.other
        mark = made_from(held_out)
        patch.setattr(
            others, "other", lambda value: kept(value) if value["plan"] == mark else value
        )
        patch.setattr(agreement, "_distributed", lambda: others)
        loader = make_loader(data, seed=8)
        ps.huggingface.Trainer(make_model(), arguments, loader=loader, eval_loader=held_out)


def sft(data: Path, folder: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    from trl_run import make_rows_loader, make_tokenizer, settings_of

    ps.trl.SFTTrainer(
        make_model(),
        settings_of(folder),
        loader=make_rows_loader(data),
        processing_class=make_tokenizer(),
    )


def dpo(data: Path, folder: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from trl_run import make_tokenizer

    paths = [[3, 4, 5], [3, 4, 6]]
    tree = ps.shards.build_tree(paths, [[0, 0, 1]] * 2, values={"rank": [0, 1]}, share=True)
    spans = [[(i, i + 1, float(w)) for i, w in enumerate(tree.loss_weights) if w]]
    ps.write_dataset(
        folder / "pairs", [tree.tokens], trees=[tree.tree], vocab_size=VOCABULARY, spans=spans
    )
    arguments = trl.DPOConfig(str(folder / "run"), max_length=None, use_cpu=True, report_to="none")
    pairs = ps.trl.preference_pairs(folder / "pairs")
    ps.trl.DPOTrainer(
        make_model(), args=arguments, train_dataset=pairs, processing_class=make_tokenizer()
    )


def lightning(data: Path, folder: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    module = ps.lightning.LoaderDataModule(make_loader(data, ranks=(0, 2)))
    module.trainer = SimpleNamespace(  # type: ignore[assignment]
        distributed_sampler_kwargs={"rank": 0, "num_replicas": 2},
        accumulate_grad_batches=1,
        overfit_batches=0,
    )
    module.setup("fit")


def torchtitan(data: Path, folder: Path) -> None:
    pytest.importorskip("torchtitan.components.dataloader", reason="torchtitan is not installed")
    config = ps.torchtitan.DataLoader.Config(dataset_path=str(data), rows_per_step=4)
    ps.torchtitan.DataLoader(config, dp_world_size=1, dp_rank=0, seq_len=32, local_batch_size=2)


def megatron(data: Path, folder: Path) -> None:
    ps.megatron.Batches(make_loader(data, ranks=(0, 2)))


def own_loop(data: Path, folder: Path) -> None:
    next(iter(ps.integrations.LoaderState(make_loader(data, ranks=(0, 2)))))


def in_jax(make: str) -> Callable[[Path, Path], None]:
    def call(data: Path, folder: Path) -> None:
        pytest.importorskip("jax", reason="jax is not installed")
        if make == "grain_iterator":
            pytest.importorskip("grain", reason="grain is not installed")
        # By the room's door, `batches` is the function.
        batches = import_module("penstock.integrations.jax.batches")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "process_gather", agreement.torch_gather)
            getattr(ps.jax, make)(make_loader(data, ranks=(0, 2)))

    return call


ADAPTERS: dict[str, tuple[Callable[[Path, Path], None], ...]] = {
    "accelerate.AcceleratorSteps": (accelerate,),
    "huggingface.Trainer": (huggingface, huggingface_evaluation),
    "jax.batches": (in_jax("batches"),),
    "jax.BatchIterator": (in_jax("BatchIterator"),),
    "jax.grain_iterator": (in_jax("grain_iterator"),),
    "lightning.LoaderDataModule": (lightning,),
    "LoaderState": (own_loop,),
    "megatron.Batches": (megatron,),
    "torchtitan.DataLoader": (torchtitan,),
    "trl.DPOTrainer": (dpo,),
    "trl.SFTTrainer": (sft,),
}
"""Whatever takes a loader, or data that each rank reads for itself: how it is made with a rank that
differs.
"""


@pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, calls in ADAPTERS.items() for make in calls]
)
def test_a_rank_that_differs_is_named(
    name: str, make: Any, counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = OtherRanks()
    monkeypatch.setattr(agreement, "_distributed", lambda: ranks)
    with pytest.raises(ConfigError, match=r"rank 1.*rank 0.*rank 1"):
        make(counting, tmp_path)


def _takes_data(node: ast.stmt) -> bool:
    """Whether a function or a class is given a loader, or makes one."""
    given: Any = node
    if isinstance(node, ast.ClassDef):
        methods = (
            one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
        )
        given = next(methods, None)
        if any("Trainer" in ast.unparse(base) for base in node.bases):
            return True
    if not isinstance(given, ast.FunctionDef):
        return False
    arguments = [*given.args.args, *given.args.kwonlyargs]
    types = [ast.unparse(one.annotation) for one in arguments if one.annotation]
    calls = [one.func for one in ast.walk(given) if isinstance(one, ast.Call)]
    makes = any(isinstance(one, ast.Name) and one.id == "Loader" for one in calls)
    return makes or any(re.search(r"\b(Loader|Given)\b", one) for one in types)


def test_every_adapter_is_listed() -> None:
    """By its door: public names of the room whose functions and classes take a loader."""
    found = set()
    for door in (ROOM / "__init__.py", *ROOM.glob("*/__init__.py")):
        public = set(
            re.findall(r'"(\w+)"', door.read_text().partition("__all__ = ")[2].partition("]")[0])
        )
        files = door.parent.glob("*.py") if door.parent != ROOM else ROOM.glob("*.py")
        for path in files:
            for node in ast.parse(path.read_text()).body:
                if getattr(node, "name", None) in public and _takes_data(node):
                    package = "" if door.parent == ROOM else f"{door.parent.name}."
                    found.add(f"{package}{node.name}")  # type: ignore[attr-defined]
    assert found == set(ADAPTERS)


GRID = """
    import json, sys
    import torch.distributed as dist
    import penstock as ps
    from penstock.core.errors import PenstockError

    data, output, seeds = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place, first = rank // 2, rank % 2 == 0
    said = []
    for seed in (seeds[rank], 3):
        loader = None
        if first:
            loader = ps.Loader(
                ps.Source(data), sequence_length=32, rows_per_step=4, seed=seed, data_parallel=(place, 2)
            )
        try:
            next(ps.megatron.Batches(loader, group=groups[place]))
            said.append("")
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    open(f"{output}-{rank}.json", "w").write(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
"""  # noqa: E501


@pytest.mark.slow
def test_a_grid_of_megatron_names_the_data_parallel_rank(counting: Path, tmp_path: Path) -> None:
    """On the ranks without a loader, too; and the next comparison of the same processes is one of
    its own.
    """
    run_processes(
        tmp_path / "grid.py", GRID, counting, tmp_path / "found", "[3, 3, 5, 5]", processes=4
    )
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(4)]
    told = (
        "ConfigError: rank 1 does not train what rank 0 trains: seed is 3 on rank 0, 5 on rank 1. "
    )
    assert [first.startswith(told) for first, _ in found] == [True, False, True, False]
    for first, _ in (found[1], found[3]):
        assert first.startswith(
            f"DistributedError: the loading rank of this tensor-parallel group failed: {told}"
        )
    assert [second for _, second in found] == [""] * 4


STAGES = """
    import sys
    import torch.distributed as dist
    import penstock as ps
    from penstock.core.errors import PenstockError

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed = 4 if rank == 2 and sys.argv[2] == "differs" else 3
    place = (rank % 2, 2)
    loader = ps.Loader(ps.Source(sys.argv[1]), sequence_length=32, rows_per_step=4, seed=seed, data_parallel=place)
    try:
        ps.megatron.Batches(loader)
    except PenstockError as error:
        print(error)
    dist.barrier()
    dist.destroy_process_group()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["differs", "agrees"])
def test_pipeline_stages_with_the_same_rows_are_compared(
    counting: Path, tmp_path: Path, mode: str
) -> None:
    """Whichever of the two stages comes first speaks for their rank; the difference is named all
    the same.
    """
    found = [
        out for out, _ in run_processes(tmp_path / "stages.py", STAGES, counting, mode, processes=4)
    ]
    assert any("seed is" in out for out in found) == (mode == "differs")
    assert mode == "agrees" or "seed is" in found[0] + found[2]


def test_more_ranks_than_processes(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_distributed", lambda: OtherRanks())
    with pytest.raises(DistributedError, match=r"rank.*2.*3.*only.*2.*processes"):
        ps.megatron.Batches(make_loader(counting, rows=6, ranks=(2, 3)))
