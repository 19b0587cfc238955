"use strict";
// Where a message is written: its text, its attachments, the microphone.

import { PageError, speak } from "./api.js";
import { attachmentOf, card } from "./attachments.js";
import * as chat from "./chat.js";
import { $, seconds } from "./common.js";
import { dragged } from "./picture.js";
import { Clip, player } from "./player.js";
import { Recording } from "./recorder.js";
import * as settings from "./settings.js";
import * as status from "./status.js";
import { samplesOf } from "./wav.js";

const SAMPLE = "The children found a small boat near the river.";  // by which a voice is heard

let attachments = [];
let reading = Promise.resolve();  // files that are being read
let recording = null;             // {taken, clock}: the microphone's, and the timer that shows its length
let starting = false;             // while the user is asked for the microphone
let edited = null;                // {turn, draft}: the question that is edited, and what was in the box before

/** Makes the box as high as its text; the style sheet says how high it may get. */
function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight}px`;
  chat.showRunning();
}

function setText(text) {
  $("text").value = text;
  grow();
}

function showAttachments() {
  $("attachments").replaceChildren(...attachments.map((attachment) => card(attachment, () => {
    attachments = attachments.filter((other) => other !== attachment);
    if (!edited) attachment.release();
    showAttachments();
    $("text").focus();
  })));
}

/** Reads files one after the other; those that cannot be used are reported, the others attached. */
export function attach(files) {
  chat.showError(null);
  reading = [...files].reduce((before, file) => before.then(async () => {
    $("progress").textContent = `reading ${file.name} …`;
    try {
      const made = await attachmentOf(file, file.name);
      if (settings.reads()) throw new PageError(`${file.name}: this model speaks what is written, and takes no files.`);
      if (settings.draws() && made.kind !== "image") throw new PageError(`${file.name}: only pictures can be changed.`);
      attachments.push(made);
      showAttachments();
    } catch (error) {
      chat.showError(error);
    }
    $("progress").textContent = "";
  }), reading);
  return reading;
}

async function send() {
  if (recording) await toggleRecording();
  await reading;
  const text = $("text").value.trim();
  if ((!text && !attachments.length) || !settings.valid()) return;
  if (settings.draws() && !text) {
    chat.showError(new PageError("Say what to change in the picture."));
    return;
  }
  const sent = attachments, replaced = edited?.turn ?? null;
  attachments = [];
  edited = null;
  $("editing").hidden = true;
  setText("");
  showAttachments();
  await chat.send(text, sent, edit, replaced);
}

/** Asks at once, and leaves what is written. `files` gives the attachments; it is called when nothing plays anymore. */
export async function ask(text, files) {
  await chat.stop();
  chat.showError(null);
  try {
    await chat.send(text, await files(), edit);
  } catch (error) {
    chat.showError(error);
  }
}

/** Puts an earlier question back into the box. */
export function edit(turn) {
  const draft = edited?.draft ?? { text: $("text").value, attachments };
  edited = { turn, draft };
  attachments = [...turn.attachments];
  setText(turn.text);
  showAttachments();
  $("editing").hidden = false;
  $("text").focus();
}

function endEdit() {
  if (!edited) return;
  attachments.filter((attachment) => !edited.turn.attachments.includes(attachment)).forEach((attachment) => attachment.release());
  setText(edited.draft.text);
  attachments = edited.draft.attachments;
  edited = null;
  showAttachments();
  $("editing").hidden = true;
  $("text").focus();
}

/** Leaves the smallest thing that is under way: a recording, an edit. Says whether there was one. */
export function leave() {
  if (recording) discardRecording();
  else if (edited) endEdit();
  else return false;
  return true;
}

/** Leaves whatever is under way, and keeps what is written. */
export function reset() {
  while (leave());
  $("text").focus();
}

/** Has the voice that is chosen say something. */
async function hearVoice() {
  await chat.stop();
  chat.showError(null);
  const clip = new Clip(status.current.sample_rate), voice = $("voice").value;
  $("sample").disabled = true;
  $("progress").textContent = "preparing the sound …";
  player.play(clip);
  try {
    const fields = { model: settings.model(), input: SAMPLE, speed: settings.speed(), ...(voice && voice !== "default" ? { voice } : {}) };
    for await (const { sound } of speak(fields)) if (sound) player.add(clip, samplesOf(sound));
  } catch (error) {
    chat.showError(error);
  }
  player.complete(clip);
  $("sample").disabled = false;
  $("progress").textContent = "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Microphone

function showRecording(clock) {
  $("record").ariaPressed = String(Boolean(recording));
  $("record").ariaLabel = recording ? "Stop recording" : "Record";
  $("record").title = recording ? "Stop recording (Alt+M)" : "Record a message by voice, and send it when you like (Alt+M)";
  $("record").querySelector(".words").textContent = recording ? "Done" : "Record";
  if (!recording) clearInterval(clock);
  $("progress").textContent = "";
}

function discardRecording() {
  recording.taken.discard();
  const { clock } = recording;
  recording = null;
  showRecording(clock);
}

export async function toggleRecording() {
  chat.showError(null);
  try {
    if (recording) {
      const { taken, clock } = recording;
      const name = `recording (${seconds(taken.seconds)})`;
      recording = null;
      showRecording(clock);
      reading = Promise.all([reading, taken.stop().then((wav) => attachmentOf(wav, name)).then((made) => attachments.push(made))]);
      await reading;
      showAttachments();
      $("send").focus();
    } else if (!starting) {
      player.stop();  // or the microphone would hear it
      starting = true;
      const taken = await Recording.start().finally(() => { starting = false; });
      const clock = setInterval(() => { $("progress").textContent = `recording ${seconds(taken.seconds)}`; }, 100);
      recording = { taken, clock };
      showRecording(clock);
    }
  } catch (error) {
    reading = Promise.resolve();
    chat.showError(error instanceof PageError ? error : new PageError("The recording failed.", String(error)));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Events

/** Whether keys are something to press here; on a phone, Enter ends a line and a button sends. */
const hasKeys = () => !matchMedia("(pointer: coarse)").matches;

const filesOf = (transfer) => [...(transfer?.files ?? [])];

export function setUp() {
  chat.setUp(async (file) => { await attach([file]); $("text").focus(); });
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("text").addEventListener("input", grow);
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && hasKeys()) { event.preventDefault(); send(); }
  });
  $("attach").onclick = () => $("file").click();
  $("file").onchange = async () => {
    const files = [...$("file").files];
    $("file").value = "";
    await attach(files);
    $("text").focus();
  };
  $("record").onclick = toggleRecording;
  $("sample").onclick = hearVoice;
  $("end-edit").onclick = endEdit;
  document.addEventListener("paste", (event) => {
    const files = filesOf(event.clipboardData);
    if (files.length) { event.preventDefault(); attach(files); }
  });
  document.addEventListener("dragover", (event) => {
    if (!dragged && !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    const files = dragged ? [dragged] : filesOf(event.dataTransfer);
    if (files.length) { event.preventDefault(); attach(files); }
  });
}
