"use strict";
// The page of the HTTP server: one conversation through /v1/chat/completions, the pipeline through /v1/status.

const $ = (id) => document.getElementById(id);
const state = {
  status: null,       // last answer of /v1/status
  history: [],        // messages of the conversation, in OpenAI's form
  attachments: [],    // {name, part} to go with the next message
  request: null,      // AbortController of the request that runs
  requestId: null,    // its name in the pipeline
  recorder: null,     // MediaRecorder while recording
  lastTick: 0,
};

// ---------------------------------------------------------------------------------------------------------------------
// Sound: chunks are queued one behind the other on the audio clock

class Player {
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
    // A little ahead of the clock after silence, so that the next chunk can come in time.
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

function samplesOf(base64) {
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

function showLevel(player) {
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

// ---------------------------------------------------------------------------------------------------------------------
// Talking to the server

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  try {
    const { error } = await response.json();
    return `${error.message}${error.code ? ` (${error.code})` : ""}`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

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

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
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
    const timeline = await timelineOf(state.requestId);  // how far it came
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
      player.add(samplesOf(delta.audio.data));
      document.body.dataset.audioSeconds = player.seconds.toFixed(3);
    }
  }
  if (!complete) throw new Error("The answer was broken off.");
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
// What is seen

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

function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** The timeline that the pipeline keeps of a request; null where it keeps none. */
async function timelineOf(id) {
  if (!id) return null;
  try {
    const response = await fetch(`/v1/requests/${encodeURIComponent(id)}/timeline`, { headers: headers() });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
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

/** The same from the usage alone, where there is no timeline. */
function lanesOfUsage(usage) {
  return Object.entries(usage?.stages ?? {}).map(([name, stage]) => {
    // A stage that gives all of its output at its end still has a mark that can be seen.
    const first = Math.min(stage.first_output, 0.99 * stage.finished);
    return {
      name,
      about: `${name}: ${stage.input_tokens} in, ${stage.output_tokens} out`,
      parts: [{ name: "until the first output", kind: "wait", at: 0, seconds: first },
              { name: "output", kind: "work", at: first, seconds: stage.finished - first }],
    };
  });
}

/** What this page itself has seen, in milliseconds. */
function laneOfPage(times) {
  const marks = [["first text", times.text], ["first sound", times.audio], ["end", times.total]];
  return {
    name: "this page", about: "this page",
    parts: marks.filter(([, at]) => at !== undefined).map(([name, at]) => ({ name, kind: "mark", at: at / 1000, seconds: 0 })),
  };
}

const duration = (seconds) => seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;

function laneElement(lane, total) {
  const percent = (seconds) => `${(100 * Math.min(1, Math.max(0, seconds / total))).toFixed(2)}%`;
  const words = lane.parts.map((part) => part.kind === "mark"
    ? `${part.name} after ${duration(part.at)}` : `${part.name} ${duration(part.seconds)}`);
  const element = document.createElement("div"), label = document.createElement("span");
  element.className = "lane";
  element.tabIndex = 0;
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `${lane.about}; ${words.join(", ")}`);
  const tell = () => { $("details").textContent = element.getAttribute("aria-label"); };
  element.onfocus = tell;
  element.onmouseenter = tell;
  label.textContent = lane.name;
  const bar = svg("svg", { "aria-hidden": true });
  for (const part of lane.parts) {
    const x = percent(part.at);
    bar.append(part.kind === "mark"
      ? svg("line", { class: "mark", x1: x, x2: x, y1: 0, y2: 14 })
      : svg("rect", { class: part.kind, x, rx: 1.5, width: percent(Math.max(part.seconds, 0.006 * total)),
                      y: part.kind === "work" ? 1 : 5, height: part.kind === "work" ? 12 : 4 }));
  }
  element.append(label, bar);
  return element;
}

function showTimeline(timeline, usage, times, audioSeconds) {
  const lanes = timeline ? lanesOf(timeline) : lanesOfUsage(usage);
  if (!lanes.length && times.total === undefined) return;
  if (times.total !== undefined) lanes.push(laneOfPage(times));
  const total = Math.max(0.001, ...lanes.flatMap((lane) => lane.parts.map((part) => part.at + part.seconds)));
  const axis = document.createElement("div");
  axis.className = "axis";
  for (const part of [0, 0.5, 1]) {
    const tick = document.createElement("span");
    tick.textContent = duration(part * total);
    axis.append(tick);
  }
  $("timeline").dataset.source = timeline ? "pipeline" : "usage";
  $("timeline").replaceChildren(...lanes.map((lane) => laneElement(lane, total)), axis);
  $("details").textContent = timeline && timeline.outcome !== "done" ? `Ended with ${timeline.outcome}.` : "";
  const figures = [
    ["First text", times.text], ["First sound", times.audio], ["Whole answer", times.total],
  ].filter(([, value]) => value !== undefined).map(([name, value]) => [name, `${value.toFixed(0)} ms`]);
  if (audioSeconds) {
    figures.push(["Audio", `${audioSeconds.toFixed(2)} s`]);
    figures.push(["Time per second of audio", (times.total / 1000 / audioSeconds).toFixed(2)]);
  }
  if (usage) figures.push(["Tokens in, out", `${usage.prompt_tokens}, ${usage.completion_tokens}`]);
  $("figures").replaceChildren(...figures.flatMap(([name, value]) => {
    const term = document.createElement("dt"), description = document.createElement("dd");
    term.textContent = name;
    description.textContent = value;
    return [term, description];
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
    about.textContent = working ? `${stage.in_flight} working` : stage.state;
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

const SERVER_READS = /^audio\/(x-)?(wav|wave|mpeg|mp3|flac|ogg)$/;  // other sounds are decoded by the browser

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

async function toWav(blob) {
  Player.shared ??= new AudioContext();
  return wavOf(await Player.shared.decodeAudioData(await blob.arrayBuffer()));
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
  $("figures").replaceChildren();
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
