"""The viewer's server and data: bytes equal the files, nothing but this run is served, and only to
this machine's browser.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from counterpoise.report.html import asset, digest
from counterpoise.run.read import open_run
from counterpoise.viewer import api
from counterpoise.viewer.export import MAX_TOKENS, MODULES, bundle, write_export
from counterpoise.viewer.server import ASSETS, app, free_socket
from counterpoise.viewer.tokens import open_batch
from helpers.make_run import HOSTILE, make_run

PORT = 8123
SMALL = {"num_batches": 2, "prompts": 3, "group_size": 4, "ledger_every": 2, "eval_every": 0}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", hostile=True, **SMALL)


@pytest.fixture
def client(run_dir):
    return TestClient(
        app(run_dir, PORT), base_url=f"http://127.0.0.1:{PORT}", raise_server_exceptions=False
    )


@pytest.fixture(scope="module")
def table(run_dir):
    return pd.read_parquet(run_dir / "tokens" / "batch_000000.parquet").sort_values(
        ["group", "rollout", "position"]
    )


def test_the_run_is_described(client):
    found = client.get("/api/run").json()
    assert [batch["batch"] for batch in found["batches"]] == [0, 1]
    assert [batch["has_tokens"] for batch in found["batches"]] == [True, False]
    assert found["descriptions"]["others"].startswith("predicted minus own")


def test_a_step_lists_prompts_and_rollouts_as_the_files_do(client, run_dir):
    found = client.get("/api/batches/0").json()
    rollouts = pd.read_parquet(run_dir / "rollouts" / "batch_000000.parquet").set_index("rollout")
    for group in found["groups"]:
        for row in group["rollouts"]:
            want = rollouts.loc[row["rollout"]]
            assert row["reward"] == want["reward"]
            assert row["advantage"] == want["advantage"]
            assert row["length"] == len(want["token_ids"])
            assert group["prompt"] == want["prompt"]
            assert group["answer"] == want["answer"]


@pytest.mark.parametrize(
    "name",
    [
        "credit",
        "delta",
        "others",
        "own_head",
        "entropy",
        "cancellation",
        "part_sign_negative",
        "position",
        "is_flip",
    ],
)
@pytest.mark.parametrize("group", [0, 2])
def test_columns_are_the_files_numbers(client, table, name, group):
    answer = client.get(f"/api/batches/0/prompts/{group}/columns/{name}")
    got = np.frombuffer(answer.content, np.dtype(answer.headers["X-Dtype"]).newbyteorder("<"))
    want = table[table["group"] == group][name].to_numpy(float)
    np.testing.assert_array_equal(got.astype(float), want)


def test_a_column_of_any_name_is_served(client, table):
    name = f"part_sign_{HOSTILE[0]}"  # has slashes
    answer = client.get(f"/api/batches/0/prompts/1/columns/{urllib.parse.quote(name, safe='')}")
    assert (
        np.frombuffer(answer.content, "<f8").tolist() == table[table["group"] == 1][name].tolist()
    )


def test_texts_are_codes_into_the_vocabulary(client, table):
    texts = client.get("/api/batches/0").json()["texts"]
    codes = np.frombuffer(client.get("/api/batches/0/prompts/1/columns/text").content, "<i4")
    assert [texts[code] for code in codes] == table[table["group"] == 1]["text"].tolist()
    assert set(HOSTILE) <= set(texts)


def test_a_token_has_every_number_of_its_row(client, table):
    rows = table[table["group"] == 2].reset_index(drop=True)
    found = client.get("/api/batches/0/prompts/2/tokens/7").json()
    want = rows.iloc[7].to_dict()
    assert set(found) == set(want) - {"batch"}
    for name, value in found.items():
        assert value == want[name], name


def test_a_step_without_a_ledger_is_shown_from_its_rollouts(client, run_dir):
    found = client.get("/api/batches/1").json()
    assert found["source"] == "rollouts"
    rollouts = pd.read_parquet(run_dir / "rollouts" / "batch_000001.parquet")
    of_first = rollouts[rollouts["group"] == 0]
    answer = client.get("/api/batches/1/prompts/0/columns/credit")
    got = np.frombuffer(answer.content, "<f8")
    np.testing.assert_array_equal(got, np.concatenate(of_first["credit"].tolist()))
    # token texts come from the batch that has them
    codes = np.frombuffer(client.get("/api/batches/1/prompts/0/columns/text").content, "<i4")
    assert "".join(found["texts"][code] for code in codes[:5]) == "Let us add:\n"


def test_sharing_of_files_that_do_not_say_is_that_of_a_loop(run_dir):
    batch = open_batch(open_run(run_dir), 0)
    stated = {name: batch.column(name).value_T for name in ("node_positive", "node_negative")}
    batch.names = [name for name in batch.names if not name.startswith("node_")]
    batch._columns.clear()
    code_T, sign_N = batch.column("text").value_T, batch.sign_N
    passing = defaultdict(list)
    for n, group in enumerate(batch.group_N):
        for t in range(batch.start_N[n], batch.start_N[n + 1]):
            passing[group, tuple(code_T[batch.start_N[n] : t + 1])].append((t, sign_N[n]))
    for name, side in (("node_positive", 1), ("node_negative", -1)):
        want = np.zeros(len(code_T), int)
        for members in passing.values():
            for t, _ in members:
                want[t] = sum(sign == side for _, sign in members)
        np.testing.assert_array_equal(batch.column(name).value_T, want)
        np.testing.assert_array_equal(stated[name], want)


def test_colour_scales_end_at_a_quantile(run_dir, table):
    batch = open_batch(open_run(run_dir), 0)
    assert api.scale(batch, "delta")["limit"] == pytest.approx(
        np.quantile(table["delta"].abs(), 0.98)
    )
    assert api.scale(batch, "entropy")["high"] == pytest.approx(np.quantile(table["entropy"], 0.98))
    assert set(api.scale(batch, "category")["words"]) == set(table["category"])


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        f"evil.example:{PORT}",
        "127.0.0.1",
        f"127.0.0.1:{PORT + 1}",
        "",
        f"localhost:{PORT}.evil.example",
    ],
)
def test_other_hosts_are_turned_away(client, host):
    answer = client.get("/api/run", headers={"Host": host})
    assert answer.status_code == 421
    assert "batches" not in answer.text


def test_localhost_is_this_machine(client):
    assert client.get("/api/run", headers={"Host": f"localhost:{PORT}"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(client, method):
    assert client.request(method, "/api/run").status_code == 405
    assert client.request(method, "/nowhere").status_code == 405  # whatever the routes allow


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../folder.py",
        "/assets/%2e%2e/folder.py",
        "/assets/..%2ffolder.py",
        "/assets/report.html",
        "/assets/",
        "/config.yaml",
        "/manifest.json",
        "/..%2f..%2fetc%2fpasswd",
        "/api/batches/..%2f..%2fsecret",
        "/api/batches/-1",
        "/api/batches/99",
        "/api/batches/0/prompts/99/columns/text",
        "/api/batches/0/prompts/0/columns/..%2f..%2fmanifest.json",
        "/api/batches/0/prompts/0/columns/nothing",
        "/api/batches/0/prompts/0/tokens/99999",
    ],
)
def test_what_is_not_there_is_a_404(client, path):
    assert client.get(path).status_code == 404


def test_every_answer_has_the_strict_headers(client):
    for path in ("/", "/assets/viewer.js", "/api/run", "/api/batches/99", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_every_asset_is_served_and_no_markup_is_written_by_script(client):
    for name, kind in ASSETS.items():
        answer = client.get(f"/assets/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
    for name in MODULES:
        text = asset(f"{name}.js", "viewer")
        for sink in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "javascript:",
        ):
            assert sink not in text, (name, sink)
    own = [asset(name) for name in ("report.html", "layout.html", "macros.html")]
    html = "".join([asset("viewer.html", "viewer"), asset("arena.html", "arena"), *own])
    assert " onclick" not in html and " onload" not in html and " style=" not in html


def test_a_broken_table_is_told_and_other_steps_are_shown(run_dir, tmp_path):
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    for folder in ("tokens", "rollouts"):
        file = copy / folder / "batch_000000.parquet"
        file.write_bytes(file.read_bytes()[:64])
    client = TestClient(app(copy, PORT), base_url=f"http://127.0.0.1:{PORT}")
    answer = client.get("/api/batches/0")
    assert answer.status_code == 404 and "cannot be read" in answer.json()["error"]
    assert client.get("/api/batches/1").status_code == 200


def test_a_link_out_of_the_run_is_not_served(run_dir, tmp_path):
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    for folder in ("tokens", "rollouts"):
        (copy / folder / "batch_000000.parquet").rename(tmp_path / f"{folder}.parquet")
        (copy / folder / "batch_000000.parquet").symlink_to(tmp_path / f"{folder}.parquet")
    client = TestClient(app(copy, PORT), base_url=f"http://127.0.0.1:{PORT}")
    assert [batch["batch"] for batch in client.get("/api/run").json()["batches"]] == [1]
    assert client.get("/api/batches/0").status_code == 404


def test_missing_columns_and_a_schema_from_the_future_are_told_and_the_rest_is_shown(
    run_dir, tmp_path
):
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    file = copy / "tokens" / "batch_000000.parquet"
    table = pq.read_table(file)
    kept = ["group", "rollout", "position", "token_id", "credit"]
    future = table.select(kept).append_column("thoughts", pa.array([[0.5]] * table.num_rows))
    pq.write_table(future.replace_schema_metadata({b"counterpoise_schema": b"99"}), file)
    client = TestClient(app(copy, PORT), base_url=f"http://127.0.0.1:{PORT}")
    found = client.get("/api/batches/0").json()
    assert any("schema version 99" in problem for problem in found["problems"])
    assert {column["name"] for column in found["columns"]} == {"position", "token_id", "credit"}
    got = np.frombuffer(client.get("/api/batches/0/prompts/0/columns/credit").content, "<f8")
    whole = table.to_pandas().sort_values(["group", "rollout", "position"])
    np.testing.assert_array_equal(got, whole["credit"][whole["group"] == 0])


def test_a_table_without_order_falls_back_to_the_rollouts(run_dir, tmp_path):
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    file = copy / "tokens" / "batch_000000.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["position"]), file)
    found = api.batch_info(open_batch(open_run(copy), 0))
    assert found["source"] == "rollouts"
    assert any("no column 'position'" in problem for problem in found["problems"])


def test_an_export_holds_the_numbers_and_runs_only_its_own_script(run_dir, tmp_path, table):
    import base64
    import gzip
    import re

    page = write_export(open_run(run_dir), tmp_path / "out", [0], prompts=2).read_text()
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    data = re.search(
        r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL
    )
    assert script is not None and data is not None
    assert digest(script[1]) in page and "unsafe" not in page.partition("<body>")[0]
    assert "require-trusted-types-for 'script'" in page.partition("<body>")[0]
    assert "<" not in data[1]
    embedded = json.loads(data[1])
    assert [group["group"] for group in embedded["batches"]["0"]["info"]["groups"]] == [0, 1]
    kind, packed = embedded["batches"]["0"]["columns"]["1"]["delta"]
    got = np.frombuffer(gzip.decompress(base64.b64decode(packed)), kind)
    np.testing.assert_array_equal(got, table[table["group"] == 1]["delta"])
    assert 'src="' not in page and 'href="' not in page.replace('<a href="javascript', "")


def test_an_export_that_is_too_large_says_what_to_do(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("counterpoise.viewer.export.MAX_TOKENS", 10)
    with pytest.raises(ValueError, match="--prompts N"):
        write_export(open_run(run_dir), tmp_path, [0])
    assert MAX_TOKENS > 512 * 1000


def test_names_of_the_modules_do_not_clash():
    import re

    names = re.findall(
        r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", bundle(), re.MULTILINE
    )
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert "import {" not in bundle() and "\nexport " not in bundle()


def test_a_taken_port_is_one_clear_line():
    taken = free_socket()
    with pytest.raises(ValueError, match="Leave --port out"):
        free_socket(taken.getsockname()[1])
    assert taken.getsockname()[0] == "127.0.0.1"
    taken.close()


def test_the_command_serves_and_stops(run_dir):
    script = (
        "from counterpoise.cli.view import view; from pathlib import Path; import sys;"
        " view(Path(sys.argv[1]), open_=False)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[0]
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{address}api/run", timeout=120) as answer:
        assert json.load(answer)["name"] == "run"
    port = int(address.rstrip("/").rpartition(":")[2])
    for other in ("127.0.0.2", "::1"):  # loopback, and of it this one address
        with pytest.raises(OSError), socket.create_connection((other, port), timeout=5):
            pass
    process.send_signal(signal.SIGINT)
    process.wait(timeout=600)
