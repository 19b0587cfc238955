"use strict";
// The shape of a spoken conversation: it breathes while it listens, swells with the sound, and turns while the model thinks.

const MOODS = {  // `size` as a part of the canvas, so that the largest outline stays on it; `wobble` of its outline, `speed` of its motion, `swell` with the sound
  connecting: { size: 0.24, wobble: 0.01, speed: 0.5, swell: 0 },
  listening: { size: 0.27, wobble: 0.02, speed: 0.7, swell: 0.3 },
  hearing: { size: 0.24, wobble: 0.05, speed: 1.4, swell: 0.4 },
  thinking: { size: 0.22, wobble: 0.1, speed: 3, swell: 0 },
  speaking: { size: 0.24, wobble: 0.06, speed: 1.8, swell: 0.35 },
  interrupted: { size: 0.16, wobble: 0.02, speed: 1, swell: 0 },
  muted: { size: 0.22, wobble: 0, speed: 0, swell: 0 },
};
const EASE = 0.12;     // of the way to a new mood, per frame
const POINTS = 90;     // of an outline
const LAYERS = [[1.3, 0.14], [1.14, 0.25], [1, 1]];  // scale and opacity of the outlines, from behind

/** Draws on a canvas, in its color, as long as `look` gives {state, level}. */
export function animate(canvas, look) {
  const draw = canvas.getContext("2d"), still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const now = { ...MOODS.connecting, level: 0 };
  let phase = 0;

  function outline(scale, layer) {
    const middle = canvas.width / 2;
    draw.beginPath();
    for (let i = 0; i <= POINTS; i++) {
      const angle = 2 * Math.PI * i / POINTS;
      const wave = Math.sin(3 * angle + phase + layer) + 0.6 * Math.sin(5 * angle - 1.3 * phase + 2 * layer) + 0.4 * Math.sin(2 * angle + 0.7 * phase);
      const radius = canvas.width * now.size * scale * (1 + now.swell * now.level * (1 + 0.3 * layer) / 1.6 + now.wobble * wave * (0.5 + now.level));
      draw.lineTo(middle + Math.min(radius, middle) * Math.cos(angle), middle + Math.min(radius, middle) * Math.sin(angle));
    }
    draw.closePath();
  }

  function frame() {
    const seen = look();
    if (!seen) return;
    for (const [key, value] of Object.entries(MOODS[seen.state])) now[key] += EASE * (value - now[key]);
    now.level += (seen.level > now.level ? 0.5 : EASE) * (Math.sqrt(Math.min(1, seen.level)) - now.level);
    phase += still ? 0 : now.speed / 40;
    draw.clearRect(0, 0, canvas.width, canvas.height);
    draw.fillStyle = getComputedStyle(canvas).color;
    LAYERS.forEach(([scale, opacity], layer) => {
      draw.globalAlpha = opacity;
      outline(scale, LAYERS.length - 1 - layer);
      draw.fill();
    });
    requestAnimationFrame(frame);
  }

  requestAnimationFrame(frame);
}
