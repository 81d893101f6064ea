"""Teachers and their losses: the section `teacher` of a run file, and the `loss` of each teacher.
Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final, get_args

from penstock.core.errors import ConfigError

Kind = Literal["kl", "p_kl", "h_kl", "alm", "uld"]
Reduction = Literal["mean", "first"]
READING = (
    *("loss", "projection", "learn_projection", "documents", "control_tokens", "bos"),
    *("max_tokens", "multiple"),
)
"""What teachers have alike whose distributions are averaged."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The divergence between the teacher's and the student's predictions of a chunk. It is never
    negative.

    kl: token by token, for teachers with the student's tokenizer. p_kl: over the teacher's
    vocabulary, into which the student's distribution is projected. h_kl: over the tokens that both
    have, plus the sorted probabilities of the others. alm: of the probability of the chunk itself,
    which needs only the text in common. uld: of the sorted probabilities, as a baseline.
    """

    kind: Kind = "p_kl"
    """Name of the divergence."""
    temperature: float = 1.0
    """kl, p_kl, h_kl, uld: both sides' logits are divided by it, and the divergence is multiplied
    by its square.
    """
    top_k: int | None = None
    """kl, p_kl: compare only the teacher's k most likely tokens, and all others as one. h_kl, uld:
    compare only the k largest sorted probabilities, and the sum of the rest; sorting all costs
    several times a cross entropy. None: all.
    """
    reverse: bool = False
    """kl, p_kl, h_kl, alm: KL(student ‖ teacher), which seeks modes, instead of KL(teacher ‖
    student).
    """
    forward_share: float | None = None
    """kl, p_kl, h_kl, alm: share α of both directions: α × KL(teacher ‖ student) + (1 − α) ×
    KL(student ‖ teacher), as `mixed_kl_weight` of NeMo-RL; None: one of them, see `reverse`.
    """
    chunk: Reduction = "mean"
    """p_kl, h_kl, uld: a chunk's distribution is the mean of its tokens' predictions, or the first
    of them.
    """
    strict: bool = False
    """h_kl: only string-equal tokens are common, as in GOLD."""
    threshold: float = 0.6
    """h_kl, not strict: two tokens are common if their weight in the projection is at least
    this.
    """
    binary_temperature: float = 100.0
    """alm: τ of p^(1/τ). The divergence is multiplied by τ, so that its gradient does not shrink
    with it.
    """
    debias: bool = True
    """alm: multiply a chunk's probability by that of a boundary after it, on both sides."""
    merge_below: float = 0.1
    """alm with debias: join a chunk with the next if the teacher's probability of a boundary
    between them is at most this; 0: never.
    """

    def __post_init__(self) -> None:
        for name, known in (("kind", get_args(Kind)), ("chunk", get_args(Reduction))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"loss.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in ("temperature", "binary_temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"loss.{name} must be above 0, got {getattr(self, name)!r}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"loss.top_k must be at least 1, got {self.top_k}; leave it out for all tokens"
            )
        self._check_share()
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"loss.threshold must be in (0, 1], got {self.threshold!r}")
        if not 0 <= self.merge_below < 1:
            raise ConfigError(f"loss.merge_below must be in [0, 1), got {self.merge_below!r}")
        if self.kind == "alm" and self.temperature != 1.0:
            raise ConfigError(
                f"loss alm compares probabilities at temperature 1, got {self.temperature!r}; "
                "leave out temperature, or set binary_temperature instead"
            )

    def _check_share(self) -> None:
        if self.forward_share is None:
            return
        if not 0 <= self.forward_share <= 1:
            raise ConfigError(
                f"loss.forward_share must be in [0, 1], got {self.forward_share!r}; it is the "
                "share of KL(teacher ‖ student)"
            )
        if self.reverse:
            raise ConfigError(
                f"loss.reverse and loss.forward_share ({self.forward_share:g}) both choose the "
                "direction; leave out reverse: forward_share 0 is the reverse alone"
            )
        if self.kind == "uld":
            raise ConfigError(
                "loss uld is a distance, which has no direction; leave out forward_share"
            )

    @property
    def forward(self) -> float:
        """Share of KL(teacher ‖ student); that of KL(student ‖ teacher) is the rest."""
        if self.forward_share is None:
            return 0.0 if self.reverse else 1.0
        return self.forward_share


DEFAULT_LOSS = LossSettings()
"""The very loss of a teacher that was given none, which an equal one of its own is not."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """One teacher."""

    model: str | None = None
    """A run's folder, a folder with a transformers model and its tokenizer, or its name on the
    Hugging Face hub.
    """
    cache: str | None = None
    """A folder that `penstock distill cache` wrote, instead of a model: training then needs no
    teacher.
    """
    loss: LossSettings = DEFAULT_LOSS
    """How the student's predictions are compared with the teacher's."""
    weight: float = 1.0
    """Weight of this teacher among the teachers."""
    projection: str | None = None
    """Losses p_kl and h_kl: a file of `penstock distill project`; None: made at the start of the
    run.
    """
    learn_projection: bool = False
    """Loss p_kl: train the projection's weights with the student."""
    process: Literal["here", "own"] = "here"
    """own: run the teacher in another process of this machine, one batch ahead of the student."""
    threads: int | None = None
    """process own: torch's CPU threads in that process; None: the same number as here."""
    documents: Mapping[str, str] = field(default_factory=dict)
    """Source name → dataset of the same records, prepared with the teacher's tokenizer and chat
    template.
    """
    control_tokens: Mapping[str, str] = field(default_factory=dict)
    """Control tokens with the same meaning, the student's → the teacher's, in addition to BOS and
    EOS.
    """
    bos: bool | None = None
    """Whether each document begins with the teacher's BOS. None: companion documents stay as they
    are; texts begin as those that the teacher was trained on. If that is unknown, as of a model of
    transformers, they get the BOS if the teacher's tokenizer puts it there by itself, or if the
    student's document begins with its own. With a cache: as it was made.
    """
    max_tokens: int | None = None
    """Maximum tokens per document that the teacher reads; later tokens get no distillation loss.
    None: its training length.
    """
    multiple: int = 1
    """The number of slots of the teacher's rows is rounded up to a multiple of this; 64 or 128 suit
    GPUs.
    """

    def __post_init__(self) -> None:
        if (self.model is None) == (self.cache is None):
            found = "neither" if self.model is None else "both"
            raise ConfigError(f"a teacher needs either a model or a cache; found {found}")
        if not self.weight > 0:
            raise ConfigError(f"a teacher's weight must be above 0, got {self.weight!r}")
        if self.learn_projection and self.loss.kind != "p_kl":
            raise ConfigError(
                "learn_projection goes with loss p_kl, the only one that projects; got "
                f"{self.loss.kind}"
            )
        if self.projection is not None and self.loss.kind not in ("p_kl", "h_kl"):
            raise ConfigError(
                f"a projection goes with losses p_kl and h_kl; {self.loss.kind} uses none: "
                "leave it out"
            )
        if self.cache is not None and self.process == "own":
            raise ConfigError(
                "a cached teacher runs no model, so process: own does not apply; leave out process"
            )
        for name in ("threads", "max_tokens", "multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"a teacher's {name} must be at least 1, got {value}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSettings:
    """The loss of a step: cross_entropy × cross entropy + distillation × the teachers' divergences.

    A teacher's divergence is the weighted sum over all chunks of the step, divided by the sum of
    their weights.
    """

    teachers: Sequence[TeacherSettings]
    """At least one."""
    cross_entropy: float = 1.0
    """Factor of the plain loss, z-loss included; at 0 it is only logged."""
    distillation: float = 1.0
    """Factor of the teachers' divergences."""
    balance: Literal["fixed", "balanced"] = "fixed"
    """balanced: scale the divergences to the size of the cross entropy, by their ratio in the
    previous step.
    """
    choose: Literal["all", "by_score", "best"] = "all"
    """How several teachers share a document. all: by their weights. by_score: by a softmax of
    sharpness × score, times the weights. best: the teacher with the best score gets it.
    """
    combine: Literal["losses", "average"] = "losses"
    """losses: the student is compared with each teacher, and the divergences are added. average: it
    is compared once, with the mean of the teachers' distributions by their shares of the document.
    That takes teachers with one tokenizer, one loss and the same way of reading.
    """
    score: Literal["likelihood", "entropy", "confidence"] = "likelihood"
    """Score of a teacher on a document. likelihood: minus its nats per byte; entropy: minus its
    mean entropy; confidence: the mean probability of its most likely token.
    """
    sharpness: float = 1.0
    """by_score: factor of the scores in the softmax."""

    def __post_init__(self) -> None:
        if not self.teachers:
            raise ConfigError(
                "teacher.teachers is empty; give at least one teacher, or leave out the "
                "section teacher"
            )
        for name in ("cross_entropy", "distillation", "sharpness"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"teacher.{name} must be 0 or more, got {getattr(self, name)!r}")
        if not self.distillation:
            raise ConfigError(
                "teacher.distillation is 0, so nothing would be learnt from the teachers; set "
                "it above 0, or leave out the section teacher"
            )
        if self.combine not in ("losses", "average"):
            raise ConfigError(f"teacher.combine must be losses or average, got {self.combine!r}")
        if self.combine == "average":
            self._check_averaged()

    def _check_averaged(self) -> None:
        """Refuse teachers whose distributions cannot be averaged, as far as settings say."""
        for number, one in enumerate(self.teachers):
            if one.cache is not None:
                raise ConfigError(
                    f"teacher.combine average: teacher {number} is a cache, which holds only the "
                    "most likely tokens, and those of a mean are others; give its model, or set "
                    "combine to losses"
                )
            for name in READING:
                theirs, first = getattr(one, name), getattr(self.teachers[0], name)
                if theirs != first:
                    raise ConfigError(
                        f"teacher.combine average: teachers 0 and {number} differ in {name}, "
                        f"{first!r} and {theirs!r}; give both the same, or set combine to losses"
                    )
