"""Finding one's way in the viewer: what it opens on, prompts by search, order and time, methods
side by side, evaluations, and all runs of a folder. On real runs of the bundled model.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pandas as pd
import pytest

from counterpoise.run.find import runs_below
from counterpoise.run.read import open_run
from counterpoise.viewer.tokens import open_batch
from helpers.browser_fixtures import NEEDS_CHROMIUM, browser, opened, page, served, settled

pytestmark = NEEDS_CHROMIUM
DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
SHORT = [
    *("num_batches=2", "rollouts.prompts=6", "rollouts.group_size=4", "trackers=[]"),
    *("optimizer.updates_per_batch=2", "optimizer.warmup=0", "eval.every=1", "eval.prompts=5"),
    *("ledger.every=1", "keep_every=1", "checkpoint_every=1"),
]
_ = browser, page  # fixtures


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of uniform credit and one whose credit tells tokens apart."""
    from counterpoise.probes.replay import replay
    from counterpoise.trainer.config import load_config
    from counterpoise.trainer.loop import train

    root = tmp_path_factory.mktemp("runs")
    for name in ("grpo", "delta"):
        train(load_config(DEMO, [*SHORT, f"method.name={name}", f"run_dir={root / name}"]))
    replay(root / "delta", 1, ["dapo", "top_entropy"])
    return root


@pytest.fixture(scope="module")
def home(runs):
    yield from served(runs)


def answer(address):
    with urllib.request.urlopen(address, timeout=60) as got:
        return json.load(got)


def test_a_folder_of_runs_lists_them_and_leads_to_each(page, home, runs):
    assert list(runs_below(runs)) == ["delta", "grpo"] and runs_below(runs / "grpo") == {}
    page.goto(home)
    page.wait_for_selector("#runs a")
    assert page.locator("#runs a").all_inner_texts() == ["delta", "grpo"]
    page.locator("#runs a").first.click()
    page.wait_for_selector(".t[data-i]")
    assert page.locator("#run-name").inner_text() == "delta"
    page.locator("#all-runs").click()
    page.wait_for_selector("#runs a")


def test_a_run_that_is_not_there_is_told_with_the_nearest(home):
    with pytest.raises(urllib.error.HTTPError) as failed:
        answer(f"{home}runs/delto/api/run")
    assert failed.value.code == 404
    assert "Did you mean 'delta'" in json.loads(failed.value.read())["error"]


def test_opens_on_change_where_credit_is_uniform_with_a_token_chosen(page, home):
    opened(page, f"{home}runs/grpo/")
    settled(page, "location.hash.includes('colour=delta') && location.hash.includes('position=')")
    settled(page, "document.querySelector('#inspector .numbers') !== null")
    assert page.locator(".t.focus").count() == 1
    opened(page, f"{home}runs/delta/")
    settled(page, "location.hash.includes('colour=credit')")


def test_colours_stand_in_families(page, home):
    opened(page, f"{home}runs/delta/", "#batch=1")
    families = page.evaluate("[...document.querySelectorAll('#colour optgroup')].map(g => g.label)")
    assert families == [
        *("Credit", "Change", "Policy", "Token", "Replay", "Parts of the predicted change")
    ]


def test_prompts_are_searched_and_sorted(page, home, runs):
    opened(page, f"{home}runs/delta/", "#batch=1")
    rollouts = pd.read_parquet(runs / "delta" / "rollouts" / "batch_000001.parquet")
    rate = rollouts.groupby("group")["reward"].mean()

    def shown():
        return [int(text) for text in page.locator(".prompt b").all_inner_texts()]

    page.locator("#prompt-sort").select_option("hard")
    assert [rate[g] for g in shown()] == sorted(rate)
    page.locator("#prompt-sort").select_option("easy")
    assert [rate[g] for g in shown()] == sorted(rate, reverse=True)
    tokens = pd.read_parquet(runs / "delta" / "tokens" / "batch_000001.parquet")
    flips = tokens.groupby("group")["is_flip"].sum()
    page.locator("#prompt-sort").select_option("flips")
    assert [flips[g] for g in shown()] == sorted(flips, reverse=True)
    page.locator("#pane").focus()
    page.keyboard.press("/")
    wanted = rollouts[rollouts["group"] == 3]["prompt"].iloc[0]
    page.keyboard.type(wanted)
    assert shown() == [3]
    assert "search=" in page.url and "sort=flips" in page.url


def test_a_prompt_is_followed_over_evaluations(page, home, runs):
    opened(page, f"{home}runs/delta/", "#eval=0&prompt=2")
    page.wait_for_selector(".history .when")
    chips = page.locator(".history .when")
    assert chips.all_inner_texts()[:3] == ["e0", "e1", "e2"]
    samples = pd.read_parquet(runs / "delta" / "evals" / "batch_000002.parquet")
    own = samples[samples["group"] == 2].iloc[0]
    chips.nth(2).click()
    settled(page, "location.hash.includes('eval=2') && location.hash.includes('prompt=2')")
    assert page.locator("#prompt-text").inner_text() == own["prompt"]
    assert f"solved {int(own['reward'] >= 0.5)} of 1" in str(chips.nth(2).get_attribute("title"))
    page.locator("#pane").focus()
    page.keyboard.press("[")  # the prompt stays
    settled(page, "location.hash.includes('eval=1') && location.hash.includes('prompt=2')")


def test_evaluation_samples_are_the_evaluations_own(runs):
    run = open_run(runs / "delta")
    assert run.batches("evals") == [0, 1, 2]
    for row in run.evals:
        samples = pd.read_parquet(runs / "delta" / "evals" / f"batch_{row['batch']:06d}.parquet")
        assert samples["reward"].tolist() == [reward for (reward,) in row["reward_PK"]]
    tokens = open_batch(run, 2, "evals")
    assert len(tokens.column("entropy").value_T) == sum(map(len, samples["token_ids"]))


def test_two_methods_of_a_replay_stand_side_by_side(page, home, runs):
    credits = pd.read_parquet(next((runs / "delta" / "probes").rglob("credits.parquet")))
    opened(page, f"{home}runs/delta/", "#batch=1&colour=replay/dapo&beside=replay/top_entropy")
    page.wait_for_selector(".side")
    assert [text.split(" · ")[0] for text in page.locator(".side").all_inner_texts()] == [
        "credit under dapo",
        "credit under top_entropy",
    ]
    group = int(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('prompt')"))
    own = credits[credits["group"] == group].sort_values(["rollout", "position"])
    for side, name in enumerate(("dapo", "top_entropy")):
        for at in range(0, 40, 4):
            token = page.locator(f".line[data-paint='{side}'] .t[data-i='{at}']")
            value = own[f"credit/{name}"].iloc[at]
            css = str(token.get_attribute("class"))
            assert ("d-p" in css, "d-n" in css) == (value > 0, value < 0), (name, at, css, value)


def test_a_batch_that_is_not_there_is_told_and_another_shown(page, home):
    opened(page, f"{home}runs/delta/", "#batch=40")
    assert "There is no batch 40" in page.locator("#problems").inner_text()
    settled(page, "location.hash.includes('batch=1')")
    with pytest.raises(urllib.error.HTTPError) as failed:
        answer(f"{home}runs/delta/api/batches/40")
    assert "no tokens or rollouts of batch 40. There are: 0-1." in failed.value.read().decode()
