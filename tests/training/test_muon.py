"""Muon for matrices and AdamW for the rest, as one optimiser."""

import copy

import torch

from dspark_hf.training.muon import MuonWithAdamW
from small_runs import arguments
from tiny import make_drafter

OPTIONS = {"weight_decay": 0.1, "adam_beta2": 0.99, "adam_epsilon": 1e-6}


def learn(drafter, optimizers, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for x in drafter.parameters():
            x.grad = torch.randn(x.shape, generator=generator) if x.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()


def test_each_part_is_the_hosts_own(tmp_path):
    """Maps between states learn with Muon; tables by token, heads and norms with AdamW."""
    one, other = (make_drafter(stored=False, seed=1) for _ in range(2))
    args = arguments(tmp_path, **OPTIONS)
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    names = {
        n for n, _ in other.named_parameters() if n.startswith("fc") or n.split(".")[-2] in layers
    }
    split = [[], []]
    for name, x in other.named_parameters():
        split[name in names].append(x)
    muon = torch.optim.Muon(split[1], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(split[0], lr=1e-2, weight_decay=0, betas=(0.9, 0.99), eps=1e-6)
    learn(one, [MuonWithAdamW(one, args)], steps=3, seed=0)
    learn(other, [muon, adamw], steps=3, seed=0)
    for name, x in one.named_parameters():
        torch.testing.assert_close(x, other.get_parameter(name), rtol=0, atol=0, msg=name)


def test_schedules_and_checkpoints_reach_both_parts(tmp_path):
    drafter, twin = (make_drafter(stored=False, seed=1) for _ in range(2))
    optimizer = MuonWithAdamW(drafter, arguments(tmp_path))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    learn(drafter, [optimizer, schedule], steps=2, seed=0)
    twin.load_state_dict(drafter.state_dict())
    restored = MuonWithAdamW(twin, arguments(tmp_path, learning_rate=1.0))
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in restored.param_groups] == [2.5e-3, 2.5e-3]
    before = {name: x.detach().clone() for name, x in drafter.named_parameters()}
    learn(drafter, [optimizer], steps=2, seed=3)
    learn(twin, [restored], steps=2, seed=3)
    for name, x in drafter.named_parameters():
        torch.testing.assert_close(x, twin.get_parameter(name), rtol=0, atol=0, msg=name)
        assert not torch.equal(x, before[name]), name


def test_a_schedule_that_ended_changes_nothing(tmp_path):
    drafter = make_drafter(stored=False, seed=1)
    optimizer = MuonWithAdamW(drafter, arguments(tmp_path, weight_decay=0.1))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [x.detach().clone() for x in drafter.parameters()]
    learn(drafter, [optimizer], steps=1, seed=0)
    assert all(torch.equal(x, y) for x, y in zip(drafter.parameters(), before, strict=True))


def test_a_closure_is_run_with_gradients(tmp_path):
    drafter = make_drafter(stored=False, seed=1)
    optimizer = MuonWithAdamW(drafter, arguments(tmp_path))

    def loss():
        value = sum(x.square().sum() for x in drafter.parameters())
        optimizer.zero_grad()
        value.backward()
        return value

    first = optimizer.step(loss).item()
    assert optimizer.step(loss).item() < first
