"""The code blocks of docs/hosts/{slime,prime_rl,nemo_rl,tinker}.md, run with stand-ins for those
hosts: what they hand over, what they get back.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import counterpoise as cp

PAGES = Path(__file__).parents[2] / "docs" / "hosts"
# two prompts of three rollouts: token ids, log-probs when sampled, number of the prompt, reward
ROLLOUTS = [
    ([5, 6, 7, 2], [-0.1, -0.7, -0.3, -0.2], 0, 1.0),
    ([5, 8, 2], [-0.1, -1.2, -0.4], 0, 0.0),
    ([9, 6, 2], [-2.0, -0.6, -0.5], 0, 0.0),
    ([4, 4, 2], [-0.5, -0.5, -0.1], 1, 1.0),
    ([4, 3, 3, 3, 2], [-0.4, -1.0, -0.9, -0.8, -0.1], 1, 0.0),
    ([7, 2], [-3.0, -0.2], 1, 1.0),
]
PROMPT = [[11, 12, 13], [14, 15]]


def block(page, first_line):
    """One Python block of a page, found by its first line."""
    found = [
        code
        for code in re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
        if code.startswith(first_line)
    ]
    assert len(found) == 1, f"{page}: {len(found)} blocks start with {first_line!r}"
    return found[0]


def run(page, first_line):
    names = {"__name__": "page"}
    exec(compile(block(page, first_line), f"{page}: {first_line}", "exec"), names)
    return names


def batch_of(rollouts):
    ids, logp, group, reward = zip(*rollouts)
    return cp.TokenBatch.from_lists(ids, group=group, reward=reward, sampler_logp=logp)


def credit_of(name, rollouts=ROLLOUTS):
    """Credit of every rollout as a list, by the core alone."""
    batch = batch_of(rollouts)
    credit_NT = cp.method(name).assign(batch).credit_NT
    assert credit_NT.abs().sum() > 0
    return [row[:n].tolist() for row, n in zip(credit_NT, batch.length_N.tolist())]


@pytest.fixture
def module(monkeypatch):
    """Put a stand-in for one of a host's modules where ``import`` finds it; its packages too."""

    def add(name, **contents):
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            path = ".".join(parts[:k])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if k > 1:
                monkeypatch.setattr(
                    sys.modules[".".join(parts[: k - 1])],
                    parts[k - 1],
                    sys.modules[path],
                    raising=False,
                )
        for key, value in contents.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
        return sys.modules[name]

    return add


def slime_sample(ids, logp, group, reward, tool_at=None):
    """slime's Sample: tokens of prompt and response, the rest of the response alone; optionally two
    tokens of a tool in the middle.
    """
    response, logp, mask = list(ids), list(logp), None
    if tool_at is not None:
        mask = [1] * tool_at + [0, 0] + [1] * (len(ids) - tool_at)
        response[tool_at:tool_at], logp[tool_at:tool_at] = [30, 31], [0.0, 0.0]
    return SimpleNamespace(
        tokens=PROMPT[group] + response,
        response_length=len(response),
        loss_mask=mask,
        rollout_log_probs=logp,
        group_index=group + 7,
        reward=reward,
        teacher_log_probs=None,
        get_reward_value=lambda args: reward,
    )


def test_slime():
    page = run("slime.md", "# credit_slime.py")
    samples = [slime_sample(*row, tool_at=1 if k == 4 else None) for k, row in enumerate(ROLLOUTS)]
    samples.append(SimpleNamespace(**vars(samples[0]) | {"loss_mask": [0] * 4}))
    raw, rewards = page["compute"](None, samples)
    assert raw == rewards == [row[3] for row in ROLLOUTS] + [1.0]
    expected = credit_of("ktae")
    expected[4][1:1] = [0.0, 0.0]
    assert [s.teacher_log_probs for s in samples] == [*expected, [0.0] * 4]
    # slime turns the lists into tensors and shares the samples out; a rank here has three of them
    rollout_data = {
        "teacher_log_probs": [torch.tensor(samples[k].teacher_log_probs) for k in (4, 0, 6)]
    }
    page["read"](None, rollout_data)
    assert [row.tolist() for row in rollout_data["advantages"]] == [
        pytest.approx(expected[4]),
        pytest.approx(expected[0]),
        [0.0] * 4,
    ]
    assert rollout_data["returns"] is rollout_data["advantages"]


class PrimeRollout(SimpleNamespace):
    """prime-rl's Rollout: samples of prompt and sampled tokens with a mask, and one advantage a
    token.
    """

    def assign_advantages(self, values):
        assert len(values) == sum(len(sample.token_ids) for sample in self.samples)
        self.advantages = values


def test_prime_rl_credit(module):
    registry = {}
    module("prime_rl.orchestrator.algo", ALGORITHM_CLASSES=registry)
    module("prime_rl.orchestrator.algo.base", Algorithm=object)
    run("prime_rl.md", "# counterpoise_grpo.py")

    def sample(ids, logp, prompt):
        n = len(prompt)
        return SimpleNamespace(
            token_ids=prompt + ids, mask=[False] * n + [True] * len(ids), logprobs=[0.0] * n + logp
        )

    rollouts = ROLLOUTS[:3]
    group = [
        PrimeRollout(samples=[sample(ids, logp, PROMPT[0])], reward=reward)
        for ids, logp, _, reward in rollouts
    ]
    ids, logp, _, reward = rollouts[0]  # two turns of the first rollout are two samples
    group[0].samples = [sample(ids[:1], logp[:1], PROMPT[0]), sample(ids[1:], logp[1:], [20, 21])]
    asyncio.run(registry["grpo"]().score_group(group))
    first, second, third = credit_of("ktae", rollouts)
    assert group[0].advantages == [0.0, 0.0, 0.0, *first[:1], 0.0, 0.0, *first[1:]]
    assert [rollout.advantages for rollout in group[1:]] == [[0.0] * 3 + second, [0.0] * 3 + third]


def test_prime_rl_loss(module):
    module(
        "prime_rl.trainer.rl.loss",
        LossOutputs=lambda loss, metrics: SimpleNamespace(loss=loss, metrics=metrics),
    )
    page = run("prime_rl.md", "# counterpoise_loss.py")
    trainer_logp = torch.tensor([-9.0, -1.0, -0.5, -2.0], requires_grad=True)
    inputs = SimpleNamespace(
        trainer_logprobs=trainer_logp,
        inference_logprobs=torch.tensor([0.0, -1.0, -1.0, -2.5]),
        advantages=torch.tensor([0.0, 1.0, 1.0, -1.0]),
        loss_mask=torch.tensor([False, True, True, True]),
    )
    out = page["loss"](inputs, method="dapo")
    # ratios 1, e^0.5 and e^0.5; clip at 1.28 from above holds where credit is positive: -1 - 1.28 +
    # e^0.5
    assert out.loss.item() == pytest.approx(-1 - 1.28 + torch.tensor(0.5).exp().item(), rel=1e-6)
    assert out.metrics["clipped_frac"].item() == pytest.approx(1 / 3)
    (grad,) = torch.autograd.grad(out.loss, trainer_logp)
    assert grad.tolist() == pytest.approx(
        [0.0, -1.0, 0.0, torch.tensor(0.5).exp().item()], rel=1e-6
    )


def test_nemo_rl(module):
    grpo = module("nemo_rl.algorithms.grpo")
    page = run("nemo_rl.md", "# credit_nemo_rl.py")
    page["use"]("ktae")
    estimator = grpo._create_advantage_estimator({"grpo": {}})
    rows, expected = [], []
    for k, (ids, logp, group, _) in enumerate(ROLLOUTS):
        n, credit = len(PROMPT[group]), credit_of("ktae")[k]
        messages = [
            (PROMPT[group], [0] * n, [0.0] * n),
            (ids[:1], [1], logp[:1]),
            ([30, 31], [0, 0], [-0.3, -0.3]),
            (ids[1:], [1] * len(ids[1:]), logp[1:]),
        ]
        if k != 4:  # one rollout calls a tool
            del messages[2]
        rows.append(messages)
        expected.append([0.0] * n + credit[:1] + [0.0] * (2 if k == 4 else 0) + credit[1:])
    rows.append(
        [(PROMPT[1], [0, 0], [0.0, 0.0]), ([4, 2], [0, 0], [-0.1, -0.1])]
    )  # a rollout that was masked out
    width = 12

    def pad_prompts(column):
        joined = [sum((list(message[column]) for message in row), []) for row in rows]
        return torch.tensor([row + [0] * (width - len(row)) for row in joined])

    logs = [[{"token_ids": torch.tensor(ids)} for ids, _, _ in row] for row in rows]
    prompt_ids = torch.tensor(
        [
            [*PROMPT[group], *[0] * (3 - len(PROMPT[group]))]
            for group in [row[2] for row in ROLLOUTS] + [1]
        ]
    )
    rewards = torch.tensor([row[3] for row in ROLLOUTS] + [1.0])
    got = estimator.compute_advantage(
        prompt_ids=prompt_ids,
        rewards=rewards,
        mask=pad_prompts(1).float(),
        repeated_batch={"message_log": logs},
        logprobs_policy=pad_prompts(2),
        logprobs_reference=None,
    )
    assert got.shape == (7, width)
    assert got.tolist() == [
        pytest.approx(row + [0.0] * (width - len(row))) for row in [*expected, []]
    ]


class TinkerClient:
    """Keeps the data and the gradient of every batch; the log-probs of the model that is trained
    are given.
    """

    def __init__(self, logprobs_of):
        self.logprobs_of, self.updates, self.rates = logprobs_of, [], []

    def forward_backward_custom(self, data, loss):
        logprobs = [self.logprobs_of(datum).requires_grad_() for datum in data]
        total, metrics = loss(data, logprobs)
        self.updates.append((data, torch.autograd.grad(total, logprobs), metrics))
        return SimpleNamespace(result=lambda: None)

    def optim_step(self, params):
        self.rates.append(params.learning_rate)
        return SimpleNamespace(result=lambda: None)


def test_tinker(module):
    module(
        "tinker",
        Datum=SimpleNamespace,
        ModelInput=SimpleNamespace(from_ints=lambda tokens: tokens),
        TensorData=SimpleNamespace(from_torch=lambda tensor: tensor),
        AdamParams=SimpleNamespace,
    )
    page = run("tinker.md", "# train_tinker.py")
    client = TinkerClient(lambda datum: -0.05 * datum.loss_fn_inputs["target_tokens"].float())
    page["train"](
        client,
        [(PROMPT[row[2]], row[0], row[1], row[2], row[3]) for row in ROLLOUTS],
        num_updates=2,
        lr=1e-5,
    )
    assert client.rates == [1e-5, 1e-5]
    method, batch = cp.method("dfpo_min", plan="query_preserved"), batch_of(ROLLOUTS)
    credit, plan = method.assign(batch), method.plan(batch, num_updates=2)
    assert sorted(len(set(batch.group_N[row_R].tolist())) for row_R in plan) == [1, 1]
    for row_R, (data, grads, _) in zip(plan, client.updates, strict=True):
        rows = method.rows(batch, credit, row_R)
        logp_NT = (-0.05 * batch.token_ids_NT[row_R].float()).requires_grad_()
        out = method.loss(logp_NT, method.prepare(logp_NT, rows))
        (expected_NT,) = torch.autograd.grad((out.loss_NT * rows.scale_NT).sum(), logp_NT)
        assert expected_NT.abs().sum() > 0
        for datum, grad, expected_T, row in zip(
            data, grads, expected_NT, row_R.tolist(), strict=True
        ):
            ids, _, group, _ = ROLLOUTS[row]
            n = len(PROMPT[group]) - 1
            assert datum.model_input == (PROMPT[group] + ids)[:-1]
            assert datum.loss_fn_inputs["target_tokens"].tolist() == (PROMPT[group] + ids)[1:]
            assert datum.loss_fn_inputs["weights"].tolist() == [0.0] * n + [1.0] * len(ids)
            assert grad.tolist() == pytest.approx([0.0] * n + expected_T[: len(ids)].tolist())


@pytest.mark.parametrize("page", ["slime.md", "prime_rl.md", "nemo_rl.md", "tinker.md"])
def test_pages_say_what_was_not_run_and_stay_short(page):
    text = (PAGES / page).read_text()
    assert re.search(r"^\*\*Not run (inside|against) ", text, re.MULTILINE)
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
