"use strict";
// The page of the HTTP server: one conversation through /v1/chat/completions, the pipeline through /v1/status.

import { Player, samplesOf, showLevel, toWav } from "./audio.js";
import { $, failure, headers, showError, state } from "./common.js";
import { showTimeline, timelineOf } from "./timeline.js";

// ---------------------------------------------------------------------------------------------------------------------
// Requests

/** The data of each server-sent event of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function send() {
  if (state.request || state.recorder) return;
  const text = $("text").value.trim();
  if (!text && !state.attachments.length) return;
  showError("");
  const parts = state.attachments.map((attachment) => attachment.part);
  if (text) parts.push({ type: "text", text });
  const message = { role: "user", content: parts.length === 1 && text ? text : parts };
  const names = state.attachments.map((attachment) => attachment.name);
  addMessage("user", text, names.join(", "));
  $("text").value = "";
  state.attachments = [];
  showAttachments();

  const speak = $("speak").checked;
  const body = {
    model: state.status?.models[0] ?? "", stream: true, stream_options: { include_usage: true },
    modalities: speak ? ["text", "audio"] : ["text"], messages: [...state.history, message],
  };
  if (speak) body.audio = { voice: $("voice").value || "default", format: "pcm16" };
  if ($("tokens").value) body.max_completion_tokens = Number($("tokens").value);

  const controller = state.request = new AbortController();
  const player = speak ? new Player(state.status?.sample_rate || 24000) : null;
  const item = addMessage("assistant", "", "");
  item.classList.add("working");
  busy(true);
  document.body.dataset.peak = 0;
  document.body.dataset.audioSeconds = 0;
  if (player) showLevel(player);
  try {
    await converse(body, message, item, player, controller.signal);
  } catch (error) {
    if (player) player.stop();
    if (controller.signal.aborted) note(item, "cancelled");
    else {
      note(item, "failed");
      showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
    const timeline = await timelineOf(state.requestId);  // shows how far it got
    if (timeline) showTimeline(timeline, null, {}, 0);
  } finally {
    item.classList.remove("working");
    state.request = null;
    busy(false);
    refresh();
  }
}

async function converse(body, message, item, player, signal) {
  const began = performance.now();
  const times = {};
  state.requestId = null;
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(body), signal,
  });
  state.requestId = response.headers.get("x-request-id");
  if (!response.ok) throw new Error(await failure(response));
  const say = item.querySelector(".say");
  let usage = null, complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") { complete = true; break; }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(`${chunk.error.message} (${chunk.error.code})`);
    if (chunk.usage) usage = chunk.usage;
    const delta = chunk.choices[0]?.delta ?? {};
    const text = delta.content || delta.audio?.transcript;
    if (text) {
      times.text ??= performance.now() - began;
      say.textContent += text;
      item.scrollIntoView({ block: "end" });
    }
    if (delta.audio?.data && player) {
      times.audio ??= performance.now() - began;
      times.smooth = Math.max(times.smooth ?? 0, performance.now() - began - 1000 * player.seconds);
      player.add(samplesOf(delta.audio.data));
      document.body.dataset.audioSeconds = player.seconds.toFixed(3);
    }
  }
  if (!complete) throw new Error("The answer was cut short.");
  times.total = performance.now() - began;
  state.history.push(message, { role: "assistant", content: say.textContent });
  if (player?.seconds) {
    const button = document.createElement("button");
    button.className = "play";
    button.textContent = `Play again (${player.seconds.toFixed(1)} s)`;
    button.onclick = () => player.replay();
    item.append(button);
  }
  showTimeline(await timelineOf(state.requestId), usage, times, player?.seconds ?? 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Conversation and status

function addMessage(role, text, about) {
  const item = document.createElement("li");
  item.className = role;
  const say = document.createElement("span");
  say.className = "say";
  say.textContent = text;
  item.append(say);
  if (about) note(item, about);
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function note(item, text) {
  const small = document.createElement("small");
  small.textContent = text;
  item.append(small);
}

function busy(running) {
  $("cancel").disabled = !running;
  $("send").disabled = running;
}

function showAttachments() {
  $("attachments").replaceChildren(...state.attachments.map((attachment, index) => {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${attachment.name}`);
    remove.onclick = () => { state.attachments.splice(index, 1); showAttachments(); $("text").focus(); };
    item.append(attachment.name, remove);
    return item;
  }));
}

function showStatus(status) {
  state.status = status;
  $("pipeline").textContent = `${status.pipeline} · ${status.modalities.join(" and ")}`;
  $("health").textContent = status.healthy ? "ready" : "degraded";
  $("health").className = `badge ${status.healthy ? "good" : "bad"}`;
  $("inflight").textContent = `${status.in_flight} request${status.in_flight === 1 ? "" : "s"} in flight`;
  $("stages").replaceChildren(...status.stages.map((stage) => {
    const item = document.createElement("li");
    const working = stage.state === "ready" && stage.in_flight > 0;
    item.className = working ? "busy" : stage.state;
    const dot = document.createElement("span"), name = document.createElement("span"), about = document.createElement("span");
    dot.className = "dot";
    about.className = "note";
    name.textContent = status.stages.filter((other) => other.stage === stage.stage).length > 1
      ? `${stage.stage}/${stage.replica}` : stage.stage;
    const idle = stage.spare && stage.state === "ready" ? "spare" : stage.state;
    about.textContent = working ? `${stage.in_flight} working` : idle;
    item.append(dot, name, about);
    return item;
  }));
  const voices = $("voice");
  if (voices.length !== status.voices.length + 1) {
    voices.replaceChildren(...["default", ...status.voices].map((voice) => new Option(voice)));
  }
  if (!status.modalities.includes("audio")) { $("speak").checked = false; $("speak").disabled = true; }
}

async function refresh() {
  clearTimeout(state.lastTick);
  try {
    const response = await fetch("/v1/status", { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    showStatus(await response.json());
  } catch (error) {
    $("health").textContent = error instanceof TypeError ? "unreachable" : "unavailable";
    $("health").className = "badge bad";
    $("pipeline").textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
  state.lastTick = setTimeout(refresh, document.hidden ? 10000 : state.request ? 250 : 2000);
}

// ---------------------------------------------------------------------------------------------------------------------
// Files and microphone

const base64 = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${blob.name ?? "The file"} cannot be read.`));
  reader.readAsDataURL(blob);
});

const SERVER_READS = /^audio\/(x-)?(wav|wave|mpeg|mp3|flac|ogg)$/;  // the browser decodes other audio

async function attach(blob, name) {
  if (blob.type.startsWith("audio/") && !SERVER_READS.test(blob.type)) blob = await toWav(blob);
  const url = await base64(blob);
  const kind = blob.type.split("/")[0];
  if (kind === "image") state.attachments.push({ name, part: { type: "image_url", image_url: { url } } });
  else if (kind === "audio") state.attachments.push({ name, part: { type: "audio_url", audio_url: { url } } });
  else if (kind === "video") state.attachments.push({ name, part: { type: "video_url", video_url: { url } } });
  else throw new Error(`${name}: only images, sounds and videos can be attached.`);
  showAttachments();
}

async function record() {
  if (state.recorder) { state.recorder.stop(); return; }
  showError("");
  if (!navigator.mediaDevices) {
    showError("The browser gives a microphone to https pages and to localhost only.");
    return;
  }
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const recorder = state.recorder = new MediaRecorder(stream);
    const pieces = [];
    const began = performance.now();
    const clock = setInterval(() => {
      $("recording").textContent = `recording ${((performance.now() - began) / 1000).toFixed(1)} s`;
    }, 100);
    recorder.ondataavailable = (event) => pieces.push(event.data);
    recorder.onstop = async () => {
      clearInterval(clock);
      stream.getTracks().forEach((track) => track.stop());
      state.recorder = null;
      $("record").setAttribute("aria-pressed", "false");
      $("record").textContent = "Record";
      $("recording").textContent = "";
      try {
        const wav = await toWav(new Blob(pieces, { type: recorder.mimeType }));
        await attach(wav, `recording (${((performance.now() - began) / 1000).toFixed(1)} s)`);
        $("send").focus();
      } catch (error) {
        showError(`The recording cannot be read: ${error.message}`);
      }
    };
    recorder.start();
    $("record").setAttribute("aria-pressed", "true");
    $("record").textContent = "Stop recording";
  } catch (error) {
    state.recorder = null;
    showError(`The microphone cannot be used: ${error.message}`);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Controls

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("cancel").onclick = () => { state.request?.abort(); $("text").focus(); };
$("attach").onclick = () => $("file").click();
$("record").onclick = record;
$("file").onchange = async () => {
  showError("");
  for (const file of $("file").files) {
    try {
      await attach(file, file.name);
    } catch (error) {
      showError(error.message);
    }
  }
  $("file").value = "";
  $("text").focus();
};
$("clear").onclick = () => {
  state.request?.abort();
  state.history = [];
  $("messages").replaceChildren($("empty"));
  $("timeline").replaceChildren();
  $("measurements").replaceChildren();
  showError("");
  $("text").focus();
};
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.request) state.request.abort();
  if (event.altKey && event.code === "KeyM") { event.preventDefault(); record(); }
});
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").onchange = () => { sessionStorage.setItem("key", $("key").value.trim()); refresh(); };
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
refresh();
