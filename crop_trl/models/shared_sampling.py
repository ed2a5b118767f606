"""Sampling for several runs on one GPU: their students' weights lie stacked, and one graph draws a token for all.

    python -m crop_trl.models.shared_sampling SOCKET --slots 16

A token of a small model takes a thousand short kernels, and runs side by side gain little on runs one after the other.
Here all runs have the kernels in common. `crop-trl study --sample_together` starts this process and stops it.
"""

import argparse
import os
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .graph_sampling import Batch, HalfLayer, cache_length, copy_of, decoding_of, last_logits, one_token_attention

# Seconds that a round waits at least for a run that took part in the last one.
_PATIENCE = 5.0
_TOLD = 20  # rounds that are told of together
_ATTENTION = "crop_trl_one_token_of_many"
_APART = ("_name_or_path", "architectures", "transformers_version")
Layout = list[tuple[str, tuple[int, ...], torch.dtype]]


class _Attend(torch.autograd.Function):
    """SDPA, under vmap one call for all models: vmap's own rule would be a loop over them."""

    @staticmethod
    def forward(query, key, value, attn_mask, scale):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, *inputs):
        *parts, scale = inputs
        flat = [part.movedim(dim, 0).flatten(0, 1) for part, dim in zip(parts, in_dims, strict=False)]
        return _Attend.forward(*flat, scale).unflatten(0, (info.batch_size, -1)), 0


AttentionInterface.register(
    _ATTENTION,
    partial(one_token_attention, lambda q, k, v, attn_mask, scale: _Attend.apply(q, k, v, attn_mask, scale)),
)


def address_of(prefix: str) -> str:
    """The socket of the GPU that this process sees."""
    return f"{prefix}.{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"


def layout_of(model: torch.nn.Module, half: torch.dtype) -> Layout:
    """Name, shape and dtype of the weights that a sampling copy of a model has."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    parameters = model.named_parameters(remove_duplicate=False)
    return [(name, tuple(each.shape), half if name in linear else each.dtype) for name, each in parameters]


def shared(file: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Memory for a student's weights that two processes have in common, pinned where there is a GPU."""
    parts = sorted(layout, key=lambda part: -part[2].itemsize)  # so that each begins where its dtype may
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in parts]
    flat = torch.from_file(file, shared=True, size=sum(sizes), dtype=torch.uint8)
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)
    pieces = zip(parts, flat.split(sizes), strict=True)
    return {name: piece.view(dtype).view(shape) for (name, shape, dtype), piece in pieces}


class StackedBatch(Batch):
    """`slots` models of one shape with `rows` rows each, read as one."""

    def __init__(self, template: PreTrainedModel, stacks: dict[str, torch.Tensor], slots: int, rows: int, *args):
        super().__init__(template, slots * rows, *args, False)
        config = template.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, rows, config.num_key_value_heads, self.length, width)
        self._stacks, self._shape = stacks, (slots, rows)
        dtype, device = self.mask.dtype, self.mask.device
        self._stored = [torch.zeros(2, *shape, dtype=dtype, device=device) for _ in self.cache.layers]
        self._uniform = torch.zeros(slots * rows, self.length, device=device)
        self._drawn = torch.zeros(1, dtype=torch.long, device=device)
        self.state.append(self._drawn)

    def _read(self, model, ids, mask, positions, columns):
        def one(weights, stored, *read):
            layers = [HalfLayer(self.length, self.mask.dtype) for _ in stored]
            for layer, (keys, values) in zip(layers, stored, strict=True):
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                layer.columns, layer.reads = columns, mask.size(-1)
            return last_logits(lambda **given: functional_call(model, weights, (), given), *read, Cache(layers=layers))

        apart = [each.unflatten(0, self._shape) for each in (ids, mask, positions)]
        stored = [(both[0], both[1]) for both in self._stored]
        return vmap(one)(self._stacks, stored, *apart).flatten(0, 1)

    def _draw(self, logits):
        chance = self._uniform.index_select(1, self._drawn)
        self._drawn += 1
        below = (logits.float() / self.temperature).softmax(-1).cumsum(-1)
        return (below < chance * below[:, -1:]).sum(-1, keepdim=True)

    def draw(self, ids: torch.Tensor, mask: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """
        Prompts `[S, B, P]` and responses, `[S, B, P + N]`, by random numbers in [0, 1) `[S, B, N]`; a row whose mask is
        0 has no prompt.
        """
        count = uniform.size(-1)
        self._uniform[:, :count] = uniform.flatten(0, 1)
        self._drawn.zero_()
        return self.sample(ids.flatten(0, 1), mask.flatten(0, 1), count).unflatten(0, self._shape)


def _compared(kind: dict) -> dict:
    """What is the same for all runs: the student's own settings too, for equal shapes do not make an equal model."""
    config = {name: value for name, value in kind["config"].to_dict().items() if name not in _APART}
    settings = dict(zip(("temperature", "eos_token_id", "pad_token_id"), kind["settings"], strict=True))
    return {**config, **settings, **{name: value for name, value in kind.items() if name not in ("config", "settings")}}


class Stack:
    """The students of all slots. The first run that comes says of what kind they are."""

    def __init__(self, slots: int):
        self.slots, self.kind, self.batch, self.one = slots, None, None, None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def welcome(self, kind: dict) -> Layout:
        """Make room for students of a kind. Raises `ValueError` for one that is another than the first."""
        if self.kind is None:
            model = AutoModelForCausalLM.from_config(kind["config"], dtype=kind["dtype"])
            self.template = copy_of(model, kind["half"], {}, _ATTENTION).to(self.device)
            # Of a slice, matmul would copy the head's weights for every row.
            self.template.get_output_embeddings().register_forward_pre_hook(lambda _, read: (read[0].contiguous(),))
            self.layout = layout_of(self.template, kind["half"])
            self.stacks = {
                name: torch.zeros(self.slots, *shape, dtype=dtype, device=self.device)
                for name, shape, dtype in self.layout
            }
            self.kind = kind
        first, own = _compared(self.kind), _compared(kind)
        for name in first | own:
            if first.get(name) != own.get(name):
                raise ValueError(
                    f"runs that sample together have one `{name}`, not {first.get(name)!r} and {own.get(name)!r}; "
                    "let them be in studies of their own"
                )
        return self.layout

    def _ask_the_same(self, asked: dict[int, dict]) -> bool:
        first, *others = asked
        here = asked[first]
        return all(
            torch.equal(here[name], asked[slot][name]) for slot in others for name in ("ids", "mask", "uniform")
        ) and all(torch.equal(stack[first], stack[slot]) for slot in others for stack in self.stacks.values())

    @torch.no_grad()
    def draw(self, asked: dict[int, dict]) -> dict[int, torch.Tensor]:
        """Responses for some slots, each with its `ids` and `mask` `[B, P]`, `uniform` `[B, N]` and `weights`."""
        for slot, each in asked.items():
            for name, weight in each["weights"].items():
                self.stacks[name][slot].copy_(weight, non_blocking=True)
        if len(asked) > 1 and self._ask_the_same(asked):
            # As before training, where the runs have one student.
            if self.one is None:
                self.one = Stack(1)
                self.one.welcome(self.kind)
            return dict.fromkeys(asked, self.one.draw({0: next(iter(asked.values()))})[0])
        rows = self.kind["per_device_train_batch_size"]
        width, count = (max(each[name].size(1) for each in asked.values()) for name in ("ids", "uniform"))
        ids = torch.full((self.slots, rows, width), self.kind["settings"][2])
        mask, uniform = torch.zeros_like(ids), torch.zeros(self.slots, rows, count)
        for slot, each in asked.items():
            here, own = each["ids"].shape
            ids[slot, :here, width - own :], mask[slot, :here, width - own :] = each["ids"], each["mask"]
            uniform[slot, :here, : each["uniform"].size(1)] = each["uniform"]
        length = cache_length(width + count)
        if self.batch is None or self.batch.length < length:
            self.batch = None
            kind = self.kind
            shape = (self.slots, rows, length, kind["settings"], kind["half"], kind["autocast"])
            self.batch = StackedBatch(self.template, self.stacks, *shape)
        found = self.batch.draw(*(each.to(self.device) for each in (ids, mask, uniform))).cpu()
        return {
            slot: found[slot, : len(each["ids"]), width:][:, : each["uniform"].size(1)] for slot, each in asked.items()
        }


class Rounds:
    """What runs ask for, answered together: a round waits for those that took part in the last one."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.changed = threading.Condition()
        # While a graph is captured no thread may ask for memory.
        self.on_device = threading.Lock()
        self.free = list(range(stack.slots))
        # Files without a name: however processes end, nothing stays, and a container's small /dev/shm does not matter.
        self.files = [f"/proc/{os.getpid()}/fd/{os.memfd_create('weights')}" for _ in self.free]
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.asked: dict[int, dict] = {}
        self.answers: dict[int, torch.Tensor] = {}
        self.last: set[int] = set()
        self.away: dict[int, float] = {}  # seconds between a run's last answer and what it asked then

    def attend(self, connection: Connection) -> None:
        """Serve one run until it is gone."""
        slot = None
        try:
            kind = connection.recv()
            with self.changed:
                slot = self.free.pop(0) if self.free else None
            if slot is None:
                raise ValueError(f"all {self.stack.slots} places are taken")
            with self.on_device:
                layout = self.stack.welcome(kind)
                # Pinned memory stays where it is, for the next run that takes this place.
                if slot not in self.weights:
                    self.weights[slot] = shared(self.files[slot], layout)
            connection.send((layout, self.files[slot]))
            while True:
                since = time.monotonic()
                asked = {name: torch.from_numpy(each) for name, each in connection.recv().items()}
                with self.changed:
                    self.away[slot] = time.monotonic() - since
                    self.asked[slot] = {**asked, "weights": self.weights[slot]}
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: slot in self.answers)
                    answer = self.answers.pop(slot)
                connection.send(answer.numpy())
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            traceback.print_exc()
            with suppress(OSError):
                connection.send(ValueError(str(error)))
        finally:
            with self.changed:
                self.last.discard(slot)
                self.free += [slot] * (slot is not None)
                self.changed.notify_all()

    def serve(self) -> None:
        """Answer for ever; what goes wrong ends the process, and with it all runs that wait for it."""
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        times, clock = [], time.monotonic()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.asked)
                # Shorter than their steps, no two runs would ever meet again.
                patience = max([_PATIENCE, *(2 * self.away[slot] for slot in self.last)])
                self.changed.wait_for(lambda: self.last <= self.asked.keys(), patience)
                asked, self.asked = self.asked, {}
                self.last = set(asked)
            with self.on_device:
                times.append(time.monotonic())
                answers = self.stack.draw(asked)
                times[-1] = time.monotonic() - times[-1]
            if len(times) == _TOLD:
                since, clock = clock, time.monotonic()
                print(f"{_TOLD} rounds took {clock - since:.1f} s, drawing {sum(times):.1f} s of them.", flush=True)
                times.clear()
            with self.changed:
                self.answers.update(answers)
                self.changed.notify_all()


class SharedSampler:
    """Draws responses through the process that listens at `prefix` for this GPU; otherwise as `GraphSampler`."""

    def __init__(self, model: PreTrainedModel, half: torch.dtype, autocast: bool, prefix: str, rows: int):
        self._model, self._half, self._autocast, self._address = model, half, autocast, address_of(prefix)
        self._connection: Connection | None = None
        self._rows = rows

    def _connect(self, config: GenerationConfig) -> None:
        until = time.monotonic() + 60
        while not Path(self._address).exists() and time.monotonic() < until:
            time.sleep(0.1)
        try:
            self._connection = Client(self._address, "AF_UNIX")
        except OSError as error:
            raise ValueError(
                f"`shared_sampler`: nobody listens at {self._address!r}; `crop-trl study --sample_together` starts it."
            ) from error
        kind = {"config": self._model.config, "dtype": self._model.dtype, "half": self._half}
        kind |= {"per_device_train_batch_size": self._rows, "autocast": self._autocast}
        self._connection.send({**kind, "settings": decoding_of(config)})
        answer = self._connection.recv()
        if isinstance(answer, ValueError):
            raise ValueError(f"`shared_sampler`: {answer}.")
        layout, file = answer
        self._weights = shared(file, layout)

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: GenerationConfig, **kwargs
    ) -> torch.Tensor:
        """As `generate` with `do_sample`: prompts `[B, P]`, padded on the left, and responses, `[B, P + N]`."""
        if self._connection is None:
            self._connect(generation_config)
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            self._weights[name].copy_(weight, non_blocking=True)
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        # From this run's own random numbers, so that a seed means the same as without company.
        uniform = torch.rand(len(input_ids), generation_config.max_new_tokens, device=input_ids.device)
        asked = (each.cpu().split(self._rows) for each in (input_ids, attention_mask, uniform))
        drawn = [row for part in zip(*asked, strict=True) for row in self._ask(*part)]
        drawn = pad_sequence(drawn, batch_first=True, padding_value=decoding_of(generation_config)[2])
        return torch.cat([input_ids, drawn.to(input_ids.device)], dim=1)

    def _ask(self, ids: torch.Tensor, mask: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        try:
            # As arrays: PyTorch would send tensors by files that strangers may not open.
            self._connection.send({"ids": ids.numpy(), "mask": mask.numpy(), "uniform": uniform.numpy()})
            return torch.from_numpy(self._connection.recv())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"`shared_sampler`: the process at {self._address!r} has ended.") from error


def main() -> None:
    """Listen until somebody ends this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("socket", help="beginning of the socket's name; the GPUs that this process sees follow")
    parser.add_argument("--slots", type=int, required=True, help="runs at most")
    args = parser.parse_args()
    rounds = Rounds(Stack(args.slots))
    threading.Thread(target=rounds.serve, daemon=True).start()
    address = address_of(args.socket)
    Path(address).unlink(missing_ok=True)
    with Listener(address, "AF_UNIX", backlog=args.slots) as listener:
        while True:
            threading.Thread(target=rounds.attend, args=(listener.accept(),), daemon=True).start()


if __name__ == "__main__":
    main()
