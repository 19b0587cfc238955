"""Types of single values in the pipeline's YAML, with their limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=1e7)]
LARGEST = 1 << 40  # bytes: more than any host has, and far from where sums overflow
# Patterns end with \Z, as $ would let a line break follow.
VariableName = Annotated[str, Meta(pattern=r"^[A-Z][A-Z0-9_]{0,63}\Z")]
VariableText = Annotated[str, Meta(max_length=32_768)]
Rank = Annotated[int, Meta(ge=0, le=1023)]
StageName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
IN_ONE_LINE = Meta(pattern=r"^[^\n\r\t]*\Z", description="in one line")
Line = Annotated[str, Meta(min_length=1, max_length=4096), IN_ONE_LINE]
Origin = Annotated[str, Meta(max_length=512), Meta(pattern=r"^(\*|https?://[^/?#\s]+)\Z")]
Host = Annotated[
    str, Meta(max_length=253), Meta(pattern=r"^[A-Za-z0-9_.:-]+\Z", description="letters, digits and `._:-`")
]
InterfaceName = Annotated[str, Meta(pattern=r"^[^\s/\0]{1,15}\Z", description="1 to 15 characters")]
