"""No rate of dropout is left, wherever a model keeps it."""

import pytest
import torch
from architectures import kinds, tiny_config
from transformers import AutoModelForCausalLM

from crop_trl.models.dropout import remove_dropout

RATES = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
    "router_jitter_noise",
)


@pytest.mark.parametrize("name", ["FalconForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "MixtralForCausalLM"])
def test_two_passes_in_training_mode_are_equal(name):
    config = tiny_config(kinds()[name])
    for rate in RATES:
        if hasattr(config, rate):
            setattr(config, rate, 0.3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(3, 20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert remove_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
