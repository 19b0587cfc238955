"use strict";
// The conversation: questions, the request that runs, and asking again. `voice.js` adds what is spoken.

import { PageError, ask, draw, film, speak } from "./api.js";
import { attachmentOf } from "./attachments.js";
import { $, announce, make } from "./common.js";
import * as messages from "./messages.js";
import { PictureView, blobOf } from "./picture.js";
import { Clip, player } from "./player.js";
import * as settings from "./settings.js";
import * as status from "./status.js";
import { clearTimeline, showTimeline, timelineOf } from "./timeline.js";
import { samplesOf, samplesOfWav } from "./wav.js";

const turns = [];       // {text, attachments, answer, question, views, view}; `answer` is null until there is one to go on from,
                        // `views` are those of all answers, `view` the one that is shown
let editPicture = null; // puts a picture into the box to be changed
let noteChange = () => {};
let running = null;     // {controller, ended} of the request that runs

/** Shows an error, with what the server said for those who want to know; null hides it. */
export function showError(error) {
  $("error").replaceChildren();
  $("error").hidden = !error;
  if (!error) return;
  $("error").append(make("span", {}, error.message));
  if (error.details) $("error").append(make("details", {}, make("summary", {}, "Details"), make("p", {}, error.details)));
}

/** Ends the request that runs, in every stage, and all sound. */
export async function stop() {
  player.stop();
  running?.controller.abort();
  await running?.ended;
}

/** Forgets the conversation. */
export async function clear() {
  await stop();
  forget(0);
  messages.clear();
  clearTimeline();
  showError(null);
}

function forget(from, keepAttachments = []) {
  for (const turn of turns.splice(from)) {
    turn.question.remove();
    turn.views.forEach((view) => view.remove());
    turn.attachments.filter((attachment) => !keepAttachments.includes(attachment)).forEach((attachment) => attachment.release());
  }
}

/** Asks a question, after what runs or plays has been ended. `edited` is the earlier question that it replaces. */
export async function send(text, attachments, edit, edited = null) {
  await stop();
  if (edited && turns.includes(edited)) forget(turns.indexOf(edited), attachments);
  await answer(addTurn(text, attachments, edit));
}

/** Appends a question. One that is `spoken` gets its text and its answer from elsewhere. */
export function addTurn(text, attachments, edit, spoken = false) {
  const turn = { text, attachments, answer: null, views: [], view: null };
  turn.question = new messages.QuestionView(turn, () => edit(turn), spoken);
  turns.push(turn);
  return turn;
}

/** Appends an answer, whose sound comes to `clip`. */
export function addAnswer(turn, clip) {
  return show(turn, new messages.AnswerView(clip, () => again(turn)));
}

function addPictures(turn, count) {
  return show(turn, new PictureView(turn.text, count, () => again(turn), editPicture));
}

/** Shows a new answer in the place of those before. */
function show(turn, view) {
  turn.view?.item.remove();
  turn.views.push(view);
  turn.view = view;
  return view;
}

/** Shows another answer to a question, from which the conversation goes on. */
function choose(turn, index) {
  const view = turn.views[index];
  if (!view) return;
  turn.view.item.replaceWith(view.item);
  turn.view = view;
  turn.answer = view.text;
  number(turn);
}

/** Says which of a question's answers is shown. */
function number(turn) {
  turn.view.showVariants(turn.views.indexOf(turn.view), turn.views.length, (index) => { choose(turn, index); changed(); });
}

/** Says that there is something new to keep. */
export const changed = () => noteChange();

/** The conversation as it is kept: [{text, attachments: [{name, blob}], answers, chosen}]; `answers` are those of the views' `kept`. */
export function snapshot() {
  return turns.filter(hasContent).map(({ text, attachments, views, view }) => {
    const whole = views.filter((each) => !each.empty);
    const files = attachments.map(({ name, blob }) => ({ name, blob }));
    return { text, attachments: files, answers: whole.map((each) => each.kept), chosen: whole.indexOf(view) };
  });
}

/** Shows a conversation that was kept, after `clear`. */
export async function restore(kept, edit) {
  for (const { text, attachments, answers, chosen } of kept) {
    const turn = addTurn(text, await Promise.all(attachments.map(({ blob, name }) => attachmentOf(blob, name))), edit);
    for (const answer of answers) {
      if (answer.pictures) {
        const { tiles } = addPictures(turn, answer.pictures.length);
        answer.pictures.forEach((picture, index) => tiles[index].show(picture, false));
      } else {
        const clip = answer.sound && new Clip(answer.rate);
        if (clip) player.add(clip, samplesOfWav(await answer.sound.arrayBuffer()));
        addAnswer(turn, clip).add(answer.text);
        if (clip) player.complete(clip);
      }
      turn.view.end("done");
    }
    choose(turn, chosen);
  }
}

/** `edit` is called with the file of a picture that is to be changed. */
export function setUp(edit) {
  editPicture = edit;
}

/** `change` is called when the conversation has something new to keep. */
export function whenChanged(change) {
  noteChange = change;
}

/** The questions and answers in words, for a model that begins to listen: [{role, text}]. */
export function inWords() {
  return turns.filter((turn) => turn.answer !== null).flatMap((turn) => [
    { role: "user", text: [turn.text, ...turn.attachments.map(({ name }) => `(attached: ${name})`)].filter(Boolean).join("\n") },
    { role: "assistant", text: turn.answer },
  ]).filter(({ text }) => text);
}

export const isLast = (turn) => turns.at(-1) === turn;

/** Asks the last question again. */
async function again(turn) {
  await stop();
  if (turn.view.empty) turn.views.splice(turn.views.indexOf(turn.view), 1)[0].remove();
  turn.answer = null;
  await answer(turn);
}

function messageOf(turn) {
  if (!turn.attachments.length) return { role: "user", content: turn.text };
  const text = turn.text ? [{ type: "text", text: turn.text }] : [];
  return { role: "user", content: [...turn.attachments.map((attachment) => attachment.part), ...text] };
}

const hasContent = (turn) => Boolean(turn.text || turn.attachments.length);

/** The conversation up to a turn. Questions that were never answered, or not understood, are left out. */
function historyOf(turn) {
  const before = turns.slice(0, turns.indexOf(turn)).filter((earlier) => earlier.answer !== null && hasContent(earlier));
  return before.flatMap((earlier) => [messageOf(earlier), { role: "assistant", content: earlier.answer }]);
}

async function answer(turn) {
  const controller = new AbortController();
  let ended;
  running = { controller, ended: new Promise((resolve) => { ended = resolve; }) };
  showError(null);
  showRunning();
  status.requestRuns(true);
  const clip = settings.speaks() ? new Clip(status.current?.sample_rate || 24000) : null;
  if (clip) player.play(clip);
  const draws = settings.draws(), view = draws ? addPictures(turn, settings.pictures()) : addAnswer(turn, clip);
  announce(draws ? `The ${settings.work()} begins.` : "The answer begins.");
  const seen = { id: null, usage: null, times: {} };
  let state = "done";
  try {
    if (draws) await paint(turn, view, controller.signal, seen);
    else await converse(turn, view, clip, controller.signal, seen);
    turn.answer = view.text;
    if (!draws) view.measure(seen.times);
    announce(draws ? `The ${settings.work()} is ready.` : view.text);
  } catch (error) {
    if (clip && player.clip === clip) player.stop();
    seen.id ??= error.requestId;
    state = controller.signal.aborted ? "stopped" : "failed";
    if (state === "stopped") turn.answer = view.text || null;
    else showError(error instanceof PageError ? error : new PageError("The page failed.", String(error)));
    if (state === "stopped") announce("Stopped.");
  } finally {
    if (clip) player.complete(clip);
    view.end(state);
    number(turn);
    if (state !== "failed") changed();
    running = null;
    ended();
    showRunning();
    status.requestRuns(false);
  }
  const timeline = await timelineOf(seen.id);  // of a failed request, too: it shows how far it got
  if (turns.at(-1) === turn && turn.view === view) showTimeline(timeline, seen.usage, seen.times, clip?.seconds ?? 0);
}

/** Makes all pictures or videos of an answer at the same time; a seed counts up, as with the server's `n`. */
async function paint(turn, view, signal, seen) {
  const began = performance.now(), fields = { model: settings.model(), prompt: turn.text, ...settings.picture() };
  const all = view.tiles.map((tile, index) => {
    const seed = fields.seed === undefined ? {} : { seed: fields.seed + index };
    return paintOne({ ...fields, ...seed }, turn, tile, signal, seen, began);
  });
  await Promise.allSettled(all);
  await Promise.all(all);
  seen.times.total = performance.now() - began;
}

async function paintOne(fields, turn, tile, signal, seen, began) {
  for await (const item of (settings.films() ? film : draw)(fields, turn.attachments, signal)) {
    if (item.id) seen.id = item.id;
    if (item.step) tile.progress(item.step, item.steps, `step ${item.step} of ${item.steps}`);
    if (item.percent) tile.progress(item.percent, 100, `${item.percent} %`);
    if (item.video) tile.show(item.video, false);
    if (item.preview) {
      seen.times.preview ??= performance.now() - began;
      tile.show(blobOf(item.preview, item.format), true);
    }
    if (item.picture) {
      tile.show(blobOf(item.picture, item.format), false);
      seen.usage = { prompt_tokens: item.usage.input_tokens, completion_tokens: item.usage.output_tokens };
    }
  }
}

async function converse(turn, view, clip, signal, seen) {
  const began = performance.now();
  const since = () => performance.now() - began;
  const times = seen.times;
  const body = {
    model: settings.model(), stream: true, stream_options: { include_usage: true }, ...settings.parameters(),
    messages: [...settings.preamble(), ...historyOf(turn), messageOf(turn)],
  };
  const reading = { model: body.model, input: turn.text, ...(settings.reads() ? settings.speech() : {}) };
  for await (const item of settings.reads() ? speak(reading, signal) : ask(body, signal)) {
    if (item.id) seen.id = item.id;
    if (item.usage) seen.usage = item.usage;
    if (item.text) {
      times.text ??= since();
      view.add(item.text);
    }
    if (item.sound && clip) {
      times.audio ??= since();
      times.smooth = Math.max(times.smooth ?? 0, since() - 1000 * clip.seconds);
      player.add(clip, samplesOf(item.sound));
      document.body.dataset.audioSeconds = clip.seconds.toFixed(3);
    }
  }
  times.total = since();
}

/** Shows the button that ends what runs or plays, in the place of the one that sends unless there is something to send. */
export function showRunning() {
  const busy = running !== null || player.playing;
  $("stop").hidden = !busy;
  $("send").hidden = busy && !$("text").value.trim();
  $("messages").ariaBusy = String(running !== null);
}
