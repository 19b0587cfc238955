"use strict";
// A picture on the page, while it is made and afterwards.

import { $, action, make } from "./common.js";
import { showVariants, toEnd } from "./messages.js";

/** The picture of a file in base64. */
export function blobOf(base64, format) {
  const binary = atob(base64), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Blob([bytes], { type: `image/${format}` });
}

/** An answer that is a picture. `again` is called to make another one, `edit` with its file to change it. */
export class PictureView {
  text = "";  // as of an answer in words
  #blob = null;
  #progress = make("progress", { ariaLabel: "Progress of the picture" });
  #steps = make("span", { className: "muted" });
  #image = make("img", { className: "picture", hidden: true });

  constructor(prompt, again, edit) {
    this.again = again;
    this.edit = edit;
    this.#image.alt = prompt;
    this.meter = make("div", { className: "making" }, this.#progress, this.#steps);
    this.actions = make("div", { className: "actions" });
    this.item = make("li", { className: "assistant working drawn" }, make("span", { className: "hidden" }, "Answer: "),
                     this.#image, this.meter, this.actions);
    this.#image.onload = toEnd;
    $("messages").append(this.item);
    toEnd();
  }

  progress(step, steps) {
    Object.assign(this.#progress, { value: step, max: steps });
    this.#steps.textContent = `step ${step} of ${steps}`;
  }

  get empty() { return this.#blob === null; }

  /** As it is kept. */
  get kept() { return { picture: this.#blob }; }

  /** Shows which of the pictures this is; `choose` is called with the index of another one. */
  showVariants(index, count, choose) { showVariants(this.actions, index, count, choose); }

  /** Shows a preview or the picture itself. */
  show(blob, preview) {
    URL.revokeObjectURL(this.#image.src);
    this.#image.src = URL.createObjectURL(blob);
    this.#image.hidden = false;
    this.#image.classList.toggle("preview", preview);
    if (!preview) this.#blob = blob;
  }

  /** Shows the picture as it ended: "done", "stopped" or "failed". */
  end(state) {
    this.item.classList.replace("working", state);
    this.meter.hidden = true;
    if (state !== "done") this.actions.before(make("small", {}, state));
    if (this.#blob) {
      this.actions.append(action("download", "Download picture", () => this.#download()),
                          action("edit", "Edit this", () => this.edit(this.#file)));
    }
    this.actions.append(action("again", state === "failed" ? "Try again" : "Regenerate", this.again));
    toEnd();
  }

  get #file() { return new File([this.#blob], `picture.${this.#blob.type.split("/")[1]}`, { type: this.#blob.type }); }

  #download() {
    make("a", { href: this.#image.src, download: this.#file.name }).click();
  }

  remove() {
    URL.revokeObjectURL(this.#image.src);
    this.item.remove();
  }
}
