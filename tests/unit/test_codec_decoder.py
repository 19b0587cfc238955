"""The codec decoder without an engine: against transformers in any chunking and batch, its stream, its refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni_actors.engine.platform import prepare

prepare()

from omni_actors.engine.diffusion_runner import DiffusionJob  # noqa: E402
from omni_actors.engine.models.chunks import ChunkPolicy, DecodeOptions  # noqa: E402
from omni_actors.engine.models.codec_decoder.batches import BatchedDecoder  # noqa: E402
from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder  # noqa: E402
from omni_actors.engine.models.codec_decoder.stream import Carry, CodecChunk, CodecStream, Cutting  # noqa: E402
from omni_actors.engine.models.qwen3_omni.code2wav import MeanEmbedding  # noqa: E402
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, OmniError, PromptTooLong  # noqa: E402
from tests.support.codec import CODEBOOK, WINDOW, codes, flat, liven, own_decoder, reference_decoder, whole  # noqa: E402

TOLERANCE = 1e-5  # at a peak of 0.6; float rounding alone makes 1e-6
CPU = torch.device("cpu")
POLICY = ChunkPolicy(1, 8, 0)


def cutting(policy: ChunkPolicy | None = POLICY) -> Cutting:
    batches = BatchedDecoder(own_decoder(), CPU, most=4)
    return Cutting(own_decoder().sizes, policy, batches.state_bytes, itemsize=4)


def jobs_of(stream: CodecStream) -> list[DiffusionJob]:
    jobs: list[DiffusionJob] = []
    while (job := stream.next_job()) is not None:
        jobs.append(job)
    return jobs


def chunks_of(stream: CodecStream) -> list[CodecChunk]:
    return [job.payload for job in jobs_of(stream)]


# -- the network ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def decode(frames: torch.Tensor, lengths: list[int], decoder: CodecDecoder | None = None) -> torch.Tensor:
    """Decodes codes [batch, 16, frames] in chunks of these lengths."""
    decoder = decoder or own_decoder()
    state, pieces, begin = None, [], 0
    for length in lengths:
        piece, state = decoder(frames[..., begin : begin + length], torch.full((len(frames),), begin), state)
        pieces.append(piece)
        begin += length
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize(
    "lengths", [[30], [1] * 30, [3] * 10, [1, 1, 2, 4, 8, 14], [WINDOW - 1, WINDOW, WINDOW + 1, 12], [29, 1]], ids=str
)
def test_any_chunking_equals_the_whole_decode_of_transformers(lengths: list[int]):
    frames = torch.stack([codes(30), codes(30, seed=1)])
    expected = torch.stack([whole(frames[0]), whole(frames[1])])
    assert expected.abs().max() > 0.1
    assert expected.std() > 0.01
    assert torch.allclose(decode(frames, lengths), expected, atol=TOLERANCE, rtol=0)


def test_a_decoder_that_trims_nothing_and_projects_its_frames_is_the_same_in_any_chunking():
    """As in Qwen3-TTS, whose codec differs in these two points; there a frame is 1920 samples from the first one on."""
    given = own_decoder().sizes
    sizes = replace(given, trims_start=False, transformer=replace(given.transformer, latent_dim=24))
    front = MeanEmbedding(sizes.num_quantizers, CODEBOOK, sizes.width)
    decoder = CodecDecoder(sizes, front, "code_embedding")
    liven(decoder, lambda frames: decode(frames, [30], decoder), seed=2)
    frames = codes(12)[None]
    whole_sound = decode(frames, [12], decoder)
    assert whole_sound.shape == (1, sizes.samples(12)) == (1, 12 * 1920)
    for lengths in ([1] * 12, [1, 1, 2, 4, 4]):
        assert torch.allclose(decode(frames, lengths, decoder), whole_sound, atol=TOLERANCE, rtol=0)
    assert whole_sound.abs().max() > 0.1


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_the_length_of_the_sound_is_that_of_transformers(frames: int):
    assert own_decoder().sizes.samples(frames) == whole(codes(frames)).numel() == 1920 * frames - 555


def test_utterances_share_a_batch_wherever_they_are_in_their_sound():
    batches = BatchedDecoder(own_decoder(), CPU, most=4)
    streams = [CodecStream(cutting(), Carry()) for _ in range(3)]
    for seed, stream in enumerate(streams):
        stream.extend(flat(codes(40, seed)), complete=True)
    pending = [chunks_of(stream) for stream in streams]
    sound: list[list[torch.Tensor]] = [[], [], []]
    # From their fifth chunks on, all have the same length: the others join the first one late, and it leaves first.
    alone = [[member] * 5 for member in range(3)]
    order = [*alone[0], [0], *alone[1], [0, 1], *alone[2], [0, 1, 2], [1, 2], [2]]
    with torch.inference_mode():
        for turn in order:
            members = [turn] if isinstance(turn, int) else turn
            chunks = [pending[member].pop(0) for member in members]
            for member, chunk, samples, after in zip(members, chunks, *batches.decode(chunks), strict=True):
                sound[member].append(samples)
                chunk.carry.state = after
    assert pending == [[], [], []]
    for seed, pieces in enumerate(sound):
        assert torch.allclose(torch.cat(pieces), whole(codes(40, seed)), atol=TOLERANCE, rtol=0)


def test_the_state_left_for_the_next_chunk_does_not_hold_the_memory_of_the_batch():
    batches = BatchedDecoder(own_decoder(), CPU, most=4)
    chunks = [CodecChunk(codes(2, seed), 0, 1, False, Carry()) for seed in range(4)]
    with torch.inference_mode():
        _, states = batches.decode(chunks)
    assert {state.untyped_storage().nbytes() for state in states} == {batches.state_bytes}


# -- the stream -------------------------------------------------------------------------------------------------------


def test_an_utterance_is_cut_in_the_same_places_whenever_its_frames_come():
    given = flat(codes(21))
    at_once = CodecStream(cutting(), Carry())
    at_once.extend(given, complete=True)
    slowly, cut = CodecStream(cutting(), Carry()), []
    for begin in range(0, len(given), 48):
        slowly.extend(given[begin : begin + 48], complete=False)
        cut += chunks_of(slowly)
    slowly.extend((), complete=True)
    cut += chunks_of(slowly)
    places = [(chunk.position, chunk.frames, chunk.samples, chunk.last) for chunk in cut]
    assert places == [(chunk.position, chunk.frames, chunk.samples, chunk.last) for chunk in chunks_of(at_once)]
    # The last chunk is filled up to a length that others have, too, so that they share a batch.
    assert [place[:2] for place in places] == [(0, 1), (1, 1), (2, 2), (4, 4), (8, 8), (16, 8)]
    assert sum(samples for _, _, samples, _ in places) == 1920 * 21 - 555
    assert slowly.finished


def test_a_first_frame_is_decoded_at_once():
    stream = CodecStream(cutting(), Carry())
    stream.extend(flat(codes(1)), complete=False)
    assert [chunk.samples for chunk in chunks_of(stream)] == [1920 - 555]


def test_an_end_that_comes_after_the_last_frame_was_decoded_is_a_chunk_without_frames():
    stream = CodecStream(cutting(), Carry())
    stream.extend(flat(codes(4)), complete=False)
    assert [chunk.last for chunk in chunks_of(stream)] == [False, False, False]
    assert not stream.finished
    stream.extend((), complete=True)
    (end,) = chunks_of(stream)
    assert (end.frames, end.samples, end.last, stream.finished) == (0, 0, True, True)


def test_a_whole_decode_waits_for_the_end():
    stream = CodecStream(cutting(None), Carry())
    stream.extend(flat(codes(9)), complete=False)
    assert stream.next_job() is None
    stream.extend(flat(codes(2)), complete=True)
    assert [(chunk.frames, chunk.last) for chunk in chunks_of(stream)] == [(11, True)]


def test_a_request_claims_its_state_until_its_last_chunk():
    stream = CodecStream(cutting(), Carry())
    state_bytes = cutting().state_bytes
    stream.extend(flat(codes(3)), complete=False)
    first, _ = jobs_of(stream)
    assert (stream.held_bytes, first.held_bytes) == (state_bytes, state_bytes)
    assert stream.job_bytes > first.step_bytes > 0
    stream.extend((), complete=True)
    (last,) = jobs_of(stream)
    assert (last.held_bytes, stream.held_bytes, stream.job_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("given", "complete", "error", "text"),
    [
        ([1] * 24, False, InvalidPayload, "24 codes are no whole frames; this decoder takes frames of 16 codes"),
        ([1] * 8, True, InvalidPayload, "8 codes are no whole frames"),
        ([1] * 15 + [CODEBOOK], False, InvalidPayload, f"Code {CODEBOOK} of codebook 15 is outside 0..{CODEBOOK - 1}"),
        ([-1] + [1] * 15, False, InvalidPayload, "Code -1 of codebook 0"),
        ([1] * 16 * 201, False, PromptTooLong, "201 frames exceed the decoder's maximum of 200"),
        ([], True, InvalidRequest, "no frame"),
    ],
    ids=["half a frame too much", "half a frame", "code too large", "code below 0", "too long", "nothing"],
)
def test_codes_that_cannot_be_decoded_are_refused_and_not_taken(
    given: list[int], complete: bool, error: type[OmniError], text: str
):
    stream = CodecStream(cutting(), Carry())
    with pytest.raises(error, match=text):
        stream.extend(given, complete=complete)
    assert (stream.input_tokens, stream.next_job()) == (0, None)


def test_codes_after_the_last_are_refused():
    stream = CodecStream(cutting(), Carry())
    stream.extend(flat(codes(1)), complete=True)
    with pytest.raises(InvalidRequest, match="after the last"):
        stream.extend(flat(codes(1)), complete=True)


def test_a_model_without_a_flow_refuses_a_solver():
    with pytest.raises(ConfigError, match="no flow to solve"):
        DecodeOptions.from_mapping({"solver": "euler"}, POLICY)
    assert DecodeOptions.from_mapping({"solver": None}, POLICY).solver == ""


def test_the_reference_has_grouped_heads_and_a_window_shorter_than_the_utterance():
    # What the equalities above would otherwise leave out.
    config = reference_decoder().config
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.sliding_window == WINDOW < 30
