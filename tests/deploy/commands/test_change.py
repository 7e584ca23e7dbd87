"""Arguments of ``pdserve scale``."""

from __future__ import annotations

import pytest

from pdserve.contracts.errors import ConfigError
from pdserve.deploy.commands.change import read_replicas


def test_roles_and_numbers_are_read() -> None:
    assert read_replicas(["prefill=2", "decode=3"]) == {"prefill": 2, "decode": 3}


@pytest.mark.parametrize("text", ["decode", "decode=", "decode=-1", "decode=x", "decoder=2", "=2"])
def test_another_form_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}: write a role and its number of workers, such as decode=3"):
        read_replicas([text])


def test_a_role_that_is_named_again_is_an_error() -> None:
    with pytest.raises(ConfigError, match="prefill=3: prefill has a number of workers already; write each role once"):
        read_replicas(["prefill=2", "prefill=3"])
