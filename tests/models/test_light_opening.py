"""What is imported to open a model of ours: nothing of torch's compiler and its checkpoints, which
take seconds.
"""

import subprocess
import sys
from pathlib import Path

HEAVY = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "sympy",
    "transformers",
)
CODE = f"""
import sys
import penstock as ps
from penstock.models.saving import load_model, save_model
from penstock.learn.training.distributed import local_device

blocks = {{"b": {{"experts": 2, "experts_per_token": 1}}}}
model = ps.build_model(layers=1, width=16, heads=2, vocab_size=64, blocks=blocks, pattern=("b",))
save_model(model, sys.argv[1])
again = load_model(sys.argv[1], local_device("cpu"))
same = [bool((a == b).all()) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
print(all(same), [name for name in {HEAVY!r} if name in sys.modules])
"""


def test_a_model_of_ours_opens_without_the_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path / "model")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.strip() == "True []"
