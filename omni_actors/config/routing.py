"""The part of the schema that says how requests are spread over the replicas of a stage."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Lead = Annotated[float, Meta(ge=0, le=1000)]


class RoutingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Which replica of a stage takes a request. Leads are counted in average requests of the stage.

    Args:
        balance: `time` gives a request to the replica that is expected to be through with its work first, by the
            tokens and the sound still ahead and by how fast it has been; `requests` to the one that holds the fewest.
        prefix_lead: how much more work a replica may have ahead than the least loaded one and still get the next turn
            of a conversation that it has in its prefix cache; less if that is only a part of the prompt. 0 for none.
        host_lead: the same for a replica on the host of the stage before it, whose output then stays on that host; a
            quarter more on the same GPU. 0 for none.
        conversations: turns of which the coordinator remembers the replica, the latest ones; 0 for none.
    """

    balance: Literal["time", "requests"] = "time"
    prefix_lead: Lead = 4.0
    host_lead: Lead = 1.0
    conversations: Annotated[int, Meta(ge=0, le=10_000_000)] = 65_536
