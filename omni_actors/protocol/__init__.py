"""Every struct that crosses a socket, and the codec between structs and frames (`docs/protocol.md`).

`client`, `stage` (a stage's inbox), `results`, `control` and `nodes` each hold the messages of one channel and its
unions by direction; `common` holds messages of several channels. `header` and `codec` are shared by all of them.

msgspec checks types and `Meta` bounds only when it decodes. Structs whose fields depend on one another therefore also
check themselves in `__post_init__`, on the sender's side too.
"""
