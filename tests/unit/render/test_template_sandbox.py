"""A checkpoint's chat template can neither reach Python nor change a conversation."""

from __future__ import annotations

import pytest

from sightline.render.template import ChatTemplate, TemplateError


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ ''.format.__func__ }}{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_template_cannot_leave_its_sandbox(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises((TemplateError, OverflowError)):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]
