"""CROPTrainer end to end on small random models."""

import functools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from tiny import flat_weights, make_model, make_rows, make_tokenizer, make_trainer, metric, what_it_reads

from crop_trl import CROPTrainer
from crop_trl.methods import METHODS

# Selected and weighted.
TOPK = [("crop", "topk"), ("iw-opd", "topk")]


def sgd(model, lr=0.1):
    """Plain SGD: weights after one step show the gradient itself, where Adam would hide its scale."""
    return torch.optim.SGD(model.parameters(), lr=lr), None


def train(tmp_path, **overrides):
    student = overrides.pop("student", None) or make_model(0)
    trainer = make_trainer(tmp_path, student=student, optimizers=sgd(student), **overrides)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs by their settings, each made once: for tests that only look at what came out."""
    return functools.cache(lambda **settings: train(tmp_path_factory.mktemp("run"), **settings))


def same_update(a, b, tolerance=1e-5) -> bool:
    """Whether two runs moved the student alike, relative to how far they moved it."""
    start = flat_weights(make_model(0))
    moved, expected = flat_weights(a.model) - start, flat_weights(b.model) - start
    return bool((moved - expected).norm() < tolerance * expected.norm())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains(tmp_path, method):
    trainer = train(tmp_path, method=method, max_steps=2, **what_it_reads(method))
    assert len(metric(trainer, "loss")) == 2
    assert not torch.equal(flat_weights(trainer.model), flat_weights(make_model(0)))
    kept = metric(trainer, "selection/retention_ratio")[0]
    assert kept < 0.5 if METHODS[method].score else 0.5 < kept <= 1.0 if METHODS[method].keep else kept == 1.0


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_towards_the_top_k_or_is_refused(tmp_path, method):
    settings = {"method": method, "distillation_loss": "topk", "max_completion_length": 4, "num_generations": 2}
    settings |= what_it_reads(method)
    if not METHODS[method].has_distribution:
        with pytest.raises(ValueError, match=f"'topk' needs a distribution, and '{method}' has none"):
            make_trainer(tmp_path, **settings)
        return
    trainer = train(tmp_path, **settings)
    assert not torch.equal(flat_weights(trainer.model), flat_weights(make_model(0)))
    assert metric(trainer, "distillation/divergence")[0] > 0 and not metric(trainer, "distillation/advantage")


@pytest.mark.parametrize(("method", "loss"), [("crop", "sampled"), ("opd", "sampled"), ("random", "sampled"), *TOPK])
def test_loss_and_gradient_do_not_depend_on_the_split(tmp_path, trained, method, loss):
    whole = trained(method=method, distillation_loss=loss)
    for per_device, accumulation in ((4, 2), (2, 4), (1, 8)):
        split = train(
            tmp_path / f"{accumulation}x{per_device}",
            method=method,
            distillation_loss=loss,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
        )
        assert metric(split, "loss")[0] == pytest.approx(metric(whole, "loss")[0], rel=1e-5)
        assert metric(split, "grad_norm")[0] == pytest.approx(metric(whole, "grad_norm")[0], rel=1e-5)
        assert same_update(split, whole)


def test_a_ratio_of_one_is_pure_distillation(trained):
    dense, sparse = trained(method="opd"), trained(method="crop")
    everything = trained(method="crop", retention_ratio=1.0)
    assert same_update(everything, dense)
    assert not same_update(sparse, dense, tolerance=0.1)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_the_step_towards_the_top_k_is_that_of_whole_logits(tmp_path, divergence):
    """The slow loss over the kept tokens, from both models' own logits, and its gradient by autograd."""
    rollouts = []

    class Watched(CROPTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            rollouts.append(output["rollout"])
            return output

    settings = {"distillation_loss": "topk", "topk_divergence": divergence, "max_grad_norm": 0.0}
    trainer = train(tmp_path, trainer_class=Watched, **settings)
    student, teacher = make_model(0), make_model(1, hidden=48)
    (rollout,) = rollouts
    total = 0.0
    for prompt, response, kept in zip(rollout.prompt_ids, rollout.completion_ids, rollout.selection.mask):
        ids, positions = torch.tensor([prompt + response]), len(prompt) - 1 + kept.nonzero().squeeze(-1)
        q, p = (model(ids).logits[0, positions].softmax(-1) for model in (student, teacher))
        top = p.detach().topk(4)
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (top.values, q.gather(-1, top.indices)))
        mean = (p + q) / 2
        terms = {"forward": p * (p / q).log(), "reverse": q * (q / p).log()}
        terms["jsd"] = (p * (p / mean).log() + q * (q / mean).log()) / 2
        total += terms[divergence].sum()
    loss = total / rollout.selection.mask.sum()
    loss.backward()
    assert metric(trainer, "loss")[0] == pytest.approx(loss.item(), rel=1e-4)
    assert metric(trainer, "distillation/divergence")[0] == pytest.approx(loss.item(), rel=1e-4)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter -= 0.1 * parameter.grad
    moved, expected = (flat_weights(model) - flat_weights(make_model(0)) for model in (trainer.model, student))
    assert (moved - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_step_of_every_method_is_that_of_whole_logits(tmp_path, method):
    """The loss over the kept tokens, written out: one step from the logits of student and teacher themselves."""
    rollouts, rows = [], []

    class Watched(CROPTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            rollouts.append(output["rollout"])
            rows.extend(inputs)
            return output

    trainer = train(tmp_path, trainer_class=Watched, method=method, max_grad_norm=0.0, **what_it_reads(method))
    student, teacher, render = make_model(0), make_model(1, hidden=48), make_tokenizer().apply_chat_template
    (rollout,), (reader, kind) = rollouts, METHODS[method].target.split("/")
    selection, total = rollout.selection, 0.0
    for i, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.completion_ids)):

        def logprobs_of(model, prompt, response=response):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)

        new = logprobs_of(student, prompt)
        target = rows[i]["prompt" if kind == "original" else f"{kind}_prompt"]
        (other,) = render([target], add_generation_prompt=True, return_dict=True)["input_ids"]
        if METHODS[method].teacher_target is None:
            expected = logprobs_of(teacher if reader == "teacher" else student, other)
            torch.testing.assert_close(selection.teacher_logprobs[i, : len(new)], expected.detach(), atol=1e-5, rtol=0)
        gap = selection.teacher_logprobs[i, : len(new)] - new.detach()
        added = gap if selection.teacher_advantages is None else selection.teacher_advantages[i, : len(new)]
        advantage = rollout.base_advantages[i] + added
        if selection.weights is not None:
            advantage = advantage * selection.weights[i, : len(new)]
        total -= ((new - new.detach()).exp() * advantage)[selection.mask[i, : len(new)]].sum()
    loss = total / selection.mask.sum()
    loss.backward()
    assert metric(trainer, "loss")[0] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter -= 0.1 * parameter.grad
    assert same_update(trainer, SimpleNamespace(model=student), tolerance=1e-4)


def test_opposite_masks_give_different_gradients(trained):
    top, bottom = trained(method="crop"), trained(method="crop-bottom")
    assert not same_update(top, bottom, tolerance=0.1)


def test_passes_of_a_step(tmp_path):
    """Three teacher passes for CROP and not four; one student forward a micro-batch beside generation."""
    for method, passes in (("crop", 3), ("cf-opd", 2), ("opd", 1)):
        student = make_model(0)
        batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer = make_trainer(tmp_path, student=student, method=method, preflight=False, **batches)
        updates = []
        inner = student.forward

        def counting(*args, head_positions=None, _inner=inner, _updates=updates, **kwargs):
            if head_positions is not None:
                _updates.append(head_positions.numel())
            return _inner(*args, head_positions=head_positions, **kwargs)

        student.forward = counting
        trainer.train()
        assert metric(trainer, "scoring/sequences") == [passes * 8.0]
        assert len(updates) == 2
        assert sum(updates) == metric(trainer, "selection/selected_tokens")[0]


@pytest.mark.parametrize("method", ["crop", "credit", "random", "tip"])
def test_two_and_two_steps_are_four(tmp_path, method):
    """Prompts, draws, masks and weights go on as if nothing had happened."""
    settings = {"save_strategy": "steps", "save_steps": 2, "method": method}
    four = make_trainer(tmp_path / "four", max_steps=4, **settings)
    four.train()
    make_trainer(tmp_path / "two", max_steps=2, **settings).train()
    resumed = make_trainer(tmp_path / "two", max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))
    assert list(four._logs["prompt"]) == list(resumed._logs["prompt"])
    assert list(four._logs["completion"]) == list(resumed._logs["completion"])
    assert metric(four, "selection/selected_tokens")[2:] == metric(resumed, "selection/selected_tokens")[2:]
    torch.testing.assert_close(flat_weights(four.model), flat_weights(resumed.model), rtol=0, atol=0)


def test_two_and_two_steps_are_four_with_several_updates_per_rollout(tmp_path):
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "method": "random",
    }
    four = make_trainer(tmp_path / "four", max_steps=4, **settings)
    four.train()
    make_trainer(tmp_path / "two", max_steps=2, **settings).train()
    resumed = make_trainer(tmp_path / "two", max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))
    torch.testing.assert_close(flat_weights(four.model), flat_weights(resumed.model), rtol=0, atol=0)


def test_reusing_rollouts_moves_the_ratio(tmp_path):
    once = make_trainer(tmp_path / "a", max_steps=2)
    twice = make_trainer(tmp_path / "b", max_steps=2, num_iterations=2, learning_rate=0.1)
    once.train()
    twice.train()
    assert metric(once, "clip_ratio/region_mean") == [0.0, 0.0]
    first, second = metric(twice, "clip_ratio/region_mean")
    assert first == 0.0 and second > 0.0
    # Rollouts were made once, and the student was scored, so dropped tokens have a gap too.
    assert len(metric(twice, "scoring/sequences")) == 1
    assert len(metric(twice, "distillation/gap_dropped")) == 1 and not metric(once, "distillation/gap_dropped")


def test_several_optimizer_steps_share_a_batch_of_rollouts(tmp_path):
    trainer = make_trainer(
        tmp_path, max_steps=2, per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=2
    )
    trainer.train()
    assert len(metric(trainer, "scoring/sequences")) == 1
    assert len(metric(trainer, "loss")) == 2


def test_lora_student_and_resume(tmp_path):
    settings = {
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        "save_strategy": "steps",
        "save_steps": 1,
    }
    trainer = make_trainer(tmp_path, gradient_checkpointing=True, **settings)
    before = flat_weights(trainer.model)
    trainer.train()
    assert before.numel() < 2000 and not torch.equal(before, flat_weights(trainer.model))
    resumed = make_trainer(tmp_path, max_steps=2, gradient_checkpointing=True, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


def test_gradient_checkpointing_changes_nothing(trained):
    plain, checkpointed = trained(method="crop"), trained(method="crop", gradient_checkpointing=True)
    torch.testing.assert_close(flat_weights(plain.model), flat_weights(checkpointed.model))


def lengths_as_reward(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def test_rewards(tmp_path, trained):
    without = trained(method="crop")
    watched = train(tmp_path / "watched", reward_funcs=lengths_as_reward, reward_weights=[0.0])
    used = train(tmp_path / "used", reward_funcs=lengths_as_reward)
    assert torch.equal(flat_weights(without.model), flat_weights(watched.model))
    assert metric(watched, "rewards/lengths_as_reward/mean")[0] > 0
    assert not same_update(without, used, tolerance=0.1)


def test_evaluation_needs_prompts_alone(tmp_path):
    held_out = make_rows(2, seed=9).remove_columns(["paraphrase_prompt", "counterfactual_prompt"])
    trainer = make_trainer(tmp_path, eval_dataset=held_out, reward_funcs=lengths_as_reward, reward_weights=[0.0])
    first = trainer.evaluate()
    # Nothing is selected, whatever the method, and no share of 1 says otherwise.
    assert not any(name.startswith(("eval_selection/", "eval_clip_ratio/")) for name in first)
    dense = make_trainer(tmp_path / "opd", method="opd", eval_dataset=held_out)
    assert dense.evaluate()["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    assert first["eval_scoring/sequences"] == 8.0
    assert first["eval_loss"] == pytest.approx(-first["eval_distillation/advantage"], rel=1e-4)
    trainer.train()
    assert "eval_rewards/lengths_as_reward/mean" in trainer.evaluate()


def test_pad_as_eos_keeps_the_end_of_a_response(tmp_path):
    """The EOS token of a response is a token like any other, also when padding is the same id."""
    trainers = [
        make_trainer(tmp_path / pad, method="opd", tokenizer=make_tokenizer(pad), max_completion_length=30)
        for pad in ("<pad>", "<eos>")
    ]
    for trainer in trainers:
        trainer.train()
        assert metric(trainer, "completions/clipped_ratio")[0] < 1.0
        mean_length = metric(trainer, "completions/mean_length")[0]
        assert metric(trainer, "selection/selected_tokens")[0] == pytest.approx(8 * mean_length)


def test_plain_prompts(tmp_path):
    assert metric(train(tmp_path, rows=make_rows(8, conversational=False)), "loss")


def test_truncated_responses_can_be_left_out(tmp_path):
    trainer = make_trainer(tmp_path, method="opd", mask_truncated_completions=True)
    trainer.train()
    finished = 1 - metric(trainer, "completions/clipped_ratio")[0]
    expected = 8 * finished * metric(trainer, "completions/mean_terminated_length")[0]
    assert metric(trainer, "selection/selected_tokens")[0] == pytest.approx(expected)


def test_reports_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(tmp_path, report_to="tensorboard").train()
    (events,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    names = set(accumulator.Tags()["scalars"])
    assert {
        "selection/retention_ratio",
        "selection/semantic_divergence",
        "selection/surface_divergence",
        "scoring/residual_mass",
        "distillation/gap_kept",
        "clip_ratio/region_mean",
        "seconds/rollout",
        "seconds/scoring",
        "seconds/update",
    } <= names


def test_completions_are_logged(tmp_path):
    make_trainer(tmp_path, log_completions=True).train()
    assert list((tmp_path / "completions").glob("*.parquet"))


@pytest.mark.parametrize("settings", [{"method": "tip"}, {"num_iterations": 2, "max_steps": 2}])
def test_dropout_does_not_reach_the_ratio(tmp_path, settings):
    """0 tokens outside the clip range before the first update, whichever pass the old log-probabilities come from."""
    torch.manual_seed(0)
    adapter = LoraConfig(
        r=4, lora_alpha=64, lora_dropout=0.3, init_lora_weights=False, target_modules=["q_proj", "v_proj", "o_proj"]
    )
    student = make_model(0)
    for layer in student.model.layers:
        layer.self_attn.attention_dropout = 0.3
    trainer = make_trainer(tmp_path, student=student, peft_config=adapter, **settings)
    trainer.train()
    assert metric(trainer, "clip_ratio/region_mean")[0] == 0.0


def test_rollouts_are_drawn_from_the_students_own_distribution(tmp_path):
    """What a model's folder recommends for use would filter them; the statistic is 0 when nothing does."""
    student = make_model(0)
    recommended = {"min_p": 0.9, "typical_p": 0.3, "suppress_tokens": [5, 6], "min_new_tokens": 9, "top_h": 0.2}
    student.generation_config.update(**recommended)
    trainer = make_trainer(tmp_path, student=student, method="opd", max_steps=12, learning_rate=0.0)
    trainer.train()
    values = metric(trainer, "sampling/logprob_plus_entropy")
    assert abs(sum(values) / len(values)) < 0.2  # filtered by min_p 0.9 alone: above 1
    assert trainer.model.generation_config.min_p == 0.9  # it is the model's, and saved with it
    assert min(metric(trainer, "completions/min_length")) < 9


def test_a_subclass_may_change_what_was_sampled(tmp_path):
    class Shortened(CROPTrainer):
        def _generate(self, prompts):
            prompt_ids, completion_ids, *rest = super()._generate(prompts)
            return (prompt_ids, [ids[:3] for ids in completion_ids], *rest)

    trainer = make_trainer(tmp_path, trainer_class=Shortened, method="opd")
    trainer.train()
    assert metric(trainer, "selection/tokens_per_response")[0] <= 3


def test_evaluation_loss_is_the_mean_over_tokens(tmp_path):
    """Batches of unequal length: the token mean of the advantages, with the sign turned."""
    trainer = make_trainer(tmp_path, eval_dataset=make_rows(5, seed=9))
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(-result["eval_distillation/advantage"], rel=1e-6)
