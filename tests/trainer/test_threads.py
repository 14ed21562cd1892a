"""Micro-batches in threads: the bits of one after the other, and nothing left behind."""

from __future__ import annotations

import time

import pytest
import torch

from counterpoise.policy import token_logp
from counterpoise.policy.fused import fused_layers
from counterpoise.policy.kernels import cpu
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.threads import add_gradients
from counterpoise.trainer.update import works_in_threads
from helpers.tiny_models import tiny

native = pytest.mark.skipif(
    cpu.library() is None, reason="no C compiler, or it cannot build the kernels"
)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def loss_of(model, number):
    """The first micro-batch takes longest, so that others are ready before it."""
    generator = torch.Generator().manual_seed(number)
    num_rows = 24 if number == 0 else 3
    ids_NT = torch.randint(3, 29, (num_rows, 9), generator=generator)
    prompts = [[3, 4, 5]] * num_rows if number % 2 else [[3 + n] for n in range(num_rows)]
    logp_NT = token_logp(model, prompts, ids_NT, torch.ones_like(ids_NT))
    return (logp_NT * logp_NT).sum(), logp_NT.detach()


@native
def test_gradients_have_the_bits_of_one_backward_after_the_other(num_threads):
    model = tiny(num_hidden_layers=1)
    with fused_layers(model):
        torch.set_num_threads(1)
        expected = []
        for number in range(7):
            loss, column = loss_of(model, number)
            loss.backward()
            expected.append(column)
        grads = [p.grad for p in model.parameters()]
        torch.set_num_threads(num_threads)
        for _ in range(5):
            model.zero_grad()
            columns = add_gradients(
                list(model.parameters()), range(7), lambda number: loss_of(model, number)
            )
            assert all(map(torch.equal, columns, expected))
            assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))


def test_gradients_are_added_and_unused_parameters_have_none(num_threads):
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    one.grad = torch.tensor([5.0, 5.0])
    results = add_gradients([one, two], [1.0, 2.0, 4.0], lambda job: ((one * job).sum(), job))
    assert results == [1.0, 2.0, 4.0]
    assert one.grad.tolist() == [12.0, 12.0]
    assert two.grad is None


def test_torch_has_one_thread_in_each_of_them(num_threads):
    weight = torch.nn.Parameter(torch.ones(2))
    numbers = add_gradients([weight], range(6), lambda _: (weight.sum(), torch.get_num_threads()))
    assert numbers == [1] * 6


def test_an_error_comes_out_when_nobody_works_any_more(num_threads):
    weight, working = torch.nn.Parameter(torch.ones(2)), set()

    def run(job):
        if job == 0:
            raise ValueError("job 0 is broken")
        working.add(job)
        time.sleep(0.05)
        working.discard(job)
        return weight.sum(), None

    with pytest.raises(ValueError, match="job 0 is broken"):
        add_gradients([weight], range(6), run)
    assert not working


@native
@pytest.mark.parametrize(
    ("settings", "is_training", "expected"),
    [
        ({}, False, True),
        ({"kernels": "torch"}, False, False),
        ({"compile": True}, False, False),
        ({"activation_checkpointing": True}, False, False),
        ({}, True, False),
    ],
)
def test_who_works_in_threads(settings, is_training, expected):
    model = tiny()
    model.train(is_training)
    assert works_in_threads(model, parse_config({"optimizer": settings}).optimizer) == expected
