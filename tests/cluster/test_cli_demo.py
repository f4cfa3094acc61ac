"""`pando demo` against a real Gateway whose toy replicas have a real prefix cache."""

import pytest
from cli_driver import DEMO_TENANCY, ReportingBackend, failure_of, gateway, pando, toy_backend
from edge_fakes import BLOCK_SIZE, says
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.demo import Turn, summarize
from kvstore.prefix_hash import unpack_tokens
from workers.errors import ReplicaLost
from workers.protocol import GenerateRequest


@pytest.fixture(autouse=True)
def _no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANDO_API_KEY", raising=False)


class LeakyBackend(ReportingBackend):
    """A cache that knows tokens only, and so gives one tenant what another computed."""

    def _cached(self, request: GenerateRequest) -> int:
        tokens = unpack_tokens(request.tokens)
        prefixes = [
            repr(tokens[:end]).encode() for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE)
        ]
        num_hits = sum(prefix in self._resident for prefix in prefixes)
        self._resident.update(prefixes)
        return num_hits * BLOCK_SIZE


def test_two_tenants_share_nothing_and_each_reuses_its_own() -> None:
    with gateway(tenancy=DEMO_TENANCY) as url:
        shown = pando("demo", "--url", url, "--turns", "3", "--output", "json").parsed
        again = pando("demo", "--url", url, "--turns", "2", "--output", "json").parsed
    turns = shown["turns"]
    assert [(t["turn"], t["tenant"]) for t in turns] == [
        (turn, tenant) for turn in (1, 2, 3) for tenant in ("acme", "globex")
    ]
    firsts = [t for t in turns if t["turn"] == 1]
    assert [t["num_cached_tokens"] for t in firsts] == [0, 0]
    assert firsts[0]["num_prompt_tokens"] == firsts[1]["num_prompt_tokens"] > 10 * BLOCK_SIZE
    for turn in turns[2:]:
        assert turn["num_cached_tokens"] > 0.8 * firsts[0]["num_prompt_tokens"]
        assert turn["replica"] == "replica-0"
        assert turn["ttft_s"] > 0
    summary = shown["summary"]
    assert summary["leaked_tokens"] == 0
    assert summary["num_cached_tokens"] == sum(t["num_cached_tokens"] for t in turns)
    # Nothing of an earlier run is reused, or first turns would look like later ones.
    assert again["turns"][0]["num_cached_tokens"] == 0


def test_the_table_and_what_it_comes_to() -> None:
    with gateway(tenancy=DEMO_TENANCY) as url:
        run = pando("demo", "--url", url, "--turns", "2")
    assert run.exit_code == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["turn", "tenant", "replica", "prompt", "cached", "first", "token"]
    assert [line.split()[1] for line in lines[1:5]] == ["acme", "globex"] * 2
    assert lines[6].startswith("Saved: ")
    assert "Kept apart: globex sent the same" in lines[8]
    assert "got 0 of them from the cache" in lines[8]


def test_a_cluster_that_mixes_tenants_up_is_found_out() -> None:
    backend = LeakyBackend(says("nine"), max_model_len=8192)
    with gateway(backend, DEMO_TENANCY) as url:
        run = pando("demo", "--url", url, "--turns", "2")
    assert run.exit_code == 1
    assert "pando demo: tenants are not kept apart" in run.stderr


def test_without_keys_there_is_one_tenant_and_it_says_how_to_have_two() -> None:
    with gateway() as url:
        run = pando("demo", "--url", url, "--turns", "2", "--api-key", "ignored")
        shown = pando("demo", "--url", url, "--turns", "2", "--output", "json").parsed
    assert run.exit_code == 0
    assert "everybody is the one tenant `local`" in run.stdout
    assert "pando serve --demo-tenants" in run.stdout
    assert "Kept apart" not in run.stdout
    assert shown["summary"]["leaked_tokens"] is None
    assert {t["tenant"] for t in shown["turns"]} == {"local"}


def test_keys_given_and_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_server import TENANCY

    with gateway(tenancy=TENANCY) as url:
        both = ("--api-key", "key-a", "--api-key", "key-b", "--output", "json", "--turns", "2")
        shown = pando("demo", "--url", url, *both).parsed
        assert [t["tenant"] for t in shown["turns"]] == ["tenant 1", "tenant 2"] * 2
        assert shown["summary"]["leaked_tokens"] == 0
        assert "give --api-key twice" in failure_of("demo", "--url", url)
        bad = failure_of("demo", "--url", url, "--api-key", "key-a", "--api-key", "no")
        assert "does not know the API key of tenant 2" in bad
        assert "key-a" not in bad
        monkeypatch.setenv("PANDO_API_KEY", "key-a")
        alone = pando("demo", "--url", url, "--turns", "2")
        assert alone.exit_code == 0
        assert "With one key there is one tenant" in alone.stdout


@pytest.mark.parametrize(
    "args",
    [["--turns", "1"], ["--turns", "9"], ["--api-key", "a", "--api-key", "b", "--api-key", "c"]],
)
def test_usage_errors(args: list[str]) -> None:
    run = pando("demo", *args)
    assert (run.exit_code, run.stdout) == (2, "")


def test_a_failure_in_mid_answer_is_one_line() -> None:
    backend = toy_backend(fail_after=1, chunk=1, failure=ReplicaLost("the replica died"))
    with gateway(backend) as url:
        assert failure_of("demo", "--url", url) == "pando demo: the replica died"


def test_nobody_there() -> None:
    assert "cannot reach" in failure_of("demo", "--url", "http://127.0.0.1:1")


_tokens = st.integers(0, 10**6)
_turns = st.lists(
    st.builds(
        Turn,
        turn=st.integers(1, 3),
        tenant=st.sampled_from(["a", "b", "c"]),
        replica=st.just("r"),
        num_prompt_tokens=_tokens,
        num_cached_tokens=_tokens,
        ttft_s=st.none() | st.floats(0, 100),
    )
)


@given(_turns)
def test_a_summary_counts_every_turn_once(turns: list[Turn]) -> None:
    summary = summarize(turns)
    assert summary.num_prompt_tokens == sum(t.num_prompt_tokens for t in turns)
    assert summary.num_cached_tokens == sum(t.num_cached_tokens for t in turns)
    leaked = 0
    is_told = False
    for turn in turns:
        if turn.turn == 1 and turn.tenant != turns[0].tenant:
            leaked += turn.num_cached_tokens
            is_told = True
    assert summary.leaked_tokens == (leaked if is_told else None)
