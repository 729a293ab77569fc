"""Chat templates as models have them, shortened: each has something that not all renderers know."""

from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wie ist das Wetter? <b>&amp;</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be kind.\n"},
    {"role": "user", "content": "日本語 🙂 <|im_end|> 'quoted' \"twice\""},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nnaïve", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"degrees": -3.5}', "name": "weather"},
    {"role": "assistant", "content": "Cold.", "reasoning": "It is below zero."},
    {"role": "user", "content": [{"type": "text", "text": "And tomorrow?"}, {"type": "image"}]},
]
TALK = [message for message in CONVERSATION if message["role"] != "tool"][:2]

CHATML = """{%- for message in messages %}
    {%- set content = message.content if message.content is string else message.content[0].text %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' }}{{ message['content'] | string | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}" }}
    {%- endif %}
{%- endfor %}"""

QWEN = """{%- if tools %}
    {{- '<tools>' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools>" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last_query_index %}{{- reasoning }}{%- endif %}
    {%- endif %}
    {{- message.role + ': ' + content + (message.reasoning_content or '') + '\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}[INST] {{ message['content'] }} [/INST]{% endfor %}"""

GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}U: {{ m.content }}{% endif %}
{% endfor %}"""

LOOPS = """{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{{ loop.index }}{{ loop.cycle('odd', 'even') }}{{ m.role }}
{% if m.role == 'tool' %}{% break %}{% endif %}
{% endfor %}"""

MACRO = """{%- macro typed(properties) -%}
{%- for name, spec in properties.items()|sort -%}{{ name }}: {{ spec.type }}{{ ", " if not loop.last }}{%- endfor -%}
{%- endmacro -%}
{%- for tool in tools -%}{{ tool.function.name }}({{ typed(tool.function.parameters.properties) }}){%- endfor -%}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson(sort_keys=true) }}
{{ dict(a=1, **{'b': 2}) }} {{ "%05.1f" | format(3.14159) }} {{ '😀' | tojson }} {{ none }} {{ missing }}"""

DOCUMENTS = """{% for d in documents %}{{ d.title }}: {{ d.text | indent(2, true) }}
{% endfor %}{{ messages | length }}{{ effort | default('medium') }}{{ flags[1:] | join('/') }}"""

RENDERED: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatML": (CHATML, {"add_generation_prompt": True}),
    "ChatML, to be continued": (CHATML, {"conversations": [TALK], "continue_final_message": True}),
    "Llama, of today": (LLAMA, {"bos_token": "<s>", "tools": [TOOL]}),
    "Llama, of another day": (LLAMA, {"bos_token": "<s>", "date_string": "26 Jul 2024"}),
    "Qwen": (QWEN, {"tools": [TOOL]}),
    "Qwen, not thinking": (QWEN, {"enable_thinking": False}),
    "Qwen, thinking": (QWEN, {"enable_thinking": True}),
    "Mistral": (MISTRAL, {"conversations": [HELLO], "bos_token": "<s>"}),
    "the generation tag": (GENERATION, {"eos_token": "</s>"}),
    "the generation tag, tracked": (GENERATION, {"eos_token": "</s>", "return_assistant_tokens_mask": True}),
    "loop controls": (LOOPS, {}),
    "macros and filters": (MACRO, {"tools": [TOOL]}),
    "documents, and whatever it knows": (
        DOCUMENTS,
        {"documents": [{"title": "T", "text": "one\ntwo"}], "effort": "high", "flags": ["a", "b", 3]},
    ),
    "nothing": ("", {}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str]] = {
    "its own refusal": (MISTRAL, "Conversation roles must alternate user/assistant"),
    "no template": ("{% if %}", "Expected an expression"),
    "an unknown filter": ("{{ messages | nope }}", "No filter named 'nope'"),
    "a type": ("{{ messages + 1 }}", "can only concatenate list"),
    "a division": ("{{ 1 / 0 }}", "division by zero"),
    "something missing": ("{{ messages[0].function.name }}", "has no attribute 'function'"),
    "no text": (r"{{ '\ud800' }}", "surrogates not allowed"),
    "no end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
    "the terminal": (r"{{ raise_exception('\x1b[2J no') }}", r"( [2J no)"),
}
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__closure__[0] }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ namespace(__class__=1) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{% set m = joiner.__init__ %}{{ m.__globals__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include 'passwd' %}",
)
ENDLESS = """{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}
{% endfor %}{% endfor %}{% endfor %}"""
DEEP_IN_C = "{{ 10 ** (10 ** 9) }}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
