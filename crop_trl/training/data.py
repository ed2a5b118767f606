"""Checks on datasets and tokenizers that belong before anything expensive starts."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from ..methods import get_method
from ..prompts import (
    EMPTY,
    REWORDINGS,
    TEACHER,
    check_rendering,
    generation_suffix,
    is_chat,
    prompt_column,
    prompt_kinds,
    prompt_text,
    prompt_variants,
    render_prompts,
    row_kinds,
    split_signal,
    tokenize_variants,
)


def check_eval_dataset(dataset, teachers: Sequence[str]) -> None:
    """Raise `ValueError` for a held-out dataset, or one of several by name, without prompts or of other `teachers`."""
    for name, one in dataset.items() if isinstance(dataset, dict) else [("", dataset)]:
        first = next(iter(one), None) if isinstance(one, (datasets.Dataset, datasets.IterableDataset)) else None
        if not first or "prompt" not in first:
            which = f"`eval_dataset` {name!r}" if name else "`eval_dataset`"
            found = f"has the columns {', '.join(first)}" if first else "is empty or no dataset"
            raise ValueError(f"{which} {found}; give it rows with `prompt`.")
        if isinstance(one, datasets.Dataset) and TEACHER in one.column_names:
            for row in one.select_columns(TEACHER):
                teacher_of(row, teachers)


def check_columns(dataset, kinds: Sequence[str], method: str, limited: Sequence[str] | None = None) -> None:
    """Raise `ValueError` unless `dataset` has a column for every kind of prompt that a method reads or is `limited`."""
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        raise ValueError(
            f"`train_dataset` must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__}; choose one "
            "split of it, or make one with Dataset.from_list."
        )
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("`train_dataset` is empty; give it at least the prompts of one step.")
    columns = [prompt_column(kind) for kind in kinds if kind != EMPTY]
    missing = [c for c in columns if c not in first and (c == "prompt" or c + "s" not in first)]
    if missing:
        problems = ", ".join(f"{column.removesuffix('prompt')}problem" for column in missing)
        raise ValueError(
            f"Method {method!r} needs the dataset columns {', '.join(columns)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing (there are: {', '.join(first)}); add "
            f"{'it' if len(missing) == 1 else 'them'} (to a record: {problems}), or choose a method that works on "
            "prompts alone, such as 'opd'."
        )
    nowhere = [kind for kind in limited or () if not {prompt_column(kind), prompt_column(kind) + "s"} & set(first)]
    if nowhere:
        column = prompt_column(nowhere[0])
        raise ValueError(f"`max_prompt_length_kinds` names {nowhere[0]!r}, and there is no `{column}`; take it out.")
    if first.get("chat_template_kwargs") is not None:
        warnings.warn("The column `chat_template_kwargs` is not read; set it for all rows.", stacklevel=2)


def teacher_of(row: Mapping[str, Any], teachers: Sequence[str]) -> str:
    """The teacher of a row, by default the first. Raises `ValueError` for one that there is not."""
    name = row.get(TEACHER) if tuple(teachers) != (TEACHER,) else None
    if name not in (None, *teachers):
        raise ValueError(f"A row's `teacher` is {name!r}, and `teachers` has {', '.join(teachers)}; name one of them.")
    return name or teachers[0]


def reads_own_teacher(needs: Sequence[str]) -> bool:
    """Whether some signal is from the teacher that a row names."""
    return any(split_signal(need)[0] == TEACHER for need in needs)


class RowCheck:
    """Which rows can be trained on, batch by batch, and why the others left: `dropped`, reason -> number. The limit is
    on the kinds of prompt in `limited`, by default all that a row has. With several `teachers` a row names its own.
    Of the kind `single` a row has one prompt."""

    def __init__(
        self,
        needed: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int | None,
        limited: Sequence[str] | None = None,
        teachers: Sequence[str] = (),
        single: str | None = None,
        **chat,
    ):
        self.teachers, self.single = teachers, single
        self.needed, self.tokenizer, self.limit, self.chat = needed, tokenizer, max_prompt_length, chat
        self.limited = limited
        self.dropped: Counter = Counter()
        self._is_chat: bool | None = None
        self._suffix: list[int] | None = None

    def __call__(self, batch: dict[str, list]) -> list[bool]:
        """Whether each row of a batch stays. Raises `ValueError` for a prompt unlike the others."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        reasons = [self._reason(row) for row in rows]
        sound = [row for row, reason in zip(rows, reasons) if reason is None]
        too_long = self._too_long(sound)
        reasons = [next(too_long) if reason is None else reason for reason in reasons]
        self.dropped.update(reason for reason in reasons if reason)
        return [reason is None for reason in reasons]

    def _kinds(self, row: dict) -> list[str]:
        """What the method reads, and what else the row holds."""
        return list(dict.fromkeys([*self.needed, *row_kinds(row)]))

    def _reason(self, row: dict) -> str | None:
        turns = None
        if self.teachers:
            teacher_of(row, self.teachers)
            if row.get(TEACHER) is None and len(self.teachers) > 1:
                return "without teacher"
        for kind in self._kinds(row):
            column, variants = prompt_column(kind), prompt_variants(row, kind)
            if not variants:
                return f"without {column}"
            if kind == self.single and len(variants) > 1:
                raise ValueError(f"The target follows one `{column}`, and a row has {len(variants)}; give each one.")
            for prompt in variants:
                chat = is_chat(prompt, column)
                if kind != EMPTY and not prompt_text(prompt).strip():
                    if kind not in self.needed:
                        continue
                    return f"with an empty {column}"
                if self._is_chat is None:
                    self._is_chat = chat
                    self._suffix = generation_suffix(self.tokenizer, prompt, **self.chat)
                if chat != self._is_chat:
                    raise ValueError(
                        f"Prompts must all be conversational or all plain text, but `{column}` of {str(prompt)[:60]!r} "
                        "differs from the prompts before it."
                    )
                roles = [message["role"] for message in prompt] if chat else None
                turns = turns or roles
                if roles != turns and kind in REWORDINGS:
                    raise ValueError(
                        f"`{column}` has the turns {', '.join(roles)}, but `prompt` of the same row has "
                        f"{', '.join(turns)}: scores would differ for another reason than the problem; give both the "
                        "same turns."
                    )
        return None

    def _too_long(self, rows: list[dict]) -> Iterator[str | None]:
        """For each row the reason to leave it out for its length, of all the prompts that it has, or `None`."""

        def render(prompts: list) -> list[list[int]]:
            return render_prompts(self.tokenizer, prompts, **self.chat)

        kinds = [self._kinds(row) for row in rows]
        ids = {kind: tokenize_variants(rows, kind, render) for kind in dict.fromkeys(k for each in kinds for k in each)}
        for place in range(len(rows)):
            longest = 0
            for kind in kinds[place]:
                for rendered in ids[kind][place]:
                    check_rendering(prompt_column(kind), rendered, self._suffix)
                    if self.limited is None or kind in self.limited:
                        longest = max(longest, len(rendered))
            over = self.limit is not None and longest > self.limit
            yield f"with a prompt longer than max_prompt_length {self.limit} tokens" if over else None


def _without_images(dataset):
    """A dataset without its columns of images, which have to be empty."""
    columns = [name for name in ("images", "image") if name in (next(iter(dataset), None) or {})]
    for row in dataset.select_columns(columns) if columns else ():
        if any(row[name] not in (None, [], [None]) for name in columns):
            raise ValueError(f"`{columns[0]}` holds images, which are not supported; leave such rows out.")
    return dataset.remove_columns(columns) if columns else dataset


def prepare_prompts(
    dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    args,
    tools: list | None = None,
    teachers: Sequence[str] = (TEACHER,),
):
    """Leave out rows that lack a prompt which the method reads, or have one that is too long."""
    needs = get_method(args.method).needs
    kinds = prompt_kinds(needs)
    own_teacher = tuple(teachers) != (TEACHER,) and reads_own_teacher(needs)
    _, target = split_signal(get_method(args.method).target)
    check_columns(dataset, kinds, args.method, args.max_prompt_length_kinds)
    dataset = _without_images(dataset)
    if tokenizer is not None:
        chat = {**(args.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        limits = (args.max_prompt_length, args.max_prompt_length_kinds)
        check = RowCheck(kinds, tokenizer, *limits, teachers if own_teacher else (), target, **chat)
        dataset = _fitting(dataset, check, talk=args.process_index == 0, progress=not args.disable_tqdm)
    prompts_per_batch = args.generation_batch_size // args.num_generations
    if isinstance(dataset, datasets.Dataset) and len(dataset) < prompts_per_batch:
        raise ValueError(
            f"{len(dataset)} prompts are fewer than one step takes ({prompts_per_batch}); lower "
            "`prompts_per_step` or `per_device_train_batch_size`, or give more prompts."
        )
    return dataset


def _fitting(dataset, check: RowCheck, talk: bool, progress: bool):
    """The rows that stay, and a line on those that left; a stream says so as it is read."""
    if not isinstance(dataset, datasets.Dataset):

        def telling(batch: dict[str, list]) -> list[bool]:
            known = set(check.dropped)
            kept = check(batch)
            for reason in check.dropped.keys() - known if talk else ():
                print(f"Rows {reason} are left out.")
            return kept

        return dataset.filter(telling, batched=True)
    progress_was_on = datasets.is_progress_bar_enabled()
    if not (progress and talk):
        datasets.disable_progress_bars()
    try:
        kept = dataset.filter(check, batched=True, load_from_cache_file=False, desc="Checking prompts")
    finally:
        if progress_was_on:
            datasets.enable_progress_bars()
    reasons = "; ".join(f"{count} {reason}" for reason, count in check.dropped.most_common())
    if len(kept) == 0:
        limit = "raise the limit or " if any("max_prompt_length" in reason for reason in check.dropped) else ""
        raise ValueError(f"No row is left of {len(dataset)}: {reasons}; {limit}mend the dataset.")
    if reasons and talk:
        print(f"{len(dataset) - len(kept)} of {len(dataset)} rows left out: {reasons}.")
    return kept


def tokenizer_of(model, processing_class, setting: str, trust_remote_code: bool = False, revision: str | None = None):
    """The tokenizer of a path or a model, or `None` when nothing tells; `setting` is for the message."""
    if processing_class is not None:
        return processing_class
    argument = f"{'teacher_' * setting.startswith('teacher_')}processing_class"
    source = model if isinstance(model, str) else get_config_model_id(getattr(model, "config", None))
    if not source:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No tokenizer can be loaded from `{setting}` {source!r}; give a folder with a saved model and tokenizer, "
            f"the name of one on a hub that can be reached, or the tokenizer to `CROPTrainer` as `{argument}` "
            f"({str(error).splitlines()[0]})."
        ) from error


def check_same_tokenizer(
    student, teacher, processing_class=None, trust_remote_code: bool = False, revision: str | None = None
) -> int | None:
    """The teacher's end token; raises `ValueError` unless every id means the same to student and teacher."""
    if student is None or not isinstance(teacher, (str, PreTrainedModel, PeftModel)):
        return None
    theirs = tokenizer_of(teacher, processing_class, "teacher_model_name_or_path", trust_remote_code, revision)
    if theirs is None:
        return None
    vocab, other = student.get_vocab(), theirs.get_vocab()
    for token, index in sorted(vocab.items(), key=lambda item: item[1]):
        if other.get(token) != index:
            raise ValueError(
                f"Student and teacher tokenizers differ: {token!r} is {index} for the student and "
                f"{other.get(token, 'unknown')} to the teacher; choose a teacher of the same family."
            )
    return theirs.eos_token_id
