"""Where a server listens, who may use it, and its limits. Imports nothing heavy.

Every limit protects one thing: the body its memory, the batch and the queue the time of all, the rate the time of the
others. Whoever meets one is told by a 4xx which it was, and when to come back.
"""

import ipaddress
from dataclasses import dataclass, fields
from typing import final

from penstock.errors import ConfigError

_MAY_BE_ZERO = {"port", "waiting", "requests_per_second", "grace_seconds"}
_SECONDS = {"waiting_seconds", "body_seconds"}
"""Any number above zero."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback one demands an API key."""
    port: int = 8000
    """0: a free one."""
    api_keys: tuple[str, ...] = ()
    """Who has one of these may use `/v1` and `/metrics`; empty: everyone who reaches the address."""

    sequences: int = 16
    """Sequences that are generated side by side; a request with n choices takes n."""
    waiting: int = 64
    """Requests that may wait for a place; more are refused with 429."""
    waiting_seconds: float = 60.0
    """How long one waits at most."""
    requests_per_client: int = 128
    """Requests of one key, or address without keys, at a time."""
    requests_per_second: float = 20.0
    """Of one key or address, in the long run; 0: any."""
    burst: int = 100
    """Requests that one key or address may make at once after a pause."""

    body_bytes: int = 1 << 18
    """The largest body of a request."""
    body_seconds: float = 10.0
    """How long a client may take to send its headers, and then its body."""
    messages: int = 256
    """The longest conversation."""
    max_tokens: int = 4096
    """The most tokens of one reply that can be asked for."""
    choices: int = 8
    """The most replies of one request: prompts × n."""
    grace_seconds: float = 10.0
    """After SIGTERM, running replies may take so long before they are cut."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            least = 0 if name in _MAY_BE_ZERO else 1
            if isinstance(value, int | float) and value < least and not (name in _SECONDS and value > 0):
                raise ConfigError(f"serve.{name} must be at least {least}, got {value}")
        if self.port > 65535:
            raise ConfigError(f"serve.port must be at most 65535, got {self.port}")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("serve.api_keys holds one that is empty or not ASCII; give others")
        if not self.is_loopback and not self.api_keys:
            raise ConfigError(
                f"serve.host is {self.host}, which others can reach, and there is no API key; give one by --api-key or "
                "PENSTOCK_API_KEY, or listen on 127.0.0.1"
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
