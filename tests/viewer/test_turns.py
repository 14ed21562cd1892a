"""The viewer on a run with turns: blocks, states, keys, replies that stay text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from counterpoise.run.read import open_run
from counterpoise.viewer import api
from counterpoise.viewer.export import write_export
from counterpoise.viewer.tokens import open_batch
from counterpoise.viewer.turns import MAX_TEXT, prompt_turns
from helpers import browser_fixtures as shared
from helpers.browser_fixtures import NEEDS_CHROMIUM, as_shown, inspected, opened, served, settled
from helpers.turns_run import turns_run

browser, page = shared.browser, shared.page
ROLLOUTS = {"prompts": 3, "group_size": 4, "max_turn_tokens": 4, "max_new_tokens": 16}
EVIL = "<script>window.pwned=1</script>"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Batch 0 with a ledger, batch 1 without."""
    folder = tmp_path_factory.mktemp("runs") / "turns"
    rollouts = {**ROLLOUTS, "max_row_tokens": 480}
    return turns_run(folder, {"name": "helpers.rooms:Hostile"}, rollouts=rollouts)


@pytest.fixture(scope="module")
def address(run_dir):
    yield from served(run_dir)


def rollouts_of(run_dir, batch, group=0):
    table = pd.read_parquet(run_dir / "rollouts" / f"batch_{batch:06d}.parquet")
    return table[table["group"] == group].set_index("rollout")


def test_ledger_and_rollouts_show_the_same_tokens(run_dir, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(copy / "tokens")
    ledger, rollouts = open_batch(open_run(run_dir), 0), open_batch(open_run(copy), 0)
    assert (ledger.source, rollouts.source) == ("tokens", "rollouts")
    names = ("position", "turn", "turn_advantage", "sign", "credit", "node_positive")
    for name in ("group", "rollout", "token_id", "node_negative", *names):
        both = [np.asarray(one.column(name).value_T, float) for one in (ledger, rollouts)]
        np.testing.assert_allclose(*both, atol=1e-6, err_msg=name)
    assert np.array_equal(ledger.sign_N, rollouts.sign_N)
    assert np.array_equal(ledger.is_mixed_N, rollouts.is_mixed_N)


def test_signs_of_rollouts_are_those_of_their_turns(run_dir):
    tokens = open_batch(open_run(run_dir), 1)
    rows = pd.concat([rollouts_of(run_dir, 1, group) for group in range(3)])
    has = [{int(np.sign(a)) for a in row} for row in rows["turn_advantage"]]
    assert tokens.is_mixed_N.tolist() == [{-1, 1} <= signs for signs in has]
    assert any(tokens.is_mixed_N)
    for sign, signs in zip(tokens.sign_N, has):
        assert sign == (0 if {-1, 1} <= signs else sum(signs))


def test_turns_are_those_of_the_file(run_dir):
    run = open_run(run_dir)
    for batch in (0, 1):
        talks = prompt_turns(open_batch(run, batch), 1)
        rows = rollouts_of(run_dir, batch, 1)
        assert [talk["rollout"] for talk in talks] == rows.index.tolist()
        keys = {}
        for talk, (_, row) in zip(talks, rows.iterrows()):
            assert talk["end_reason"] == row["end_reason"]
            for u, turn in enumerate(talk["turns"]):
                assert turn["reward"] == row["turn_reward"][u]
                assert turn["return"] == pytest.approx(row["turn_reward"][u:].sum())
                assert turn["advantage"] == pytest.approx(row["turn_advantage"][u])
                assert turn["action"] == row["turn_action"][u]
                assert turn["reply"] == row["turn_reply"][u][:MAX_TEXT]
                assert turn["reply_length"] == len(row["turn_reply"][u])
                assert keys.setdefault(row["turn_key"][u], turn["key"]) == turn["key"] < 2**31
        assert len(set(keys.values())) == len(keys)
    assert max(turn["reply_length"] for talk in talks for turn in talk["turns"]) == 100_000


def test_a_broken_column_of_turns_shows_the_rest(run_dir, tmp_path):
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    file = copy / "rollouts" / "batch_000001.parquet"
    table = pq.read_table(file)
    for name in ("turn_reward", "turn_reply", "turn_key", "turn_advantage"):
        table = table.set_column(table.column_names.index(name), name, table["turn_action"])
    pq.write_table(table.drop_columns("end_reason"), file)
    tokens = open_batch(open_run(copy), 1)
    talks = prompt_turns(tokens, 0)
    assert {turn["reward"] for talk in talks for turn in talk["turns"]} == {None}
    json.dumps([talks, api.batch_info(tokens)], allow_nan=False)


def test_a_run_without_turns_has_none(plain_run):
    tokens = open_batch(open_run(plain_run), 2)
    assert not api.batch_info(tokens)["has_turns"] and prompt_turns(tokens, 0) == []


plain_run = shared.plain_run


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
@pytest.mark.parametrize("batch", [0, 1])
def test_turns_stand_as_blocks_with_their_numbers(page, address, run_dir, batch):
    page.set_viewport_size({"width": 1440, "height": 4000})  # only what is in sight is drawn
    opened(page, address, f"#batch={batch}&prompt=0")
    rows = rollouts_of(run_dir, batch)
    turns = [(row, u) for _, row in rows.iterrows() for u in range(len(row["turn_reward"]))]
    shown = page.locator(".turn").evaluate_all(
        "heads => heads.map(h => [...h.querySelectorAll('.name, .state, b')].map(x => x.innerText))"
    )
    want = []
    for row, u in turns:
        rest, advantage = row["turn_reward"][u:].sum(), row["turn_advantage"][u]
        plus = "+" if advantage > 0 else ""
        numbers = [as_shown(row["turn_reward"][u]), as_shown(rest), plus + as_shown(advantage)]
        state = row["turn_state"][u] or "state"
        want.append([f"turn {u}", state, *numbers])
    assert sorted(shown) == sorted(want)
    assert page.locator(".strip").count() == len(rows)
    bars = page.locator(".strip i").evaluate_all("bars => bars.map(b => b.className)")
    signs = [np.sign(reward) for row in rows["turn_reward"] for reward in row]
    assert sorted(bars) == sorted("up" if s > 0 else "down" if s < 0 else "none" for s in signs)
    # every drawn token once, and none of the environment's
    tokens = page.locator(".line .t").count()
    assert tokens == sum((row >= 0).sum() for row in rows["turn"])


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_replies_are_grey_text_that_folds(page, address, run_dir):
    page.set_viewport_size({"width": 1440, "height": 4000})
    opened(page, address, "#batch=0&prompt=0")
    said = page.locator(".said, .reply pre").all_inner_texts()
    assert EVIL in said
    assert any("⟨U+001B⟩[2J⟨U+202E⟩" in text for text in said)
    long = [text for text in said if text.startswith("xxxx")]
    assert long and all(text.endswith("80,000 more characters") for text in long)
    box = page.locator(".reply", has_text="80,000 more").first
    before = box.bounding_box()
    box.locator(".fold").click()
    settled(page, "document.querySelectorAll('.reply.open').length === 1")
    after = page.locator(".reply.open").bounding_box()
    assert before and after and before["height"] < after["height"] < 400
    page.locator(".reply.open .fold").click()
    settled(page, "document.querySelectorAll('.reply.open').length === 0")
    assert page.locator("script").count() == 1 and page.locator("img, b b").count() == 0


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_keys_go_from_turn_to_turn_and_skip_replies(page, address, run_dir):
    row = rollouts_of(run_dir, 0).iloc[0]
    first = [int(np.flatnonzero(row["turn"] == u)[0]) for u in range(3)]
    opened(page, address, "#batch=0&prompt=0&rollout=0&position=0")
    page.locator("#pane").focus()
    for key, position in [("t", first[1]), ("t", first[2]), ("T", first[1]), ("T", first[0])]:
        page.keyboard.press(key)
        settled(page, f"location.hash.endsWith('rollout=0&position={position}')")
        settled(
            page,
            f"document.querySelector('#inspector').innerText.includes(', position {position}')",
        )
    for position in np.flatnonzero(row["turn"] >= 0)[1:5]:
        page.keyboard.press("ArrowRight")
        settled(page, f"location.hash.endsWith('rollout=0&position={position}')")
    settled(
        page, f"document.querySelector('#inspector').innerText.includes(', position {position}')"
    )
    assert inspected(page)["turn"] == str(row["turn"][position])
    opened(page, address, f"#batch=0&prompt=0&rollout=0&position={first[1]}&x=1")
    settled(page, f"document.querySelector('.t.focus')?.dataset.i === '{(row['turn'] == 0).sum()}'")


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_a_state_shows_the_groups_turns_in_it(page, address, run_dir):
    opened(page, address, "#batch=0&prompt=0")
    rows = rollouts_of(run_dir, 0)
    page.locator(".state", has_text="<b>1</b>").first.click()
    page.wait_for_selector("#inspector .twins.list")
    assert page.locator("#inspector code").inner_text() == "<b>1</b>"
    shown = page.locator(".twins.list tr[tabindex]").evaluate_all(
        "lines => lines.map(l => [...l.children].map(c => c.innerText))"
    )
    want = [
        [
            f"#{rollout}",
            str(u),
            row["turn_action"][u] or "∅",
            as_shown(row["turn_reward"][u:].sum()),
        ]
        for rollout, row in rows.iterrows()
        for u, state in enumerate(row["turn_state"])
        if state == "<b>1</b>"
    ]
    assert [line[:4] for line in shown] == want
    page.locator(".t[data-i='0']").hover()  # a look elsewhere, and back
    page.locator("#run-name").hover()
    settled(page, "document.querySelector('#inspector code').innerText === '<b>1</b>'")
    page.locator(".twins.list tr[tabindex]").last.click()
    settled(page, f"location.hash.includes('rollout={want[-1][0][1:]}&')")


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_turns_are_aligned_turn_by_turn(page, address, run_dir):
    opened(page, address, "#batch=0&prompt=0&layout=aligned")
    script = (
        "spots => spots.map(s => [Number(s.dataset.i ?? -1), s.getBoundingClientRect().left,"
        " s.getBoundingClientRect().top])"
    )
    place = {i: (left, top) for i, left, top in page.locator(".cells .t").evaluate_all(script)}
    start, lefts = 0, [[], [], []]
    for _, row in rollouts_of(run_dir, 0).iterrows():
        turn = row["turn"][row["turn"] >= 0]
        for u in range(3):
            lefts[u] += [place[start + int(at)][0] for at in np.flatnonzero(turn == u)]
        start += len(turn)
    assert max(lefts[0]) < min(lefts[1]) and max(lefts[1]) < min(lefts[2])
    assert EVIL[:24] in page.locator(".cells .said").all_inner_texts()


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_export_and_evaluation_have_the_turns_too(page, address, run_dir, tmp_path):
    path = write_export(open_run(run_dir), tmp_path / "out", [0, 1])
    opened(page, path.as_uri(), "#batch=1&prompt=0")
    assert page.locator(".turn").count() > 3
    page.locator(".state").first.click()
    page.wait_for_selector("#inspector .twins.list")
    opened(page, address, "#eval=2&prompt=0")
    assert page.locator(".turn .name").first.inner_text() == "turn 0"
    assert page.locator(".turn b").last.inner_text() == "–"  # no advantage in an evaluation
