"""``counterpoise audit`` on rows whose plans are known by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterpoise.cli.audit import audit as command
from counterpoise.probes.audit import audit_plans, averages
from counterpoise.run.files import batch_file, write_json, write_table, write_text


def write_run(
    path: Path, *, columns: tuple[str, ...] = ("group", "reward", "token_ids", "advantage")
) -> Path:
    """Two prompts of two rollouts, one good and one bad each; the good ones are short.

    Trained in two batches that part every prompt.
    """
    rows = {
        "group": [0, 0, 1, 1],
        "reward": [1.0, 0.0, 1.0, 0.0],
        "token_ids": [[5], [5, 6, 7], [5, 6], [5, 6, 7, 8]],
        "advantage": [1.0, -1.0, 1.0, -1.0],
    }
    write_table(batch_file(path, "rollouts", 3, ".parquet"), {name: rows[name] for name in columns})
    write_json(batch_file(path, "plan", 3, ".json"), {"rows": [[0, 2], [1, 3]]})
    write_text(path / "config.yaml", "optimizer: {updates_per_batch: 2}\n")
    return path


def test_numbers_of_known_plans(tmp_path: Path) -> None:
    found = audit_plans(write_run(tmp_path))
    assert found["num_updates"] == 2
    (trained,) = found["plans"]["as trained"]
    assert (trained["batch"], trained["pairs_kept"], trained["prompts_split"]) == (3, 0.0, 2)
    assert (
        trained["positive_frac"] == [1.0, 0.0]
        and trained["tokens"] == [3, 7]
        and trained["advantage_sum"] == [2.0, -2.0]
    )
    (whole,) = found["plans"]["whole prompts (query_preserved)"]
    assert (
        whole["pairs_kept"] == 1.0
        and whole["positive_frac"] == [0.5, 0.5]
        and sorted(whole["tokens"]) == [4, 6]
    )
    # lengths 1, 3, 2, 4: sorted rows 0, 2, 1, 3; every second up, the others back: 0, 1 | 3, 2
    (verl,) = found["plans"]["verl: balanced lengths (length_sorted)"]
    assert verl["pairs_kept"] == 1.0 and verl["tokens"] == [4, 6]
    (spread,) = found["plans"]["spread (round_robin)"]
    assert spread["pairs_kept"] == 0.0


def test_file_and_run_agree(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    of_file = audit_plans(run / "rollouts" / "batch_000003.parquet", num_updates=2)
    assert "as trained" not in of_file["plans"]
    for label in ("whole prompts (query_preserved)", "verl: balanced lengths (length_sorted)"):
        (a,), (b,) = of_file["plans"][label], audit_plans(run)["plans"][label]
        assert a["pairs_kept"] == b["pairs_kept"] and sorted(a["tokens"]) == sorted(b["tokens"])


def test_shuffled_rows_meet_by_chance(tmp_path: Path) -> None:
    """64 prompts of 8, half good: two rows of 512 meet in one of 4 equal batches with probability
    127/511.
    """
    num, size = 64, 8
    columns = {
        "group": [p for p in range(num) for _ in range(size)],
        "reward": [float(g % 2) for _ in range(num) for g in range(size)],
        "token_ids": [[1]] * (num * size),
    }
    write_table(tmp_path / "rows.parquet", columns)
    (trl,) = audit_plans(tmp_path / "rows.parquet", num_updates=4)["plans"][
        "TRL: shuffled rows (random_rows)"
    ]
    assert trl["num_pairs"] == 1024 and trl["pairs_kept"] == pytest.approx(127 / 511, abs=0.06)


def test_plan_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    found = audit_plans(write_run(tmp_path), num_updates=4)
    assert (
        "whole prompts (query_preserved)" not in found["plans"]
        and "spread (round_robin)" in found["plans"]
    )
    assert any(
        "4 updates need at least 4 prompts, got 2" in problem for problem in found["problems"]
    )


def test_averages_over_batches() -> None:
    one = {
        "pairs_kept": 1.0,
        "prompts_split_frac": 0.0,
        "num_left_out": 0,
        "positive_frac": [0.2, 0.4],
        "tokens": [3, 9],
    }
    other = {
        "pairs_kept": 0.5,
        "prompts_split_frac": 1.0,
        "num_left_out": 4,
        "positive_frac": [0.6],
        "tokens": [5],
    }
    assert averages([one, other]) == {
        "pairs_kept": 0.75,
        "prompts_split_frac": 0.5,
        "num_left_out": 2.0,
        "positive_frac_min": 0.2,
        "positive_frac_max": 0.6,
        "tokens_min": 3,
        "tokens_max": 9,
    }


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    command(run, json_=True)
    assert json.loads(capsys.readouterr().out)["plans"]["as trained"][0]["pairs_kept"] == 0.0
    command(run)
    shown = capsys.readouterr().out
    assert "as trained" in shown and "TRL: shuffled rows" in shown and "1.00" in shown


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="no column 'reward'. Expected one row per rollout with group, reward, token_ids",
    ):
        audit_plans(write_run(tmp_path / "a", columns=("group", "token_ids")))
    with pytest.raises(ValueError, match="no rollouts of batch 9. There are: 3."):
        audit_plans(write_run(tmp_path / "b"), batch_number=9)
    write_table(tmp_path / "tokens.parquet", {"group": [0], "reward": [1.0], "token_ids": [5]})
    with pytest.raises(
        ValueError, match="'token_ids' holds int64, expected list of integers. Expected one row per"
    ):
        audit_plans(tmp_path / "tokens.parquet")
    (tmp_path / "c.parquet").write_text("no table")
    with pytest.raises(ValueError, match="is not a parquet file"):
        audit_plans(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="neither a rollouts file nor a run folder"):
        audit_plans(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no such run: .*nothing"):
        command(tmp_path / "nothing")
    with pytest.raises(ValueError, match="audit: no such file: .*nothing.parquet"):
        command(tmp_path / "nothing.parquet")
