"use strict";
// The list of conversations that the browser keeps: open, rename, delete, export.

import * as chat from "./chat.js";
import { $, action, announce, make } from "./common.js";
import * as keep from "./keep.js";

const LONGEST_TITLE = 60;  // letters

let current = null;  // the id of the conversation that is shown; null before its first answer
let clear = null, edit = null;
let saving = Promise.resolve();

/** Keeps the conversation of the page. `clearing` empties the page, `editing` puts a question back into the box. */
export function setUp(clearing, editing) {
  [clear, edit] = [clearing, editing];
  chat.whenChanged(() => { saving = saving.then(save).catch(refused); });
  show().catch(refused);
}

/** Notes that the conversation of the page is a new one. */
export function begin() {
  current = null;
  mark();
}

function refused(error) {
  $("conversations-note").textContent = "This browser keeps no conversations, or has no more room for them.";
  console.warn("The conversation is not kept:", error);
}

async function save() {
  const turns = chat.snapshot();
  if (!turns.length) return;
  current ??= `${Date.now()}-${Math.random()}`;
  const before = await keep.get(current);
  const title = before?.title ?? (turns[0].text || turns[0].attachments[0].name).slice(0, LONGEST_TITLE);
  await keep.put({ id: current, title, changed: Date.now(), turns });
  await show();
}

async function show() {
  const kept = await keep.all();
  $("conversations").replaceChildren(...kept.map(itemOf));
  $("conversations-note").textContent = kept.length ? "They stay in this browser." : "None yet. They stay in this browser.";
  mark();
}

function mark() {
  for (const item of $("conversations").children) item.ariaCurrent = item.dataset.id === current ? "true" : null;
}

function itemOf(conversation) {
  const open = make("button", { type: "button", className: "quiet open", title: conversation.title, onclick: () => load(conversation.id) }, conversation.title);
  const item = make("li", {}, open, action("edit", `Rename ${conversation.title}`, () => rename(conversation, open)),
                    action("download", `Export ${conversation.title}`, () => download(conversation)));
  const remove = action("delete", `Delete ${conversation.title}`, () => {
    if (remove.ariaPressed !== "true") {  // the first press asks
      remove.ariaPressed = "true";
      remove.title = "Press again to delete it";
      announce("Press again to delete it.");
      remove.onblur = () => { remove.ariaPressed = null; };
      return;
    }
    erase(conversation.id).catch(refused);
  });
  item.append(remove);
  item.dataset.id = conversation.id;
  return item;
}

async function load(id) {
  await saving;
  const { turns } = await keep.get(id);
  await clear();
  current = id;
  await chat.restore(turns, edit);
  mark();
}

function rename(conversation, button) {
  const field = make("input", { value: conversation.title, ariaLabel: "Title", maxLength: LONGEST_TITLE });
  const end = async () => {
    const title = field.value.trim() || conversation.title;
    await keep.put({ ...await keep.get(conversation.id), title });
    await show();
  };
  field.onkeydown = (event) => {
    if (event.key === "Enter") field.blur();
    if (event.key === "Escape") { event.stopPropagation(); field.value = conversation.title; field.blur(); }
  };
  field.onblur = () => end().catch(refused);
  button.replaceWith(field);
  field.select();
}

async function erase(id) {
  await saving;
  await keep.remove(id);
  if (id === current) {
    await clear();
    current = null;
  }
  await show();
}

const dataUrl = (blob) => new Promise((resolve) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.readAsDataURL(blob);
});

/** A conversation in Markdown: files, pictures and sound are data: URIs in it, so it is one file that opens everywhere. */
async function markdownOf({ title, turns }) {
  const parts = [`# ${title}`];
  const media = async (blob, name) => blob.type.startsWith("image/") ? `![${name}](${await dataUrl(blob)})`
    : blob.type.startsWith("audio/") ? `<audio controls src="${await dataUrl(blob)}"></audio>`
    : blob.type.startsWith("video/") ? `<video controls src="${await dataUrl(blob)}"></video>` : `[${name}](${await dataUrl(blob)})`;
  for (const { text, attachments, answers, chosen } of turns) {
    parts.push("## You", ...await Promise.all(attachments.map(({ blob, name }) => media(blob, name))), text);
    const answer = answers[chosen];
    if (!answer) continue;
    parts.push("## Answer", answer.text ?? "");
    if (answer.sound) parts.push(await media(answer.sound, "sound"));
    for (const picture of answer.pictures ?? []) parts.push(await media(picture, "picture"));
  }
  return parts.filter(Boolean).join("\n\n");
}

async function download(conversation) {
  const text = await markdownOf(await keep.get(conversation.id));
  const url = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  make("a", { href: url, download: `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-")}.md` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
