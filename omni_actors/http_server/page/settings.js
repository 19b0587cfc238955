"use strict";
// How to answer: the fields under "Settings", kept from one visit to the next; the API key for as long as the tab.

import { $ } from "./common.js";

const KEPT = ["speak", "voice", "system", "temperature", "tokens", "seed"];

let showPanel = null;

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
  $("voice").dataset.wanted = kept.voice ?? "";
  $("key").value = sessionStorage.getItem("key") ?? "";
  $("key").onchange = () => { sessionStorage.setItem("key", $("key").value.trim()); onKey(); };
}

function setValue(field, value) {
  if (field.type === "checkbox") field.checked = value;
  else field.value = value;
}

/** Offers what the pipeline can do. */
export function offer(status) {
  const voices = ["default", ...status.voices], list = $("voice");
  if (list.length !== voices.length) {
    const wanted = list.value || list.dataset.wanted;
    list.replaceChildren(...voices.map((voice) => new Option(voice)));
    list.value = voices.includes(wanted) ? wanted : "default";
  }
  $("speak").disabled = !status.modalities.includes("audio");
}

export const speaks = () => $("speak").checked && !$("speak").disabled;

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
    ? { modalities: ["text", "audio"], audio: { voice: $("voice").value || "default", format: "pcm16" } }
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
    audio: { input: { transcription: {} }, ...(speaks() ? { output: { voice: voice && voice !== "default" ? voice : null } } : {}) },
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
