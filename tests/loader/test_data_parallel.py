"""Which rows a process gets, by its place in a device mesh of any dimensions."""

import json
from dataclasses import dataclass

import pytest

from makers.ranks import run_processes
from penstock import DataParallel
from penstock.core.errors import ConfigError, DistributedError


@dataclass
class Mesh:
    """What a torch DeviceMesh says; `place` None: this process is not in it."""

    sizes: tuple
    place: tuple | None
    mesh_dim_names: tuple | None = None

    @property
    def ndim(self):
        return len(self.sizes)

    def size(self, axis=None):
        return self.sizes[axis or 0] if axis is not None or self.ndim == 1 else None

    def get_coordinate(self):
        return self.place

    def get_local_rank(self, axis=0):
        return self.place[axis]


@pytest.mark.parametrize(
    ("sizes", "names", "place", "due"),
    [
        ((4,), None, (3,), (3, 4)),
        ((4,), ("dp",), (3,), (3, 4)),
        ((4,), ("workers",), (3,), (3, 4)),
        ((4,), ("tp",), (3,), (0, 1)),
        ((2, 4), ("dp", "tp"), (1, 3), (1, 2)),
        ((2, 4), ("TP", "Data"), (1, 3), (3, 4)),
        ((2, 3, 4), ("dp_replicate", "dp_shard", "cp"), (1, 2, 3), (5, 6)),
        ((2, 3, 4), ("pp", "replicate", "shard"), (1, 2, 3), (11, 12)),
        ((2, 2, 2, 2), ("pp", "dp", "ep", "tp"), (1, 1, 1, 1), (1, 2)),
        ((2, 4), ("pp", "tp"), (1, 2), (0, 1)),
        ((2, 1), ("dp", "whatever"), (1, 0), (1, 2)),
    ],
)
def test_names_say_which_ranks_get_different_rows(sizes, names, place, due):
    assert DataParallel.of(Mesh(sizes, place, names)) == DataParallel(*due)


@pytest.mark.parametrize(
    ("dims", "due"),
    [(("a",), (1, 2)), (("b", "a"), (5, 6)), ("c", (3, 4)), ((0, 2), (7, 8)), ((), (0, 1))],
)
def test_dimensions_may_be_chosen(dims, due):
    mesh = Mesh((2, 3, 4), (1, 2, 3), ("a", "b", "c"))
    assert DataParallel.from_mesh(mesh, dims=dims) == DataParallel(*due)


@pytest.mark.parametrize(
    ("names", "dims", "message"),
    [
        (
            None,
            None,
            r"2 dimensions without names \(dimension 0: 2, dimension 1: 4\), .*mesh_dim_names=",
        ),
        (
            ("dp", "rest"),
            None,
            r"unknown mesh dimension 'rest' in a mesh with dp: 2, rest: 4: .* dims=",
        ),
        (("dp", "tp"), ("pp",), r"no dimension 'pp'; it has dp: 2, tp: 4"),
        (("dp", "tp"), ("dp", 0), r"\('dp', 0\) names a dimension of the mesh twice"),
    ],
)
def test_ambiguous_meshes_are_refused(names, dims, message):
    with pytest.raises(ConfigError, match=message):
        DataParallel.from_mesh(Mesh((2, 4), (1, 3), names), dims=dims)


def test_a_process_outside_of_the_mesh_is_refused():
    with pytest.raises(DistributedError, match=r"process.*mesh.*dp.*2.*tp.*4"):
        DataParallel.of(Mesh((2, 4), None, ("dp", "tp")))


SCRIPT = """
    import json, os, sys
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import penstock as ps

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def loader(**more):
        return ps.Loader(sys.argv[1], sequence_length=16, rows_per_step=4, seed=3, **more)

    def rows(loader, steps):
        found = []
        for step in loader:
            found.append([row.tokens.tolist() for row in step])
            if len(found) == steps:
                return found, step.resume_state

    mine, state = rows(loader(data_parallel=mesh), 3)
    slices = [ps.DataParallel.of(mesh[name]) for name in ("dp", "tp")]
    resumed = loader(data_parallel=mesh)
    resumed.load_state_dict(state)
    print(json.dumps({
        "place": mesh.get_coordinate(), "rows": mine, "state": state, "next": rows(resumed, 1)[0],
        "slices": [[one.rank, one.size] for one in slices],
    }, default=list), flush=True)
    dist.barrier()
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of 2 × 2 processes (dp × tp) got, and the dataset."""
    pytest.importorskip("torch")
    from penstock import write_dataset

    folder = tmp_path_factory.mktemp("mesh")
    documents = [
        [1 + (7 * number + place) % 90 for place in range(3 + number % 11)] for number in range(200)
    ]
    write_dataset(folder / "data", documents, vocab_size=100)
    ended = run_processes(folder / "script.py", SCRIPT, folder / "data", processes=4)
    return folder / "data", [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.slow
def test_ranks_of_a_mesh_share_a_step(ranks):
    from penstock import Loader

    data, found = ranks
    by_place = {tuple(one["place"]): one for one in found}
    assert sorted(by_place) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for dp in range(2):
        assert by_place[dp, 0]["rows"] == by_place[dp, 1]["rows"], (
            "ranks of a model get the same rows"
        )
    alone = iter(Loader(data, sequence_length=16, rows_per_step=4, seed=3))
    steps = [[row.tokens.tolist() for row in next(alone)] for _ in range(4)]
    for number, step in enumerate(steps):
        parts = [(by_place[dp, 1]["rows"] + by_place[dp, 1]["next"])[number] for dp in range(2)]
        assert parts[0] + parts[1] == step, "each row once"


@pytest.mark.slow
def test_all_ranks_of_a_mesh_save_the_same_state(ranks):
    _, found = ranks
    assert all(one["state"] == found[0]["state"] for one in found)


@pytest.mark.slow
def test_a_dimension_of_a_mesh(ranks):
    for one in ranks[1]:
        dp, _ = one["place"]
        assert one["slices"] == [[dp, 2], [0, 1]]
