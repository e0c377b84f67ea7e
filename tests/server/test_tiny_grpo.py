"""The example that trains: its loop on the real engine's rollout route."""

from __future__ import annotations

import pytest
import torch

from examples import tiny_grpo
from examples.digits import reader

GROUP = 2


def test_trainer_and_engine_agree_on_log_probabilities_while_the_policy_is_trained(zimage):
    loop = tiny_grpo.Loop(tiny_grpo.trained_model(zimage.checkpoint), zimage.server, tiny_grpo.IPC)

    steps, policies = tiny_grpo.train(loop, 2, GROUP)

    first = steps[0].version
    assert [step.version for step in steps] == [first, first + 1]
    assert all(step.difference < 0.01 for step in steps)
    assert all({"send", "verify", "rollout"} <= step.seconds.keys() for step in steps)
    assert any(not torch.equal(policies[0][name], policies[1][name]) for name in policies[0])


def test_an_image_of_the_wanted_digit_is_worth_more_than_one_of_another():
    reads = reader()
    enlarged = (reads.pixels + 1).repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None].expand(-1, 3, -1, -1) / 2

    worth = tiny_grpo.rewards(enlarged, reads)

    wanted = reads.labels == tiny_grpo.WANTED
    assert worth[wanted].min() > worth[~wanted].max()


def test_the_loss_raises_what_is_better_than_its_group():
    new = torch.zeros(3, 4, requires_grad=True)

    tiny_grpo.policy_loss(new, torch.zeros(3, 4), tiny_grpo.advantages(torch.tensor([1.0, 2.0, 3.0]))).backward()

    assert (new.grad[0] > 0).all()
    assert (new.grad[1] == 0).all()
    assert (new.grad[2] < 0).all()


@pytest.mark.slow
def test_the_whole_example_runs_and_draws_its_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tiny_grpo", "--steps", "2", "--group", "2", "--output", str(tmp_path)])

    tiny_grpo.main()  # two steps say nothing of the reward

    assert (tmp_path / "grpo.png").stat().st_size > 10_000
