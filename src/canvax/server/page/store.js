// What the browser keeps: images with their settings, and jobs that are not over.

let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("canvax", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("images", { keyPath: "id" });
      request.result.createObjectStore("jobs", { keyPath: "once" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function within(name, mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(name, mode);
    const request = act(transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

const kept = (name) => ({
  all: () => within(name, "readonly", (store) => store.getAll()),
  put: (record) => within(name, "readwrite", (store) => store.put(record)),
  delete: (id) => within(name, "readwrite", (store) => store.delete(id)),
});

export const images = kept("images");
export const unfinished = kept("jobs");

/** Also where randomUUID is missing, which wants https or localhost. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
