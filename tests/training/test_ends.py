"""Several end tokens that count as one: in sampling, in the scores, and in the update."""

import pytest
import torch
from tiny import flat_weights, make_model, make_trainer, metric
from transformers import HfArgumentParser

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.scoring.local import LocalScorer

# The student's own is 1.
ENDS = [1, 7, 9]
RATE = 0.1
# Ended with either end; cut off; with an end in the middle, and then cut off or ended; of one token.
RESPONSES = [[9, 11, 7], [9, 12, 13, 1], [20, 21], [7, 22, 1, 23], [24, 7, 25, 7], [1], [7], [26, 1, 7, 27, 28, 1]]


class Fixed(CROPTrainer):
    """Samples the responses above, as an engine that knows the sampled end alone; keeps what the update was made of."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.prompts = [list(ids) for ids in prompt_ids]
        with torch.no_grad():
            logprobs = [row.tolist() for row in of_responses(self.model, self.prompts, [])]
        return [list(ids) for ids in RESPONSES], logprobs

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.rollout = output["rollout"]
        return output


def models():
    teacher = make_model(1, hidden=48)
    teacher.generation_config.eos_token_id = ENDS[1:]
    return make_model(0), teacher


def run(tmp_path, **settings) -> Fixed:
    student, teacher = models()
    plain = (torch.optim.SGD(student.parameters(), lr=RATE), None)
    settings = {"stop_token_ids": "declared", "max_grad_norm": 0.0, "optimizers": plain, **settings}
    trainer = make_trainer(tmp_path, student=student, teacher=teacher, trainer_class=Fixed, **settings)
    trainer.train()
    return trainer


def of_responses(model, prompts, ends) -> list[torch.Tensor]:
    """Log-probabilities of each response from whole logits, one sequence after the other."""
    found = []
    for prompt, response in zip(prompts, RESPONSES, strict=True):
        logprobs = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        values = list(logprobs[torch.arange(len(response)), response])
        if response[-1] in ends:
            values[-1] = logprobs[-1, list(ends)].exp().sum().log()
        found.append(torch.stack(values))
    return found


def one_step(prompts, kept, ends) -> tuple[float, torch.Tensor, float]:
    """Loss, weights after one plain step, and the mean gap: the equations once more."""
    student, teacher = models()
    with torch.no_grad():
        targets = of_responses(teacher, prompts, ends)
    new = of_responses(student, prompts, ends)
    gaps, terms = [], []
    for i, row in enumerate(new):
        for t, logprob in enumerate(row):
            if kept[i][t]:
                gaps.append(logprob.item() - targets[i][t].item())
                # The ratio is 1 and not clipped.
                terms.append((logprob - logprob.detach()).exp() * gaps[-1])
    loss = torch.stack(terms).sum() / len(terms)
    loss.backward()
    torch.optim.SGD(student.parameters(), lr=RATE).step()
    return loss.item(), flat_weights(student), sum(gaps) / len(gaps)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "opd"},
        {"method": "crop", "retention_ratio": 0.5},
        # S_old comes of a pass of its own.
        {"method": "opd", "num_iterations": 2},
        {"method": "opd", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"method": "opd", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_step_equals_one_from_whole_logits(tmp_path, settings):
    trainer = run(tmp_path, **settings)
    kept = trainer.rollout.selection.mask
    loss, weights, gap = one_step(trainer.prompts, kept, ENDS)
    assert metric(trainer, "loss")[0] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metric(trainer, "distillation/gap_kept")[0] == pytest.approx(gap, rel=1e-4, abs=1e-6)
    start = flat_weights(make_model(0))
    moved, expected = flat_weights(trainer.model) - start, weights - start
    assert (moved - expected).norm() < 1e-4 * expected.norm()
    if kept.sum() == sum(map(len, RESPONSES)):
        # Each end by itself is another step.
        _, alone, _ = one_step(trainer.prompts, kept, [])
        assert (alone - weights).norm() > 0.01 * expected.norm()


def test_off_by_default(tmp_path):
    trainer = run(tmp_path, method="opd", stop_token_ids=None)
    _, weights, _ = one_step(trainer.prompts, trainer.rollout.selection.mask, [])
    torch.testing.assert_close(flat_weights(trainer.model), weights, rtol=0, atol=1e-5)
    assert trainer.eos_token_ids == [1] and not metric(trainer, "scoring/other_ends")


def test_what_is_logged(tmp_path):
    trainer = run(tmp_path, method="opd", reward_funcs=lambda completions, **_: [0.0] * len(completions))
    teacher, stopped, others = models()[1], 0, 0
    for prompt, response in zip(trainer.prompts, RESPONSES, strict=True):
        if response[-1] in ENDS:
            likely = teacher(torch.tensor([prompt + response])).logits[0, -2].softmax(-1)
            stopped += 1
            others += bool(likely[ENDS].sum() > 2 * likely[response[-1]])
    assert metric(trainer, "scoring/other_ends") == [pytest.approx(others / stopped)]
    # No gap to the engine comes of what it does not know.
    assert metric(trainer, "sampling/sampling_logp_difference/mean") == [pytest.approx(0, abs=1e-5)]
    # Two of eight were cut off: an end of the teacher's ends a response as well.
    assert metric(trainer, "completions/clipped_ratio") == [0.25]


def test_responses_that_were_cut_off_can_be_left_out(tmp_path):
    trainer = run(tmp_path, method="opd", mask_truncated_completions=True)
    left = [len(response) for response in RESPONSES if response[-1] in ENDS]
    assert metric(trainer, "selection/selected_tokens") == [sum(left)]


@pytest.mark.parametrize("given", ["declared", [9, 7, 1]])
def test_sampling_ends_at_each_of_them_and_so_does_the_saved_model(tmp_path, capsys, given):
    student, teacher = models()
    trainer = make_trainer(
        tmp_path, student=student, teacher=teacher, stop_token_ids=given, disable_tqdm=False, max_completion_length=100
    )
    assert "Responses end with '<eos>' (1), '2' (7), '4' (9), which count as one." in capsys.readouterr().out
    responses = trainer.sample(list(trainer.train_dataset)).completion_ids
    last = [ids[-1] for ids in responses if len(ids) < 100]
    assert set(last) == set(ENDS)
    assert not any(set(ids[:-1]) & set(ENDS) for ids in responses)
    trainer.save_model()
    assert type(student).from_pretrained(tmp_path).generation_config.eos_token_id == ENDS


@pytest.mark.parametrize("given", ["declared", "1, 7", "[1,7]", "7"])
def test_from_a_command_line(tmp_path, given):
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--stop_token_ids", given]
    (config,) = HfArgumentParser(CROPConfig).parse_args_into_dataclasses(line)
    assert config.stop_token_ids in ("declared", [1, 7], [7])


def test_what_cannot_work_is_refused(tmp_path):
    for given in ([], "7;8", [-1], [True], 7.5, "all"):
        with pytest.raises(ValueError, match="must be 'declared' or token ids such as"):
            CROPConfig(str(tmp_path), use_cpu=True, bf16=False, stop_token_ids=given)
    with pytest.raises(ValueError, match="`stop_token_ids` names 5000, and the tokenizer has"):
        make_trainer(tmp_path, stop_token_ids=[5000])
    urls = {"teacher_server_urls": ["http://127.0.0.1:9/v1"]}
    with pytest.raises(ValueError, match="'declared' does not work with `teacher_server_urls`, which returns"):
        make_trainer(tmp_path, teacher="served", stop_token_ids="declared", **urls)

    class Other:
        score = LocalScorer(make_model(1, hidden=48).eval(), 4, 0).score

    with pytest.raises(ValueError, match="does not work with a Other, which returns"):
        make_trainer(tmp_path, teacher=Other(), stop_token_ids="declared")
    make_trainer(tmp_path, teacher=LocalScorer(models()[1].eval(), 4, 0), stop_token_ids="declared")
