"""Teachers that are the student itself, or several by name."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import flat_weights, make_model, make_rows, make_tokenizer, make_trainer, metric
from transformers import TrainerCallback

from crop_trl import CROPConfig, Method, register_method
from crop_trl.methods import METHODS
from crop_trl.scoring.local import LocalScorer
from crop_trl.training.callbacks import RolloutCallback

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(autouse=True)
def table():
    """A method whose target follows a hint, and one that compares teachers; they go again."""
    before = dict(METHODS)
    register_method("hinted", Method(target="teacher/hint"))
    both = ("left/original", "right/original")
    register_method("compared", Method(needs=both, target=both[0], score=lambda s, _: s[both[1]].sampled_logprobs))
    yield
    METHODS.clear()
    METHODS.update(before)


def hinted_rows(n: int = 16):
    def hint(row):
        return {"hint_prompt": [{"role": "user", "content": row["prompt"][0]["content"] + f" {row['answer']}"}]}

    return make_rows(n).map(hint)


class Rollouts(RolloutCallback):
    def __init__(self):
        self.seen = []

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.seen.append(rollout)


class Weights(TrainerCallback):
    """The trained weights before the first step and after each."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append(flat_weights(model))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(flat_weights(model))


def train(folder, resume=None, **settings):
    rollouts, weights = Rollouts(), Weights()
    trainer = make_trainer(
        folder,
        **{"method": "hinted", "rows": hinted_rows(), "callbacks": [rollouts, weights], **settings},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, rollouts.seen, weights.seen


def own_weights(trainer) -> int:
    """Weights of all models that a trainer holds."""
    models = {id(scorer.model): scorer.model for scorer in trainer.scorers.values()}
    return sum(p.numel() for model in models.values() for p in model.parameters())


def test_the_student_as_its_own_teacher(tmp_path):
    trainer, rollouts, _ = train(tmp_path, teacher_source="student", max_steps=2)
    assert trainer.scorers["teacher"].model is trainer.scorers["student"].model
    for rollout in rollouts:
        assert set(rollout.signals) == {"teacher/hint"}
    assert all(loss != 0 for loss in metric(trainer, "loss"))
    row = rollouts[-1]
    # After the last step, the weights that score are those that were just trained.
    again = trainer.score_rollout(row.rows, row.prompt_ids, row.completion_ids, ["teacher/hint", "student/hint"])
    assert torch.equal(again["teacher/hint"].logprobs, again["student/hint"].logprobs)
    assert not torch.equal(again["teacher/hint"].logprobs, row.signals["teacher/hint"].logprobs)


def test_initial_weights_under_an_adapter_are_those_of_a_second_model(tmp_path):
    own, with_own, _ = train(tmp_path / "a", teacher_source="initial", peft_config=LORA, max_steps=3)
    second, with_second, _ = train(tmp_path / "b", teacher=make_model(0), peft_config=LORA, max_steps=3)
    for one, other in zip(with_own, with_second, strict=True):
        assert one.completion_ids == other.completion_ids
        torch.testing.assert_close(one.signals["teacher/hint"].logprobs, other.signals["teacher/hint"].logprobs)
        assert torch.equal(one.signals["teacher/hint"].token_ids, other.signals["teacher/hint"].token_ids)
    torch.testing.assert_close(flat_weights(own.model), flat_weights(second.model))
    base = sum(p.numel() for p in make_model(0).parameters())
    adapter = sum(p.numel() for p in own.model.parameters() if p.requires_grad)
    assert own_weights(own) == base + adapter and own_weights(second) == 2 * base + adapter
    assert any(p.abs().max() > 0 for name, p in own.model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("student", ["whole", "continued", "pissa"])
def test_initial_weights_are_kept_where_an_adapter_cannot_give_them_back(tmp_path, student):
    model, adapter = make_model(0), None
    if student == "continued":
        model = get_peft_model(model, LORA)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    elif student == "pissa":
        adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="pissa")
    before = LocalScorer(deepcopy(model.get_base_model() if student == "continued" else model).eval(), 4, 0)
    trainer, (*_, last), _ = train(tmp_path, student=model, teacher_source="initial", peft_config=adapter, max_steps=3)
    hints = trainer._tokenize_prompts([row["hint_prompt"] for row in last.rows])[0]
    scored = before.score(hints, last.completion_ids)
    torch.testing.assert_close(last.signals["teacher/hint"].logprobs, scored.logprobs)
    now = trainer.scorers["student"].score(hints, last.completion_ids)
    assert (now.logprobs - scored.logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("adapter", [None, LORA])
def test_the_average_is_that_of_the_weights_after_each_step(tmp_path, adapter):
    settings = {"teacher_source": "average", "teacher_decay": 0.7, "peft_config": adapter, **SAVING}
    trainer, rollouts, weights = train(tmp_path / "a", max_steps=3, **settings)
    averages = [weights[0]]
    for after in weights[1:]:
        averages.append(0.7 * averages[-1] + 0.3 * after)
    average, last = averages[-1], rollouts[-1]
    # The last batch was read by the average over the steps before it.
    reader = deepcopy(trainer.model).eval()
    trained = [p for _, p in sorted(reader.named_parameters()) if p.requires_grad]
    for parameter, values in zip(trained, averages[2].split([p.numel() for p in trained]), strict=True):
        parameter.data.copy_(values.view_as(parameter))
    hints = trainer._tokenize_prompts([row["hint_prompt"] for row in last.rows])[0]
    alone = LocalScorer(reader, 4, 0).score(hints, last.completion_ids)
    torch.testing.assert_close(last.signals["teacher/hint"].logprobs, alone.logprobs)
    held = trainer.averages["teacher"]
    student = flat_weights(trainer.model)
    with held.lent():
        torch.testing.assert_close(flat_weights(trainer.model), average, rtol=0, atol=1e-6)
    assert torch.equal(flat_weights(trainer.model), student) and (student - average).abs().max() > 1e-3
    with pytest.raises(RuntimeError), held.lent():
        raise RuntimeError
    assert torch.equal(flat_weights(trainer.model), student)

    whole, _, _ = train(tmp_path / "b", max_steps=4, **settings)
    resumed, _, _ = train(tmp_path / "b", max_steps=4, resume=str(tmp_path / "b/checkpoint-2"), **settings)
    assert metric(resumed, "loss") == metric(whole, "loss")
    for name, value in whole.averages["teacher"]._average.items():
        assert torch.equal(value, resumed.averages["teacher"]._average[name])
    train(tmp_path / "c", max_steps=2, teacher_source="initial", peft_config=adapter, **SAVING)
    with pytest.raises(ValueError, match="holds no average of the student's weights .`teacher_source` 'average'.; st"):
        train(tmp_path / "c", max_steps=4, resume=str(tmp_path / "c/checkpoint-2"), **settings)


def test_two_teachers_read_their_own_rows(tmp_path):
    names = ["left", "right", "right"]
    rows = make_rows(16).map(lambda row, i: {"teacher": names[i % 3]}, with_indices=True)
    models = {"left": make_model(1, hidden=48), "right": make_model(2)}
    trainer, rollouts, _ = train(tmp_path, teacher=deepcopy(models), rows=rows, method="crop", max_steps=3)
    mixed = 0
    for rollout in rollouts:
        own = [row["teacher"] for row in rollout.rows]
        mixed += len(set(own)) == 2
        for need in METHODS["crop"].needs:
            column = {"original": "prompt"}.get(need.split("/")[1], need.split("/")[1] + "_prompt")
            prompts = trainer._tokenize_prompts([row[column] for row in rollout.rows])[0]
            for row, name in enumerate(own):
                ids = rollout.completion_ids[row]
                alone = trainer.scorers[name].score([prompts[row]], [ids])
                part = rollout.signals[need].rows([row])
                torch.testing.assert_close(part.logprobs[:, : len(ids)], alone.logprobs)
                torch.testing.assert_close(part.sampled_logprobs[:, : len(ids)], alone.sampled_logprobs)
                assert part.mask.sum() == len(ids)
    assert mixed
    assert metric(trainer, "scoring/left/sequences") and metric(trainer, "scoring/right/sequences")
    assert not metric(trainer, "scoring/sequences")


def test_a_method_compares_teachers_on_all_rows(tmp_path):
    models = {"left": make_model(1), "right": make_model(2)}
    # Whom a row names is nothing to a method that names its teachers itself.
    rows = make_rows(16).map(lambda row: {"teacher": "nobody"})
    _, (rollout,), _ = train(tmp_path, teacher=models, rows=rows, method="compared")
    assert set(rollout.signals) == {"left/original", "right/original"}
    assert torch.equal(rollout.selection.teacher_logprobs, rollout.signals["left/original"].sampled_logprobs)
    assert torch.equal(rollout.selection.scores, rollout.signals["right/original"].sampled_logprobs)


def test_the_student_as_it_began_is_a_teacher_to_compare_with(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "one")
    make_model(1, hidden=48).save_pretrained(tmp_path / "one")
    teachers = {"left": str(tmp_path / "one"), "right": {"source": "initial"}}
    for method in ("compared", "opd"):
        rows = make_rows(16).map(lambda row: {"teacher": "left"})
        trainer, _, _ = train(tmp_path / method, teachers=teachers, rows=rows, method=method)
        assert metric(trainer, "loss") != [0.0]


def test_named_teachers_come_from_their_own_places(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "one")
    make_model(1, hidden=48).save_pretrained(tmp_path / "one")
    rows = hinted_rows().map(lambda row, i: {"teacher": ["path", "old"][i % 2]}, with_indices=True)
    teachers = {
        "path": {"model_name_or_path": str(tmp_path / "one"), "placement": "offload"},
        "old": {"source": "initial"},
        "mean": {"source": "average", "decay": 0.5},
    }
    trainer, rollouts, _ = train(tmp_path / "run", teachers=teachers, rows=rows, peft_config=LORA, max_steps=2)
    assert list(trainer.teachers) == ["path", "old", "mean"] and list(trainer.averages) == ["mean"]
    assert trainer.averages["mean"].decay == 0.5 and trainer.scorers["old"].model is trainer.model
    assert metric(trainer, "scoring/path/move_seconds") and not metric(trainer, "scoring/old/move_seconds")
    assert trainer.run_settings["teacher_path"] == "one"
    assert trainer.run_settings["teacher_old"] == "the student before training"
    assert trainer.run_settings["teacher_mean"] == "an average of the student (decay 0.5)"


def some_reward(completions, **kwargs):
    return [float(len(c[0]["content"].split()) % 2) for c in completions]


REFUSED = {
    "no such source": (
        {"teacher_source": "copy"},
        "`teacher_source` 'copy' is not known: choose one of model, stud",
    ),
    "decay": ({"teacher_decay": 1.0}, "`teacher_decay` must be less than 1, got 1.0."),
    "a path of the student's": (
        {"teacher_source": "student", "teacher_model_name_or_path": "x"},
        "`teacher_model_name_or_path` 'x' is for a model of its own, but `teacher_source` is 'student'; remove one",
    ),
    "the average elsewhere": (
        {"teacher_source": "average", "teacher_placement": "offload"},
        "`teacher_placement` 'offload' is for a second model, but with `teacher_source` 'average' the student's own",
    ),
    "the adapter elsewhere": (
        {"teacher_source": "initial", "teacher_quantization": "4bit", "peft_config": LORA},
        "`teacher_quantization` '4bit' is for a second model, but with `teacher_source` 'initial' the student's own",
    ),
    "a model too": (
        {"teacher_source": "student", "teacher": make_model(1)},
        "`teacher` is given, but `teacher_source` is 'student'; remove one of the two.",
    ),
    "nothing to learn": (
        {
            "teacher_source": "student",
            "method": "opd",
            "reward_funcs": some_reward,
        },
        "The target of method 'opd' is 'teacher/original', which with `teacher_source` 'student' is the student after",
    ),
    "a reward to look at": (
        {"teacher_source": "initial", "method": "opd", "reward_funcs": some_reward, "reward_weights": [0.0]},
        "The target of method 'opd' is 'teacher/original', which with `teacher_source` 'initial' is the student as it",
    ),
    "nothing to begin with": (
        {"teacher_source": "average", "method": "crop"},
        "The target of method 'crop' is 'teacher/original', which with `teacher_source` 'average' is the student as it",
    ),
    "one of several": (
        {"teachers": {"a": {"source": "student"}, "b": {"source": "initial"}}, "method": "opd"},
        "The target of method 'opd' is 'teacher/original', which with `teacher_source` 'student' is the student after",
    ),
    "nobody's setting": (
        {"teachers": {"a": {"path": "x"}}},
        "Teacher 'a': 'path' is no setting; choose of source, decay, model_name_or_path, revision,",
    ),
    "a wrong place": (
        {"teachers": {"a": {"model_name_or_path": "x", "placement": "disk"}}},
        "Teacher 'a': `teacher_placement` 'disk' is not known",
    ),
    "taken": ({"teachers": {"student": "x"}}, "`teachers` has one named 'student'; take a word that is neither"),
    "no names": ({"teachers": {}}, "`teachers` must give a path or settings by name, got {}."),
    "no JSON": ({"teachers": "a=x"}, "`teachers` is no JSON object"),
    "one and several": (
        {"teachers": {"a": "x"}, "teacher_model_name_or_path": "y"},
        "`teacher_model_name_or_path` and `teachers` both say where a teacher is; remove one of the two.",
    ),
    "a stranger": (
        {"teacher": {"left": make_model(1)}, "method": "compared"},
        "Method 'compared' reads 'right/original', and `teachers` names no such teacher; add it.",
    ),
    "nobody's rows": (
        {"teacher": {"left": make_model(1), "right": make_model(2)}},
        "No row is left of 16: 16 without teacher; mend the dataset.",
    ),
    "a stranger's rows": (
        {
            "teacher": {"left": make_model(1), "right": make_model(2)},
            "rows": hinted_rows().map(lambda row: {"teacher": "middle"}),
        },
        "A row's `teacher` is 'middle', and `teachers` has left, right; name one of them.",
    ),
    "a stranger's rows, of one teacher": (
        {"teacher": {"left": make_model(1)}, "rows": hinted_rows().map(lambda row: {"teacher": "middle"})},
        "A row's `teacher` is 'middle', and `teachers` has left; name one of them.",
    ),
    "a stranger's held-out rows": (
        {
            "teacher": {"left": make_model(1), "right": make_model(2)},
            # Training asks for nobody's own teacher, evaluation does.
            "method": "compared",
            "eval_dataset": hinted_rows(2).map(lambda row: {"teacher": "middle"}),
        },
        "A row's `teacher` is 'middle', and `teachers` has left, right; name one of them.",
    ),
    "two prompts to learn from": (
        {
            "rows": hinted_rows().map(
                lambda row, i: {"hint_prompts": [row["hint_prompt"]] * (i // 8 + 1)}, with_indices=True
            )
        },
        "The target follows one `hint_prompt`, and a row has 2; give each one.",
    ),
}


def test_what_cannot_work_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    wrong = {}
    monkeypatch.setattr("crop_trl.trainer.ready_student", lambda *_: pytest.fail("the student was loaded"))
    for mistake, (settings, sentence) in REFUSED.items():
        settings = {"method": "hinted", "rows": hinted_rows(), **settings}
        with pytest.raises(ValueError) as stopped:
            make_trainer(tmp_path, **settings)
        if sentence not in str(stopped.value) or len(str(stopped.value).splitlines()) > 1:
            wrong[mistake] = str(stopped.value)
    assert not wrong


def test_an_initial_teacher_pulls_back_where_rewards_pull_away(tmp_path):
    """With rewards, the student as it was is a teacher worth having, after the same prompt too."""

    trainer, _, _ = train(
        tmp_path, teacher_source="initial", peft_config=LORA, method="opd", reward_funcs=some_reward, max_steps=2
    )
    assert metric(trainer, "distillation/gap_kept")[0] == pytest.approx(0, abs=1e-6)


def test_what_a_teacher_leaves_out_is_as_for_a_single_one(tmp_path):
    teachers = '{"a": "x", "b": {"model_name_or_path": "y", "placement": "resident", "revision": "v2"}}'
    config = CROPConfig(str(tmp_path), use_cpu=True, bf16=False, teacher_placement="offload", teachers=teachers)
    a, b = config.each_teacher.values()
    assert (a.teacher_model_name_or_path, a.teacher_placement, a.teacher_kwargs) == ("x", "offload", {})
    assert (b.teacher_model_name_or_path, b.teacher_placement) == ("y", "resident")
    assert b.teacher_kwargs == {"revision": "v2"}
