"use strict";
// The conversation on the page: one list item for each question and each answer.

import { card } from "./attachments.js";
import { $, action, announce, make, seconds } from "./common.js";
import { render } from "./markdown.js";
import { player } from "./player.js";
import { speed } from "./settings.js";
import { noteSound } from "./status.js";

const NEAR = 48;  // pixels from the end within which the list follows what is added
let following = true;

function follow() {
  if (following) $("messages").scrollTop = $("messages").scrollHeight;
  showJump();
}

function showJump() {
  $("latest").hidden = following;
}

/** Makes the list follow the answer, until the user scrolls up. */
export function setUp() {
  const list = $("messages");
  list.addEventListener("scroll", () => {
    following = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR;
    showJump();
  });
  new ResizeObserver(follow).observe(list);
  $("latest").onclick = toEnd;
}

export function toEnd() {
  following = true;
  follow();
}

export function clear() {
  $("messages").replaceChildren($("empty"));
  toEnd();
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // pages without https have no clipboard
    const area = make("textarea", { value: text });
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const words = button.querySelector(".words");
  words.textContent = button.ariaLabel = "Copied";
  announce("Copied.");
  setTimeout(() => { words.textContent = button.ariaLabel = "Copy"; }, 1500);
}

/** A question: its text and attachments, with buttons to copy and edit it. One that is spoken gets its text later. */
export class QuestionView {
  constructor(turn, edit, spoken = false) {
    this.item = make("li", { className: "user" }, make("span", { className: "hidden" }, "You: "));
    if (turn.attachments.length) {
      const cards = turn.attachments.map((attachment) => card(attachment));
      this.item.append(make("ul", { className: "cards", ariaLabel: "Attachments" }, ...cards));
    }
    this.turn = turn;
    this.say = make("div", { className: "say" }, render(turn.text));
    if (turn.text || spoken) this.item.append(this.say);
    this.item.classList.toggle("working", spoken);
    this.actions = make("div", { className: "actions", hidden: spoken }, action("edit", "Edit", edit));
    if (turn.text || spoken) {
      const button = action("copy", "Copy", () => copy(turn.text, button));
      this.actions.prepend(button);
    }
    this.item.append(this.actions);
    $("messages").append(this.item);
    toEnd();
  }

  /** Shows what has been understood of a spoken question so far. */
  write(text) {
    this.turn.text = text;
    this.say.replaceChildren(render(text));
    follow();
  }

  /** Shows that no more of it will be understood. Without the whole text, what there is of it breaks off. */
  end(whole = this.turn.text && `${this.turn.text} …`) {
    this.write(whole);
    this.item.classList.remove("working");
    this.actions.hidden = !this.turn.text;
    if (!this.turn.text) this.say.replaceChildren(make("small", {}, "not written down"));
    follow();
  }

  remove() { this.item.remove(); }
}

/** Shows in a row of actions which of several answers this is. */
export function showVariants(actions, index, count, choose) {
  actions.querySelector(".variants")?.remove();
  if (count < 2) return;
  const before = action("before", "Answer before", () => choose(index - 1)), after = action("after", "Next answer", () => choose(index + 1));
  before.disabled = index === 0;
  after.disabled = index === count - 1;
  actions.append(make("span", { className: "variants" }, before, `${index + 1}/${count}`, after));
}

/** An answer while it arrives and afterwards. `again` is called to ask for another one. */
export class AnswerView {
  text = "";
  #drawn = true;

  constructor(clip, again) {
    this.clip = clip;
    this.again = again;
    this.say = make("div", { className: "say" });
    this.actions = make("div", { className: "actions" });
    this.item = make("li", { className: "assistant working" }, make("span", { className: "hidden" }, "Answer: "), this.say, this.actions);
    this.onchange = () => this.#showSound();
    player.addEventListener("change", this.onchange);
    $("messages").append(this.item);
    follow();
  }

  add(text) {
    if (this.clip && !this.text) this.actions.before(make("small", {}, "preparing the sound …"));
    this.text += text;
    if (!this.#drawn) return;
    this.#drawn = false;
    requestAnimationFrame(() => this.#draw());
  }

  /** Replaces the text by the part of it that was heard. */
  cut(text) {
    this.text = text;
    this.#drawn = false;
    this.#draw();
    this.#note("interrupted");
  }

  #note(words) {
    this.item.querySelector("small")?.remove();
    this.actions.before(make("small", {}, words));
  }

  #draw() {
    if (this.#drawn) return;
    this.#drawn = true;
    this.say.replaceChildren(render(this.text));
    follow();
  }

  #showSound() {
    if (!this.clip?.pieces.length) return;
    if (this.item.classList.contains("working")) this.item.querySelector("small")?.remove();
    const plays = player.clip === this.clip;
    const words = plays ? "Stop sound" : `Play again (${seconds(this.clip.seconds)})`;
    const button = action("play", words, () => plays ? player.stop() : player.play(this.clip));
    if (plays) button.querySelector("use").setAttribute("href", "#icon-stop");
    const before = this.actions.querySelector(".play"), focused = before === document.activeElement;
    if (before) before.replaceWith(button);
    else this.actions.prepend(button);
    if (focused) button.focus();
    follow();
  }

  /** Shows the answer as it ended: "done", "stopped" or "failed". */
  end(state) {
    this.#draw();
    this.item.querySelector("small")?.remove();
    this.item.classList.replace("working", state);
    if (state !== "done") this.#note(state);
    const again = action("again", state === "failed" ? "Try again" : "Regenerate", this.again);
    if (this.text) {
      const button = action("copy", "Copy", () => copy(this.text, button));
      this.actions.append(button);
    }
    if (this.clip?.pieces.length) this.actions.append(action("download", "Download sound", () => this.#download()));
    this.actions.append(again);
    this.#showSound();
    follow();
  }

  get empty() { return !this.text; }

  /** As it is kept. */
  get kept() {
    const sound = this.clip?.pieces.length ? this.clip.toWav() : null;
    return { text: this.text, sound, rate: this.clip?.rate ?? 0 };
  }

  /** Shows which of the answers this is; `choose` is called with the index of another one. */
  showVariants(index, count, choose) { showVariants(this.actions, index, count, choose); }

  /** Shows how fast it came; `times` are milliseconds. */
  measure(times) {
    const words = [times.text && `first word ${seconds(times.text / 1000)}`, times.audio && `first sound ${seconds(times.audio / 1000)}`];
    if (this.clip?.seconds && !this.clip.live) noteSound(this.clip.seconds * speed(), times.total / 1000);
    this.actions.append(make("span", { className: "latency", title: "From the end of your message" }, words.filter(Boolean).join(" · ")));
  }

  #download() {
    const url = URL.createObjectURL(this.clip.toWav());
    make("a", { href: url, download: "answer.wav" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  remove() {
    player.removeEventListener("change", this.onchange);
    this.item.remove();
  }
}
