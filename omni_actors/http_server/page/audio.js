"use strict";
// Playback of streamed samples, and conversion of recordings to WAV.

import { $, state } from "./common.js";

/** Plays chunks of samples, queued one behind the other on the audio clock. */
export class Player {
  static shared = null;  // one context for the page: browsers allow few

  constructor(rate) {
    this.context = Player.shared ??= new AudioContext();
    this.context.resume();
    this.analyser = this.context.createAnalyser();
    this.analyser.fftSize = 2048;
    this.analyser.connect(this.context.destination);
    this.rate = rate;
    this.next = 0;
    this.chunks = [];
    this.sources = new Set();
    this.seconds = 0;
  }

  add(samples) {
    this.chunks.push(samples);
    this.seconds += samples.length / this.rate;
    this.schedule(samples);
  }

  schedule(samples) {
    if (!samples.length) return;
    const buffer = this.context.createBuffer(1, samples.length, this.rate);
    buffer.copyToChannel(samples, 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.analyser);
    // A little ahead of the clock after silence, so that the next chunk can arrive in time.
    if (this.next < this.context.currentTime) this.next = this.context.currentTime + 0.06;
    source.start(this.next);
    this.next += buffer.duration;
    this.sources.add(source);
    source.onended = () => this.sources.delete(source);
  }

  replay() {
    this.stop();
    this.chunks.forEach((samples) => this.schedule(samples));
    showLevel(this);
  }

  stop() {
    for (const source of this.sources) source.stop();
    this.sources.clear();
    this.next = 0;
  }

  get playing() { return this.sources.size > 0; }
}

/** The samples of base64-encoded PCM, 16 bit. */
export function samplesOf(base64) {
  const binary = atob(base64);
  const view = new DataView(new ArrayBuffer(binary.length));
  for (let i = 0; i < binary.length; i++) view.setUint8(i, binary.charCodeAt(i));
  const samples = new Float32Array(binary.length >> 1);
  for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true) / 32768;
  return samples;
}

/** A WAV file (mono, 16 bit) of an AudioBuffer, resampled to `rate` Hz. */
async function wavOf(audio, rate = 16000) {
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(audio.duration * rate)), rate);
  const source = offline.createBufferSource();
  source.buffer = audio;
  source.connect(offline.destination);
  source.start();
  const samples = (await offline.startRendering()).getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, word) => [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => view.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, value))), true));
  return new Blob([view.buffer], { type: "audio/wav" });
}

/** Draws the waveform while the player plays or a request runs. */
export function showLevel(player) {
  const canvas = $("level");
  const draw = canvas.getContext("2d");
  const wave = new Float32Array(player.analyser.fftSize);
  const color = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  (function frame() {
    player.analyser.getFloatTimeDomainData(wave);
    const peak = wave.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    if (peak > Number(document.body.dataset.peak || 0)) document.body.dataset.peak = peak.toFixed(4);
    document.body.dataset.playing = player.playing;
    draw.clearRect(0, 0, canvas.width, canvas.height);
    draw.beginPath();
    for (let i = 0; i < wave.length; i += 4) draw.lineTo((i / wave.length) * canvas.width, (1 - wave[i]) * canvas.height / 2);
    draw.strokeStyle = color; draw.lineWidth = 2; draw.stroke();
    if (player.playing || state.request) requestAnimationFrame(frame);
  })();
}

/** A WAV file of any audio that the browser can decode. */
export async function toWav(blob) {
  Player.shared ??= new AudioContext();
  return wavOf(await Player.shared.decodeAudioData(await blob.arrayBuffer()));
}
