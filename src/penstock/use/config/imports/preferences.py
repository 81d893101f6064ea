"""Preferences of an axolotl configuration: DPO and its kin, KTO, ORPO, SimPO."""

from collections.abc import Mapping

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.use.config.imports.notes import Keys

PREFERENCES = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}

DPO_LOSSES = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust",
    "sigmoid_norm": "sigmoid_norm",
    "apo_zero_unpaired": "apo_zero_unpaired",
}


def read_preference(keys: Keys, rl: str) -> JsonObject:
    """The section `training.preference`."""
    keys.mapped("rl", f"training.preference.kind: {PREFERENCES[rl]}")
    found: JsonObject = {"kind": PREFERENCES[rl]}
    trl = keys.get("trl", {})
    beta = trl.get("beta") if isinstance(trl, Mapping) else None
    for name in ("rl_beta", "dpo_beta", "orpo_alpha"):
        if keys.get(name) is None:
            continue
        if name == "orpo_alpha" and rl != "orpo":
            keys.note(name, "no effect", "it is for rl: orpo")
            continue
        beta = keys.number(name) if beta is None else beta
        keys.mapped(name, "training.preference.beta")
    if trl and set(trl) <= {"beta"}:
        keys.mapped("trl", "training.preference.beta")
    elif trl:
        keys.note(
            "trl",
            "unsupported",
            "only beta is read of it; the others are for methods that sample answers",
            shown=True,
        )
    found["beta"] = 0.1 if beta is None else float(beta)
    smoothing = keys.number("dpo_label_smoothing", 0.0)
    if smoothing and rl == "dpo":
        found |= {"kind": "cdpo", "label_smoothing": smoothing}
    _dpo_losses(keys, rl, found)
    if "dpo_label_smoothing" not in keys.noted:
        keys.mapped("dpo_label_smoothing", "training.preference.label_smoothing")
    if rl == "simpo":
        found |= {
            "gamma": keys.number("simpo_gamma", 0.5),
            "sft_weight": keys.number("cpo_alpha", 1.0),
        }
        keys.mapped("simpo_gamma", "training.preference.gamma")
        if found["sft_weight"]:
            keys.note(
                "cpo_alpha",
                "differs",
                "training.preference.sft_weight (axolotl's default is 1), a mean over pairs here, "
                "not over their tokens",
            )
    elif rl == "orpo":
        found["sft_weight"] = 1.0
    for name in ("simpo_gamma", "cpo_alpha"):
        if name not in keys.noted and keys.get(name) is not None:
            keys.note(name, "no effect", "it is for rl: simpo")
    return found


def _dpo_losses(keys: Keys, rl: str, found: JsonObject) -> None:
    given = keys.get("dpo_loss_type")
    given = [given] if isinstance(given, str) else given
    if not given:
        return
    weights = keys.get("dpo_loss_weights") or [1.0] * len(given)
    unknown = [one for one in given if one not in (*DPO_LOSSES, "sft")]
    if rl != "dpo" or unknown:
        keys.note(
            "dpo_loss_type", "unsupported", "known here: " + ", ".join(DPO_LOSSES), shown=True
        )
        if keys.get("dpo_loss_weights") is not None:
            keys.note("dpo_loss_weights", "unsupported", "see the losses")
        return
    smoothing = found.pop("label_smoothing", 0.0)
    of_loss = {**DPO_LOSSES, "sigmoid": "cdpo"} if smoothing else DPO_LOSSES
    kinds = {
        of_loss[one]: float(weight)
        for one, weight in zip(given, weights, strict=True)
        if one != "sft" and float(weight)
    }
    if not kinds:
        raise ConfigError(
            f"{keys.file}: {keys.called('dpo_loss_type')} is {given}, of which no loss compares "
            "answers; to learn from the better answers alone, train on them as chats"
        )
    if smoothing and {"cdpo", "robust"} & set(kinds):
        found["label_smoothing"] = smoothing
    elif smoothing:
        keys.note("dpo_label_smoothing", "no effect", "none of its losses reads it")
    first, *others = kinds.items()
    if first[1] != 1.0:
        keys.note(
            "dpo_loss_weights",
            "differs",
            "the first loss has weight 1 and others are relative to it; multiply the learning "
            "rate instead",
        )
    found["kind"] = first[0]
    if others:
        found["also"] = {name: weight / first[1] for name, weight in others}
    if "sft" in given:
        found["sft_weight"] = float(weights[given.index("sft")]) / first[1]
    keys.mapped("dpo_loss_type", "training.preference.kind and also")
    keys.mapped("dpo_loss_weights", "training.preference.also")
