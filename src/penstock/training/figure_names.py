"""What figures in metrics.jsonl are called, for whoever writes, shows and draws them."""

SOURCE, TASK, DISTANCE = "loss.source.", "loss.task.", "loss.distance."
"""Before the name of a source or task, or a target distance: a part of a step's loss; see `loss_groups`."""
PARTS = (SOURCE, TASK, DISTANCE)


def is_evaluation(name: str) -> bool:
    """Whether a figure is of an evaluation, `name/figure`, rather than of a step; names of sources may have a slash."""
    return "/" in name and not name.startswith(PARTS)
