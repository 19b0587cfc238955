"use strict";
// The page's only loudspeaker: whatever starts to play ends what played before.

import { capture } from "./microphone.js";
import { decode, wavOf } from "./wav.js";

const AHEAD = 0.06;  // seconds before the first sound after silence, so that the next piece can arrive in time
const ATTACHED_RATE = 24000;  // Hz at which attached sounds are decoded

/** Sound that may still be arriving; give its pieces to the player. */
export class Clip {
  pieces = [];
  seconds = 0;
  complete = false;
  #wav = null;     // of the first `#inWav` pieces
  #inWav = 0;

  /** `live` for sound that comes in time, in the stream that the player follows. */
  constructor(rate, live = false) {
    this.rate = rate;
    this.live = live;
  }

  /** What there is of it as a file, which is made once. */
  toWav() {
    if (this.#inWav < this.pieces.length) [this.#wav, this.#inWav] = [wavOf(this.pieces, this.rate), this.pieces.length];
    return this.#wav;
  }
}

/** Plays one clip at a time, its pieces queued one behind the other on the audio clock. "change" when that begins or ends, "over" at its end. */
class Player extends EventTarget {
  clip = null;      // what plays, or will once its first piece arrives
  turns = 0;        // how often something has been stopped or replaced
  #context = null;
  #analyser = null;
  #ear = null;      // an analyser of what it follows
  #followed = new Audio();
  #sources = new Set();
  #wave = new Float32Array(1024);
  #times = [];      // {from, seconds} of each piece of what plays
  #next = 0;

  /** Seconds of what plays that have left the loudspeaker. */
  get heard() {
    if (this.clip?.live) return this.clip.seconds;
    const now = this.#context ? this.#context.currentTime - (this.#context.outputLatency || 0) : 0;
    return this.#times.reduce((sum, { from, seconds }) => sum + Math.min(Math.max(now - from, 0), seconds), 0);
  }

  get playing() { return this.clip !== null && this.clip.pieces.length > 0; }

  /** Plays a clip from its beginning, and goes on with pieces that arrive later. */
  play(clip) {
    this.stop();
    this.#open();  // now, because a browser wants the press of a button or key just before
    this.clip = clip;
    for (const piece of clip.pieces) this.#schedule(piece);
    this.#changed();
  }

  /** Plays a stream as it comes, and notes it in the clip that plays, if that is live and `sounding`. */
  async follow(stream) {
    this.#open();
    this.#followed.srcObject = stream;
    this.#followed.play();
    this.#ear = this.#context.createAnalyser();
    this.#ear.fftSize = this.#analyser.fftSize;
    const source = await capture(this.#context, stream, ({ pcm }) => {
      if (this.clip?.live && this.clip.sounding) this.add(this.clip, Float32Array.from(new Int16Array(pcm), (value) => value / 32768));
    });
    source.connect(this.#ear);
  }

  /** Plays a file that the user attached or recorded. Raises `DOMException` if the browser cannot decode it. */
  async playFile(blob) {
    this.stop();
    const turn = this.turns, clip = new Clip(ATTACHED_RATE);
    this.add(clip, await decode(blob, clip.rate));
    clip.complete = true;
    if (turn === this.turns) this.play(clip);  // else something else was played or stopped meanwhile
  }

  /** Appends a piece to a clip; it is heard if the clip is the one that plays. */
  add(clip, samples) {
    if (!samples.length) return;
    clip.pieces.push(samples);
    clip.seconds += samples.length / clip.rate;
    if (clip !== this.clip) return;
    if (!clip.live) this.#schedule(samples);
    if (clip.pieces.length === 1) this.#changed();
  }

  /** Says that no more pieces of a clip will come. */
  complete(clip) {
    clip.complete = true;
    clip.live = false;
    this.#endIfOver();
  }

  /** Ends what plays; "cut" says how much of it was heard. */
  stop() {
    const cut = this.clip && { clip: this.clip, heard: this.heard };
    this.#end();
    if (cut) this.dispatchEvent(new CustomEvent("cut", { detail: cut }));
  }

  #end() {
    this.turns++;
    const ended = this.clip;
    if (ended) ended.live = false;
    this.clip = null;
    for (const source of this.#sources) source.stop();
    this.#sources.clear();
    this.#times = [];
    this.#next = 0;
    if (ended) this.#changed();
  }

  /** The last samples that went to the loudspeaker. */
  wave(into) {
    const analyser = this.clip?.live ? this.#ear : this.#analyser;
    if (analyser) analyser.getFloatTimeDomainData(into);
    return into;
  }

  /** How loud it is at the moment, from 0 to 1. */
  level() {
    return this.wave(this.#wave).reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  }

  #schedule(samples) {
    const context = this.#context;
    const buffer = context.createBuffer(1, samples.length, this.clip.rate);
    buffer.copyToChannel(samples, 0);
    const source = context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#analyser);
    if (this.#next < context.currentTime) this.#next = context.currentTime + AHEAD;
    source.start(this.#next);
    this.#times.push({ from: this.#next, seconds: buffer.duration });
    this.#next += buffer.duration;
    this.#sources.add(source);
    source.onended = () => { this.#sources.delete(source); this.#endIfOver(); };
  }

  #open() {
    if (!this.#context) {
      this.#context = new AudioContext();
      this.#analyser = this.#context.createAnalyser();
      this.#analyser.fftSize = 2048;
      this.#analyser.connect(this.#context.destination);
    }
    this.#context.resume();
  }

  #endIfOver() {
    if (!this.clip?.complete || this.#sources.size) return;
    const clip = this.clip;
    this.#end();
    this.dispatchEvent(new CustomEvent("over", { detail: clip }));
  }

  #changed() { this.dispatchEvent(new Event("change")); }
}

export const player = new Player();
