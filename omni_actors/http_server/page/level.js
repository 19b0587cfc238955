"use strict";
// The waveform of what plays.

import { $ } from "./common.js";
import { player } from "./player.js";

const SAMPLES = 2048;

/** Draws while the player plays. */
export function setUp() {
  const canvas = $("level"), draw = canvas.getContext("2d"), wave = new Float32Array(SAMPLES);
  let drawing = false;

  function frame() {
    player.wave(wave);
    const peak = wave.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    if (peak > Number(document.body.dataset.peak)) document.body.dataset.peak = peak.toFixed(4);
    draw.clearRect(0, 0, canvas.width, canvas.height);
    draw.beginPath();
    for (let i = 0; i < SAMPLES; i += 4) draw.lineTo((i / SAMPLES) * canvas.width, (1 - wave[i]) * canvas.height / 2);
    draw.strokeStyle = getComputedStyle(canvas).color;
    draw.lineWidth = 2;
    draw.stroke();
    drawing = player.playing;
    canvas.hidden = !drawing;
    if (drawing) requestAnimationFrame(frame);
  }

  player.addEventListener("change", () => {
    document.body.dataset.playing = player.playing;
    if (player.playing && !drawing) {
      document.body.dataset.peak = 0;
      drawing = true;
      canvas.hidden = false;
      requestAnimationFrame(frame);
    }
  });
}
