"use strict";
// Samples, and files made of them.

/** The samples of base64-encoded PCM, 16 bit. */
export function samplesOf(base64) {
  const binary = atob(base64);
  const view = new DataView(new ArrayBuffer(binary.length));
  for (let i = 0; i < binary.length; i++) view.setUint8(i, binary.charCodeAt(i));
  const samples = new Float32Array(binary.length >> 1);
  for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true) / 32768;
  return samples;
}

/** A WAV file (mono, 16 bit) of samples in pieces. */
export function wavOf(pieces, rate) {
  const length = pieces.reduce((sum, piece) => sum + piece.length, 0);
  const view = new DataView(new ArrayBuffer(44 + 2 * length));
  const text = (at, word) => [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF"); view.setUint32(4, 36 + 2 * length, true); text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, 2 * length, true);
  let at = 44;
  for (const piece of pieces) {
    for (const value of piece) {
      view.setInt16(at, Math.round(32768 * Math.max(-1, Math.min(32767 / 32768, value))), true);
      at += 2;
    }
  }
  return new Blob([view.buffer], { type: "audio/wav" });
}

/** The samples of a file of `wavOf`. */
export const samplesOfWav = (bytes) => Float32Array.from(new Int16Array(bytes, 44), (value) => value / 32768);

/** The samples of any sound that the browser can decode: mono, at `rate` Hz. */
export async function decode(blob, rate) {
  // A context of its own rate resamples what it decodes.
  const audio = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await blob.arrayBuffer());
  if (audio.numberOfChannels === 1) return audio.getChannelData(0);
  const mixed = new Float32Array(audio.length);
  for (let channel = 0; channel < audio.numberOfChannels; channel++) {
    audio.getChannelData(channel).forEach((value, i) => { mixed[i] += value / audio.numberOfChannels; });
  }
  return mixed;
}
