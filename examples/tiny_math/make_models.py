"""Train the teacher and the weaker student of the tiny maths task.

    python examples/tiny_math/make_models.py teacher student

Both are Qwen3 models trained from scratch on generated problems; no data but the generator's. They differ in size and
in what they learn from. The teacher learns right solutions with every phrasing of the boilerplate equally often, and to
keep to the problem where the text so far misquotes it. The student learns from solutions of which a share consistently
solves a misreading of the problem, with favourite phrasings: it writes well and calculates well, but misreads.

A few minutes on one GPU; on CPU it works too, for hours. Try `--steps 20 --batch 16 --examples 500` first.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import time
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from problems import sample_problem, training_example
from tokenizer import ASSISTANT, END, PAD, PROMPT_TEMPLATE, USER, build_tokenizer, save_tokenizer, wrap
from transformers import Qwen3Config, Qwen3ForCausalLM

from crop_trl.prompts import save_template

MODELS = Path(__file__).parent / "models"
WIDTH = 120  # tokens of prompt and response together, the longest example is a little shorter
MAX_NEW_TOKENS = 64

SIZES = {  # width, layers, attention heads, key-value heads, width of the feed-forward layer
    "teacher": (192, 6, 6, 3, 512),
    "student": (128, 4, 4, 2, 320),
}
RECIPES = {
    "teacher": {"examples": 1_200_000, "steps": 4200, "batch": 512, "misread_share": 0.0, "slip_share": 0.2},
    "student": {"examples": 400_000, "steps": 3500, "batch": 256, "misread_share": 0.67, "slip_share": 0.0},
}
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 2e-3, 60, 0.05


def encode_chunk(seed: str, n: int, student: bool, misread_share: float, slip_share: float, tokenizer) -> np.ndarray:
    """n training examples as an array [2, n, WIDTH]: tokens to read, and tokens to predict (-100: no loss)."""
    rng = Random(seed)
    texts, slipped = [], []
    while len(texts) < n:
        problem, solution, slip = training_example(rng, student, misread_share, slip_share)
        texts.append(f"{USER}{wrap(problem)}{END}{ASSISTANT}{solution}{END}")
        slipped.append(f"{USER}{wrap(problem)}{END}{ASSISTANT}{slip}{END}")
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts)]
    read = [e.ids for e in tokenizer.encode_batch_fast(slipped)] if slip_share else ids
    assistant, pad = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(PAD)
    arrays = np.full((2, n, WIDTH), -100, dtype=np.int16)
    arrays[0] = pad
    for row, (clean, with_slip) in enumerate(zip(ids, read)):
        start = clean.index(assistant) + 1
        arrays[0, row, : len(clean)] = with_slip
        arrays[1, row, start : len(clean)] = clean[start:]
    return arrays


def make_data(name: str, recipe: dict, seed: int, workers: int, tokenizer) -> torch.Tensor:
    """All training examples of a model, [2, n, WIDTH]; the same for any number of workers."""
    chunk = 5000
    sizes = [min(chunk, recipe["examples"] - i) for i in range(0, recipe["examples"], chunk)]
    make = partial(
        encode_chunk,
        student=name == "student",
        misread_share=recipe["misread_share"],
        slip_share=recipe["slip_share"],
        tokenizer=tokenizer.backend_tokenizer,
    )
    jobs = [(f"{name} {seed} {i}", size) for i, size in enumerate(sizes)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return torch.from_numpy(np.concatenate(pool.starmap(make, jobs), axis=1))


def new_model(name: str, tokenizer) -> Qwen3ForCausalLM:
    """A freshly initialised model of the named size."""
    width, layers, heads, key_value_heads, feed_forward = SIZES[name]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=feed_forward,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, data: torch.Tensor, steps: int, batch: int, device: torch.device, seed: int) -> None:
    """AdamW with a cosine schedule, cross-entropy on the response only."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98))
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, steps // 2), steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    running = torch.zeros((), device=device)
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(data.shape[1], generator=generator)])
        rows, order = order[:batch], order[batch:]
        read, predict = data[:, rows].to(device, non_blocking=True).long()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            # Padding is on the right, so a causal model needs no attention mask.
            logits = model(input_ids=read).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), predict[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        if step % 250 == 0 or step == steps:
            print(f"step {step}/{steps}: loss {running.item() / ((step - 1) % 250 + 1):.4f}", flush=True)
            running.zero_()


@torch.no_grad()
def respond(model, tokenizer, problems: list[str], temperature: float, seed: int) -> list[str]:
    """One response to each problem; temperature 0 is greedy."""
    prompts = [f"{USER}{wrap(text)}{END}{ASSISTANT}" for text in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    inputs.pop("token_type_ids", None)
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    output = model.generate(**inputs, **sampling, max_new_tokens=MAX_NEW_TOKENS)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def equations_hold(response: str) -> bool:
    """Whether all equations of a response are right, whatever the problem was."""
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda x, y: x / y if y else None}
    found = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", response)
    return bool(found) and all(operations[op](int(x), int(y)) == int(z) for x, op, y, z in found)


def share(found: list[bool]) -> float:
    """The share of true values, rounded for the note."""
    return round(sum(found) / len(found), 4)


def evaluate(model, tokenizer, n: int = 512, samples: int = 4) -> dict:
    """Accuracy on held-out problems, told in forms seen in training and in held-out forms."""
    model.eval()
    result = {}
    for forms in ("seen", "held_out"):
        rng = Random(f"evaluation {forms}")
        problems = [sample_problem(rng, "heldout", held_out_form=forms == "held_out") for _ in range(n)]
        texts, endings = [p.text for p in problems], [f"\\boxed{{{p.answer}}}." for p in problems]
        greedy = respond(model, tokenizer, texts, 0.0, 0)
        sampled = [r for i in range(samples) for r in respond(model, tokenizer, texts, 0.7, i)]
        result[f"{forms}_forms"] = {
            "greedy": share([r.endswith(ending) for r, ending in zip(greedy, endings)]),
            "sampled_at_0.7": share([r.endswith(ending) for r, ending in zip(sampled, endings * samples)]),
            "boxed": share([bool(re.search(r"\\boxed\{\d+\}\.$", r)) for r in sampled]),
            "equations_hold": share([equations_hold(r) for r in sampled]),
        }
    return result


def make_model(name: str, recipe: dict, seed: int, device: torch.device, workers: int, output: Path) -> None:
    """Train one model, save it in bf16 with its tokenizer, evaluate what was saved, and write the note."""
    start = time.time()
    tokenizer = build_tokenizer()
    data = make_data(name, recipe, seed, workers, tokenizer)
    print(f"{name}: {data.shape[1]} examples after {time.time() - start:.0f} s", flush=True)
    torch.manual_seed(seed)
    model = new_model(name, tokenizer)
    train(model, data, recipe["steps"], recipe["batch"], device, seed)
    folder = output / name
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    save_template(folder, PROMPT_TEMPLATE)
    minutes = (time.time() - start) / 60
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    note = {
        "model": name,
        "parameters": sum(p.numel() for p in saved.parameters()),
        "seed": seed,
        "recipe": recipe,
        "data": "generated by problems.training_example, split train",
        "minutes": round(minutes, 1),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "accuracy_on_held_out_problems": evaluate(saved, tokenizer),
    }
    (folder / "training.json").write_text(json.dumps(note, indent=2) + "\n")
    print(json.dumps(note, indent=2), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the two models of the tiny maths task.")
    parser.add_argument("names", nargs="+", choices=list(RECIPES))
    parser.add_argument("--output", type=Path, default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that generate the data")
    for field in ("examples", "steps", "batch"):
        parser.add_argument(f"--{field}", type=int, help="instead of the recipe's number")
    parser.add_argument("--misread-share", type=float, help="instead of the recipe's (student)")
    args = parser.parse_args()
    for name in args.names:
        given = {k: getattr(args, k) for k in ("examples", "steps", "batch") if getattr(args, k) is not None}
        if args.misread_share is not None and name == "student":
            given["misread_share"] = args.misread_share
        make_model(name, {**RECIPES[name], **given}, args.seed, torch.device(args.device), args.workers, args.output)


if __name__ == "__main__":
    main()
