"""The keys of the HTTP server in the pipeline's YAML."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.config.value_types import LARGEST, Line, Origin, Seconds


class HttpConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server: limits, TLS, CORS. Each key is also a flag: `body_bytes` is `--http-body-bytes`.

    Args:
        connections: connections at a time; fewer if the limit of open files is lower.
        head_bytes: largest head of a request: its first line and headers.
        head_timeout: seconds for a request's head to arrive.
        body_bytes: largest request body.
        bodies_bytes: all request bodies that arrive or are handled at a time, with the media fetched for them
            or decoded while they arrive; at least `body_bytes`.
        media_parts: number of media in one request.
        media_bytes: largest audio, image or video.
        audio_seconds: longest audio.
        image_pixels: largest image, width times height.
        video_seconds: longest video.
        files_bytes: all uploaded files together.
        file_seconds: lifetime of an uploaded file.
        request_timeout: seconds until an answer must be complete, for requests that set no `timeout`.
        read_timeout: seconds for a request's body to arrive.
        write_timeout: seconds that a client may leave a piece of its answer unread.
        served_names: names of the model for HTTP clients, the preferred one first; by default the pipeline's `name`,
            and `model` unless it is a path. The flag is `--served-name`, once for each.
        voice_aliases: further names of voices, such as `alloy: Chelsie`. The flag is `--voice-alias alloy=Chelsie`,
            once for each. A voice of the pipeline keeps its own name.
        voices: how many voices clients may make of recordings, if the model takes those.
        voices_dir: folder for them, which several servers may share; by default one in the run directory.
        realtime_sessions: sessions of /v1/realtime at a time.
        realtime_session_seconds: longest session.
        realtime_idle_seconds: seconds without an event of the client, and without an answer, that end a session.
        realtime_ahead_seconds: sound of the user after which the pipeline computes what was said so far, while the user
            still speaks; 0 to compute a turn when it is over. 2 s is what Qwen2.5-Omni encodes together.
        realtime_event_bytes: largest event of a client.
        realtime_events_per_second: events that are read of a client in the long run; it is slowed down to this.
        cors_origins: origins (`https://example.com`, or `*`) whose web pages may use the server from a browser; by
            default none.
        certificate: PEM file with the certificate and its chain; makes the server speak https.
        key: PEM file with the certificate's private key, without a password.
    """

    connections: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    head_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 20)] = 64 << 10
    head_timeout: Seconds = 10.0
    body_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 34)] = 64 << 20
    bodies_bytes: Annotated[int, Meta(ge=1 << 10, le=LARGEST)] = 512 << 20
    media_parts: Annotated[int, Meta(ge=0, le=256)] = 16
    media_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 34)] = 32 << 20
    audio_seconds: Seconds = 300.0
    image_pixels: Annotated[int, Meta(ge=1, le=LARGEST)] = 4096 * 4096
    video_seconds: Seconds = 60.0
    files_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 256 << 20
    file_seconds: Seconds = 3600.0
    request_timeout: Seconds = 600.0
    read_timeout: Seconds = 60.0
    write_timeout: Seconds = 60.0
    served_names: Annotated[list[Line], Meta(max_length=64)] = []
    voice_aliases: Annotated[dict[Line, Line], Meta(max_length=64)] = {}
    voices: Annotated[int, Meta(ge=0, le=10_000)] = 100
    voices_dir: Line | None = None
    realtime_sessions: Annotated[int, Meta(ge=0, le=1 << 16)] = 64
    realtime_session_seconds: Seconds = 3600.0
    realtime_idle_seconds: Seconds = 300.0
    realtime_ahead_seconds: Annotated[float, Meta(ge=0, le=300)] = 2.0
    realtime_event_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 30)] = 20 << 20
    realtime_events_per_second: Annotated[int, Meta(ge=1, le=1_000_000)] = 500
    cors_origins: Annotated[list[Origin], Meta(max_length=64)] = []
    certificate: Line | None = None
    key: Line | None = None
