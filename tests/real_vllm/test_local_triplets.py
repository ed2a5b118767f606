"""Triplets by vLLM in this process: the embedded teacher solves, and answers are held to a schema."""

import asyncio
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from crop_trl.files import read_jsonl
from crop_trl.triplets.engine import VLLMClient
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.settings import TripletSettings

pytestmark = pytest.mark.vllm
OPTIONS = json.dumps({"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.3})
SCHEMA = {
    "type": "object",
    "properties": {"decision": {"enum": ["accept", "reject"]}},
    "required": ["decision"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def vllm():
    """What every test here needs."""
    return pytest.importorskip("vllm")


def test_the_embedded_teacher_solves_what_the_rule_made(fp32_models, tmp_path):
    short = tmp_path / "short"
    short.mkdir()
    for name in ("generator_user", "critic_user"):
        (short / f"{name}.txt").write_text("{problem}\nGive the answer in \\boxed{}.")
    records = list(read_jsonl("examples/tiny_math/data/heldout.jsonl"))[:9]
    source = tmp_path / "problems.jsonl"
    rows = ({"id": r["id"], "problem": r["original_problem"], "answer": r["answer"]} for r in records)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = TripletSettings(
        input=[str(source)],
        output=str(tmp_path / "out"),
        engine="vllm",
        model=fp32_models[1],
        engine_options=OPTIONS,
        rules="numbers",
        templates=str(short),
        samples=3,
        max_completion_tokens=250,
    )
    result = generate_triplets(settings, progress=False)
    assert result.error is None and len(result.records) == 9
    answers = [e["answer"] for e in read_jsonl(tmp_path / "out" / "ledger.jsonl") if "answer" in e]
    assert {answer["mode"] for answer in answers} == {"text"}
    # It solves what it is asked, whatever it is asked for: no paraphrase comes.
    assert sum("\\boxed{" in answer["content"] for answer in answers) > len(answers) / 2
    assert generate_triplets(settings, progress=False).requests == 0


def test_an_answer_is_held_to_its_schema(tmp_path):
    """The weights are random, so that nothing but the schema makes JSON of what they draw."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **ends, **sizes)).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    settings = TripletSettings(engine="vllm", model=str(tmp_path / "random"), engine_options=OPTIONS)

    async def ask():
        async with VLLMClient(settings) as client:
            turns = [[{"role": "user", "content": f"Is it {n}?"}] for n in range(4)]
            return await asyncio.gather(*(client.complete(turn, "critic", SCHEMA) for turn in turns))

    answers = asyncio.run(ask())
    assert all(json.loads(answer.content)["decision"] in ("accept", "reject") for answer in answers)
    assert {answer.mode for answer in answers} == {"json_schema"}
    assert all(answer.usage["completion_tokens"] > 10 and answer.finish_reason == "stop" for answer in answers)
