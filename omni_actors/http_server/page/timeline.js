"use strict";
// The timeline of the last request and its measurements.

import { request } from "./api.js";
import { $, make, makeSvg } from "./common.js";

const OUTCOMES = { undefined: "", done: "", running: "", aborted: "It was stopped." };  // others are codes of errors
const LOOKS = 12, PAUSE = 150;  // how often to look until the pipeline has noticed the end, milliseconds between

/** The pipeline's timeline of a request that has ended for this page; null if it has none. */
export async function timelineOf(id) {
  if (!id) return null;
  let timeline = null;
  for (let look = 0; look < LOOKS && (!timeline || timeline.outcome === "running"); look++) {
    if (look) await new Promise((resolve) => setTimeout(resolve, PAUSE));
    try {
      timeline = await (await request(`/v1/requests/${encodeURIComponent(id)}/timeline`)).json();
    } catch {  // it is too old, or the server is away; what the page measured is shown all the same
      return timeline;
    }
  }
  return timeline;
}

/** Rows to draw: {name, parts: [{name, kind, at, seconds}], about}, in seconds since the request began. */
function lanesOf(timeline) {
  const kinds = { waiting: "wait", gathering: "wait", queued: "queue" };
  return timeline.stages.map((stage) => ({
    name: timeline.stages.some((other) => other !== stage && other.stage === stage.stage)
      ? `${stage.stage} ${stage.attempt + 1}` : stage.stage,
    about: `${stage.stage}/${stage.replica} ${stage.outcome}: ${stage.input_tokens} in, ${stage.output_tokens} out`,
    parts: stage.phases.map((phase) => ({ ...phase, kind: kinds[phase.name] ?? "work" })),
  }));
}

/** The same rows from the usage, for a request without a timeline. */
function lanesOfUsage(usage) {
  return Object.entries(usage?.stages ?? {}).map(([name, stage]) => {
    // The output of a stage stays visible even if all of it comes at the end.
    const first = Math.min(stage.first_output, 0.99 * stage.finished);
    return {
      name,
      about: `${name}: ${stage.input_tokens} in, ${stage.output_tokens} out`,
      parts: [{ name: "until the first output", kind: "wait", at: 0, seconds: first },
              { name: "output", kind: "work", at: first, seconds: stage.finished - first }],
    };
  });
}

/** A row with what the page itself has seen; `times` are in milliseconds. */
function laneOfPage(times) {
  const marks = [["first text", times.text], ["first preview", times.preview], ["first sound", times.audio], ["smooth start", times.smooth], ["end", times.total]];
  return {
    name: "this page", about: "this page",
    parts: marks.filter(([, at]) => at !== undefined).map(([name, at]) => ({ name, kind: "mark", at: at / 1000, seconds: 0 })),
  };
}

const duration = (seconds) => `${seconds.toFixed(seconds < 0.01 ? 3 : 2)} s`;

const TERMS = {  // what the measurements mean
  "First text": "From the end of your message to the first word of the answer.",
  "First preview": "From your message to the first picture on the way.",
  "First sound": "From the end of your message to the first sound of the answer.",
  "Smooth start": "The earliest moment from which the sound could be played without a gap.",
  "Whole answer": "From the end of your message to the last word and sound.",
  "Audio": "How long the sound of the answer is.",
  "Time per second of audio": "How long a second of sound takes to be made; above 1 it is heard faster than it is made.",
  "Tokens in, out": "Pieces of text, sound and pictures that the model read and wrote; a word has one or two.",
};

function laneElement(lane, total) {
  const percent = (seconds) => `${(100 * Math.min(1, Math.max(0, seconds / total))).toFixed(2)}%`;
  const words = lane.parts.map((part) => part.kind === "mark"
    ? `${part.name} after ${duration(part.at)}` : `${part.name} ${duration(part.seconds)}`);
  const about = `${lane.about}; ${words.join(", ")}`;
  const showDetails = () => { $("details").textContent = about; };
  const bar = makeSvg("svg", { "aria-hidden": "true" });
  for (const part of lane.parts) {
    const x = percent(part.at);
    bar.append(part.kind === "mark"
      ? makeSvg("line", { class: "mark", x1: x, x2: x, y1: 0, y2: 14 })
      : makeSvg("rect", { class: part.kind, x, rx: 1.5, width: percent(Math.max(part.seconds, 0.006 * total)),
                          y: part.kind === "work" ? 1 : 5, height: part.kind === "work" ? 12 : 4 }));
  }
  return make("div", { className: "lane", tabIndex: 0, role: "img", ariaLabel: about, onfocus: showDetails, onmouseenter: showDetails },
              make("span", {}, lane.name), bar);
}

export function clearTimeline() {
  $("timeline").replaceChildren(make("p", { className: "muted" }, "Nothing yet."));
  $("details").textContent = "";
  $("measurements").replaceChildren();
}

/** Shows the timeline, or the usage where there is none, and the times that the page measured. */
export function showTimeline(timeline, usage, times, audioSeconds) {
  const lanes = timeline ? lanesOf(timeline) : lanesOfUsage(usage);
  if (!lanes.length && times.total === undefined) { clearTimeline(); return; }
  if (times.total !== undefined) lanes.push(laneOfPage(times));
  const total = Math.max(0.001, ...lanes.flatMap((lane) => lane.parts.map((part) => part.at + part.seconds)));
  const axis = make("div", { className: "axis" }, ...[0, 0.5, 1].map((part) => make("span", {}, duration(part * total))));
  $("timeline").dataset.source = timeline ? "pipeline" : "usage";
  $("timeline").replaceChildren(...lanes.map((lane) => laneElement(lane, total)), axis);
  $("details").textContent = OUTCOMES[timeline?.outcome] ?? `Ended with ${timeline.outcome}.`;
  const measurements = [
    ["First text", times.text], ["First preview", times.preview], ["First sound", times.audio], ["Smooth start", times.smooth], ["Whole answer", times.total],
  ].filter(([, value]) => value !== undefined).map(([name, value]) => [name, duration(value / 1000)]);
  if (audioSeconds) {
    measurements.push(["Audio", `${audioSeconds.toFixed(2)} s`]);
    measurements.push(["Time per second of audio", duration(times.total / 1000 / audioSeconds)]);
  }
  if (usage) measurements.push(["Tokens in, out", `${usage.prompt_tokens}, ${usage.completion_tokens}`]);
  $("measurements").replaceChildren(...measurements.flatMap(([name, value]) => [make("dt", {}, make("abbr", { title: TERMS[name] }, name)), make("dd", {}, value)]));
}
