"""What the tests of a module share, because it takes long to bring up, until one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import NamedTuple, TypeVar, cast

import pytest

T = TypeVar("T")


class _World(NamedTuple):
    value: object
    stack: ExitStack
    num_failed: int
    """Tests of the session that had failed before."""


_WORLDS = pytest.StashKey[dict[object, _World]]()


def shared(request: pytest.FixtureRequest, make: Callable[[], AbstractContextManager[T]], of: object = None) -> T:
    """Value of a fixture for each test: one for all tests of the module. After a test that failed, which may have left
    it in any state, the next one gets another.

    Args:
        of: what there is one value for, instead of the fixture.
    """
    module = request.node.getparent(pytest.Module)
    assert module is not None
    worlds = module.stash.setdefault(_WORLDS, {})
    key = of or request.fixturename
    world = worlds.get(key)
    if world is not None and world.num_failed != request.session.testsfailed:
        with suppress(Exception):  # the failure has been reported
            world.stack.close()
        world = None
    if world is None:
        stack = ExitStack()
        value = stack.enter_context(make())
        module.addfinalizer(stack.close)
        world = worlds[key] = _World(value, stack, request.session.testsfailed)
    return cast(T, world.value)
