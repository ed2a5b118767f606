"""Checks on datasets and tokenizers that belong before anything expensive starts."""

from collections import Counter
from collections.abc import Sequence

import datasets
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from ..methods import get_method
from ..prompts import (
    PROMPT_COLUMNS,
    check_rendering,
    generation_suffix,
    is_chat,
    prompt_kinds,
    prompt_variants,
    render_prompts,
    tokenize_variants,
)


def check_columns(dataset, kinds: Sequence[str], method: str) -> None:
    """Raise `ValueError` unless `dataset` has a column for every kind of prompt, in the singular or the plural."""
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        raise ValueError(
            f"`train_dataset` must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__}; choose one "
            "split of it, or make one with Dataset.from_list."
        )
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("`train_dataset` is empty; give it at least the prompts of one step.")
    columns = [PROMPT_COLUMNS[kind] for kind in kinds]
    missing = [c for c in columns if c not in first and (c == "prompt" or c + "s" not in first)]
    if missing:
        raise ValueError(
            f"Method {method!r} needs the dataset columns {', '.join(columns)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing (there are: {', '.join(first)}); build the dataset from "
            "triplet records, or choose a method that works on prompts alone, such as 'opd'."
        )
    if "prompts" in first:
        raise ValueError("`prompts` is not a dataset column the trainer can take beside `prompt`; rename or drop it.")


def fit_prompts(
    dataset: datasets.Dataset | datasets.IterableDataset,
    kinds: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int | None,
    chat_template_kwargs: dict | None = None,
    show_progress: bool = True,
):
    """
    Leave out rows that lack a prompt of these kinds or have one of more than `max_prompt_length` tokens as rendered,
    check how each is rendered, and say how many left and why.

    Raises `ValueError` when nothing is left, or a prompt is rendered differently from the others.
    """
    state: dict = {"chat": None, "suffix": None}
    dropped: Counter = Counter()

    def reason_to_drop(row: dict) -> str | None:
        for kind in kinds:
            column, variants = PROMPT_COLUMNS[kind], prompt_variants(row, kind)
            if not variants:
                return f"without {column}"
            for prompt in variants:
                chat = is_chat(prompt, column)
                if not prompt or (not chat and not prompt.strip()):
                    return f"with an empty {column}"
                if state["chat"] is None:
                    state["chat"] = chat
                    state["suffix"] = generation_suffix(tokenizer, prompt, chat_template_kwargs)
                if chat != state["chat"]:
                    raise ValueError(
                        f"Prompts must all be conversational or all plain text, but `{column}` of {str(prompt)[:60]!r} "
                        "differs from the prompts before it."
                    )
        return None

    def too_long(ids_by_kind: dict) -> str | None:
        for kind in kinds:
            for ids in ids_by_kind[kind]:
                check_rendering(PROMPT_COLUMNS[kind], ids, state["suffix"])
                if max_prompt_length is not None and len(ids) > max_prompt_length:
                    return f"with a prompt longer than max_prompt_length {max_prompt_length} tokens"
        return None

    def fits(batch: dict[str, list]) -> list[bool]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        reasons = [reason_to_drop(row) for row in rows]
        sound = [i for i, reason in enumerate(reasons) if reason is None]
        ids = {
            kind: tokenize_variants(
                [rows[i] for i in sound], kind, lambda p: render_prompts(tokenizer, p, chat_template_kwargs)
            )
            for kind in kinds
        }
        for place, i in enumerate(sound):
            reasons[i] = too_long({kind: ids[kind][place] for kind in kinds})
        dropped.update(reason for reason in reasons if reason)
        return [reason is None for reason in reasons]

    if not isinstance(dataset, datasets.Dataset):
        return dataset.filter(fits, batched=True)
    progress_was_on = datasets.is_progress_bar_enabled()
    if not show_progress:
        datasets.disable_progress_bars()
    try:
        kept = dataset.filter(fits, batched=True, load_from_cache_file=False, desc="Checking prompts")
    finally:
        if progress_was_on:
            datasets.enable_progress_bars()
    reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    if len(kept) == 0:
        raise ValueError(f"No row is left of {len(dataset)}: {reasons}; raise the limit or mend the dataset.")
    if reasons and show_progress:
        print(f"{len(dataset) - len(kept)} of {len(dataset)} rows left out: {reasons}.")
    return kept


def prepare_prompts(dataset, tokenizer: PreTrainedTokenizerBase | None, args):
    """
    Check the training prompts and leave out those that cannot be used; without a tokenizer their lengths are not known.

    Raises `ValueError` when a column is missing, or fewer prompts are left than one step takes.
    """
    kinds = prompt_kinds(get_method(args.method).needs)
    check_columns(dataset, kinds, args.method)
    if tokenizer is not None:
        talk = args.process_index == 0 and not args.disable_tqdm
        dataset = fit_prompts(dataset, kinds, tokenizer, args.max_prompt_length, args.chat_template_kwargs, talk)
    prompts_per_batch = args.generation_batch_size // args.num_generations
    if isinstance(dataset, datasets.Dataset) and len(dataset) < prompts_per_batch:
        raise ValueError(
            f"{len(dataset)} prompts are fewer than one step takes ({prompts_per_batch}); lower "
            "`prompts_per_step` or `per_device_train_batch_size`, or give more prompts."
        )
    return dataset


def tokenizer_of(model, processing_class, setting: str, trust_remote_code: bool = False):
    """
    The tokenizer that belongs to a model given as a path or an instance, or `None` when nothing tells which it is.

    Raises `ValueError` for a path that holds no tokenizer; `setting` is the name the user knows it by.
    """
    if processing_class is not None:
        return processing_class
    source = model if isinstance(model, str) else get_config_model_id(getattr(model, "config", None))
    if not source:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No tokenizer can be loaded from `{setting}` {source!r}; give a folder with a saved model and tokenizer, "
            f"or the name of one on a hub that can be reached ({str(error).splitlines()[0]})."
        ) from error


def check_same_tokenizer(student, teacher, processing_class=None, trust_remote_code: bool = False) -> None:
    """
    Raise `ValueError`, naming a token, unless every id means the same to a tokenizer and to that of a teacher, which
    scores the student's ids. A scorer that is neither a path nor a model is believed.
    """
    if student is None or not isinstance(teacher, (str, PreTrainedModel)):
        return
    theirs = tokenizer_of(teacher, processing_class, "teacher_model_name_or_path", trust_remote_code)
    if theirs is None:
        return
    vocab, other = student.get_vocab(), theirs.get_vocab()
    for token, index in sorted(vocab.items(), key=lambda item: item[1]):
        if other.get(token) != index:
            raise ValueError(
                f"Student and teacher tokenizers differ: {token!r} is {index} for the student and "
                f"{other.get(token, 'unknown')} to the teacher; choose a teacher of the same family."
            )
