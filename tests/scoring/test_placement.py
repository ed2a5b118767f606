"""Where the teacher lives changes what it costs, not what it says."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import make_model, make_rows, make_trainer, metric
from transformers import AutoModelForCausalLM, AutoTokenizer

from crop_trl import CROPConfig
from crop_trl.models.fp8 import Fp8Linear, quantize_layers
from crop_trl.scoring.local import LocalScorer
from crop_trl.scoring.placement import OffloadedWeights, quantization_config

EMBEDDED = "examples/tiny_math/models"
PROMPTS, COMPLETIONS = [[5, 6, 7], [8, 9]], [[10, 11, 12, 13], [14, 15]]


def test_weights_survive_the_way_there_and_back():
    model = make_model(0).eval().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload = OffloadedWeights(model, "cpu")
    with pytest.raises(RuntimeError), offload:
        raise RuntimeError
    with offload:
        assert LocalScorer(model, 4, 0).score(PROMPTS, COMPLETIONS).logprobs.shape == (2, 4, 4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_offloaded_teacher_trains_the_same(tmp_path):
    resident = make_trainer(tmp_path / "a", max_steps=2)
    resident.train()
    offloaded = make_trainer(tmp_path / "b", max_steps=2, teacher_placement="offload")
    offloaded.train()
    assert metric(offloaded, "loss") == metric(resident, "loss")
    assert len(metric(offloaded, "scoring/move_seconds")) == 2 and not metric(resident, "scoring/move_seconds")


@pytest.mark.gpu
def test_offloaded_weights_leave_the_device():
    model = make_model(0, hidden=512, layers=4).eval().requires_grad_(False)
    resident = LocalScorer(make_model(0, hidden=512, layers=4).cuda().eval(), 8, 0).score(PROMPTS, COMPLETIONS)
    gc.collect()
    offloaded = OffloadedWeights(model, "cuda")
    scorer = LocalScorer(model, 8, 0, ready=lambda: offloaded)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        scored = scorer.score(PROMPTS, COMPLETIONS)
        assert torch.cuda.max_memory_allocated() - before >= size
        assert next(model.parameters()).device.type == "cpu" and next(model.parameters()).is_pinned()
        torch.testing.assert_close(scored.logprobs, resident.logprobs)
        del scored
        assert torch.cuda.memory_allocated() - before < size // 10
    assert scorer.stats.move_seconds > 0


@pytest.mark.parametrize(
    "quantization, tolerance, placement",
    [("8bit", 0.1, "resident"), ("4bit", 0.5, "resident"), ("fp8", 0.4, "resident"), ("fp8", 0.4, "offload")],
)
def test_quantised_teacher(tmp_path, quantization, tolerance, placement):
    student, teacher = f"{EMBEDDED}/student", f"{EMBEDDED}/teacher"
    if quantization == "fp8":
        layer = Fp8Linear
    else:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        layer = bitsandbytes.nn.Linear8bitLt if quantization == "8bit" else bitsandbytes.nn.Linear4bit
    settings = {"teacher_quantization": quantization, "teacher_placement": placement}
    trainer = make_trainer(tmp_path, student, teacher, tokenizer=AutoTokenizer.from_pretrained(student), **settings)
    scorer = trainer.scorers["teacher"]
    assert sum(isinstance(module, layer) for module in scorer.model.modules()) == 6 * 7
    assert scorer.precision == "quantised"
    scored = scorer.score(PROMPTS, COMPLETIONS)
    exact = LocalScorer(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval(), 4, 0).score(
        PROMPTS, COMPLETIONS
    )
    error = (scored.sampled_logprobs - exact.sampled_logprobs).abs().mean()
    assert 0 < error < tolerance
    trainer.train()
    assert metric(trainer, "loss")


def test_products_in_fp8():
    """Three bits after the point: products of rows are some three per cent off, whatever their size."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 48).to(torch.bfloat16)
    linear.weight.data *= 10.0 ** torch.randint(-3, 4, (48, 1))
    hidden = (torch.randn(5, 7, 256) * 10.0 ** torch.randint(-3, 4, (5, 7, 1))).to(torch.bfloat16)
    found, exact = Fp8Linear(linear, "cpu")(hidden).float(), linear.float()(hidden.float())
    assert found.shape == exact.shape
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0.005 < error.mean() < 0.05 and error.max() < 0.15
    alone = Fp8Linear(linear, "cpu")(hidden[2, 3])
    torch.testing.assert_close(alone.float(), found[2, 3], rtol=1e-2, atol=1e-6)


def test_a_teacher_with_an_adapter_in_fp8():
    model = AutoModelForCausalLM.from_pretrained(f"{EMBEDDED}/teacher", dtype=torch.bfloat16)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    exact = LocalScorer(adapted.get_base_model().eval(), 4, 0).score(PROMPTS, COMPLETIONS)
    quantize_layers(adapted.get_base_model(), "cpu")
    scored = LocalScorer(adapted.get_base_model(), 4, 0).score(PROMPTS, COMPLETIONS)
    error = (scored.sampled_logprobs - exact.sampled_logprobs).abs().mean()
    assert 0 < error < 0.05 * exact.sampled_logprobs.abs().mean()


MISTAKES = {
    "placement": ({"teacher_placement": "disk"}, "`teacher_placement` 'disk' is not known: choose one of resident"),
    "bits": ({"teacher_quantization": "3bit"}, "`teacher_quantization` '3bit' is not known: choose one of 8bit, 4bit"),
    "address": ({"teacher_server_urls": ["localhost"]}, "must be addresses such as http://localhost:8000/v1, got"),
    "two places": (
        {"teacher_server_urls": ["http://a"], "teacher_placement": "offload"},
        "`teacher_placement` 'offload' is for a teacher in this process, but `teacher_server_urls` puts it on a server",
    ),
    "bits on a server": (
        {"teacher_server_urls": ["http://a"], "teacher_quantization": "4bit"},
        "`teacher_quantization` '4bit' is for a teacher in this process",
    ),
    "loading on a server": (
        {"teacher_server_urls": "http://a", "teacher_init_kwargs": {"dtype": "float32"}},
        "`teacher_init_kwargs` {'dtype': 'float32'} is for a teacher in this process",
    ),
    "bits that travel": (
        {"teacher_quantization": "4bit", "teacher_placement": "offload"},
        "`teacher_quantization` '4bit' does not work with `teacher_placement` 'offload'",
    ),
    "fp8 in parts": (
        {"teacher_quantization": "fp8", "teacher_placement": "sharded"},
        "`teacher_quantization` 'fp8' does not work with `teacher_placement` 'sharded'",
    ),
    "bits twice": (
        {"teacher_quantization": "4bit", "teacher_init_kwargs": {"quantization_config": {}}},
        "exclude each other",
    ),
    "no patience": ({"teacher_server_timeout": 0}, "`teacher_server_timeout` must be a number of at least 1, got 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_contradiction_gets_one_sentence(tmp_path, mistake):
    settings, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError) as stopped:
        CROPConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)
    assert sentence in str(stopped.value) and len(str(stopped.value).splitlines()) == 1


def test_a_model_beside_a_server(tmp_path):
    with pytest.raises(ValueError, match="`teacher` is a Qwen3ForCausalLM, and `teacher_server_urls` is set"):
        make_trainer(tmp_path, teacher_server_urls=["http://127.0.0.1:1"], rows=make_rows(8))


@pytest.mark.parametrize(
    ("named", "meant"), [("float16", torch.float16), ("torch.float16", torch.float16), ("auto", torch.bfloat16)]
)
def test_the_arithmetic_of_four_bits(named, meant):
    assert quantization_config("4bit", named).bnb_4bit_compute_dtype == meant
    assert quantization_config("4bit", meant).bnb_4bit_compute_dtype == meant
