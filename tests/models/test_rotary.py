"""Rotary frequencies survive casts."""

import copy
import warnings

import pytest
import tiny
import torch
from transformers import BloomConfig, BloomForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from crop_trl.models.rotary import check_rotary_lengths, restore_rotary_frequencies


def logits(model):
    return model(input_ids=torch.arange(5, 45).repeat(5)[None]).logits


def gemma():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Gemma3ForCausalLM(config)


@pytest.mark.parametrize("make", [tiny.make_model, gemma])
def test_restores_what_a_cast_rounded(make):
    model = make().eval()
    cast = copy.deepcopy(model)
    for module in cast.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq"):
                setattr(module, name, buffer.to(torch.bfloat16))
    assert not torch.equal(logits(cast), logits(model))
    with pytest.warns(UserWarning, match="rotary frequencies of .* were rounded"):
        restore_rotary_frequencies(cast)
    assert torch.equal(logits(cast), logits(model))


def test_says_nothing_when_they_are_right():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_rotary_frequencies(tiny.make_model())
        restore_rotary_frequencies(torch.nn.Linear(2, 2))


def test_a_student_and_a_teacher_that_were_cast_as_a_whole(tmp_path):
    models = [tiny.make_model(0), tiny.make_model(1, hidden=48)]
    for model in models:
        model.model.rotary_emb.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="rotary frequencies"):
        trainer = tiny.make_trainer(tmp_path, *models)
    for model in (trainer.model, trainer.scorers["teacher"].model):
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(model.model.rotary_emb.inv_freq, tiny.make_model().model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sequence_of_a_batch_are_refused(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 40}
    rope |= {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4} if kind == "longrope" else {}
    model = tiny.make_model(0)
    model.config.rope_parameters = rope
    with pytest.raises(ValueError, match=f"`{kind}` rotary positions, which change for a batch"):
        check_rotary_lengths(model, 41)
    check_rotary_lengths(model, 40)


def test_a_model_without_rotary_positions_has_no_such_limit():
    check_rotary_lengths(BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)), 10**6)
