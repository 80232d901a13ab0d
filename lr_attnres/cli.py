"""The command line: each command parses its arguments and calls one Python function."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, get_args

import torch
from huggingface_hub.errors import StrictDataclassError

from . import LRAttnResConfig, __version__
from .clean_process import CleanProcessError
from .configuration_lr_attnres import ResidualType
from .errors import HubError, explain_field_error, explain_os_error, one_line


DTYPES = ["float32", "bfloat16", "float16"]
EXIT_CODES = """exit codes:
  0 done; 1 an error, told in one line; 2 a wrong command line; 130 interrupted by Ctrl-C and 143 by SIGTERM (train
  saves a checkpoint first); 141 nobody reads the output any more, as in `| head`"""


class Parser(argparse.ArgumentParser):
    """Tells a wrong command line in one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"Error: {message} (see `{self.prog} --help`)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    options = vars(parsed)
    if "run" not in options:
        parser.print_help(sys.stderr)
        return 2
    run, command = options.pop("run"), options.pop("parser")
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        run(**options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has enough; nothing is left to be flushed at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        message = explain_os_error(error)
    except StrictDataclassError as error:
        message = explain_field_error(error)
    except torch.OutOfMemoryError as error:
        message = f"{error} Take smaller batches, shorter rows or another `dtype`."
    except (ValueError, ImportError, HubError, CleanProcessError) as error:
        message = str(error)
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # how torch says that the memory of a CPU is full
            raise
        message = "the memory is full: take smaller batches, shorter rows or a smaller model."
    else:
        return 0
    print(f"Error: {one_line(message)}", file=sys.stderr)
    return 1


def make_parser() -> Parser:
    order = "\n".join(f"  {COMMANDS[name][1]}" for name in ("prepare", "train", "evaluate", "generate", "push"))
    parser = Parser(
        prog="lr-attnres",
        description="Language models with low-rank attention residuals: train, convert, upgrade, look into, publish.",
        epilog=f"from text to a published model:\n{order}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lr-attnres {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (COMMAND --help says more)")
    for name, (summary, example, add_arguments) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=add_arguments(command), parser=command)
    return parser


def _prepare(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help=".txt or .jsonl files, folders of them, a dataset of `datasets`, "
        "or `sotu`: 2 MB of prose that ship with this package",
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder to create; an interrupted run goes on")
    parser.add_argument("--tokenizer", help="a folder, repository or cl100k_base.tiktoken file; default: cl100k_base")
    parser.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help="train a byte-level BPE instead")
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.01, help="of the documents (default: %(default)s; 0: none)"
    )
    parser.add_argument("--max-tokens", type=int, help="stop there; default: take everything")
    parser.add_argument("--column", default="text", help="of a dataset or JSONL file (default: %(default)s)")
    parser.add_argument("--name", help="configuration of a dataset")
    parser.add_argument("--split", default="train", help="of a dataset (default: %(default)s)")

    def run(output_dir, **options):
        with _extra("train"):
            from .data import prepare

        manifest = prepare(output_dir=output_dir, **options)
        for split, counts in manifest["splits"].items():
            print(
                f"{split}: {counts['rows']:,} rows of {manifest['settings']['sequence_length']} tokens, from "
                f"{counts['documents']:,} documents in {len(counts['shards'])} shards"
            )
        print(output_dir)

    return run


def _convert(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("source", metavar="SOURCE", help="a .pt file, a folder of them, or a Hub repository")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder to create")
    parser.add_argument(
        "--filename", help="the file of a folder or repository; default: final_model.pt, else the last"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--token", help="Hub token; default: the one of `hf auth login` or HF_TOKEN")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as in the file")
    parser.add_argument("--max-shard-size", default="5GB", help="split larger models (default: %(default)s)")
    parser.add_argument("--tokenizer", help="a cl100k_base.tiktoken file, or a folder or repository with a tokenizer")
    parser.add_argument("--verify", action="store_true", help="load the result in a fresh process, compare logits")

    def run(dtype, **options):
        from .conversion import convert_released_checkpoint

        print(convert_released_checkpoint(dtype=dtype and getattr(torch, dtype), **options))

    return run


def _upgrade(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("source", metavar="SOURCE", help="a folder or a Hub repository with a Llama, Mistral or Qwen3")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder to create")
    _add_depth_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the key projections of projected (default: 0)")
    parser.add_argument("--base-model", help="what the card calls SOURCE, if that is a folder: owner/name")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--token", help="Hub token; default: the one of `hf auth login` or HF_TOKEN")
    parser.add_argument("--max-shard-size", default="2GB", help="at most so much is in memory (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="load the result in a fresh process, compare logits")

    def run(source, output_dir, **options):
        from .upgrade import upgrade_model

        print(upgrade_model(source, output_dir, **options))

    return run


def _add_depth_arguments(parser: argparse.ArgumentParser) -> None:
    """What is not given is left to the function that is called."""
    default = LRAttnResConfig()
    parser.add_argument(
        "--residual-type",
        choices=get_args(ResidualType),
        default=argparse.SUPPRESS,
        help=f"what the routing key of a source is (default: {default.residual_type})",
    )
    parser.add_argument(
        "--num-depth-blocks",
        type=_blocks,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"blocks of sub-layers, or `full` (default: {default.num_depth_blocks})",
    )
    parser.add_argument(
        "--depth-key-rank",
        type=int,
        default=argparse.SUPPRESS,
        metavar="R",
        help=f"width of the routing keys (default: {default.depth_key_rank})",
    )


def _blocks(text: str) -> int | None:
    if text == "full":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive whole number nor `full`")
    return int(text)


def _push(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("repo_id", metavar="REPO_ID", help="owner/name; created if it does not exist")
    parser.add_argument("folder", metavar="FOLDER", help="a folder written by `save_pretrained` or `convert`")
    parser.add_argument("--private", action=argparse.BooleanOptionalAction, help="visibility of a new repository")
    parser.add_argument("--revision", help="branch to commit to (default: main)")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead")
    parser.add_argument("--commit-message", help="first line of the commit")
    parser.add_argument("--token", help="Hub token; default: the one of `hf auth login` or HF_TOKEN")
    parser.add_argument("--dry-run", action="store_true", help="check the folder and show what would be sent")

    def run(**options):
        from .hub_upload import push

        print(push(**options))

    return run


def _generate(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub repository")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="when sampling (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    _add_model_arguments(parser)
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--token", help="Hub token; default: the one of `hf auth login` or HF_TOKEN")

    def run(**options):
        from .text_generation import generate_text

        generate_text(**options)

    return run


def _train(parser: argparse.ArgumentParser) -> Callable:
    from .training_arguments import add_flags, presets

    names = " or ".join(presets())
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=f"a preset ({names}) or a YAML file; flags win")
    add_flags(parser)

    def run(config, **flags):
        with _extra("train"):
            from accelerate import PartialState

            from .training import train
        from .training_arguments import load_arguments

        folder = train(load_arguments(config, **flags))
        PartialState().print(folder)  # by one of the processes

    return run


def _evaluate(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub repository")
    parser.add_argument("data", metavar="DATA", help="a folder written by `lr-attnres prepare`")
    parser.add_argument("--split", default="validation", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of one forward (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")

    def run(split, **options):
        with _extra("train"):
            from accelerate import PartialState

            from .evaluation import evaluate_folder

        result = evaluate_folder(split=split, **options)
        text = f"{split} loss {result.loss:.6f}, perplexity {result.perplexity:.3f}, {result.tokens:,} tokens"
        PartialState().print(text)

    return run


def _serve(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("model", metavar="MODEL", help="a folder or Hub repository")
    parser.add_argument("--host", default="localhost", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    _add_model_arguments(parser)
    parser.add_argument("--continuous-batching", action="store_true", help="answer many requests together")
    parser.add_argument("--cb-num-blocks", type=int, help="blocks of its key-value cache; default: most of the memory")
    parser.add_argument("--cb-max-batch-tokens", type=int, help="tokens of one of its batches")

    def run(**options):
        from .serving import serve

        serve(**options)

    return run


def _analyze(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", help="folders or Hub repositories, to measure side by side"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        help="a folder written by `prepare` (its validation split), .txt or .jsonl files, a dataset, or `sotu`",
    )
    parser.add_argument("--output", dest="output_dir", metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument("--max-tokens", type=int, help="stop there; default: take everything")
    parser.add_argument("--sequence-length", type=int, help="of rows of text; default: the context, at most 2048")
    parser.add_argument("--batch-size", type=int, default=8, help="rows (default: %(default)s)")
    _add_model_arguments(parser)

    def run(**options):
        with _extra("analysis"):
            from .analysis import analyze, summary

            print(summary(analyze(**options)))
        print(options["output_dir"])

    return run


def _explore(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a folder or Hub repository, or two to compare")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    _add_model_arguments(parser)

    def run(**options):
        with _extra("explore"):
            from .explore import explore

            explore(**options)

    return run


def _cost(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a saved model, in place of the options")
    parser.add_argument("--paper", action="store_true", help="all rows of the paper's table, and its worked example")
    parser.add_argument("--figure", metavar="FILE", help="with --paper: draw losses against costs, as PNG and SVG")
    _add_depth_arguments(parser)
    sizes = ("hidden-size", "intermediate-size", "num-hidden-layers", "num-attention-heads", "num-key-value-heads")
    for name in (*sizes, "head-dim", "vocab-size"):
        parser.add_argument(
            f"--{name}", type=int, default=argparse.SUPPRESS, metavar="N", help="default: as in the paper's model"
        )

    def run(model, paper, figure, **fields):
        from .cost import cost_report, paper_report
        from .loading import load_config

        if (model is not None) + paper + bool(fields) > 1:
            raise ValueError("give one of MODEL, --paper and the options of a model.")
        if figure is not None and not paper:
            raise ValueError("--figure draws the paper's table: give --paper too.")
        if figure is not None:
            with _extra("analysis"):
                from .plots import draw_paper

                draw_paper(figure)
        if paper:
            return print(paper_report())
        print(cost_report(load_config(model) if model is not None else LRAttnResConfig(**fields)))

    return run


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """A package that is not installed becomes the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        command = f'pip install "lr-attnres[{name}]", or in a clone pip install ".[{name}]"'
        raise ImportError(f"{error.name} is not installed: {command}") from error


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="default: as saved")


# name -> what it does, an example, and the function that adds its arguments and returns what to call
COMMANDS = {
    "prepare": (
        "Turn text or a dataset into packed rows of tokens for training; run again to go on, or to check the result.",
        "lr-attnres prepare sotu outputs/data --train-tokenizer 2048 --sequence-length 256 --validation-fraction 0.1",
        _prepare,
    ),
    "train": (
        "Train a model by the paper's recipe; `accelerate launch -m lr_attnres.cli train ...` uses several GPUs.",
        "lr-attnres train tiny --data outputs/data --output-dir outputs/run --variant sliced-n4-r16",
        _train,
    ),
    "evaluate": (
        "Loss over every token of a split, the same for any number of processes.",
        "lr-attnres evaluate outputs/run/model outputs/data",
        _evaluate,
    ),
    "convert": (
        "Convert a released training checkpoint into a folder for from_pretrained and push.",
        "lr-attnres convert Jonnester/LR-AttnRes-LR-n8-r32 outputs/n8-r32 --dtype bfloat16 --verify",
        _convert,
    ),
    "upgrade": (
        "Turn a pretrained Llama, Mistral or Qwen3 into an LR-AttnRes model with the same logits.",
        "lr-attnres upgrade Qwen/Qwen3-0.6B outputs/upgraded --residual-type sliced --num-depth-blocks 8 --verify",
        _upgrade,
    ),
    "push": (
        "Check a saved folder and send it to the Hub in one commit.",
        "lr-attnres push owner/name outputs/run/model --private --dry-run",
        _push,
    ),
    "generate": (
        "Continue a prompt, printing the text as it is made.",
        'lr-attnres generate outputs/run/model --prompt "The sea is" --max-new-tokens 32',
        _generate,
    ),
    "serve": (
        "Serve a model with an OpenAI-compatible API.",
        "lr-attnres serve outputs/run/model --port 8000 --continuous-batching --cb-num-blocks 64",
        _serve,
    ),
    "analyze": (
        "Measure over held-out text where each site reads; writes JSON, safetensors and figures.",
        "lr-attnres analyze outputs/run/model --data outputs/data --output outputs/analysis --max-tokens 1000000",
        _analyze,
    ),
    "explore": (
        "Open a local web page: generate text, click a token, see where each site read for it.",
        "lr-attnres explore outputs/run/model --port 7860",
        _explore,
    ),
    "cost": (
        "Print what depth routing costs: multiply-adds, parameters, activations.",
        "lr-attnres cost --residual-type projected --num-depth-blocks full --depth-key-rank 32",
        _cost,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
