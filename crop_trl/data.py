"""Checks on datasets and tokenizers that belong before anything expensive starts."""

from collections.abc import Callable, Sequence

import datasets
from transformers import PreTrainedTokenizerBase
from trl.data_utils import is_conversational

Tokenize = Callable[[list], list[list[int]]]


def check_columns(dataset, columns: Sequence[str], method: str) -> None:
    """Raise `ValueError` unless `dataset` has every column in `columns`, all conversational or all plain text."""
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError("`train_dataset` is empty.")
    missing = [column for column in columns if row.get(column) is None]
    if missing:
        raise ValueError(
            f"Method {method!r} needs the dataset columns {', '.join(columns)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing (there are: {', '.join(row)}); build the dataset from "
            "triplet records, or choose a method that works on prompts alone, such as 'opd'."
        )
    kinds = {column: is_conversational({"prompt": row[column]}) for column in columns}
    if len(set(kinds.values())) > 1:
        chat = [column for column, conversational in kinds.items() if conversational]
        raise ValueError(
            f"The columns {', '.join(columns)} must all be conversational or all plain text, but only "
            f"{', '.join(chat)} holds chat messages."
        )


def generation_suffix(
    tokenizer: PreTrainedTokenizerBase, prompt, chat_template_kwargs: dict | None = None
) -> list[int] | None:
    """
    Token ids that the chat template puts after the user's turn to open the response, or `None` for plain prompts and
    for templates that rewrite what came before.
    """
    if not is_conversational({"prompt": prompt}):
        return None
    render = {
        opened: tokenizer.apply_chat_template(
            prompt, add_generation_prompt=opened, tokenize=True, return_dict=False, **(chat_template_kwargs or {})
        )
        for opened in (False, True)
    }
    closed = render[False]
    return render[True][len(closed) :] if render[True][: len(closed)] == closed else None


def check_rendering(ids_by_column: dict[str, Sequence[int]], suffix: Sequence[int] | None) -> None:
    """
    Raise `ValueError` when the renderings of one row's prompts do not open the response with the same tokens: the
    distributions after them would then differ for a reason that has nothing to do with the problem.
    """
    if not suffix:
        return
    for column, ids in ids_by_column.items():
        if list(ids[-len(suffix) :]) != list(suffix):
            raise ValueError(
                f"The chat template renders `{column}` so that it does not end in the tokens that open a response "
                f"({list(suffix)}, got {list(ids[-len(suffix) :])}); make its messages end with a user turn."
            )


def drop_long_prompts(
    dataset: datasets.Dataset | datasets.IterableDataset,
    columns: Sequence[str],
    tokenize: Tokenize,
    max_prompt_length: int | None,
    suffix: Sequence[int] | None = None,
    show_progress: bool = True,
):
    """
    Leave out rows with a rendered prompt longer than the limit, and check how each is rendered.

    Args:
        dataset:
            Map-style or iterable.
        columns (sequence of `str`):
            Prompt columns to look at.
        tokenize (`Callable`):
            From a list of prompts to their token ids, as the trainer renders them.
        max_prompt_length (`int`, *optional*):
            Limit in tokens; `None` keeps every row.
        suffix (sequence of `int`, *optional*):
            See [`check_rendering`].
        show_progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar for map-style datasets.

    Returns:
        The filtered dataset.

    Raises:
        `ValueError`: nothing is left, or a prompt is rendered differently from the others.
    """

    def fits(batch: dict[str, list]) -> list[bool]:
        ids = {column: tokenize(batch[column]) for column in columns}
        keep = []
        for row in zip(*ids.values(), strict=True):
            check_rendering(dict(zip(columns, row, strict=True)), suffix)
            keep.append(max_prompt_length is None or max(map(len, row)) <= max_prompt_length)
        return keep

    if not isinstance(dataset, datasets.Dataset):
        return dataset.filter(fits, batched=True)
    progress_was_on = datasets.is_progress_bar_enabled()
    if not show_progress:
        datasets.disable_progress_bars()
    try:
        kept = dataset.filter(fits, batched=True, load_from_cache_file=False, desc="Checking prompt lengths")
    finally:
        if progress_was_on:
            datasets.enable_progress_bars()
    if len(kept) == 0:
        raise ValueError(
            f"No row is left: all {len(dataset)} have a prompt longer than `max_prompt_length` {max_prompt_length} "
            "tokens; raise the limit."
        )
    return kept


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
