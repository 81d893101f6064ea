"""How well a model does: real tasks, scored with standard errors; what it wrote as code runs in a sandbox.

`make_task` gives a task, `Subject` a model to ask, `run_task` its answers and results. Needs the extra `train`, and
`eval` for data from the hub and for lm-eval's tasks. Settings can be read without torch.
"""

from typing import TYPE_CHECKING, Any

from penstock.evaluation.settings import TaskSettings
from penstock.late import import_late

if TYPE_CHECKING:
    from penstock.evaluation.lm_eval_running import run_lm_eval
    from penstock.evaluation.results import Results
    from penstock.evaluation.running import run_task
    from penstock.evaluation.subject import Subject
    from penstock.evaluation.task import Answer, Problem, Task
    from penstock.evaluation.tasks import make_task

_LATE = {
    "Answer": "task",
    "Problem": "task",
    "Results": "results",
    "Subject": "subject",
    "Task": "task",
    "make_task": "tasks",
    "run_lm_eval": "lm_eval_running",
    "run_task": "running",
}
"""Name → the module that is loaded when it is first used."""

__all__ = ["Answer", "Problem", "Results", "Subject", "Task", "TaskSettings", "make_task", "run_lm_eval", "run_task"]


def __getattr__(name: str) -> Any:
    return import_late(__name__, _LATE, name)
