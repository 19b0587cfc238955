"use strict";
// How to answer: the fields under "Settings", kept from one visit to the next; the API key for as long as the tab.

import { $ } from "./common.js";

const KEPT = ["speak", "voice", "speed", "system", "temperature", "tokens", "seed", "width", "height", "seconds", "steps", "guidance", "negative", "previews"];
const PARAMETERS = {  // by the fields for them
  width: "width", height: "height", seconds: "seconds", steps: "num_steps", guidance: "guidance_scale", negative: "negative_prompt", previews: "previews",
};
const MOST_PREVIEWS = 3;  // that the route shows of a picture

let showPanel = null;
let declared = {};  // that the pipeline's models declare, by name
let drawing = false, filming = false;  // pictures or videos; videos
let ability = null;     // of a pipeline that speaks the text it is given

/** Restores the fields, and keeps what is changed in them. `onKey` is called when the API key has changed, `show` shows them. */
export function setUp({ onKey, show }) {
  showPanel = show;
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem("settings") ?? "{}");
  } catch (error) {
    console.warn("The settings of the last visit cannot be read:", error);
  }
  for (const name of KEPT) {
    if (name in kept && name !== "voice") setValue($(name), kept[name]);
    $(name).addEventListener("change", () => {
      kept[name] = $(name).type === "checkbox" ? $(name).checked : $(name).value;
      localStorage.setItem("settings", JSON.stringify(kept));
    });
  }
  $("preset").onchange = choosePreset;
  for (const id of ["width", "height"]) $(id).addEventListener("input", () => { $("preset").value = ""; });
  $("voice").dataset.wanted = kept.voice ?? "";
  $("key").value = sessionStorage.getItem("key") ?? "";
  $("key").onchange = () => { sessionStorage.setItem("key", $("key").value.trim()); onKey(); };
  $("ask-key").onsubmit = (event) => {
    event.preventDefault();
    $("key").value = $("asked-key").value;
    $("key").onchange();
  };
}

/** Asks for the API key, or for another one, where nobody has to look for it; or no more. */
export function askKey(wanted) {
  const asked = !$("ask-key").hidden;
  $("ask-key").hidden = !wanted;
  $("key-wanted").textContent = $("key").value ? "The server does not take this API key." : "The server asks for an API key.";
  if (wanted && !asked) $("asked-key").focus();
  if (!wanted && asked) $("text").focus();
}

function setValue(field, value) {
  if (field.type === "checkbox") field.checked = value;
  else field.value = value;
}

/** Offers what the pipeline can do. */
export function offer(status) {
  ability = status.speech;
  const voices = [...(ability?.clip === "required" ? [] : ["default"]), ...status.voices], list = $("voice");
  if (voices.join("\n") !== [...list.options].map((option) => option.value).join("\n")) {
    const wanted = list.value || list.dataset.wanted;
    list.replaceChildren(...voices.map((voice) => new Option(voice)));
    list.value = voices.includes(wanted) ? wanted : voices[0] ?? "";
  }
  if (status.models.join("\n") !== [...$("model").options].map((option) => option.value).join("\n")) {
    $("model").replaceChildren(...status.models.map((name) => new Option(name)));
  }
  $("models").hidden = status.models.length < 2;
  $("sample").hidden = !status.modalities.includes("audio") || ability?.clip === "required";
  $("speak").disabled = !status.modalities.includes("audio");
  filming = status.modalities.includes("video");
  drawing = (filming || status.modalities.includes("image")) && !status.modalities.includes("text");
  document.querySelectorAll(".for-talk").forEach((element) => { element.hidden = drawing; });
  document.querySelectorAll(".for-pictures").forEach((element) => { element.hidden = !drawing; });
  if (ability) document.querySelectorAll(".for-answers").forEach((element) => { element.hidden = true; });
  $("manner").hidden = ability?.instructions === "none";
  $("system-label").textContent = ability ? "How to speak" : "System prompt";
  $("text").placeholder = drawing ? `Describe a ${work()}` : ability ? "A text to speak" : "Message";
  $("file").accept = drawing ? "image/*" : "image/*,audio/*,video/*,text/*,.pdf,.md,.json,.csv,.yaml,.py";
  $("attach").title = drawing ? (filming ? "Attach the picture that the video begins with" : "Attach pictures to change") : "Attach pictures, sounds, videos, PDF or texts";
  declared = Object.fromEntries(Object.values(status.parameters).flat().map((parameter) => [parameter.name, parameter]));
  $("count-name").textContent = filming ? "Videos" : "Pictures";
  $("presets").hidden = !declared.width || !declared.height;
  if (drawing) for (const [id, name] of Object.entries(PARAMETERS)) fit($(id), declared[name]);
}

/** Gives a field the limits of its parameter; one that the pipeline does not have is hidden. */
function fit(field, parameter) {
  field.closest("label").hidden = !parameter;
  if (!parameter || field.type === "checkbox") return;
  if (parameter.kind === "text") {
    if (parameter.most) field.maxLength = parameter.most;
    return;
  }
  const step = parameter.multiple_of || 1;
  if (parameter.least !== undefined) field.min = Math.ceil(parameter.least / step) * step;
  if (parameter.most !== undefined) field.max = parameter.most;
  field.step = parameter.kind === "int" ? step : "any";
  field.placeholder = parameter.default ?? "default";
}

/** The name of the model that is asked: the pipeline's, or one of its adapters. */
export const model = () => $("model").value;

/** Whether the pipeline answers with pictures or videos, and whether with videos. */
export const draws = () => drawing;
export const films = () => filming;

/** What the pipeline makes then. */
export const work = () => filming ? "video" : "picture";

/** Whether the pipeline speaks what is written, and does not answer. */
export const reads = () => ability !== null;

/** The fields of a request that has a text spoken. The box of the system prompt says how. */
export function speech() {
  const instructions = $("system").value.trim();
  return {
    ...($("voice").value ? { voice: $("voice").value } : {}),
    ...(instructions && ability.instructions !== "none" ? { instructions } : {}),
    ...($("seed").value ? { seed: Number($("seed").value) } : {}),
    speed: speed(),
  };
}

/** How fast sound is heard; 1 is as the model speaks. */
export const speed = () => Number($("speed").value);

/** How many pictures are made of a message. */
export const pictures = () => Number($("count").value);

/** Sets width and height to a form ("3:2") with as many pixels as the model's own size, "" to that. */
function choosePreset() {
  const [wide, high] = $("preset").value.split(":").map(Number);
  const scale = Math.sqrt((declared.width.default ?? 1024) * (declared.height.default ?? 1024) / (wide * high));
  for (const [id, part] of [["width", wide], ["height", high]]) {
    const step = declared[id].multiple_of || 1;
    $(id).value = high ? Math.round(part * scale / step) * step : "";
    $(id).dispatchEvent(new Event("change"));
  }
}

/** The fields of a request for a picture or a video; what is left out is as the model has it. */
export function picture() {
  const fields = filming ? {} : { stream: true, progress: true };
  const value = (id) => declared[PARAMETERS[id]] ? $(id).value.trim() : "";
  const side = (id, other) => value(id) || declared[id].default || value(other);
  if (value("width") || value("height")) fields.size = `${side("width", "height")}x${side("height", "width")}`;
  if (value("seconds")) fields.seconds = Number(value("seconds"));
  if (value("steps")) fields.num_inference_steps = Number(value("steps"));
  if (value("guidance")) fields.guidance_scale = Number(value("guidance"));
  if (value("negative")) fields.negative_prompt = value("negative");
  if ($("seed").value) fields.seed = Number($("seed").value);
  if (declared.previews && $("previews").checked) fields.partial_images = Math.min(MOST_PREVIEWS, declared.previews.most ?? MOST_PREVIEWS);
  return fields;
}

export const speaks = () => ability !== null || ($("speak").checked && !$("speak").disabled);

/** Whether every field can be used; shows the first one that cannot. */
export function valid() {
  const wrong = $("settings").querySelector(":invalid");
  if (!wrong) return true;
  showPanel();
  wrong.reportValidity();
  return false;
}

/** The fields of a request that follow from the settings. */
export function parameters() {
  const fields = speaks()
    ? { modalities: ["text", "audio"], audio: { voice: $("voice").value || "default", format: "pcm16", speed: speed() } }
    : { modalities: ["text"] };
  if ($("temperature").value) fields.temperature = Number($("temperature").value);
  if ($("tokens").value) fields.max_completion_tokens = Number($("tokens").value);
  if ($("seed").value) fields.seed = Number($("seed").value);
  return fields;
}

/** The configuration of a realtime session that follows from the settings. `textStage` is where the temperature applies. */
export function session(textStage) {
  const voice = $("voice").value;
  return {
    type: "realtime",
    instructions: $("system").value.trim(),
    output_modalities: [speaks() ? "audio" : "text"],
    audio: { input: { transcription: {} }, ...(speaks() ? { output: { voice: voice && voice !== "default" ? voice : null, speed: speed() } } : {}) },
    max_output_tokens: $("tokens").value ? Number($("tokens").value) : "inf",
    seed: $("seed").value ? Number($("seed").value) : null,
    stage_params: $("temperature").value ? { [textStage]: { temperature: Number($("temperature").value) } } : {},
  };
}

/** The messages that stand before the conversation. */
export function preamble() {
  const text = $("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}
