"use strict";
// Files that go with a message: made fit for the server, and shown as cards with a thumbnail or a button to listen.

import { PageError } from "./api.js";
import { action, icon, make } from "./common.js";
import { player } from "./player.js";
import { decode, wavOf } from "./wav.js";

const SERVER_READS = {
  image: /^image\/(png|jpeg|webp)$/,
  audio: /^audio\/(x-)?(wav|wave|mpeg|mp3|flac|ogg)$/,
  video: /^video\//,
  pdf: /^/,
};
const TEXTS = /\.(txt|md|csv|tsv|json|ya?ml|toml|ini|log|py|js|ts|c|h|cpp|rs|go|java|sh|sql|html|css|xml)$/i;
const MOST_TEXT = 200_000;        // bytes
const MOST_PIXELS = 2048 * 2048;  // more costs the model tokens and shows it little
const SOUND_RATE = 16000;         // Hz of sounds that the browser converts

/** A file: `blob` is what is sent, `url` its data: URI (of a text, the text itself), `preview` a blob: URI. */
class Attachment {
  constructor(name, kind, blob, url) {
    Object.assign(this, { name, kind, blob, url, preview: URL.createObjectURL(blob) });
  }

  /** As a part of a message. */
  get part() {
    if (this.kind === "text") return { type: "text", text: `${this.name}:\n\n${this.url}` };
    if (this.kind === "pdf") return { type: "file", file: { filename: this.name, file_data: this.url } };
    return { type: `${this.kind}_url`, [`${this.kind}_url`]: { url: this.url } };
  }

  release() { URL.revokeObjectURL(this.preview); }
}

/** Reads a file. Raises `PageError` for one that neither the server nor the browser can read. */
export async function attachmentOf(blob, name) {
  const kind = TEXTS.test(name) ? "text" : blob.type === "application/pdf" ? "pdf" : blob.type.split("/")[0];
  if (kind !== "text" && !SERVER_READS[kind]) throw new PageError(`${name}: only pictures, sounds, videos, PDF and texts can be attached.`);
  if (!blob.size) throw new PageError(`${name} is empty.`);
  if (kind === "text" && blob.size > MOST_TEXT) throw new PageError(`${name} is longer than ${MOST_TEXT / 1000} kB. Attach a part of it.`);
  try {
    if (kind === "text") return new Attachment(name, kind, blob, new TextDecoder("utf-8", { fatal: true }).decode(await blob.arrayBuffer()));
    if (kind === "image") blob = await fitImage(blob);
    if (kind === "audio" && !SERVER_READS.audio.test(blob.type)) blob = wavOf([await decode(blob, SOUND_RATE)], SOUND_RATE);
    return new Attachment(name, kind, blob, await dataUrl(blob));
  } catch (error) {
    throw new PageError(`${name} cannot be read. Try another format.`, error.message);
  }
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** The picture itself, or a smaller JPEG of one with too many pixels, or a PNG of one in a format of its own. */
async function fitImage(blob) {
  const image = await createImageBitmap(blob);  // upright, as its EXIF data says
  const scale = Math.min(1, Math.sqrt(MOST_PIXELS / (image.width * image.height)));
  if (scale === 1 && SERVER_READS.image.test(blob.type)) { image.close(); return blob; }
  const canvas = make("canvas", { width: Math.floor(scale * image.width), height: Math.floor(scale * image.height) });
  const draw = canvas.getContext("2d");
  if (scale < 1) {  // JPEG has no transparency
    draw.fillStyle = "white";
    draw.fillRect(0, 0, canvas.width, canvas.height);
  }
  draw.imageSmoothingQuality = "high";
  draw.drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return new Promise((resolve, reject) => canvas.toBlob(
    (made) => made ? resolve(made) : reject(new Error("The browser cannot encode it.")),
    scale < 1 ? "image/jpeg" : "image/png", 0.9,
  ));
}

/** A list item that shows an attachment. With `remove`, it has a button that calls it. */
export function card(attachment, remove = null) {
  const item = make("li", { className: `card ${attachment.kind}`, title: attachment.name });
  if (attachment.kind === "image") item.append(make("img", { src: attachment.preview, alt: attachment.name }));
  else {
    if (attachment.kind === "video") item.append(make("video", { src: attachment.preview, muted: true, preload: "metadata", ariaLabel: attachment.name }));
    if (attachment.kind === "audio") item.append(listenButton(attachment));
    item.append(make("span", { className: "name" }, attachment.name));
    if (["text", "pdf"].includes(attachment.kind)) item.append(make("small", {}, sizeOf(attachment.blob)));
  }
  if (remove) {
    const button = make("button", { type: "button", className: "remove", ariaLabel: `Remove ${attachment.name}`, onclick: remove });
    button.append(icon("close"));
    item.append(button);
  }
  return item;
}

const sizeOf = ({ size }) => size < 1e6 ? `${Math.ceil(size / 1000)} kB` : `${(size / 1e6).toFixed(1)} MB`;

function listenButton(attachment) {
  const button = action("play", `Listen to ${attachment.name}`, async () => {
    try {
      await player.playFile(attachment.blob);
    } catch (error) {
      button.disabled = true;
      button.title = `The browser cannot play it: ${error.message}`;
    }
  });
  return button;
}
