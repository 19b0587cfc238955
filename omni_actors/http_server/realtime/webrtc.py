"""A call: a session over WebRTC. Part of the extra `webrtc`; nothing else imports aiortc."""

from __future__ import annotations

import asyncio
import contextlib
import fractions
import logging
import time
from typing import Any

import msgspec
from aioice import Candidate, Connection
from aioice.ice import StunProtocol
from aioice.stun import Message
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtcconfiguration import RTCBundlePolicy
from aiortc.sdp import SessionDescription
from av import AudioFormat, AudioFrame, AudioLayout, AudioResampler, CodecContext, Packet

from omni_actors.host.processes import at_most
from omni_actors.http_server.connections import EventRate
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime.config import AppendAudio, error_event, new_id
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND, RATE
from omni_actors.http_server.realtime.live import LiveSession, live_error
from omni_actors.http_server.realtime.playing import Loudspeaker
from omni_actors.http_server.realtime.turns import SAMPLE_BYTES

logging.getLogger("aiortc").setLevel(logging.ERROR)  # it warns of each packet that cannot be decoded

CHANNEL = "oai-events"  # as OpenAI's clients name it
OPUS = "audio/opus"
OPUS_CLOCK = 48_000  # of its timestamps, whatever the rate of the sound
OPUS_BITS_PER_SECOND = 32_000
PACKET_SECONDS = 0.02
PACKET_TICKS = round(PACKET_SECONDS * OPUS_CLOCK)
PACKET_BYTES = round(PACKET_SECONDS * BYTES_PER_SECOND)
PIECE_SAMPLES = RATE // 25  # of the microphone that a session takes at a time: 40 ms

PAUSE_SECONDS = 0.1  # after the last packet, from which the next one begins anew
CONNECT_SECONDS = 15.0  # in which a client that has the answer to its offer must be connected
CLOSE_SECONDS = 2.0  # for a client to agree to the end of its channel
UNREAD_BYTES = 256 << 10  # that may wait for the session before what comes is dropped, as a network does
UNSENT_BYTES = 256 << 10  # the same for the client, before an event waits
PACKETS_PER_SECOND = 500.0  # of a client: its sound alone is 50
MOST_PIECES, MOST_STREAMS = 256, 16  # of events that are not complete, and the channels that they come on
MOST_ADDRESSES = 32  # from which a client may try to connect


class OpusTrack(MediaStreamTrack):
    """Plays answers in real time, as packets of Opus. Between them nothing is sent."""

    kind = "audio"

    def __init__(self, speaker: Loudspeaker) -> None:
        super().__init__()
        self._speaker = speaker
        self._due = 0.0  # when the next packet is to be sent (monotonic clock)
        self._timestamp = 0
        self._encoder = CodecContext.create("libopus", "w")
        self._encoder.format, self._encoder.layout = AudioFormat("s16"), AudioLayout("mono")
        self._encoder.sample_rate, self._encoder.bit_rate = RATE, OPUS_BITS_PER_SECOND
        self._encoder.options = {"application": "voip"}

    async def recv(self) -> Packet[Any]:
        """The next packet, when it is due. Called by aiortc, which sends it."""
        await asyncio.sleep(self._due - time.monotonic())
        while (found := self._speaker.next(PACKET_BYTES, PACKET_BYTES)) is None:
            await self._speaker.more()
        if self.readyState != "live":
            raise MediaStreamError
        paused = time.monotonic() - self._due
        packets = 1 + (int(paused / PACKET_SECONDS) if paused > PAUSE_SECONDS else 0)  # those that were not sent, too
        self._due += packets * PACKET_SECONDS
        self._timestamp += packets * PACKET_TICKS
        self._speaker.heard(*found)
        frame = AudioFrame("s16", "mono", PACKET_BYTES // SAMPLE_BYTES)
        frame.sample_rate = RATE
        frame.planes[0].update(found[1].ljust(PACKET_BYTES, b"\0"))
        (packet,) = self._encoder.encode(frame)
        packet.pts, packet.time_base = self._timestamp, fractions.Fraction(1, OPUS_CLOCK)
        return packet


class Call:
    """A WebRTC connection as what carries a session. Raises `OSError` when its client has left."""

    def __init__(self) -> None:
        self.id = new_id("rtc")
        self.speaker = Loudspeaker()
        self.live: LiveSession | None = None
        # No STUN server: aiortc would ask one of Google's for the addresses of this host.
        configuration = RTCConfiguration(iceServers=[], bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        self._peer = RTCPeerConnection(configuration)
        self._peer.on("track", self._hear)
        self._peer.on("datachannel", self._open)
        self._channel: RTCDataChannel | None = None
        self._settled = asyncio.Event()  # there is a channel, or there will be none
        self._closed = asyncio.Event()  # the channel
        self._drained = asyncio.Event()
        self._incoming: asyncio.Queue[bytes | AppendAudio | None] = asyncio.Queue()  # None: the client is gone
        self._unread = 0  # bytes
        self._microphone: asyncio.Task[None] | None = None
        self._pace = EventRate(PACKETS_PER_SECOND, time.monotonic())
        self._resume = 0.0  # when packets are taken again (monotonic clock)

    async def answer(self, offer: str, address: str) -> str:
        """Begin to connect; returns the SDP answer.

        The offer's candidates are left out: the server sends nothing to an address until a check that knows the
        answer's password has come from there, so nobody can use it to reach other hosts.

        Args:
            address: of this host, where the client is to send its packets.

        Raises:
            HttpError: 400 for an offer that cannot be answered.
        """
        lines = [line for line in offer.splitlines() if not line.startswith(("a=candidate:", "a=end-of-candidates"))]
        offer = "\r\n".join([*lines, ""])
        sent = self._peer.addTransceiver(OpusTrack(self.speaker))
        codecs = RTCRtpSender.getCapabilities("audio").codecs
        sent.setCodecPreferences([codec for codec in codecs if codec.mimeType.lower() == OPUS])
        try:
            offered = SessionDescription.parse(offer)
            if sorted(media.kind for media in offered.media) != ["application", "audio"]:
                raise ValueError(f"it must have sound, and the data channel {CHANNEL}, and nothing else")
            names = {media.rtp.muxId for media in offered.media}
            if len(names) < 2 or [set(one.items) for one in offered.group if one.semantic == "BUNDLE"] != [names]:
                raise ValueError("sound and data channel must be bundled")
            if not all(media.dtls and media.dtls.fingerprints for media in offered.media):
                raise ValueError("it has no fingerprint")
            await self._peer.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            self._confine(sent.receiver.transport.transport.iceGatherer._connection, address)
            await self._peer.setLocalDescription(await self._peer.createAnswer())
        except Exception as error:  # aiortc raises errors of all kinds for what it cannot read
            raise bad_field("sdp", f"The SDP offer cannot be answered: {error!s:.200}.", "invalid_sdp") from error
        if "a=candidate:" not in (answer := str(self._peer.localDescription.sdp)):
            raise HttpError(503, f"No UDP port can be opened at {address}: see its limit of files.", code="overloaded")
        return answer

    def _confine(self, ice: Connection, address: str) -> None:
        """Take packets at one address only, and no more of them than a call may bring.

        aioice itself would open a port at each address of the host but those of loopback.
        """
        gather, data_received, request_received = ice.get_component_candidates, ice.data_received, ice.request_received

        async def gather_one(component: int, addresses: list[str], timeout: int = 5) -> list[Candidate]:
            return await gather(component, [address], timeout)

        def take_data(data: bytes, component: int) -> None:
            if self._takes():
                data_received(data, component)

        def take_request(message: Message, source: tuple[str, int], protocol: StunProtocol) -> None:
            known = [(candidate.host, candidate.port) for candidate in ice.remote_candidates]
            if source in known or len(known) < MOST_ADDRESSES:
                request_received(message, source, protocol)

        taken = {"get_component_candidates": gather_one, "data_received": take_data, "request_received": take_request}
        for name, method in taken.items():
            setattr(ice, name, method)

    def _takes(self) -> bool:
        """Whether a packet is taken. What is dropped of a data channel is sent again, more slowly."""
        now = time.monotonic()
        if now < self._resume or self._unread > UNREAD_BYTES:
            return False
        self._resume = now + self._pace.wait(now)
        streams = self._peer.sctp._inbound_streams.values() if self._peer.sctp is not None else ()
        if len(streams) > MOST_STREAMS or sum(len(stream.reassembly) for stream in streams) > MOST_PIECES:
            self._leave()
        return True

    # -- events of aiortc ---------------------------------------------------------------------------------------------

    def _hear(self, track: MediaStreamTrack) -> None:
        self._microphone = asyncio.create_task(self._listen(track), name="microphone of a call")

    async def _listen(self, track: MediaStreamTrack) -> None:
        resampler = AudioResampler("s16", "mono", RATE, PIECE_SAMPLES)
        with contextlib.suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                for piece in resampler.resample(frame if isinstance(frame, AudioFrame) else None):
                    self._put(AppendAudio(audio=bytes(piece.planes[0])[: SAMPLE_BYTES * piece.samples]))

    def _open(self, channel: RTCDataChannel) -> None:
        if self._channel is not None:
            return
        self._channel = channel
        channel.bufferedAmountLowThreshold = UNSENT_BYTES
        channel.on("message", lambda text: self._put(text.encode() if isinstance(text, str) else text))
        channel.on("bufferedamountlow", self._drained.set)
        channel.on("close", self._leave)  # also when the connection is lost
        self._settled.set()

    def _put(self, given: bytes | AppendAudio) -> None:
        self._unread += len(given.audio if isinstance(given, AppendAudio) else given)
        self._incoming.put_nowait(given)

    def _leave(self) -> None:
        self._incoming.put_nowait(None)
        self._settled.set()
        self._closed.set()

    # -- as the session sees it ---------------------------------------------------------------------------------------

    async def connected(self) -> None:
        """Wait for the client. Raises `TimeoutError`, or `OSError` if it cannot be reached."""
        async with asyncio.timeout(CONNECT_SECONDS):
            await self._settled.wait()
        if self._channel is None:
            raise ConnectionResetError("the connection has failed")

    async def receive(self) -> bytes | AppendAudio:
        """The next event, or sound."""
        given = await self._incoming.get()
        if given is None:
            raise ConnectionResetError("the client has left")
        self._unread -= len(given.audio if isinstance(given, AppendAudio) else given)
        return given

    async def send(self, text: str) -> None:
        """Send an event; waits while too much waits for the client."""
        if self._channel is None or self._channel.readyState != "open":
            raise ConnectionResetError("the client has left")
        try:
            self._channel.send(text)
        except ValueError as error:  # the client takes no message of this length
            refusal = HttpError(413, f"An event is too long for this call: {error}.", code="event_too_large")
            shown = error_event(refusal)
            shown = shown if self.live is None else live_error(shown["error"])
            self._channel.send(msgspec.json.encode(shown).decode())
        while self._channel.bufferedAmount > UNSENT_BYTES:
            self._drained.clear()
            await self._drained.wait()

    async def close(self, code: str) -> None:
        """Close the channel, once the client has what was sent."""
        if self._channel is not None:
            self._channel.close()
            await at_most(CLOSE_SECONDS, self._closed.wait())

    async def end(self) -> None:
        """Close the connection."""
        if self._microphone is not None:
            self._microphone.cancel()
        await at_most(CLOSE_SECONDS, self._peer.close())
