"""How a model learns from whole answers: the sections `training.preference` and `training.policy`.
Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final, get_args, get_origin, get_type_hints

from penstock.core.errors import ConfigError
from penstock.data.shards.format.trees import LOG_PROBABILITIES

PreferenceKind = Literal[
    "dpo",
    "cdpo",
    "robust",
    "hinge",
    "ipo",
    "ipo_sum",
    "sigmoid_norm",
    "simpo",
    "orpo",
    "kto",
    "apo_zero_unpaired",
]
LABEL_KINDS = ("kto", "apo_zero_unpaired")
"""Kinds that learn from labelled answers; the others compare two."""
PAIR_KINDS = tuple(kind for kind in get_args(PreferenceKind) if kind not in LABEL_KINDS)
WITHOUT_REFERENCE = ("simpo", "orpo")
REFERENCE_COLUMN = "reference_log_probabilities"
"""Column with the log-probability of each token by the reference model, as `penstock reference`
writes it.
"""
OLD_COLUMN = LOG_PROBABILITIES
"""Column with the log-probability of each token by the sampler at its temperature, as `penstock
rollouts` writes it.
"""
TRAINER_COLUMN = "trainer_log_probabilities"
"""The same by the model that sampled it, as training computes it: `penstock reference --column`
writes it.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSettings:
    """Learning from answers that are better or worse (`rank` of a path), or good or bad (`label` of
    a path).

    Loss weights say which tokens are trained, so they must be 0 or 1. Dropout is off:
    log-probabilities are compared.

    Δ is the difference of log π(answer) − log π_ref(answer) between the better and the worse answer
    of a pair, and Δ̄ that of the same per token; m is an answer's mean log-probability. σ is the
    logistic function, ε `label_smoothing`.
    """

    kind: PreferenceKind = "dpo"
    """dpo: −log σ(β Δ) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). cdpo: its labels are wrong
    with probability ε: −(1 − ε) log σ(β Δ) − ε log σ(−β Δ) (Mitchell 2023). robust: the unbiased
    form of it, divided by 1 − 2ε, with the second term added (Chowdhury et al. 2024,
    arXiv:2403.00409). hinge: max(0, 1 − β Δ) (SLiC, arXiv:2305.10425). ipo: (Δ̄ − 1 / 2β)², by
    token as its authors confirm; ipo_sum: (Δ − 1 / 2β)², as printed (arXiv:2310.12036, eq. 17).
    sigmoid_norm: −log σ(β Δ̄). simpo: −log σ(β (m₊ − m₋) − γ), no reference (arXiv:2405.14734, eq.
    6). orpo: −β log σ of the log odds ratio, from means (arXiv:2403.07691, eq. 6 and 7), no
    reference; set sft_weight to 1 as the paper does. kto: 1 − σ(β (r − z)) for good answers, 1 −
    σ(β (z − r)) for bad ones, r = log π − log π_ref, z its mean over answers to other prompts, at
    least 0 (arXiv:2402.01306, eq. 7 and 8). apo_zero_unpaired: the same with z = 0.
    """
    beta: float = 0.1
    """β: how far the model may move from the reference: larger is nearer."""
    label_smoothing: float = 0.0
    """ε of cdpo and robust: the probability that a pair is the wrong way round, below 0.5."""
    gamma: float = 0.5
    """γ of simpo: the margin."""
    sft_weight: float = 0.0
    """Weight of the better answer's (or a good answer's) mean −log π per token, added for each pair
    or example.
    """
    also: Mapping[str, float] = field(default_factory=dict)
    """More kinds, each with its weight next to `kind`, which has 1; all with the same β. All of
    pairs, or all of labels.
    """
    reference: str = "auto"
    """lora: the model with LoRA switched off. cached: the data's column of `penstock reference`.
    initial: a frozen copy of the weights that the run begins with. Else a run, or a folder of an
    exported model. auto: cached if the data have the column, else lora if LoRA is trained, else
    initial.
    """

    def __post_init__(self) -> None:
        for kind in (self.kind, *self.also):
            if kind not in (*PAIR_KINDS, *LABEL_KINDS):
                known = ", ".join((*PAIR_KINDS, *LABEL_KINDS))
                raise ConfigError(f"preference: kind must be one of {known}, got {kind!r}")
        kinds = {kind in PAIR_KINDS for kind in (self.kind, *self.also)}
        if len(kinds) > 1:
            raise ConfigError(
                "preference: also: kinds of pairs and kinds of labels cannot be combined"
            )
        if not self.beta > 0:
            raise ConfigError(f"preference.beta must be above 0, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                "preference.label_smoothing must be from 0 to below 0.5, got "
                f"{self.label_smoothing}"
            )
        if self.label_smoothing and not {"cdpo", "robust"} & {self.kind, *self.also}:
            raise ConfigError(
                f"preference.label_smoothing is {self.label_smoothing}, which kind "
                f"{self.kind} ignores; take cdpo or robust, or leave it out"
            )
        for name, weight in (("sft_weight", self.sft_weight), *self.also.items()):
            if not 0 <= weight < math.inf:
                raise ConfigError(f"preference: the weight {name} must be 0 or more, got {weight}")

    @property
    def weights(self) -> dict[str, float]:
        """Kind → its weight."""
        return {self.kind: 1.0, **self.also}

    @property
    def of_pairs(self) -> bool:
        """Whether it compares two answers; otherwise each has a label."""
        return self.kind in PAIR_KINDS

    @property
    def needs_reference(self) -> bool:
        """Whether any kind compares with a reference model."""
        return any(kind not in WITHOUT_REFERENCE for kind in self.weights)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Learning from sampled answers with rewards: groups of paths with the values `reward` or
    `advantage`, or with a column of advantages.

    A group is a document. An answer is a path, or all paths with the same value `answer`, as a
    trajectory has whose history was rewritten: its reward counts once in its group, each of its
    tokens once, and means are over its tokens in all its paths.

    Advantages are, in this order: the column `advantages`, of each token (NaN: not trained). Else
    the column `turn_rewards`, the reward of each turn at its last sampled token and NaN at all
    others: centred as `scale` says, over all turns of the group, and a token has the sum over its
    own and all later turns of its answer (GRPO with process supervision, arXiv:2402.03300, 4.1.3);
    later are those in its path, then those in the answer's next paths. Else the value `advantage`,
    or that which `scale` makes of `reward`. A column and a value `advantage` that differ are an
    error.

    For token t of an answer with advantage A: w × c + kl × (exp(l) − l − 1), where c is as `kind`
    says, w is 1 without `importance_cap`, and l = log π_ref − log π. All probabilities are those of
    logits / temperature, where the data say at which temperature their answers were sampled (the
    value `temperature` of paths). Loss weights say which tokens are trained, so they must be 0 or
    1. Dropout is off: log-probabilities are compared.

    The ratio is r = exp(log π − log π_old). π_old is the data's column `log_probabilities`, the
    sampler's. Without the column it is the model itself: r is 1, and one step is made for each
    sample (on-policy).

    GRPO (arXiv:2402.03300): normalise sequence, scale group. Dr. GRPO (arXiv:2503.20783): constant,
    none. DAPO (arXiv:2503.14476): token, group, clip_high above clip_low, truncated mask. GSPO
    (arXiv:2507.18071): importance sequence, clips of about 3e-4. CISPO (arXiv:2506.13585): kind
    cispo, token, clip_low 1, clip_high of about 4.
    """

    kind: Literal["clip", "cispo"] = "clip"
    """clip: c = −min(r A, clip(r) A) (PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7): tokens
    past the clip teach nothing. cispo: c = −sg(clip(r)) A log π, with no gradient through sg
    (MiniMax-M1 2025, arXiv:2506.13585): all tokens teach, with a bounded weight.
    """
    clip_low: float = 0.2
    """clip(r) is from 1 − clip_low …"""
    clip_high: float = 0.2
    """… to 1 + clip_high."""
    importance_cap: float | None = None
    """C of truncated importance weights, for samplers that compute other probabilities than
    training does (vLLM, bfloat16): w = sg(min(exp(log π_old − log π_sampler), C)), where π_sampler
    is the column `log_probabilities`, and π_old the column `trainer_log_probabilities` of `penstock
    reference --column`, or without it the model itself (Ionides 2008; Espeholt et al. 2018,
    arXiv:1802.01561, ρ; Yao et al. 2025, TIS, with C of about 2). None: none.
    """
    kl: float = 0.0
    """Weight of the divergence from the reference model, by its estimate exp(l) − l − 1 (k3,
    Schulman 2020).
    """
    importance: Literal["token", "sequence"] = "token"
    """r and w of each token, or of a whole answer: exp of the mean of the differences over its
    tokens.
    """
    normalise: Literal["sequence", "token", "constant"] = "sequence"
    """sequence: the mean over an answer's tokens, then over the step's answers. token: the mean
    over all tokens of the step. constant: the sum over tokens / (answers × `length`).
    """
    length: int | None = None
    """normalise constant: tokens of the longest possible answer."""
    scale: Literal["group", "none"] = "group"
    """How advantages are made of rewards: reward − mean of its group, divided by (its standard
    deviation + 1e-4), or not divided. Data with `advantage` are taken as they are.
    """
    truncated: Literal["train", "mask"] = "train"
    """Answers that were cut (the value `truncated` of paths): trained, or in neither the loss nor
    the denominator, as TRL's mask_truncated_completions; their rewards count in their group (DAPO,
    overlong filtering).
    """
    dead_groups: Literal["count", "leave_out"] = "count"
    """Groups whose rewards are all equal, which teach nothing: in the denominator (and in kl), or
    left out, so that the others count as much as without them.
    """
    version: int = 0
    """Version of the policy before the run's step 0; each step adds 1. It is compared with the
    version that sampled each token, the column `policy_version`.
    """
    max_staleness: int | None = None
    """Versions by which a token may be behind the policy that is trained (the async level of
    prime-rl); None: any.
    """
    stale: Literal["refuse", "mask"] = "refuse"
    """Tokens that are farther behind: the run stops before the step, or they are in neither the
    loss nor the denominator; the rewards of their answers count in their group.
    """
    filtered: Literal["refuse", "accept"] = "refuse"
    """Answers of a sampler with top_k, top_p or other changes than temperature, whose probabilities
    are not those that ratios assume: refused, or taken as if they had been sampled without.
    """
    reference: str = "auto"
    """As in `preference`; needed if kl is above 0."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"policy.{name} must be 0 or more, got {getattr(self, name)}")
        for name, hint in get_type_hints(PolicySettings).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                known = ", ".join(get_args(hint))
                raise ConfigError(
                    f"policy.{name} must be one of {known}, got {getattr(self, name)!r}"
                )
        if self.importance_cap is not None and not 0 < self.importance_cap < math.inf:
            raise ConfigError(
                f"policy.importance_cap must be above 0 and finite, got {self.importance_cap}"
            )
        if (self.normalise == "constant") != (self.length is not None):
            raise ConfigError(
                "policy: normalise constant and length, the tokens of the longest answer, go "
                "together"
            )
        for name in ("version", "max_staleness"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"policy.{name} must be 0 or more, got {value}")
        if self.stale == "mask" and self.max_staleness is None:
            raise ConfigError(
                "policy.stale is mask, but no token is too stale without a bound; set "
                "policy.max_staleness"
            )
        if self.length is not None and self.length < 1:
            raise ConfigError(f"policy.length must be at least 1, got {self.length}")

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with a reference model."""
        return self.kl > 0
