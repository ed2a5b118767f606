"""Responses that tools, an environment or a rollout function write part of: read whole, trained in part."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from tiny import flat_weights, let_it_call, make_model, make_rows, make_tokenizer, make_trainer, metric

from crop_trl import METHODS, CROPTrainer, Method, SelectionSettings, TopKLogprobs, select
from crop_trl.analysis.bank import RolloutBank, collect_bank
from crop_trl.analysis.heatmap import GAP
from crop_trl.analysis.inspect import inspect_response, table_heatmap
from crop_trl.analysis.tokens import TokenTable
from crop_trl.training.arguments import check_turns
from crop_trl.training.callbacks import RolloutCallback
from crop_trl.training.export import read_export
from crop_trl.training.reporting import example_responses


def double(n: int) -> str:
    """
    Double a number.

    Args:
        n: The number.

    Returns:
        Twice as much.
    """
    return str(2 * n)


class Doubler:
    """Adds a number to the problem, another to each row, and rewards calls."""

    def reset(self, **row):
        self.calls = 0
        return f" and {row['answer']}"

    def double(self, n: int) -> str:
        """
        Double a number.

        Args:
            n: The number.

        Returns:
            Twice as much.
        """
        self.calls += 1
        return double(n)

    def get_reward(self) -> float:
        return float(self.calls)


def interrupted(prompts, trainer):
    """A turn of two tokens after a prompt in other words, three that the student did not write, another turn."""
    student, tokenizer, found = trainer.model, trainer.processing_class, {}
    assert not student.training and student.generation_config.temperature is None
    for prompt in prompts:
        ids = tokenizer(f"<user> the sum {prompt[0]['content']} <eos> <assistant>")["input_ids"]

        def more(ids, count):
            settings = {"generation_config": trainer.generation_config, "max_new_tokens": count}
            return student.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()

        first, given = more(ids, 2), tokenizer("<user> 17 <assistant>")["input_ids"]
        second = more(ids + first + given, 6)
        row = {
            "prompt_ids": ids,
            "completion_ids": first + given + second,
            "logprobs": [0.0] * len(first + given + second),
            "env_mask": [1] * len(first) + [0] * len(given) + [1] * len(second),
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return found


class TwoTools(Doubler):
    def half(self, n: int) -> str:
        """
        Halve a number.

        Args:
            n: The number.

        Returns:
            Half as much.
        """
        return str(n // 2)


class Asker(Doubler):
    def reset(self, **row):
        return super().reset(answer="") and "what is 3 plus 4"


WAYS = {"tools": [double], "environment_factory": Doubler, "rollout_func": interrupted}


class Watched(CROPTrainer):
    """Keeps what GRPO sampled."""

    def _generate_and_score_completions(self, inputs):
        self.sampled = super()._generate_and_score_completions(inputs)
        return self.sampled


def conversing(folder, way, **overrides):
    student, teacher, tokenizer = make_model(0), make_model(1, hidden=48), make_tokenizer()
    if way != "rollout_func":
        let_it_call(tokenizer, student, teacher)
    settings = {"max_completion_length": 24, "reward_funcs": zero, "reward_weights": [0.0]}
    settings |= {"max_grad_norm": 0.0, way: WAYS[way], "trainer_class": Watched, "tokenizer": tokenizer}
    optimizers = (torch.optim.SGD(student.parameters(), lr=0.1), None)
    return make_trainer(folder, student=student, teacher=teacher, **{**settings, "optimizers": optimizers, **overrides})


def zero(completions, **kwargs):
    return [0.0] * len(completions)


def conversations(sampled) -> list[tuple[list[int], list[int], list[bool]]]:
    """Prompt, response and what of it the student wrote, as GRPO has them."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    return [
        (prompt[seen.bool()].tolist(), response[real.bool()].tolist(), written[real.bool()].bool().tolist())
        for prompt, seen, response, real, written in zip(*(sampled[name] for name in names))
    ]


def kept_of(method: str, logits: list[torch.Tensor], written: list[list[bool]]) -> list[list[bool]]:
    """What a method keeps, the slow way."""
    if method == "opd":
        return written
    if method == "random":
        scores = [np.random.default_rng([42, row]).random(len(mask)).tolist() for row, mask in enumerate(written)]
    else:
        tops = [one.log_softmax(-1).topk(4) for one in logits]
        dists = [[dict(zip(i, v)) for i, v in zip(top.indices.tolist(), top.values.tolist())] for top in tops]
        scores = reference.quantile_normalize([list(map(reference.entropy, row)) for row in dists], written)
    return [reference.keep_top(*row, 0.2) for row in zip(scores, written)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["opd", "entropy", "random"])
def test_a_step_is_that_of_whole_logits(tmp_path, way, method):
    """Both models' own logits over the conversation's ids; no token of a tool counts anywhere."""
    trainer = conversing(tmp_path, way, method=method)
    trainer.train()
    found = conversations(trainer.sampled)
    written = [mask for _, _, mask in found]
    assert 20 < sum(map(sum, written)) < sum(map(len, written)) - 20
    student, teacher = make_model(0), make_model(1, hidden=48)

    def logits(model, prompt, response):
        return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]

    ours = [logits(student, prompt, response) for prompt, response, _ in found]
    theirs = [logits(teacher, prompt, response).detach() for prompt, response, _ in found]
    kept = kept_of(method, [one.detach() for one in ours], written)
    total, gap, engine_gap, count = 0.0, 0.0, 0.0, sum(map(sum, kept))
    for s, t, (_, response, _), mask, base in zip(ours, theirs, found, kept, trainer.sampled["advantages"]):
        s, t = (one.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[mask, 0] for one in (s, t))
        total = total - ((base - (s - t).detach()) * (s - s.detach()).exp()).sum()
        gap, engine_gap = gap + (s - t).sum().item(), engine_gap - s.sum().item()
    (total / count).backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter -= 0.1 * parameter.grad
    moved, expected = (flat_weights(model) - flat_weights(make_model(0)) for model in (trainer.model, student))
    assert (moved - expected).norm() < 1e-4 * expected.norm()
    assert metric(trainer, "selection/selected_tokens") == [count]
    assert metric(trainer, "selection/retention_ratio")[0] == pytest.approx(count / sum(map(sum, written)))
    assert metric(trainer, "distillation/gap_kept")[0] == pytest.approx(gap / count, rel=1e-4)
    assert metric(trainer, "completions/mean_length")[0] == pytest.approx(sum(map(sum, written)) / 8)
    if way == "rollout_func":  # which says that each token was certain
        said = metric(trainer, "sampling/sampling_logp_difference/mean")[0]
        assert said == pytest.approx(engine_gap / count, rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_and_masks_by_their_words(tmp_path, way):
    """The prompt is the one that was sampled after; what is masked is what was written for the student."""
    trainer = conversing(tmp_path, way, method="opd")
    trainer.train()
    begins = {
        "tools": "times <user> what",
        "environment_factory": "times <user> what",
        "rollout_func": "<user> the sum",
    }
    for prompt, response, mask in conversations(trainer.sampled):
        prompt, words = (
            trainer.processing_class.decode(prompt),
            trainer.processing_class.convert_ids_to_tokens(response),
        )
        assert prompt.startswith(begins[way]) and prompt.endswith(" <assistant>")
        assert (" and " in prompt) == (way == "environment_factory")
        for t in [t for t in range(1, len(words)) if mask[t - 1] and not mask[t]]:
            answer = "17" if way == "rollout_func" else str(2 * int(words[t - 1]))
            foreign = words[t : [*mask, True].index(True, t)]
            assert [word for word in foreign if word != "<eos>"] == ["<user>", answer, "<assistant>"]


def test_methods_that_read_other_prompts_are_refused_for_what_they_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "turns.md").read_text()
    (named,) = re.findall(r"^Those that work are (.+?), and of your own", page, re.MULTILINE | re.DOTALL)
    works = [name for name, method in METHODS.items() if all(need.endswith("/original") for need in method.needs)]
    assert re.findall("`(.+?)`", named) == works
    for way in ("environment_factory", "rollout_func"):
        for name, method in METHODS.items():
            kinds = list(dict.fromkeys(need.split("/")[1] for need in method.needs if not need.endswith("/original")))
            if not kinds:
                conversing(tmp_path, way, method=name, preflight=False, reward_weights=[1.0])
                continue
            said = f"^Method '{name}' reads prompts of the kind {', '.join(kinds)}, and `{way}` makes those of"
            with pytest.raises(ValueError, match=said):
                conversing(tmp_path, way, method=name, reward_weights=[1.0])


@pytest.mark.parametrize("name", METHODS)
def test_scores_of_what_tools_wrote_move_nothing(name):
    """Masks, weights and targets of the student's tokens are the same whatever the models say of the others."""
    generator = torch.Generator().manual_seed(0)
    written = torch.rand(6, 20, generator=generator) < 0.6

    def scored():
        logprobs = (3 * torch.randn(6, 20, 30, generator=generator)).log_softmax(-1)
        top = logprobs.topk(5, -1)
        return top.indices, top.values, logprobs[..., 0]

    ours, others = {}, {}
    for need in METHODS[name].needs:
        signal = scored()
        ours[need] = TopKLogprobs(*signal)
        pairs = [(written.view(6, 20, *[1] * (one.dim() - 2)), one, other) for one, other in zip(signal, scored())]
        others[need] = TopKLogprobs(*(torch.where(*pair) for pair in pairs))
    rewarded = {
        "rewards": {"right": torch.tensor([0.0, 1, 0, 1, 1, 0])},
        "advantages": torch.randn(6, generator=generator),
    }
    one, other = (select(name, signals, written, SelectionSettings(0.3), **rewarded) for signals in (ours, others))
    assert torch.equal(one.mask, other.mask) and not (one.mask & ~written).any()
    for part in ("weights", "teacher_logprobs", "teacher_advantages"):
        values = [getattr(selection, part) for selection in (one, other)]
        assert values[0] is None or torch.equal(values[0][one.mask], values[1][one.mask])


def test_tools_go_with_every_kind_of_prompt(tmp_path):
    trainer = conversing(tmp_path, "tools", method="crop")
    trainer.train()
    rollout = trainer.sampled["rollout"]
    _, _, written = zip(*conversations(trainer.sampled))
    assert 0 < rollout.selection.mask.sum() < 0.3 * sum(map(sum, written))
    assert not any(kept[: len(mask)][~torch.tensor(mask)].any() for kept, mask in zip(rollout.selection.mask, written))


class Recorder(RolloutCallback):
    def __init__(self, records):
        self.records = records

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.records.append(rollout)


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_export_bank_and_heat_map(tmp_path, way):
    trainer = conversing(
        tmp_path,
        way,
        method="entropy",
        eval_dataset=make_rows(3, seed=9),
        selection_export_steps=1,
        num_generations_eval=2,
    )
    result = trainer.evaluate()
    written = [sum(mask) for _, _, mask in conversations(trainer.sampled)]
    assert result["eval_completions/mean_length"] == pytest.approx(sum(written) / 6)
    records = []
    trainer.add_callback(Recorder(records))
    trainer.train()
    found = conversations(trainer.sampled)
    for example, (_, _, mask) in zip(example_responses(records[0], 8), found, strict=True):
        assert [kept is not None for kept in example.kept] == mask
        assert example.kept_share == example.kept.count(True) / sum(mask)
    table = read_export(tmp_path)
    assert table.column("token_ids").to_pylist() == [response for _, response, _ in found]
    assert table.column("loss_mask").to_pylist() == [mask for _, _, mask in found]
    added = [" and " in text for text in table.column("original").to_pylist()]
    assert all(added) if way == "environment_factory" else not any(added)
    assert table_heatmap(TokenTable.from_run(tmp_path), trainer.processing_class, 0).has_missing()
    rows = list(trainer.train_dataset.take(2))
    bank = collect_bank(trainer, rows)
    assert ("teacher/paraphrase" in bank.signals) == (way == "tools")
    assert (" and " in bank.texts["original"][0]) == (way == "environment_factory")
    bank.save(tmp_path / "bank")
    again = RolloutBank.load(tmp_path / "bank")
    real = torch.arange(again.loss_mask.size(1)) < torch.tensor([len(ids) for ids in trainer._completion_ids])[:, None]
    assert (real & ~again.loss_mask).any() and not (again.select("entropy").mask & ~again.loss_mask).any()
    heatmap = inspect_response(trainer, *rows)
    assert f"{sum(heatmap.kept)} of {sum(map(math.isfinite, heatmap.rows[GAP]))} tokens" in heatmap.summary()


@pytest.mark.parametrize("way", ["environment_factory", "rollout_func"])
def test_signals_that_there_are_not_are_refused(tmp_path, way):
    trainer = conversing(tmp_path, way, method="opd")
    with pytest.raises(ValueError, match=f"`sample` reads prompts of the kind paraphrase, and `{way}` makes those of"):
        trainer.sample(trainer.train_dataset.take(1), ["teacher/original", "teacher/paraphrase"])


def returning(**changes):
    """A rollout function that returns something else in part."""
    return lambda prompts, trainer: {**interrupted(prompts, trainer), **changes}


def test_what_does_not_go_together_is_refused(tmp_path):
    for way, given, said in (
        ("tools", {"rollout_func": interrupted}, "`rollout_func` and `tools` are both given; call the tools in"),
        ("tools", {"use_cuda_graphs": True}, "`use_cuda_graphs` does not work with `tools`"),
        ("environment_factory", {"environment_factory": {"a": Doubler}}, "`environment` is None, .* a; name one"),
        (
            "rollout_func",
            {"rollout_func": returning(completion_ids=[[5]])},
            "returned 1 responses to 8 prompts; give",
        ),
        (
            "rollout_func",
            {"rollout_func": returning(env_mask=[[1]] * 8)},
            "`env_mask` .* must have a 1 or 0 for each of",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            conversing(tmp_path, way, method="opd", **given).train()


def test_processes_that_would_wait_for_each_other_are_refused():
    """Each process samples as many turns as its own responses take."""
    alone = {
        "use_vllm": False,
        "vllm_enable_sleep_mode": False,
        "vllm_mode": "colocate",
        "vllm_tensor_parallel_size": 1,
    }
    alone |= {"train": True, "method": "opd", "use_cuda_graphs": False, "world_size": 2}
    alone |= {"deepspeed_plugin": None, "fsdp": None, "fsdp_config": None}
    sharded = {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}
    for settings, how in (
        ({}, None),
        (sharded, "ZeRO-3"),
        ({**sharded, "use_vllm": True}, None),
        ({**sharded, "use_vllm": True, "vllm_enable_sleep_mode": True}, "`vllm_enable_sleep_mode`"),
        ({**sharded, "world_size": 1}, None),
        ({"use_vllm": True, "vllm_mode": "server"}, "`vllm_mode` 'server'"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "`vllm_tensor_parallel_size`"),
    ):
        args = SimpleNamespace(**{**alone, **settings})
        check_turns(args, {"rollout_func": interrupted})
        if how is None:
            check_turns(args, {"tools": [double]})
            continue
        with pytest.raises(ValueError, match=f"With `tools` .* and with {how} each turn waits for all"):
            check_turns(args, {"tools": [double]})


def calls_first(signals, ctx):
    return ctx.rewards["Doubler"][:, None] + ctx.positions


def test_an_environment_may_choose_own_and_reward_the_problem(tmp_path, monkeypatch):
    """By row, with the tools of each in its prompt; without a dataset; and its rewards are what methods see."""
    monkeypatch.setitem(METHODS, "calls", Method(score=calls_first, needs_rewards=True))
    with pytest.raises(ValueError, match="Method 'calls' reads rewards; pass `reward_funcs`"):
        conversing(tmp_path, "rollout_func", method="calls", reward_funcs=None, reward_weights=None)
    conversing(tmp_path, "environment_factory", method="calls", reward_funcs=None, reward_weights=None).train()
    rows = make_rows(8).add_column("environment", ["one", "two"] * 4)
    trainer = conversing(
        tmp_path, "environment_factory", method="opd", rows=rows, environment_factory={"one": Doubler, "two": TwoTools}
    )
    trainer.train()
    prompts = [trainer.processing_class.decode(prompt) for prompt, _, _ in conversations(trainer.sampled)]
    assert [prompt.count("times") for prompt in prompts] == [1] * 4 + [2] * 4
    trainer = conversing(tmp_path, "environment_factory", method="opd", rows=(), environment_factory=Asker)
    trainer.train()
    assert " what is 3 plus 4 <eos>" in trainer.processing_class.decode(conversations(trainer.sampled)[0][0])


def test_two_and_two_steps_are_four(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "method": "entropy"}
    four = conversing(tmp_path / "four", "environment_factory", max_steps=4, **settings)
    four.train()
    conversing(tmp_path / "two", "environment_factory", max_steps=2, **settings).train()
    resumed = conversing(tmp_path / "two", "environment_factory", max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))
    assert list(four._logs["completion"]) == list(resumed._logs["completion"])
    torch.testing.assert_close(flat_weights(four.model), flat_weights(resumed.model), rtol=0, atol=0)
