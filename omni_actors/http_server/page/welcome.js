"use strict";
// The first sight: what the model is and can do, and examples that are sent by a click.

import { speak } from "./api.js";
import { attachmentOf } from "./attachments.js";
import { $, icon, make } from "./common.js";
import * as settings from "./settings.js";
import { samplesOf, wavOf } from "./wav.js";

// An example is a `text`; with `shape` and `color` a picture goes with it, with `spoken` the sound of these words.
const ANSWERS = [
  { text: "Explain in three sentences why the sea is salt." },
  { text: "Compare tea and coffee in a small table." },
  { text: "Tell me a story of five sentences about a lighthouse." },
  { text: "Say: The children found a small boat near the river." },
  { text: "What do you see?", shape: "circle", color: "blue" },
  { text: "What do you hear?", spoken: "The tide comes in at seven." },
];
const SPOKEN = [
  "Good morning! The train to the coast leaves in ten minutes.", "Once upon a time there was a lighthouse that was afraid of the dark.",
  "She sells sea shells by the sea shore.", "The answer is four hundred and twelve, give or take three.",
  "Breathe in. Hold it for a moment. And breathe out again.", "Wait! Did you really say that?",
].map((text) => ({ text }));
const DRAWN = [
  "A lighthouse in a storm, oil painting", "A cup of tea on a windowsill, morning light, photograph",
  "A map of an island that does not exist", "A fox that reads a newspaper, watercolor",
  "A street in the rain at night, neon signs", "An isometric room full of plants",
].map((text) => ({ text }));
const SIDE = 224, RATE = 24000;  // pixels of a drawn example, Hz of a spoken one

let send = null, shown = "";

/** `sender` is called with the text and the attachments of an example. */
export function setUp(sender) { send = sender; }

/** Shows what a pipeline is and can do. */
export function offer(status) {
  const key = JSON.stringify([status.models, status.modalities, status.max_media, status.page]);
  if (key === shown) return;
  shown = key;
  $("model-name").textContent = status.models[0] ?? status.pipeline;
  $("about").textContent = status.page.about ?? sentence(status);
  const fits = ({ shape, spoken }) => !(shape && !takes(status, "image")) && !(spoken && !(takes(status, "audio") && speaks(status)));
  const general = settings.draws() ? DRAWN : settings.reads() ? SPOKEN : ANSWERS;
  $("examples").replaceChildren(...(status.page.examples ?? general).filter(fits).map((example) => make("li", {}, button(example))));
}

const takes = (status, kind) => !status.speech && (status.max_media[kind] ?? 1) > 0;
const speaks = (status) => status.modalities.includes("audio");

const list = (words) => words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

function sentence(status) {
  if (settings.films()) return `Describe a video${takes(status, "image") ? ", or attach the picture that it begins with, and say what happens" : ""}.`;
  if (settings.draws()) return "Describe a picture, or attach one and say what to change.";
  if (settings.reads()) return "It speaks what you write.";
  const media = [["image", "pictures"], ["audio", "sounds"], ["video", "videos"]].filter(([kind]) => takes(status, kind));
  return `It reads ${list(["text", ...media.map(([, name]) => name)])}, and answers in ${speaks(status) ? "text and speech" : "text"}.`;
}

function button(example) {
  const words = [make("span", {}, example.text, ...(example.spoken ? [make("small", {}, `“${example.spoken}”`)] : []))];
  if (example.shape) words.unshift(canvasOf(example, "example-picture"));
  if (example.spoken) words.unshift(icon("microphone"));
  const made = make("button", { type: "button", onclick: () => run(example, made) }, ...words);
  return made;
}

async function run(example, made) {
  made.disabled = true;
  if (example.spoken) $("progress").textContent = "speaking the example …";
  try {
    await send(example.text, () => filesOf(example));
  } finally {
    made.disabled = false;
    $("progress").textContent = "";
  }
}

async function filesOf({ shape, color, spoken }) {
  if (shape) {
    const canvas = canvasOf({ shape, color });
    return [await attachmentOf(await new Promise((resolve) => canvas.toBlob(resolve)), `${color} ${shape}.png`)];
  }
  if (!spoken) return [];
  const pieces = [];
  for await (const { sound } of speak({ model: settings.model(), input: spoken })) if (sound) pieces.push(samplesOf(sound));
  return [await attachmentOf(wavOf(pieces, RATE), `“${spoken}”`)];
}

/** A canvas with a circle, a square or a triangle. */
function canvasOf({ shape, color }, className = "") {
  const canvas = make("canvas", { width: SIDE, height: SIDE, className }), draw = canvas.getContext("2d");
  draw.fillStyle = "white";
  draw.fillRect(0, 0, SIDE, SIDE);
  draw.fillStyle = color;
  draw.beginPath();
  const third = SIDE / 3;
  if (shape === "circle") draw.arc(SIDE / 2, SIDE / 2, third, 0, 2 * Math.PI);
  else if (shape === "square") draw.rect(SIDE / 2 - third, SIDE / 2 - third, 2 * third, 2 * third);
  else [[0, -third], [third, third], [-third, third]].forEach(([x, y]) => draw.lineTo(SIDE / 2 + x, SIDE / 2 + y));
  draw.fill();
  return canvas;
}
