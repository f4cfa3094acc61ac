"""What may break, breaks: the index's server, a replica, the clients. Nothing else does."""

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter

import httpx
import openai
import pytest
from live_cluster import KEYS, MODEL, Cluster

pytestmark = pytest.mark.integration


class Load:
    """A few clients that ask and ask, and what became of each request."""

    def __init__(self, cluster: Cluster, num_clients: int = 4, max_tokens: int = 12) -> None:
        self._cluster = cluster
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._client, args=(i,)) for i in range(num_clients)
        ]

    def _client(self, number: int) -> None:
        client = self._cluster.openai(timeout=120, max_retries=0)
        turn = 0
        while not self._stop.is_set():
            turn += 1
            try:
                stream = client.completions.create(
                    model=MODEL, prompt=f"Client {number % 2} asks for a story, number {turn}:",
                    max_tokens=self._max_tokens, stream=True, extra_body={"ignore_eos": True},
                    stream_options={"include_usage": True},
                )  # fmt: skip
                chunks = list(stream)
                usage = chunks[-1].usage
                is_whole = usage is not None and usage.completion_tokens == self._max_tokens
                self.outcomes["whole" if is_whole else "cut without a word"] += 1
            except openai.APIError as error:
                self.outcomes[f"{type(error).__name__}: {error.code}"] += 1
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_for_outcomes(load: Load, more: int, timeout_s: float = 90) -> None:
    goal = load.outcomes.total() + more
    deadline = time.monotonic() + timeout_s
    while load.outcomes.total() < goal:
        assert time.monotonic() < deadline, load.outcomes
        time.sleep(0.1)


def test_the_index_dies_and_comes_back_empty(cluster: Cluster) -> None:
    with Load(cluster) as load:
        wait_for_outcomes(load, 6)
        cluster.valkey.kill()
        wait_for_outcomes(load, 12)
        status = cluster.status()
        assert not status["index"]["is_connected"]
        assert not any(r["index_connected"] for r in status["replicas"])
        cluster.valkey.start_again()
        wait_for_outcomes(load, 6)
    assert set(load.outcomes) == {"whole"}, load.outcomes
    cluster.wait_for("is_index_exact", 30)
    assert sum(r["num_hashes"] for r in cluster.status()["index"]["replicas"]) > 0
    cluster.wait_for("is_idle", 10)


def replica_pids(cluster: Cluster) -> list[int]:
    """Processes of this cluster's replicas: descendants of `pando serve` with the deployment's name."""
    lines = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    rows = [line.split(None, 2) for line in lines]
    children: dict[int, list[int]] = {}
    for pid, ppid, _ in rows:
        children.setdefault(int(ppid), []).append(int(pid))
    family, todo = set(), [cluster.serve.process.pid]
    while todo:
        pid = todo.pop()
        family.add(pid)
        todo += children.get(pid, [])
    return [int(pid) for pid, _, args in rows if int(pid) in family and "pando:Replica" in args]


def test_a_replica_dies_and_another_takes_its_place(cluster: Cluster) -> None:
    before = {r["replica_id"]: r["epoch"] for r in cluster.status()["replicas"]}
    pids = replica_pids(cluster)
    assert len(pids) == 2
    with Load(cluster, num_clients=6, max_tokens=40) as load:
        wait_for_outcomes(load, 6)
        os.kill(pids[0], signal.SIGKILL)
        wait_for_outcomes(load, 12)
        deadline = time.monotonic() + 90
        while len({r["replica_id"] for r in cluster.status()["replicas"]}) < 2:
            assert time.monotonic() < deadline, cluster.status()
            time.sleep(0.5)
        wait_for_outcomes(load, 6)
    failures = {k: n for k, n in load.outcomes.items() if k != "whole"}
    # At most what was in flight there: each client has one stream, and each failed with an error event.
    assert set(failures) <= {"APIError: replica_lost"}, load.outcomes
    assert sum(failures.values()) <= 6, load.outcomes
    cluster.wait_for("is_index_exact", 60)
    after = {r["replica_id"]: r["epoch"] for r in cluster.status()["replicas"]}
    assert len(after) == 2
    assert len(set(after.values()) - set(before.values())) == 1, "a new epoch"
    lost = set(before) - set(after)
    mirrored = {r["replica_id"] for r in cluster.status()["index"]["replicas"]}
    assert not lost & mirrored, "blocks of the dead replica are still believed"
    cluster.wait_for("is_idle", 10)


@pytest.mark.timeout(400)
def test_two_hundred_clients_leave_at_random_moments(cluster: Cluster) -> None:
    rng = random.Random(7)
    moments = [rng.choice([0.0, 0.05, 0.2, 0.5, 1.0, 2.0]) * rng.random() for _ in range(200)]

    def client(moment: float, is_stream: bool) -> None:
        body = {
            "model": MODEL, "prompt": f"{moment} a tale of", "max_tokens": 400, "n": 1 + is_stream,
            "stream": is_stream, "ignore_eos": True,
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {KEYS['acme']}"}
        timeout = httpx.Timeout(60, read=max(moment, 0.001))
        try:
            with (
                httpx.Client(timeout=timeout) as http,
                http.stream(
                    "POST", f"{cluster.url}/v1/completions", json=body, headers=headers
                ) as response,
            ):
                end = time.monotonic() + moment
                for _ in response.iter_raw():
                    if time.monotonic() > end:
                        break
        except httpx.TimeoutException:
            pass

    for start in range(0, 200, 20):
        threads = [
            threading.Thread(target=client, args=(moment, i % 2 == 0))
            for i, moment in enumerate(moments[start : start + 20])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    cluster.wait_for("is_idle", 30)
    cluster.wait_for("is_index_exact", 30)
