"""The largest requests that a server takes, and the clients that may send them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from specbeam.errors import not_allowed

LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")
AUDIO_PATHS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
"""The endpoints that take audio files, and their tasks."""
MAY_BE_ZERO = ("max_waiting", "max_pass_seconds", "timeout")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest request that is taken. Larger ones are refused.

    Attributes:
        max_body_bytes: bytes of a request's body.
        max_audio_bytes: bytes of a request with an audio file.
        max_bodies_bytes: bytes of the bodies of all requests that have no answer yet. Of incomplete bodies, the one
            that has waited longest for its next bytes is refused first.
        max_audio_seconds: seconds of the audio.
        max_prompts: prompts in one request.
        max_prompt_tokens: tokens of a prompt; None for as many as the model's context holds.
        max_tokens: new tokens of a text, which ends there even if the request asks for more.
        max_beams: beams, choices or samples of one prompt.
        max_tool_calls: tool calls in one answer. Small models do not stop calling.
        max_requests: requests that share a pass. A request for several texts counts once for each text, and a beam
            search once.
        max_waiting: requests that wait beside them.
        max_cache_tokens: cache slots of each model, for live requests and cached prefixes together; None for enough
            slots for ``max_requests`` typical requests (:func:`specbeam.server.models.default_caches`).
        max_pass_seconds: about how long a pass that prefills prompts may take beside other requests
            (:class:`specbeam.Engine`).
        timeout: seconds after which a request ends with the text so far; None for never.

    Raises:
        SpecbeamError: a limit is less than 1, or is no number. ``max_waiting``, ``max_pass_seconds`` and ``timeout``
            may be 0.
    """

    max_body_bytes: int = 4_000_000
    max_audio_bytes: int = 25_000_000
    max_bodies_bytes: int = 500_000_000
    max_audio_seconds: int = 2 * 3600
    max_prompts: int = 128
    max_prompt_tokens: int | None = None
    max_tokens: int = 4096
    max_beams: int = 32
    max_tool_calls: int = 4
    max_requests: int = 32
    max_waiting: int = 256
    max_cache_tokens: int | None = None
    max_pass_seconds: float = 0.1
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value, minimum = getattr(self, name), 0 if name in MAY_BE_ZERO else 1
            if value is not None and not minimum <= value < math.inf:
                raise not_allowed(name, value, f"at minimum {minimum}")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may use a server.

    Attributes:
        api_keys: clients must give one of them as a bearer token; empty for no key.
        is_local: it listens on this machine only. Then requests for other hosts and from other sites are refused, so
            that no web page can reach it through the user's browser (DNS rebinding).
        allowed_hosts: names under which clients reach it beside this machine's own, such as "llm.example.org". Requests
            for other hosts and from other sites are refused then, wherever it listens.
        trusted_proxies: addresses or networks of proxies, whose X-Forwarded-For and X-Forwarded-Proto are believed.
        cors_origins: sites whose pages may use it, such as "https://chat.example.org". "*" stands for all.
    """

    api_keys: tuple[str, ...] = ()
    is_local: bool = True
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = LOOPBACK_ADDRESSES
    cors_origins: tuple[str, ...] = ()
