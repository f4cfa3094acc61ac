"""One table for what each error is called over HTTP and over gRPC."""

import math
from dataclasses import dataclass

import grpc

from workers.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PandoError,
    PayloadTooLarge,
    PermissionDenied,
    ReplicaLost,
    Unauthenticated,
    Unavailable,
)

_DEFAULT_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """How an error is shown: HTTP status, the body's `error.type`, gRPC code, and whether to try again."""

    http_status: int
    error_type: str
    grpc_code: grpc.StatusCode
    is_retryable: bool = False


# 429: there is capacity, but it is contended. 503: nothing can serve now.
_kind_to_status: dict[type[PandoError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    Unauthenticated: Status(401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED),
    PermissionDenied: Status(403, "permission_error", grpc.StatusCode.PERMISSION_DENIED),
    ModelNotFound: Status(404, "not_found_error", grpc.StatusCode.NOT_FOUND),
    # Not RESOURCE_EXHAUSTED: clients retry that one, and the same body can never fit.
    PayloadTooLarge: Status(413, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    Overloaded: Status(429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    Unavailable: Status(503, "service_unavailable_error", grpc.StatusCode.UNAVAILABLE, True),
    ReplicaLost: Status(503, "service_unavailable_error", grpc.StatusCode.UNAVAILABLE, True),
    DeadlineExceeded: Status(504, "timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    InternalError: Status(500, "internal_server_error", grpc.StatusCode.INTERNAL),
}


def status_of(error: PandoError) -> Status:
    """The row for `error`'s class or its nearest base; an unlisted one is an internal error."""
    for kind in type(error).__mro__:
        if kind in _kind_to_status:
            return _kind_to_status[kind]
    return _kind_to_status[InternalError]


def retry_after_s(error: PandoError) -> float | None:
    """After how many seconds to try again; None when trying again cannot help."""
    if not status_of(error).is_retryable:
        return None
    return _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s


def http_headers(error: PandoError) -> dict[str, str]:
    """`Retry-After` in whole seconds, rounded up, where a retry may help; `WWW-Authenticate` with a 401."""
    headers: dict[str, str] = {}
    delay_s = retry_after_s(error)
    if delay_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(delay_s)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_body(error: PandoError) -> dict[str, object]:
    """The JSON body of `error`, in the nested shape that OpenAI's clients read."""
    return {
        "error": {
            "message": error.message,
            "type": status_of(error).error_type,
            "param": error.param,
            "code": error.code,
        }
    }
