"""Numbers of the report: intervals against scipy, comparisons by hand, token numbers against loops
over the table.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats as scipy_stats

from counterpoise.maths import intervals as stats
from counterpoise.report import tokens as token_numbers
from counterpoise.report.compare import comparison
from counterpoise.report.runs import curve, eval_curve, group_runs, is_share
from counterpoise.run.read import open_run
from counterpoise.text import number, visible, with_interval
from helpers.make_run import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made = [
        ("grpo", 0, 0.3),
        ("grpo", 1, 0.3),
        ("grpo", 2, 0.3),
        ("delta", 0, 1.6),
        ("delta", 1, 1.6),
        ("delta", 2, 1.6),
    ]
    settings = {"num_batches": 4, "prompts": 2, "group_size": 4, "ledger_every": 2, "eval_every": 2}
    return [
        open_run(
            make_run(root / f"{method}-{seed}", method=method, seed=seed, gain=gain, **settings)
        )
        for method, seed, gain in made
    ]


@pytest.fixture(scope="module")
def tokens(runs):
    found = token_numbers.tokens_of(runs[3])
    assert found is not None
    return found[1]


@pytest.mark.parametrize("value", [[0.5, 0.6], [0.5, 0.6, 0.7], list(np.linspace(0, 1, 12))])
def test_over_seeds_is_students_interval(value):
    got = stats.over_seeds(value)
    low, high = scipy_stats.t.interval(
        0.95, len(value) - 1, loc=np.mean(value), scale=scipy_stats.sem(value)
    )
    assert got == pytest.approx((np.mean(value), low, high), rel=1e-3)


def test_one_seed_has_no_interval():
    assert stats.over_seeds([0.4])[0] == 0.4
    assert all(math.isnan(bound) for bound in stats.over_seeds([0.4])[1:])
    assert all(math.isnan(bound) for bound in stats.over_seeds([]))


def test_welch_is_scipys():
    a, b = [0.5, 0.52, 0.57, 0.49], [0.6, 0.66, 0.61]
    want = scipy_stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert stats.welch(a, b)[1:] == pytest.approx((want.low, want.high))


def test_clusters_widen_an_interval():
    # four prompts of 50 equal tokens each: only four independent values, so the interval is that of
    # four
    value, cluster = np.repeat([0.0, 0.0, 1.0, 1.0], 50), np.repeat(np.arange(4), 50)
    by_prompt = stats.by_cluster(value, cluster)
    by_token = stats.by_cluster(value, np.arange(200))
    assert by_prompt.mean == by_token.mean == 0.5
    assert by_prompt.high - by_prompt.low > 3 * (by_token.high - by_token.low)


def test_paired_bootstrap_removes_what_prompts_share():
    rng = np.random.default_rng(0)
    difficulty = rng.normal(0, 1, 200)
    a, b = difficulty + 0.05 * rng.normal(size=200), difficulty + 0.1 + 0.05 * rng.normal(size=200)
    paired, unpaired = stats.paired_bootstrap(a, b), stats.paired_bootstrap(a, b[:-1])
    assert paired.is_paired and paired.difference.low > 0
    assert not unpaired.is_paired and unpaired.difference.low < 0 < unpaired.difference.high
    assert paired.difference.mean == pytest.approx(b.mean() - a.mean())


def test_runs_group_by_configuration_over_seeds(runs):
    groups = group_runs(runs)
    assert [(group.label, len(group.runs)) for group in groups] == [("grpo", 3), ("delta", 3)]


def test_runs_that_differ_by_what_is_written_or_how_a_step_is_cut_are_one_method(tmp_path):
    small = {"num_batches": 1, "prompts": 1, "group_size": 2, "eval_every": 0}
    paths = [make_run(tmp_path / f"{k}", seed=k, ledger_every=k, **small) for k in range(2)]
    config = yaml.safe_load((paths[1] / "config.yaml").read_text())
    config["optimizer"]["token_budget"] = 4096
    (paths[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert [
        (group.label, len(group.runs)) for group in group_runs([open_run(path) for path in paths])
    ] == [("delta", 2)]


def test_labels_name_what_sets_equal_methods_apart(tmp_path):
    small = {"num_batches": 1, "prompts": 1, "group_size": 2, "ledger_every": 0, "eval_every": 0}
    paths = [
        make_run(tmp_path / f"{k}", lr=lr, seed=k, **small)
        for k, lr in enumerate((1e-5, 1e-5, 3e-5))
    ]
    labels = [group.label for group in group_runs([open_run(path) for path in paths])]
    assert labels == ["delta · optimizer.lr=1e-05", "delta · optimizer.lr=3e-05"]


def test_a_curve_is_the_file(runs):
    rows = [json.loads(line) for line in (runs[0].path / "metrics.jsonl").read_text().splitlines()]
    got = curve(group_runs(runs[:1])[0], "reward/mean")
    assert got is not None and got.interval == ""
    assert got.mean.tolist() == [row["reward/mean"] for row in rows]
    assert got.batch.tolist() == [row["batch"] for row in rows]


def test_an_evaluation_keeps_its_own_interval_alone_and_students_over_seeds(runs):
    rows = [json.loads(line) for line in (runs[0].path / "evals.jsonl").read_text().splitlines()]
    one = eval_curve(group_runs(runs[:1])[0])
    assert one is not None and one.interval == "own"
    assert one.low.tolist() == [row["eval/accuracy_low"] for row in rows]
    three = eval_curve(group_runs(runs[:3])[0])
    assert three is not None and three.interval == "seeds"
    assert three.mean[-1] == pytest.approx(
        np.mean([run.evals[-1]["eval/accuracy"] for run in runs[:3]])
    )


def test_flip_rates_are_those_of_a_loop(runs, tokens):
    table = pd.read_parquet(runs[3].path / "tokens" / "batch_000002.parquet")
    for row in token_numbers.flip_rates(tokens):
        flips = [
            flip
            for flip, sign in zip(table["is_flip"], table["sign"])
            if sign == (1 if row.label == "positive" else -1)
        ]
        assert row.count == len(flips)
        if flips:
            assert row.value.mean == pytest.approx(sum(flips) / len(flips))


def test_category_mass_adds_up_to_one(tokens):
    for rows in token_numbers.category_mass(tokens).values():
        if any(row.count for row in rows):
            assert sum(row.value.mean for row in rows) == pytest.approx(1.0)


def test_cancellation_by_sharing_covers_every_token(tokens):
    rows = token_numbers.cancellation_by_sharing(tokens)
    assert sum(row.count for row in rows) == len(tokens)
    whole = sum(row.count * row.value.mean for row in rows if row.count) / len(tokens)
    assert whole == pytest.approx(tokens["cancellation"].mean())


def test_top_tokens_are_sums_of_credit(tokens):
    up, down = token_numbers.top_tokens(tokens)
    for token in [*up, *down]:
        rows = tokens[tokens["text"] == token.text]
        assert token.credit == pytest.approx(rows["credit"].sum())
        assert token.count == len(rows)
    assert [token.credit for token in up] == sorted((token.credit for token in up), reverse=True)


def test_a_sum_of_credit_that_is_rounding_pushes_no_token():
    """Every rollout ends in the stop token: its credits are the advantages, which add up to 0."""
    credit = [0.7, -0.7, 1e-8, 0.5]
    text = ["<eos>", "<eos>", "<eos>", "plus"]
    frame = pd.DataFrame({"text": text, "credit": credit, "group": [0, 0, 0, 0]})
    up, down = token_numbers.top_tokens(frame)
    assert [token.text for token in up] == ["plus"] and down == []


def test_shares_are_known_by_their_keys():
    assert all(map(is_share, ("plan/pairs_kept", "success/frac", "loss/clipped_frac")))
    assert not is_share("rollouts/num_tokens")


def test_comparison_tells_better_from_noise(runs):
    found = comparison(group_runs(runs), threshold=0.5)
    grpo, delta = found.lines
    assert grpo.verdict == "baseline" and delta.verdict == "better"
    finals = [run.evals[-1]["eval/accuracy"] for run in runs[3:]]
    assert delta.final.mean == pytest.approx(np.mean(finals))
    assert delta.difference is not None
    assert delta.difference.mean == pytest.approx(np.mean(finals) - grpo.final.mean)
    within = comparison(group_runs([*runs[:2], runs[2]])[:1] + group_runs([runs[2]]), threshold=0.5)
    assert "one seed" in within.lines[1].verdict


def test_one_seed_never_passes_for_certain(runs):
    verdict = comparison(group_runs([runs[0], runs[3]])).lines[1].verdict
    assert "one seed" in verdict
    assert (
        comparison(group_runs([runs[0], runs[3]]), metric="reward/mean").lines[1].verdict
        == "one run: no interval"
    )


def test_steps_and_tokens_to_a_threshold(runs):
    run = runs[3]
    threshold = run.evals[1]["eval/accuracy"]
    reach = comparison(group_runs([run, runs[0]]), threshold=threshold).lines[0].reach
    want = next(row["batch"] for row in run.evals if row["eval/accuracy"] >= threshold)
    assert reach.batches.mean == want
    assert (
        reach.tokens.mean == run.metrics["rollouts/num_tokens"][run.metrics["batch"] < want].sum()
    )
    assert comparison(group_runs([run, runs[0]]), threshold=2.0).lines[0].reach.reached == 0


def test_comparison_names_what_it_lacks(runs):
    with pytest.raises(ValueError, match="no group 'detla'. Did you mean 'delta'"):
        comparison(group_runs(runs), baseline="detla")
    with pytest.raises(ValueError, match="no run has 'loss/nothing'"):
        comparison(group_runs(runs), metric="loss/nothing")
    with pytest.raises(ValueError, match="no run has 'reward/meen'. Did you mean 'reward/mean'"):
        comparison(group_runs(runs), metric="reward/meen")


def test_a_run_without_a_batch_has_nothing_to_compare(tmp_path):
    (tmp_path / "manifest.json").write_text('{"schema_version": 3}')
    with pytest.raises(ValueError, match="no run has a line in metrics.jsonl"):
        comparison(group_runs([open_run(tmp_path)]))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a\nb", "a⏎b"),
        ("\x1b[0m", "⟨U+001B⟩[0m"),
        ("\u202e", "⟨U+202E⟩"),
        ("\x00", "⟨U+0000⟩"),
        (" x", " x"),
        (None, ""),
        ("é字", "é字"),
    ],
)
def test_visible(text, want):
    assert visible(text) == want


def test_numbers_for_people():
    assert with_interval(0.5, 0.4, 0.61234) == "0.500 [0.400, 0.612]"
    assert with_interval(0.5, math.nan, math.nan) == "0.500"
    assert number(6.7e-16) == "0"
    assert number(0.00163) == "0.00163"
