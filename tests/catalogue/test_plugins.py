"""Methods from outside: ``register_*`` in a process, and an installed package with an
entry point.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import counterpoise as cp
from counterpoise.catalogue.registry import FAMILIES
from counterpoise.losses.token_loss import log_ratio
from counterpoise.stage import Control

PLUGIN = Path(__file__).parents[1] / "helpers" / "plugin"


@pytest.fixture(autouse=True)
def _clean_tables():
    """What a test registers is gone after it."""
    before = {axis: dict(known) for axis, known in FAMILIES.items()}
    yield
    for axis, known in before.items():
        FAMILIES[axis].clear()
        FAMILIES[axis].update(known)


def batch(**more) -> cp.TokenBatch:
    return cp.TokenBatch.from_lists(
        [[1, 2], [3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0, -2.0], [-3.0]], **more
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that finds the package of ``helpers/plugin``,
    installed by pip.
    """
    folder = tmp_path_factory.mktemp("plugin")
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install += ["--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run(["cp", "-r", str(PLUGIN), str(folder / "plugin")], check=True)
    subprocess.run([*install, str(folder / "plugin")], check=True)
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def output_of(code: str, environment: dict[str, str]) -> str:
    run = [sys.executable, "-c", code]
    return subprocess.run(
        run, capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()


def test_an_installed_package_adds_its_method(installed):
    """pip installs a real package; another process finds its method by the entry point alone."""
    code = (
        "import counterpoise as cp; m = cp.method('taste'); b = cp.TokenBatch.from_lists([[1, 2],"
        " [3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0, -2.0], [-3.0]]);"
        " print(m.assign(b).weight_NT.tolist(), cp.methods()['taste']['axes']['credit'])"
    )
    assert (
        output_of(code, installed)
        == "[[2.0, 1.0], [2.0, 0.0]] [{'name': 'first_tokens', 'count': 1}]"
    )


TRAIN = """
import json, pathlib, sys
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train

def rollouts(name, **credit):
    recipe = {
        "run_dir": f"{sys.argv[1]}/{name}", "device": "cpu", "num_batches": 2, "trackers": [],
        "task": {"name": "arithmetic", "difficulty": "hard"},
        "method": {"name": name, **credit},
        "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 48},
        "optimizer": {"updates_per_batch": 2}, "eval": {"every": 0}, "ledger": {"every": 0},
    }
    assert train(parse_config(recipe)).is_finished
    lines = pathlib.Path(recipe["run_dir"], "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["rollouts/num"] for line in lines]

print(rollouts("dapo"), rollouts("retry"))
"""


def test_an_installed_method_samples_more(installed, tmp_path):
    """Hard sums fail: each prompt without a success gets two more rollouts (``collect``)."""
    code = TRAIN.replace("sys.argv[1]", repr(str(tmp_path)))
    plain, retry = map(eval, output_of(code, installed).replace("] [", "]|[").split("|"))
    assert plain == [16, 16]
    assert all(num > 16 and num % 2 == 0 for num in retry)


def test_a_broken_plugin_is_named_and_the_rest_works(tmp_path):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[counterpoise.methods]\nbroken = no_such_module:register\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import counterpoise as cp; print(cp.method('grpo').name)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "grpo"
    assert "plug-in 'broken'" in done.stderr


def test_register_rule_with_a_column_of_its_own():
    @cp.declare(needs="mine_NT")
    def scaled_by_mine(credit_NT, batch, *, power: float = 1.0):
        """credit * mine^power"""
        return credit_NT * batch.column("mine_NT") ** power

    cp.register_rule("scaled_by_mine", scaled_by_mine)
    method = cp.method("dr_grpo", credit=[{"name": "scaled_by_mine", "power": 2.0}])
    assert method.needs == {"mine_NT"}
    out = method.assign(batch(extra={"mine_NT": torch.tensor([[1.0, 3.0], [2.0, 0.0]])}))
    assert out.credit_NT.tolist() == [[0.5, 4.5], [-2.0, 0.0]]
    with pytest.raises(ValueError, match="scaled_by_mine reads mine_NT"):
        method.assign(batch())


def test_a_rule_with_memory_keeps_its_state():
    def start(*, seen: int = 0):
        return {"seen": seen}

    def fading(state, credit_NT, batch, *, seen: int = 0):
        """credit / (batches seen + 1)"""
        return credit_NT / (state["seen"] + 1), {"seen": state["seen"] + 1}

    cp.register_rule("fading", cp.Stage(fading, init=start))
    method = cp.method("dr_grpo", credit=["fading"])
    first = method.assign(batch())
    second = method.assign(batch(), first.state)
    assert first.credit_NT[0].tolist() == [0.5, 0.5]
    assert second.credit_NT[0].tolist() == [0.25, 0.25]
    assert second.state == {"controller": None, "rules": [{"seen": 2}]}


def test_register_every_other_axis():
    def halves(reward_N, group_N):
        """R / 2"""
        return reward_N / 2

    def ones(mask_NT, credit_NT, advantage_N):
        """scale 1"""
        return mask_NT.to(credit_NT.dtype)

    def reversed_rows(group_N, reward_N, length_N, *, num_updates):
        """last row first"""
        return list(torch.arange(len(group_N)).flip(0).tensor_split(num_updates))

    @cp.token_loss
    def squared(trainer_logp_NT, rows):
        """credit * logp^2 / 2: coef is -credit * logp"""
        return (
            rows.credit_NT * trainer_logp_NT**2 / 2,
            log_ratio(trainer_logp_NT, rows).exp(),
            torch.zeros_like(rows.mask_NT),
        )

    def begin():
        return {"n": 0}

    def counting(state, batch):
        """counts batches"""
        return Control({}, {"n": state["n"] + 1}, {"n": state["n"] + 1})

    cp.register_advantage("halves", halves)
    cp.register_reduction("ones", ones)
    cp.register_plan("reversed_rows", reversed_rows)
    cp.register_loss("squared", squared)
    cp.register_controller("counting", cp.Stage(counting, init=begin))
    axes = {
        "advantage": "halves",
        "reduction": "ones",
        "plan": "reversed_rows",
        "loss": "squared",
        "controller": "counting",
    }
    method = cp.method("grpo", **axes)
    out = method.assign(batch())
    assert out.advantage_N.tolist() == [0.5, 0.0]
    assert out.state["controller"] == {"n": 1}
    (batch_number,) = method.plan(batch(), num_updates=1)
    assert batch_number.tolist() == [1, 0]
    loss = method.loss(
        torch.tensor([[-4.0, 0.0], [-1.0, -2.0]]), method.rows(batch(), out, batch_number)
    )
    assert loss.coef_NT.tolist() == [[0.0, 0.0], [0.5, 1.0]]


def test_taken_names_and_plain_losses_are_refused():
    with pytest.raises(ValueError, match="'delta' is taken by counterpoise.credit"):
        cp.register_rule("delta", lambda credit_NT, batch: credit_NT)
    with pytest.raises(ValueError, match="token_loss"):
        cp.register_loss("mine", lambda logp, rows: logp)
    with pytest.raises(ValueError, match="'grpo' is taken"):
        cp.register_method("grpo", cp.method("grpo"))
