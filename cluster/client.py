"""A small client for a running cluster: what the operator's commands ask of it over HTTP. No general SDK."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from cluster.cache_status import CacheLogs, CacheStatus, Flushed
from cluster.status import ClusterStatus

_CONNECT_TIMEOUT_S = 5.0
_MAX_BODY_BYTES = 16 * 2**20
_MAX_SHOWN_CHARS = 500
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
_DONE = b"[DONE]"
Answer = TypeVar("Answer", bound=BaseModel)


class ClientError(Exception):
    """The cluster did not give what was asked; the message is one line for the operator.

    ClientError
    ├── ServerAway     nobody answers at that address, or the connection broke off
    └── ServerRefused  an answer came, and it is an error; `status` and `code` say which
    """


class ServerAway(ClientError):
    pass


class ServerRefused(ClientError):
    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One streamed chat. `ttft_s` is from sending the request to its first text; None when no text came."""

    text: str
    replica_id: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    ttft_s: float | None
    total_s: float


class Client:
    """Talks to the Gateway at `url`.

    Args:
        url: `http://host:port` or https, with no path.
        api_key: sent as a bearer token when given.
        timeout_s: for each read; a chat's first token may take as long.
        transport: instead of the network.
        clock: seconds, monotonic.

    Raises:
        ClientError: `url` is no such address.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = _checked_url(url)
        self._clock = clock
        try:
            headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
                transport=transport,
                # No proxy that the environment names has a way to this machine's own loopback.
                trust_env=urlsplit(self.url).hostname not in _LOCAL_HOSTS,
            )
        except UnicodeEncodeError:
            raise ClientError("the API key holds characters that no HTTP header can") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        """Whether a replica can serve. Raises ServerAway when not even a Gateway answers."""
        try:
            self._get("/health")
        except ServerRefused as error:
            if error.status == httpx.codes.SERVICE_UNAVAILABLE:
                return False
            raise
        return True

    def version(self) -> str:
        """Of the Pando that answers. Raises ClientError when it is another program."""
        return self._parsed(self._get("/version"), _Version).version

    def model_names(self) -> tuple[str, ...]:
        """What the cluster serves. Raises ServerRefused for a key that is missing or unknown."""
        models = self._parsed(self._get("/v1/models"), _Models)
        return tuple(card.id for card in models.data)

    def status(self) -> ClusterStatus:
        """GET /status. Raises ServerRefused unless the key is an operator's."""
        return self._parsed(self._get("/status"), ClusterStatus)

    def cache(self) -> CacheStatus:
        """GET /cache. Raises ServerRefused unless the key is an operator's."""
        return self._parsed(self._get("/cache"), CacheStatus)

    def cache_logs(self) -> CacheLogs:
        """GET /cache/log. Raises ServerRefused unless the key is an operator's."""
        return self._parsed(self._get("/cache/log"), CacheLogs)

    def flush_caches(self) -> Flushed:
        """Have every replica forget every prefix. Raises ServerRefused unless the key is an operator's."""
        return self._parsed(self._ask("DELETE", "/cache"), Flushed)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        max_tokens: int,
        temperature: float = 0.0,
    ) -> ChatAnswer:
        """One chat, streamed.

        Raises:
            ClientError: refused, failed in mid-stream, or ended without its usage.
        """
        body = {
            "model": model,
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin_s = self._clock()
        with (
            self._told_apart(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                raise _refusal(response.status_code, _bounded(response))
            return self._gather(response, begin_s)

    def _gather(self, response: httpx.Response, begin_s: float) -> ChatAnswer:
        texts: list[str] = []
        usage: _Usage | None = None
        ttft_s: float | None = None
        for data in _event_data(response.iter_bytes()):
            chunk = self._parsed(data, _Chunk)
            if chunk.error is not None:
                raise ServerRefused(_shown(chunk.error.message), 200, chunk.error.code)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content:
                    ttft_s = self._clock() - begin_s if ttft_s is None else ttft_s
                    texts.append(choice.delta.content)
        if usage is None:
            raise ServerAway(f"{self.url} broke the answer off before its end")
        return ChatAnswer(
            text="".join(texts),
            replica_id=response.headers.get("x-pando-replica"),
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.prompt_tokens_details.cached_tokens,
            num_completion_tokens=usage.completion_tokens,
            ttft_s=ttft_s,
            total_s=self._clock() - begin_s,
        )

    def _get(self, path: str) -> bytes:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str) -> bytes:
        with self._told_apart(), self._http.stream(method, path) as response:
            body = _bounded(response)
            if response.is_error:
                raise _refusal(response.status_code, body)
            return body

    def _parsed(self, body: bytes, kind: type[Answer]) -> Answer:
        try:
            return kind.model_validate_json(body)
        except ValidationError:
            raise ClientError(f"{self.url} does not answer as Pando does") from None

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException:
            raise ServerAway(f"{self.url} does not answer in time") from None
        except httpx.HTTPError as error:
            raise ServerAway(f"cannot reach {self.url}: {_shown(str(error))}") from None


class _Version(BaseModel):
    version: str


class _Card(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Card]


class _CachedTokens(BaseModel):
    cached_tokens: int = 0


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens = _CachedTokens()


class _Error(BaseModel):
    message: str
    code: str | None = None


class _ErrorBody(BaseModel):
    error: _Error


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = _Delta()


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query or parts.username:
        raise ClientError(f"the URL must look like http://127.0.0.1:8000, not {_shown(url)!r}")
    return url.rstrip("/")


def _bounded(response: httpx.Response) -> bytes:
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise ClientError(f"the answer is larger than {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def _event_data(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The `data:` of each server-sent event, to [DONE] or the end, whichever comes first."""
    num_bytes = 0
    rest = b""
    for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > _MAX_BODY_BYTES:
            raise ClientError(f"the answer is larger than {_MAX_BODY_BYTES} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                if value.strip() == _DONE:
                    return
                yield value


def _refusal(status: int, body: bytes) -> ServerRefused:
    try:
        error = _ErrorBody.model_validate_json(body).error
    except ValidationError:
        return ServerRefused(f"HTTP {status}: {_shown(body.decode(errors='replace'))}", status)
    return ServerRefused(_shown(error.message), status, error.code)


def _shown(text: str) -> str:
    """One printable line: what a server says may hold anything, and goes to a terminal."""
    line = "".join(c if c.isprintable() else " " for c in text).strip()
    return line if len(line) <= _MAX_SHOWN_CHARS else line[:_MAX_SHOWN_CHARS] + "…"
