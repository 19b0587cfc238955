"""The stream of the codec decoder without an engine: how it is cut, what it claims, what it refuses."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.models.chunks import ChunkPolicy
from omni_actors.engine.models.codec_decoder.runner import (
    BatchedDecoder,
    CodecChunk,
    CodecStream,
    Cutting,
    DecoderCarry,
)
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.errors import InvalidPayload, InvalidRequest, OmniError, PromptTooLong
from tests.support.codec import CODEBOOK, codes, flat, own_decoder

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


def test_an_utterance_is_cut_in_the_same_places_whenever_its_frames_come():
    given = flat(codes(21))
    at_once = CodecStream(cutting(), DecoderCarry())
    at_once.extend(given, complete=True)
    slowly, cut = CodecStream(cutting(), DecoderCarry()), []
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


def test_a_request_claims_its_state_until_its_last_chunk():
    stream = CodecStream(cutting(), DecoderCarry())
    state_bytes = cutting().state_bytes
    stream.extend(flat(codes(3)), complete=False)
    first, _ = jobs_of(stream)
    assert (stream.held_bytes, first.held_bytes) == (state_bytes, state_bytes)
    assert stream.job_bytes > first.step_bytes > 0
    stream.extend((), complete=True)
    (last,) = jobs_of(stream)
    assert (last.held_bytes, stream.held_bytes, stream.job_bytes) == (0, 0, 0)
    with pytest.raises(InvalidRequest, match="after the last"):
        stream.extend(flat(codes(1)), complete=True)


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
    stream = CodecStream(cutting(), DecoderCarry())
    with pytest.raises(error, match=text):
        stream.extend(given, complete=complete)
    assert (stream.input_tokens, stream.next_job()) == (0, None)
