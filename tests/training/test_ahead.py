"""Scoring what is finished while others are still written, without an engine: `tests/real_vllm` has one."""

import random

import pytest
import torch
from tiny import make_model, make_trainer

from crop_trl.scoring.local import LocalScorer
from crop_trl.training.ahead import AheadScorer


@pytest.mark.parametrize("early", [0, 5, 12])
def test_what_is_scored_ahead_is_what_would_be_scored(early):
    """Whatever comes early, in whatever order; some of it twice, some of others, some that is never asked for."""
    draw = random.Random(early)
    local = LocalScorer(make_model(1), top_k=4, pad_token_id=0)
    originals = [[2, row // 2, 3] for row in range(12)]
    others = [[4, 5, row // 2, 6] for row in range(12)]
    responses = [[draw.randrange(40) for _ in range(draw.randrange(1, 15))] for _ in range(12)]
    responses[3] = responses[2]
    ahead = AheadScorer(local, "teacher")
    ahead.begin({tuple(a): [tuple(a), tuple(b)] for a, b in zip(originals, others)})
    ahead.finished([9, 9, 9], [1, 2])
    ahead.finished(originals[0], [7] * 30)
    for row in draw.sample(range(12), early):
        ahead.finished(originals[row], responses[row])
    for _ in range(2):  # the second time nothing was begun
        asked = (originals + others[:8], responses + responses[:8])
        found, plain = ahead.score(*asked), local.score(*asked)
        for name in ("token_ids", "mask"):
            assert torch.equal(getattr(found, name), getattr(plain, name)), name
        for name in ("logprobs", "sampled_logprobs"):
            torch.testing.assert_close(getattr(found, name), getattr(plain, name), rtol=0, atol=1e-5)
    assert not ahead._scored


def test_what_goes_wrong_ahead_is_said_when_it_is_asked_for():
    ahead = AheadScorer(LocalScorer(make_model(1), top_k=4, pad_token_id=0), "teacher")
    ahead.begin({(1,): [(1,)]})
    ahead.finished([1], [10**6])
    with pytest.raises(ValueError, match="Token 1000000 is to be scored by a model with"):
        ahead.score([[1]], [[10**6]])
    assert ahead.score([[1]], [[2]]).mask.all()


def test_where_it_cannot_work(tmp_path, monkeypatch):
    monkeypatch.setattr("crop_trl.training.arguments.check_packages", lambda args: None)
    elsewhere = "needs a teacher that has a card to itself during the rollout"
    for settings, sentence in (
        ({"use_vllm": False}, "`score_ahead` needs `use_vllm`"),
        ({}, elsewhere),
        ({"vllm_mode": "server", "teacher_placement": "offload"}, elsewhere),
        ({"vllm_mode": "server", "tools": [len]}, "does not work with `tools`"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_trainer(tmp_path, score_ahead=True, **{"use_vllm": True, "vllm_mode": "colocate", **settings})
