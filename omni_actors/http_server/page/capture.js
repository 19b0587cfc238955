"use strict";
// Runs on the audio thread: the microphone's samples as pieces of PCM at the rate of the realtime route.

const RATE = 24000;  // Hz
const PIECE = 768;   // samples: 32 ms, one window of the server's detector

class Capture extends AudioWorkletProcessor {
  #piece = new DataView(new ArrayBuffer(2 * PIECE));
  #filled = 0;
  #peak = 0;
  #last = 0;    // the sample before this block
  #place = 0;   // of the next sample to write, in samples of this block

  process([[samples]]) {
    if (!samples) return true;  // nothing is connected at the moment
    const step = sampleRate / RATE;
    for (; this.#place < samples.length; this.#place += step) {
      const at = Math.floor(this.#place), before = at > 0 ? samples[at - 1] : this.#last;
      this.#write(before + (samples[at] - before) * (this.#place - at));
    }
    this.#place -= samples.length;
    this.#last = samples.at(-1);
    return true;
  }

  #write(value) {
    this.#peak = Math.max(this.#peak, Math.abs(value));
    this.#piece.setInt16(2 * this.#filled, Math.round(32767 * Math.max(-1, Math.min(1, value))), true);
    if (++this.#filled < PIECE) return;
    this.port.postMessage({ pcm: this.#piece.buffer.slice(0), peak: this.#peak });
    this.#filled = this.#peak = 0;
  }
}

registerProcessor("capture", Capture);
