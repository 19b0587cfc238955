"use strict";
// Pictures and videos on the page, while they are made and afterwards.

import { $, action, make } from "./common.js";
import { showVariants, toEnd } from "./messages.js";

/** The picture of a file in base64. */
export function blobOf(base64, format) {
  const binary = atob(base64), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Blob([bytes], { type: `image/${format}` });
}

export let dragged = null;  // the file of the picture that is dragged over the page

/** One picture or video: with a bar while it is made, with actions once it is there. */
class Tile {
  blob = null;
  #progress = make("progress", { ariaLabel: "Progress" });
  #steps = make("span", { className: "muted" });
  #image = make("img", { className: "picture", hidden: true, draggable: true });
  #meter = make("div", { className: "making" }, this.#progress, this.#steps);
  #actions = make("div", { className: "actions" });

  constructor(prompt, edit) {
    this.edit = edit;
    this.item = make("figure", {}, this.#image, this.#meter, this.#actions);
    this.#image.alt = prompt;
    this.#image.onload = toEnd;
    this.#image.ondragstart = () => { dragged = this.blob && this.#file; };
    this.#image.ondragend = () => { dragged = null; };
  }

  progress(step, steps, words) {
    Object.assign(this.#progress, { value: step, max: steps });
    this.#steps.textContent = words;
  }

  /** Shows a preview, or the picture or video itself. */
  show(blob, preview) {
    URL.revokeObjectURL(this.#image.src);
    if (blob.type.startsWith("video/")) {
      const video = make("video", { className: "picture", controls: true, ariaLabel: this.#image.alt, onloadedmetadata: toEnd });
      this.#image.replaceWith(video);
      this.#image = video;
    }
    this.#image.src = URL.createObjectURL(blob);
    this.#image.hidden = false;
    this.#image.classList.toggle("preview", preview);
    if (!preview) this.blob = blob;
  }

  end() {
    this.#meter.hidden = true;
    if (!this.blob) return;
    this.#actions.append(action("download", `Download ${this.#kind}`, () => this.#download()));
    if (this.#kind === "picture") this.#actions.append(action("edit", "Edit this", () => this.edit(this.#file)));
  }

  get #kind() { return this.blob.type.startsWith("video/") ? "video" : "picture"; }

  get #file() { return new File([this.blob], `${this.#kind}.${this.blob.type.split("/")[1]}`, { type: this.blob.type }); }

  #download() {
    make("a", { href: this.#image.src, download: this.#file.name }).click();
  }

  release() { URL.revokeObjectURL(this.#image.src); }
}

/** An answer of one or several pictures or videos. `again` is called to make others, `edit` with the file of one to change it. */
export class PictureView {
  text = "";  // as of an answer in words

  constructor(prompt, count, again, edit) {
    this.again = again;
    this.tiles = Array.from({ length: count }, () => new Tile(prompt, edit));
    this.actions = make("div", { className: "actions" });
    const gallery = make("div", { className: "gallery" }, ...this.tiles.map(({ item }) => item));
    this.item = make("li", { className: "assistant working drawn" }, make("span", { className: "hidden" }, "Answer: "), gallery, this.actions);
    $("messages").append(this.item);
    toEnd();
  }

  get empty() { return !this.tiles.some(({ blob }) => blob); }

  /** As it is kept. */
  get kept() { return { pictures: this.tiles.map(({ blob }) => blob).filter(Boolean) }; }

  /** Shows which of the answers this is; `choose` is called with the index of another one. */
  showVariants(index, count, choose) { showVariants(this.actions, index, count, choose); }

  /** Shows the pictures as they ended: "done", "stopped" or "failed". */
  end(state) {
    this.item.classList.replace("working", state);
    this.tiles.forEach((tile) => tile.end());
    if (state !== "done") this.actions.before(make("small", {}, state));
    this.actions.append(action("again", state === "failed" ? "Try again" : "Regenerate", this.again));
    toEnd();
  }

  remove() {
    this.tiles.forEach((tile) => tile.release());
    this.item.remove();
  }
}
