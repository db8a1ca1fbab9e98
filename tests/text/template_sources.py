# ruff: noqa: E501 (templates are read more easily uncut)
"""Hand-written chat templates, one for each form and habit of published ones."""

GENERIC = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_TOOLS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS_ONLY = (
    "Judge this conversation.{% for m in messages %}{{ '\n' + m.role | capitalize }}: "
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}{{ '\n' }}Verdict:"
)
CONCATENATES = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}<assistant>"
)
NULL_CONTENT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% endif %}"
    "{% if m.role == 'system' %}{{ '<S>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<C>' + c.function.name + ' ' + c.function.arguments + '</C>' }}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' and m.content is not none %}{{ '<A>' + m.content.split('</think>')[-1] + '</A>' }}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<T>' + m.content + '</T>' }}{% endif %}{% endfor %}<A>"
)
"""Like DeepSeek-R1-Distill: calls are written only beside null, and text beside calls is not."""
READS_THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
READS_REASONING = READS_THINKING.replace("m.thinking", "m.reasoning")
DROPS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<{{ m.role }}>{% set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if thought and loop.index0 > ns.last %}<think>{{ thought }}</think>{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}"
    "{% endfor %}<assistant>"
)
"""Like Qwen3: reasoning is written after the last question only."""
TRAP = (
    "{% set developer_preamble = 'Be good.' %}{{ developer_preamble }}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<assistant>"
)
KNOWS_DEVELOPER = "{% for m in messages %}<{{ 'orders' if m.role == 'developer' else m.role }}>{{ m.content }}{% endfor %}<assistant>"
ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}<S>{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'system' %}"
    "{{ raise_exception('one system message only') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
LOSES_SYSTEMS = (
    "{% for m in messages if m.role == 'system' %}{% if loop.last %}<S>{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}{% endfor %}<model>"
)
"""Like Gemma."""
SHORT_IDS = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}"
    "[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
"""Like Mistral."""
GOES_THROUGH_ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function>{% endfor %}"
    "{% endfor %}<assistant>"
)
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}<assistant>"
LAST_TWO = "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
FIRST_USER = "{% for m in messages if m.role == 'user' %}{% if loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
TRUNCATES = "{% for m in messages %}<{{ m.role }}>{{ m.content[:40] }}{% endfor %}"
UPPER = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
IGNORES = "Hello, assistant."
NEEDS_PARAMETERS = JSON_TOOLS.replace(
    "{{ t | tojson }}", "{{ t.function.name + (t.function.parameters.properties | tojson) }}"
)
FLAT_TOOLS = JSON_TOOLS.replace("{{ t | tojson }}", "{{ t.name }}: {{ t.parameters | tojson }}")
KEY_OF_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Like Phi-4-mini: tools are JSON text under a key of the system message, and the variable ``tools`` is not read."""
ALL = {name: source for name, source in globals().items() if name.isupper() and name != "ALL"}
