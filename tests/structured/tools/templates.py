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
QWEN3_CODER = (
    "{% if tools %}Write <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    + TOOLS + "{% endif %}"
    + turns(
        "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments|items %}"
        "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>"
    )
)  # fmt: skip
GEMMA = TOOLS + turns(
    "<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for key, value in c.function.arguments|items %}"
    "{{ key }}:<|\"|>{{ value }}<|\"|>{% endfor %}{{ '}' }}<tool_call|>"
)
LFM2 = "{% if tools %}List of tools: [" + TOOLS + "]{% endif %}" + turns("")
GRANITE = (
    "{% if tools %}Respond only with <|tool_call|> followed by a JSON list of tools."
    + TOOLS
    + "{% endif %}"
    + turns("")
)
HUNYUAN = (
    '{% if tools %}Write <tool_calls>[{"name": "NAME", "arguments": {}}]</tool_calls>.' + TOOLS + "{% endif %}"
    + turns(f"<tool_calls>[{OBJECT}]</tool_calls>")
)  # fmt: skip
GPT_OSS = (
    "{% if tools %}Calls go to the channel <|channel|>commentary to=functions.NAME." + TOOLS + "{% endif %}"
    + turns("to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments }}")
)  # fmt: skip
GLM = (
    "{% if tools %}<|system|>\n# 可用工具" + TOOLS + "{% endif %}{# <|observation|> #}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.get('metadata', '') }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
TEMPLATES = {
    "hermes": HERMES,
    "listed": LISTED,
    "named": NAMED,
    "llama": LLAMA,
    "functools": FUNCTOOLS,
    "phi": PHI,
    "qwen3-coder": QWEN3_CODER,
    "gemma": GEMMA,
    "lfm2": LFM2,
    "granite": GRANITE,
    "hunyuan": HUNYUAN,
    "gpt-oss": GPT_OSS,
    "glm": GLM,
}
TOKENS = {
    "hermes": {"<tool_call>": False, "</tool_call>": False},
    "listed": {"[TOOL_CALLS]": True},
    "named": {"[TOOL_CALLS]": True, "[ARGS]": True},
    "phi": {"<|tool_call|>": False, "<|/tool_call|>": False},
    "qwen3-coder": {"<tool_call>": False, "</tool_call>": False},
    "gemma": {"<|tool_call>": True, "<tool_call|>": True, '<|"|>': True},
    "lfm2": {"<|tool_call_start|>": True, "<|tool_call_end|>": True},
    "granite": {"<|tool_call|>": False},
    "gpt-oss": {"<|channel|>": True, "<|message|>": True, "<|constrain|>": True, "<|start|>": True, "<|end|>": True},
    "glm": {"<|assistant|>": True},
}
"""Tokens, and whether they are special."""
