"""Train the teacher and the weaker student of the tiny maths task, beside each other.

    python examples/tiny_math/make_models.py teacher student

Both are Qwen3 models trained from scratch on generated problems; no data but the generator's. They differ in size and
in what they learn from. Each has its favourite phrasings. The teacher learns right answers, to keep to the problem
where the text so far misquotes it, and a little doubt about every digit and sign. Of the student's answers a share
consistently works out a misreading of the problem.

The premises of the task are options, so that another pair takes one command:

    python examples/tiny_math/make_models.py teacher student --fillers 12 --output runs/pairs/fillers12

How certain a model is needs no training: `--sharpen` multiplies the logits of the one in models/ (minutes of a CPU).

    python examples/tiny_math/make_models.py teacher --sharpen 2 --output runs/pairs/sharpen2

A few minutes on one GPU; on a CPU it works too, for hours. Try `--steps 20 --batch 16 --examples 500` first.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import sys
import time
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from problems import sample_problem, training_example
from solutions import Style
from tokenizer import ASSISTANT, END, PAD, PROMPT_TEMPLATE, USER, build_tokenizer, save_tokenizer, wrap
from transformers import Qwen3Config, Qwen3ForCausalLM

from crop_trl.models.compilation import compile_layers
from crop_trl.prompts import save_how_asked

MODELS = Path(__file__).parent / "models"

SIZES = {  # width, layers, attention heads, key-value heads, width of the feed-forward layer
    "teacher": (192, 6, 6, 3, 512),
    "student": (128, 4, 4, 2, 320),
}
RECIPES = {
    "teacher": {
        "examples": 1_000_000,
        "steps": 3600,
        "batch": 384,
        "misread_share": 0.0,
        "slip_share": 0.2,
        "doubt": 0.05,
        "fillers": 5,
        "favourite": 0,
        "sharpen": 1.25,
    },
    "student": {
        "examples": 400_000,
        "steps": 3000,
        "batch": 256,
        "misread_share": 0.67,
        "slip_share": 0.0,
        "doubt": 0.0,
        "fillers": 5,
        "favourite": 1,
        "sharpen": 1.0,
    },
}
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 2e-3, 60, 0.05
# With doubt, a token to predict is drawn anew from its kind.
KINDS = [[str(n) for n in range(10)], [f"Ġ{n}" for n in range(10)], ["Ġ+", "Ġ-", "Ġ*", "Ġ/"]]


def encode_chunk(seed: str, n: int, recipe: dict, tokenizer) -> np.ndarray:
    """n training examples as an array [2, n, longest]: tokens to read, and tokens to predict (-100: no loss)."""
    rng = Random(seed)
    style = Style(recipe["fillers"], recipe["favourite"])
    texts, slipped = [], []
    while len(texts) < n:
        problem, answer, slip = training_example(rng, style, recipe["misread_share"], recipe["slip_share"])
        texts.append(f"{USER}{wrap(problem)}{END}{ASSISTANT}{answer}{END}")
        slipped.append(f"{USER}{wrap(problem)}{END}{ASSISTANT}{slip}{END}")
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts)]
    read = [e.ids for e in tokenizer.encode_batch_fast(slipped)]
    assistant, pad = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(PAD)
    arrays = np.full((2, n, max(map(len, ids))), -100, dtype=np.int16)
    arrays[0] = pad
    for row, (clean, with_slip) in enumerate(zip(ids, read)):
        start = clean.index(assistant) + 1
        arrays[0, row, : len(clean)] = with_slip
        arrays[1, row, start : len(clean)] = clean[start:]
    draws = np.random.default_rng(rng.getrandbits(64))
    doubted = draws.random(arrays[1].shape) < recipe["doubt"]
    for kind in KINDS:
        kind = np.array([tokenizer.token_to_id(token) for token in kind])
        places = doubted & np.isin(arrays[1], kind)
        arrays[1][places] = draws.choice(kind, places.sum())
    return arrays


def make_data(name: str, recipe: dict, seed: int, workers: int, tokenizer) -> torch.Tensor:
    """All training examples of a model, [2, n, longest]; the same for any number of workers."""
    chunk = 5000
    sizes = [min(chunk, recipe["examples"] - i) for i in range(0, recipe["examples"], chunk)]
    make = partial(encode_chunk, recipe=recipe, tokenizer=tokenizer.backend_tokenizer)
    jobs = [(f"{name} {seed} {i}", size) for i, size in enumerate(sizes)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        chunks = pool.starmap(make, jobs)
    longest = max(chunk.shape[2] for chunk in chunks)
    data = np.full((2, recipe["examples"], longest), -100, dtype=np.int16)
    data[0] = tokenizer.pad_token_id
    for i, part in enumerate(chunks):
        data[:, i * chunk : i * chunk + part.shape[1], : part.shape[2]] = part
    return torch.from_numpy(data)


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
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(
    name: str, model: Qwen3ForCausalLM, data: torch.Tensor, recipe: dict, device: torch.device, seed: int
) -> None:
    """AdamW with a cosine schedule, cross-entropy on the response only."""
    model.to(device).train()
    data = data.to(device)
    if device.type == "cuda":
        compile_layers(model)
    start, steps, batch = time.time(), recipe["steps"], recipe["batch"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98))
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, steps // 2), steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    running = torch.zeros((), device=device)
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(data.shape[1], generator=generator)])
        rows, order = order[:batch], order[batch:]
        read, predict = data[:, rows.to(device)].long()
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
            loss = running.item() / ((step - 1) % 250 + 1)
            print(f"{name}: step {step}/{steps}, {time.time() - start:.0f} s, loss {loss:.4f}", flush=True)
            running.zero_()


@torch.no_grad()
def sharpen(model: Qwen3ForCausalLM, factor: float) -> None:
    """Multiply all logits: the head is linear, so its input may be scaled instead, in the last norm."""
    model.model.norm.weight *= factor


@torch.no_grad()
def respond(model, tokenizer, problems: list[str], samples: int, seed: int, longest: int) -> tuple[list[str], float]:
    """`samples` responses to each problem at temperature 1 (with none, the greedy one), and their mean entropy."""
    prompts = [f"{USER}{wrap(text)}{END}{ASSISTANT}" for text in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    inputs.pop("token_type_ids", None)
    sampling = {"do_sample": False}
    if samples:
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    torch.manual_seed(seed)
    output = model.generate(
        **inputs, **sampling, max_new_tokens=longest, return_dict_in_generate=True, output_logits=True
    )
    ids = output.sequences[:, inputs["input_ids"].shape[1] :]
    entropy = torch.stack([torch.distributions.Categorical(logits=each).entropy() for each in output.logits], dim=1)
    written = ids != tokenizer.pad_token_id
    return tokenizer.batch_decode(ids, skip_special_tokens=True), entropy[written].mean().item()


def equations_hold(response: str) -> bool:
    """Whether all equations of a response are right, whatever the problem was."""
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda x, y: x / y if y else None}
    found = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", response)
    return bool(found) and all(operations[op](int(x), int(y)) == int(z) for x, op, y, z in found)


def share(found: list[bool]) -> float:
    """The share of true values, rounded for the note."""
    return round(sum(found) / len(found), 4)


def evaluate(model, tokenizer, longest: int, n: int = 256, samples: int = 4) -> dict:
    """Accuracy on held-out problems, told in forms seen in training and in held-out forms."""
    model.eval()
    result = {}
    for forms in ("seen", "held_out"):
        rng = Random(f"evaluation {forms}")
        problems = [sample_problem(rng, "heldout", held_out_form=forms == "held_out") for _ in range(n)]
        texts, endings = [p.text for p in problems], [f"\\boxed{{{p.answer}}}." for p in problems]
        greedy, _ = respond(model, tokenizer, texts, 0, 0, longest)
        sampled, entropy = respond(model, tokenizer, texts, samples, 0, longest)
        wanted = [ending for ending in endings for _ in range(samples)]
        result[f"{forms}_forms"] = {
            "greedy": share([r.endswith(ending) for r, ending in zip(greedy, endings)]),
            "sampled": share([r.endswith(ending) for r, ending in zip(sampled, wanted)]),
            "entropy": round(entropy, 4),
            "boxed": share([bool(re.search(r"\\boxed\{\d+\}\.$", r)) for r in sampled]),
            "equations_hold": share([equations_hold(r) for r in sampled]),
            "tokens": round(sum(len(ids) for ids in tokenizer(sampled)["input_ids"]) / len(sampled), 1),
        }
    return result


def make_model(name: str, recipe: dict, seed: int, device: torch.device, workers: int, output: Path) -> None:
    """Train one model, and save it."""
    start = time.time()
    tokenizer = build_tokenizer()
    data = make_data(name, recipe, seed, workers, tokenizer)
    print(f"{name}: {data.shape[1]} examples after {time.time() - start:.0f} s", flush=True)
    torch.manual_seed(seed)
    model = new_model(name, tokenizer)
    train(name, model, data, recipe, device, seed)
    sharpen(model, recipe["sharpen"])
    note = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": seed,
        "recipe": recipe,
        "data": "generated by problems.training_example, split train",
        "minutes": round((time.time() - start) / 60, 1),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    save(model, tokenizer, note, longest_answer(data), output / name)


def sharpen_model(name: str, factor: float, device: torch.device, output: Path) -> None:
    """Save the model in models/ with the logits of its training times `factor`."""
    note = json.loads((MODELS / name / "training.json").read_text())
    model = Qwen3ForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).to(device)
    sharpen(model, factor / note["recipe"]["sharpen"])
    note["recipe"]["sharpen"] = factor
    tokenizer = build_tokenizer()
    data = make_data(name, note["recipe"] | {"examples": 5000}, note["seed"], 1, tokenizer)
    save(model, tokenizer, note, longest_answer(data), output / name)


def longest_answer(data: torch.Tensor) -> int:
    """Tokens that suffice for an answer."""
    return int((data[1] != -100).sum(-1).max()) + 8


def save(model: Qwen3ForCausalLM, tokenizer, note: dict, longest: int, folder: Path) -> None:
    """Save a model in bf16 with its tokenizer, evaluate what was saved, and write the note."""
    device = model.device
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    save_how_asked(folder, PROMPT_TEMPLATE)
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    note["accuracy_on_held_out_problems"] = evaluate(saved, tokenizer, longest)
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
    parser.add_argument("--fillers", type=int, help="sentences that say nothing, in every answer")
    parser.add_argument("--misread-share", type=float, help="share of the student's answers to a misread problem")
    parser.add_argument("--same-favourites", action="store_true", help="the student favours the teacher's phrasings")
    parser.add_argument("--sharpen", type=float, help="no training: the model in models/, its logits times this")
    args = parser.parse_args()
    if args.sharpen:
        for name in args.names:
            sharpen_model(name, args.sharpen, torch.device(args.device), args.output)
        return
    jobs = []
    for name in args.names:
        given = {"examples": args.examples, "steps": args.steps, "batch": args.batch, "fillers": args.fillers}
        if name == "student":
            given |= {"misread_share": args.misread_share, "favourite": 0 if args.same_favourites else None}
        recipe = RECIPES[name] | {field: value for field, value in given.items() if value is not None}
        settings = (name, recipe, args.seed, torch.device(args.device), args.workers, args.output)
        jobs.append(multiprocessing.get_context("spawn").Process(target=make_model, args=settings))
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    sys.exit(any(job.exitcode for job in jobs))


if __name__ == "__main__":
    main()
