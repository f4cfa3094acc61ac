"""The one error tree. Router and replica raise these; `router.status_codes` turns them into HTTP and gRPC.

PandoError
├── InvalidRequest        the client's request can never succeed as it is
│   └── ContextTooLong    prompt and output do not fit the model or the pool
├── Unauthenticated       no key, or one nobody knows
├── PermissionDenied      a known tenant asks for what it may not have
├── ModelNotFound         the model named is not served here
├── PayloadTooLarge       the body is over the configured limit
├── Overloaded            capacity exists but is contended: try again later
├── Unavailable           no replica can serve now: try again later
├── DeadlineExceeded      the client's own deadline passed
├── ReplicaLost           the replica died while it was answering
└── InternalError         our fault
"""


class PandoError(Exception):
    """Base of all errors Pando raises on purpose.

    Args:
        message: one sentence for the client, naming the field and the value. Never a path or a traceback.
        param: the request field at fault, when there is one.
        retry_after_s: after how many seconds a retry may succeed, when it may.
    """

    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments are lost by Exception's own pickling, and errors cross processes here.
        return _rebuild, (type(self), self.message, self.param, self.retry_after_s)


def _rebuild(
    kind: type[PandoError], message: str, param: str | None, retry_after_s: float | None
) -> PandoError:
    return kind(message, param=param, retry_after_s=retry_after_s)


class InvalidRequest(PandoError):
    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class Unauthenticated(PandoError):
    code = "invalid_api_key"


class PermissionDenied(PandoError):
    code = "permission_denied"


class ModelNotFound(PandoError):
    code = "model_not_found"


class PayloadTooLarge(PandoError):
    code = "payload_too_large"


class Overloaded(PandoError):
    code = "overloaded"


class Unavailable(PandoError):
    code = "unavailable"


class DeadlineExceeded(PandoError):
    code = "deadline_exceeded"


class ReplicaLost(PandoError):
    code = "replica_lost"


class InternalError(PandoError):
    code = "internal_error"


_KINDS: tuple[type[PandoError], ...] = (
    InvalidRequest,
    ContextTooLong,
    Unauthenticated,
    PermissionDenied,
    ModelNotFound,
    PayloadTooLarge,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    ReplicaLost,
    InternalError,
)
_code_to_kind = {kind.code: kind for kind in _KINDS}


def error_from_code(
    code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> PandoError:
    """The error that a `RequestFailed` event stands for; an unknown code becomes `InternalError`."""
    kind = _code_to_kind.get(code, InternalError)
    return kind(message, param=param, retry_after_s=retry_after_s)
