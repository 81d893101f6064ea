"""Keyword arguments of `ps.train`, `ps.distill`, `ps.build_model` and the methods of `Run`.

They are the settings of a run file by the same names. Settings of the sections `optimizer` and
`schedule` may be given directly: `learning_rate=1e-3` is `optimizer={"learning_rate": 1e-3}`.
"""

# Written by `make keywords` from the classes that declare these settings.

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from penstock.learn.training.continued import ContinueSettings
from penstock.learn.training.optimizer_settings import OptimizerSettings, ScheduleSettings, Shape
from penstock.learn.training.path_settings import PolicySettings, PreferenceKind, PreferenceSettings
from penstock.learn.training.settings import (
    AttentionBackend,
    Checkpointing,
    CheckpointSettings,
    Precision,
    RecurrentBackend,
    TensorLogSettings,
)
from penstock.learn.training.trackers import TrackerName
from penstock.models.lora.settings import LoraSettings
from penstock.models.settings import BlockSettings, Dtype, VisionSettings
from penstock.use.runs.given import Evaluation, Values


class OptimizerKeywords(TypedDict, total=False):
    """Settings of `optimizer`; see `OptimizerSettings`."""

    learning_rate: float | None
    learning_rate_factors: Mapping[str, float]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decay_embeddings: bool
    momentum: float
    clip_norm: float | None
    fused: bool | None


class ScheduleKeywords(TypedDict, total=False):
    """Settings of `schedule`; see `ScheduleSettings`."""

    warmup_steps: int | None
    decay: float
    floor: float


class Common(OptimizerKeywords, ScheduleKeywords, total=False):
    """Settings of `training` with and without a teacher."""

    steps: int | None
    optimizer: OptimizerSettings | Values | Literal["adamw", "muon"]
    schedule: ScheduleSettings | Values | Shape
    continue_from: ContinueSettings | str | Values | None
    on_step: Callable[..., Any] | str | None
    preference: PreferenceSettings | Values | PreferenceKind | None
    policy: PolicySettings | Values | Literal["clip", "cispo"] | None
    z_loss: float
    lora: LoraSettings | Values | None
    frozen: list[str] | tuple[str, ...]
    feature_cache: str | None
    micro_sequences: int
    rows_per_pass: int | None
    attention: AttentionBackend
    recurrent: RecurrentBackend | list[RecurrentBackend] | tuple[RecurrentBackend, ...]
    device: str
    threads: int | None
    precision: Precision
    activation_checkpointing: Checkpointing
    compile: bool
    deterministic: bool | Literal["auto"]
    seed: int
    context_parallel: int
    shard: bool | int
    checkpoints: CheckpointSettings | Values
    evaluators: Mapping[str, Evaluation]
    log_every: int
    log: TrackerName | list[TrackerName] | tuple[TrackerName, ...]
    log_project: str | None
    log_name: str | None
    tensor_logs: TensorLogSettings | Values


class TrainKeywords(Common, total=False):
    """Settings of `training`; see `TrainSettings`."""

    loss: Callable[..., Any] | str | None


class DistillKeywords(Common, total=False):
    """Settings of `training` and of `teacher`; see `TrainSettings` and `DistillationSettings`."""

    cross_entropy: float
    distillation: float
    balance: Literal["fixed", "balanced"]
    choose: Literal["all", "by_score", "best"]
    combine: Literal["losses", "average"]
    score: Literal["likelihood", "entropy", "confidence"]
    sharpness: float


class ModelKeywords(TypedDict, total=False):
    """Settings of a transformer; see `ModelSettings`."""

    layers: int
    width: int
    heads: int
    kv_heads: int | None
    head_width: int | None
    mlp_width: int | None
    rope_theta: float
    norm_eps: float
    tied: bool
    prediction_heads: int
    prediction_weights: list[float] | tuple[float, ...]
    sliding_window: int | None
    attention_softcap: float | None
    logit_softcap: float | None
    init_std: float
    dtype: Dtype
    vision: VisionSettings | Values | None
    blocks: Mapping[str, BlockSettings | Values]
    pattern: list[str] | tuple[str, ...]


class OpeningKeywords(TypedDict, total=False):
    """How a model is opened for use."""

    context_length: int | None
    device: str
    threads: int | None


class GenerateKeywords(OpeningKeywords, total=False):
    """How texts are generated; see `Sampling`."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    max_tokens: int | None
    stop: list[str] | tuple[str, ...]
    logprobs: int | None
    tempered_logprobs: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    json_schema: str | None


class WriteKeywords(GenerateKeywords, total=False):
    """How texts are generated; see `Sampling`, and `Unmasking` for diffusion."""

    unmask_steps: int | None
    unmask_block: int | None
    remasking: Literal["low_confidence", "random"]


class EvaluateKeywords(OpeningKeywords, total=False):
    """How tasks are run; see `TaskSettings`."""

    data: str | None
    limit: int | None
    shots: int | None
    chat: bool
    samples: int
    temperature: float | None
    max_tokens: int | None
    overlap: int | None
    unsafe: bool
    seed: int


class ServeKeywords(OpeningKeywords, total=False):
    """Address and limits of a server; see `ServeSettings`."""

    host: str
    port: int
    api_keys: list[str] | tuple[str, ...]
    sequences: int
    waiting: int
    waiting_seconds: float
    requests_per_client: int
    requests_per_second: float
    burst: int
    body_bytes: int | None
    image_bytes: int
    images: int
    image_folder: str | None
    body_seconds: float
    messages: int
    max_tokens: int
    choices: int
    grace_seconds: float
