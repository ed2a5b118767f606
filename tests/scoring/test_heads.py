"""Scores equal a model's own logits, whatever lies between its backbone and them."""

import copy

import pytest
import torch
from architectures import kinds, tiny_model
from peft import LoraConfig, get_peft_model
from tiny import make_model, make_tokenizer, make_trainer
from transformers import Qwen3ForSequenceClassification

from crop_trl.scoring.head import add_token_head, has_token_head
from crop_trl.scoring.layout import pack
from crop_trl.scoring.local import LocalScorer

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
RESPONSES = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]
# Their real positions depend on what follows them, padding included: refused before training.
NOT_CAUSAL = {"CpmAntForCausalLM", "ProphetNetForCausalLM", "XLNetLMHeadModel"}
COMMON = ("LlamaForCausalLM", "Llama4ForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "GraniteForCausalLM")
MORE_THAN_A_MATRIX = (
    "BertLMHeadModel",
    "ModernBertDecoderForCausalLM",
    "RecurrentGemmaForCausalLM",
    "ElectraForCausalLM",
)


@torch.no_grad()
def own_logprobs(model, prompt, response):
    logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)[len(prompt) - 1 : -1]


def furthest(model) -> float:
    """Largest distance of a score from the model's own log-probability of the same token, in nats."""
    wanted = [own_logprobs(model, *pair) for pair in zip(PROMPTS, RESPONSES)]
    scored = LocalScorer(model, 5, 0).score(PROMPTS, RESPONSES)
    found = []
    for row, (own, response) in enumerate(zip(wanted, RESPONSES)):
        n = len(response)
        found += [scored.logprobs[row, :n] - own.gather(-1, scored.token_ids[row, :n].long())]
        found += [scored.logprobs[row, :n] - own.topk(scored.top_k).values]
        found += [scored.sampled_logprobs[row, :n, None] - own.gather(-1, torch.tensor(response)[:, None])]
    return max(apart.abs().max().item() for apart in found)


@pytest.mark.parametrize("name", [*COMMON, *MORE_THAN_A_MATRIX])
def test_scores_are_the_models_own(name):
    model = tiny_model(name)
    assert furthest(model) < 1e-3
    assert (getattr(model, "_head_is_matrix", False)) == (name in COMMON)


@pytest.mark.slow
def test_every_causal_language_model():
    """Right or refused: `pytest -m slow -k every_causal -s` prints the table."""
    right, refused, wrong, cannot = [], [], {}, {}
    for name in sorted(kinds()):
        try:
            model = tiny_model(name)
            own_logprobs(model, PROMPTS[0], RESPONSES[0])
        except Exception as error:  # what this small a configuration cannot be
            cannot[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        apart = furthest(model)
        if (apart < 1e-3) == (name in NOT_CAUSAL):
            wrong[name] = apart
        (refused if name in NOT_CAUSAL else right).append(name)
    print(f"right ({len(right)}): {' '.join(right)}")
    print(f"refused ({len(refused)}): {' '.join(refused)}")
    print(f"not built this small ({len(cannot)}):", *(f"  {name}: {why}" for name, why in cannot.items()), sep="\n")
    assert not wrong and len(right) > 130


def adapted(**settings):
    torch.manual_seed(0)
    return get_peft_model(make_model(0), LoraConfig(r=4, init_lora_weights=False, **settings))


HEADS = {
    "lora on the head": {"target_modules": ["lm_head", "q_proj"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4, 5]},
}


@pytest.mark.parametrize("name", HEADS)
def test_adapters_on_the_head_are_scored_and_trained(name):
    model = adapted(**HEADS[name])
    base = model.get_base_model()
    add_token_head(base)
    assert furthest(model.eval()) < 1e-3

    batch = pack(PROMPTS, RESPONSES, [0, 1], 0)
    out = model(input_ids=batch.input_ids, head_positions=batch.positions, head_targets=batch.targets)
    out.logprobs.sum().backward()
    sparse = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    full = [
        model(input_ids=torch.tensor([p + r]))
        .logits[0]
        .log_softmax(-1)[len(p) - 1 : -1]
        .gather(-1, torch.tensor(r)[:, None])
        for p, r in zip(PROMPTS, RESPONSES)
    ]
    torch.testing.assert_close(out.logprobs, torch.cat(full).squeeze(-1), atol=1e-4, rtol=0)
    torch.cat(full).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(sparse[name], parameter.grad, atol=1e-4, rtol=1e-3)


def test_a_model_whose_scores_are_not_its_own_is_refused(tmp_path, monkeypatch):
    """Whatever the reason: here the forward adds to the logits where nobody expects it."""
    teacher = make_model(1)
    original = type(teacher).forward

    def shifted(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.logits[..., 7] += 20.0
        return output

    monkeypatch.setattr(type(teacher), "forward", shifted)
    teacher._head_is_matrix = True
    with pytest.raises(ValueError, match="nats a token from what its own forward gives"):
        make_trainer(tmp_path, teacher=teacher)


def test_heads_of_other_models_are_refused(tmp_path):
    """A classifier's folder has no output head, and loading would draw one at random."""
    config = make_model(1, tied=False).config
    config.num_labels = 2
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    make_tokenizer().save_pretrained(tmp_path / "classifier")
    untied = make_model(1, tied=False)
    weights = {name: value for name, value in untied.state_dict().items() if name != "lm_head.weight"}
    untied.save_pretrained(tmp_path / "headless", state_dict=weights)
    make_tokenizer().save_pretrained(tmp_path / "headless")
    for name in ("classifier", "headless"):
        with pytest.raises(ValueError, match="has no lm_head.weight, which would be random"):
            make_trainer(tmp_path / "run", teacher=str(tmp_path / name))
    for student in (str(tmp_path / "classifier"), make_model(0).model):
        with pytest.raises(ValueError, match="which has no output head; choose a causal LM"):
            make_trainer(tmp_path / "run", student=student)


def test_a_head_in_fp32_is_scored_in_fp32(tmp_path):
    """`cast_lm_head_to_fp32` of a half-precision student: its update sees the same log-probabilities as its scoring."""
    trainer = make_trainer(tmp_path, student=make_model(0, tied=False).to(torch.bfloat16), cast_lm_head_to_fp32=True)
    student = trainer.model
    hidden = student.model(torch.tensor([PROMPTS[0] + RESPONSES[0]])).last_hidden_state[0].float()
    own = torch.nn.functional.linear(hidden, student.lm_head.weight.float()).log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    scored = trainer.scorers["student"].score(PROMPTS[:1], RESPONSES[:1])
    assert student.lm_head.weight.dtype == torch.float32
    torch.testing.assert_close(scored.logprobs[0], own.topk(scored.top_k).values, atol=1e-5, rtol=0)


def test_students_that_see_what_follows_are_refused(tmp_path):
    """Their log-probability of a token depends on later ones, which are not there when it is drawn."""
    bidirectional = tiny_model("BertLMHeadModel")
    bidirectional.config.is_decoder = False
    for module in bidirectional.modules():
        for name in ("is_decoder", "is_causal"):
            if hasattr(module, name):
                setattr(module, name, False)
    scorer = LocalScorer(bidirectional, 5, 0)
    apart, rounding = scorer.apart_from_own(PROMPTS[0], RESPONSES[0])
    assert apart > 0.01 > rounding
    causal = LocalScorer(tiny_model("BertLMHeadModel"), 5, 0)
    assert causal.apart_from_own(PROMPTS[0], RESPONSES[0])[0] < 1e-5


def test_a_copy_of_the_student_runs_its_own_weights(tmp_path):
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
