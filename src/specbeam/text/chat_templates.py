"""Chat templates, rendered in a process of their own.

A chat template is a program that comes with a checkpoint. Jinja's sandbox keeps it from files, but lets it take all
memory and time. So templates run in a child process with limits (:mod:`specbeam.system.child_processes`), which is this
module run as a program.
:mod:`specbeam.text.template_sandbox` renders, with transformers' results.

Most templates read the content of a message as a text, and some read it only as a list of parts. The child finds out
which, once per template and role, by rendering a short text in both forms (:func:`_reads_parts`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from specbeam.system import child_processes

CPU_SECONDS = 2.0
"""Processor time for one prompt. Most take a millisecond. Time in which the child waits for a processor is free."""
MEMORY_BYTES, MEMORY_PER_BYTE = 256 << 20, 32
"""Memory for one prompt beside what the child has at its start, and more for each byte of the messages."""
MAX_CHARACTERS, CHARACTERS_PER_BYTE = 1 << 20, 8
"""The longest prompt that a template may write, and more for each byte of the messages."""
MAX_REASON_CHARACTERS = 300
OWN_NAMES = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "self",
    "tools",
)
"""Variables of a template that no caller may set: they are arguments of transformers' and Jinja's functions."""
END = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark for the end of a message that is to be continued. A template that trims it removes the space."""
PROBE = "zqprobezq"
"""A text that no template has of its own. No filter that is usual in templates changes more than its case."""
LANGUAGES = ("source_lang_code", "target_lang_code")
"""The fields of a part that TranslateGemma's template reads. A text with one of them is always given as a part."""
THOUGHT_PARTS = re.compile(r"""'\[THINK\]' *[+~] *\w+(\[['"]thinking['"]\]|\.thinking)""")
"""In Mistral's templates, which read thoughts as a part of the content, and not as a field of the message."""
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
"""A call, before a result that a template may read only behind one. Mistral's templates ask for such an id."""
MAX_PROBED = 1024
"""Templates and roles whose form of content is remembered."""
OUT_OF_MEMORY, TOO_LONG = 64, 65
"""Exit statuses of the child."""


class Renderer(child_processes.Worker):
    """The child process."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        super().__init__(__file__)
        self._cpu_seconds = cpu_seconds

    def __call__(self, template: Any, messages: Sequence[Mapping[str, Any]], adapts: bool = True, /, **how: Any) -> str:
        """The text that a template makes of messages. Threads take turns.

        Args:
            template: its source.
            messages: the template sees no fields that are None, as in transformers.
            adapts: a template that reads lists of parts gets each content that is a text as one part, and arguments of
                tool calls are written as JSON. Without it, the text is transformers' in any case.
            how: ``add_generation_prompt`` or ``continue_final_message`` (true, or the name of the field that is
                continued), and further variables of the template.

        Raises:
            ValueError: the template refuses the messages, leaves out their text, or exceeds a limit.
        """
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        task = {**how, "conversations": [given], "chat_template": template}
        try:
            text, refusal = _read(self.ask(_line([self._cpu_seconds, adapts, task])))
        except child_processes.Ended as error:
            raise ValueError(self._reason(error.status)) from None
        if refusal is not None:
            raise ValueError(refusal)
        return str(text)

    def _reason(self, status: int) -> str:
        """Why the child ended while it rendered."""
        if status == OUT_OF_MEMORY:
            return f"it needs more than {MEMORY_BYTES >> 20} MB of memory"
        if status == TOO_LONG:
            return f"it writes more than {MAX_CHARACTERS:,} characters"
        if child_processes.ran_out_of_time(status):
            return f"it needs more than {self._cpu_seconds:g} seconds of processor time"
        return f"the process that renders it ended with status {status}"


render = Renderer()
"""The one of this process."""


def _line(value: Any) -> bytes:
    """One line of JSON. Texts may hold half a surrogate pair: the tokenizer refuses it, with a message of its own."""
    return json.dumps(value, ensure_ascii=False, default=str).encode(errors="surrogatepass") + b"\n"


def _read(line: bytes) -> Any:
    return json.loads(line.decode(errors="surrogatepass"))


def _rendered(task: Mapping[str, Any]) -> str:
    """The text of a task.

    Raises:
        ValueError: the last message is to be continued, and the template leaves it out or cuts its end.
    """
    from specbeam.text.template_sandbox import REASONING, render

    own = ("chat_template", "conversations", "continue_final_message")
    variables = {name: value for name, value in task.items() if name not in own}
    template, (messages,) = task["chat_template"], task["conversations"]
    continued = task.get("continue_final_message")
    if not continued:
        return render(template, messages, variables)
    field = continued if isinstance(continued, str) else "content"
    if not any(name in template for name in (REASONING if field in REASONING else (field,))):
        raise ValueError(f"it does not read the {field} that is to be continued")
    *earlier, last = messages
    last, begun = _marked(last, field)
    text = render(template, [*earlier, last], variables)
    if begun.strip() not in text or END.strip() not in text:
        raise ValueError("it leaves out the message that is to be continued")
    text, _, rest = text.rpartition(END.strip())
    return text if rest.startswith(" ") else text.rstrip()  # a template that trims messages trims this one


def _marked(message: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """A message with a mark at the end of a field's text, and that text. All copies of its reasoning are marked."""
    from specbeam.text.template_sandbox import REASONING, with_reasoning

    message = with_reasoning(message)
    content = message.get(field)
    if isinstance(content, str):
        copies = [name for name in REASONING if message.get(name) == content] if field in REASONING else [field]
        return message | dict.fromkeys(copies, content + END), content
    parts: list[dict[str, Any]] = content or []
    for i, part in reversed([*enumerate(parts)]):
        if "text" in part:
            marked = part | {"text": part["text"] + END}
            return message | {field: [*parts[:i], marked, *parts[i + 1 :]]}, part["text"]
    raise ValueError(f"the {field} of the message that is to be continued has no text")


def _in_form_of_template(task: dict[str, Any]) -> dict[str, Any]:
    """A task whose messages have their contents and arguments in the form that the template reads.

    Raises:
        ValueError: the template leaves out the text of a message.
    """
    from specbeam.text.template_sandbox import with_arguments

    template, (messages,) = task["chat_template"], task["conversations"]
    if not isinstance(template, str):
        return task
    of_conversation = ("chat_template", "conversations", "add_generation_prompt", "continue_final_message", "tools")
    variables = json.dumps({name: value for name, value in task.items() if name not in of_conversation})
    readable = [with_arguments(_readable(message, template, variables)) for message in messages]
    return task | {"conversations": [readable]}


def _readable(message: dict[str, Any], template: str, variables: str) -> dict[str, Any]:
    """A message as a template reads its content."""
    languages = {name: message.pop(name) for name in LANGUAGES if name in message}
    content, role = message.get("content"), message.get("role")
    if languages:
        return message | {"content": [{"type": "text", "text": content, **languages}]}
    if not isinstance(content, str) or not isinstance(role, str):
        return message
    if (in_parts := _reads_parts(template, variables, role)) is None and content.strip():
        raise ValueError(
            f"it leaves out what the role {role!r} says, as a text and as a list of parts: let another role say that, "
            "or use raw=True"
        )
    readable = message | _message(role, content, in_parts)
    if role != "assistant" or not any(isinstance(message.get(name), str) for name in reasoning_names()):
        return readable
    return _with_thoughts(readable) if THOUGHT_PARTS.search(template) else readable


def reasoning_names() -> tuple[str, ...]:
    """The names under which a message has its reasoning."""
    from specbeam.text.template_sandbox import REASONING

    return REASONING


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning is a part of its content, as Mistral's templates read it."""
    names = reasoning_names()
    thoughts = next(message[name] for name in names if isinstance(message.get(name), str))
    content = message["content"]
    parts = [{"type": "text", "text": content}] * bool(content) if isinstance(content, str) else content
    others = {name: value for name, value in message.items() if name not in names}
    return others | {"content": [{"type": "thinking", "thinking": thoughts}, *parts]}


@lru_cache(MAX_PROBED)
def _reads_parts(template: str, variables: str, role: str) -> bool | None:
    """Whether a template reads the contents of a role's messages as lists of parts, and not as texts.

    A template that reads both forms gets texts. So does one that refuses them all, and it says why.

    Args:
        variables: of the template, as JSON.

    Returns:
        None if the template leaves out the text in both forms.
    """
    task = json.loads(variables) | {"chat_template": template}
    others = [] if role == "user" else [_message("user", "Hi", _reads_parts(template, variables, "user"))]
    has_refused = False
    for in_parts in (False, True):
        probe = _message(role, PROBE, in_parts)
        answered = [*others, CALL, probe | {"tool_call_id": CALL["tool_calls"][0]["id"]}] if role == "tool" else []
        for conversation in ([probe, *others], [*others, probe, *others], [*others, probe], *filter(None, [answered])):
            try:
                text = _rendered(task | {"conversations": [conversation]})
            except MemoryError:
                raise
            except Exception:
                has_refused |= not in_parts
            else:
                if PROBE in text.lower():
                    return in_parts
    return bool(others and _reads_parts(template, variables, "user")) if has_refused else None


def _message(role: str, text: str, in_parts: bool | None) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}


def _serve() -> None:
    """The child: read tasks from standard input, one in a line, and answer each with a line on standard output."""
    import specbeam.text.template_sandbox  # noqa: F401  # its memory is no template's

    memory = child_processes.memory_of_this_process()
    for line in sys.stdin.buffer:
        child_processes.limit_memory(memory + MEMORY_BYTES + MEMORY_PER_BYTE * len(line))
        text, refusal = "", None
        try:
            cpu_seconds, adapts, task = _read(line)
            child_processes.end_after(cpu_seconds)
            text = _rendered(_in_form_of_template(task) if adapts else task)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            refusal = str(error)[:MAX_REASON_CHARACTERS] or type(error).__name__
        if len(text) > MAX_CHARACTERS + CHARACTERS_PER_BYTE * len(line):
            os._exit(TOO_LONG)
        sys.stdout.buffer.write(_line([text, refusal]))
        sys.stdout.flush()
        child_processes.end_after(0)


if __name__ == "__main__":
    _serve()
