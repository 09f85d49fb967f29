"""Chat templates that ask for the formats of tool calls, in the words by which published templates are known.

The tokens are what a tokenizer of such a model has beside its text; whether each is special differs between models.
"""

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}%s{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"


def turns(call):
    return TURNS.replace("%s", call)


OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
HERMES = (
    '{% if tools %}Write <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>' + TOOLS + "{% endif %}"
    + turns(f"<tool_call>\n{OBJECT}\n</tool_call>")
)  # fmt: skip
LISTED = TOOLS + turns("[TOOL_CALLS] [{{ c.function | tojson }}, {{ c.id }}]")
NAMED = TOOLS + turns("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}")
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
    "value}." + TOOLS + "{% endif %}"
    + turns('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}')
)  # fmt: skip
FUNCTOOLS = (
    "{% if tools %}Write functools[...]." + TOOLS + "{% endif %}"
    + turns('{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}')
)  # fmt: skip
PHI = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'system' and message['tools'] %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}"
    "<|end|>{% endfor %}<|assistant|>"
)
TEMPLATES = {"hermes": HERMES, "listed": LISTED, "named": NAMED, "llama": LLAMA, "functools": FUNCTOOLS, "phi": PHI}
TOKENS = {
    "hermes": {"<tool_call>": False, "</tool_call>": False},
    "listed": {"[TOOL_CALLS]": True},
    "named": {"[TOOL_CALLS]": True, "[ARGS]": True},
    "phi": {"<|tool_call|>": False, "<|/tool_call|>": False},
}
"""Tokens, and whether they are special."""
