"""These tests need the extra `huggingface`; without it they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if all(find_spec(name) for name in ("torch", "transformers", "accelerate")) else ["test_*.py"]
