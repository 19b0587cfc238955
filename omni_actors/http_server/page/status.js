"use strict";
// The state of the pipeline, from /v1/status.

import { PageError, request } from "./api.js";
import { $, make } from "./common.js";
import * as settings from "./settings.js";
import * as welcome from "./welcome.js";

const CLOSE = 250, USUAL = 2000, HIDDEN = 10_000;  // milliseconds between two looks
const LONGEST = 5000;                              // milliseconds to wait for an answer
const SETTLING = 5000;                             // milliseconds after a request in which its stages end their work

export let current = null;  // the last response
let timer = 0;
let running = false;
let closeUntil = 0;

/** Looks often while a request of this page runs, and until its stages have ended their work. */
export function requestRuns(runs) {
  running = runs;
  closeUntil = performance.now() + SETTLING;
  return refresh();
}

async function look() {
  const patience = new AbortController();
  const end = setTimeout(() => patience.abort(new PageError("The server does not answer.")), LONGEST);
  try {
    return await (await request("/v1/status", { signal: patience.signal })).json();
  } finally {
    clearTimeout(end);
  }
}

/** Looks now, and from then on again and again. */
export async function refresh() {
  clearTimeout(timer);
  try {
    current = await look();
    show(current);
  } catch (error) {
    showAway(error);
  }
  clearTimeout(timer);  // of another look that began meanwhile
  const changing = running || (current?.in_flight && performance.now() < closeUntil);
  timer = setTimeout(refresh, document.hidden ? HIDDEN : changing ? CLOSE : USUAL);
}

const made = { seconds: 0, in: 0 };  // sound of this page's answers, and the seconds that it took

/** Notes how long an answer's sound took to be made, in seconds. */
export function noteSound(seconds, took) {
  made.seconds += seconds;
  made.in += took;
  showPace();
}

/** Says that the pipeline computes on a CPU, or is too slow for another reason, and how fast it is. */
function showPace() {
  const pace = made.in ? made.seconds / made.in : Infinity;
  const about = current?.on_cpu ? "This model computes on a CPU" : pace < 1 ? "Sound is made more slowly than it is heard" : "";
  $("pace").hidden = !about;
  $("pace").textContent = made.in ? `${about}: ${pace.toFixed(1)} s of sound per second so far.` : `${about}; answers can take a while.`;
}

function showHealth(words, className, about) {
  $("health").textContent = words;
  $("health").className = `badge ${className}`;
  $("pipeline").textContent = about;
}

function show(status) {
  showHealth(status.healthy ? "ready" : "degraded", status.healthy ? "good" : "bad",
             `${status.pipeline} · ${status.modalities.join(" and ")}`);
  $("inflight").textContent = `${status.in_flight} request${status.in_flight === 1 ? "" : "s"} in flight`;
  $("stages").replaceChildren(...status.stages.map((stage) => {
    const several = status.stages.filter((other) => other.stage === stage.stage).length > 1;
    const working = stage.state === "ready" && stage.in_flight > 0;
    const idle = stage.leaving ? "leaving" : stage.spare && stage.state === "ready" ? "spare" : stage.state;
    return stageItem(several ? `${stage.stage}/${stage.replica}` : stage.stage, working ? "busy" : stage.state,
                     working ? `${stage.in_flight} working` : idle);
  }));
  showPace();
  settings.askKey(false);
  settings.offer(status);
  welcome.offer(status);
}

function stageItem(name, className, about) {
  return make("li", { className }, make("span", { className: "dot" }), make("span", { className: "name" }, name),
              make("span", { className: "note" }, about));
}

/** Nothing is known of the stages while the server or its coordinator is away. */
function showAway(error) {
  showHealth(error.details ? "unavailable" : "unreachable", "bad", error.message);
  settings.askKey(error.status === 401);
  $("inflight").textContent = "";
  $("stages").replaceChildren(...[...$("stages").querySelectorAll(".name")].map((name) => stageItem(name.textContent, "unknown", "unknown")));
}
