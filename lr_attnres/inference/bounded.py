"""Transformers' OpenAI-compatible server for one model, with bounds on what a request may cost.

Transformers parses requests, batches them and builds answers. This module refuses what Transformers would ignore,
limits lengths, and gives every request of a batch its own settings.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from jinja2 import TemplateError
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerationState
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ..errors import one_line


# Not /load_model and /reset, with which a client could replace or unload the model.
OFFERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
RANGES = dict.fromkeys(LENGTHS, (1, 2**63 - 1)) | {"seed": (0, 2**63 - 1), "temperature": (0, 100), "top_p": (0, 1)}
# Fields that Transformers ignores or understands differently -> the value without effect. The last two would let a
# client set every option of the tokenizer and of `generate`.
UNSUPPORTED: dict[str, Any] = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0}
UNSUPPORTED |= {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "response_format": {"type": "text"}}
UNSUPPORTED |= {"previous_response_id": "", "chat_template_kwargs": {}, "generation_config": ""}
# What Transformers raises for messages of a wrong form.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError)
GREEDY = 1e-4  # logits divided by a smaller temperature may be infinite


def refuse(reason: str) -> HTTPException:
    return HTTPException(status_code=400, detail=reason)


def check_request(body: dict) -> None:
    """Raise for a field that would be ignored and for a value that cannot be used."""
    for name, neutral in UNSUPPORTED.items():
        if body.get(name) is not None and body[name] != neutral:
            raise refuse(f"`{name}` is not supported: leave it out.")
    for name, (least, most) in RANGES.items():
        kinds = (int, float) if name in ("temperature", "top_p") else (int,)
        value = body.get(name)
        if value is not None and not (type(value) in kinds and least <= value <= most):
            raise refuse(f"`{name}` is {value!r}; it must be a number in {least}..{most}.")
    texts = stop_texts(body.get("stop"))
    if len(texts) > 4 or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in texts):
        raise refuse("`stop` must be a text or a list of at most 4 texts, each of 1 to 256 characters.")


def stop_texts(stop: Any) -> list:
    return stop if isinstance(stop, list) else [] if stop is None else [stop]


class BoundedHandler(BaseHandler):
    """Goes before one of Transformers' handlers in the bases of a class."""

    max_new_tokens: int

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """With an id of our own: two clients that choose the same one would get each other's answers."""
        check_request(body)
        body.setdefault("stream", False)  # Transformers' /v1/responses streams by default
        try:
            return await super().handle_request(body, str(uuid4()))
        except MALFORMED as error:
            raise refuse(f"the request cannot be used: {type(error).__name__}: {one_line(error)}") from error

    def _build_generation_config(
        self, body: dict, model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> Any:
        seed = body.pop("seed", None)  # Transformers would seed all requests with it
        config = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        config.max_new_tokens = next((body[name] for name in LENGTHS if body.get(name)), self.max_new_tokens)
        config.stop_strings = stop_texts(body.get("stop") or config.stop_strings)
        if body.get("temperature") is not None or body.get("top_p") is not None:
            config.do_sample = body.get("temperature") is None or body["temperature"] >= GREEDY
        config.seed = seed
        return config


class Answer:
    """How the tokens of one answer are chosen, and when it is over."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: Any, prompt_length: int):
        model._prepare_special_tokens(config, device=model.device)
        self.processors = model._get_logits_processor(config, input_ids_seq_length=prompt_length, device=model.device)
        self.tokenizer, self.stop_texts = tokenizer, config.stop_strings
        self.longest_stop = 4 * max(map(len, self.stop_texts), default=0)  # tokens: a character has up to four bytes
        self.generator = None
        if config.do_sample:
            self.generator = torch.Generator(model.device)  # its own: others draw at the same time
            self.generator.seed() if config.seed is None else self.generator.manual_seed(config.seed)

    def __deepcopy__(self, memo: dict) -> "Answer":
        return self  # Transformers copies a request to start it again

    def process(self, tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        """The logits after `tokens` -> [1, vocabulary], of which the largest is the next token."""
        if self.processors:
            scores = self.processors(torch.tensor([tokens], device=scores.device), scores)
        if self.generator is None:
            return scores
        return scores.softmax(-1) / torch.empty_like(scores).exponential_(generator=self.generator)  # Gumbel-max

    def is_over(self, tokens: list[int]) -> bool:
        if not self.stop_texts:
            return False
        text = self.tokenizer.decode(tokens[-self.longest_stop :], skip_special_tokens=True)
        return any(stop in text for stop in self.stop_texts)


class PerRequest(ContinuousBatchingLogitsProcessorList):
    """Processes each row of a batch as its request asks, where Transformers has one way for all."""

    def __init__(self) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing, self.supported_keys = True, {"answer": Answer}

    def prepare_tensor_args(self, requests_in_batch: list, arg_storage: torch.Tensor) -> torch.Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self.rows = [(state.logit_processor_kwargs["answer"], state.to_generation_output()) for state in states]
        for state, (answer, output) in zip(states, self.rows):
            if answer.is_over(output.generated_tokens):
                state._new_tokens_limit = state.generated_len() + 1  # the next token is the last
        return arg_storage

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: torch.Tensor) -> Any:
        rows = zip(self.rows, scores.split(1))
        results = [answer.process(out.prompt_ids + out.generated_tokens, row) for (answer, out), row in rows]
        return torch.cat([*results, scores[len(results) :]])  # the last rows may be of prompts that continue


class Batch(ContinuousBatchingManager):
    answer: Answer  # of the request that is added next

    def __init__(self, model: PreTrainedModel, settings: ContinuousBatchingConfig):
        super().__init__(model, GenerationConfig(eos_token_id=-1), settings)
        self.logit_processor = PerRequest()

    def add_request(self, *inputs: Any, **options: Any) -> Any:
        # Later: right after this call, Transformers registers the receiver of the answer.
        add = partial(super().add_request, *inputs, **options, answer=self.answer)
        asyncio.get_running_loop().call_soon(add)
        return options["request_id"]

    def cancel_request(self, request_id: str) -> None:
        super().cancel_request(request_id)
        self.output_router.result_handlers.pop(request_id, None)


class BoundedManager(CBGenerateManager):
    def __init__(self, model: PreTrainedModel, settings: ContinuousBatchingConfig, context: int):
        super().__init__(settings)
        self.context = context
        self._cb: Batch = Batch(model, settings)
        self._cb.start()

    def admit(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict, config: Any) -> None:
        """Prompt and answer together never exceed the context."""
        length = len(inputs["input_ids"])
        if length == 0:
            raise refuse("the prompt is empty: give the model some text to continue.")
        if length >= self.context:
            sizes = f"the prompt has {length:,} tokens, but the context of this server is {self.context:,}"
            raise refuse(f"{sizes}: shorten it.")
        config.max_new_tokens = min(config.max_new_tokens, self.context - length)
        self._cb.answer = Answer(model, tokenizer, config, length)

    def generate_streaming(self, model: Any, processor: Any, inputs: dict, gen_config: Any, **request: Any) -> Any:
        self.admit(model, processor, inputs, gen_config)
        pieces, streamer = super().generate_streaming(model, processor, inputs, gen_config, **request)
        if texts := gen_config.stop_strings:
            pieces = SimpleNamespace(get=cut_pieces(pieces, texts).__anext__, get_nowait=asyncio.Queue().get_nowait)
        return pieces, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict, gen_config: Any, request_id: str
    ) -> Any:
        self.admit(model, processor, inputs, gen_config)  # nothing is awaited before the request is added
        try:
            answer, *rest = await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except asyncio.CancelledError:
            self._cb.cancel_request(request_id)
            raise
        return cut(answer, gen_config.stop_strings), *rest

    def stop(self) -> None:
        self._cb.stop(block=True, timeout=5, hard_stop=True)


def cut(answer: str, texts: list[str]) -> str:
    """Without the first of the texts and what follows: OpenAI's answers do not contain them."""
    return answer[: min((answer.find(text) for text in texts if text in answer), default=None)]


async def cut_pieces(pieces: asyncio.Queue, texts: list[str]) -> AsyncIterator[Any]:
    """Pieces of an answer, as `cut` leaves it. The last characters wait: they may begin one of the texts."""
    answer, sent, waiting = "", 0, max(map(len, texts)) - 1
    while (piece := await pieces.get()) is not None:
        if not isinstance(piece, str):
            yield piece  # the call of a tool, or an error
            continue
        answer += piece
        end = len(cut(answer, texts))
        end = end if end < len(answer) else end - waiting
        if end > sent:
            yield answer[sent:end]
            sent = end
    yield cut(answer, texts)[sent:]
    yield None


# The server


class EndsWithItsClient:
    """Cancels the work for a client that has left. Starlette does that for streams alone."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body_was_read = asyncio.Event()

        async def receive_body() -> Any:
            message = await receive()
            if not message.get("more_body"):
                body_was_read.set()
            return message

        async def end_with_client() -> None:
            await body_was_read.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            work.cancel()

        work = asyncio.create_task(self.app(scope, receive_body, send))
        watcher = asyncio.create_task(end_with_client())
        try:
            await asyncio.wait([work])
        finally:
            watcher.cancel()
            work.cancel()
        if not work.cancelled():
            work.result()


class ServedModel(ModelManager):
    """The only model, loaded already."""

    process_model_name = staticmethod(str)  # the name in answers is the one that was asked for

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.force_model, self.served = name, (model, tokenizer)
        self.loaded_models: dict = {}  # nothing to unload
        self.entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "lr-attnres"}

    def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
        return self.served

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:
        return [self.entry]


def error_answer(status: int, message: Any) -> JSONResponse:
    """In OpenAI's form, of which the `openai` client shows the message."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def make_app(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    max_new_tokens: int,
    batching: ContinuousBatchingConfig,
) -> tuple[FastAPI, GenerationState]:
    """The application, and its state, which must be shut down."""
    state = GenerationState(continuous_batching=True)
    state._cb_manager, state._cb_model_id = BoundedManager(model, batching, context), name
    served = ServedModel(name, model, tokenizer)
    handlers: list[Any] = [ChatCompletionHandler, CompletionHandler, ResponseHandler]
    bounds = {"max_new_tokens": max_new_tokens}
    handlers = [type(handler.__name__, (BoundedHandler, handler), bounds)(served, state) for handler in handlers]
    app = build_server(served, *handlers, None, None, state)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in OFFERED]
    limit = max(2**18, 16 * context)

    @app.exception_handler(HTTPException)
    async def explain(request: Request, error: HTTPException) -> JSONResponse:
        return error_answer(error.status_code, error.detail)

    @app.middleware("http")
    async def limit_body(request: Request, call_next: Any) -> Response:
        """Refuses a large body without reading it, and one of unknown length."""
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers:
            return error_answer(411, "the request has no content-length.")
        if int(length) > limit:
            return error_answer(413, f"the body has {int(length):,} bytes; the limit is {limit:,}.")
        return await call_next(request)

    app.add_middleware(EndsWithItsClient)
    return app, state
