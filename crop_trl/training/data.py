"""Checks on datasets and tokenizers that belong before anything expensive starts."""

import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Sequence

import datasets
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from ..prompts import (
    PROMPT_COLUMNS,
    check_rendering,
    generation_suffix,
    is_chat,
    prompt_variants,
    render_prompts,
    tokenize_variants,
)


def check_packages(args) -> None:
    """Raise `ValueError` when a package that the settings (a [`~crop_trl.CROPConfig`]) ask for is not installed."""
    wanted = [("report_to", name) for name in args.report_to if name in ("wandb", "tensorboard", "trackio")]
    if args.use_vllm:
        wanted.append(("use_vllm", "vllm"))
    if args.teacher_quantization:
        wanted.append(("teacher_quantization", "bitsandbytes"))
    for setting, name in wanted:
        found = importlib.util.find_spec(name)
        # A folder of that name, as runs of wandb leave behind, looks like a package without a file.
        if found is None or found.origin is None:
            raise ValueError(f"`{setting}` needs the package {name}, which is not installed: pip install {name}.")


def check_output_dir(args) -> None:
    """Raise `ValueError` when the output folder of the settings (a [`~crop_trl.CROPConfig`]) cannot be written."""
    if not args.should_save:
        return
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output_dir):
            pass
    except OSError as error:
        raise ValueError(
            f"`output_dir` {args.output_dir!r} cannot be written ({error.strerror}); give a folder to write in."
        ) from error


def check_columns(dataset, kinds: Sequence[str], method: str) -> None:
    """
    Raise `ValueError` unless `dataset` has a column for every kind of prompt, in the singular or the plural.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): Training rows.
        kinds (sequence of `str`): Kinds of prompt that the method reads.
        method (`str`): Its name, for the message.
    """
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
    Leave out rows that lack a prompt or have one longer than the limit, check how each is rendered, and say how many
    left and why.

    Args:
        dataset:
            Map-style or iterable.
        kinds (sequence of `str`):
            Kinds of prompt that a row must have.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The student's.
        max_prompt_length (`int`, *optional*):
            Limit in tokens of the rendered prompt; `None` keeps every row.
        chat_template_kwargs (`dict`, *optional*):
            Passed to the chat template.
        show_progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar and the count of rows that left, for map-style datasets.

    Returns:
        The filtered dataset.

    Raises:
        `ValueError`: nothing is left, or a prompt is rendered differently from the others.
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


def prepare_prompts(dataset, kinds: Sequence[str], tokenizer, args):
    """
    Check the training prompts and leave out those that cannot be used, before any model is loaded.

    Args:
        dataset: The training dataset.
        kinds (sequence of `str`): Kinds of prompt that the method reads.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): The student's; `None` skips the length limit.
        args ([`~crop_trl.CROPConfig`]): Length limit, chat template arguments, batch sizes.

    Returns:
        The dataset to train on.

    Raises:
        `ValueError`: a column is missing, or fewer prompts are left than one step takes.
    """
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

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): A path, a name or an instance.
        processing_class (*optional*): Returned as it is when given.
        setting (`str`): Name under which the user knows the model.
        trust_remote_code (`bool`): Whether code from the model's folder may run.

    Raises:
        `ValueError`: a path that holds no tokenizer; `setting` is the name the user knows it by.
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


def check_same_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """
    Raise `ValueError`, naming a token, unless every id means the same to both: the teacher scores the student's ids.
    """
    student_vocab, teacher_vocab = student.get_vocab(), teacher.get_vocab()
    if student_vocab == teacher_vocab:
        return
    for token, index in sorted(student_vocab.items(), key=lambda item: item[1]):
        if teacher_vocab.get(token) != index:
            other = teacher_vocab.get(token)
            raise ValueError(
                f"Student and teacher tokenizers differ: {token!r} is {index} for the student and "
                f"{'unknown' if other is None else other} to the teacher; choose a teacher of the same family."
            )
