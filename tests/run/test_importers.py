"""Imports: small dumps made of each trainer's documented fields become run folders whose numbers
are the dump's.
"""

from __future__ import annotations

import json
import math
import pickle

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from counterpoise.probes.audit import read_batch
from counterpoise.report.page import content, render
from counterpoise.run.importers.convert import import_run
from counterpoise.run.read import open_run
from counterpoise.viewer.api import batch_info
from counterpoise.viewer.tokens import open_batch
from counterpoise.viewer.turns import prompt_turns

PROMPT, GOOD, BAD = [5, 6], [7, 8, 9], [7, 4]


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"[UNK]": 0, "Ġsix": 4, "what": 5, "Ġis": 6, "Ġfive": 7, "Ġplus": 8, "Ġone": 9}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def prime_rl_row(response, reward, advantage, **more):
    size, mask = len(PROMPT) + len(response), [False] * len(PROMPT) + [True] * len(response)
    return {
        "schema_version": 1,
        "step": 3,
        "export_step": 3,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 0,
        "run_id": None,
        "env_name": "maths",
        "token_ids": PROMPT + response,
        "position_ids": list(range(size)),
        "loss_mask": mask,
        "advantages": [advantage if keep else 0.0 for keep in mask],
        "rewards": [reward] * size,
        "inference_logprobs": [-0.1 * (k + 1) for k in range(size)],
        "trainer_logprobs": [-0.1 * (k + 1) + 0.01 for k in range(size)],
        "entropy": [0.5] * size,
        "mismatch_kl": [0.0] * size,
        "log_importance_ratio": [0.01] * size,
        "importance_ratio": [math.exp(0.01)] * size,
        "is_masked": [False] * (size - 1) + [True],
        **more,
    }


@pytest.fixture
def prime_rl_dump(tmp_path):
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    rows = [prime_rl_row(GOOD, 1.0, 0.7), prime_rl_row(BAD, 0.0, -0.7)]
    (folder / "rank_0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "token_exports"


def test_prime_rl(prime_rl_dump, tokenizer, tmp_path):
    out = tmp_path / "run"
    assert import_run("prime-rl", prime_rl_dump, out, tokenizer=tokenizer) == {3: 2}
    tokens = pd.read_parquet(out / "tokens" / "batch_000003.parquet")
    assert tokens["token_id"].tolist() == GOOD + BAD
    assert tokens["text"].tolist() == [" five", " plus", " one", " five", " six"]
    assert tokens["credit"].tolist() == [0.7] * 3 + [-0.7] * 2
    assert tokens["weight"].tolist() == [1.0] * 5
    assert tokens["sign"].tolist() == [1, 1, 1, -1, -1]
    # the response begins at the third token of the sequence
    assert tokens["sampler_logp"].tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.3, -0.4])
    assert tokens["confidence"].iloc[0] == pytest.approx(math.exp(-0.3))
    assert tokens["ratio"].tolist() == pytest.approx([math.exp(0.01)] * 5)
    assert tokens["is_clipped"].tolist() == [False, False, True, False, True]
    rollouts = pd.read_parquet(out / "rollouts" / "batch_000003.parquet")
    assert rollouts["group"].tolist() == [0, 0]
    assert rollouts["prompt"].tolist() == ["what is"] * 2
    assert rollouts["text"].tolist() == [" five plus one", " five six"]
    assert rollouts["reward"].tolist() == [1.0, 0.0]


def test_tokens_outside_the_loss_stay_and_are_marked(tmp_path):
    row = prime_rl_row(GOOD, 1.0, 0.5)
    row["loss_mask"] = [False, False, True, False, True]
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(row) + "\n")
    import_run("prime-rl", tmp_path / "rank_0.jsonl", tmp_path / "run")
    tokens = pd.read_parquet(tmp_path / "run" / "tokens" / "batch_000003.parquet")
    assert tokens["loss_mask"].tolist() == [True, False, True]
    assert tokens["token_id"].tolist() == GOOD


def test_stretches_of_the_mask_are_turns(tmp_path, tokenizer):
    talk = prime_rl_row(GOOD, 1.0, 0.5)
    talk["loss_mask"], talk["advantages"] = [False, False, True, False, True], [0, 0, 0.2, 0, 0.8]
    (tmp_path / "rank_0.jsonl").write_text(
        json.dumps(talk) + "\n" + json.dumps(prime_rl_row(BAD, 0.0, -0.7)) + "\n"
    )
    run = tmp_path / "run"
    import_run("prime-rl", tmp_path / "rank_0.jsonl", run, tokenizer=tokenizer)
    rollouts = pd.read_parquet(run / "rollouts" / "batch_000003.parquet")
    assert [list(turns) for turns in rollouts["turn"]] == [[0, -1, 1], [0, 0]]
    assert [list(rewards) for rewards in rollouts["turn_reward"]] == [[0.0, 1.0], [0.0]]
    assert [list(one) for one in rollouts["turn_advantage"]] == [[0.2, 0.8], [-0.7]]
    assert [list(one) for one in rollouts["turn_action"]] == [[" five", " one"], [" five six"]]
    assert [list(one) for one in rollouts["turn_reply"]] == [[" plus"], []]
    tokens = open_batch(open_run(run), 3)
    assert batch_info(tokens)["has_turns"]
    first, second = prompt_turns(tokens, 0)
    assert [turn["return"] for turn in first["turns"]] == [1.0, 1.0]
    assert [turn["reply"] for turn in first["turns"]] == [" plus", None]
    assert len(second["turns"]) == 1


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_nemo_rl(tmp_path, is_wrapped):
    def wrap_title(row):
        return {key: [value] for key, value in row.items()} if is_wrapped else row

    rows = []
    for at, (response, reward, advantage) in enumerate([(GOOD, 1.0, 0.5), (BAD, 0.0, -0.5)]):
        pad = 3 - len(response)
        ids, mask = PROMPT + response + [0] * pad, [0] * 2 + [1] * len(response) + [0] * pad
        logprobs = [0.0, 0.0] + [-0.2 * (k + 1) for k in range(len(response))] + [0.0] * pad
        row = {
            "content": "what is five",
            "rewards": reward,
            "input_lengths": 2 + len(response),
            "token_ids": ids,
            "token_loss_mask": mask,
            "sample_loss_mask": 1.0,
            "advantages": [advantage] * len(ids),
            "generation_logprobs": logprobs,
            "prev_logprobs": [x - 0.01 for x in logprobs],
        }
        rows.append({**wrap_title(row), "idx": at})
    (tmp_path / "train_data_step12.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    out = tmp_path / "run"
    assert import_run("nemo-rl", tmp_path, out) == {12: 2}
    tokens = pd.read_parquet(out / "tokens" / "batch_000012.parquet")
    assert tokens["token_id"].tolist() == GOOD + BAD
    assert tokens["sampler_logp"].tolist() == pytest.approx([-0.2, -0.4, -0.6, -0.2, -0.4])
    assert tokens["ratio"].tolist() == pytest.approx([math.exp(-0.01)] * 5)
    assert tokens["advantage"].tolist() == [0.5] * 3 + [-0.5] * 2
    # without a tokenizer ids are shown
    assert batch_info(open_batch(open_run(out), 12))["texts"][0] == "⟨4⟩"


def test_slime(tmp_path):
    data = {
        "tokens": [torch.tensor(PROMPT + GOOD), torch.tensor(PROMPT + BAD)],
        "response_lengths": [3, 2],
        "rewards": [0.7, -0.7],
        "raw_reward": [9.0, 1.0, 9.0, 0.0],
        "partition": [1, 3],
        "truncated": [0, 1],
        "loss_masks": [torch.ones(3, dtype=torch.int), torch.ones(2, dtype=torch.int)],
        "rollout_log_probs": [torch.tensor([-0.1, -0.2, -0.3]), torch.tensor([-0.1, -0.9])],
        "log_probs": [torch.tensor([-0.1, -0.2, -0.3]), torch.tensor([-0.1, -0.9])],
        "advantages": [torch.full((3,), 0.7), torch.full((2,), -0.7)],
    }
    torch.save({"rollout_id": 5, "rank": 0, "rollout_data": data}, tmp_path / "5_0.pt")
    out = tmp_path / "run"
    assert import_run("slime", tmp_path, out) == {5: 2}
    rollouts = pd.read_parquet(out / "rollouts" / "batch_000005.parquet")
    assert rollouts["reward"].tolist() == [1.0, 0.0]
    assert rollouts["advantage"].tolist() == pytest.approx([0.7, -0.7])
    assert rollouts["stop_reason"].tolist() == ["stop", "length"]
    assert [list(ids) for ids in rollouts["token_ids"]] == [GOOD, BAD]
    assert [list(ids) for ids in rollouts["prompt_ids"]] == [PROMPT, PROMPT]
    tokens = pd.read_parquet(out / "tokens" / "batch_000005.parquet")
    assert tokens["sampler_logp"].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.1, -0.9])
    assert tokens["credit"].tolist() == pytest.approx([0.7] * 3 + [-0.7] * 2)


class Canary:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_slime_unpickles_nothing_but_tensors_and_plain_values(tmp_path, capsys):
    with (tmp_path / "bad.pt").open("wb") as file:
        pickle.dump({"rollout_data": Canary()}, file)
    torch.save(
        {"rollout_data": {"tokens": Canary(), "response_lengths": [1]}}, tmp_path / "worse.pt"
    )
    for name in ("bad.pt", "worse.pt"):
        with pytest.raises(ValueError, match="Nothing else is unpickled"):
            import_run("slime", tmp_path / name, tmp_path / "run")
    assert "unpickled" not in capsys.readouterr().out


def write_completions(path, **more):
    columns = {
        "step": [4, 4],
        "prompt": ["what is", "what is"],
        "completion": ["five plus one", "six"],
        "accuracy_reward": [1.0, 0.0],
        "format_reward": [0.5, 0.5],
        "advantage": [0.7, -0.7],
    }
    pq.write_table(pa.table(columns | more), path)


def test_trl_by_words(tmp_path):
    write_completions(tmp_path / "completions_00004.parquet")
    out = tmp_path / "run"
    assert import_run("trl", tmp_path, out) == {4: 2}
    tokens = pd.read_parquet(out / "tokens" / "batch_000004.parquet")
    assert tokens["text"].tolist() == ["five", " plus", " one", "six"]
    assert tokens["reward"].tolist() == [1.5, 1.5, 1.5, 0.5]
    assert tokens["advantage"].tolist() == [0.7, 0.7, 0.7, -0.7]
    assert tokens["credit"].tolist() == tokens["advantage"].tolist()
    assert "sampler_logp" not in tokens


def test_trl_writes_a_generation_once_per_update(tmp_path, caplog):
    """With ``logging_steps=1``: the same rows under the next step; they are one batch."""
    for step in (4, 5, 6):
        more = {} if step < 6 else {"completion": ["", "seven"]}
        name = f"completions_{step:05d}.parquet"
        write_completions(
            tmp_path / name, step=[step, step], format_reward=[0.5, float("nan")], **more
        )
    assert import_run("trl", tmp_path, tmp_path / "run") == {4: 2, 6: 1}
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert "the sum of accuracy_reward, format_reward; TRL's reward_weights are not in" in told[0]
    assert told[1] == "import: 1 rollouts without a token are left out."


def test_trl_with_a_tokenizer_messages_and_a_chosen_reward(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "what is"}]
    answers = [
        [{"role": "assistant", "content": " five plus one"}],
        [{"role": "assistant", "content": " six"}],
    ]
    write_completions(
        tmp_path / "completions_00004.parquet", prompt=[chat, chat], completion=answers
    )
    import_run(
        "trl",
        tmp_path / "completions_00004.parquet",
        tmp_path / "run",
        tokenizer=tokenizer,
        rewards=["accuracy_reward"],
    )
    tokens = pd.read_parquet(tmp_path / "run" / "tokens" / "batch_000004.parquet")
    assert tokens["token_id"].tolist() == [7, 8, 9, 4]
    assert tokens["text"].tolist() == [" five", " plus", " one", " six"]
    assert tokens["reward"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert tokens["group"].nunique() == 1


def verl_row(output, score, session, **more):
    row = {"input": "what is", "output": output, "gts": "six", "score": score, "step": 7}
    return row | {"uid": f"3f0a_{session}_0"} | more


def write_verl(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "7.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_verl(tmp_path):
    filler = verl_row("x", 0.0, 0) | {"uid": f"pad{'0f' * 16}_0_0"}
    rows = [verl_row("five plus one", 1.0, 0), verl_row("six", 0.0, 1, uid="77_0_0"), filler]
    out = tmp_path / "run"
    assert import_run("verl", write_verl(tmp_path / "dump", rows), out) == {7: 2}
    rollouts = pd.read_parquet(out / "rollouts" / "batch_000007.parquet")
    assert rollouts["reward"].tolist() == [1.0, 0.0]
    assert rollouts["answer"].tolist() == ["six", "six"]
    # two prompts with the same text are two groups: verl's uid tells them apart
    assert rollouts["group"].tolist() == [0, 1]
    tokens = pd.read_parquet(out / "tokens" / "batch_000007.parquet")
    assert tokens["text"].tolist() == ["five", " plus", " one", "six"]


def test_verl_with_a_chosen_reward_and_without_uids(tmp_path):
    rows = [verl_row("five", 0.1, 0, acc=True), verl_row("six", 0.1, 1, acc=False)]
    for row in rows:
        del row["uid"]
    import_run("verl", write_verl(tmp_path / "dump", rows), tmp_path / "run", rewards=["acc"])
    rollouts = pd.read_parquet(tmp_path / "run" / "rollouts" / "batch_000007.parquet")
    assert rollouts["reward"].tolist() == [1.0, 0.0]
    assert rollouts["group"].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["trl", "verl"])
def test_credit_that_is_not_in_a_dump_is_absent_and_not_uniform(tmp_path, kind):
    if kind == "trl":
        columns = {"step": [4], "prompt": ["what is"], "completion": ["five"], "acc": [1.0]}
        (tmp_path / "dump").mkdir()
        pq.write_table(pa.table(columns), tmp_path / "dump" / "completions_00004.parquet")
    else:
        write_verl(tmp_path / "dump", [verl_row("five", 1.0, 0)])
    out = tmp_path / "run"
    import_run(kind, tmp_path / "dump", out)
    (file,) = (out / "tokens").iterdir()
    assert not {"credit", "weight", "advantage", "sign"} & set(pd.read_parquet(file).columns)
    page = content([open_run(out)])
    assert page.problems == [] and "credit" not in [c.chart.name for c in page.cards["credit"]]
    assert "uniform credit" not in render(page)
    assert "advantage, sampler_logp, trainer_logp, entropy, ratio, credit" in render(page)
    (rollouts,) = (out / "rollouts").iterdir()
    assert read_batch(rollouts, None)[1] is None
    info = batch_info(open_batch(open_run(out), 4 if kind == "trl" else 7))
    shown = {c["name"] for c in info["columns"] if c["kind"] != "none"}
    assert not {"credit", "weight"} & shown


def test_an_import_opens_in_the_report_and_the_viewer(prime_rl_dump, tokenizer, tmp_path):
    from counterpoise.ledger.measures.categories import categories

    import_run(
        "prime-rl", prime_rl_dump, tmp_path / "run", tokenizer=tokenizer, categories=categories
    )
    run = open_run(tmp_path / "run")
    info = batch_info(open_batch(run, 3))
    assert {"credit", "entropy", "confidence", "category"} <= {
        c["name"] for c in info["columns"] if c["kind"] != "none"
    }
    assert info["groups"][0]["prompt"] == "what is"
    found = content([open_run(tmp_path / "run")])
    assert found.problems == []
    assert "An imported dump has no ledger" in render(found) and "in the recipe" not in render(
        found
    )
    assert [card.chart.name for card in found.cards["credit"]] == ["weight", "credit", "categories"]
    assert [card.chart.name for card in found.cards["learning"]] == ["reward", "entropy", "length"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 must be an object"),
        ('{"token_ids": [1]}', "has no loss_mask"),
        ('{"step": 1, "token_ids": [1], "loss_mask": [false]}', "holds no token"),
        (
            '{"step": 1, "token_ids": [1, 2], "loss_mask": [false, true], "entropy": [0.1]}',
            "entropy must be a list of 2 values, got 1",
        ),
        ('{"token_ids": [1], "loss_mask": [true]}', "step must be a whole number, got None"),
        ("", "no rollouts with tokens"),
    ],
)
def test_bad_dumps_say_where_and_what(tmp_path, text, message):
    (tmp_path / "rank_0.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        import_run("prime-rl", tmp_path, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.jsonl"]


def test_wrong_arguments_say_what_to_do(tmp_path, prime_rl_dump):
    with pytest.raises(ValueError, match="unknown format 'prime'. Did you mean 'prime-rl'"):
        import_run("prime", tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match="matches train_data_step"):
        import_run("nemo-rl", tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match="is not empty"):
        import_run("prime-rl", prime_rl_dump, tmp_path)
    with pytest.raises(ValueError, match="no tokenizer at"):
        import_run("prime-rl", prime_rl_dump, tmp_path / "run", tokenizer=tmp_path / "nothing")
