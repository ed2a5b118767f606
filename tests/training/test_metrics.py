"""Evaluation counts every response once, however batches and processes cut them; settings that train nothing."""

import pytest
import torch
from tiny import make_rows, make_trainer

from crop_trl import CROPConfig


def response_lengths(completion_ids, **kwargs) -> list[float]:
    response_lengths.seen += [float(len(ids)) for ids in completion_ids]
    return response_lengths.seen[-len(completion_ids) :]


@pytest.mark.parametrize("batch_size", [4, 8, 12, 16])
def test_a_last_batch_that_is_not_full_counts_for_what_it_holds(tmp_path, batch_size):
    response_lengths.seen = []
    trainer = make_trainer(
        tmp_path,
        eval_dataset=make_rows(5, seed=9),
        per_device_eval_batch_size=batch_size,
        reward_funcs=[response_lengths],
        reward_weights=[0.5],
    )
    result = trainer.evaluate()
    assert len(response_lengths.seen) == 20 and len(set(response_lengths.seen)) > 1
    mean = sum(response_lengths.seen) / 20
    assert result["eval_rewards/response_lengths/mean"] == pytest.approx(mean, rel=1e-6)
    assert result["eval_reward"] == pytest.approx(mean / 2, rel=1e-6)
    assert result["eval_completions/mean_length"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_grad_norm": float("nan")}, "`max_grad_norm` must be a number of at least 0, got nan"),
        ({"max_grad_norm": -1.0}, "`max_grad_norm` must be a number of at least 0"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be a number of at least 0, got nan"),
        ({"distillation_loss": "kl"}, "`distillation_loss` 'kl' is not known: choose one of sampled, topk"),
        ({"topk_divergence": "tv"}, "`topk_divergence` 'tv' is not known: choose one of forward, reverse, jsd"),
        (
            {"topk_divergence": "reverse"},
            "`topk_divergence` 'reverse' is read with `distillation_loss` 'topk' alone, and that is 'sampled'; set it "
            "to 'topk', or leave `topk_divergence` out.",
        ),
        ({"vllm_speculative_config": '{"method": "ngram"}'}, "`vllm_speculative_config` needs `use_vllm` with"),
        (
            {"vllm_speculative_config": {"method": "eagle3"}, "use_vllm": True},
            "has `method` 'eagle3', but a draft's weights would not follow the student's; set it to 'ngram'",
        ),
    ],
)
def test_settings_that_would_train_something_else_are_refused(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        CROPConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`lambda_opd` 0 without a reward trains nothing"):
        make_trainer(tmp_path, lambda_opd=0.0)


def test_evaluations_of_a_run_draw_alike_and_leave_training_alone(tmp_path):
    """Before and after differ by what was learned, not by luck; every response is remembered once."""

    def longer(completions, **kwargs):
        return [float(len(completion[0]["content"]) > 20) for completion in completions]

    rows = make_rows(16)
    held_out = rows.select(range(5))
    settings = {
        "reward_funcs": [longer],
        "eval_dataset": held_out,
        "reward_weights": [0.0],
        "per_device_eval_batch_size": 8,
    }
    trainer = make_trainer(tmp_path / "one", **settings)
    answers = []
    for _ in range(3):
        trainer.evaluate()
        answers.append(list(trainer._logs["completion"])[-20:])
    assert answers[0] == answers[1] == answers[2]
    (problems,) = trainer.evaluated_rewards[0].values()
    assert len(problems) == 5 and all(len(rewards) == trainer.num_generations_eval for rewards in problems)
    state = torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(state, torch.get_rng_state())
