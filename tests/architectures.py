"""Tiny random models of every causal language model that this version of transformers has."""

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

VOCAB = 58
# Names that configurations use for the same things.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "n_embed"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "n_ctx"), 128),
    **dict.fromkeys(("state_size", "mamba_d_state", "conv_kernel"), 4),
    "encoder_attention_heads": 4,
    "rotary_dim": 8,
    "default_language": "en_XX",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "initializer_range": 0.3,
    "is_decoder": True,
    "add_cross_attention": False,
    "tie_word_embeddings": False,
}


def tiny_config(kind: type):
    """A small configuration of a kind, which keeps its own values where it has no such names."""
    config = kind()
    text = config.get_text_config()
    names = vars(text).keys() | {"is_decoder"}
    values = {name: value for name, value in SIZES.items() if name in names}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}[name]
    if "q_lora_rank" in names:
        values.pop("head_dim", None)  # follows from the parts that are rotated and not
    for name in ("layer_types", "layers_block_type"):
        types = getattr(text, name, None)
        if types and not isinstance(getattr(type(text), name, None), property):
            # One layer of each kind, attention last: some caches want one.
            values[name] = sorted(dict.fromkeys(types), key=lambda kind: "attention" in kind and "linear" not in kind)[
                -2:
            ]
            values[name] = (values[name] * 2)[:2]
        elif types:
            values = {key: value for key, value in values.items() if "layer" not in key}
    return type(text)(**values)


def kinds() -> dict[str, type]:
    """Configuration classes by the name of their causal language model."""
    found = {}
    for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        for one in model if isinstance(model, tuple) else (model,):
            found.setdefault(one.__name__, config)
    return found


def tiny_model(name: str):
    """A random model in evaluation mode; raises whatever keeps it from being built on a CPU at this size."""
    config = tiny_config(kinds()[name])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > 30_000_000:
        raise ValueError(f"{size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)  # a bias that is zero would hide that it is left out
    return model
