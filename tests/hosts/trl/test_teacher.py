"""A teacher inside TRL: its log-probs are those of the built-in trainer's measuring, its credit the
core's; what it reads, whose weights it has, and what is refused.
"""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
import counterpoise.hosts.trl.trainer as host
from counterpoise.credit.hindsight import group_readings
from counterpoise.policy import measure
from counterpoise.run.checkpoint import TEACHER
from counterpoise.trainer.teacher import saved_weights
from counterpoise.types import Prompt
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
TEMPLATES = {
    "sibling": "w11 {demonstration} {prompt}",
    "feedback": "{feedback} w10 {prompt}",
    "solution": "{solution} {prompt}",
}
CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


def solved(count=48, **more):
    """Prompts with a solution."""
    rows = trl_tiny.prompts(count)["prompt"]
    return Dataset.from_dict(
        {"prompt": rows, "solution": [f"w{k % 12} w{(k + 3) % 12}" for k in range(count)]} | more
    )


def sdpo(**settings):
    settings = {"source": ["sibling"], "template": {"sibling": TEMPLATES["sibling"]}} | settings
    return {"method": "sdpo", "method_axes": {"credit": settings}}


def opsd(**settings):
    settings = {"template": TEMPLATES["solution"]} | settings
    return {"method": "opsd", "method_axes": {"credit": settings}}


@pytest.fixture
def batches(monkeypatch):
    """Every TokenBatch that a trainer builds, TRL's dict, and the weights of that moment."""
    seen, build = [], host.token_batch

    def watched(trainer, made, output, *args):
        batch = build(trainer, made, output, *args)
        seen.append((batch, dict(output), trl_tiny.weights(trainer)))
        return batch

    monkeypatch.setattr(host, "token_batch", watched)
    return seen


def with_solutions(output):
    """Ids of the prompts of ``solved`` with their solutions."""
    words, solution = (
        trl_tiny.tiny_tokenizer(),
        dict(zip(*(solved()[k] for k in ("prompt", "solution")))),
    )
    asked = [
        words.decode(ids[mask.bool()])
        for ids, mask in zip(output["prompt_ids"], output["prompt_mask"])
    ]
    return [words(f"{solution[text]} {text}")["input_ids"] for text in asked]


def assert_scored(batch, output, weights, prompts, temperature=1.0, atol=1e-5):
    """The columns against ``measure`` of the built-in trainer; ``prompts`` has the ids that the
    teacher reads, None where there is no teacher.
    """
    rows = [row for row, ids in enumerate(prompts) if ids is not None]
    assert batch.has_teacher_N.tolist() == [ids is not None for ids in prompts]
    assert not batch.teacher_logp_NT[~batch.has_teacher_N].any()
    model = weights
    if isinstance(weights, dict):
        model = trl_tiny.tiny_model(0)
        model.load_state_dict(weights)
    expected = measure(
        model,
        [prompts[row] for row in rows],
        output["completion_ids"][rows],
        output["completion_mask"][rows].bool(),
        {"trainer_logp_NT"},
        temperature=temperature,
    )["trainer_logp_NT"]
    got, mask_NT = batch.teacher_logp_NT[rows], batch.mask_NT[rows]
    torch.testing.assert_close(got * mask_NT, expected * mask_NT, rtol=0, atol=atol)


def expected_ids(trainer, batch, output, templates, solutions=None, feedback=None):
    """What each teacher reads, by the functions of the built-in trainer, from decoded prompts."""
    words = trainer.processing_class
    asked = [
        words.decode(ids[mask.bool()])
        for ids, mask in zip(output["prompt_ids"], output["prompt_mask"])
    ]
    texts = words.batch_decode(output["completion_ids"], skip_special_tokens=True)
    solutions = solutions or [""] * len(texts)
    every = group_readings(
        [Prompt("", text, solution) for text, solution in zip(asked, solutions)],
        texts,
        batch.group_N.tolist(),
        (batch.reward_N >= 0.5).tolist(),
        feedback,
        templates,
    )
    return [None if one is None else words(one.text)["input_ids"] for one in every]


@pytest.mark.parametrize("aligned", [True, False])
def test_the_log_probs_are_the_trainer_s_and_the_credit_is_the_core_s(aligned, tmp_path, batches):
    """Siblings: token for token what the built-in trainer reads and measures; a lone success and a
    group without one have no teacher.
    """
    args = sdpo(model="policy") | {"temperature": 0.7, "max_steps": 1}
    args |= {"steps_per_generation": 2 if aligned else 8}
    trainer = trl_tiny.ours(tmp_path, args=args)
    trainer.train()
    batch, output, weights = batches[0]
    prompts = expected_ids(trainer, batch, output, {"sibling": TEMPLATES["sibling"]})
    assert aligned or 0 < sum(ids is None for ids in prompts) < len(prompts)
    assert_scored(batch, output, weights, prompts, 0.7)
    assert_credit(trainer, batch)


def assert_credit(trainer, batch):
    """Every micro-batch has the core's credit of its rows."""
    method = trainer.credit_setup.method
    expected = cp.method(trainer.args.method, **trainer.args.method_axes).assign(batch)
    taught_NT = batch.mask_NT & batch.has_teacher_N[:, None]
    if method.rules[0].name == "teacher":
        gap_NT = batch.teacher_logp_NT - batch.trainer_logp_NT
        assert torch.equal(expected.credit_NT, torch.where(taught_NT, gap_NT, 0))
    assert expected.credit_NT.abs().sum() > 0
    seen = []
    for micro in trainer._buffered_inputs:
        is_real = micro["cp_row"] >= 0
        seen += micro["cp_row"][is_real].tolist()
        got, row_B = micro["advantages"][is_real], micro["cp_row"][is_real]
        assert torch.equal(micro["completion_ids"][is_real], batch.token_ids_NT[row_B])
        torch.testing.assert_close(got, expected.credit_NT[row_B])
    assert sorted(seen) == list(range(batch.num_rollouts))


@pytest.mark.parametrize("name", ["sdpo", "opsd", "top_d", "mixed"])
def test_presets_train(name, tmp_path, batches):
    """Several generations, two passes over each, accumulated gradients: rows stay aligned, the loss
    is finite, the weights move.
    """
    trl_tiny.tiny_model(5).save_pretrained(tmp_path / "other")
    trl_tiny.tiny_tokenizer().save_pretrained(tmp_path / "other")
    rules = ["uniform", {"name": "teacher", "source": ["sibling"]}]
    mixed = {"credit": [{"name": "mix", "rules": rules, "weights": [0.9, 0.1]}]}
    args = {
        "sdpo": sdpo(),
        "opsd": opsd(),
        "top_d": {"method": "top_d", "method_axes": {"credit": {"model": str(tmp_path / "other")}}},
        "mixed": {"method": "grpo", "method_axes": mixed},
    }[name]
    args |= {"num_iterations": 2, "max_steps": 16, "max_grad_norm": 1.0}
    trainer = trl_tiny.ours(tmp_path, args=args, train_dataset=solved())
    start = trl_tiny.weights(trainer)
    trainer.train()
    assert len(batches) == 2
    assert_credit(trainer, batches[-1][0])
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(row["loss"]) for row in logs) and len(logs) == 16
    assert 0 < trl_tiny.largest_gap(start, trl_tiny.weights(trainer)) < math.inf
    first = logs[0]
    source = {"opsd": "solution", "top_d": "prompt"}.get(name, "sibling")
    rule = {"top_d": "proximal_teacher", "mixed": "mix/1_teacher"}.get(name, "teacher")
    taught = first[f"teacher/{source}_frac"]
    assert taught == (1 if name in ("opsd", "top_d") else pytest.approx(taught))
    assert batches[0][0].has_teacher_N.float().mean() == pytest.approx(taught)
    if name != "mixed":
        assert first[f"credit/{rule}/taught_frac"] == pytest.approx(taught)
    assert first["teacher_s"] > 0 and first["teacher/prompt_tokens"] > 2
    assert 0 < logs[8]["teacher_share"] < 1 and "teacher_share" not in first


def test_another_model_is_measured_as_in_the_trainer(tmp_path, batches):
    other = trl_tiny.tiny_model(5)
    other.save_pretrained(tmp_path / "other")
    trl_tiny.tiny_tokenizer().save_pretrained(tmp_path / "other")
    args = {"method": "top_d", "method_axes": {"credit": {"model": str(tmp_path / "other")}}}
    trainer = trl_tiny.ours(tmp_path, args=args | {"max_steps": 1})
    trainer.train()
    batch, output, _ = batches[0]
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], output["prompt_mask"])
    ]
    assert_scored(batch, output, other.state_dict(), prompts)


def test_a_batch_in_which_nobody_succeeds_trains_on(tmp_path, batches):
    def never(completions, **columns):
        return [0.25 * (k % 2) for k in range(len(completions))]

    trainer = trl_tiny.ours(tmp_path, args=sdpo(), reward_funcs=never)
    start = trl_tiny.weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 8 and len(batches) == 2
    assert not any(batch.has_teacher_N.any() for batch, _, _ in batches)
    trl_tiny.assert_identical(trl_tiny.weights(trainer), start)
    assert trainer.state.log_history[0]["teacher/sibling_frac"] == 0


def test_success_is_what_the_config_says(tmp_path, batches):
    """A threshold, and a reward function by name, choose the demonstrations."""

    def low(completions, **columns):
        return [0.1 * (k % 2) for k in range(len(completions))]

    def named(completions, **columns):
        return [float(k % 4 == 0) for k in range(len(completions))]

    for more in ({"success": 0.1}, {"success_reward": "named", "reward_weights": [1.0, 0.0]}):
        functions = [low] if "success" in more else [low, named]
        args = sdpo(model="policy") | more | {"max_steps": 1}
        told = {"reward_funcs": functions, "rollout_func": trl_tiny.told}
        trl_tiny.ours(tmp_path, args=args, **told).train()
    by_threshold, by_name = (batch.has_teacher_N.tolist() for batch, _, _ in batches)
    assert by_threshold == [True] * 32  # two successes in each group
    assert by_name == [k % 4 != 0 for k in range(32)]  # the only success has no teacher


def test_rollouts_without_a_reward_teach_nobody(tmp_path, batches):
    """The first rollout of each group would be the demonstration, and has no reward."""

    def first_ungraded(completions, **columns):
        return [None if k % 4 == 0 else float(k % 4 == 1) for k in range(len(completions))]

    args = sdpo(model="policy") | {"max_steps": 1}
    told = {"reward_funcs": first_ungraded, "rollout_func": trl_tiny.told}
    trainer = trl_tiny.ours(tmp_path, args=args, **told)
    trainer.train()
    batch, output, weights = batches[0]
    assert batch.num_rollouts == 24
    live = [row for row in range(32) if row % 4]
    rows = {k: v[live] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in output.items()}
    prompts = expected_ids(trainer, batch, rows, {"sibling": TEMPLATES["sibling"]})
    assert [ids is None for ids in prompts] == [True, False, False] * 8
    assert_scored(batch, rows, weights, prompts)


def test_feedback_of_a_reward_function(tmp_path, batches):
    """By TRL's ``log_extra``; an empty text is none, and TRL's table of completions keeps it."""
    said = []

    def fussy(completions, log_extra, **columns):
        right = trl_tiny.graded(completions)
        said.append(["" if r else f"w{len(t.split())} w9" for r, t in zip(right, completions)])
        log_extra("remarks", said[-1])
        return right

    settings = {"source": "feedback", "template": TEMPLATES["feedback"], "model": "policy"}
    args = sdpo(**settings) | {"feedback_column": "remarks", "max_steps": 1}
    trainer = trl_tiny.ours(tmp_path, args=args, reward_funcs=fussy)
    trainer.train()
    batch, output, weights = batches[0]
    templates = {"feedback": TEMPLATES["feedback"]}
    prompts = expected_ids(trainer, batch, output, templates, feedback=said[0])
    assert 0 < sum(ids is None for ids in prompts) < 32
    assert_scored(batch, output, weights, prompts)
    assert list(trainer._logs["extra"]["remarks"])[-32:] == said[0]


def test_feedback_that_nobody_gives_or_that_does_not_fit(tmp_path):
    args = sdpo(source="feedback", template=TEMPLATES["feedback"])
    with pytest.raises(ValueError, match=r"no reward function gives any. Call log_extra\('feedba"):
        trl_tiny.ours(tmp_path, args=args).train()

    def short(completions, log_extra, **columns):
        log_extra("feedback", ["w1"])
        return trl_tiny.graded(completions)

    with pytest.raises(ValueError, match=r"log_extra\('feedback', ...\): 1 texts for 32 rollouts"):
        trl_tiny.ours(tmp_path, args=args, reward_funcs=short).train()


def test_messages_go_through_the_chat_template(tmp_path, batches):
    """The last message of the user is put in other words, the system's stays; padding on the left
    differs from row to row.
    """
    words = trl_tiny.tiny_tokenizer()
    words.chat_template = CHAT.replace(
        "message['role']", "'w7' if message.role == 'user' else 'w8'"
    )
    plain = solved()
    rows = [
        [{"role": "system", "content": "w1 " * (1 + k % 3)}, {"role": "user", "content": text}]
        for k, text in enumerate(plain["prompt"])
    ]
    data = Dataset.from_dict({"prompt": rows, "gold": plain["solution"]})

    def graded(completions, **columns):
        return trl_tiny.graded([one[0]["content"] for one in completions])

    args = opsd() | {"solution_column": "gold", "max_steps": 1}
    trainer = trl_tiny.ours(
        tmp_path, args=args, train_dataset=data, processing_class=words, reward_funcs=graded
    )
    trainer.train()
    batch, output, weights = batches[0]
    asked = {words.apply_chat_template(row, tokenize=False): k for k, row in enumerate(rows)}
    prompts = []
    for ids, mask in zip(output["prompt_ids"], output["prompt_mask"]):
        text = words.decode(ids[mask.bool()])
        k = next(k for full, k in asked.items() if full.split() == text.split())
        system, user = rows[k]
        told = {"role": "user", "content": f"{data['gold'][k]} {user['content']}"}
        prompts.append(words.apply_chat_template([system, told])["input_ids"])
    assert len({len(ids) for ids in prompts}) > 1
    assert_scored(batch, output, weights, prompts)


def test_what_does_not_fit_into_the_model_has_no_teacher(tmp_path, batches):
    template = {"sibling": "{demonstration} " + "w1 " * 55 + "{prompt}"}
    trainer = trl_tiny.ours(tmp_path, args=sdpo(template=template) | {"max_steps": 1})
    trainer.train()
    batch, _, _ = batches[0]
    row = trainer.state.log_history[0]
    assert not batch.has_teacher_N.all()
    assert row["teacher/too_long_frac"] > 0
    assert row["teacher/sibling_frac"] == pytest.approx(batch.has_teacher_N.float().mean().item())


def test_the_first_weights_and_their_average(tmp_path, batches):
    """``initial`` scores as the policy did at the start; ``average`` follows once per generation,
    before the next one is scored; the policy's own weights come back.
    """
    told = {"rollout_func": trl_tiny.told, "train_dataset": solved()}
    trainers = {}
    for name in ("initial", "average", "policy"):
        args = opsd(model=name, rate=0.25)
        trainers[name] = trl_tiny.ours(tmp_path, args=args, **told)
        trainers[name].train()
    initial, average, policy = batches[:2], batches[2:4], batches[4:]
    start = trl_tiny.tiny_model(0).state_dict()
    for (batch, output, weights), own in zip(
        [*initial, *average, *policy], [start, start, start, None, start, None]
    ):
        if own is None and batch is average[1][0]:
            own = {k: start[k] + 0.25 * (weights[k] - start[k]) for k in start}
        assert_scored(batch, output, own or weights, with_solutions(output))
    assert trl_tiny.largest_gap(policy[1][2], start) > 1e-3


def test_trl_s_reference_is_the_first_policy(tmp_path, batches):
    """With beta > 0 TRL has the first weights already, and no copy is made."""
    trl_tiny.tiny_model(0).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    args = opsd() | {"beta": 0.05}
    more = {"rollout_func": trl_tiny.told, "train_dataset": solved()}
    trainer = trl_tiny.ours(tmp_path, args=args, model=model, **more)
    assert trainer.credit_teacher.model is trainer.ref_model
    assert trainer.credit_teacher.weights == {}
    trainer.train()
    copied = trl_tiny.ours(tmp_path, args=args | {"beta": 0.0}, **more)
    copied.train()
    assert copied.credit_teacher.weights
    torch.testing.assert_close(batches[1][0].teacher_logp_NT, batches[3][0].teacher_logp_NT)


def test_an_adapter_starts_as_nothing(tmp_path, batches):
    """The first weights of a model with an adapter are those without it; only the adapter's are
    kept.
    """
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    more = {"rollout_func": trl_tiny.told, "train_dataset": solved(), "peft_config": lora}
    args = opsd() | {"learning_rate": 0.05}
    trainer = trl_tiny.ours(tmp_path, args=args, **more)
    assert all("lora_" in name for name in trainer.credit_teacher.weights)
    trainer.train()
    plain = trl_tiny.ours(tmp_path, args=opsd(), **(more | {"peft_config": None}))
    plain.train()
    adapted, whole = batches[1][0], batches[3][0]
    torch.testing.assert_close(adapted.teacher_logp_NT, whole.teacher_logp_NT, rtol=0, atol=3e-6)
    assert (adapted.trainer_logp_NT - whole.trainer_logp_NT).abs().max() > 1e-3


def test_a_resumed_training_has_the_average(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 4, "max_steps": 12}
    args = sdpo(source=["sibling"], rate=0.3) | saved
    whole = trl_tiny.ours(tmp_path, args=args, rollout_func=trl_tiny.told)
    whole.train()
    checkpoint = tmp_path / "checkpoint-8"
    resumed = trl_tiny.ours(tmp_path, args=args, rollout_func=trl_tiny.told, seed=9)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    trl_tiny.assert_identical(trl_tiny.weights(resumed), trl_tiny.weights(whole))
    trl_tiny.assert_identical(
        saved_weights(resumed.credit_teacher), saved_weights(whole.credit_teacher)
    )
    (checkpoint / TEACHER).unlink()
    again = trl_tiny.ours(tmp_path, args=args, rollout_func=trl_tiny.told)
    with pytest.raises(ValueError, match="no teacher.safetensors, so the teacher's average"):
        again.train(resume_from_checkpoint=str(checkpoint))


def test_dropout_and_checkpointing_are_off_while_a_teacher_reads(tmp_path, batches):
    args = opsd(model="policy") | {"gradient_checkpointing": True, "max_steps": 1}
    model = trl_tiny.tiny_model(0, attention_dropout=0.5)
    trainer = trl_tiny.ours(tmp_path, args=args, model=model, train_dataset=solved())
    modes = []
    model.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    trainer.train()
    assert trainer.model.training and modes.count(False) >= 8
    batch, output, weights = batches[0]
    assert_scored(batch, output, weights, with_solutions(output))


def test_bf16(tmp_path, batches):
    """TRL's autocast holds for the teacher too."""
    args = opsd(model="policy") | {"bf16": True, "max_steps": 1}
    trainer = trl_tiny.ours(tmp_path, args=args, train_dataset=solved())
    trainer.train()
    batch, output, weights = batches[0]
    assert batch.teacher_logp_NT.dtype == torch.float32
    assert_scored(batch, output, weights, with_solutions(output), atol=0.5)
    with pytest.raises(AssertionError, match="not close"):
        assert_scored(batch, output, weights, with_solutions(output))


def test_conversations_of_an_environment(tmp_path, batches):
    """``as_rollout_func`` renders prompts itself, and the teacher's as it does; a sibling's whole
    conversation is read.
    """
    from counterpoise.hosts.trl import as_rollout_func
    from counterpoise.policy.load import load_model

    policy = load_model("bundled_turns")
    game = as_rollout_func("guess", n=4, turns=2, max_turns=2, max_turn_tokens=4, chat=False)
    template = {"sibling": "{demonstration} {prompt}"}
    args = sdpo(model="policy", template=template) | {"max_steps": 1, "max_completion_length": 8}
    more = {"model": policy.model, "processing_class": policy.tokenizer, "reward_funcs": None}
    trainer = trl_tiny.ours(tmp_path, args=args, **more | game)
    trainer.train()
    batch, output, weights = batches[0]
    assert batch.has_teacher_N.any() and (batch.mask_NT != output["completion_mask"].bool()).any()
    encode = policy.tokenizer
    asked = encode.batch_decode(output["prompt_ids"], skip_special_tokens=True)
    texts = encode.batch_decode(output["completion_ids"], skip_special_tokens=True)
    group, right = batch.group_N.tolist(), (batch.reward_N >= 0.5).tolist()
    every = group_readings([Prompt("", t, "") for t in asked], texts, group, right, None, template)
    prompts = [None if one is None else encode(one.text)["input_ids"] for one in every]
    policy.model.load_state_dict(weights)
    assert_scored(batch, output, policy.model, prompts)


def test_a_rollout_func_that_renders_its_own_way(tmp_path, batches):
    def reversed_prompts(prompts, trainer):
        out = trl_tiny.told(prompts, trainer)
        return out | {"prompt_ids": [ids[::-1] for ids in out["prompt_ids"]]}

    more = {"train_dataset": solved(), "rollout_func": reversed_prompts}
    args = opsd() | {"max_steps": 1}
    with pytest.raises(ValueError, match="prompt_ids of rollout 0 are not what TRL makes of its"):
        trl_tiny.ours(tmp_path, args=args, **more).train()
    reversed_prompts.encode_prompts = lambda prompts, trainer: [
        ids[::-1] for ids in trainer.processing_class(prompts)["input_ids"]
    ]
    trainer = trl_tiny.ours(tmp_path, args=args, **more)
    trainer.train()
    batch, output, weights = batches[-1]
    solution = dict(zip(solved()["prompt"], solved()["solution"]))
    words, prompts = trl_tiny.tiny_tokenizer(), []
    for ids, mask in zip(output["prompt_ids"], output["prompt_mask"]):
        text = " ".join(words.decode(ids[mask.bool()]).split()[::-1])
        prompts.append(words(f"{solution[text]} {text}")["input_ids"][::-1])
    assert_scored(batch, output, weights, prompts)


REFUSED = {
    "no column": (opsd(), {}, "no column 'solution'. Its columns: prompt. Set solution_column"),
    "no room": (opsd() | {"remove_unused_columns": True}, {"train_dataset": solved}, "takes away"),
    "itself": ({"method": "top_d"}, {}, "reads the prompt alone, so it has nothing to teach"),
    "vocabulary": (
        {"method": "top_d", "method_axes": {"credit": {"model": "bundled"}}},
        {},
        "teacher 'bundled': its vocabulary is not that of 'model': token",
    ),
    "nowhere": (
        {"method": "top_d", "method_axes": {"credit": {"model": "./none"}}},
        {},
        "model './none': no such folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_before_training(case, tmp_path):
    args, more, message = REFUSED[case]
    more = {name: make() for name, make in more.items()}
    with pytest.raises(ValueError, match=message) as error:
        trl_tiny.ours(tmp_path, args=args, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["initial", "average"])
def test_copies_of_sharded_weights_are_refused(model, tmp_path):
    trainer = trl_tiny.ours(tmp_path, args=opsd(model=model), train_dataset=solved())
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=rf"weights of its own \(model: {model}\)"):
        host.check_trainer(trainer, trainer.credit_setup)


def test_columns_that_no_teacher_reads_are_warned_about():
    for args in (
        {"method": "dapo", "solution_column": "a"},
        {"method": "opsd", "feedback_column": "a"},
    ):
        with pytest.warns(UserWarning, match="='a' is not read: method"):
            trl_tiny.CreditGRPOConfig("unused", **trl_tiny.SMALL | args)
