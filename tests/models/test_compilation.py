"""Compiled decoder layers give what the plain ones give."""

import copy

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from crop_trl import CROPConfig
from crop_trl.checks import check_compilation
from crop_trl.models.compilation import compile_layers
from crop_trl.scoring.layout import pack
from crop_trl.scoring.local import LocalScorer
from crop_trl.training.scorers import Preflight


@pytest.mark.slow
def test_scores_and_gradients_are_those_of_the_plain_model():
    plain = tiny.make_model()
    compiled = copy.deepcopy(plain)
    compile_layers(compiled)
    assert isinstance(compiled, PreTrainedModel) and list(compiled.state_dict()) == list(plain.state_dict())
    prompts = [[5 + i, 6, 7] for i in range(5)]
    responses = [list(range(5, 8 + 3 * i)) for i in range(5)]
    both = [LocalScorer(model, 4, 0, 32) for model in (plain, compiled)]
    expected, got = (scorer.score(prompts, responses) for scorer in both)
    assert torch.allclose(expected.logprobs, got.logprobs, atol=2e-6)
    assert torch.allclose(expected.sampled_logprobs, got.sampled_logprobs, atol=2e-6)
    for model in (plain, compiled):
        model.train().gradient_checkpointing_enable()
        for rows in ([0, 1], [2, 3, 4], [4]):
            batch = pack(prompts, responses, rows, 0)
            output = model(input_ids=batch.input_ids, head_positions=batch.positions, head_targets=batch.targets)
            output.logprobs.sum().backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5), name


def test_says_when_there_is_nothing_to_compile():
    with pytest.raises(ValueError, match="`compile_layers` found no decoder layers in Linear"):
        compile_layers(torch.nn.Linear(2, 2))


def test_needs_an_engine_or_graphs():
    with pytest.raises(ValueError, match="`compile_layers` needs `use_vllm` or `use_cuda_graphs`"):
        CROPConfig("unused", use_cpu=True, bf16=False, compile_layers=True)


def test_lengths_are_padded_so_that_few_graphs_serve(tmp_path):
    def multiple(**settings):
        return CROPConfig(str(tmp_path), use_cpu=True, bf16=False, **settings).pad_to_multiple_of

    assert multiple() == 1
    assert multiple(use_vllm=True, compile_layers=True) == 8
    assert multiple(pad_to_multiple_of=64) == 64
    with pytest.raises(ValueError, match="`pad_to_multiple_of` must be a whole number of at least 1, got 0"):
        multiple(pad_to_multiple_of=0)


def test_is_not_for_a_sharded_teacher():
    with pytest.raises(ValueError, match="`compile_layers` does not work with `teacher_placement` 'sharded'"):
        check_compilation(False, 0, "sharded")


def test_a_look_at_the_student_makes_no_graph(tmp_path):
    teacher = LocalScorer(tiny.make_model(seed=1), 4, 0)
    trainer = tiny.make_trainer(tmp_path, teacher=teacher, use_cuda_graphs=True, compile_layers=True, preflight=True)
    (look,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Preflight))
    before = counters["stats"]["unique_graphs"]
    look.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert counters["stats"]["unique_graphs"] == before
