"""How fast and how exact are recurrent layers? Ours in torch against packages with kernels.

    python benchmarks/gpu/12_recurrent.py --output results

Each operation over a row of documents, forward and backward, by torch and by the packages that have
it (`training.recurrent`): flash-linear-attention, mamba-ssm, causal-conv1d. `deviation`: of outputs
against torch in float64, as a share of the largest value. Then the training of a hybrid.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

import penstock as ps
from common import Data, Figures, MissingError, Report, folder, own_model, seconds, train
from penstock.core.errors import PenstockError
from penstock.models.recurrent import Borders, gated_delta_rule
from penstock.models.settings import BlockSettings

HYBRIDS = {
    "gated_delta": BlockSettings(mixer="gated_delta"),
    "kimi_delta": BlockSettings(mixer="kimi_delta"),
    "mamba": BlockSettings(mixer="mamba"),
}


def delta(report: Report, slots: int, document: int) -> Figures:
    """The gated delta rule in torch: time, and error of the device's dtype against float64."""
    heads, width = (2, 16) if report.toy else (8, 128)
    generator = torch.Generator(report.device).manual_seed(0)
    shared: dict[str, Any] = {"device": report.device, "generator": generator}
    q, k, v = (torch.randn(slots, heads, width, **shared) for _ in range(3))
    g, beta = -torch.rand(slots, heads, **shared), torch.rand(slots, heads, **shared)
    inputs = [normalize(q, dim=-1), normalize(k, dim=-1), v, g, beta]
    borders = Borders(np.unique([*range(0, slots, document), slots]), report.device)

    def run(given: list[Any]) -> Any:
        return gated_delta_rule(*given, borders, keep=False)[0]

    leaves = [one.requires_grad_() for one in inputs]
    took = seconds(lambda: torch.autograd.grad(run(leaves).sum(), leaves), 2 if report.toy else 10)
    with torch.no_grad():
        due = run([one.double() for one in inputs])
        error = (run(inputs).double() - due).abs().max() / due.abs().max()
    return {"both_ms": 1e3 * took, "deviation": float(error)}


def hybrid(report: Report, data: Any, kind: str, backend: str) -> Figures:
    """Steps of a hybrid by one backend."""
    made = {"blocks": {"r": HYBRIDS[kind], "full": BlockSettings()}, "pattern": ("r", "full")}
    slots = 64 if report.toy else 4096
    loader = ps.Loader(ps.Source(data.web), sequence_length=slots, rows_per_step=2)
    try:
        return train(
            report,
            own_model(report, **made),
            loader,
            steps=3 if report.toy else 12,
            recurrent=backend,
            deterministic=False,
        )
    except PenstockError as error:
        if backend != "torch":
            raise MissingError(str(error)) from None
        raise


def main() -> None:
    report = Report(__file__, __doc__)
    slots = 128 if report.toy else 16384
    with folder() as place:
        data = Data(place, 300 if report.toy else 3000, 20.0 if report.toy else 800.0)
        for document in (slots, 32):
            report.part(f"delta rule, documents of {document}", delta, report, slots, document)
        for kind in HYBRIDS:
            for backend in ("torch", "fla", "mamba_ssm"):
                report.part(f"{kind} by {backend}", hybrid, report, data, kind, backend)
    report.done()


if __name__ == "__main__":
    main()
