"use strict";
// Captions of a spoken conversation: what the answer says, with the word that is being spoken.

import { $, make } from "./common.js";
import { player } from "./player.js";
import { speed } from "./settings.js";

const LETTERS_PER_SECOND = 15;  // of usual speech, while nobody knows how long an answer's sound will be

let shown = "";

/**
 * Splits a text at the word that is spoken after `heard` of `seconds`: [before, word, after].
 *
 * The server does not say yet when each word is spoken; the word is estimated by the share of the sound that was heard.
 */
export function split(text, heard, seconds) {
  const at = Math.min(text.length - 1, Math.floor(text.length * heard / Math.max(seconds, 0.01)));
  const from = text.lastIndexOf(" ", at) + 1, to = text.indexOf(" ", at + 1);
  const end = to < 0 ? text.length : to;
  return [text.slice(0, from), text.slice(from, end), text.slice(end)];
}

/** Shows the text of an answer, and where its sound is. */
export function follow(text, clip) {
  const plays = clip !== null && player.clip === clip && clip.pieces.length > 0;
  const seconds = clip?.complete && !clip.live ? clip.seconds : Math.max(clip?.seconds ?? 0, text.length / LETTERS_PER_SECOND / speed());
  const [before, word, after] = plays ? split(text, player.heard, seconds) : clip?.pieces.length === 0 ? ["", "", text] : [text, "", ""];
  if (`${before}|${word}|${after}` === shown) return;
  shown = `${before}|${word}|${after}`;
  const spoken = make("mark", {}, word);
  $("captions").replaceChildren(before, spoken, make("span", {}, after));
  $("captions").scrollTop = spoken.offsetTop - $("captions").clientHeight / 2;
}

/** Says how a conversation goes, until there is an answer. */
export function clear() {
  shown = "";
  $("captions").replaceChildren(make("span", {}, "Just speak. You are answered when you pause, and you may interrupt."));
}
