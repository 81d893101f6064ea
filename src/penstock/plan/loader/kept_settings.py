"""What a loader keeps of images and of remote sources: settings that run files have, too."""

from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.plan.loader.image_cache import BYTES, PREFETCH_BYTES


@dataclass(frozen=True, kw_only=True)
class KeptSettings:
    """Folders and their sizes.

    Raises:
        ConfigError: A size is below 1.
    """

    image_cache: str | Path | None = None
    """Folder for processed images, without loss; from the second time on, an image costs a fifth or
    less. Several processes and runs may share it. None: images are decoded and processed whenever
    they are needed.
    """
    image_cache_bytes: int = BYTES
    """Maximum bytes of that folder, 64 GiB by default; beyond it, what was least used goes."""
    prefetch_bytes: int = PREFETCH_BYTES
    """Maximum bytes of processed images in steps that are prepared ahead, 4 GiB by default; one
    step is always made.
    """
    cache: str | Path | None = None
    """Folder for what is fetched of sources in object stores; ranks and runs may share it. None:
    the environment's `PENSTOCK_CACHE`, else the user's cache folder.
    """
    cache_bytes: int | None = None
    """Maximum bytes of all remote sources in that folder; beyond it, what was used least recently
    goes. Ranks of one machine share the folder, and should have the same number. None: no limit.
    """

    def check_sizes(self) -> None:
        """Refuse sizes below 1."""
        for name in ("image_cache_bytes", "cache_bytes", "prefetch_bytes"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}")
