"""Every error leaves in the same nested body, FastAPI's own included."""

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from router.http_api.disconnect import ClientGone
from router.status_codes import error_body, http_headers, status_of
from router.validation import shown
from workers.errors import InternalError, InvalidRequest, PandoError

_log = logging.getLogger(__name__)
_CLIENT_GONE_STATUS = 499  # nobody reads it, but logs show it


def error_response(error: PandoError) -> JSONResponse:
    """`error` as a response, with Retry-After where trying again may help."""
    return JSONResponse(
        error_body(error), status_code=status_of(error).http_status, headers=http_headers(error)
    )


def install_error_handlers(app: FastAPI, count_error: Callable[[str], None]) -> None:
    """Make `app` answer every failure in the nested shape; `count_error` is told each error's code."""

    async def on_pando_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, PandoError)
        count_error(error.code)
        return error_response(error)

    async def on_invalid_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await on_pando_error(request, _from_validation(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _framework_error(request, error)

    async def on_client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE_STATUS)

    async def on_anything_else(request: Request, error: Exception) -> Response:
        _log.error("unexpected failure", exc_info=error)
        return await on_pando_error(request, InternalError("an internal error; it has been logged"))

    app.add_exception_handler(PandoError, on_pando_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(Exception, on_anything_else)


def _from_validation(error: RequestValidationError) -> InvalidRequest:
    """The first fault found, with the field's path and what stood there."""
    fault = error.errors()[0]
    path = ".".join(str(part) for part in fault["loc"][1:])
    where = f"{path}: " if path else ""
    got = "" if fault["type"] in ("missing", "json_invalid") else f", got {shown(fault['input'])}"
    # A union's faults end in the name of the branch that was tried, which no client knows.
    param = str(fault["loc"][1]) if len(fault["loc"]) > 1 and path else None
    return InvalidRequest(f"{where}{fault['msg']}{got}", param=param)


def _framework_error(request: Request, error: HTTPException) -> JSONResponse:
    """What Starlette raises by itself: no such path, wrong method, a body that cannot be parsed."""
    message = {
        404: f"there is nothing at {shown(request.url.path)}",
        405: f"{request.method} is not allowed at {shown(request.url.path)}",
    }.get(error.status_code, str(error.detail))
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}},
        status_code=error.status_code,
        headers=error.headers,
    )
