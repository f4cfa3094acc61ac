"""What an operator can set at the edge. Parsed once, frozen; an unknown key is an error."""

import re
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_SECRET_CHARS = 16
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000


class GatewayOptions(BaseModel):
    """Limits and defaults of one Gateway.

    Attributes:
        served_model_names: what clients may call the model; empty means the replicas' own name for it.
        max_body_bytes: largest HTTP request body.
        max_in_flight: how many prompts this Gateway has in work at once; more are refused with 429.
        request_timeout_s: how long one prompt may take from arrival to its last token.
        default_max_tokens: for chats and gRPC; None means what is left of the context.
        default_completion_max_tokens: for /v1/completions, whose documented default is 16.
        max_n: most sequences from one prompt: returned, drawn to choose the best of, or kept as beams.
        max_prompts: most prompts in one /v1/completions request.
        max_logprobs: most alternatives returned at a position.
        allow_special_tokens_in_content: whether control tokens such as `<|im_end|>`, written out in a chat
            message, act as such. By default they are plain text, so that nobody whose words end up in a
            message can forge another turn. Prompts of completions always may hold them.
        max_metric_tenants: tenants beyond this many share the metric label `other`.
        is_metrics_public: GET /metrics names tenants, so with keys configured it wants an admin key
            unless this is set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    served_model_names: tuple[str, ...] = ()
    max_body_bytes: PositiveInt = 8 * 2**20
    max_in_flight: PositiveInt = 512
    request_timeout_s: PositiveFloat = 600.0
    retry_after_s: PositiveFloat = 1.0
    default_max_tokens: PositiveInt | None = None
    default_completion_max_tokens: PositiveInt = 16
    max_n: PositiveInt = 16
    max_prompts: PositiveInt = 64
    max_messages: PositiveInt = 4096
    max_stop_strings: PositiveInt = 16
    max_stop_string_chars: PositiveInt = 1024
    max_stop_token_ids: PositiveInt = 128
    max_logit_bias_entries: PositiveInt = 1024
    max_logprobs: Annotated[int, Field(ge=0, le=100)] = 20
    max_metric_tenants: PositiveInt = 100
    is_metrics_public: bool = False
    allow_special_tokens_in_content: bool = False

    @field_validator("served_model_names")
    @classmethod
    def _names_are_not_empty(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(names):
            raise ValueError("a served model name is empty")
        return names


class TenantKey(BaseModel):
    """One API key: whose it is, and either the key itself or the hex SHA-256 of it.

    Attributes:
        min_priority: how urgent its requests may be: a lower priority than this counts as this one. By
            default nobody can put himself before the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str
    key: SecretStr | None = None
    key_sha256: str | None = None
    is_admin: bool = False
    min_priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0

    @field_validator("tenant")
    @classmethod
    def _tenant_is_a_name(cls, tenant: str) -> str:
        if not _TENANT_ID.fullmatch(tenant):
            raise ValueError(
                f"tenant {tenant!r} must be 1 to 64 letters, digits, '.', '_' or '-', "
                "beginning with a letter or digit"
            )
        return tenant

    @field_validator("key_sha256")
    @classmethod
    def _digest_is_hex(cls, digest: str | None) -> str | None:
        if digest is not None and not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError("key_sha256 must be 64 lower-case hexadecimal digits")
        return digest

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError(f"tenant {self.tenant!r}: give exactly one of key and key_sha256")
        if self.key is not None and not self.key.get_secret_value():
            raise ValueError(f"tenant {self.tenant!r}: key is empty")
        return self


class TenancyOptions(BaseModel):
    """Who may call. Without keys everybody is the one tenant `local`.

    Attributes:
        secret: the cluster's secret, from which every tenant's salt is derived. All Gateways and every
            later start must have the same one: with another, no cached prefix is found again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    secret: SecretStr | None = None
    keys: tuple[TenantKey, ...] = ()

    @model_validator(mode="after")
    def _secret_is_there(self) -> Self:
        if self.secret is not None and len(self.secret.get_secret_value()) < _MIN_SECRET_CHARS:
            raise ValueError(f"secret must have at least {_MIN_SECRET_CHARS} characters")
        if self.keys and self.secret is None:
            raise ValueError(
                "keys are configured but secret is not: tenants' salts are derived from it, and a secret "
                "made up at each start would differ between Gateways, which could then share no prefix"
            )
        return self
