"use strict";
// A recording by the microphone.

import { PageError } from "./api.js";
import { openMicrophone } from "./microphone.js";
import { decode, wavOf } from "./wav.js";

const RATE = 16000;  // Hz of what is sent

/** One recording, from `start` to `stop` or `discard`. */
export class Recording {
  #pieces = [];
  #began = performance.now();

  constructor(stream) {
    this.stream = stream;
    this.recorder = new MediaRecorder(stream);
    this.recorder.ondataavailable = (event) => this.#pieces.push(event.data);
    this.recorder.start();
  }

  /** Asks for the microphone and begins. Raises `PageError`. */
  static async start() {
    return new Recording(await openMicrophone());
  }

  get seconds() { return (performance.now() - this.#began) / 1000; }

  /** Ends the recording. Gives a WAV file. */
  async stop() {
    const stopped = new Promise((resolve) => { this.recorder.onstop = resolve; });
    this.discard();
    await stopped;
    try {
      return wavOf([await decode(new Blob(this.#pieces, { type: this.recorder.mimeType }), RATE)], RATE);
    } catch (error) {
      throw new PageError("The recording cannot be read. Record a little longer.", error.message);
    }
  }

  /** Ends the recording without its result. */
  discard() {
    if (this.recorder.state !== "inactive") this.recorder.stop();
    this.stream.getTracks().forEach((track) => track.stop());
  }
}
