"""The report page and the commands: numbers on the page are numbers of the files, and text of a
model stays text.
"""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from counterpoise.cli.compare import compare
from counterpoise.cli.import_ import import_
from counterpoise.cli.report import report
from counterpoise.cli.view import view
from counterpoise.report import charts as plot
from counterpoise.report.charts.index import CHARTS
from counterpoise.report.html import data, digest
from counterpoise.report.page import content, render, write_report
from counterpoise.run.read import open_run
from counterpoise.text import percent
from helpers.make_run import HOSTILE, make_run

SMALL = {"num_batches": 6, "prompts": 3, "group_size": 4, "ledger_every": 2, "eval_every": 2}
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", **SMALL)


@pytest.fixture(scope="module")
def hostile_dir(tmp_path_factory):
    return make_run(
        tmp_path_factory.mktemp("runs") / "<script>window.pwned=1<script>",
        method=HOSTILE[9],
        hostile=True,
        **SMALL,
    )


@pytest.fixture(scope="module")
def page(run_dir):
    return write_report([run_dir])[0].read_text()


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles by their order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append((tag if dict(attrs).get("type") is None else "data", ""))

    def handle_data(self, data):
        if self.cdata_elem:
            kind, before = self.inside[-1]
            self.inside[-1] = (kind, before + data)
        else:
            self.text += data


def values(trace_axis):
    """A plotly array: a list, or base64 of typed numbers."""
    if isinstance(trace_axis, dict):
        return np.frombuffer(base64.b64decode(trace_axis["bdata"]), trace_axis["dtype"]).tolist()
    return trace_axis


def figure(page, name):
    found = re.search(
        rf'<script type="application/json" id="figure-{name}">(.*?)</script>', page, re.DOTALL
    )
    assert found is not None, name
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("reward", "reward/mean"),
        ("entropy", "entropy/mean"),
        ("length", "rollouts/length"),
        ("grad_norm", "loss/grad_norm"),
    ],
)
def test_curves_on_the_page_are_the_metrics(page, run_dir, name, key):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (trace,) = figure(page, name)["data"]
    assert values(trace["x"]) == [row["batch"] for row in rows]
    assert values(trace["y"]) == [row[key] for row in rows]


def test_the_accuracy_on_the_page_is_that_of_the_evaluations(page, run_dir):
    rows = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    band, line = figure(page, "accuracy")["data"]
    assert values(line["y"]) == [row["eval/accuracy"] for row in rows]
    assert (
        values(band["y"])
        == [row["eval/accuracy_high"] for row in rows]
        + [row["eval/accuracy_low"] for row in rows][::-1]
    )
    last = rows[-1]
    ends = [last[f"eval/accuracy{end}"] for end in ("", "_low", "_high")]
    assert percent(*ends) in Elements(page).text


def test_the_flips_on_the_page_are_those_of_the_tokens(page, run_dir):
    traces = [trace for trace in figure(page, "flips")["data"] if trace["mode"] == "lines+markers"]
    for trace in traces:
        sign = 1 if trace["name"].startswith("positive") else -1
        for batch, rate in zip(values(trace["x"]), values(trace["y"])):
            table = pd.read_parquet(run_dir / "tokens" / f"batch_{batch:06d}.parquet")
            assert rate == pytest.approx(table["is_flip"][table["sign"] == sign].mean())
    assert len(traces) == 2


def test_the_plan_on_the_page_is_that_of_the_file(run_dir):
    found = content([open_run(run_dir)])
    assert found.details[0].plan is not None
    batch, table = found.details[0].plan
    rollouts = pd.read_parquet(run_dir / "rollouts" / f"batch_{batch:06d}.parquet")
    for row, part in zip(
        table.rows, json.loads((run_dir / "plan" / f"batch_{batch:06d}.json").read_text())["rows"]
    ):
        assert row[1] == str(len(part))
        assert row[2] == str(rollouts.iloc[part]["group"].nunique())
        assert row[3] == str(sum(len(ids) for ids in rollouts.iloc[part]["token_ids"]))
        assert row[4] == percent(rollouts.iloc[part]["reward"].mean())


def test_samples_are_coloured_by_credit(run_dir):
    found = content([open_run(run_dir)])
    table = pd.read_parquet(run_dir / "tokens" / "batch_000004.parquet")
    limit = np.quantile(table["credit"].abs(), 0.98)
    for prompt in found.details[0].samples:
        for sample in prompt.samples:
            rows = table[table["rollout"] == sample.rollout]
            assert [token.text.replace("⏎", "") for token in sample.tokens] == rows["text"].tolist()
            for token, credit in zip(sample.tokens, rows["credit"]):
                level = min(10, int(np.ceil(abs(credit) / limit * 10 - 1e-9)))
                assert token.css == (
                    "d-0" if level == 0 else f"d-{'p' if credit > 0 else 'n'}{level}"
                )


def test_samples_under_uniform_credit_are_coloured_by_the_change(tmp_path):
    path = make_run(tmp_path / "run", **SMALL)
    for file in (path / "tokens").iterdir():
        table = pd.read_parquet(file)
        table["credit"] = table["advantage"]
        table.to_parquet(file)
    found = content([open_run(path)])
    assert {prompt.coloured_by for prompt in found.details[0].samples} == {
        "the change of their log-prob"
    }
    table = pd.read_parquet(path / "tokens" / "batch_000004.parquet")
    sample = found.details[0].samples[0].samples[0]
    rows, limit = table[table["rollout"] == sample.rollout], np.quantile(table["delta"].abs(), 0.98)
    assert [token.css[2] for token in sample.tokens if token.css != "d-0"] == [
        "p" if d > 0 else "n" for d in rows["delta"] if abs(d) > 1e-10 * limit
    ]


def test_every_chart_has_help_a_definition_and_a_door_in_the_notebook(page, run_dir):
    text = Elements(page).text
    for chart in (chart for chart in CHARTS if chart.section != "turns"):  # test_turns has those
        assert chart.help in text and chart.definition in text
        drawn = getattr(plot, chart.name)(run_dir)
        assert drawn.layout.title.text == chart.title
    assert set(plot.names()) == {chart.name for chart in CHARTS} <= set(dir(plot))
    with pytest.raises(AttributeError, match="has no chart 'acuracy'"):
        plot.acuracy  # noqa: B018
    with pytest.raises(ValueError, match="unknown chart 'x'"):
        plot.chart("x", run_dir)


def test_the_page_runs_only_scripts_of_its_policy_and_loads_nothing(page):
    found = Elements(page)
    (policy,) = [
        attrs["content"] or ""
        for tag, attrs in found.tags
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "unsafe" not in policy and "http" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for kind, text in found.inside:
        if kind in ("script", "style"):
            assert digest(text) in policy
    for tag, attrs in found.tags:
        assert not {"src", "srcdoc", "action", "style"} & set(attrs), (tag, attrs)
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        assert (attrs.get("href") or "#").startswith("#")


def test_hostile_text_stays_text(hostile_dir, run_dir):
    page, plain = (render(content([open_run(path)])) for path in (hostile_dir, run_dir))
    hostile, clean = Elements(page), Elements(plain)
    # the same page skeleton: no tag, no script more than the ones that text cannot bring
    assert {tag for tag, _ in hostile.tags} == {tag for tag, _ in clean.tags}
    assert [kind for kind, _ in hostile.inside if kind != "data"] == [
        kind for kind, _ in clean.inside if kind != "data"
    ]
    for tag, attrs in hostile.tags:
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
    for kind, text in hostile.inside:
        assert kind != "data" or "<" not in text
    assert not HIDDEN.search(hostile.text)
    assert "<script>window.pwned=1</script>" in hostile.text
    assert "⟨U+202E⟩right to left" in hostile.text


def test_data_of_the_page_cannot_end_its_element():
    hostile = json.dumps(HOSTILE)
    assert "<" in hostile and "<" not in data(hostile)
    assert json.loads(data(hostile)) == HOSTILE


def test_hostile_labels_are_escaped_in_charts(hostile_dir):
    page = render(content([open_run(hostile_dir)]))
    labels = [x for trace in figure(page, "categories")["data"] for x in trace["x"]]
    assert any("&lt;script&gt;" in label for label in labels)
    assert not any("<" in label for label in labels)


def command(function, *args):
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "220"})


def test_report_command(run_dir, tmp_path):
    done = command(report, run_dir, "--out", tmp_path / "page.html", "--json")
    assert json.loads(done.stdout) == {
        "page": str(tmp_path / "page.html"),
        "problems": [],
        "absent": {"learning": [], "signals": [], "plan": [], "credit": [], "ledger": []},
    }
    assert "counterpoise view" in command(report, run_dir).stdout


def test_compare_command(tmp_path):
    small = {"num_batches": 2, "prompts": 2, "group_size": 4, "ledger_every": 0, "eval_every": 1}
    paths = [
        make_run(tmp_path / f"{name}-{seed}", method=name, seed=seed, **small)
        for name in ("grpo", HOSTILE[5], HOSTILE[9])
        for seed in (0, 1)
    ]
    done = command(compare, *paths, "--baseline", "grpo", "--json")
    found = json.loads(done.stdout)
    assert [group["seeds"] for group in found["groups"]] == [2, 2, 2]
    finals = [
        json.loads((path / "evals.jsonl").read_text().splitlines()[-1])["eval/accuracy"]
        for path in paths[:2]
    ]
    assert found["groups"][0]["final"][0] == pytest.approx(np.mean(finals))
    assert found["threshold"] == pytest.approx(np.mean(finals))
    shown = command(compare, *paths, "--no-page").stdout
    assert "\x1b[31m" not in shown and "\x07" not in shown
    assert "⟨U+001B⟩[31mred" in shown
    assert "[bold red]markup[/bold red] :boom:" in shown
    assert "within noise" in shown or "better" in shown or "worse" in shown


def test_errors_print_no_escapes_of_the_files(tmp_path, capsys, monkeypatch):
    """The whole way through the program: labels and columns of somebody's files in one line on
    stderr.
    """
    from counterpoise.cli import main

    small = {"num_batches": 1, "prompts": 1, "group_size": 2, "ledger_every": 0, "eval_every": 1}
    paths = [
        make_run(tmp_path / f"{k}", method=name, **small)
        for k, name in enumerate((HOSTILE[5], HOSTILE[6]))
    ]
    pd.DataFrame({HOSTILE[5]: [1], "prompt": ["x"]}).to_parquet(tmp_path / "c.parquet")
    for args in (
        ["compare", *map(str, paths), "--baseline", "nothing"],
        ["import", "trl", str(tmp_path / "c.parquet"), "--out", str(tmp_path / "out")],
    ):
        monkeypatch.setattr("sys.argv", ["counterpoise", *args])
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr().err
        assert stopped.value.code == 2 and "⟨U+001B⟩[31mred" in shown
        assert not HIDDEN.search(shown.strip())


@pytest.mark.parametrize("page", [report, compare])
def test_out_is_a_folder_or_a_file_in_html(page, run_dir, tmp_path):
    (tmp_path / "there").mkdir()
    for name, file in (
        ("there", "there/index.html"),
        ("new", "new/index.html"),
        ("a.html", "a.html"),
    ):
        result = command(page, run_dir, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert (tmp_path / file).is_file() and f"Open {tmp_path / file}" in result.output
    (tmp_path / "plain").write_text("")
    (tmp_path / "b.html").mkdir()
    for name, message in (("plain", "is a file, expected a folder"), ("b.html", "is a folder")):
        wrong = command(page, run_dir, "--out", tmp_path / name)
        assert isinstance(wrong.exception, ValueError) and message in str(wrong.exception)


def test_compare_leaves_the_report_of_a_run_and_says_what_it_replaces(tmp_path):
    run = make_run(tmp_path / "runs" / "one", **SMALL)
    path, _ = write_report([run])
    own = path.read_bytes()
    first, second = (command(compare, run).output for _ in range(2))
    assert path.read_bytes() == own
    assert f"Open {tmp_path / 'runs' / 'report' / 'index.html'}" in first
    assert "replaces" not in first and "replaces the page that was there" in second


def test_view_command_exports(run_dir, tmp_path):
    done = command(view, run_dir, "--export", tmp_path / "out", "--batch", 2, "--prompts", 1)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "index.html").is_file()
    wrong = command(view, run_dir, "--batch", 2)
    assert isinstance(wrong.exception, ValueError) and "go with --export" in str(wrong.exception)


def test_import_command(tmp_path):
    row = {
        "step": 0,
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "advantages": [0.0, 1.0, 1.0],
        "rewards": [1.0] * 3,
    }
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(row) + "\n")
    done = command(import_, "prime-rl", tmp_path / "rank_0.jsonl", "--out", tmp_path / "run")
    assert "1 rollouts of 1 batch(es)" in done.stdout
    assert pd.read_parquet(tmp_path / "run" / "tokens" / "batch_000000.parquet")[
        "token_id"
    ].tolist() == [2, 3]
