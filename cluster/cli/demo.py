"""`pando demo`: two tenants chat with a running cluster, and see what was reused, and by whom."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.demo_script import MAX_TURNS, QUESTIONS, guide
from cluster.cli.output import (
    Output,
    OutputOption,
    console,
    expected_failures,
    fail,
    milliseconds,
    percent,
    plain,
    show_json,
    show_table,
)
from cluster.cli.status import DEFAULT_URL, UrlOption
from cluster.client import ChatAnswer, Client, ClientError, ServerRefused
from cluster.config import client_api_key

# What `pando serve --demo-tenants` configures.
DEMO_TENANT_TO_KEY = {"acme": "demo-acme", "globex": "demo-globex"}
_LOCAL_TENANT = "local"
_UNAUTHORIZED = 401
_MAX_TOKENS = 32
_COLUMNS = ("turn", "tenant", "replica", "prompt", "cached", "first token")
_NUMBERS = ("turn", "prompt", "cached", "first token")
_TWO_TENANTS = (
    "To see two tenants kept apart, give the cluster two API keys: `pando serve --demo-tenants`, or with\n"
    "  --set tenancy.secret=<16 characters or more>\n"
    "  --set 'tenancy.keys=[{tenant: acme, key: demo-acme}, {tenant: globex, key: demo-globex}]'"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of one tenant, counted from 1."""

    turn: int
    tenant: str
    replica: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What all turns come to.

    Attributes:
        leaked_tokens: how many tokens another tenant's first turn got from the cache. Its text was the
            first tenant's, who had sent it before: anything but 0 is a breach. None with one tenant.
        first_ttft_s, later_ttft_s: medians over the tenants' first turns, and over all later ones.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    leaked_tokens: int | None
    first_ttft_s: float | None
    later_ttft_s: float | None

    @property
    def saved_share(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class Chat:
    """One tenant's conversation, which grows by a question and its answer a turn."""

    def __init__(self, tenant: str, client: Client, model: str, run_id: str) -> None:
        self.tenant = tenant
        self._client = client
        self._model = model
        self._messages = [{"role": "system", "content": guide(run_id)}]

    def ask(self, turn: int) -> Turn:
        """Raises ClientError."""
        self._messages.append({"role": "user", "content": QUESTIONS[turn - 1]})
        answer: ChatAnswer = self._client.chat(
            self._messages, model=self._model, max_tokens=_MAX_TOKENS
        )
        self._messages.append({"role": "assistant", "content": answer.text})
        return Turn(
            turn,
            self.tenant,
            answer.replica_id or "-",
            answer.num_prompt_tokens,
            answer.num_cached_tokens,
            answer.ttft_s,
        )


def demo(
    url: UrlOption = DEFAULT_URL,
    turns: Annotated[
        int, typer.Option("--turns", min=2, max=MAX_TURNS, help="Questions of each tenant.")
    ] = 4,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Twice, one a tenant; else the keys of --demo-tenants."),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Chat with a running cluster as two tenants, and show what each got from the prefix cache."""
    keys = list(dict.fromkeys(api_key or []))
    if len(keys) > 2:
        raise typer.BadParameter("give --api-key at most twice", param_hint="--api-key")
    with expected_failures("demo"), ExitStack() as stack:
        tenant_to_key = find_tenants(url, keys)
        chats = []
        run_id = secrets.token_hex(8)
        for tenant, key in tenant_to_key.items():
            client = stack.enter_context(Client(url, key))
            chats.append(Chat(tenant, client, client.model_names()[0], run_id))
        done = _run(chats, turns)
        summary = summarize(done)
    _show(done, summary, output, is_local=list(tenant_to_key) == [_LOCAL_TENANT])
    if summary.leaked_tokens:
        fail("demo", f"tenants are not kept apart: {summary.leaked_tokens} tokens crossed over")


def find_tenants(url: str, keys: Sequence[str]) -> dict[str, str | None]:
    """Whom to chat as: tenant's name → key.

    A cluster that answers without a key has one tenant, whatever keys are sent. Else the keys given count,
    else PANDO_API_KEY's, else those of `pando serve --demo-tenants`.

    Raises:
        ClientError: the cluster is away, or knows none of the keys.
    """
    if _is_known(url, None):
        return {_LOCAL_TENANT: None}
    name_to_key = {f"tenant {number}": key for number, key in enumerate(keys, 1)}
    if not name_to_key:
        if _is_known(url, DEMO_TENANT_TO_KEY["acme"]):
            return dict(DEMO_TENANT_TO_KEY)
        if own_key := client_api_key():
            name_to_key = {"tenant 1": own_key}
    if not name_to_key:
        raise ClientError(
            f"{url} asks for API keys: give --api-key twice, one a tenant, or start the cluster with "
            "--demo-tenants"
        )
    for name, key in name_to_key.items():
        if not _is_known(url, key):
            raise ClientError(f"{url} does not know the API key of {name}")
    return dict(name_to_key)


def _is_known(url: str, key: str | None) -> bool:
    with Client(url, key) as client:
        try:
            client.model_names()
        except ServerRefused as error:
            if error.status == _UNAUTHORIZED:
                return False
            raise
    return True


def _run(chats: Sequence[Chat], num_turns: int) -> list[Turn]:
    """Every tenant's first turn, then every tenant's second, and so on: who is second sends old text."""
    err = Console(stderr=True)
    done = []
    with err.status("") as spinner:
        for turn in range(1, num_turns + 1):
            for chat in chats:
                spinner.update(f"turn {turn} of {num_turns}, {chat.tenant} …")
                done.append(chat.ask(turn))
    return done


def summarize(turns: Sequence[Turn]) -> Summary:
    """Pure. `turns` are in the order in which they were asked."""
    leader = turns[0].tenant if turns else ""
    others = [t for t in turns if t.tenant != leader and t.turn == 1]
    return Summary(
        num_prompt_tokens=sum(t.num_prompt_tokens for t in turns),
        num_cached_tokens=sum(t.num_cached_tokens for t in turns),
        leaked_tokens=sum(t.num_cached_tokens for t in others) if others else None,
        first_ttft_s=_median([t.ttft_s for t in turns if t.turn == 1]),
        later_ttft_s=_median([t.ttft_s for t in turns if t.turn > 1]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _show(turns: Sequence[Turn], summary: Summary, output: Output, *, is_local: bool) -> None:
    if output is Output.JSON:
        saved = {"saved_share": summary.saved_share}
        show_json(
            {
                "turns": [plain(asdict(turn)) for turn in turns],
                "summary": plain(asdict(summary) | saved),
            }
        )
        return
    rows = [
        [
            str(t.turn), t.tenant, t.replica, str(t.num_prompt_tokens), str(t.num_cached_tokens),
            milliseconds(t.ttft_s),
        ]
        for t in turns
    ]  # fmt: skip
    show_table(_COLUMNS, rows, _NUMBERS)
    console().print("\n".join(("", *_conclusions(turns, summary, is_local=is_local))))


def _conclusions(turns: Sequence[Turn], summary: Summary, *, is_local: bool) -> list[str]:
    lines = [
        f"Saved: {summary.num_cached_tokens} of {summary.num_prompt_tokens} prompt tokens "
        f"({percent(summary.saved_share)}) were not computed again.",
        f"First token: {milliseconds(summary.first_ttft_s)} in a first turn, "
        f"{milliseconds(summary.later_ttft_s)} in a later one (medians).",
    ]
    if summary.leaked_tokens is not None:
        leader = turns[0]
        other = next(t for t in turns if t.tenant != leader.tenant)
        lines.append(
            f"Kept apart: {other.tenant} sent the same {other.num_prompt_tokens} tokens right after "
            f"{leader.tenant} and got {summary.leaked_tokens} of them from the cache."
        )
    elif is_local:
        lines += [
            "No API keys are configured here, so everybody is the one tenant `local`.",
            _TWO_TENANTS,
        ]
    else:
        lines.append(
            "With one key there is one tenant: give --api-key twice to see two kept apart."
        )
    return lines
