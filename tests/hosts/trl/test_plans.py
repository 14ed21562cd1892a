"""The plan decides which rows share an update; how an update is cut into micro-batches changes
nothing.
"""

from __future__ import annotations

import zlib

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
import counterpoise.hosts.trl.method as trl_method
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
SGD = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 0.0}


class Watched(trl_tiny.CreditGRPOTrainer):
    """Keeps the rows of every micro-batch that was trained on, fillers left out, and every plan."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows, self.plans = [], []

    def _take_batch(self, output):
        super()._take_batch(output)
        self.plans.append(self.credit_plan)

    def _compute_loss(self, model, inputs):
        self.rows.append([row for row in inputs["cp_row"].tolist() if row >= 0])
        return super()._compute_loss(model, inputs)

    def updates(self):
        """Rows of each update."""
        size = self.args.gradient_accumulation_steps
        return [sorted(sum(self.rows[k : k + size], [])) for k in range(0, len(self.rows), size)]


def trained(tmp_path, cls=Watched, **kwargs):
    args = kwargs.pop("args")
    trainer = trl_tiny.ours(
        tmp_path, args=SGD | args, cls=cls, **{"rollout_func": trl_tiny.told} | kwargs
    )
    start = trl_tiny.weights(trainer)
    trainer.train()
    trainer.moved = {name: value - start[name] for name, value in trl_tiny.weights(trainer).items()}
    return trainer


def relative_gap(got, expected):
    size = max(float(value.abs().max()) for value in expected.moved.values())
    assert size > 1e-4
    return trl_tiny.largest_gap(got.moved, expected.moved) / size


@pytest.mark.parametrize(
    "plan", ["query_preserved", "reward_balanced", "length_sorted", "round_robin", "random_rows"]
)
@pytest.mark.parametrize("method", ["dapo", "crf_ntf"])
def test_steps_are_the_plans(method, plan, tmp_path):
    """By TRL's loss and by ours; the second pass of num_iterations trains on the same updates."""
    trainer = trained(
        tmp_path, args={"method": method, "plan": plan, "num_iterations": 2, "max_steps": 16}
    )
    if method == "dapo" and plan == "random_rows":
        assert trainer.credit_plan is None  # TRL's own shuffle is left to TRL
        return
    planned = [sorted(row_R.tolist()) for plan in trainer.plans for row_R in [*plan, *plan]]
    assert trainer.updates() == planned


def test_whole_prompts_meet(tmp_path):
    trainer = trained(tmp_path, args={"method": "uniform", "plan": "query_preserved"})
    assert [sorted({row // 4 for row in rows}) for rows in trainer.updates()[:4]] == trainer.plans[
        0
    ].manifest["groups"]
    assert all(len(rows) == 8 for rows in trainer.updates())
    logged = [row for row in trainer.state.log_history if "plan/pairs_kept" in row]
    assert [row["plan/pairs_kept"] for row in logged] == [1.0, 1.0]
    assert trainer.plans[0].manifest["rows"] != trainer.plans[1].manifest["rows"]


def test_trls_own_shuffle_splits_prompts(tmp_path):
    """What the plan changes: left alone, TRL spreads the rollouts of a prompt over the updates."""
    trainer = trained(tmp_path, args={"method": "uniform", "ledger_every": 1, "max_steps": 4})
    batch = cp.TokenBatch.from_lists(
        [[1]] * 32,
        group=[k // 4 for k in range(32)],
        reward=[k % 2 for k in range(32)],
        sampler_logp=[[-1.0]] * 32,
    )
    assert cp.audit([torch.tensor(rows) for rows in trainer.updates()], batch).pairs_kept < 0.6


def half_solved(completions, **kwargs):
    """Three of eight prompts are solved by all: constant groups, which reward_balanced
    leaves out.
    """
    return [1.0 if (k // 4) % 8 < 3 else float(k % 2) for k in range(len(completions))]


@pytest.mark.parametrize("method", ["grpo", "dr_grpo"])
def test_rows_that_are_left_out_do_not_count(method, tmp_path, monkeypatch):
    """Unequal updates with fillers: TRL's mean over rows, corrected, is our reduction over the
    update's true rows.
    """
    args = {"method": method, "plan": "reward_balanced", "max_steps": 4}
    by_trl = trained(tmp_path / "trl", args=args, reward_funcs=half_solved)
    assert sorted({len(rows) for rows in by_trl.updates()}) == [4, 8]
    assert by_trl.plans[0].manifest["left_out"] == list(range(12))
    monkeypatch.setattr(trl_method, "trl_fields", lambda method: None)
    ours = trained(tmp_path / "ours", args=args, reward_funcs=half_solved)
    assert ours.credit_setup.has_own_loss
    assert ours.updates() == by_trl.updates()
    assert relative_gap(ours, by_trl) < 1e-4


@pytest.mark.parametrize(
    "method",
    ["delta", "grpo", "dr_grpo", "dfpo_min", "dfpo_orth", "crf_ntf", "gmpo", "clip_cov", "tpo"],
)
def test_cuts_of_a_step_change_nothing(method, tmp_path):
    """Eight rows per update as one micro-batch of eight, four of two, eight of one."""
    runs = []
    for rows, micro in ((8, 1), (2, 4), (1, 8)):
        sizes = {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": micro,
            "steps_per_generation": 2 * micro,
        }
        runs.append(
            trained(
                tmp_path / str(rows),
                args={"method": method, "plan": "query_preserved", "max_steps": 4} | sizes,
            )
        )
    assert runs[1].updates() == runs[0].updates() == runs[2].updates()
    assert relative_gap(runs[1], runs[0]) < 1e-4
    assert relative_gap(runs[2], runs[0]) < 1e-4


def test_one_update_a_generation_is_warned_about(tmp_path):
    args = trl_tiny.SMALL | {
        "method": "dapo",
        "plan": "query_preserved",
        "steps_per_generation": 2,
        "max_steps": 2,
    }
    with pytest.warns(
        UserWarning,
        match=(
            "does nothing here: there is one update per generation.*Raise steps_per_generation to 8"
        ),
    ):
        trl_tiny._trainer(
            Watched, trl_tiny.CreditGRPOConfig(output_dir=str(tmp_path), **args), 0, {}
        )


def test_with_one_update_the_plan_changes_nothing(tmp_path):
    args = {"method": "dapo", "steps_per_generation": 2, "max_steps": 3}
    planned = trained(tmp_path / "a", args=args | {"plan": "query_preserved"})
    shuffled = trained(tmp_path / "b", args=args)
    assert relative_gap(planned, shuffled) < 1e-4


def test_dfpo_sees_the_whole_step(tmp_path):
    """Minimum over the group of exp(mean log r), from log-probs of the policy as it is before the
    update: by hand, second update.
    """
    seen = []

    class Kept(Watched):
        def _compute_loss(self, model, inputs):
            rows, before = inputs["cp_rows"], inputs["old_per_token_logps"]
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            with torch.no_grad():
                now = self._get_per_token_logps_and_entropies(
                    model, ids, attended, before.shape[1]
                )[0]
            mean_N = ((now - before) * rows.mask_NT).sum(1) / rows.mask_NT.sum(1)
            seen.append((self._step // 2, rows.group_N, mean_N.exp(), rows.update_NT, rows.mask_NT))
            return super()._compute_loss(model, inputs)

    args = {"method": "dfpo_min", "max_steps": 2, "steps_per_generation": 4}
    trained(
        tmp_path,
        cls=Kept,
        args=args,
        reward_funcs=lambda completions, **kw: [float(k % 2) for k in range(len(completions))],
    )
    assert len(seen) == 4
    for update in (0, 1):
        group, weight, given, mask = (
            torch.cat(parts) for parts in zip(*[columns for at, *columns in seen if at == update])
        )
        for g in group.unique():
            is_in = group == g
            expected = torch.where(mask[is_in], weight[is_in].min(), 0)
            torch.testing.assert_close(given[is_in], expected, rtol=0, atol=1e-6)
        assert (weight.max() - weight.min() > 1e-4) == (update == 1)


@pytest.mark.parametrize("method", ["uniform", "gmpo"])
def test_rows_that_fill_up_take_nothing_from_the_kl(method, tmp_path):
    """Updates of unequal size as one micro-batch or four, with TRL's means over rows."""
    trl_tiny.tiny_model(0).save_pretrained(tmp_path / "model")  # TRL loads the reference from it
    trainers = []
    for rows, micro in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro}
        args = {"method": method, "plan": "round_robin", "loss_type": "grpo", "beta": 0.3} | sizes
        trainers.append(
            trained(
                tmp_path / f"{rows}",
                args=args | {"steps_per_generation": 4 * micro, "max_steps": 4},
                model=str(tmp_path / "model"),
                reward_funcs=some_graded,
            )
        )
    one, cut = trainers
    assert any(len(rows) % 4 for rows in one.rows)
    assert relative_gap(cut, one) < 1e-4


def some_graded(completions, **columns):
    """No reward for one completion of five."""
    sums = [zlib.crc32(text.encode()) for text in completions]
    return [None if number % 5 == 0 else float(number % 2) for number in sums]
