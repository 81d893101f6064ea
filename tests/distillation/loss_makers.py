"""Little rows with chunks and a teacher's predictions, and a plain twin of every divergence: loops,
dense matrices.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from penstock.learn.distillation.blocks import Pairing
from penstock.learn.distillation.losses import distillation_loss
from penstock.learn.distillation.outputs import TeacherOutputs
from penstock.learn.distillation.projection import Projection
from penstock.learn.distillation.settings import LossSettings
from penstock.learn.distillation.token_losses import Projector

WIDTH, STUDENT_VOCAB, TEACHER_VOCAB = 5, 13, 11
CHUNKS = ((1, 1, 1), (0, 1, 1), (0, 2, 3), (1, 1, 1), (0, 3, 1), (0, 1, 2), (2, 2, 2), (0, 1, 1))
"""(tokens in no chunk before it, student tokens, teacher tokens)"""
ONE_TO_ONE = ((1, 1, 1),) + ((0, 1, 1),) * 4 + ((2, 1, 1),) * 2
KINDS = ("kl", "p_kl", "h_kl", "alm", "uld")


class Head(nn.Module):
    """More than a matrix; with more logits than the tokenizer has tokens."""

    def __init__(self, vocab: int, extra: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab + extra, WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(vocab + extra, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return 3 * torch.tanh((hidden @ self.weight.T + self.bias) / 3)


@dataclass
class World:
    """A row of both sides, and what the losses need of it."""

    head: Head
    hidden: Tensor
    outputs: TeacherOutputs
    pairing: Pairing
    projector: Projector
    matrix: Tensor
    """Dense [student vocabulary, teacher vocabulary]."""
    pairs: Tensor
    boundary: Tensor
    targets: Tensor
    vocab_size: int

    def loss(self, settings: LossSettings, **changes) -> tuple[Tensor, Tensor]:
        given = {"scale": 1.0, "block": 4, "vocab_size": self.vocab_size} | changes
        pairing, hidden = given.pop("pairing", self.pairing), given.pop("hidden", self.hidden)
        return distillation_loss(
            self.head,
            hidden,
            given.pop("outputs", self.outputs),
            pairing,
            settings,
            **{
                "projector": self.projector,
                "pairs": self.pairs,
                "boundary": self.boundary,
                "targets": self.targets,
            }
            | given,
        )

    def gradients(self, settings: LossSettings, **changes) -> list[Tensor]:
        return gradients(self.loss(settings, **changes)[0], [self.hidden, *self.head.parameters()])


def gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, of, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, of, strict=True)]


def pairing_of(chunks) -> Pairing:
    """Chunks after a first token on each side, with weights of 1, 1.5, 2 … halves."""
    bounds, at = [], [1, 1]
    for gap, *lengths in chunks:
        at = [x + gap for x in at]
        bounds.append([[x, x + n] for x, n in zip(at, lengths, strict=True)])
        at = [x + n for x, n in zip(at, lengths, strict=True)]
    table = torch.tensor(bounds, dtype=torch.int64).reshape(-1, 2, 2)
    weights = 1 + 0.5 * (torch.arange(len(bounds)) % 3).double()
    return Pairing(student_bounds=table[:, 0], teacher_bounds=table[:, 1], weights=weights)


def teacher_outputs(
    logits: Tensor, tokens: Tensor, boundary: Tensor, temperature=1.0, top_k=None
) -> TeacherOutputs:
    """What a teacher with these logits [T, V] says of tokens [T]; written apart from the code that
    it tests.
    """
    plain = torch.log_softmax(logits, -1)
    realised = torch.cat((plain.new_zeros(1), plain[:-1].gather(1, tokens[1:, None])[:, 0]))
    logs = torch.log_softmax(logits / temperature, -1)
    top = logs.topk(top_k) if top_k else None
    return TeacherOutputs(
        log_probs=None if top else logs,
        top_ids=top.indices if top else None,
        top_log_probs=top.values if top else None,
        token_log_probs=realised,
        boundary_log_probs=(plain.exp() @ boundary.to(plain.dtype)).log(),
        entropy=-(plain.exp() * plain).sum(-1),
        temperature=temperature,
    )


def random_projection(student: int, teacher: int, seed: int, k: int = 3) -> Projection:
    """Rows of one, two, three cells, and an empty one."""
    rng = np.random.default_rng(seed)
    indices, weights = np.full((student, k), -1, np.int32), np.zeros((student, k), np.float32)
    for row in range(student):
        cells = row % (k + 1)
        indices[row, :cells] = rng.choice(teacher, cells, replace=False)
        if cells:
            weights[row, :cells] = np.sort(rng.dirichlet(np.ones(cells)))[::-1]
    return projection_of(indices, weights, student, teacher)


def projection_of(indices, weights, student: int, teacher: int) -> Projection:
    return Projection(
        indices=indices,
        weights=weights,
        exact=weights[:, 0] == 1,
        student_fingerprint="s",
        teacher_fingerprint="t",
        student_size=student,
        teacher_size=teacher,
    )


def dense(projection: Projection) -> Tensor:
    matrix = torch.zeros(projection.student_size, projection.teacher_size)
    for row, (columns, weights) in enumerate(
        zip(projection.indices, projection.weights, strict=True)
    ):
        for column, weight in zip(columns, weights, strict=True):
            if column >= 0:
                matrix[row, column] = float(weight)
    return matrix


def identity(size: int) -> Projection:
    return projection_of(
        np.arange(size, dtype=np.int32)[:, None], np.ones((size, 1), np.float32), size, size
    )


def make_world(
    *,
    seed=0,
    chunks=CHUNKS,
    same=False,
    model=False,
    temperature=1.0,
    top_k=None,
    dtype=torch.float64,
    sharp=2.0,
) -> World:
    """`same`: one vocabulary and an identity projection; `model`: also the same logits on both
    sides.
    """
    torch.manual_seed(seed)
    vocab, teacher_vocab = STUDENT_VOCAB, STUDENT_VOCAB if same else TEACHER_VOCAB
    pairing = pairing_of(chunks)
    ends = [int(x.max()) if len(x) else 1 for x in (pairing.student_bounds, pairing.teacher_bounds)]
    slots, teacher_slots = (end + 2 for end in ends)
    head = Head(vocab, dtype=dtype)
    hidden = (sharp * torch.randn(slots, WIDTH, dtype=dtype)).requires_grad_()
    tokens = torch.randint(vocab, (slots,))
    boundary, teacher_boundary = torch.rand(vocab) < 0.4, torch.rand(teacher_vocab) < 0.4
    boundary[0] = teacher_boundary[0] = True
    logits = sharp * torch.randn(teacher_slots, teacher_vocab, dtype=dtype)
    teacher_tokens = torch.randint(teacher_vocab, (teacher_slots,))
    if model:
        logits, teacher_tokens, teacher_boundary = (
            head(hidden.detach()).detach()[:, :vocab],
            tokens,
            boundary,
        )
    projection = identity(vocab) if same else random_projection(vocab, teacher_vocab, seed)
    common = min(vocab, teacher_vocab) // 2
    pairs = torch.stack((torch.randperm(vocab)[:common], torch.randperm(teacher_vocab)[:common]), 1)
    return World(
        head=head,
        hidden=hidden,
        outputs=teacher_outputs(logits, teacher_tokens, teacher_boundary, temperature, top_k),
        pairing=pairing,
        projector=Projector(projection),
        matrix=dense(projection).to(dtype),
        pairs=torch.stack((pairs[:, 0], pairs[:, 0]), 1) if same else pairs,
        boundary=boundary,
        targets=torch.cat((tokens[1:], tokens.new_full((1,), -100))),
        vocab_size=vocab,
    )


def only(world: World, chosen: slice) -> World:
    """The same with some of the chunks."""
    p = world.pairing
    pairing = Pairing(
        student_bounds=p.student_bounds[chosen],
        teacher_bounds=p.teacher_bounds[chosen],
        weights=p.weights[chosen],
    )
    return replace(world, pairing=pairing)


def plain_loss(world: World, settings: LossSettings) -> Tensor:
    """Σ weight × divergence × temperature², one chunk after the other."""
    if settings.forward_share is not None:
        one, other = (
            plain_loss(world, replace(settings, forward_share=None, reverse=reverse))
            for reverse in (False, True)
        )
        return settings.forward_share * one + (1 - settings.forward_share) * other
    logits = world.head(world.hidden)[:, : world.vocab_size]
    pairing = plainly_merged(world, settings)
    total = logits.new_zeros(())
    for student, teacher, weight in pairing:
        value = PLAIN[settings.kind](world, settings, logits, student, teacher)
        total = total + weight * value * (
            settings.binary_temperature if settings.kind == "alm" else settings.temperature**2
        )
    return total


def plainly_merged(world: World, settings: LossSettings):
    found = []
    p = world.pairing
    joins = settings.kind == "alm" and settings.debias

    def unlikely(slot):
        return math.exp(float(world.outputs.boundary_log_probs[slot])) <= settings.merge_below

    for s, t, w in zip(
        p.student_bounds.tolist(), p.teacher_bounds.tolist(), p.weights.tolist(), strict=True
    ):
        if (
            joins
            and found
            and found[-1][0][1] == s[0]
            and found[-1][1][1] == t[0]
            and unlikely(t[0] - 1)
        ):
            before = found.pop()
            s, t, w = [before[0][0], s[1]], [before[1][0], t[1]], before[2] + w
        found.append((s, t, w))
    return found


def _chunk_mean(rows: Tensor, bounds, settings: LossSettings) -> Tensor:
    begin, end = bounds
    predictors = rows[begin - 1 : end - 1]
    return predictors[0] if settings.chunk == "first" else predictors.mean(0)


def _distributions(world, settings, logits, student, teacher):
    q = _chunk_mean(torch.softmax(logits / settings.temperature, -1), student, settings)
    return _chunk_mean(world.outputs.log_probs.exp(), teacher, settings), q


def _kl(p: Tensor, q: Tensor, reverse: bool) -> Tensor:
    if reverse:
        p, q = q, p
    total = p.new_zeros(())
    for a, b in zip(p, q, strict=True):
        if float(a.detach()) > 0:
            total = total + a * (a.log() - b.log())
    return total


def _with_rest(listed: list[Tensor], full: bool) -> Tensor:
    values = torch.stack(listed)
    rest = values.new_zeros(()) if full else (1 - values.sum()).clamp_min(0)
    return torch.cat((values, rest[None] + 64 * torch.finfo(values.dtype).eps))


def _plain_kl(world, settings, logits, student, teacher):
    p, q = _distributions(world, settings, logits, student, teacher)
    if settings.top_k is None:
        return _kl(p, q, settings.reverse)
    ids = p.argsort(descending=True)[: settings.top_k].tolist()
    others = [i for i in range(len(p)) if i not in ids]
    p, q = (torch.stack([*(x[i] for i in ids), x[others].sum()]) for x in (p, q))
    return _kl(p, q, settings.reverse)


def _plain_p_kl(world, settings, logits, student, teacher):
    p, q = _distributions(world, settings, logits, student, teacher)
    projected = q @ world.matrix
    ids = p.argsort(descending=True)[: settings.top_k].tolist()
    kept = [
        number for number, i in enumerate(ids) if float(world.matrix[:, i].detach().sum()) > 0
    ] + [len(ids)]
    full = len(ids) == len(p)
    if full and settings.reverse:
        reached = world.matrix.detach().sum(0) > 0
        p, q = p[reached], projected[reached] * p[reached].sum()
        return p.sum() - q.sum() + _kl(p, q, reverse=True)
    p, q = (_with_rest([x[i] for i in ids], full and x is p)[kept] for x in (p, projected))
    return p.sum() * _kl(p / p.sum(), q, settings.reverse)


def _plain_sorted(p: Tensor, q: Tensor, top_k) -> Tensor:
    longest = max(len(p), len(q))
    p, q = (
        nn.functional.pad(x.sort(descending=True).values, (0, longest - len(x))) for x in (p, q)
    )
    if top_k is not None and top_k < longest:
        p, q = (torch.cat((x[:top_k], x[top_k:].sum()[None])) for x in (p, q))
    return (p - q).abs().sum()


def _plain_h_kl(world, settings, logits, student, teacher):
    p, q = _distributions(world, settings, logits, student, teacher)
    common, others = [], []
    for side, x in ((1, p), (0, q)):
        ids = world.pairs[:, side].tolist()
        rest = [i for i in range(len(x)) if i not in ids]
        common.append(torch.stack([*(x[i] for i in ids), x[rest].sum()]))
        others.append(x[rest])
    return _kl(*common, settings.reverse) + _plain_sorted(*others, settings.top_k)


def _plain_uld(world, settings, logits, student, teacher):
    return _plain_sorted(*_distributions(world, settings, logits, student, teacher), settings.top_k)


def _plain_alm(world, settings, logits, student, teacher):
    logs = torch.log_softmax(logits, -1)
    q = sum(logs[slot - 1, world.targets[slot - 1]] for slot in range(*student))
    p = sum(world.outputs.token_log_probs[slot] for slot in range(*teacher))
    if settings.debias:
        q = q + logs[student[1] - 1][world.boundary].exp().sum().log()
        p = p + world.outputs.boundary_log_probs[teacher[1] - 1]
    p, q = ((x / settings.binary_temperature - 1e-6).exp() for x in (p, q))
    return _kl(torch.stack((p, 1 - p)), torch.stack((q, 1 - q)), settings.reverse)


PLAIN = {
    "kl": _plain_kl,
    "p_kl": _plain_p_kl,
    "h_kl": _plain_h_kl,
    "alm": _plain_alm,
    "uld": _plain_uld,
}
