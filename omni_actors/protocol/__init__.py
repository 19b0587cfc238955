"""Every struct that crosses a socket, and the codec between structs and frames (`docs/protocol.md`).

`messages` holds the messages of all channels and their unions by direction, `payloads` the contents of a request, and
`fields` what both are made of. `codec` is shared by all channels.

msgspec checks types and `Meta` bounds only when it decodes. Structs whose fields depend on one another therefore also
check themselves in `__post_init__`, on the sender's side too.
"""
