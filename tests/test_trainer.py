"""CROPTrainer end to end on small random models."""

import functools

import pytest
import torch
from architectures import tiny_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import flat_weights, make_model, make_rows, make_tokenizer, make_trainer, metric
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.methods import METHODS


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
    trainer = train(tmp_path, method=method, max_steps=2)
    assert len(metric(trainer, "loss")) == 2
    assert not torch.equal(flat_weights(trainer.model), flat_weights(make_model(0)))
    kept = metric(trainer, "selection/retention_ratio")[0]
    assert kept == 1.0 if METHODS[method].score is None else kept < 0.5


@pytest.mark.parametrize("method", ["crop", "opd", "random"])
def test_loss_and_gradient_do_not_depend_on_the_split(tmp_path, trained, method):
    whole = trained(method=method)
    for per_device, accumulation in ((4, 2), (1, 8)):
        split = train(
            tmp_path / f"{accumulation}x{per_device}",
            method=method,
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


def overflowing_teacher():
    teacher = make_model(1, hidden=48)
    with torch.no_grad():
        teacher.model.norm.weight.fill_(float("inf"))
    return teacher


@pytest.mark.parametrize("method", ["opd", "crop"])
def test_a_teacher_that_is_not_finite_stops_before_the_update(tmp_path, method):
    trainer = make_trainer(tmp_path, method=method, teacher=overflowing_teacher(), preflight=False)
    before = flat_weights(trainer.model)
    with pytest.raises(ValueError, match="log-probability or weight that is not finite; load the teacher in bfloat16"):
        trainer.train()
    assert torch.equal(before, flat_weights(trainer.model))


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
    with pytest.warns(UserWarning, match="has min_p=0.9.*rollouts leave it aside"):
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


def test_engines_that_cast_weights_are_refused(tmp_path):
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        for precision in ({"bf16": True}, {"bf16": False, "fp16": True}):
            with pytest.raises(ValueError, match=f"`{name}` casts the trained weights to half precision"):
                CROPConfig(str(tmp_path), use_cpu=True, **precision, **{name: True})


def test_what_cannot_work_is_refused(tmp_path):
    from peft import PromptTuningConfig

    student = make_model(0)
    with pytest.raises(ValueError, match="Student and teacher share weights"):
        make_trainer(tmp_path, student=student, teacher=student)
    with pytest.raises(ValueError, match="PromptTuningConfig is not supported"):
        make_trainer(tmp_path, peft_config=PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="40 vocabulary entries, fewer than the 58 tokens"):
        make_trainer(tmp_path, teacher=make_model(1, vocab=40))
    with pytest.warns(UserWarning, match="trainable weights are bfloat16"):
        make_trainer(tmp_path, student=make_model(0).to(torch.bfloat16))


def test_what_a_user_may_pass_works(tmp_path):
    """A head with fewer padding rows, a teacher with an adapter, the folder of an adapter, experts, no upper limits."""
    padded = make_model(0, vocab=100)
    with torch.no_grad():
        padded.lm_head.weight[58:] = 0
        padded.lm_head.weight[:, 0] = 9.0  # what only pads the head is never drawn
    adapter = LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head", "q_proj"])
    folder = tmp_path / "adapter"
    base = make_model(0)
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(loaded, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    experts = tiny_model("Qwen3MoeForCausalLM")
    experts.generation_config.eos_token_id = 1
    for given in (
        {"teacher": get_peft_model(make_model(1), adapter)},
        {"teacher": str(folder)},
        {"student": str(folder)},
        {"student": experts},
        {"epsilon_high": None, "delta": 2.0, "max_completion_length": 12},
        {"rows": make_rows(16).map(lambda row: {"images": [None]})},
    ):
        trainer = make_trainer(tmp_path / "run", **given)
        before = flat_weights(trainer.model)
        trainer.train()
        assert not torch.equal(before, flat_weights(trainer.model)), given


def test_arguments_in_grpos_order_and_others_are_told(tmp_path):
    rows, teacher = Dataset.from_list(make_rows(16)), make_model(1)
    settings = {"use_cpu": True, "bf16": False}
    grpo, crop = GRPOConfig(str(tmp_path), **settings), CROPConfig(str(tmp_path), **settings)
    for arguments, message in (
        ((make_model(0), lambda completions, **kwargs: [0.0], crop, rows), "by name"),
        ((make_model(0), teacher, None, grpo, rows), "must be a CROPConfig"),
        ((make_model(0).requires_grad_(False), teacher, None, crop), "no weights that require a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            CROPTrainer(*arguments)


def test_a_copy_of_the_student_runs_its_own_weights(tmp_path):
    import copy

    from crop_trl.scoring.head import add_token_head, has_token_head

    model = make_model(0)
    add_token_head(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(twin(ids).logits, make_model(0)(ids).logits)
    # What pickle leaves out is put back, and not taken for there.
    del twin.forward
    assert not has_token_head(twin)
    add_token_head(twin)
    assert has_token_head(twin)


class Wrong:
    """A scorer whose answers have one thing wrong."""

    def __init__(self, change):
        self.change = change
        from crop_trl.scoring.local import LocalScorer

        self.inner = LocalScorer(make_model(1, hidden=48), 4, 0)

    def score(self, prompt_ids, completion_ids):
        return self.change(self.inner.score(prompt_ids, completion_ids))


def with_column(scored):
    scored.sampled_logprobs = scored.sampled_logprobs.unsqueeze(-1)
    return scored


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_column, r"sampled_logprobs \(24, 12, 1\) for 24 responses; they must be"),
        (lambda scored: scored.rows(slice(0, 1)), "for 24 responses"),
        (lambda scored: None, "returned a NoneType; it must return a TopKLogprobs"),
    ],
)
def test_a_scorer_that_breaks_its_promise(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(tmp_path, teacher=Wrong(change), preflight=False).train()


def test_evaluation_loss_is_the_mean_over_tokens(tmp_path):
    """Batches of unequal length: the token mean of the advantages, with the sign turned."""
    trainer = make_trainer(tmp_path, eval_dataset=make_rows(5, seed=9))
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(-result["eval_distillation/advantage"], rel=1e-6)


def test_rows_that_cannot_be_used_leave_and_are_counted(tmp_path, capsys):
    rows = make_rows(16, conversational=False).to_list()
    rows[0]["paraphrase_prompt"] = None
    rows[1]["counterfactual_prompt"] = " "
    from datasets import Dataset

    trainer = make_trainer(tmp_path, rows=Dataset.from_list(rows), disable_tqdm=False)
    assert len(trainer.train_dataset) == 14
    printed = capsys.readouterr().out
    assert "1 without paraphrase_prompt" in printed and "1 with an empty counterfactual_prompt" in printed
    for row in rows:
        row["counterfactual_prompts"] = "what is 3 plus 4"
    with pytest.raises(ValueError, match="`counterfactual_prompts` must hold a list of prompts in each row"):
        make_trainer(tmp_path, rows=Dataset.from_list(rows))


def test_streaming_without_a_usable_row_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="No step was made"):
        make_trainer(tmp_path, rows=make_rows(16).to_iterable_dataset(), max_prompt_length=2).train()
    trainer = make_trainer(tmp_path, rows=make_rows(16).to_iterable_dataset(), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
