"""Evaluation: real tasks, scored with standard errors; code that a model writes runs in a sandbox.

`make_task` makes a task, `Subject` wraps a model, and `run_task` returns results. Needs the extra
`train`, and `eval` for data from the Hugging Face Hub and for lm-eval's tasks. Settings need no
torch.
"""

from penstock.core.lazy_imports import lazy
from penstock.learn.evaluation.tasks import TaskSettings

with lazy(__name__):
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval
    from penstock.learn.evaluation.results import Results, run_task
    from penstock.learn.evaluation.subject import Subject
    from penstock.learn.evaluation.tasks import Answer, Problem, Task, make_task

__all__ = [
    "Answer",
    "Problem",
    "Results",
    "Subject",
    "Task",
    "TaskSettings",
    "make_task",
    "run_lm_eval",
    "run_task",
]
