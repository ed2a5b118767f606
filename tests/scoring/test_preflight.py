"""What the look before the first step sees."""

import re

import pytest
import torch
from tiny import make_model, make_rows, make_trainer

from crop_trl.scoring.local import LocalScorer
from crop_trl.training.scorers import Preflight


def test_says_what_it_found(tmp_path, capsys):
    trainer = make_trainer(tmp_path, disable_tqdm=False)
    said = capsys.readouterr().out
    assert "Preflight: teacher returns 4 entries a position; a sequence alone and in company scores" in said
    assert "(0.002 allowed); ids that end a response for it: 1." in said
    # Nothing of it is counted as a step's.
    assert trainer.scorers["teacher"].stats.sequences == 0
    make_trainer(tmp_path, disable_tqdm=False, preflight=False)
    assert "Preflight" not in capsys.readouterr().out


def test_what_is_scored_is_no_longer_than_what_a_run_scores(tmp_path):
    """Or a server that takes sequences of a run's length would refuse it."""
    rows = make_rows(8, conversational=False).map(lambda row: {"prompt": "what " * 200 + row["prompt"]})
    lengths, teacher = [], Changed(lambda scored, batch: scored)
    inner = teacher.inner.score
    teacher.inner.score = lambda prompts, responses: lengths.extend(map(len, responses)) or inner(prompts, responses)
    make_trainer(tmp_path, teacher=teacher, rows=rows)
    assert max(lengths) == 128


class Changed:
    """A teacher whose scores have one thing wrong."""

    def __init__(self, change):
        self.change = change
        self.inner = LocalScorer(make_model(1, hidden=48).eval(), 4, 0)

    def score(self, prompt_ids, completion_ids):
        return self.change(self.inner.score(prompt_ids, completion_ids), len(prompt_ids))


def fewer(scored, batch):
    scored.token_ids, scored.logprobs = scored.token_ids[..., :3], scored.logprobs[..., :3]
    return scored


def depends_on_company(scored, batch):
    scored.sampled_logprobs = scored.sampled_logprobs - 0.1 * batch
    return scored


def not_finite(scored, batch):
    scored.sampled_logprobs = scored.sampled_logprobs * float("nan")
    return scored


@pytest.mark.parametrize(
    "change, sentence",
    [
        (fewer, "`score_top_k` is 4, but the teacher returns 3 entries at each position"),
        (depends_on_company, r"depend on what is scored beside it: 0.4 nats a token apart, 0.2 allowed; mend the"),
        (not_finite, "log-probabilities are not finite"),
        (lambda scored, batch: scored.rows(slice(0, 1)), "for 2 responses; they must be"),
    ],
)
def test_a_teacher_with_something_wrong(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(tmp_path, teacher=Changed(change))
    make_trainer(tmp_path, teacher=Changed(change), preflight=False)


def test_a_model_that_sees_its_padding(tmp_path):
    """Right padding without a mask is exact for causal models only; one that claims to be causal is found out."""
    teacher = make_model(1, hidden=48)
    inner = teacher.model.layers[0].forward

    def looks_ahead(hidden_states, *args, **kwargs):
        return inner(hidden_states + 0.5 * hidden_states.mean(1, keepdim=True), *args, **kwargs)

    teacher.model.layers[0].forward = looks_ahead
    with pytest.raises(ValueError, match="depend on what is scored beside it: .* 0.002 allowed; choose another `attn"):
        make_trainer(tmp_path, teacher=teacher)


def test_other_end_tokens_are_warned_of(tmp_path):
    teacher = make_model(1, hidden=48)
    teacher.generation_config.eos_token_id = [7, 8]
    with pytest.warns(UserWarning, match="student ends a response with '<eos>' and the teacher with '2', '3'"):
        make_trainer(tmp_path, teacher=teacher)


def test_a_prompt_that_opens_the_response_otherwise(tmp_path):
    """As a template may do that looks at what a message says."""
    trainer = make_trainer(tmp_path, rows=make_rows(8))
    row = trainer.train_dataset[0]
    assert "sum" in row["paraphrase_prompt"][0]["content"] and "sum" not in row["prompt"][0]["content"]
    trainer.processing_class.chat_template = trainer.processing_class.chat_template.replace(
        "'<assistant> '", "'<assistant> ' + ('times ' if 'sum' in messages[0]['content'] else 'plus ')"
    )
    with pytest.raises(ValueError, match="renders `paraphrase_prompt` so that it does not end in the tokens that open"):
        Preflight(trainer, row)


def test_bf16_is_within_its_tolerance(tmp_path):
    teacher = make_model(1, hidden=48).to(torch.bfloat16)
    trainer = make_trainer(tmp_path, teacher=teacher, rows=make_rows(8), preflight=False)
    found = Preflight(trainer, trainer.train_dataset[0]).check_teacher("teacher")
    drift = re.search(r"returns 4 entries a position; .* scores (\S+) nats apart \(0.2 allowed\)", found)[1]
    assert float(drift) < 0.1
