"""Settings of a server: its address, API keys and limits. Imports nothing heavy.

Each limit protects one thing: the body limit protects memory; batch and queue keep waiting short
for all; the rate limits keep one client from slowing down the others. A client that exceeds a limit
gets a 4xx that names it and says when to retry.
"""

import ipaddress
from dataclasses import dataclass, fields
from typing import final

from penstock.core.errors import ConfigError

_MAY_BE_ZERO = {"port", "waiting", "requests_per_second", "grace_seconds"}
LEAST_BODY, BYTES_OF_TOKEN = 1 << 18, 16
"""Body of a request by default: bytes at least, and for each token of the context, whose id or text
and the JSON around it they hold.
"""
_SECONDS = {"waiting_seconds", "body_seconds"}
"""Settings that may be any number above 0."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs an API key."""
    port: int = 8000
    """Port to listen on; 0: a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys that give access to `/v1` and `/metrics`; without one, everyone who reaches the address
    has access. Safer in the environment variable PENSTOCK_API_KEY, which other users cannot see.
    """

    sequences: int = 16
    """Number of sequences that are generated at the same time; a request with n choices takes n."""
    waiting: int = 64
    """Maximum requests that wait for a place; further ones are refused with 429."""
    waiting_seconds: float = 60.0
    """Maximum time that a request waits."""
    requests_per_client: int = 128
    """Maximum requests at a time from one key, or from one address without keys."""
    requests_per_second: float = 20.0
    """Maximum average rate of requests from one key or address; 0: no limit."""
    burst: int = 100
    """Maximum requests that one key or address may send at once after a pause."""

    body_bytes: int | None = None
    """Maximum size of a request's body, without images; None: 16 bytes for each token of the
    context, 256 KiB at least.
    """
    image_bytes: int = 20 << 20
    """How much larger the body may be if the model reads images, as base64."""
    images: int = 16
    """Maximum images of a conversation."""
    image_folder: str | None = None
    """Folder with images that clients may name by path; None: they send all images in data URLs.
    URLs are refused.
    """
    body_seconds: float = 10.0
    """Maximum time for sending the headers of a request, and then for its body."""
    messages: int = 4096
    """Maximum messages of a conversation."""
    max_tokens: int = 4096
    """Maximum tokens that can be requested for one reply."""
    choices: int = 8
    """Maximum replies of one request: prompts × n."""
    grace_seconds: float = 10.0
    """Time that running replies get after SIGTERM before they are cut."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            least = 0 if name in _MAY_BE_ZERO else 1
            if (
                isinstance(value, int | float)
                and value < least
                and not (name in _SECONDS and value > 0)
            ):
                raise ConfigError(f"serve.{name} must be at least {least}, got {value}")
        if self.port > 65535:
            raise ConfigError(f"serve.port must be at most 65535, got {self.port}")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError(
                "serve.api_keys has a key that is empty or not ASCII; give another one"
            )
        if not self.is_loopback and not self.api_keys:
            raise ConfigError(
                f"serve.host is {self.host}, which others can reach, but there is no API key; "
                "set api_keys (--api-key) or PENSTOCK_API_KEY, or listen on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
