"""Asks the service for one prompt and gathers what comes back."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from edge_fakes import FakeBackend, make_service, toy_tokenizer

from router.inference import InferenceService
from router.options import GatewayOptions
from router.requests import (
    BeamFields,
    Delta,
    Finished,
    InferenceRequest,
    Output,
    Prompt,
    SamplingFields,
    Started,
    TextPrompt,
    TokenDetail,
)
from workers.errors import PandoError

VOCAB_SIZE = toy_tokenizer().vocab_size


@dataclass
class Gathered:
    """All outputs of one sequence."""

    pieces: list[str] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def ask(
    prompt: str | Prompt = "hello",
    *,
    n: int = 1,
    best_of: int | None = None,
    beam: BeamFields | None = None,
    priority: int = 0,
    stop: tuple[str, ...] = (),
    model: str | None = None,
    timeout_s: float | None = None,
    **sampling: object,
) -> InferenceRequest:
    return InferenceRequest(
        model=model,
        prompt=TextPrompt(prompt) if isinstance(prompt, str) else prompt,
        sampling=SamplingFields(**sampling),  # type: ignore[arg-type]
        n=n,
        best_of=best_of,
        beam=beam,
        priority=priority,
        stop=stop,
        timeout_s=timeout_s,
    )


async def outputs_of(
    service: InferenceService, request: InferenceRequest, key: str | None = None
) -> list[Output]:
    async with aclosing(service.generate(request, service.tenants.resolve(key))) as outputs:
        return [output async for output in outputs]


def run(
    service: InferenceService, request: InferenceRequest, key: str | None = None
) -> list[Output]:
    return asyncio.run(outputs_of(service, request, key))


def gather(outputs: list[Output], index: int = 0) -> Gathered:
    gathered = Gathered()
    assert isinstance(outputs[0], Started)
    for output in outputs[1:]:
        assert not isinstance(output, Started)
        if output.index != index:
            continue
        assert gathered.finished is None, "nothing follows a sequence's end"
        if isinstance(output, Delta):
            gathered.pieces.append(output.text)
            gathered.details.extend(output.details)
        else:
            gathered.finished = output
    return gathered


def refused(request: InferenceRequest, options: GatewayOptions | None = None) -> PandoError:
    """The error that `request` is refused with, before any replica has seen it."""
    backend = FakeBackend()
    with pytest.raises(PandoError) as caught:
        run(make_service(backend, options), request)
    assert backend.requests == []
    return caught.value
