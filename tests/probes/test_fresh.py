"""The memory of methods that have one, in probes of a saved batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from counterpoise.catalogue.registry import method as make_method
from counterpoise.probes import open_scene
from counterpoise.probes.fresh import WARMUP, fresh_batch, has_state, scene_credits, warm_states
from counterpoise.probes.gradient import forward_of
from counterpoise.probes.methods import methods_of
from counterpoise.trainer.collect import measure_columns
from helpers.probe_run import small_run

VALUE = "{name: dapo, credit: [value_baseline]}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("fresh") / "run", ledger_every=0)


def test_a_rule_with_memory_judges_the_saved_batch_after_batches_of_its_own(run: Path) -> None:
    scene = open_scene(run, 1, trust=True)
    credits = scene_credits(scene, f"dapo, {VALUE}")
    rollouts = scene.config.rollouts
    method, state = make_method("dapo", credit=["value_baseline"]), None
    for k in range(WARMUP):
        num = rollouts.prompts * rollouts.group_size
        collected = fresh_batch(scene, "warmup", 0, k, num, method.needs)
        state = method.assign(collected.batch, state, seed=k, batch_number=k).state
    batch = measure_columns(scene.policy, method, scene.config, scene.collected, None).batch
    expected = method.assign(batch, state, seed=scene.config.seed, batch_number=1)
    torch.testing.assert_close(credits[method.label], expected.credit_NT)
    first_NT = method.assign(batch, None, seed=scene.config.seed, batch_number=1).credit_NT
    assert not torch.allclose(credits[method.label], first_NT)  # its first state is the advantage


def test_a_method_without_memory_gets_what_it_always_got(run: Path) -> None:
    scene = open_scene(run, 1, trust=True)
    batch = scene.collected.batch
    own_NT = make_method("dapo").assign(batch, seed=scene.config.seed, batch_number=1).credit_NT
    torch.testing.assert_close(scene_credits(scene, "dapo")["dapo"], own_NT, rtol=0, atol=0)


def test_the_run_s_own_method_keeps_the_run_s_memory(run: Path) -> None:
    scene = open_scene(run, 1, trust=True)
    own = scene._replace(method=make_method("fade"), state=scene.state._replace(method="the run's"))
    methods = methods_of(f"fade, dapo, {VALUE}")
    assert [has_state(method) for method in methods.values()] == [True, False, True]
    states = warm_states(own, methods, forward_of(scene, methods), 8, seed=0)
    assert states.pop("fade") == "the run's"
    ((label, state),) = states.items()
    assert label == "dapo, credit value_baseline" and state["rules"][0]["gram_QQ"]
