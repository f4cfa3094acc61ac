"""Which requests have sequences that still run or wait, and what they must be told."""

from workers.protocol import EngineEvent
from workers.step_plan import RequestEvent


class OpenRequests:
    """Counts each request's open sequences, and collects events in order."""

    def __init__(self) -> None:
        self._request_to_num_open: dict[str, int] = {}
        self._events: list[RequestEvent] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._request_to_num_open

    def num_open(self, request_id: str) -> int:
        return self._request_to_num_open[request_id]

    def ids(self) -> set[str]:
        return set(self._request_to_num_open)

    def open(self, request_id: str, num_sequences: int) -> None:
        self._request_to_num_open[request_id] = num_sequences

    def close(self, request_id: str, num_sequences: int) -> None:
        """So many of its sequences have ended; the request is over with the last one."""
        self._request_to_num_open[request_id] -= num_sequences
        if self._request_to_num_open[request_id] == 0:
            del self._request_to_num_open[request_id]

    def forget(self, request_id: str) -> bool:
        """End it with all its sequences; False when it is not open."""
        return self._request_to_num_open.pop(request_id, None) is not None

    def tell(self, request_id: str, event: EngineEvent) -> None:
        self._events.append(RequestEvent(request_id, event))

    def drain_events(self) -> list[RequestEvent]:
        events, self._events = self._events, []
        return events
