"""Trajectories where people look at data: on the terminal, as JSON, in a notebook and on a page,
before and after they are written.
"""

import json
import re
from io import StringIO
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

import penstock as ps
from makers.trajectories import SAYS, say, thinking_tokenizer, thinking_trajectory
from penstock.chat.trajectories.finished import GivenSteps
from penstock.core.errors import ConfigError
from penstock.data.shards.memory import weight_spans
from penstock.use.inspection import Style, document_view, view_document
from penstock.use.inspection.page import page_html, payload
from penstock.use.inspection.page_model import PageData, from_dataset
from penstock.use.inspection.terminal_tokens import conversation_view


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trajectories-shown")


@pytest.fixture(scope="module")
def trajectory(folder):
    return thinking_trajectory(thinking_tokenizer(folder / "tokenizer"), masked=2)


@pytest.fixture(scope="module")
def dataset(folder, trajectory):
    more = {"group": "a", "version": 5, "step_rewards": (0.25, 0.5, 1)}
    other = thinking_trajectory(trajectory.tokenizer, log=-0.25)
    done = [
        trajectory.finish(reward=1.0, advantage=0.75, **more),
        other.finish(reward=0.0, advantage=-0.75, **more),
    ]
    return ps.write_trajectories(folder / "data", done, tokenizer=trajectory.tokenizer)


@pytest.fixture(scope="module")
def view(dataset):
    return view_document(dataset, 0, dataset.loaded_tokenizer)


def printed(drawn, **options):
    console = Console(file=StringIO(), width=160, no_color=True)
    console.print(drawn(console) if callable(drawn) else drawn)
    return console.file.getvalue()


def test_each_token_has_its_kind_and_each_reply_its_figures(view, dataset):
    tree = view.trajectory
    assert (tree.answers, tree.paths) == (2, 4)
    counts = tree.counts()
    assert counts["sampled"] == np.count_nonzero(view.loss_weights)
    assert counts["masked"] == 2
    assert counts["rewritten"] > 0 < counts["repeated"]
    assert sum(counts.values()) == len(view.tokens)
    first = tree.replies[0]
    logs = [tree.log_probabilities[place] for place in first.places]
    assert first.smallest == -3.0 == tree.log_probabilities[first.smallest_at]
    assert first.mean == pytest.approx(np.mean(logs))
    assert (first.advantage, first.turn_reward, first.version) == (0.75, 0.25, 5)
    assert [one.masked for one in tree.replies if one.answer == 0] == [0, 0, 2]
    last = tree.replies[-1]
    assert (last.number, last.answer, last.advantage) == (2, 1, -0.75)
    assert {tree.advantages[place] for place in last.places} == {-0.75}
    sampled = [kind == "sampled" for kind in tree.kinds]
    assert sampled == [weight > 0 for weight in view.loss_weights]


def test_branches_say_what_they_do_with_earlier_replies(view):
    titles = [
        part.title for branch in view.trajectory.branches for part in branch.segments if part.title
    ]
    assert "rewrites reply 0, trained in path 0" in titles
    assert "repeats reply 1, trained in path 0" in titles
    assert "reply 2 of answer 1" in titles
    for branch in view.trajectory.branches:
        edges = [(part.begin, part.end) for part in branch.segments]
        assert edges[0][0] == branch.begin
        assert edges[-1][1] == branch.end
        assert all(one[1] == other[0] for one, other in pairwise(edges))


def test_the_terminal_shows_a_tree(view, dataset):
    def draw(console):
        return document_view(view, Style(console), 1000)

    text = printed(draw)
    assert "2 trajectories, 4 paths, 6 replies" in text
    assert re.search(r"▌reply 0 of answer 0  \d+ tokens, log-probability −0.\d\d on average", text)
    assert "smallest −3.00 at ‘<think>’, advantage 0.75, turn reward 0.25, version 5" in text
    assert re.search(r"\n  +[B-D] path 1, answer 0, reward 1, advantage 0.75", text)
    assert re.search(r"⟦rewritten: \S*level Aare<\|im_end\|>⟧", text)
    assert "⟦repeated: It is 42.<|im_end|>⟧" in text
    assert "⟦masked: .<|im_end|>⟧" in text
    assert sorted(re.findall(r"↳([BCD])(?! branch)", text)) == ["B", "C", "D"]
    assert "probability  weight" not in text
    # A page's document, with real line ends, looks alike.
    document = from_dataset(view_document(dataset, 0, dataset.loaded_tokenizer, lines=True))
    page = printed(lambda console: conversation_view(document, Style(console), 1000))
    assert page.split("\n", 1)[1].strip() == text.split("\n", 1)[1].strip()


def test_the_terminal_shows_single_tokens(view):
    text = printed(
        lambda console: document_view(view, Style(console), 1000, log_probabilities=True)
    )
    assert re.search(r"<think> +\d+ +−3.000 +5.0% +1 +0.75\n", text)
    assert re.search(r"<\|im_end\|> +\d+ +−0.500 +60.7% +0 +–\n", text)


def test_long_stretches_show_their_ends(view):
    text = printed(lambda console: document_view(view, Style(console), 20))
    assert "tokens…" in text
    assert text.count("reply ") >= 6


def test_the_command_shows_and_explains(dataset, command_line):
    code, out, _ = command_line("inspect", str(dataset.path), "--document", "0")
    assert code == 0
    assert "⟦masked: sampled and masked⟧" in out
    assert "trained in path 0" in out
    code, out, _ = command_line("inspect", str(dataset.path), "--json")
    [shown] = json.loads(out)["shown"]
    assert code == 0
    assert shown["trajectory"]["replies"][0]["smallest"] == -3.0
    assert shown["trajectory"]["kinds"].count("masked") == 2
    code, out, _ = command_line("inspect", str(dataset.path), "--log-probabilities")
    assert code == 0
    assert "−3.000" in out


def test_a_trajectory_is_shown_before_it_is_written(trajectory, capsys, folder):
    ps.inspect(trajectory)
    out = capsys.readouterr().out
    assert "not written yet" in out
    assert "why: 1 of 2 replies keep their ids; the template writes" in out
    assert "rewrites reply 0" in out
    finished = trajectory.finish(reward=1.0)
    ps.inspect([finished, finished], tokenizer=trajectory.tokenizer)
    assert capsys.readouterr().out.count("reward 1") == 4
    ps.inspect(finished, html=folder / "page.html")
    assert "not written yet" in (folder / "page.html").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="found a Trajectory in a list of trajectories"):
        ps.inspect([trajectory])
    with pytest.raises(ConfigError, match="rows, listed and slots are of datasets"):
        ps.inspect(trajectory, rows=1)
    with pytest.raises(ConfigError, match="no reply yet"):
        ps.inspect(ps.chat.Trajectory(trajectory.tokenizer, trajectory.template))


def test_a_notebook_shows_a_trajectory(trajectory):
    html = trajectory._repr_html_()
    trained = trajectory.finish().sampled
    text = f"Trajectory(6 messages, 3 replies, 2 paths, {trained} tokens trained)"
    assert repr(trajectory) == text
    assert "rewrites reply 0" in html
    assert "why: 1 of 2 replies keep their ids" in html
    assert re.search(
        r'title="id \d+, sampled, weight 1, log-probability -3.000 \(5.0%\)">&lt;think', html
    )
    assert re.search(r'wavy[^"]+" title="id \d+, rewritten, weight 0"', html)
    assert re.search(r'title="id \d+, masked, weight 0, log-probability -0.500', html)
    assert "<|im_end|>" not in html


def test_a_notebook_shows_a_prompt_that_waits(folder):
    waiting = thinking_trajectory(thinking_tokenizer(folder / "other"))
    before = waiting._repr_html_().count("<b>path")
    waiting.prompt([{"role": "user", "content": "WAITS?"}])
    html = waiting._repr_html_()
    assert html.count("<b>path") >= before
    assert "W" in re.sub(r"<[^>]+>", "", html).split("7.")[-1]


def test_what_several_answers_sampled_alike_is_shown_once(trajectory, folder):
    done = [trajectory.finish(advantage=one, group="a") for one in (0.5, -0.5)]
    data = ps.write_trajectories(folder / "alike", done, tokenizer=trajectory.tokenizer)
    tree = view_document(data, 0, data.loaded_tokenizer).trajectory
    titles = [part.title for branch in tree.branches for part in branch.segments]
    assert "reply 0 of answers 0 and 1" in titles
    # No single advantage is that of a token which both train.
    assert {tree.advantages[place] for place in tree.replies[0].places} == {None}


def test_paths_that_are_stored_apart(folder, trajectory):
    say(trajectory := thinking_trajectory(trajectory.tokenizer), "tool", "8", SAYS)
    data = ps.write_trajectories(
        folder / "apart",
        [trajectory.finish(reward=1.0)],
        tokenizer=trajectory.tokenizer,
        share=False,
    )
    tree = view_document(data, 0, data.loaded_tokenizer).trajectory
    assert [branch.parent for branch in tree.branches] == [-1] * tree.paths
    titles = [[part.title for part in branch.segments] for branch in tree.branches]
    assert [one for one in titles[1] if one] == [
        "rewrites reply 0, trained in path 0",
        "repeats reply 1, trained in path 0",
        "reply 2",
        "reply 3",
    ]
    steps = GivenSteps()
    for sent, said in (([1, 2], [3, 9]), ([1, 2, 3, 9, 5, 5], [6, 9]), ([1, 2, 3, 9, 7], [8, 9])):
        steps.add(sent, said, [-0.5] * len(said), [1.0] * len(said))
    done = ps.chat.FinishedTrajectory(paths=steps.paths())
    data = ps.write_trajectories(
        folder / "apart-again", [done], tokenizer=trajectory.tokenizer, share=False
    )
    tree = view_document(data, 0, None).trajectory
    titles = [part.title for part in tree.branches[1].segments if part.title]
    assert titles == ["repeats reply 0, trained in path 0", "reply 2"]
    assert "masked" not in tree.kinds


def test_documents_without_samples_have_no_trajectory(folder):
    built = ps.data.shards.build_tree([[1, 2, 3], [1, 2, 4]], values={"rank": [0, 1]})
    spans = [weight_spans(built.loss_weights)]
    plain = ps.write_dataset(folder / "ranks", [built.tokens], trees=[built.tree], spans=spans)
    assert view_document(plain, 0, None).trajectory is None


def test_a_page_has_what_is_stored(view):
    data = PageData(title="t", documents=[from_dataset(view)])
    [document] = payload(data)["sides"][0]["documents"]
    tree = document["trajectory"]
    assert tree["kinds"] == [
        "rendered", "sampled", "masked", "repeated", "rewritten", "moved",
    ]  # fmt: skip
    assert sum(tree["of_tokens"][::2]) == len(view.tokens)
    assert sorted(tree["advantages"]["values"]) == [-0.75, 0.75]
    assert len(tree["branches"]) == len(document["branches"])
    assert "kindLegend" in page_html(data)


def test_without_log_probabilities_there_are_none(trajectory, folder):
    paths = [
        path._replace(log_probabilities=path.log_probabilities * 0) for path in trajectory.paths()
    ]
    finished = ps.chat.FinishedTrajectory(paths=tuple(paths), has_log_probabilities=False)
    data = ps.write_trajectories(folder / "no-logs", [finished], tokenizer=trajectory.tokenizer)
    tree = view_document(data, 0, data.loaded_tokenizer).trajectory
    assert tree.log_probabilities == ()
    assert tree.replies[0].mean is None
    assert "log-probability" not in tree.replies[0].about()
