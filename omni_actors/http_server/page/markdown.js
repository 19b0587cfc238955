"use strict";
// The model's Markdown as elements. What it writes as HTML stays text, and nothing in it is loaded from elsewhere.

import { make } from "./common.js";
import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (letter) => ESCAPES[letter]);

const parser = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ text, href }) => escape(text || href),  // a picture from elsewhere would tell who reads this
    checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
    heading({ tokens }) { return `<h3>${this.parser.parseInline(tokens)}</h3>`; },  // h1 and h2 are the page's own
  },
});

const SAFE = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h3", "hr", "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th",
    "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment with the elements of a text in Markdown. */
export function render(text) {
  const fragment = globalThis.DOMPurify.sanitize(parser.parse(text), SAFE);
  for (const link of fragment.querySelectorAll("a")) {
    if (link.href) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
    else link.replaceWith(...link.childNodes);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const region = make("div", { className: "table", tabIndex: 0, role: "group", ariaLabel: "Table" });
    table.replaceWith(region);
    region.append(table);
  }
  return fragment;
}
