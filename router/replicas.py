"""The routers of one address, and the part of a limit that is this one's.

Each counts for itself: connections, which the system spreads over the routers, carry about as much to each.
"""

from __future__ import annotations

from collections.abc import Sequence


class Replicas:
    """Routers that are up, as the supervisor puts them through the admin port."""

    def __init__(self, num: int = 1) -> None:
        """``num``: routers until `put` is called."""
        self.num = num
        self.admin_ports: tuple[int, ...] = ()

    def put(self, admin_ports: Sequence[int]) -> None:
        """``admin_ports``: those of all routers, this one's included."""
        self.num, self.admin_ports = max(1, len(admin_ports)), tuple(admin_ports)

    def share(self, limit: int) -> int:
        """This router's part of ``limit``, at least 1; 0, which is none, stays 0."""
        return max(1, limit // self.num) if limit else 0
