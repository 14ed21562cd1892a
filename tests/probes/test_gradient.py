"""Probe gradient: gradients that share a forward are the trainer's, and known angles, biases and
worths come out of noise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import counterpoise as cp
from counterpoise.cli import run_command
from counterpoise.ledger.calculus.snapshot import snapshot
from counterpoise.probes import open_scene
from counterpoise.probes.fresh import Forward, fresh_batch, with_columns
from counterpoise.probes.gradient import compare_gradients, figure, probe, sheet, summarise
from counterpoise.probes.gradient.cosines import (
    Products,
    cosines_of_mean,
    halves_cosine,
    jackknife_error,
    mean_cosines,
    reliability,
    times_more,
    worths,
)
from counterpoise.probes.gradient.truth import PLAIN
from counterpoise.probes.gradient.vectors import (
    adamw_step,
    coefficients,
    gradients,
    likenesses,
    moments_of,
    parameters_of,
    sketch,
    sketch_signs,
)
from counterpoise.probes.output import Output
from counterpoise.trainer.update import accumulate_gradients, prepare_rows
from helpers.probe_run import small_run

SMALL = {"truth": 64, "batches": 3, "rollouts": 12, "methods": "dapo, rloo, psr, delta"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("gradient") / "run", ledger_every=0)


@pytest.fixture(scope="module")
def scene(run: Path):
    return open_scene(run, 1, trust=True)


@pytest.mark.parametrize(
    "name", ["dr_grpo", "grpo", "gspo", "dapo", "tpo", "dfpo_orth", "clip_cov", "crf_ntf", "ibpo"]
)
def test_a_shared_forward_gives_the_gradient_of_the_trainers_update(name: str, scene) -> None:
    """The whole batch as one update, in float64, the method's own loss and reduction; a second
    method beside it changes nothing.
    """
    model = scene.policy.model.double()
    try:
        method, how = cp.method(name), Forward(token_budget=900)
        collected = with_columns(model, scene.collected, method.needs, how)
        batch = collected.batch.replace(sampler_logp_NT=collected.batch.trainer_logp_NT)
        collected = collected._replace(batch=batch)
        credit = method.assign(batch)
        coef_NT = coefficients(method, batch, credit)
        ours_P, _ = gradients(model, collected, torch.stack([coef_NT, coef_NT**2]), how)

        row_R = method.plan(batch, 1).updates[0]
        rows = prepare_rows(
            model, method, method.rows(batch, credit, row_R), collected, scene.config
        )
        model.zero_grad()
        accumulate_gradients(model, scene.optimizer, method, rows, collected, scene.config)
        theirs_P = torch.cat([p.grad.flatten() for p in parameters_of(model) if p.grad is not None])
        assert theirs_P.norm() > 0
        assert (ours_P - theirs_P).norm() < 1e-9 * theirs_P.norm()
    finally:
        model.zero_grad()
        model.float()


def test_plain_rollouts_are_the_control_up_to_a_factor(scene) -> None:
    """Leave-one-out is the group mean times G / (G - 1), and on-policy a clip cuts nothing."""
    batch = scene.collected.batch.replace(trainer_logp_NT=scene.collected.batch.sampler_logp_NT)
    coefs = {
        label: coefficients(method, batch, method.assign(batch))
        for label, method in {
            "dr_grpo": cp.method("dr_grpo"),
            "plain": PLAIN,
            "psr": cp.method("psr"),
        }.items()
    }
    alike = likenesses(coefs)
    assert alike["plain"].like == "dr_grpo" and alike["psr"].like == "psr"
    assert alike["plain"].scale == pytest.approx(6 / 5)


def test_adamw_step_is_the_optimizers(scene) -> None:
    """Without momentum, weight decay and clipping; a method's scale does not matter, that of the
    run is taken.
    """
    model, optimizer = scene.policy.model, scene.optimizer
    moments = moments_of(model, optimizer)
    assert moments is not None
    generator = torch.Generator().manual_seed(0)
    direction_P = torch.randn(len(moments.square_P), generator=generator)
    usual = (moments.square_P.sum() / (1 - moments.beta**moments.num_updates)).sqrt()
    weight = torch.nn.Parameter(torch.zeros(len(direction_P)))
    adam = torch.optim.AdamW([weight], lr=1.0, betas=(0.0, moments.beta), eps=moments.eps)
    adam.state[weight] = {
        "step": torch.tensor(float(moments.num_updates)),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": moments.square_P.clone(),
    }
    weight.grad = direction_P * usual / direction_P.norm()
    adam.step()
    assert torch.allclose(adamw_step(17 * direction_P, moments), -weight.data, rtol=1e-4)
    fresh = torch.optim.AdamW(parameters_of(model))
    assert moments_of(model, fresh) is None


def test_sketch_keeps_products_up_to_its_error() -> None:
    generator = torch.Generator().manual_seed(1)
    a_P, noise_P = torch.randn(2, 50_000, generator=generator)
    b_P, sign_P = a_P + noise_P, sketch_signs(50_000, torch.device("cpu"))
    small_a, small_b = sketch(a_P, sign_P, 1009), sketch(b_P, sign_P, 1009)
    error = abs(float(small_a @ small_b - a_P @ b_P)) / float(a_P.norm() * b_P.norm())
    assert len(small_a) == 1009 and error < 4 / 1009**0.5
    assert torch.equal(sketch(a_P[:1009], sign_P[:1009], 1009), a_P[:1009])


def gaussian_products(
    *, noise: float, angle: float = 0.0, batches: int = 24, truth_noise: float = 1.0, seed: int = 0
) -> Products:
    """Gradients of two methods in 4,000 dimensions: the truth (1, 0, ...) plus noise whose squared
    length is ``noise`` per batch; and, with the same noise, a mean turned by ``angle``.
    """
    rng, size, chunks = np.random.default_rng(seed), 4000, 16
    mean = np.zeros((2, size))
    mean[:, 0], mean[1, :2] = 1.0, (np.cos(angle), np.sin(angle))
    vector_BS = rng.normal(0, (noise / size) ** 0.5, (batches, size))
    truth_CS = mean[0] + rng.normal(0, (truth_noise / size) ** 0.5, (chunks, size))
    vectors = mean[:, None] + vector_BS
    return Products(
        cross_MBC=vectors @ truth_CS.T,
        own_MBB=vectors @ vectors.transpose(0, 2, 1),
        truth_CC=truth_CS @ truth_CS.T,
        scale_MB=np.ones((2, batches)),
        is_first_C=np.arange(chunks) % 2 == 0,
        weight_C=np.ones(chunks),
    )


def test_known_angle_and_bias_come_out_of_noise() -> None:
    """A batch has cosine 1 / sqrt(1 + noise) with the truth; the mean has cos(angle)."""
    products = gaussian_products(noise=9.0, angle=np.pi / 3, truth_noise=8.0)
    cosine, error = mean_cosines(products), jackknife_error(products, mean_cosines)
    expected = np.array([1.0, 0.5]) / 10**0.5
    assert np.all(np.abs(cosine - expected) < 4 * error) and error.max() < 0.03
    of_mean, error = cosines_of_mean(products), jackknife_error(products, cosines_of_mean)
    assert np.all(np.abs(of_mean - [1.0, 0.5]) < 4 * error) and error.max() < 0.15


def test_intervals_cover_as_often_as_they_say() -> None:
    """Of 100 toys 95 should hold the truth within two standard errors; noise of batches and of the
    truth together.
    """
    hits = 0
    for seed in range(100):
        products = gaussian_products(noise=9.0, batches=12, truth_noise=30.0, seed=seed)
        off = abs(mean_cosines(products)[0] - 10**-0.5)
        hits += off < 2.1 * jackknife_error(products, mean_cosines)[0]
    assert hits >= 87


def test_halves_agree_as_the_law_of_noise_predicts() -> None:
    """Halves of 8 chunks with noise v each: r = 1 / (1 + v / 8); the needed factor undoes v."""
    for noise in (4.0, 24.0):
        halves = halves_cosine(gaussian_products(noise=1.0, truth_noise=noise))
        assert halves == pytest.approx(1 / (1 + noise / 8), abs=0.05)
        assert times_more(halves) == pytest.approx(4 * noise / 8, rel=0.25)
        assert reliability(halves) == pytest.approx((1 + noise / 16) ** -0.5, abs=0.03)
    assert np.isnan(times_more(-0.1)) and np.isnan(reliability(-0.1))


def test_worth_is_the_number_of_rollouts_with_that_cosine() -> None:
    """Twice the noise is half the rollouts: n0 = noise x rollouts, cos = sqrt(n / (n + n0))."""
    plain = gaussian_products(noise=9.0, batches=48)
    noisy = gaussian_products(noise=18.0, batches=48, seed=1)
    both = plain._replace(
        cross_MBC=np.stack([plain.cross_MBC[0], noisy.cross_MBC[0]]),
        own_MBB=np.stack([plain.own_MBB[0], noisy.own_MBB[0]]),
        truth_CC=plain.truth_CC,
    )
    both = both._replace(cross_MBC=np.stack([plain.cross_MBC[0], plain.cross_MBC[0]]))
    assert worths(both, plain=0, rollouts=128)[0] == 128.0
    assert worths(both, plain=0, rollouts=128)[1] == pytest.approx(64, rel=0.15)


def test_command_writes_tables_and_goes_on_where_it_stopped(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), "--batch", "1", "--probe", "gradient", "--trust", "--methods", "rloo, psr"]
    words += ["--set", "truth=64", "--set", "batches=3", "--set", "rollouts=12"]
    with pytest.raises(SystemExit, match="0"):
        run_command("probe", words)
    shown = capsys.readouterr().out
    assert "dr_grpo" in shown and "truth of 192 rollouts" in shown  # one group in each chunk
    folder = run / "probes" / "gradient" / "batch_000001"
    first = json.loads((folder / "summary.json").read_text())["numbers"]
    assert "<html" in (folder / "figure.html").read_text()[:200]
    assert not (folder / "truth.safetensors").exists()

    (folder / "batch_0001.parquet").unlink()  # the truth is gone too: it is made again for this one
    kept = (folder / "batch_0002.parquet").stat().st_mtime_ns
    with pytest.raises(SystemExit, match="0"):
        run_command("probe", words)
    assert json.loads((folder / "summary.json").read_text())["numbers"] == first
    assert (folder / "batch_0002.parquet").stat().st_mtime_ns == kept


def test_a_method_like_the_control_differs_by_nothing_and_is_worth_its_rollouts(
    run: Path, scene, tmp_path: Path
) -> None:
    before = snapshot(scene.policy.model, scene.optimizer)
    output = Output(tmp_path, "gradient", 1, {})
    probe(scene, output, **SMALL)  # pyright: ignore[reportArgumentType]
    numbers = summarise(output.tables())
    rloo = numbers["gradient"]["rloo"]
    assert rloo["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert rloo["verdict"] == "inactive here"
    assert rloo["worth"]["mean"] in (12.0, None)  # so small a truth may have no direction
    assert numbers["adamw"]["rloo"]["difference"]["mean"] == 0.0
    assert numbers["gradient"]["psr"]["with_control"] < 0.99
    after = snapshot(scene.policy.model, scene.optimizer)
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert not after.grads and torch.equal(before.cpu_rng, after.cpu_rng)


def test_own_batches_from_python(scene) -> None:
    methods = {name: cp.method(name) for name in ("dr_grpo", "nsr")}
    numbers = compare_gradients(
        scene.policy.model,
        truth=(fresh_batch(scene, "gradient/truth", 0, k, 12) for k in range(4)),
        batches=[fresh_batch(scene, "gradient/batches", 0, k, 12) for k in range(3)],
        methods=methods,
    )
    assert set(numbers["gradient"]) == set(methods) and "adamw" not in numbers
    with pytest.raises(ValueError, match="the control 'dr_grpoo' is not one of the methods"):
        compare_gradients(scene.policy.model, [], [], methods, control="dr_grpoo")
    with pytest.raises(ValueError, match="expected 4 chunks or more"):
        compare_gradients(scene.policy.model, [], [], methods)


def test_a_rule_with_state_has_seen_batches_before(scene) -> None:
    """value_baseline is the identity until its first fit; with batches to warm up on it differs."""
    methods = {
        "dr_grpo": cp.method("dr_grpo"),
        "own": cp.method("dr_grpo", credit=["value_baseline"]),
    }
    batches = [fresh_batch(scene, "gradient/batches", 0, k, 24) for k in range(3)]
    truth = [fresh_batch(scene, "gradient/truth", 0, k, 12) for k in range(4)]
    first = compare_gradients(scene.policy.model, truth, batches, methods)
    warm = compare_gradients(scene.policy.model, truth, batches, methods, warmup=batches)
    assert first["gradient"]["own"]["with_control"] > 0.9999
    assert warm["gradient"]["own"]["with_control"] < 0.99


def test_without_a_gradient_the_page_says_so(scene) -> None:
    """Every rollout earns the same: no number is made up."""
    batches = []
    for k in range(4):
        one = fresh_batch(scene, "gradient/batches", 0, k, 12)
        reward_N = torch.ones_like(one.batch.reward_N)
        batches.append(one._replace(batch=one.batch.replace(reward_N=reward_N)))
    methods = {"dr_grpo": cp.method("dr_grpo"), "psr": cp.method("psr")}
    numbers = compare_gradients(scene.policy.model, batches, batches, methods)
    assert numbers["gradient"]["psr"]["cosine"]["mean"] is None
    assert numbers["gradient"]["psr"]["verdict"] == "cannot be told"
    assert "there is no gradient" in sheet(numbers).notes[0]
    assert len(figure(numbers).data) == 4
