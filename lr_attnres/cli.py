"""The command line: each command parses its arguments and calls one public function of the package.

torch and transformers are imported only when a command runs, so that `--help` is instant.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import lr_attnres

from .variants import RESIDUAL_TYPES


DTYPES = ["float32", "bfloat16", "float16"]
MODEL = "a folder or Hub repository"
ANY_MODEL = f"{MODEL}; also with an ordinary causal model of Transformers"
ADAPTER = "a routing adapter to load onto the model: a folder or Hub repository"
TOKEN = "Hub token (default: HF_TOKEN, or the token of `hf auth login`)"
VERIFY = "load the new folder in a process without this package and compare the logits"
EXIT_CODES = """exit codes:
  0    success
  1    an error, explained in one line
  2    a wrong command line
  130  stopped by Ctrl-C (train saves a checkpoint first)
  141  the reader of the output has closed it, as in `| head`
  143  stopped by SIGTERM (train saves a checkpoint first)"""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"Error: {message} (see `{self.prog} --help`)\n")


class Command(NamedTuple):
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], Callable]  # returns the function to call with the options
    extra: str | None = None  # `pip install "lr-attnres[EXTRA]"` installs the packages that the command needs


COMMANDS: dict[str, Command] = {}


def command(example: str, extra: str | None = None) -> Callable[[Callable], Callable]:
    """Register a command under the name of the decorated function, with its docstring as summary."""

    def register(add_arguments: Callable) -> Callable:
        COMMANDS[add_arguments.__name__] = Command(add_arguments.__doc__ or "", example, add_arguments, extra)
        return add_arguments

    return register


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    options = vars(parsed)
    if "run" not in options and unknown:
        parser.error(f"there is no command before {unknown[0]!r}")
    if "run" not in options:
        parser.print_help(sys.stderr)
        return 2
    run, extra, command_parser = (options.pop(name) for name in ("run", "extra", "parser"))
    if unknown:
        command_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        run(**options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # a reader such as `head` has closed the pipe; Python must not flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from .errors import explain

        message = explain(error)
        if message is None:
            raise
        if extra is not None and isinstance(error, ModuleNotFoundError):
            install = f'pip install "lr-attnres[{extra}]", or in a clone pip install ".[{extra}]"'
            message = f"{error.name} is not installed: {install}"
        print(f"Error: {message}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> Parser:
    workflow = [f"  {COMMANDS[name].example}\n" for name in ("prepare", "train", "evaluate", "generate", "push")]
    parser = Parser(
        prog="lr-attnres",
        description="Train, convert, upgrade, analyze and publish language models with low-rank attention residuals.",
        epilog=f"from text to a published model:\n{''.join(workflow)}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lr-attnres {lr_attnres.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (COMMAND --help shows the options)")
    for name, (summary, example, add_arguments, extra) in COMMANDS.items():
        command_parser = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command_parser.set_defaults(run=add_arguments(command_parser), extra=extra, parser=command_parser)
    return parser


def _call(function: str, **options: Any) -> Any:
    """Call a public function of the package, which is imported only now."""
    return getattr(lr_attnres, function)(**options)


def _add_depth_arguments(add: Callable) -> None:
    """An omitted flag is absent from the options, so that the default of the called function applies."""
    kinds = "standard: residual sum; attnres: keys are whole values; projected: keys are learned projections; "
    kinds += "sliced: keys are the last coordinates of the values (default: sliced)"
    blocks = "number of blocks of sub-layers; `full` (or `none`): one source per sub-layer (default: 8)"
    rank = "width of the routing keys (default: 64)"
    heads = "reads side by side, each with its slice of keys and values (default: 1)"
    add("--residual-type", choices=RESIDUAL_TYPES, default=argparse.SUPPRESS, help=kinds)
    add("--num-depth-blocks", type=_blocks, default=argparse.SUPPRESS, metavar="N", help=blocks)
    add("--depth-key-rank", type=int, default=argparse.SUPPRESS, metavar="R", help=rank)
    add("--depth-heads", type=int, default=argparse.SUPPRESS, metavar="H", help=heads)


def _blocks(text: str) -> int | None:
    if text in ("full", "none", "None"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive whole number nor `full` (or `none`)")
    return int(text)


def _add_model_arguments(add: Callable) -> None:
    add("--device", default="auto", help="cpu, cuda, ... (default: %(default)s)")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="dtype to compute in (default: as saved)")
    _add_depth_backend(add)


def _add_depth_backend(add: Callable) -> None:
    kernels = "compute the reads with torch, or with the Triton kernels, on a GPU (default: %(default)s)"
    add("--depth-backend", choices=["torch", "triton"], default="torch", help=kernels)


def _add_hub_arguments(add: Callable) -> None:
    add("--revision", help="branch, tag or commit of the Hub repository")
    add("--token", help=TOKEN)


@command(
    "lr-attnres prepare sotu outputs/data --train-tokenizer 2048 --sequence-length 256 --validation-fraction 0.1",
    extra="train",
)
def prepare(parser: argparse.ArgumentParser) -> Callable:
    """Turn text or a dataset into packed rows of tokens. Run it again to resume, or to verify the result."""
    add = parser.add_argument
    sources = "a .txt or .jsonl file, a folder of such files, a dataset on the Hub, or `sotu`: 2 MB of speeches "
    add("sources", metavar="SOURCE", nargs="+", help=sources + "included in this package")
    add("output_dir", metavar="OUTPUT_DIR", help="folder to create, or to finish if it is incomplete")
    add("--tokenizer", help="a folder, Hub repository or cl100k_base.tiktoken file (default: cl100k_base)")
    add("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help="train a byte-level BPE tokenizer instead")
    add("--sequence-length", type=int, default=2048, help="tokens per row (default: %(default)s)")
    add("--validation-fraction", type=float, default=0.01, help="held-out share of documents (default: %(default)s)")
    add("--max-tokens", type=int, help="stop after this many tokens (default: no limit)")
    add("--column", default="text", help="column of a dataset or JSONL file with the text (default: %(default)s)")
    add("--name", help="configuration of the dataset")
    add("--split", default="train", help="split of the dataset (default: %(default)s)")

    def run(output_dir, **options):
        manifest = _call("prepare_data", output_dir=output_dir, **options)
        for name, split in manifest.splits.items():
            rows = f"{split.rows:,} rows of {manifest.sequence_length} tokens"
            print(f"{name}: {rows}, from {split.documents:,} documents in {len(split.shards)} shards")
        print(output_dir)

    return run


@command("lr-attnres train tiny --data outputs/data --output-dir outputs/run --variant sliced-n4-r16", extra="train")
def train(parser: argparse.ArgumentParser) -> Callable:
    """Train a model with the paper's recipe. Several GPUs: `accelerate launch -m lr_attnres.cli train ...`."""
    from .training.arguments import add_flags, load_arguments, presets

    config = f"a preset ({' or '.join(presets())}) or a YAML file; flags override its values"
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=config)
    add_flags(parser)

    def run(config, **flags):
        from accelerate import PartialState

        folder = _call("train", args=load_arguments(config, **flags))
        PartialState().print(folder)  # prints in one process only

    return run


@command("lr-attnres evaluate outputs/run/model outputs/data", extra="train")
def evaluate(parser: argparse.ArgumentParser) -> Callable:
    """Compute the loss over all tokens of a split. Any number of processes gives the same result."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=ANY_MODEL)
    add("data", metavar="DATA", help="a folder written by `lr-attnres prepare`")
    add("--split", default="validation", help="split of the data (default: %(default)s)")
    add("--adapter", help=ADAPTER)
    add("--batch-size", type=int, default=8, help="rows per forward (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype to compute in (default: %(default)s)")
    _add_depth_backend(add)

    def run(split, **options):
        from accelerate import PartialState

        result = _call("evaluate", split=split, **options)
        text = f"{split} loss {result.loss:.6f}, perplexity {result.perplexity:.3f}, {result.tokens:,} tokens"
        PartialState().print(text)

    return run


@command("lr-attnres convert Jonnester/LR-AttnRes-LR-n8-r32 outputs/n8-r32 --dtype bfloat16 --verify")
def convert(parser: argparse.ArgumentParser) -> Callable:
    """Convert a checkpoint released by the paper's author into a model folder for `from_pretrained`."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a .pt file, a folder of them, or a Hub repository")
    add("output_dir", metavar="OUTPUT_DIR", help="folder to create")
    add("--filename", help="file in the folder or repository (default: final_model.pt, or the last checkpoint)")
    _add_hub_arguments(add)
    add("--dtype", choices=DTYPES, help="dtype of the new weights (default: the dtype of the file)")
    add("--max-shard-size", default="5GB", help="largest size of a weight file (default: %(default)s)")
    add("--tokenizer", help="a cl100k_base.tiktoken file, or a folder or Hub repository with a tokenizer")
    add("--verify", action="store_true", help=VERIFY)

    def run(dtype, **options):
        import torch

        print(_call("convert_released_checkpoint", dtype=dtype and getattr(torch, dtype), **options))

    return run


@command("lr-attnres upgrade Qwen/Qwen3-0.6B outputs/upgraded --residual-type sliced --num-depth-blocks 8 --verify")
def upgrade(parser: argparse.ArgumentParser) -> Callable:
    """Turn a pretrained Llama, Mistral, Qwen2 or Qwen3 into an LR-AttnRes model with the same logits."""
    add = parser.add_argument
    add(
        "model_or_path",
        metavar="SOURCE",
        help="a folder, Hub repository or GGUF file (owner/name:file.gguf on the Hub)",
    )
    add("output_dir", metavar="OUTPUT_DIR", help="folder to create")
    _add_depth_arguments(add)
    add("--seed", type=int, default=0, help="random seed of the key projections (`projected` only; default: 0)")
    add("--base-model", help="owner/name of SOURCE for the model card, if SOURCE is a folder")
    _add_hub_arguments(add)
    add("--max-shard-size", default="2GB", help="weights per file, and in memory at once (default: %(default)s)")
    add("--verify", action="store_true", help=VERIFY)
    return lambda **options: print(_call("upgrade_model", **options))


@command("lr-attnres push owner/name outputs/run/model --private --dry-run")
def push(parser: argparse.ArgumentParser) -> Callable:
    """Check a model folder or a routing adapter and upload it to the Hub in one commit."""
    add = parser.add_argument
    add("repo_id", metavar="REPO_ID", help="owner/name; created if it does not exist")
    add("folder", metavar="FOLDER", help="the `model` or `adapter` of a run, or saved by `save_pretrained`")
    add("--private", action=argparse.BooleanOptionalAction, help="visibility of a new repository")
    add("--revision", help="branch to commit to (default: main)")
    add("--create-pr", action="store_true", help="open a pull request instead of committing")
    add("--commit-message", help="first line of the commit message")
    add("--token", help=TOKEN)
    add("--dry-run", action="store_true", help="check the folder and list the files, upload nothing")
    return lambda **options: print(_call("push", **options))


@command('lr-attnres generate outputs/run/model --prompt "The sea is" --max-new-tokens 32')
def generate(parser: argparse.ArgumentParser) -> Callable:
    """Continue a prompt and print the text as it is generated."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=ANY_MODEL)
    add("--adapter", help=ADAPTER)
    add("--prompt", required=True, help="text to continue")
    add("--max-new-tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0: greedy; above 0: sample (default: 0)")
    add("--top-p", type=float, default=1.0, help="probability mass to sample from, with --temperature (default: all)")
    add("--seed", type=int, help="random seed that makes sampling repeatable")
    _add_model_arguments(add)
    _add_hub_arguments(add)
    return partial(_call, "generate_text")


@command("lr-attnres serve outputs/run/model --port 8000")
def serve(parser: argparse.ArgumentParser) -> Callable:
    """Serve a model with an OpenAI-compatible API."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--host", default="localhost", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    _add_model_arguments(add)
    new_tokens = "length of an answer for a request that names none (default: %(default)s)"
    add("--max-new-tokens", type=int, default=1024, help=new_tokens)
    requests = "requests of the full context that the cache holds (default: %(default)s)"
    add("--concurrent-requests", type=int, default=4, metavar="N", help=requests)
    blocks = "size of the cache in blocks of 256 tokens (default: from --concurrent-requests)"
    add("--cb-num-blocks", type=int, metavar="N", help=blocks)
    step = "tokens per step of a batch (default: %(default)s)"
    add("--cb-max-batch-tokens", type=int, default=512, metavar="N", help=step)
    return partial(_call, "serve")


@command(
    "lr-attnres analyze outputs/run/model --data outputs/data --output outputs/analysis --max-tokens 1000000",
    extra="analysis",
)
def analyze(parser: argparse.ArgumentParser) -> Callable:
    """Measure on held-out text which sources each site reads. Writes JSON, safetensors and figures."""
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help=f"{MODEL}; several are compared")
    data = "a folder written by `prepare` (its validation split), or any source that `prepare` takes"
    add("--data", nargs="+", required=True, help=data)
    add("--output", dest="output_dir", metavar="FOLDER", required=True, help="folder to create")
    add("--max-tokens", type=int, help="stop after this many tokens (default: no limit)")
    add("--sequence-length", type=int, help="tokens per row of text (default: the model's context, at most 2048)")
    add("--batch-size", type=int, default=8, help="rows per forward (default: %(default)s)")
    _add_model_arguments(add)

    def run(output_dir, **options):
        from .analysis.routing import summary

        print(summary(_call("analyze", output_dir=output_dir, **options)))
        print(output_dir)

    return run


@command("lr-attnres explore outputs/run/model --port 7860", extra="explore")
def explore(parser: argparse.ArgumentParser) -> Callable:
    """Serve a local web page: generate text, click a token, see which sources each site read for it."""
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help=f"{MODEL}; two are compared")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, help="port to listen on (default: the first free port from 7860)")
    _add_model_arguments(add)
    return partial(_call, "explore")


@command("lr-attnres cost --residual-type projected --num-depth-blocks full --depth-key-rank 32", extra="analysis")
def cost(parser: argparse.ArgumentParser) -> Callable:
    """Print the cost of depth routing: multiply-adds, parameters, activations."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a saved model (folder or Hub repository), instead of options")
    add("--paper", action="store_true", help="print the paper's table and its worked example")
    add("--figure", metavar="FILE", help="with --paper: draw loss against cost, as PNG and SVG")
    _add_depth_arguments(add)
    sizes = ("hidden-size", "intermediate-size", "num-hidden-layers", "num-attention-heads", "num-key-value-heads")
    for name in (*sizes, "head-dim", "vocab-size"):
        add(f"--{name}", type=int, default=argparse.SUPPRESS, metavar="N", help="default: that of the paper's model")

    def run(model, paper, figure, **fields):
        from .analysis.cost import cost_report, paper_report
        from .folders.loading import load_config

        if (model is not None) + paper + bool(fields) > 1:
            raise ValueError("MODEL, --paper and the options of a model exclude each other: give one of them.")
        if figure is not None and not paper:
            raise ValueError("--figure draws the paper's table: add --paper.")
        if figure is not None:
            from .analysis.plots import draw_paper

            draw_paper(figure)
        if paper:
            return print(paper_report())
        print(cost_report(load_config(model) if model is not None else lr_attnres.LRAttnResConfig(**fields)))

    return run


@command("lr-attnres doctor --quick --output outputs/doctor.json")
def doctor(parser: argparse.ArgumentParser) -> Callable:
    """Check this machine: what is installed, whether reads agree with the naive one, and what they cost on a GPU."""
    add = parser.add_argument
    add("--quick", action="store_true", help="under a minute: no compiled reads, fewer timings")
    add("--interpret", action="store_true", help="also run the Triton kernels on the CPU, under Triton's interpreter")
    add("--output", metavar="FILE", help="write everything that was found as JSON")
    return partial(_call, "doctor")


if __name__ == "__main__":
    sys.exit(main())
