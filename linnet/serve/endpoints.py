"""Turns a checked body of /v1/completions or /v1/chat/completions into requests for the engine."""

from collections.abc import Mapping

from linnet.config import parse
from linnet.inference import Piece, Sampling
from linnet.serve.answer import Answer
from linnet.serve.body import parse_json
from linnet.serve.errors import ApiError
from linnet.serve.formats import ChatFormat, CompletionFormat, Format
from linnet.serve.requests import ChatRequest, CompletionRequest, GenerationRequest
from linnet.serve.scoring import Echo
from linnet.serve.service import Service

DEFAULT_TOKENS = 16  # default of max_tokens for completions, as in OpenAI's API; chats have no such default


class Prepared:
    """A checked and encoded request. It is made in another thread, because encoding may take long.

    Attributes:
        choices: for each completion, the token ids of its prompt and its sampling settings.
        prompt_tokens: number of tokens of all prompts; each prompt counts once.
        form: format of the response.
        score: the argument `score` of `Answer`.
        generates: False if `max_tokens` is 0, so that prompts are only echoed and scored.
    """

    def __init__(self, request: GenerationRequest):
        self.request = request
        self.choices: list[tuple[list[int], Sampling]] = []
        self.prompt_tokens = 0
        self.form: Format
        self.score: list[tuple[Echo, int]] = []
        self.generates = True

    def answer(self, service: Service, started: float) -> Answer:
        """Submits the choices to the engine and returns the response. Raises `ApiError` if the server is full."""
        call = service.open(self.choices if self.generates else [], self.request.stream)
        if not self.generates:
            call.running = len(self.choices)
            for index in range(len(self.choices)):
                call.push(index, Piece(None, finish="length"))
        options = self.request.stream_options
        return Answer(
            service,
            call,
            self.form,
            prompt_tokens=self.prompt_tokens,
            stream=self.request.stream,
            show_usage=options is not None and options.include_usage,
            score=self.score,
            started=started,
        )


def prepare_completion(service: Service, body: bytes) -> Prepared:
    """Returns the checked body of /v1/completions. Raises `ApiError` or `ConfigError` with all of its problems."""
    request = parse(CompletionRequest, parse_json(body), "request", large_integers=True)
    check_model(service, request.model)
    _check_count(service, len(request.prompt) * request.n)
    prepared = Prepared(request)
    prepared.form = form = CompletionFormat(
        service.names, request.model, request.stream, request.logprobs is not None, request.return_token_ids
    )
    prepared.generates = request.max_tokens != 0
    given = request.max_tokens if "max_tokens" in request.model_fields_set else None
    for number, prompt in enumerate(request.prompt):
        key = "prompt" if len(request.prompt) == 1 else f"prompt[{number}]"
        tokens, most = service.tokens(prompt, given, DEFAULT_TOKENS, key)
        ids = tokens.tolist()
        first = len(prepared.choices)
        settings = max(most, 1), request.logprobs, _defaults(service)
        prepared.choices += [(tokens, request.sampling(i, *settings)) for i in range(request.n)]
        prepared.prompt_tokens += len(ids)
        if request.echo:
            scored = request.logprobs is not None
            echo = Echo.of(prompt, ids, service.engine.tokenizer, prepared.generates, scored)
            form.echoes |= dict.fromkeys(range(first, first + request.n), echo)
            if scored:
                prepared.score.append((echo, request.logprobs))
    _check_engine(service, prepared)
    return prepared


def prepare_chat(service: Service, body: bytes) -> Prepared:
    """Returns the checked body of /v1/chat/completions. Raises `ApiError` or `ConfigError` with all of its problems."""
    request = parse(ChatRequest, parse_json(body), "request", large_integers=True)
    check_model(service, request.model)
    _check_count(service, request.n)
    if service.template is None:
        message = (
            f"model: {request.model!r} has no chat template; use /v1/completions, or put chat_template.jinja into its "
            "folder"
        )
        raise ApiError(404, message, param="model", code="no_chat_template")
    prepared = Prepared(request)
    top = (request.top_logprobs or 0) if request.logprobs else None
    prepared.form = ChatFormat(
        service.names, request.model, request.stream, request.logprobs, request.return_token_ids, bool(request.offered)
    )
    if request.offered and not service.template.knows_tools:
        message = f"tools: the chat template of {request.model!r} shows the model no tools; leave it out"
        raise ApiError(400, message, param="tools", code="no_tools")
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    given = request.max_completion_tokens or request.max_tokens
    tokens, most = service.tokens(service.template.encode(messages, request.offered), given, None, "messages")
    prepared.prompt_tokens = len(tokens)
    for i in range(request.n):
        sampling = request.sampling(i, most, top, _defaults(service))
        ends = [] if request.ignore_eos else service.template.turn_ends
        sampling = sampling.model_copy(update={"stop_tokens": [*sampling.stop_tokens, *ends]})
        prepared.choices.append((tokens, sampling))
    _check_engine(service, prepared)
    return prepared


def check_model(service: Service, model: str) -> None:
    """Raises `ApiError` 404 unless `model` is the model of this server."""
    if model != service.engine.name:
        message = f"model: {model[:200]!r} is not served here; use {service.engine.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def model_card(service: Service) -> dict:
    return {"id": service.engine.name, "object": "model", "created": service.created, "owned_by": "linnet"}


def _check_count(service: Service, count: int) -> None:
    if count > (most := min(service.settings.max_choices, service.capacity)):
        message = f"n: {count} completions (prompts times n) are too many for one request; ask for at most {most}"
        raise ApiError(400, message, param="n", code="invalid_value")


def _defaults(service: Service) -> Mapping[str, float]:
    """Returns what the served model draws tokens with unless a request says otherwise."""
    return {} if service.engine.tokenizer is None else service.engine.tokenizer.sampling


def _check_engine(service: Service, prepared: Prepared) -> None:
    """Runs the engine's own checks, such as stop strings without a tokenizer. All choices share these settings."""
    service.engine.check(*prepared.choices[0])
