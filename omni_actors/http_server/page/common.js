"use strict";
// What the modules of the page share: finding and making elements.

export const $ = (id) => document.getElementById(id);

/** An element with properties (`className`, `ariaLabel`, `onclick`, ...) and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** One of the symbols of index.html. */
export function icon(name) {
  return makeSvg("svg", { class: "icon", "aria-hidden": "true" }, makeSvg("use", { href: `#icon-${name}` }));
}

/** A small button with a symbol; narrow screens show only that, so the words are also its label. */
export function action(name, words, onclick) {
  const button = make("button", { type: "button", className: `action ${name}`, ariaLabel: words, title: words, onclick });
  button.append(icon(name), make("span", { className: "words" }, words));
  return button;
}

/** Says something to screen readers only. */
export function announce(words) {
  $("announcer").textContent = words;
}

export const seconds = (value) => `${value.toFixed(1)} s`;
