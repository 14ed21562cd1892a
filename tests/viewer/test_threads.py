"""The viewer under many clients: one reading per batch, no race, and no connection without end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import uvicorn

from counterpoise.viewer import cache as viewer_cache
from counterpoise.viewer.cache import BatchCache
from counterpoise.viewer.connection import server_config
from counterpoise.viewer.server import app, free_socket
from helpers.make_run import make_run

NUM_BATCHES = 10
NUM_CLIENTS = 50
SMALL = {"num_batches": NUM_BATCHES, "prompts": 2, "group_size": 4, "eval_every": 0}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", ledger_every=1, **SMALL)


def start(run_dir, **settings):
    bound = free_socket()
    port = bound.getsockname()[1]
    server = uvicorn.Server(server_config(app(run_dir, port), **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    return server, thread, port


@pytest.fixture
def port(run_dir):
    server, thread, port = start(run_dir)
    yield port
    server.should_exit = True
    thread.join()


@pytest.fixture
def impatient_port(run_dir):
    server, thread, port = start(run_dir, exchange_s=1.0)
    yield port
    server.should_exit = True
    thread.join()


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_ten_batches_at_fifty_clients_are_read_once(run_dir, port, monkeypatch):
    opened = []
    open_batch = viewer_cache.open_batch
    monkeypatch.setattr(
        viewer_cache,
        "open_batch",
        lambda run, batch, folder: opened.append(batch) or open_batch(run, batch, folder),
    )
    want = [
        pq.read_table(run_dir / "tokens" / f"batch_{b:06d}.parquet").num_rows
        for b in range(NUM_BATCHES)
    ]

    def client(at):
        order = np.random.default_rng(at).permutation(NUM_BATCHES)[:4]
        sizes = {}
        for batch in (int(b) for b in [*order, order[0]]):
            status, content = get(port, f"/api/batches/{batch}")
            assert status == 200, content
            groups = json.loads(content)["groups"]
            sizes[batch] = sum(r["length"] for g in groups for r in g["rollouts"])
            status, column = get(port, f"/api/batches/{batch}/prompts/0/columns/credit")
            assert status == 200 and column
        return sizes

    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(client, range(NUM_CLIENTS)))
    assert all(size == want[batch] for answer in answers for batch, size in answer.items())
    assert sorted(opened) == list(range(NUM_BATCHES))  # a cache of three would read hundreds


def test_a_cache_that_drops_batches_under_threads_never_loses_an_answer(run_dir):
    cache = BatchCache(budget=0, least=1)

    def ask(batch):
        tokens = cache.get(run_dir, batch % NUM_BATCHES)
        assert tokens.batch == batch % NUM_BATCHES
        return len(tokens.column("credit").value_T)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(ask, range(80)))
    assert all(size > 0 for size in sizes) and len(cache) <= 16


def test_a_batch_that_cannot_be_read_is_asked_for_again(run_dir):
    cache = BatchCache()
    for _ in range(2):
        with pytest.raises(ValueError, match="There are: 0-9"):
            cache.get(run_dir, 77)
    assert len(cache) == 0


def ends(connection, seconds=30):
    """Whether the server closes a connection in time."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def keep_saying(connection, words, seconds=60):
    """Say the same again and again, and never listen."""
    connection.settimeout(5)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            connection.sendall(words)
        time.sleep(0.05)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1"])
def test_half_open_connections_end(impatient_port, said):
    with socket.create_connection(("127.0.0.1", impatient_port)) as connection:
        connection.sendall(said)
        assert ends(connection)
    assert get(impatient_port, "/api/run")[0] == 200


def test_a_request_said_letter_by_letter_ends(impatient_port):
    with (
        socket.create_connection(("127.0.0.1", impatient_port)) as connection,
        pytest.raises(ConnectionError),
    ):
        keep_saying(connection, b"G")


def test_a_client_that_does_not_read_ends(impatient_port):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", impatient_port))
    ask = f"GET /assets/viewer.js HTTP/1.1\r\nHost: 127.0.0.1:{impatient_port}\r\n\r\n"
    with connection, pytest.raises(ConnectionError):
        keep_saying(connection, ask.encode())


def test_many_silent_connections_do_not_keep_others_out(impatient_port):
    silent = [socket.create_connection(("127.0.0.1", impatient_port)) for _ in range(100)]
    assert get(impatient_port, "/")[0] == 200
    assert all(ends(connection) for connection in silent)
    for connection in silent:
        connection.close()
