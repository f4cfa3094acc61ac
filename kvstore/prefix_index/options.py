"""What can be set about the prefix index."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class IndexOptions(BaseModel):
    """Settings shared by publishers, followers and the mirror; one value for the whole cluster.

    Attributes:
        url: a `redis://` or `rediss://` URL, password and all; None asks for an embedded Valkey.
        namespace: first part of every key, so that several clusters can share one server.
        lease_s: how long a replica that falls silent is still believed.
        heartbeat_s: how often a replica renews its lease and states its digest.
        flush_s: how long changes are gathered before they are sent as one event.
        stream_max_len: events kept for each replica; a follower further behind takes a snapshot.
        stream_max_bytes: hash bytes kept in those events, whichever limit comes first.
        queue_max_events: changed hashes a publisher holds while the server is away; beyond that it
            drops them and followers take a snapshot.
        max_mirror_hashes: (replica, hash) pairs a mirror holds; further ones are not stored.
        speculative_s: life of an entry that a router guessed and no replica has confirmed.
        stale_s: how long a mirror that lost the server answers from its last view.
        socket_timeout_s: when a server that does not answer counts as away.
        max_backoff_s: longest pause between two attempts to reach it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: SecretStr | None = None
    namespace: str = Field(default="pando", pattern=r"^[A-Za-z0-9_.:-]{1,64}$")
    lease_s: Seconds = 10.0
    heartbeat_s: Seconds = 1.0
    flush_s: Seconds = 0.01
    stream_max_len: int = Field(default=65_536, ge=1)
    stream_max_bytes: int = Field(default=16 * 2**20, ge=65_536)
    queue_max_events: int = Field(default=262_144, ge=1)
    max_mirror_hashes: int = Field(default=4_000_000, ge=1)
    speculative_s: Seconds = 5.0
    stale_s: Seconds = 60.0
    socket_timeout_s: Seconds = 2.0
    max_backoff_s: Seconds = 2.0

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is None:
            return None
        # The value may hold a password, so the message shows its scheme only; hence hide_input_in_errors too.
        try:
            parts = urlsplit(url.get_secret_value())
            has_host = bool(parts.hostname) and parts.port != 0
        except ValueError:
            raise ValueError("url is not a well-formed URL") from None
        if parts.scheme not in ("redis", "rediss"):
            raise ValueError(f"url must begin with redis:// or rediss://, not {parts.scheme!r}")
        if not has_host:
            raise ValueError("url must name a host")
        return url

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s must be at least twice heartbeat_s ({self.heartbeat_s}), not {self.lease_s}"
            )
        return self
