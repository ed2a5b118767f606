"""Serve a teacher to trainers elsewhere: token ids in, top-K log-probabilities out.

    crop-trl serve-teacher Qwen/Qwen3-4B --gpus 0,1 --port 8000

Each card holds a copy, at a port of its own, from `--port` on; `teacher_server_urls` takes all of them. With
`--tensor_parallel` they hold one together. What has come in is answered before the server stops (SIGTERM, Ctrl-C). With
TEACHER_API_KEY in the environment, it wants that key.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

from ..studies.running import end_with_parent
from ..text import say
from .errors import told
from .options import OptionParser


def make_parser() -> OptionParser:
    """The options."""
    parser = OptionParser("serve-teacher", __doc__)
    parser.add_argument("model", help="folder or name on the hub")
    parser.add_argument("--revision", help="of a model on the hub")
    parser.add_argument("--gpus", default="", help="cards, such as 0,1; by default the first, or the CPU")
    parser.add_argument("--tensor_parallel", action="store_true", help="split the weights over the cards")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all of this machine's")
    parser.add_argument("--port", type=int, default=8000, help="of the first card; 0 takes a free one")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--quantization", choices=("8bit", "4bit", "fp8"), help="of the weights")
    parser.add_argument("--compile_layers", action="store_true", help="compile the decoder layers")
    parser.add_argument("--tokens_per_batch", type=int, default=16384, help="of one forward pass")
    parser.add_argument("--max_length", type=int, help="tokens of prompt and response; by default what the model takes")
    parser.add_argument("--reply_dtype", choices=("float32", "float16"), default="float32", help="of log-probabilities")
    return parser


def load_scorer(args, rank: int):
    """The scorer, its tokenizer, and how long a sequence may be."""
    import torch
    from transformers import AutoTokenizer

    from ..models.compilation import compile_layers
    from ..models.fp8 import quantize_layers
    from ..scoring.local import LocalScorer
    from ..scoring.placement import quantization_config
    from ..scoring.teacher import freeze, load_teacher

    pinned = {"revision": args.revision} if args.revision else {}
    options = {"dtype": args.dtype, **pinned}
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    kind = LocalScorer
    if args.tensor_parallel:
        from ..scoring.tensor_parallel import TensorParallelScorer as kind

        torch.distributed.init_process_group()
        options["tp_plan"] = "auto"
    if args.quantization in ("8bit", "4bit"):
        options |= {"quantization_config": quantization_config(args.quantization, args.dtype)}
        options |= {"device_map": {"": device}}
    tokenizer = AutoTokenizer.from_pretrained(args.model, **pinned)
    model = load_teacher(args.model, options)
    longest = args.max_length or getattr(model.config.get_text_config(), "max_position_embeddings", 2**31)
    freeze(model, longest)
    if args.quantization == "fp8":
        quantize_layers(model, device)
    if not args.tensor_parallel and getattr(model, "hf_device_map", None) is None:
        model = model.to(device)
    if args.compile_layers:
        compile_layers(model)
    scorer = kind(
        model,
        top_k=1,  # each request has its own
        pad_token_id=tokenizer.pad_token_id or 0,
        tokens_per_batch=args.tokens_per_batch,
        end_token_id=tokenizer.eos_token_id,
    )
    return scorer, tokenizer, longest


def serve(args, rank: int = 0) -> None:
    """Load the model and answer until told to stop."""
    if rank:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the first process says when
        return load_scorer(args, rank)[0].follow()
    # Taken before anything is loaded, and by nobody else from then on.
    listening = socket.create_server((args.host, args.port))

    import torch
    import uvicorn

    from ..scoring.serving import TeacherService

    scorer, tokenizer, longest = load_scorer(args, rank)
    service = TeacherService(scorer, args.model, tokenizer, longest, getattr(torch, args.reply_dtype))
    host, port = listening.getsockname()[:2]
    say(f"Serving {args.model}: `teacher_server_urls` http://{host}:{port}")
    try:
        config = uvicorn.Config(service.application(), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        if args.tensor_parallel:
            scorer.end()


def serve_on(gpus: list[str], args, argv: list[str]) -> int:
    """A process for each card. Returns the status of the first that failed, once all have ended."""
    together = args.tensor_parallel
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(len(gpus))}
    copies = []
    for i, gpu in enumerate(gpus):
        own = ["--gpus", "", "--port", str(args.port and args.port + i)]
        ranks = {"RANK": str(i), "LOCAL_RANK": str(i), **meeting} if together else {}
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus) if together else gpu}
        command = [sys.executable, "-m", __spec__.name, *argv, *own]
        end = partial(end_with_parent, signal.SIGKILL)
        copies.append(subprocess.Popen(command, env=os.environ | visible | ranks, preexec_fn=end))

    def pass_on(number, _):
        for copy in copies:
            copy.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the copies too
    failed = 0
    while True:
        states = [copy.poll() for copy in copies]
        failed = failed or next((abs(state) for state in states if state), 0)
        if None not in states:
            return failed
        if together and failed:  # without it the others would wait for ever
            pass_on(signal.SIGKILL, None)
        time.sleep(0.2)


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop."""
    argv = sys.argv[1:] if argv is None else argv
    with told():
        args = make_parser().parse_args(argv)
        if args.tensor_parallel and args.quantization:
            raise ValueError("`--quantization` does not work with `--tensor_parallel`; leave out one of them.")
        gpus = [gpu for gpu in args.gpus.split(",") if gpu]
        if gpus:
            return serve_on(gpus, args, argv)
        serve(args, int(os.environ.get("RANK", 0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
