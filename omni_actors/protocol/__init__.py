"""Every struct that crosses a socket, by channel, and the codec that turns them into frames and back.

msgspec checks types and `Meta` constraints only when it decodes. Structs whose fields depend on one another therefore
also check themselves in `__post_init__`; the same check runs on the sender's side, before anything is sent.
"""
