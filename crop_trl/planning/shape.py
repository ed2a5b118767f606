"""The numbers of a model that memory depends on, from its configuration alone."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoConfig


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a dense decoder that memory depends on."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    queries: int  # heads times head dimension
    keys: int
    tied: bool  # whether the output head is the embedding

    @classmethod
    def of(cls, config) -> "ModelShape":
        """From a Transformers configuration. Raises `ValueError` when it lacks one of the numbers, or has experts."""
        text = config.get_text_config()
        experts = [name for name, n in vars(text).items() if "experts" in name and isinstance(n, int) and n > 1]
        if experts:
            what = f"The memory of {type(config).__name__} cannot be planned"
            raise ValueError(f"{what}: it is a mixture of experts (`{experts[0]}`), and this is for dense models.")
        try:
            heads = text.num_attention_heads
            head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
            return cls(
                hidden=text.hidden_size,
                intermediate=text.intermediate_size,
                layers=text.num_hidden_layers,
                vocab=text.vocab_size,
                queries=heads * head_dim,
                keys=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
                tied=bool(getattr(config, "tie_word_embeddings", False)),
            )
        except AttributeError as error:
            what = f"The memory of {type(config).__name__} cannot be planned"
            raise ValueError(f"{what}: it has no {error.name}.") from None

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer, without its norms."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """All weights, without norms and biases."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def saved_bytes_per_token(self) -> int:
        """Bytes that a layer keeps of a token for its backward pass, in bf16 mixed precision without checkpointing."""
        # Norms keep their input and output in fp32 and what they hand on in bf16, attention its rotated queries and
        # keys, values and output, the gated MLP four times its width.
        return 20 * self.hidden + 18 * (self.queries + self.keys) + 8 * self.intermediate

    @property
    def working_bytes_per_token(self) -> int:
        """Bytes of a token in flight inside one layer when nothing is kept: MLP and residual stream, in bf16."""
        return 6 * self.intermediate + 8 * self.hidden


def adapter_parameters(
    shape: ModelShape, rank: int, targets: str | Sequence[str] | None = None, whole: Sequence[str] | None = None
) -> int:
    """Trained weights of a LoRA adapter. Raises `ValueError` for a module whose size is not known here."""
    in_a_layer = {
        "q_proj": (shape.hidden, shape.queries),
        "k_proj": (shape.hidden, shape.keys),
        "v_proj": (shape.hidden, shape.keys),
        "o_proj": (shape.queries, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    outside = {name: (shape.hidden, shape.vocab) for name in ("embed_tokens", "lm_head")}
    targets = [targets] if isinstance(targets, str) else list(targets or ("q_proj", "v_proj"))
    targets = list(in_a_layer) if targets == ["all-linear"] else targets
    whole = [whole] if isinstance(whole, str) else list(whole or ())
    for setting, names, known in (
        ("lora_target_modules", targets, {**in_a_layer, **outside}),
        ("lora_modules_to_save", whole, outside),
    ):
        for name in names:
            if name not in known:
                what = f"The memory of `{setting}` {name!r} cannot be planned"
                raise ValueError(f"{what}: choose all-linear, or among {', '.join(known)}.")
    layers = shape.layers * rank * sum(sum(in_a_layer[name]) for name in targets if name in in_a_layer)
    others = rank * sum(sum(outside[name]) for name in targets if name in outside)
    return layers + others + len(whole) * shape.hidden * shape.vocab


# Qwen3 models by size, for where the hub cannot be reached.
QWEN3 = {
    "0.6B": ModelShape(1024, 3072, 28, 151_936, 2048, 1024, True),
    "1.7B": ModelShape(2048, 6144, 28, 151_936, 2048, 1024, True),
    "4B": ModelShape(2560, 9728, 36, 151_936, 4096, 1024, True),
    "8B": ModelShape(4096, 12288, 36, 151_936, 4096, 1024, False),
    "14B": ModelShape(5120, 17408, 40, 151_936, 5120, 1024, False),
    "32B": ModelShape(5120, 25600, 64, 151_936, 8192, 1024, False),
}


def shape_of(name: str, offline: bool = False) -> ModelShape:
    """Shape of a model by name, path or size; `offline` looks at this machine alone."""
    if name in QWEN3:
        return QWEN3[name]
    size = re.search(r"Qwen3-(\d+(?:\.\d+)?B)", name)
    known = size[1] if size and size[1] in QWEN3 else None
    try:
        # Without a connection the hub is asked for half a minute.
        config = AutoConfig.from_pretrained(name, local_files_only=offline or known is not None)
    except (OSError, ValueError):
        if known is None:
            names = ", ".join(QWEN3)
            raise ValueError(f"{name!r} cannot be read; name a folder, or one of the sizes {names}.") from None
        if not offline:
            print(f"{name} is not here; taken as the Qwen3 shape {known}.", file=sys.stderr)
        return QWEN3[known]
    return ModelShape.of(config)
