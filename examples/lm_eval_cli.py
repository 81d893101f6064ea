"""lm-eval's own command line, with all of its options, on a run of penstock (or a folder in the
Hugging Face layout).

    python examples/lm_eval_cli.py run --model penstock --model_args
    path=runs/mine,context_length=1024 --tasks arc_easy

lm-eval knows models of other packages only once they are registered in its process, which this
does.
"""

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from penstock import load_tokenizer
from penstock.chat import load_template
from penstock.learn.evaluation.lm_eval_model import LmEvalModel
from penstock.learn.evaluation.subject import Subject
from penstock.learn.training import RunFolder
from penstock.learn.training.distributed import local_device
from penstock.models.saving import load_model


def open_subject(path: str, context_length: int = 1024, device: str = "auto") -> Subject:
    """The model of a run, or of an exported folder."""
    run = RunFolder.open(path)
    tokenizer = load_tokenizer(run.tokenizer)
    template = None if run.template is None else load_template(run.template, tokenizer=tokenizer)
    model: Any = load_model(run.model, local_device(device))
    return Subject(
        model.eval(),
        tokenizer,
        context_length=context_length,
        stop_ids=run.stop_ids,
        template=template,
        slots=16,
    )


@register_model("penstock")
class OpenedByPath(LM):
    """What lm-eval calls with `--model_args`; the model that it gets is an `LmEvalModel`."""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Any:
        """See the class; lm-eval's batch size and device (cuda:0 where nobody says) do not
        count.
        """
        return LmEvalModel(open_subject(**arg_dict))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Any:
        """The same from `key=value,…`."""
        arguments: dict[str, Any] = dict(one.split("=", 1) for one in arg_string.split(",") if one)
        if "context_length" in arguments:
            arguments["context_length"] = int(arguments["context_length"])
        return cls.create_from_arg_obj(arguments, additional_config)


if __name__ == "__main__":
    cli_evaluate()
