"use strict";
// A spoken conversation: the microphone stays open, the server finds where a turn ends, and speech interrupts the answer.

import { PageError } from "./api.js";
import * as chat from "./chat.js";
import * as captions from "./captions.js";
import { $, announce, seconds } from "./common.js";
import * as composer from "./composer.js";
import { Microphone } from "./microphone.js";
import { Clip, player } from "./player.js";
import { Session } from "./realtime.js";
import * as settings from "./settings.js";
import { animate } from "./shape.js";
import * as status from "./status.js";
import { showTimeline, timelineOf } from "./timeline.js";
import { samplesOf } from "./wav.js";

const RATE = 24000;  // Hz of the answers
const LATE = 300;  // milliseconds by which the sound of a call may be behind its events
const FLASH = 700;  // milliseconds for which an interruption is shown
const LEVEL_FALL = 0.85;  // of the level shown, from one piece of 32 ms to the next
const RACES = ["response_cancel_not_active", "item_not_found"];  // what we ask about may have ended or gone meanwhile

let session = null, microphone = null;
let starting = false, muted = false, connected = false, again = false, behind = false, hearing = false, level = 0;
const turns = new Map();    // of the user, by the id of their items
const cuts = new Map();  // answers that were cut, by item, until the server says what of them was heard
let latest = null;          // the newest turn
let silence = 0;            // milliseconds without speech after which the server takes a turn to be over
let interrupted = -Infinity;  // when an answer was cut, in milliseconds
let stopped = 0;            // when the user's turn ended, in milliseconds
let answer = null;          // {id, itemId, turn, view, clip, times, running, over}: the newest; `over` when it was heard, or cut

export const runs = () => session !== null;

// ---------------------------------------------------------------------------------------------------------------------
// What the user does

async function start() {
  if (starting || !settings.valid()) return;
  starting = true;
  chat.showError(null);
  composer.reset();
  await chat.stop();
  try {
    microphone = await Microphone.open(take, () => fail(new PageError("The microphone was unplugged, or forbidden.")));
    open();
    announce("The conversation begins: speak.");
  } catch (error) {
    chat.showError(error instanceof PageError ? error : new PageError("The microphone failed.", String(error)));
  } finally {
    starting = false;
    show();
  }
  if (!runs()) return;
  captions.clear();
  animate($("shape"), look);
  $("mute").focus();
}

function end() {
  if (!runs()) return;
  session.close();
  session = null;  // before the player stops, so that nothing more is sent
  forget();
  player.stop();
  microphone.close();
  microphone = null;
  muted = again = false;
  level = 0;
  show();
  announce("The conversation has ended.");
  $("converse").focus();
}

function fail(error) {
  end();
  chat.showError(error);
}

export const toggle = () => runs() ? end() : start();

export function toggleMute() {
  muted = !muted;
  microphone.muted = muted;
  announce(muted ? "Muted." : "You can be heard again.");
  show();
}

/** Ends the answer; without one, the conversation. Says whether there was either. */
export function leave() {
  if (!runs()) return false;
  if (answering() || player.playing) interrupt();
  else end();
  return true;
}

function interrupt() {
  interrupted = performance.now();
  if (answering() && !answer.clip) session.send("response.cancel");
  player.stop();
}

/** Begins again with an empty conversation. */
export function startOver() {
  if (!runs()) return;
  session.close();
  forget();
  open();
  show();
}

function open() {
  const callbacks = { created, event: receive, lost, failed: fail, sound: (stream) => player.follow(stream).catch(fail) };
  session = new Session(callbacks, status.current?.webrtc ? microphone.stream : null);
}

const answering = () => Boolean(answer?.running);

// ---------------------------------------------------------------------------------------------------------------------
// The session

/** Begins a session, also the one after a lost connection: the model is given the conversation in words. */
function created(about) {
  if (!about.audio.input.turn_detection) {
    fail(new PageError("This server cannot hear when you speak: its operator must install omni_actors[realtime]."));
    return;
  }
  silence = about.audio.input.turn_detection.silence_duration_ms ?? 0;
  session.send("session.update", { session: settings.session(status.current?.outputs.text ?? "") });
  for (const { role, text } of chat.inWords()) {
    const content = [{ type: role === "user" ? "input_text" : "output_text", text }];
    session.send("conversation.item.create", { item: { type: "message", role, content } });
  }
  if (again) announce("The conversation goes on.");
  connected = again = true;
  show();
}

function lost() {
  if (connected) announce("The connection was lost.");
  forget();
  show();
}

/** Ends what belongs to a session that is over. */
function forget() {
  hearing = false;
  connected = false;
  if (answering()) finish("stopped");
  answer = null;
  cuts.clear();
  for (const turn of turns.values()) turn.question.end();
  turns.clear();
  latest = null;
}

/** Sends a piece of the microphone's. */
function take({ pcm, peak }) {
  level = Math.max(muted ? 0 : peak, LEVEL_FALL * level);
  const late = Boolean(session) && !session.sound(pcm);
  if (late && !behind) chat.showError(new PageError("This connection is too slow for your voice: a part of what you said is lost."));
  behind = late;
}

const EVENTS = {
  "input_audio_buffer.speech_started": ({ item_id }) => {
    hearing = true;
    if (answering() || player.playing) interrupted = performance.now();
    if (answering()) answer.running = false;  // the server has ended it
    player.stop();
    latest = chat.addTurn("", [], composer.edit, true);
    turns.set(item_id, latest);
  },
  "input_audio_buffer.speech_stopped": () => {
    hearing = false;
    stopped = performance.now() - silence;
  },
  "conversation.item.input_audio_transcription.delta": ({ item_id, delta }) => {
    const turn = turns.get(item_id);
    turn?.question.write(turn.text + delta);
  },
  "conversation.item.input_audio_transcription.completed": ({ item_id, transcript }) => endTurn(item_id, transcript),
  "conversation.item.input_audio_transcription.failed": ({ item_id }) => endTurn(item_id),
  "conversation.item.deleted": ({ item_id }) => endTurn(item_id),
  "conversation.item.retrieved": ({ item }) => {
    const cut = cuts.get(item.id);  // the next answer may have begun meanwhile
    if (!cut) return;
    cuts.delete(item.id);
    cut.view.cut(item.content[0].transcript);
    cut.turn.answer = cut.view.text;
    chat.changed();
  },
  "response.created": ({ response }) => begin(response),
  "response.output_item.added": ({ item }) => { if (answer) answer.itemId = item.id; },
  "response.output_audio_transcript.delta": ({ delta }) => write(delta),
  "response.output_text.delta": ({ delta }) => write(delta),
  "response.output_audio.delta": ({ delta }) => {
    if (!answering()) return;
    answer.times.audio ??= since();
    answer.times.smooth = Math.max(answer.times.smooth ?? 0, since() - 1000 * answer.clip.seconds);
    player.add(answer.clip, samplesOf(delta));
    document.body.dataset.audioSeconds = answer.clip.seconds.toFixed(3);
  },
  "output_audio_buffer.started": ({ response_id }) => {
    if (answer?.id !== response_id || answer.over) return;
    answer.times.audio = answer.times.smooth = since();
    answer.clip.sounding = true;
  },
  "output_audio_buffer.stopped": ({ response_id }) => {
    const ended = answer;
    if (ended?.id === response_id) setTimeout(() => player.complete(ended.clip), LATE);
  },
  "conversation.item.truncated": ({ item_id }) => {
    if (session.calls && cuts.has(item_id)) session.send("conversation.item.retrieve", { item_id });
  },
  "response.done": ({ response }) => done(response),
  error: ({ error }) => { if (!RACES.includes(error.code)) chat.showError(PageError.of(error)); },
};

function receive(event) {
  EVENTS[event.type]?.(event);
  show();
}

function endTurn(itemId, transcript) {
  turns.get(itemId)?.question.end(transcript);
  turns.delete(itemId);
}

// ---------------------------------------------------------------------------------------------------------------------
// Answers

const since = () => performance.now() - stopped;

function begin(response) {
  chat.showError(null);
  status.requestRuns(true);
  const clip = response.output_modalities[0] === "audio" ? new Clip(RATE, session.calls) : null;
  if (clip) player.play(clip);
  answer = { id: response.id, turn: latest, view: chat.addAnswer(latest, clip), clip, times: {}, running: true, over: false, itemId: null };
}

function write(delta) {
  if (!answering()) return;
  answer.times.text ??= since();
  answer.view.add(delta);
}

async function done(response) {
  if (answer?.id !== response.id) return;
  const ended = answer;
  ended.running = false;
  if (response.status === "failed" && ended.clip && player.clip === ended.clip) player.stop();
  ended.times.total = since();
  finish({ completed: "done", incomplete: "done", failed: "failed" }[response.status] ?? "interrupted");
  const { input_tokens = 0, output_tokens = 0, stages = {} } = response.usage ?? {};
  const usage = { prompt_tokens: input_tokens, completion_tokens: output_tokens, stages };
  ended.view.measure(ended.times);
  chat.changed();
  const timeline = await timelineOf(response.id);
  if (chat.isLast(ended.turn)) showTimeline(timeline, response.usage && usage, ended.times, ended.clip?.seconds ?? 0);
}

/** Ends the newest answer: "done", or cut short. */
function finish(state) {
  answer.running = false;
  if (answer.clip && (!answer.clip.live || state === "stopped")) player.complete(answer.clip);
  if (state !== "failed") answer.turn.answer ??= answer.view.text || null;
  answer.view.end(state);
  status.requestRuns(false);
}

/** Lets the model know how much of its answer was heard when the sound was stopped before its end, by whatever. */
function onCut({ detail: { clip, heard } }) {
  if (!session || answer?.clip !== clip || answer.over) return;
  answer.over = true;
  if (answering()) session.send("response.cancel", { response_id: answer.id });
  if (!answer.itemId) return;
  if (session.calls) {
    cuts.set(answer.itemId, answer);
    session.send("output_audio_buffer.clear");
  } else if (clip.pieces.length) {
    const where = { item_id: answer.itemId, content_index: 0, audio_end_ms: Math.floor(1000 * heard) };
    session.send("conversation.item.truncate", where);
    cuts.set(answer.itemId, answer);
    session.send("conversation.item.retrieve", { item_id: answer.itemId });
  } else {
    session.send("conversation.item.delete", { item_id: answer.itemId });  // nothing was heard
    answer.view.cut("");
    answer.turn.answer = null;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is seen of it

/** What the shape is to show; null once the conversation has ended. */
function look() {
  if (!runs()) return null;
  const speaks = player.playing;
  if (answer) captions.follow(answer.view.text, answer.clip);
  return { state: $("spoken").dataset.state, level: speaks ? player.level() : level };
}

/** Sends what was typed as a turn of its own. */
function say(event) {
  event.preventDefault();
  const text = $("typed").value.trim();
  if (!text || !connected) return;
  $("typed").value = "";
  if (answering() || player.playing) interrupt();
  latest = chat.addTurn(text, [], composer.edit);
  stopped = performance.now();
  session.send("conversation.item.create", { item: { type: "message", role: "user", content: [{ type: "input_text", text }] } });
  session.send("response.create");
}

function toggleTyping() {
  $("typing").hidden = !$("typing").hidden;
  $("type").ariaExpanded = String(!$("typing").hidden);
  ($("typing").hidden ? $("type") : $("typed")).focus();
}

/** A word for the style sheet and the shape. */
function mood() {
  if (!connected) return "connecting";
  if (performance.now() - interrupted < FLASH) return "interrupted";
  if (hearing) return "hearing";
  if (player.playing) return "speaking";
  if (answering()) return "thinking";
  return muted ? "muted" : "listening";
}

function state() {
  if (!connected) return again ? "Connecting again …" : "Connecting …";
  if (hearing) return "You speak";
  if (mood() === "interrupted") return "Interrupted";
  if (player.playing) return muted ? "Speaking; you are not heard" : "Speaking: interrupt at any time";
  if (answering()) return "Thinking …";
  return muted ? "Muted: you are not heard" : "Listening";
}

function show() {
  document.body.classList.toggle("conversing", runs());
  $("spoken").hidden = !runs();
  $("composer").hidden = runs();
  $("mute").ariaPressed = String(muted);
  $("interrupt").hidden = !answering() && !player.playing;
  document.querySelector("header").inert = document.querySelector("main").inert = runs();
  if (!runs()) {
    if ($("error").parentNode !== $("write")) $("write").prepend($("error"));
    return;
  }
  if ($("error").parentNode !== $("spoken")) $("spoken").prepend($("error"));
  const before = $("spoken").dataset.state, now = mood();
  $("spoken").dataset.state = now;
  if (now === "interrupted" && before !== now) setTimeout(show, FLASH);
  $("spoken-state").textContent = state();
  const delay = answer?.times.audio;
  $("spoken-delay").textContent = delay ? `First sound ${seconds(delay / 1000)} after your last word` : "";
}

export function setUp() {
  player.addEventListener("cut", onCut);
  player.addEventListener("over", ({ detail: clip }) => { if (answer?.clip === clip) answer.over = true; });
  player.addEventListener("change", show);
  $("converse").onclick = start;
  $("end-spoken").onclick = end;
  $("type").onclick = toggleTyping;
  $("typing").addEventListener("submit", say);
  $("mute").onclick = toggleMute;
  $("interrupt").onclick = () => { interrupt(); $("mute").focus(); };
}
