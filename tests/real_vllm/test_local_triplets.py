"""vLLM in this process holds the answers of the triplet program to a schema."""

import asyncio
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from crop_trl.triplets.engine import VLLMClient
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
