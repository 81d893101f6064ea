"""What a plan says of targets: rows without one, chats that are cut, and what was left out; and the
same before a training.
"""

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from makers.processes import run_penstock
from makers.views import printed
from penstock import Denoise, InputRequirements, Loader, Source, write_dataset
from penstock.plan.inputs import EVERYTHING
from penstock.plan.objectives import SpanCorruption
from penstock.use.inspection import dry_run, plan_view
from penstock.use.inspection.targets import FIRST_ROWS, target_warnings

SLOTS = 32


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Ten long chats with an answer at the end, thirty short ones, twenty of which nothing is
    trained.
    """
    documents = [[5] * 100] * 10 + [[3] * 20] * 30 + [[7] * 25] * 20
    spans = [[(90, 100, 1.0)]] * 10 + [[(10, 20, 1.0)]] * 30 + [[]] * 20
    return write_dataset(tmp_path_factory.mktemp("warned") / "chats", documents, spans=spans)


def loader_of(source, **options):
    options = {"sequence_length": SLOTS, "rows_per_step": 4, "threads": 0, **options}
    return Loader(source, **{"data_parallel": (0, options["rows_per_step"]), **options})


def shown(report):
    return printed(plan_view(report), width=400)


def rows_without(loader):
    """Rows of all ranks in which no slot has a target, and documents of which none has one, from
    the rows.
    """
    rows = documents = 0
    one = Loader(
        loader.mixture,
        sequence_length=SLOTS,
        rows_per_step=4,
        threads=0,
        packing=loader.settings.packing,
        requirements=loader.requirements,
    )
    for step in one:
        for row in step:
            trained = (row.targets != -100).any(0)
            rows += bool(row.num_tokens) and not trained.any()
            borders = row.cu_seqlens[: row.num_documents + 1]
            documents += sum(not trained[begin:end].any() for begin, end in pairwise(borders))
    return rows, documents


@pytest.mark.parametrize("packing", ["best_fit", "next_fit", "concat", "none"])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("distances", [1, 3])
def test_rows_and_documents_without_a_target_are_counted(chats, packing, drops, distances):
    need = EVERYTHING.merge(InputRequirements(target_distances=distances))
    loader = loader_of(
        Source(chats, max_epochs=2, drop_untrained=drops), packing=packing, requirements=need
    )
    report = dry_run(loader, 1000)
    rows, documents = rows_without(loader)
    assert (report.rows_without_targets, report.sources[0].without_targets) == (rows, documents)
    assert rows > 0
    assert f"{rows} rows, in which nothing is trained" in shown(report)
    [warning, *_] = report.warnings
    assert warning.startswith(
        f"{rows} of {report.rows} rows planned have no target, so nothing in them is trained; "
    )
    assert f"{documents} of source 'chats'" in warning


def test_what_was_left_out_has_a_count_of_its_own(chats):
    report = dry_run(loader_of(Source(chats, max_epochs=1)), 1000)
    [source] = report.sources
    # 100 tokens are three whole parts and 4 tokens; the third part and the rest have targets.
    assert (source.untrained_documents, source.untrained_parts, source.untrained_tokens) == (
        0,
        20,
        20 * SLOTS,
    )
    assert (source.dropped_documents, source.truncated_tokens, source.epochs) == (0, 0, 1)
    assert source.tokens == chats.num_tokens - 20 * SLOTS
    assert "untrained after the cut" in shown(report)
    assert "20 (640 tokens)" in shown(report)
    cut = dry_run(loader_of(Source(chats, max_epochs=1, too_long="truncate")), 1000).sources[0]
    assert (cut.untrained_documents, cut.untrained_parts, cut.untrained_tokens) == (10, 10, 1000)
    assert (cut.documents, cut.epochs, cut.truncated_tokens) == (50, 1, 0)
    end = dry_run(loader_of(Source(chats, max_epochs=1, too_long="keep_end")), 1000)
    assert (end.sources[0].documents, end.sources[0].epochs) == (60, 1)
    assert (end.sources[0].untrained_parts, end.sources[0].truncated_tokens) == (0, 10 * 68)
    assert "untrained after the cut" not in shown(end)


CONSEQUENCES = {
    "split": (
        "split trains an answer in a later part without its prompt, and parts without a target "
        "are left out"
    ),
    "truncate": (
        "truncate cuts off answers at their end, and documents without a target in the rest are "
        "left out"
    ),
    "keep_end": (
        "keep_end cuts off prompts at their beginning, and documents without a target in the rest "
        "are left out"
    ),
}


@pytest.mark.parametrize("policy", CONSEQUENCES)
def test_chats_that_are_cut_are_named_with_their_cures(chats, policy):
    report = dry_run(loader_of(Source(chats, max_epochs=1, too_long=policy)), 1000)
    [cut] = report.cut
    assert (cut.documents, cut.of_documents, cut.drops) == (10, 60, True)
    warning = str(cut)
    assert warning.startswith(
        "source 'chats': 10 of 60 documents with loss weights are longer than a row of 32 tokens; "
    )
    assert CONSEQUENCES[policy] in warning
    assert warning.endswith("set too_long: drop, or give longer rows (sequence_length)")
    assert f"! {warning}" in shown(report)


def test_each_limit_has_its_own_words(chats):
    def cut(**options):
        source = {
            name: options.pop(name)
            for name in ("objective", "drop_untrained", "slice")
            if name in options
        }
        [found] = dry_run(loader_of(Source(chats, max_epochs=1, **source), **options), 1000).cut
        return found

    limited = str(cut(max_document_tokens=16))
    assert (
        "60 of 60 documents with loss weights are longer than max_document_tokens (16)" in limited
    )
    assert limited.endswith("or raise max_document_tokens")
    noisy = cut(objective=Denoise([SpanCorruption(0.3, 2)], sentinels=range(90, 99)))
    assert (
        f"the {noisy.longer_than.split()[1]} tokens that objective 'denoise' takes"
        == noisy.longer_than
    )
    assert "take slots and train nothing (drop_untrained leaves them out)" in str(
        cut(drop_untrained=False)
    )
    assert (cut(slice=(0, 0.1)).documents, cut(slice=(0, 0.1)).of_documents) == (6, 6)


def test_no_warning_without_a_reason(chats, tmp_path):
    plain = write_dataset(tmp_path / "plain", [[5] * 100] * 10)
    trained = Source(chats, max_epochs=1, slice=(0.17, 0.66), too_long="drop")
    for loader in (loader_of(Source(plain, max_epochs=1)), loader_of(trained)):
        assert dry_run(loader, 1000).warnings == []
        assert target_warnings(loader, 1000) == []
    assert "!" not in shown(dry_run(loader_of(trained), 1000))


def test_limits_of_rows_are_shown(chats):
    loader = loader_of(
        Source(chats, max_epochs=1, drop_untrained=False),
        documents_per_row=2,
        max_document_tokens=8,
    )
    report = dry_run(loader, 1000)
    assert (report.documents_per_row, report.max_document_tokens) == (2, 8)
    full = sum(row.num_documents == 2 for step in _whole(loader) for row in step)
    assert report.rows_full_of_documents == full > 0
    assert (
        f"2.0 documents a row, at most 2 ({full} rows have as many), each of at most 8 tokens"
        in shown(report)
    )


def _whole(loader):
    return Loader(
        loader.mixture,
        sequence_length=SLOTS,
        rows_per_step=4,
        threads=0,
        documents_per_row=2,
        max_document_tokens=8,
    )


def test_the_look_before_a_training_does_not_move_the_loader(chats):
    loader = loader_of(Source(chats))
    loader.seek(3)
    state = loader.state_dict()
    found = target_warnings(loader, 10_000)
    assert loader.state_dict() == state
    seen = int(found[0].split(" of ")[1].split()[0].replace(",", ""))
    assert FIRST_ROWS <= seen < 2 * FIRST_ROWS
    assert "rows at the beginning have no target" in found[0]
    assert found[1] == str(dry_run(loader, 5).cut[0])


def test_the_look_before_a_training_leaves_errors_to_the_training(tmp_path):
    dataset = write_dataset(tmp_path / "d", [np.arange(40)] * 30, spans=[[(38, 40, 1.0)]] * 30)
    nothing = loader_of(Source(dataset, too_long="truncate"))
    assert len(target_warnings(nothing, 10)) == 1
    assert target_warnings(loader_of(Source(dataset, too_long="error")), 10) == []


def test_the_command_counts_and_warns(chats, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"data:\n  sources: [{{path: {chats.path}, max_epochs: 1}}]\n"
        "  loader: {sequence_length: 32, rows_per_step: 4, documents_per_row: 3}\n"
    )
    command = partial(run_penstock, check=True)
    report = dry_run(loader_of(Source(chats, max_epochs=1), documents_per_row=3), 100)
    found = json.loads(command("plan", path, "--json").stdout)
    assert found["warnings"] == report.warnings
    assert len(found["warnings"]) == 2
    assert found["cut"][0]["documents"] == 10
    assert found["sources"][0]["untrained_parts"] == 20
    told = " ".join(command("plan", path).stdout.split())
    assert "at most 3" in told
    assert "10 of 60 documents with loss weights are longer than a row of 32 tokens" in told
