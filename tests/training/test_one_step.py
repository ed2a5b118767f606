"""Where a batch cannot be sampled one step off: `tests/real_vllm` does it with an engine."""

import pytest
import torch
from tiny import make_trainer

from crop_trl import CROPConfig
from crop_trl.methods import Selection
from crop_trl.training.update import Rollout, check_finite


def test_what_does_not_go_with_it_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("crop_trl.training.arguments.check_packages", lambda args: None)
    served, elsewhere = {"use_vllm": True, "vllm_mode": "server"}, "needs an engine with cards of its own"
    for settings, sentence in (
        ({"use_vllm": False}, elsewhere),
        ({"vllm_mode": "colocate"}, elsewhere),
        ({"tools": [len]}, "does not work with `tools`, which may go on after a turn"),
        ({"rollout_func": print}, "does not work with `rollout_func`"),
        ({"score_ahead": True}, "`rollout_ahead` and `score_ahead` are two ways to fill the same wait"),
        ({"num_iterations": 2}, "feed one optimizer step each, and these feed 2; set `num_iterations` to 1"),
        (
            {"steps_per_generation": 3},
            "these feed 3; .* `steps_per_generation` to `gradient_accumulation_steps` \\(1\\)",
        ),
        ({"temperature": 0.7}, "which with `temperature` 0.7 are not the student's own; leave one"),
        ({"generation_kwargs": {"top_p": 0.9}}, "which with `top_p` 0.9 are not the student's own"),
        ({"stop_token_ids": [5, 6]}, "which with `stop_token_ids` \\[5, 6\\] are not"),
        ({"rollout_ahead": 2}, "`rollout_ahead` must be 0 or 1, got 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_trainer(tmp_path, method="opd", **{"rollout_ahead": 1, **served, **settings})


def test_log_probabilities_that_an_engine_does_not_know_stop_the_run():
    mask = torch.tensor([[True, True, False]])
    selection = Selection(mask=mask, scores=None, weights=None, teacher_logprobs=torch.zeros(1, 3))
    old = torch.tensor([[-1.0, float("nan"), 0.0, 0.0]])  # padded to a multiple
    rollout = Rollout([[1]], [[2, 3]], torch.zeros(1), selection, old_logprobs=old)
    with pytest.raises(ValueError, match="^1 tokens to train have a log-probability, .* and an engine too"):
        check_finite(rollout, lambda count: count)


def test_it_is_not_on_policy(tmp_path):
    for ahead in (0, 1):
        args = CROPConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", rollout_ahead=ahead)
        assert args.on_policy != bool(ahead) and args.steps_per_rollout_batch == 1
