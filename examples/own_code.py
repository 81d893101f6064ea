"""Your own loss, evaluator, model and `on_step`, each the smallest that is useful.

In Python they are objects, `ps.train(make_model(vocab_size), loader, loss=focal_loss, …)`; in a run
file names:

    model: examples/own_code.py:make_model
    training:
      loss: examples/own_code.py:focal_loss
      on_step: examples/own_code.py:MeanWeights
      evaluators: {calibration: {kind: own, function: examples/own_code.py:calibration, every: 100}}

`examples/reverse_training.py` is an objective of your own.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import log_softmax

import penstock as ps

# A loss: (model, row, denominators) → the row's share of the step's loss
# ------------------------------------------


def focal_loss(model, row, denominators):
    """Easy targets count less (Lin et al. 2017, arXiv:1708.02002): −(1 − p)² log p instead of −log
    p.
    """
    places = row.targets[0] >= 0
    logits = model.logits(model(row)[0][places])
    log_p = log_softmax(logits, -1).gather(-1, row.targets[0][places, None])[:, 0]
    weights = row.loss_weights[0][places] / denominators[0]
    share = -(weights * (1 - log_p.exp()) ** 2 * log_p).sum()
    # Figures are shares of the step as well, and reported as `loss.cross_entropy`.
    return share, {"cross_entropy": -(weights * log_p.detach()).sum()}


# An evaluator: (model, ranks) → figures
# ---------------------------------------------------------------------------


def calibration(model, ranks):
    """How much probability the model gives to its likeliest first token, on this rank's share of
    all tokens.
    """
    text = torch.arange(ranks.place.rank, model.vocab_size, ranks.place.size, device=model.device)
    logits = model.extend(
        text[:, None], torch.ones(len(text), dtype=torch.int64), model.new_cache(len(text), 2)
    )
    total, count = ranks.sum([float(logits.softmax(-1).amax(-1).sum()), len(text)])
    return {"confidence": total / count}


# Something after each step, with a state that checkpoints keep
# ----------------------------------------------------


class MeanWeights:
    """A running mean of the weights; `swap(model)` puts it in their place."""

    def __init__(self, decay=0.99):
        self.decay, self.means = decay, {}

    def __call__(self, model, step, record):
        """After a step, take a part of each weight into its mean."""
        for name, weight in model.named_parameters():
            mean = self.means.setdefault(name, weight.detach().clone())
            mean.lerp_(weight.detach().to(mean.device), 1 - self.decay)

    def swap(self, model):
        """Put the means into the model."""
        model.load_state_dict({**model.state_dict(), **self.means})

    def state_dict(self):
        """Tensors and what JSON holds, flat."""
        return dict(self.means)

    def load_state_dict(self, state):
        """What `state_dict` gave."""
        self.means = dict(state)


# A model: a torch module with vocab_size, forward(row) → hidden states and logits(hidden)
# -------------------------


class Gru(nn.Module):
    """A recurrent model. Documents of a row are run one by one, so none sees another."""

    def __init__(self, vocab_size, width=32):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding, self.gru = nn.Embedding(vocab_size, width), nn.GRU(width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, row):
        """Hidden states [T, width]."""
        documents = [row.tokens[begin:end] for begin, end in pairwise(row.rule.cu_seqlens.tolist())]
        return torch.cat([self.gru(self.embedding(tokens))[0] for tokens in documents])

    def logits(self, hidden):
        """Scores [..., vocab_size]."""
        return self.head(hidden)


def make_model(vocab_size):
    """What a run file names: called with the number of ids that the data need."""
    return Gru(vocab_size)


if __name__ == "__main__":
    import sys

    dataset, output = sys.argv[1:]
    loader = ps.Loader(dataset, sequence_length=64, rows_per_step=4)
    network = make_model(ps.open_dataset(dataset).tokenizer.vocab_size)
    run = ps.train(
        network,
        loader,
        output=output,
        steps=10,
        loss=focal_loss,
        on_step=MeanWeights(),
        evaluators={"calibration": {"kind": "own", "function": calibration, "every": 5}},
    )
    print(run.metrics[-1]["calibration/confidence"], run.generate("the ", max_tokens=8))
