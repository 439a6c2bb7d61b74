"""Chat templates for tests, in ChatML's form: one that writes everything, and what leaves something out or adds it."""


def tags(
    *,
    before: str = "",
    if_system: str = "{{ open ~ m.role ~ line ~ m.content ~ end }}",
    of_user: str = "{{ open ~ m.role ~ line ~ m.content ~ end }}",
    thought: str = "{%- if m.reasoning_content -%}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{%- endif -%}",
    content: str = "{{ m.content }}",
    calls: str = "m.tool_calls or []",
    call: str = "{{ '<call>' ~ (c.function | tojson) ~ '</call>' }}",
    result: str = "{{ open ~ 'tool' ~ line ~ m.content ~ end }}",
    of_tools: str = "{{ open ~ 'tools' ~ line ~ (tools | tojson) ~ end }}",
    prompt: str = "{{ open ~ 'assistant' ~ line }}",
    marks: bool = True,
    messages: str = "messages",
) -> str:
    """A template that writes everything, but for what is given in another way."""
    begin, close = ("{% generation -%}", "{%- endgeneration %}") if marks else ("", "")
    return (
        "{%- set open = '<|im_start|>' -%}{%- set line = '\\n' -%}{%- set end = '<|im_end|>\\n' -%}"
        f"{before}{{%- if tools -%}}{of_tools}{{%- endif -%}}{{%- for m in {messages} -%}}"
        "{%- if m.role == 'assistant' -%}{{ open ~ 'assistant' ~ line }}"
        f"{begin}{thought}{content}{{%- for c in {calls} -%}}{call}{{%- endfor -%}}<|im_end|>{close}"
        "{{ line }}"
        f"{{%- elif m.role == 'tool' -%}}{result}{{%- elif m.role == 'system' -%}}{if_system}"
        f"{{%- else -%}}{of_user}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}"
    )
