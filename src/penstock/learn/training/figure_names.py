"""Names of the figures of a run: parts of a step's loss, and evaluations."""

SOURCE, TASK, DISTANCE = "loss.source.", "loss.task.", "loss.distance."
"""Prefixes of the parts of a step's loss; a source, a task or a target distance follows. See
`loss_groups`.
"""

PARTS = (SOURCE, TASK, DISTANCE)


def is_evaluation(name: str) -> bool:
    """Whether a figure belongs to an evaluation (`name/figure`) and not to a step; source names may
    have a slash.
    """
    return "/" in name and not name.startswith(PARTS)
