"use strict";
// Requests to the server, and its errors in words for people.

import { $ } from "./common.js";

const AWAY = "The server cannot be reached.";
const WORDS = {  // by the code of an error; the server's own message is for programs and engineers
  overloaded: "Too many questions are being answered at the moment. Try again in a few seconds.",
  slow_client: "This connection is too slow for the answer. Try again, perhaps without sound.",
  prompt_too_long: "The conversation is too long for this model. Shorten the message, send smaller files, or start a new conversation.",
  unknown_voice: "This voice is not available. Choose another one in the settings.",
  unknown_modality: "This model does not answer in that form.",
  malformed_media: "One of the files cannot be read. Try another format.",
  deadline_exceeded: "The answer took too long. Try again, or ask for a shorter one.",
  stage_unavailable: "A part of the model is not running at the moment. Try again shortly.",
  stage_lost: "A part of the model stopped while it answered. Try again.",
  poison: "This message makes the model fail. Change it before you try again.",
  engine_error: "The model failed. Try again.",
  timeout: "The model does not react. Try again shortly.",
  aborted: "The answer was ended by the server.",
  internal_error: "The server failed.",
  session_expired: "A session is not longer than this on this server. The conversation goes on in a new one.",
  session_idle: "The server ended a session in which it heard nothing. The conversation goes on in a new one.",
};
const WORDS_BY_STATUS = {
  401: "The server asks for an API key.",
  413: "The message is too large for this server. Send fewer or smaller files.",
  429: WORDS.overloaded,
};

/** An error with a message for people, `details` with what the server said, and the request's id if it has one. */
export class PageError extends Error {
  requestId = null;
  status = 0;  // of the response, if there was one

  constructor(message, details = "") {
    super(message);
    this.details = details;
  }

  static of(error, status = 0) {
    const refused = status ? status < 500 : error?.type === "invalid_request_error";  // an event has no status
    const words = WORDS[error?.code] ?? WORDS_BY_STATUS[status]
      ?? (refused ? "The server does not accept this message." : "The server cannot answer at the moment.");
    return new PageError(words, error ? `${error.message}${error.code ? ` (${error.code})` : ""}` : `HTTP status ${status}`);
  }
}

/** A response of the server. Raises `PageError` for any other than success. */
export async function request(path, options = {}) {
  const key = $("key").value.trim();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error instanceof TypeError ? new PageError(AWAY) : error;  // else it was aborted
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw Object.assign(PageError.of(body.error, response.status), { requestId: response.headers.get("x-request-id"), status: response.status });
}

/** The data of each server-sent event of a response, until the server's [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error instanceof TypeError ? new PageError("The answer was cut short.", error.message) : error;
    });
    if (done) throw new PageError("The answer was cut short.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}

/** Asks for a picture; yields {id}, then {step, steps}, {preview, format}, and at the end {picture, format, usage}. */
export async function* draw(fields, pictures, signal) {
  let path = "/v1/images/generations", headers = { "Content-Type": "application/json" }, body = JSON.stringify(fields);
  if (pictures.length) {
    [path, headers, body] = ["/v1/images/edits", {}, new FormData()];
    for (const [name, value] of Object.entries(fields)) body.append(name, value);
    for (const { blob, name } of pictures) body.append("image", blob, name);
  }
  const response = await request(path, { method: "POST", headers, body, signal });
  yield { id: response.headers.get("x-request-id") };
  for await (const data of events(response)) {
    const event = JSON.parse(data);
    if (event.error) throw PageError.of(event.error);
    const kind = event.type.split(".")[1];
    if (kind === "progress") yield { step: event.step, steps: event.steps };
    if (kind === "partial_image") yield { preview: event.b64_json, format: event.output_format };
    if (kind === "completed") {
      yield { picture: event.b64_json, format: event.output_format, usage: event.usage };
      return;
    }
  }
}

const LOOK_MS = 500;  // between two looks at a job

/** Asks for a video; yields {id}, then {percent}, and at the end {video}, its file. */
export async function* film(fields, pictures, signal) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) body.append(name, value);
  for (const { blob, name } of pictures) body.append("input_reference", blob, name);
  const response = await request("/v1/videos", { method: "POST", body, signal });
  yield { id: response.headers.get("x-request-id") };
  let job = await response.json();
  const path = `/v1/videos/${job.id}`;
  try {
    while (job.status !== "completed") {
      if (job.status === "failed") throw PageError.of(job.error);
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      job = await (await request(path, { signal })).json();
      yield { percent: job.progress };
    }
    yield { video: await (await request(`${path}/content`, { signal })).blob() };
  } finally {
    if (signal.aborted) await request(path, { method: "DELETE" });
  }
}

/** Has a text spoken; yields {id} once it begins, then {sound} (base64 of PCM, 16 bit), and at the end {text} and {usage}. */
export async function* speak(fields, signal) {
  const response = await request("/v1/audio/speech", {
    method: "POST", headers: { "Content-Type": "application/json" }, signal,
    body: JSON.stringify({ ...fields, response_format: "pcm", stream_format: "sse" }),
  });
  yield { id: response.headers.get("x-request-id") };
  for await (const data of events(response)) {
    const event = JSON.parse(data);
    if (event.error) throw PageError.of(event.error);
    if (event.type === "speech.audio.delta") yield { sound: event.audio };
    if (event.type === "speech.audio.done") {
      yield { text: event.transcript, usage: { prompt_tokens: event.usage.input_tokens, completion_tokens: event.usage.output_tokens } };
      return;
    }
  }
}

/** Asks for an answer; yields {id} once it begins, then {text}, {sound} (base64 of PCM, 16 bit) and {usage}. */
export async function* ask(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  yield { id: response.headers.get("x-request-id") };
  for await (const data of events(response)) {
    const chunk = JSON.parse(data);
    if (chunk.error) throw PageError.of(chunk.error);
    if (chunk.usage) yield { usage: chunk.usage };
    const delta = chunk.choices[0]?.delta ?? {};
    const text = delta.content || delta.audio?.transcript;
    if (text) yield { text };
    if (delta.audio?.data) yield { sound: delta.audio.data };
  }
}
