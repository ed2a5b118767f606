"""Where the teacher lives, and what may be combined: on the training device, in CPU memory between scoring phases,
quantised, spread over processes, or on a server."""

import time

import torch
from transformers import BitsAndBytesConfig

from ..text import masked
from .server_health import parse_address

PLACEMENTS = ("resident", "offload", "sharded")
QUANTIZATIONS = ("8bit", "4bit")


def check_teacher_settings(args) -> None:
    """
    Raise `ValueError` for a placement that is not known, or settings that contradict each other.

    Args:
        args ([`~crop_trl.CROPConfig`]): Only the fields that start with `teacher_` are read.
    """
    for name, known in (("teacher_placement", PLACEMENTS), ("teacher_quantization", (None, *QUANTIZATIONS))):
        value = getattr(args, name)
        if value not in known:
            raise ValueError(
                f"`{name}` {value!r} is not known: choose one of {', '.join(filter(None, known))}"
                f"{', or leave it out' if None in known else ''}."
            )
    if args.teacher_server_urls:
        several = args.teacher_server_urls
        for url in several if isinstance(several, (list, tuple)) else [several]:
            parse_address(url)
        for name, unset in (
            ("teacher_placement", "resident"),
            ("teacher_quantization", None),
            ("teacher_init_kwargs", None),
        ):
            if getattr(args, name) not in (unset, {}):
                raise ValueError(
                    f"`{name}` {masked(getattr(args, name))!r} is for a teacher in this process, but "
                    "`teacher_server_urls` puts it on a server; remove one of the two."
                )
    if args.teacher_quantization is None:
        return
    if args.teacher_placement != "resident":
        raise ValueError(
            f"`teacher_quantization` {args.teacher_quantization!r} does not work with `teacher_placement` "
            f"{args.teacher_placement!r}, quantised weights stay on their device; set it to 'resident'."
        )
    if "quantization_config" in (args.teacher_init_kwargs or {}):
        raise ValueError(
            "`teacher_quantization` and `quantization_config` in `teacher_init_kwargs` both say how to quantise the "
            "teacher; remove one of the two."
        )


def check_init_kwargs(name: str, given) -> None:
    """
    Raise `ValueError` for a type of weights that is none, or under a name that would not be read.

    Args:
        name (`str`): Of the setting.
        given (mapping, *optional*): Keyword arguments of `from_pretrained`.
    """
    given = given or {}
    if "torch_dtype" in given:
        raise ValueError(
            f"`torch_dtype` in `{name}` would not be read beside `dtype`, which always is set; call it `dtype`."
        )
    value = given.get("dtype", "auto")
    # A dictionary names a type for each part of a model.
    if value is not None and value != "auto" and not isinstance(value, dict) and _dtype(value) is None:
        raise ValueError(
            f"`dtype` {value!r} in `{name}` is no type of weights; take one such as 'bfloat16', or 'auto'."
        )


def _dtype(value) -> torch.dtype | None:
    found = getattr(torch, str(value).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def quantization_config(quantization: str, compute_dtype: str | torch.dtype) -> BitsAndBytesConfig:
    """
    How bitsandbytes stores a teacher: LLM.int8 for `"8bit"`, NF4 for `"4bit"`; the output head stays as it is.

    Args:
        quantization (`str`): One of [`QUANTIZATIONS`].
        compute_dtype (`str` or `torch.dtype`): Type of the arithmetic with 4-bit weights, such as `"bfloat16"`; where
            it names none, as `"auto"`, it is `"bfloat16"`.
    """
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=_dtype(compute_dtype) or torch.bfloat16
    )


class OffloadedWeights:
    """
    Context manager that lends a device to a frozen model: inside, its weights are there; outside, in CPU memory.

    Nothing is copied back, since nothing changes: the copies on the device are dropped. The CPU copies are pinned for a
    CUDA device, so that the way there goes at the speed of the bus.

    Args:
        model (`torch.nn.Module`): In evaluation mode, without gradients. Loaded on the CPU.
        device (`torch.device` or `str`): Where it runs.

    Attributes:
        seconds (`float`): What the last move took.
    """

    def __init__(self, model: torch.nn.Module, device):
        self.device = torch.device(device)
        self.seconds = 0.0
        self._home = []
        for tensor in (*model.parameters(), *model.buffers()):
            home = tensor.data.cpu()
            if self.device.type == "cuda":
                home = home.pin_memory()
            tensor.data = home
            self._home.append((tensor, home))

    def __enter__(self):
        started = time.perf_counter()
        for tensor, home in self._home:
            tensor.data = home.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            # Once a scoring phase, and the first forward would wait for the weights anyway.
            torch.cuda.current_stream(self.device).synchronize()
        self.seconds = time.perf_counter() - started
        return self

    def __exit__(self, *exception):
        for tensor, home in self._home:
            tensor.data = home
