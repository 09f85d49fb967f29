"""``/rounds/chat`` and ``/rounds/completions``: the rounds of a search, one event each, while they happen.

They take the bodies of OpenAI's endpoints, so everything that shapes a text works here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from specbeam.models.prompts import last_message
from specbeam.recording.events import begin, end, event_line, rounds
from specbeam.server.call import Call
from specbeam.server.chat import ChatRequest
from specbeam.server.completions import CompletionRequest
from specbeam.server.errors import Refusal
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.server.streams import frame


class WatchedRequest:
    """A request for one text or one search by beams, whose answer is its rounds.

    Args:
        fields: the request, as OpenAI's endpoint takes it.
    """

    def __init__(self, fields: ChatRequest | CompletionRequest) -> None:
        self.model = fields.model
        self.stream: bool | None = True
        self._fields = fields

    def call(self, model: ServedModel, limits: Limits) -> Call:
        """The request to the engine.

        Raises:
            Refusal: the request is for several searches, or for an answer of another form.
        """
        fields = self._fields
        if fields.stream is False:
            raise Refusal("stream: false is not supported: rounds come as a stream", "stream")
        if fields.stream_options is not None:
            raise Refusal("stream_options is not supported: the last event always has the cost", "stream_options")
        if getattr(fields, "echo", None):
            raise Refusal("echo is not supported: the first event always has the prompt", "echo")
        if fields.return_token_ids:
            raise Refusal("return_token_ids is not supported: events always have token ids", "return_token_ids")
        call = fields.model_copy(update={"trace": True}).call(model, limits)
        if len(call.prompts) > 1:
            raise Refusal("several prompts are not supported: send one request for each", "prompt")
        if call.plan.draws > 1:
            name = "best_of" if fields.best_of else "n"
            raise Refusal(f"{name}: several samples are not supported: send one request for each", name)
        return call

    def answer(self, call: Call) -> Rounds:
        return Rounds(call)


class Rounds:
    """The events of a call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames of the stream. Rounds that came together leave together."""
        call, plan = self._call, self._call.plan
        (request,) = call.requests
        draft = next(name for name, one in call.model.drafts.items() if one is plan.draft)
        message = last_message(call.model.lm, call.prompts[0], raw=call.raw)
        yield frame(event_line(begin(call.model.lm, request.prompt_ids, plan.options, draft, message)))
        async for received in call.pieces():
            events = [event for _, piece in received for event in rounds(piece.trace or [])]
            events += [end(piece.result) for _, piece in received if piece.result is not None]
            if events:
                yield b"".join(frame(event_line(event)) for event in events)
