"""Chat templates: the model's own Jinja text, rendered in a sandbox with the names that transformers gives templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from mpk.errors import ModelError, RequestError


class ChatTemplate:
    """One compiled template."""

    def __init__(self, template: str, **constants: str) -> None:
        """`constants` (bos_token, eos_token) are visible to the template; `ModelError` if it does not compile."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(template)
        except Exception as e:  # constants are computed here, by the template's own rules
            raise ModelError("the model's chat template does not compile", actual=str(e)) from e
        self._constants = constants

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt; `RequestError` with the template's own words if it refuses the messages."""
        from jinja2 import TemplateError

        if not messages:
            raise RequestError("an empty conversation", expected="at least one message")
        try:
            return self._template.render(messages=list(messages), **{**self._constants, **variables})
        except TemplateError as e:
            raise RequestError("the chat template refuses the messages", actual=str(e)) from e
        except (TypeError, KeyError, AttributeError) as e:
            raise RequestError("the chat template cannot use the messages", expected="messages with 'role' and 'content'",
                               actual=str(e)) from e
        except Exception as e:  # a template is a program and can fail in any way
            raise RequestError("the chat template fails on the messages", actual=f"{type(e).__name__}: {e}") from e


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    """As json.dumps: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
