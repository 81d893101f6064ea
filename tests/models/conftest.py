"""These tests need torch, and some transformers or peft too; without them they are not
collected.
"""

from importlib.util import find_spec

_NEEDS = {
    "torch": "test_*.py",
    "transformers": (
        "test_huggingface_model.py test_model_export.py test_lora.py test_export_dtype.py "
        "test_kernels_without_cuda.py"
    ),
    "peft": "test_lora.py",
}

collect_ignore_glob = [
    name for package, names in _NEEDS.items() if not find_spec(package) for name in names.split()
]
