"""Results survive a kill: a line is whole or left out, and the last of repeats holds."""

from __future__ import annotations

import pytest

from counterpoise.arena.results import Run, append_result, finished, read_activity, read_results


def row(batch, **values):
    return {"arm": "grpo", "lr": 1e-4, "seed": 100, "batch": batch, **values}


def test_a_row_comes_back_without_what_is_not_a_number(tmp_path):
    append_result(tmp_path, row(0, sampled=0.4, train_reward=None, entropy=float("nan")))
    (one,) = read_results(tmp_path)
    assert one.run == Run("grpo", 1e-4, 100)
    assert (one.batch, one.values, one.stopped) == (0, {"sampled": 0.4}, "")


def test_a_kill_in_the_middle_of_a_line_costs_that_line_alone(tmp_path):
    append_result(tmp_path, row(0, sampled=0.4))
    append_result(tmp_path, row(30, sampled=0.5))
    whole = (tmp_path / "results.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        (tmp_path / "results.jsonl").write_bytes(whole[:cut])
        assert [one.batch for one in read_results(tmp_path)] == [0]
        append_result(tmp_path, row(60, sampled=0.6))
        assert [one.batch for one in read_results(tmp_path)] == [0, 60]


def test_the_last_of_repeated_lines_holds(tmp_path):
    append_result(tmp_path, row(30, sampled=0.5))
    append_result(tmp_path, row(0, sampled=0.4))
    append_result(tmp_path, row(30, sampled=0.7))
    assert {one.batch: one.values["sampled"] for one in read_results(tmp_path)} == {30: 0.7, 0: 0.4}


def test_runs_finish_at_the_last_evaluation_or_where_they_stop(tmp_path):
    append_result(tmp_path, row(0, sampled=0.4))
    assert finished(read_results(tmp_path), 60) == set()
    append_result(tmp_path, row(60, sampled=0.6))
    append_result(tmp_path, row(12, stopped="the loss is not finite") | {"seed": 101})
    both = {Run("grpo", 1e-4, 100), Run("grpo", 1e-4, 101)}
    assert finished(read_results(tmp_path), 60) == both
    assert {one.stopped for one in read_results(tmp_path)} == {"", "the loss is not finite"}


def test_a_row_that_names_no_run_is_refused_and_left_out(tmp_path):
    with pytest.raises(ValueError, match="a result needs arm, lr, seed, batch"):
        append_result(tmp_path, {"arm": "grpo", "seed": 1, "batch": 0})
    append_result(tmp_path, row(0, sampled=0.4))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"arm": "grpo"}\nnonsense\n')
    problems: list[str] = []
    assert len(read_results(tmp_path, problems)) == 1
    assert len(problems) == 2


def test_activity_is_a_mean_over_batches_that_have_one(tmp_path):
    assert read_activity(tmp_path) == {}
    (tmp_path / "activity.json").write_text(
        '{"batches": 3, "arms": {"delta": {"control": "grpo", "cosine": [0.9, null, 0.7]}}}'
    )
    activity = read_activity(tmp_path)["delta"]
    assert activity.control == "grpo"
    assert activity.mean == pytest.approx(0.8)
