"""A whole arena: from a design to results, through kills and a lack of memory."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from counterpoise.arena import race as module
from counterpoise.arena import serial, shared, stacked
from counterpoise.arena.at_once import _heard, each
from counterpoise.arena.crew import Crew
from counterpoise.arena.design import Arm, Design, read_design, write_design
from counterpoise.arena.live import Live
from counterpoise.arena.page import write_page
from counterpoise.arena.race import race
from counterpoise.arena.results import Result, Run, read_activity, read_results
from counterpoise.cli import dispatch
from counterpoise.errors import ConfigError
from counterpoise.policy import Policy
from counterpoise.run.own import lock_run
from counterpoise.trainer import loop
from counterpoise.trainer.config import Config, load_config

RECIPE = {
    "model": "bundled",
    "device": "cpu",
    "task": {"name": "arithmetic", "difficulty": "easy"},
    "rollouts": {"prompts": 2, "group_size": 4, "max_new_tokens": 48},
    "optimizer": {"updates_per_batch": 1},
    "ledger": {"every": 0},
    "trackers": [],
}


def design(**changes: object) -> Design:
    fields: dict[str, object] = {
        "recipe": RECIPE,
        "arms": (
            Arm("grpo", {"method": {"name": "grpo"}}),
            Arm("fade", {"method": {"name": "fade"}}),
            Arm("grpo again", repeats="grpo"),
        ),
        "control": "grpo",
        "rates": (1e-4,),
        "equal_rate": None,
        "seeds": (100, 101),
        "tuning_seeds": (),
        "margin": 0.01,
        "evaluations": (0, 1, 3),
        "eval": {"prompts": 4, "samples": 2},
    }
    return Design(**{**fields, **changes})  # type: ignore[arg-type]


def run(out: Path, what: Design, **settings: int) -> dict[tuple[object, ...], Result]:
    out.mkdir(exist_ok=True)
    write_design(out, what)
    race(what, out, Live(quiet=True), **{"jobs": 1, **settings})
    return {(one.run, one.batch): one for one in read_results(out)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[object, ...], Result]:
    return run(tmp_path_factory.mktemp("whole") / "arena", design(), size=8)


def test_every_run_has_every_evaluation(whole: dict[tuple[object, ...], Result]) -> None:
    assert len(whole) == 6 * 3
    assert not any(one.stopped for one in whole.values())
    assert {"sampled", "greedy", "pass@2", "entropy", "length"} <= set(
        next(iter(whole.values())).values
    )
    seeds = {run.arm: set() for run, _ in whole}
    for one, _ in whole:
        seeds[one.arm].add(one.seed)
    assert seeds["grpo"] == seeds["fade"] and not seeds["grpo"] & seeds["grpo again"]


class Killed(BaseException):
    """As ``kill -9``: nothing can be tidied up."""


def test_an_arena_that_is_killed_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[tuple[object, ...], Result]
) -> None:
    monkeypatch.setattr(stacked, "KEEP_S", -1.0)
    real, calls = stacked.train_batch, []

    def train_batch(*args: object) -> object:
        calls.append(args[2])
        if len(calls) in (4, 7, 11):  # in stacks of 4 and 2 members, 6 batches each
            raise Killed
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stacked, "train_batch", train_batch)
    out = tmp_path / "arena"
    for _ in range(3):
        with pytest.raises(Killed):
            run(out, design(evaluations=(0, 1, 6)), size=4)
        assert list((out / "state").glob("*/*/members.json"))
    results = run(out, design(evaluations=(0, 1, 6)), size=4)
    monkeypatch.undo()
    assert [calls[at : at + 2] for at in (3, 6, 10)] == [[3, 3], [5, 5], [2, 2]]
    assert len(calls) == 2 * 6 + 3  # no batch was trained twice
    assert not list((out / "state").glob("*"))
    plain = run(tmp_path / "plain", design(evaluations=(0, 1, 6)), size=4)
    assert {k: v.values for k, v in results.items()} == {k: v.values for k, v in plain.items()}


def test_without_memory_the_stack_is_cut_in_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[tuple[object, ...], Result]
) -> None:
    real, sizes = stacked.train_batch, []

    def train_batch(bench, members, number):
        sizes.append(len(members))
        if len(members) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(bench, members, number)

    monkeypatch.setattr(stacked, "train_batch", train_batch)
    results = run(tmp_path / "arena", design(), size=8)
    assert set(sizes) == {6, 3, 2, 1}
    for key, one in whole.items():
        assert results[key].values == pytest.approx(one.values, abs=0.02)


def test_two_stacks_at_a_time_are_the_same_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two members each: three stacks, two processes; workers of their own."""
    plan, heard = design(evaluations=(0, 1, 2)), io.StringIO()
    settings = {"size": 2, "num_workers": 2}
    one = run(tmp_path / "one", plan, **settings)
    live, crews = Live(console=Console(file=heard)), []

    def crew_of(*args: Any) -> Crew:
        crews.append(Crew(*args))
        return crews[-1]

    monkeypatch.setattr(shared, "Crew", crew_of)
    race(plan, tmp_path / "two", live, jobs=2, **settings)
    two = {(r.run, r.batch): r for r in read_results(tmp_path / "two")}
    assert {(r.run, r.batch): r.values for r in one.values()} == {
        key: result.values for key, result in two.items()
    }
    assert (live.runs, live.steps) == (6, 12)  # the one line counts what both did
    assert len(crews) == 1 and not crews[0].folder.exists()  # nothing is left in memory


def test_an_error_in_one_of_two_stacks_at_a_time_is_the_arenas() -> None:
    notes: queue.Queue[tuple[str, int | str]] = queue.Queue()
    notes.put(("step", 64))
    fine, broken = Future(), Future()
    fine.set_result(None)
    broken.set_exception(ConfigError("no such task"))
    heard = _heard([fine, broken], notes)  # type: ignore[arg-type]
    assert next(heard) == ("step", 64)  # what was said before counts
    with pytest.raises(ConfigError, match="no such task"):
        next(heard)


def test_activity_of_several_processes_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("psr", "nsr", "dr_grpo")
    own = Arm("own", {"method": {"name": "delta"}}, control="psr")
    arms = (*design().arms, *(Arm(name, {"method": {"name": name}}) for name in names), own)
    plan, found = design(arms=arms, evaluations=(2,)), []
    monkeypatch.setattr(module, "run_all", lambda *args: None)  # the activity alone
    monkeypatch.setattr(module, "LEAST_ARMS", 2)
    parts: list[int] = []
    monkeypatch.setattr(
        module,
        "each",
        lambda arena, work, items: parts.append(len(items)) or each(arena, work, items),
    )
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        run(out, plan, size=8, jobs=jobs)
        found.append(read_activity(out))
    assert parts == [2, 3]  # two controls; with two processes the arms of one are cut in two
    one, two = found
    assert one.keys() == two.keys() == {"fade", *names, "own"}
    for name in one:
        assert two[name].mean == pytest.approx(one[name].mean, abs=1e-3)


def test_the_a_a_floor_and_activity(tmp_path: Path) -> None:
    twin = Arm("twin", {"method": {"name": "grpo", "success": 0.25}})
    arms = (*design().arms, twin, Arm("psr", {"method": {"name": "psr"}}))
    run(tmp_path / "arena", design(arms=arms, evaluations=(4,)), size=8)
    cosine = read_activity(tmp_path / "arena")
    assert cosine["twin"].mean == pytest.approx(1.0, abs=1e-3)
    assert cosine["psr"].mean < 0.99
    _, summary = write_page(tmp_path / "arena")
    verdicts = {row.arm: row.verdict.words for row in summary.final.rows}
    assert "inactive" in verdicts["twin"]


def test_without_memory_activity_is_measured_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = (*design().arms, *(Arm(n, {"method": {"name": n}}) for n in ("psr", "nsr", "dr_grpo")))
    plan, real, sizes = design(arms=arms, evaluations=(1,)), module.cosines, []
    run(tmp_path / "whole", plan, size=8)

    def cosines(bench, members, *rest):
        sizes.append(len(members))
        if len(members) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(bench, members, *rest)

    monkeypatch.setattr(module, "cosines", cosines)
    run(tmp_path / "parts", plan, size=8)
    assert sizes == [5, 3, 2, 2, 3, 2, 2]  # the control is in each
    whole, parts = (read_activity(tmp_path / name) for name in ("whole", "parts"))
    assert parts.keys() == whole.keys() == {"fade", "psr", "nsr", "dr_grpo"}
    for name, one in whole.items():
        assert parts[name].mean == pytest.approx(one.mean, abs=1e-3)


def test_activity_by_turns_is_that_of_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("psr", "delta", "dapo", "vimpo", "oar")
    arms = (*design().arms, *(Arm(name, {"method": {"name": name}}) for name in names))
    recipe = {**RECIPE, "optimizer": {"updates_per_batch": 2, "warmup": 2}}
    plan = design(recipe=recipe, arms=arms, evaluations=(3,))
    run(tmp_path / "stacked", plan, size=8)
    monkeypatch.setattr(shared, "LARGE", 1)
    monkeypatch.setattr(module, "train_apart", lambda *_: None)
    run(tmp_path / "apart", plan)
    stacked, apart = (read_activity(tmp_path / name) for name in ("stacked", "apart"))
    assert apart.keys() == stacked.keys() == {"fade", *names}
    for name, one in stacked.items():
        assert len(one.cosine) == 3
        assert apart[name].cosine == pytest.approx(one.cosine, abs=2e-3)
    assert min(min(one.cosine) for one in apart.values()) < 0.9


def test_on_a_cpu_runs_are_separate_and_their_activity_is_that_of_a_stack(
    whole: dict[tuple[object, ...], Result], tmp_path: Path
) -> None:
    """A stack is slower there. Until the first update all is the same to the last digit."""
    results = run(tmp_path / "arena", design())
    assert set(results) == set(whole)
    assert len(list((tmp_path / "arena" / "runs").iterdir())) == 6
    for key, one in results.items():
        assert one.values["num_updates"] == whole[key].values["num_updates"]
        if key[1] == 0:
            assert one.values["sampled"] == whole[key].values["sampled"]
    assert len(read_activity(tmp_path / "arena")["fade"].cosine) == 3  # not the first five of more


def test_runs_that_fit_are_not_stopped_by_their_activity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(shared, "LARGE", 1)
    monkeypatch.setattr(module, "cosines_apart", too_much)
    results = run(tmp_path / "arena", design(evaluations=(1,)))
    assert {one.arm for one, _ in results} == {"grpo", "fade", "grpo again"}
    assert read_activity(tmp_path / "arena")["fade"].cosine == []


def test_a_method_that_samples_more_or_has_a_teacher_trains_alone(tmp_path: Path) -> None:
    arms = (
        Arm("grpo", {"method": {"name": "grpo"}}),
        Arm(
            "filled",
            {
                "method": {
                    "name": "grpo",
                    "plan": {"name": "reward_balanced", "mode": "buffer", "max_rounds": 2},
                }
            },
        ),
        Arm("taught", {"method": {"name": "sdpo"}}),
    )
    results = run(tmp_path / "arena", design(arms=arms, evaluations=(0, 1)), size=8)
    assert {run.arm for run, _ in results} == {"grpo", "filled", "taught"}
    assert (tmp_path / "arena" / "runs").is_dir()
    starts = {one.values["sampled"] for (run, batch), one in results.items() if batch == 0}
    assert len(starts) == 1


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_moments_of_8_bits_train_alone(tmp_path: Path) -> None:
    """A stack has float32 moments of its own: an arm with others is never one of its members."""
    arms = (
        Arm("grpo", {"method": {"name": "grpo"}}),
        Arm("small", {"method": {"name": "grpo"}, "optimizer": {"moments": "8bit"}}),
    )
    results = run(tmp_path / "arena", design(arms=arms, evaluations=(0, 1)), size=8)
    assert {run.arm for run, _ in results} == {"grpo", "small"}
    configs = [load_config(file) for file in (tmp_path / "arena" / "runs").rglob("config.yaml")]
    assert [one.optimizer.moments for one in configs] == ["8bit"] * 2


def test_a_large_model_trains_alone_and_its_start_is_scored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, score = [], serial.scores

    def counted(plan: Design, config: Config, policy: Policy) -> dict[str, float]:
        scored.append(config.seed)
        return score(plan, config, policy)

    monkeypatch.setattr(shared, "LARGE", 1)
    monkeypatch.setattr(serial, "scores", counted)
    results = run(tmp_path / "arena", design(evaluations=(0, 1)))
    order = [run.arm for run, batch in results if batch == 1]
    assert order == ["grpo", "fade", "grpo again"] * 2  # cut off anywhere, no arm is far behind
    num_runs = len({run for run, _ in results})
    assert num_runs > 2 and len(scored) == num_runs + 1
    starts = [one.values for (_, batch), one in results.items() if batch == 0]
    assert starts == [starts[0]] * num_runs
    folders = list((tmp_path / "arena" / "runs").iterdir())
    assert len(folders) == num_runs
    assert all((f / "metrics.jsonl").is_file() for f in folders)
    assert not any((f / "checkpoints").exists() for f in folders)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arms.yaml").write_text("slow: {optimizer: {betas: [0.0, 0.999]}}\n")
    small = ("num_batches=1", "rollouts.prompts=2", "rollouts.max_new_tokens=16", "device=cpu")
    words = ["arena", "--methods", "grpo", "delta", "--arms", "arms.yaml", "--seeds", "2"]
    words += ["--prompts", "4", "--samples", "2", "--evaluations", "1"]
    words += [word for text in small for word in ("--set", text)]
    whole = ["{name: dapo, plan: query_preserved}", "--set", "optimizer.updates_per_batch=4"]
    mute = ["oar", "--set", "task={name: helpers.fussy:Fussy}"]
    lost = ["{name: top_d, credit: {model: runs/teacher}}"]
    (tmp_path / "runs/teacher").mkdir(parents=True)
    unfit = (
        (whole, "4 updates need at least 4 prompts"),
        (mute, "where an answer begins"),
        (lost, "model 'runs/teacher': give a folder written by save_pretrained"),
    )
    for more, message in unfit:
        with pytest.raises(SystemExit, match="^2$"):  # ends before anything has run
            dispatch([*words, "--methods", *more])
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit) as end:
        dispatch(words)
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "grpo again" in text and "delta" in text and "page: runs/arena-arena/index.html" in text
    summary = json.loads((tmp_path / "runs/arena-arena/summary.json").read_text())
    assert summary["control"] == "grpo"
    with pytest.raises(SystemExit) as end:
        dispatch([*words, "--margin", "0.5"])
    assert end.value.code == 2
    assert "another design" in capsys.readouterr().err


GAME = {
    "model": "bundled_turns",
    "chat": False,
    "device": "cpu",
    "task": {"name": "guess", "n": 8, "turns": 2},
    "num_batches": 1,
    "ledger": {"every": 0},
    "trackers": [],
    "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 8, "max_turns": 2},
}


def test_evaluations_on_the_way_change_no_run_that_trains_alone(tmp_path: Path) -> None:
    """Not with a rate that falls until the last batch either."""
    falling = {**GAME, "num_batches": 3, "optimizer": {"schedule": "linear", "lr": 1e-3}}
    arms = (Arm("turn_rloo", {"method": {"name": "turn_rloo"}}),)
    plan = design(recipe=falling, arms=arms, control="turn_rloo", rates=(1e-3,))
    stepped = run(tmp_path / "stepped", plan)
    straight = run(tmp_path / "straight", dataclasses.replace(plan, evaluations=(3,)))
    assert sorted({batch for _, batch in stepped}) == [0, 1, 3]
    assert len(straight) == 2
    for key, result in straight.items():
        names = set(result.values) - {"train_reward"}
        assert {n: stepped[key].values[n] for n in names} == {n: result.values[n] for n in names}


def test_a_run_that_is_stopped_on_request_has_no_result_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def stopped(note: object) -> Iterator[list[int]]:
        yield [2]

    monkeypatch.setattr(loop, "stop_requests", stopped)
    arms = (Arm("turn_rloo", {"method": {"name": "turn_rloo"}}),)
    plan = design(recipe=GAME, arms=arms, control="turn_rloo", evaluations=(0, 1))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "arena", plan)
    assert [one.batch for one in read_results(tmp_path / "arena")] == [0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_another_process_has_is_no_result(jobs: int, tmp_path: Path) -> None:
    plan, folder = design(evaluations=(1,)), tmp_path / "arena" / "runs" / "grpo-0.0001-100"
    with lock_run(folder), pytest.raises(ConfigError, match="in use by process .* another --out"):
        run(tmp_path / "arena", plan, jobs=jobs)
    assert Run("grpo", 1e-4, 100) not in {one.run for one in read_results(tmp_path / "arena")}


def test_an_interrupted_arena_has_a_page_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "race", stop)
    with pytest.raises(SystemExit, match="130"):
        dispatch(["arena", "--out", str(tmp_path / "arena")])
    page = tmp_path / "arena" / "index.html"
    assert f"what there is: {page}" in capsys.readouterr().err and "grpo" in page.read_text()


def test_a_design_that_was_written_down_runs_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = {"seeds": (7, 9), "evaluations": (1,)}  # no option of the command makes these
    plan = design(arms=(*design().arms[:1], Arm("again", repeats="grpo", seeds=(3, 5))), **seeds)
    written = tmp_path / "plan"
    written.mkdir()
    write_design(written, plan)
    out = tmp_path / "arena"
    with pytest.raises(SystemExit, match="0"):
        dispatch(
            ["arena", "--design", str(written / "design.json"), "--out", str(out), "--jobs", "1"]
        )
    assert read_design(out) == plan
    assert {(one.run.arm, one.run.seed) for one in read_results(out)} == {
        *(("grpo", 7), ("grpo", 9), ("again", 3), ("again", 5))
    }
    for more, named in ((["demo"], "a recipe"), (["--margin", "0.02"], "--margin")):
        with pytest.raises(SystemExit, match="2"):
            dispatch(["arena", *more, "--design", str(written), "--out", str(out)])
        assert f"says what runs, and so would {named}." in capsys.readouterr().err


def test_runs_with_an_environment_train_several_at_a_time(tmp_path: Path) -> None:
    arms = (
        Arm("turn_rloo", {"method": {"name": "turn_rloo"}}),
        Arm("fast", {"method": {"name": "turn_rloo"}, "optimizer": {"betas": [0.0, 0.9]}}),
    )
    plan = design(recipe=GAME, arms=arms, control="turn_rloo", evaluations=(1,))
    one = run(tmp_path / "one", plan)
    two = run(tmp_path / "two", plan, jobs=2)
    assert len(one) == 4
    assert {key: result.values for key, result in two.items()} == {
        key: result.values for key, result in one.items()
    }


PARENT = """
import multiprocessing, time
from counterpoise.arena.crew import end_with_parent
def child():
    end_with_parent()
    print("begun", flush=True)
    time.sleep(600)
if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=child)
    process.start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_end_with_an_arena_that_is_killed(method: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(method=method))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    parent.kill()
    parent.communicate(timeout=60)  # the child has the other end too: this waits for its end
