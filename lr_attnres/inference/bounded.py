"""Transformers' OpenAI-compatible server for one model, with bounds on what a request may cost.

Transformers parses requests and builds answers; this module refuses what Transformers would ignore, limits lengths,
and gives every request of a batch its own sampling settings. A batch can follow neither `stop` nor `seed`: requests
with one of them run one after the other beside the batch.
"""

import asyncio
import copy
import threading
import time
from contextvars import ContextVar
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerateManager, GenerationState, Modality
from transformers.generation import logits_process as logits
from transformers.generation.continuous_batching import cb_logits_processors as per_request
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from ..errors import one_line


# Not /load_model and /reset, with which a client could replace or unload the model.
OFFERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
RANGES = dict.fromkeys((*LENGTHS, "seed"), (1, 2**63 - 1)) | {"temperature": (0, 100), "top_p": (0, 1)}
RANGES["seed"] = (0, 2**63 - 1)
# Fields that Transformers ignores or understands differently -> the value without effect. The last two would let a
# client set every option of the tokenizer and of `generate`.
UNSUPPORTED: dict[str, Any] = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0}
UNSUPPORTED |= {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "response_format": {"type": "text"}}
UNSUPPORTED |= {"previous_response_id": "", "chat_template_kwargs": {}, "generation_config": ""}
# What Transformers raises for messages of a wrong form.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError)
GREEDY = 1e-4  # logits divided by a smaller temperature may be infinite
is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)  # the request cannot be part of a batch


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
    if not all(isinstance(text, str) and text for text in stop_texts(body.get("stop"))):
        raise refuse("`stop` must be a text or a list of texts, none of them empty.")


def stop_texts(stop: Any) -> list:
    return stop if isinstance(stop, list) else [] if stop is None else [stop]


class BoundedHandler(BaseHandler):
    """Goes before one of Transformers' handlers in the bases of a class."""

    max_new_tokens: int

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """With an id of our own: two clients that choose the same one would get each other's answers."""
        check_request(body)
        body.setdefault("stream", False)  # Transformers' /v1/responses streams by default
        is_alone.set(bool(body.get("stop")) or body.get("seed") is not None)
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
        if body.get("temperature") is not None or body.get("top_p") is not None:
            config.do_sample = body.get("temperature") is None or body["temperature"] >= GREEDY
        config.temperature = 1.0 if config.temperature is None else float(config.temperature)
        config.top_p = 1.0 if config.top_p is None else float(config.top_p)
        config.top_k = config.top_k or 0  # None would mean 50
        config.seed = seed
        return config


def fit(inputs: dict, config: Any, context: int) -> int:
    """The length of the prompt. Prompt and answer together never exceed the context."""
    tokens = inputs["input_ids"]
    length = len(tokens) if isinstance(tokens, list) else tokens.shape[-1]
    if length == 0:
        raise refuse("the prompt is empty: give the model some text to continue.")
    if length >= context:
        raise refuse(f"the prompt has {length:,} tokens, but the context of this server is {context:,}: shorten it.")
    config.max_new_tokens = min(config.max_new_tokens, context - length)
    return length


class GreedyOrTemperature(per_request.ContinuousBatchingTemperatureLogitsWarper):
    """Temperature 0 keeps what `argmax` takes. `top_k=1` would draw among equal logits, frequent in bfloat16."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        temperatures = tensor_arg[: len(scores)].view(torch.float32)[:, None]
        best = torch.full_like(scores, float("-inf")).scatter_(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(temperatures == 0, best, scores / temperatures)


class TopP(per_request.ContinuousBatchingTopPLogitsWarper):
    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if scores.is_cpu and (tensor_arg[: len(scores)].view(torch.float32) == 1).all():
            return scores  # sorting the vocabulary would take longer than the forward of a small model
        return super().__call__(scores, tensor_arg)


class Batch(ContinuousBatchingManager):
    sampling: dict[str, Any] = {}  # of the request that is added next

    def __init__(self, model: PreTrainedModel, settings: ContinuousBatchingConfig):
        super().__init__(model, GenerationConfig(do_sample=True, eos_token_id=-1), settings)
        top_k = model.generation_config.top_k
        processors: list[Any] = [GreedyOrTemperature(logits.TemperatureLogitsWarper(1.0))]
        processors += [logits.TopKLogitsWarper(top_k)] if top_k else []
        processors += [TopP(logits.TopPLogitsWarper(1.0))]
        self.logit_processor = per_request.ContinuousBatchingLogitsProcessorList(
            logits.LogitsProcessorList(processors)
        )
        self.logit_processor.tensors_required = 2  # temperature and top_p

    def add_request(self, *inputs: Any, **options: Any) -> Any:
        # Not before Transformers, which does it next, has registered who receives the answer.
        add = partial(super().add_request, *inputs, **options, **self.sampling)
        asyncio.get_running_loop().call_soon(add)
        return options["request_id"]

    def cancel_request(self, request_id: str) -> None:
        super().cancel_request(request_id)
        self.output_router.result_handlers.pop(request_id, None)


class BatchedManager(CBGenerateManager):
    def __init__(self, model: PreTrainedModel, settings: ContinuousBatchingConfig, context: int):
        super().__init__(settings)
        self.context = context
        self._cb: Batch = Batch(model, settings)
        self._cb.start()

    def admit(self, inputs: dict, config: Any) -> None:
        fit(inputs, config, self.context)
        self._cb.sampling = {"temperature": config.temperature if config.do_sample else 0.0, "top_p": config.top_p}

    def generate_streaming(self, model: Any, processor: Any, inputs: dict, gen_config: Any, **request: Any) -> Any:
        self.admit(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **request)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict, gen_config: Any, request_id: str
    ) -> Any:
        self.admit(inputs, gen_config)  # nothing is awaited before the request is added
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def stop(self) -> None:
        self._cb.stop(block=True, timeout=5, hard_stop=True)


class SeededNoise(logits.LogitsProcessor):
    """Makes argmax a sample (Gumbel-max), with a generator of its own: the batch draws at the same time."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty(scores.shape).exponential_(generator=self.generator).to(scores.device)
        return scores.log_softmax(-1) - noise.log()


class Stop(StoppingCriteria):
    """Ends an answer that contains one of the texts, and every answer when the server ends."""

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerBase, start: int, ended: threading.Event):
        self.texts, self.tokenizer, self.start, self.ended = texts, tokenizer, start, ended

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        answer = self.tokenizer.decode(input_ids[0, self.start :], skip_special_tokens=True) if self.texts else ""
        done = self.ended.is_set() or any(text in answer for text in self.texts)
        return torch.full((1,), done, dtype=torch.bool, device=input_ids.device)


def cut(answer: str, texts: list[str]) -> str:
    """Without the first of the texts and what follows: OpenAI's answers do not contain them."""
    return answer[: min((answer.find(text) for text in texts if text in answer), default=None)]


class OneByOneManager(GenerateManager):
    def __init__(self, model: PreTrainedModel, context: int):
        super().__init__()
        # The same weights under a config of its own: a forward of the batch changes its config (`is_causal`) while it
        # runs, and another thread would attend to later tokens.
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self.context, self.ended = context, threading.Event()

    def admit(self, tokenizer: PreTrainedTokenizerBase, inputs: dict, config: Any) -> tuple[dict, list]:
        """The arguments of `generate`, and the texts that end the answer."""
        length, texts = fit(inputs, config, self.context), stop_texts(config.stop_strings)
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        arguments["stopping_criteria"] = StoppingCriteriaList([Stop(texts, tokenizer, length, self.ended)])
        if config.do_sample and config.seed is not None:
            warpers: list[Any] = [logits.TemperatureLogitsWarper(config.temperature)]
            warpers += [logits.TopKLogitsWarper(config.top_k)] if config.top_k else []
            warpers += [logits.TopPLogitsWarper(config.top_p), SeededNoise(config.seed)]
            arguments["logits_processor"] = logits.LogitsProcessorList(warpers)
            config.do_sample = False
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        config.stop_strings = config.seed = None  # done here
        return arguments, texts

    def generate_streaming(self, model: Any, processor: Any, inputs: dict, gen_config: Any, **request: Any) -> Any:
        inputs, texts = self.admit(processor, inputs, gen_config)
        pieces, streamer = super().generate_streaming(self.model, processor, inputs, gen_config, **request)
        return (CutQueue(pieces, texts) if texts else pieces), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict, gen_config: Any, request_id: str
    ) -> Any:
        inputs, texts = self.admit(processor, inputs, gen_config)
        answer, *rest = await super().generate_non_streaming(self.model, processor, inputs, gen_config, request_id)
        return cut(answer, texts), *rest

    def stop(self) -> None:
        self.ended.set()


class CutQueue:
    """Pieces of an answer up to a text that ends it. The last characters wait: they may be part of such a text."""

    def __init__(self, pieces: asyncio.Queue, texts: list[str]):
        self.pieces, self.texts, self.answer, self.sent = pieces, texts, "", 0
        self.last: list[Any] = []

    async def get(self) -> Any:
        if self.last:
            return self.last[0]
        piece = await self.pieces.get()
        self.answer += piece if isinstance(piece, str) else ""
        end = len(kept := cut(self.answer, self.texts))
        if isinstance(piece, str):
            end = end if end < len(self.answer) else end - max(map(len, self.texts)) + 1
        else:
            self.last = [piece]  # None, or an error
        start, self.sent = self.sent, max(self.sent, end)
        return kept[start : self.sent]

    def get_nowait(self) -> Any:
        raise asyncio.QueueEmpty


class BoundedState(GenerationState):
    def __init__(self, one_by_one: OneByOneManager, batched: BatchedManager | None):
        super().__init__(continuous_batching=batched is not None)
        self.one_by_one, self._cb_manager = one_by_one, batched

    def use_continuous_batching(self, model: PreTrainedModel, modality: Modality) -> bool:
        return self._cb_manager is not None and not is_alone.get()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self._cb_manager if use_cb else self.one_by_one

    def shutdown(self) -> None:
        self.one_by_one.stop()
        super().shutdown()


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


class BodyLimit:
    """Answers 413 to a body of more than `limit` bytes without reading it; 400 if its length was not announced."""

    def __init__(self, app: Any, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        received = 0

        async def counted() -> dict:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                raise refuse(f"the body is larger than {self.limit:,} bytes.")
            return message

        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            answer = error_answer(413, f"the body has {int(length):,} bytes; the limit is {self.limit:,}.")
            return await answer(scope, receive, send)
        await self.app(scope, counted, send)


def error_answer(status: int, message: Any) -> JSONResponse:
    """In OpenAI's form, of which the `openai` client shows the message."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def make_app(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    max_new_tokens: int,
    batching: ContinuousBatchingConfig | None,
) -> tuple[FastAPI, BoundedState]:
    """The application, and its state, which must be shut down. Without `batching` all requests run one by one."""
    batched = BatchedManager(model, batching, context) if batching is not None else None
    state = BoundedState(OneByOneManager(model, context), batched)
    served = ServedModel(name, model, tokenizer)
    handlers: list[Any] = [ChatCompletionHandler, CompletionHandler, ResponseHandler]
    bounds = {"max_new_tokens": max_new_tokens}
    handlers = [type(handler.__name__, (BoundedHandler, handler), bounds)(served, state) for handler in handlers]
    app = build_server(served, *handlers, None, None, state)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in OFFERED]

    @app.exception_handler(HTTPException)
    async def explain(request: Request, error: HTTPException) -> JSONResponse:
        return error_answer(error.status_code, error.detail)

    app.add_middleware(BodyLimit, limit=max(2**18, 16 * context))
    return app, state
