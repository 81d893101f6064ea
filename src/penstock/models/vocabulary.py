"""New rows of an embedding and of a head, for entries that a tokenizer gained.

New rows begin as the mean of the old ones, so that a new token is at first as likely as an average
one, and no logit of an old token changes (Hewitt 2021, "Initializing New Word Embeddings for
Pretrained Language Models").
"""

import torch
from torch import Tensor


def with_mean_rows(weight: Tensor, size: int) -> Tensor:
    """A matrix [rows, …], or a vector [rows], with rows up to `size`, which are the mean of the
    others.
    """
    return torch.cat([weight, mean_row(weight).expand(size - len(weight), *weight.shape[1:])])


def mean_row(weight: Tensor) -> Tensor:
    """[1, …]: the mean of all rows, summed in float64 on the CPU: the same on every device."""
    mean = weight.detach().cpu().sum(0, keepdim=True, dtype=torch.float64) / len(weight)
    return mean.to(weight.device, weight.dtype)
