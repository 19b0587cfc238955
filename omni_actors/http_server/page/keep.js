"use strict";
// Conversations that are kept in the browser, in its IndexedDB: {id, title, changed, turns}, with files and sound as blobs.

const NAME = "omni_actors", STORE = "conversations";

let opened = null;  // a promise of the database

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** The result of an action on the store. Raises `DOMException` if the browser keeps nothing, or nothing more. */
async function act(mode, action) {
  const transaction = (await open()).transaction(STORE, mode);
  const request = action(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** All conversations, the one that was changed last first. */
export async function all() {
  return (await act("readonly", (store) => store.getAll())).sort((one, other) => other.changed - one.changed);
}

export const get = (id) => act("readonly", (store) => store.get(id));
export const put = (conversation) => act("readwrite", (store) => store.put(conversation));
export const remove = (id) => act("readwrite", (store) => store.delete(id));
