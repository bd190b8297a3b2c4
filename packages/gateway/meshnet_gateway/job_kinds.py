"""From the requests of the two endpoints to jobs: prompts, grammars, how answers are read. Blocks; run in a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from meshnet_core.errors import RequestRefusedError
from meshnet_core.grammar import Grammar
from meshnet_gateway.answer_grammar import MAX_CALLS, checked, grammar_of_calls, grammar_of_schema
from meshnet_gateway.answer_parts import THINK, CallingText, PlainText, TextReader, ThinkingText
from meshnet_gateway.answer_shapes import ChatShape, CompletionShape
from meshnet_gateway.api_tools import NamedTool
from meshnet_gateway.api_types import ChatRequest, CompletionRequest
from meshnet_gateway.chat_prompt import instructed, schema_instructions
from meshnet_gateway.job import Job, make_job
from meshnet_gateway.messages_shape import MessagesShape
from meshnet_gateway.prompt_points import Messages, Render, chat_wish, text_wish
from meshnet_gateway.text_model import TextModel
from meshnet_gateway.tool_format import HERMES, ToolFormat, instructions, written_out

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_THINK_TAIL = 8  # token ids at the end of a prompt in which an opened <think> is looked for


def completion_job(endpoint: str, body: CompletionRequest, model: TextModel, scope: str) -> Job:
    """A job that goes on from each prompt; prefixes of ``scope`` may be used.

    Raises:
        RequestRefusedError: a field cannot be honoured for this model.
    """
    prompts = [model.encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompts]
    shape = CompletionShape(model, body.logprobs is not None, body.include_usage, _echoed(body, model))
    return make_job(endpoint, body, model, prompts, shape, "prompt", wish=partial(text_wish, scope))


def _echoed(body: CompletionRequest, model: TextModel) -> dict[int, str]:
    if not body.echo:
        return {}
    known = range(model.vocab_size)  # a prompt with other ids is refused later on
    texts = [
        prompt if isinstance(prompt, str) else model.decode(token for token in prompt if token in known)
        for prompt in body.prompts
    ]
    return dict(enumerate(text for text in texts for _ in range(body.n or 1)))


def messages_job(endpoint: str, body: ChatRequest, model: TextModel, scope: str) -> Job:
    """As `chat_job`, for Anthropic's clients."""
    job = chat_job(endpoint, body, model, scope)
    return replace(job, shape=MessagesShape(model, job.prompt_tokens))


def chat_job(endpoint: str, body: ChatRequest, model: TextModel, scope: str) -> Job:
    """A job that answers a conversation; prefixes of ``scope`` may be used.

    Raises:
        RequestRefusedError: a field cannot be honoured for this model.
    """
    messages, render = _rendering(body, model)
    prompt = render(messages, to_answer=True)
    opened = model.traits.thinks and model.decode(prompt[-_THINK_TAIL:]).rstrip().endswith(THINK)
    shape = ChatShape(model, bool(body.logprobs), body.include_usage)
    return make_job(
        endpoint, body, model, [prompt], shape, "messages", wish=lambda ids: chat_wish(scope, messages, ids, render),
        grammar=_grammar(body, model, thinks=opened), reader=partial(_reader, _calls_of(body, model), model, opened),
    )  # fmt: skip


def _rendering(body: ChatRequest, model: TextModel) -> tuple[list[dict[str, Any]], Render]:
    """The messages as the model's template takes them, and how to make token ids of them or of some of them."""
    traits = model.traits
    messages = [message.for_template() for message in body.messages]
    tools = [tool.for_template() for tool in body.tools or ()] if body.tool_choice != "none" else []
    told = []
    if traits.tools is None:
        told = [instructions(tools)] if tools else []
        messages = written_out(messages)
    schema = body.response_format.schema_wanted if body.response_format else None
    if schema is not None and body.response_format is not None and body.response_format.type == "json_schema":
        told.append(schema_instructions(schema))
    variables = _template_variables(body, model)
    known = tools if traits.tools is not None else ()

    def render(part: Messages, *, to_answer: bool = False) -> tuple[int, ...]:
        try:
            return model.render_chat(instructed(part, told), known, variables, to_answer=to_answer)
        except RequestRefusedError:
            if not told:
                raise
            by_user = instructed(part, told, role="user")  # the template may know no system message
            return model.render_chat(by_user, known, variables, to_answer=to_answer)

    return messages, render


def _template_variables(body: ChatRequest, model: TextModel) -> dict[str, Any]:
    """What the template is told of the wanted effort, in the words that it knows."""
    effort, known = body.reasoning_effort, model.traits.variables
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if "enable_thinking" in known:
        return {"enable_thinking": effort != "none"}
    if effort == "none" and not model.traits.thinks:
        return {}
    raise RequestRefusedError(
        f"reasoning_effort is not supported by {model.name}: its chat template knows no such thing",
        param="reasoning_effort",
    )


def _form(model: TextModel) -> ToolFormat:
    return model.traits.tools or HERMES


def _most_calls(body: ChatRequest) -> int:
    return 1 if body.parallel_tool_calls is False else MAX_CALLS


def _calls_of(body: ChatRequest, model: TextModel) -> Callable[[], CallingText] | None:
    names = frozenset(tool.function.name for tool in body.tools or ())
    if not names or body.tool_choice == "none":
        return None
    return lambda: CallingText(_form(model), names, most=_most_calls(body))


def _reader(calls: Callable[[], CallingText] | None, model: TextModel, opened: bool) -> TextReader:
    rest: TextReader = PlainText() if calls is None else calls()
    return ThinkingText(rest, opened=opened) if model.traits.thinks else rest


def _grammar(body: ChatRequest, model: TextModel, *, thinks: bool) -> Grammar | None:
    schema = body.response_format.schema_wanted if body.response_format else None
    choice = body.tool_choice if body.tools else "none"
    if choice is None:
        choice = "auto"
    if choice == "none":
        if schema is None:
            return None
        return _checked(grammar_of_schema(schema, thinks=thinks), model, "response_format")
    tools = [tool.function for tool in body.tools or ()]
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
    free = choice == "auto" and schema is None
    if free and not any(tool.strict for tool in tools):
        return None  # what the model writes is read, and is text where it is no call
    form = _form(model)
    if free and form.bare:
        raise RequestRefusedError(
            f"tools with strict are not supported by {model.name} where tool_choice is auto: it marks no calls",
            param="tools",
        )
    for index, tool in enumerate(body.tools or ()):
        if tool.function in tools and tool.function.parameters:
            rules = grammar_of_schema(tool.function.parameters, thinks=False)
            _checked(rules, model, f"tools[{index}].function.parameters")
    lark = grammar_of_calls(
        {tool.name: tool.parameters or _NO_PARAMETERS for tool in tools},
        form,
        most=_most_calls(body),
        thinks=thinks,
        or_schema=schema if choice == "auto" else None,
        or_text=free,
    )
    return _checked(lark, model, "tools")


def _checked(lark: str, model: TextModel, param: str) -> Grammar:
    if not model.stop_ids:
        raise RequestRefusedError(
            f"{param} needs a model that can end its answers; {model.name} has no stop token", param=param
        )
    return checked(lark, model.stop_ids, param)
