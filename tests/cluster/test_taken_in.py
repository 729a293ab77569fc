"""A worker that is missing as the server starts: it serves without, and takes it in under endless streams."""

import threading
import time
from pathlib import Path

from tests.cluster.processes import Starter, free_port, write_cluster
from tests.cluster.servers import Server, start_server

USED_S = 60.0  # the promise: a worker is used so soon after it has come
PROMPTS = ("the", "a longer prompt than the other one")
NUM_TOKENS = 60


def ask(server: Server, prompt: str) -> str:
    """One streamed answer."""
    pieces = server.client.completions.create(
        model="talker",
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(piece.choices[0].text for piece in pieces if piece.choices)


def active(server: Server) -> list[str]:
    return [node["name"] for node in server.get("/cluster").json()["nodes"] if node["state"] == "active"]


def test_a_server_goes_without_a_missing_worker_and_takes_it_in_under_two_endless_streams(
    start: Starter, talker: Path, tmp_path: Path
) -> None:
    places = [(name, f"127.0.0.1:{free_port()}") for name in ("first", "last")]
    config = write_cluster(tmp_path / "cluster.yaml", *places, model=str(talker))
    assert start.worker("first", "--config", config).address
    server = start_server(start, talker, "--config", config)
    assert "going on without last" in server.running.err.text
    assert active(server) == ["coordinator", "first"]
    status = server.get("/health").json()
    assert status["status"] == "degraded" and "last" in str(status)
    expected = {prompt: ask(server, prompt) for prompt in PROMPTS}

    answers: list[tuple[str, str]] = []
    failures: list[BaseException] = []
    is_over = threading.Event()

    def stream(prompt: str) -> None:
        try:
            while not is_over.is_set():
                answers.append((prompt, ask(server, prompt)))
        except Exception as error:  # told by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    try:
        came = start.worker("last", "--config", config)
        assert came.address
        until = time.monotonic() + USED_S
        while active(server) != ["coordinator", "first", "last"]:
            assert time.monotonic() < until and not failures, (active(server), failures, server.running.err.text)
            time.sleep(0.1)
        num_answers = len(answers)
        while len(answers) < num_answers + 4:
            assert time.monotonic() < until + USED_S and not failures, failures
            time.sleep(0.1)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert all(text == expected[prompt] for prompt, text in answers)
